"""The checks of L1, function by function.

Owns: probes that call single functions of ``mini_engine.model`` and ``mini_engine.attention.dense``, and what they must
give. Needs no later lesson; blocks and whole models are in ``runs.py``. Bits are compared with transformers' own
modules, values with float64 rows.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from smoke.framework import peer, rows
from smoke.framework.cases import DTYPES, random_tensor
from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise, close
from smoke.framework.pretend_gpu import PretendGpu, device_of

REGISTRY = Registry()

NORM_CASES = (
    *(("rows", (5, 96), 1e-6), ("heads", (7, 3, 20), 1e-5), ("tiny values", (4, 64), 1e-2)),
    *(("one head", (4, 1, 20), 1e-6), ("one row", (1, 24), 1e-6), ("heads that lie apart", (3, 5, 16), 1e-6)),
)
ROTARY_CASES = ((32, 1e4), (20, 1e6), (128, 5e5))  # head_dim, theta
FLOAT64_CASE = "under torch.set_default_dtype(torch.float64)"
POSITIONS = [0, 1, 2, 3, 17, 100, 99, 4095, 40000]
# Hq, Hkv, D, Tq, Tk: whole prompts, a decode step, chunks in the middle; two with dimensions of the same size
ATTENTION_CASES = (
    *((6, 2, 32, 7, 7), (3, 3, 16, 1, 1), (5, 1, 24, 1, 19), (4, 2, 20, 33, 33), (9, 3, 64, 5, 40)),
    *((4, 2, 4, 4, 4), (6, 2, 2, 2, 9)),
)


# For bits alone: a row of 300 scores rounds in more places than float64 loops have time for.
WIDE_CASES = (*ATTENTION_CASES, (6, 2, 32, 128, 300))


def both_dtypes() -> Iterator[tuple[str, torch.dtype]]:
    """Yield the name and the torch dtype of float32 and bfloat16."""
    yield from DTYPES.items()


# L1.A ---------------------------------------------------------------------------------------------------------------


def norm_inputs(seed: int, dtype: str) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Yield name, x, weight and eps; one case is so small that eps decides, and one is not contiguous."""
    for index, (name, shape, eps) in enumerate(NORM_CASES):
        x = random_tensor(*shape, seed=seed + index, dtype=dtype) * (0.01 if name == "tiny values" else 3.0)
        x = x.transpose(0, 1).contiguous().transpose(0, 1) if name == "heads that lie apart" else x
        weight = 1.0 + 0.5 * random_tensor(shape[-1], seed=seed + 50 + index)
        yield f"{name} {list(shape)}, eps {eps:g}, {dtype}", x, weight.to(DTYPES[dtype]), eps


def norm_probe(seed: int) -> Values:
    """Norm every input and return what became of it and of the input."""
    from mini_engine.model import rms_norm

    values: Values = {}
    for dtype in DTYPES:
        for name, x, weight, eps in norm_inputs(seed, dtype):
            values[name] = rms_norm(x, weight, eps)
            values[f"input after the call, {name}"] = x
    return values


def norm_peer(seed: int) -> Values:
    """Return transformers' norm of every input, and the inputs unchanged."""
    values: Values = {}
    for dtype in DTYPES:
        for name, x, weight, eps in norm_inputs(seed, dtype):
            values[name] = peer.rms_norm(x, weight, eps)
            values[f"input after the call, {name}"] = x
    return values


def norm_values_probe(seed: int) -> Values:
    """Norm the float32 inputs."""
    from mini_engine.model import rms_norm

    return {name: rms_norm(x, weight, eps) for name, x, weight, eps in norm_inputs(seed, "float32")}


def norm_spec(seed: int) -> Values:
    """Norm the float32 inputs row by row in float64."""
    return {name: rows.rms_norm(x, weight, eps) for name, x, weight, eps in norm_inputs(seed, "float32")}


REGISTRY.add(
    "L1.A.values",
    "Every row is divided by its root mean square, eps inside the root, and scaled by the weight (float64 rows, 1e-5).",
    norm_values_probe,
    close(norm_spec, 1e-5),
)
REGISTRY.add(
    "L1.A.bits",
    "rms_norm has the bits of transformers' Qwen3RMSNorm in float32 and bfloat16 and leaves its input alone.",
    norm_probe,
    bitwise(norm_peer),
)


# L1.B ---------------------------------------------------------------------------------------------------------------


def frequencies_probe(seed: int) -> Values:
    """Compute the frequencies of three shapes, and one where torch makes float64 numbers unless it is asked."""
    from mini_engine.model import rotary_frequencies

    values: Values = {f"D={dim}, theta={theta:g}": rotary_frequencies(dim, theta) for dim, theta in ROTARY_CASES}
    torch.set_default_dtype(torch.float64)
    try:
        values[FLOAT64_CASE] = rotary_frequencies(*ROTARY_CASES[0])
    finally:
        torch.set_default_dtype(torch.float32)
    return values


def frequencies_peer(seed: int) -> Values:
    """Return transformers' ``inv_freq``; torch's default dtype changes nothing."""
    values: Values = {f"D={dim}, theta={theta:g}": peer.rotary_frequencies(dim, theta) for dim, theta in ROTARY_CASES}
    return values | {FLOAT64_CASE: peer.rotary_frequencies(*ROTARY_CASES[0])}


def table_probe(seed: int) -> Values:
    """Compute cosine and sine of positions that start anywhere and are not sorted."""
    from mini_engine.model import rotary_table

    values: Values = {}
    for dim, theta in ROTARY_CASES:
        for name, dtype in both_dtypes():
            frequencies = peer.rotary_frequencies(dim, theta)
            cos, sin = rotary_table(torch.tensor(POSITIONS), frequencies, dtype)
            values[f"D={dim}, theta={theta:g}, {name}"] = {"cos": cos, "sin": sin}
    return values


def table_peer(seed: int) -> Values:
    """Return transformers' cosine and sine."""
    values: Values = {}
    for dim, theta in ROTARY_CASES:
        for name, dtype in both_dtypes():
            cos, sin = peer.rotary_table(torch.tensor(POSITIONS), dim, theta, dtype)
            values[f"D={dim}, theta={theta:g}, {name}"] = {"cos": cos, "sin": sin}
    return values


def turn_inputs(seed: int) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Yield name, x [T, heads, D], cos and sin [T, D]."""
    for index, (dim, theta) in enumerate(ROTARY_CASES):
        for name, dtype in both_dtypes():
            x = random_tensor(len(POSITIONS), 3, dim, seed=seed + index, dtype=name)
            cos, sin = peer.rotary_table(torch.tensor(POSITIONS), dim, theta, dtype)
            yield f"D={dim}, theta={theta:g}, {name}", x, cos, sin


def turn_probe(seed: int) -> Values:
    """Rotate heads with a given table."""
    from mini_engine.model import apply_rotary

    values: Values = {}
    for name, *inputs in turn_inputs(seed):
        values[name] = apply_rotary(*inputs)
        values[f"after the call, {name}"] = dict(zip(("x", "cos", "sin"), inputs, strict=True))
    return values


def turn_peer(seed: int) -> Values:
    """Return transformers' rotated heads, and the inputs unchanged."""
    values: Values = {}
    for name, *inputs in turn_inputs(seed):
        values[name] = peer.apply_rotary(*inputs)
        values[f"after the call, {name}"] = dict(zip(("x", "cos", "sin"), inputs, strict=True))
    return values


def half_probe(seed: int) -> Values:
    """Turn a row of distinct numbers by a quarter, and rows with one and with two dimensions in front."""
    from mini_engine.model import rotate_half

    return {
        "[1 2 3 4 5 6]": rotate_half(torch.tensor([1.0, 2, 3, 4, 5, 6])),
        "[3, 2]": rotate_half(torch.tensor([[1.0, 2], [3, 4], [5, 6]])),
        "[2, 2, 4]": rotate_half(torch.arange(16.0).reshape(2, 2, 4)),
    }


def half_spec(seed: int) -> Values:
    """Write the answers out."""
    return {
        "[1 2 3 4 5 6]": torch.tensor([-4.0, -5, -6, 1, 2, 3]),
        "[3, 2]": torch.tensor([[-2.0, 1], [-4, 3], [-6, 5]]),
        "[2, 2, 4]": torch.tensor([[[-2.0, -3, 0, 1], [-6, -7, 4, 5]], [[-10, -11, 8, 9], [-14, -15, 12, 13]]]),
    }


def whole_turn_probe(seed: int) -> Values:
    """Rotate heads from position and theta alone, with small positions, where float32 angles are exact enough."""
    from mini_engine.model import apply_rotary, rotary_frequencies, rotary_table

    x = random_tensor(6, 2, 16, seed=seed)
    cos, sin = rotary_table(torch.tensor([0, 1, 5, 3, 9, 30]), rotary_frequencies(16, 1e4), torch.float32)
    return {"positions 0 1 5 3 9 30": apply_rotary(x, cos, sin)}


def whole_turn_spec(seed: int) -> Values:
    """Rotate pairs as complex numbers."""
    x = random_tensor(6, 2, 16, seed=seed).double().tolist()
    turned = [[rows.rotate(head, p, 1e4) for head in row] for row, p in zip(x, (0, 1, 5, 3, 9, 30), strict=True)]
    return {"positions 0 1 5 3 9 30": torch.tensor(turned, dtype=torch.float64)}


REGISTRY.add(
    "L1.B.frequencies",
    "The angle of pair i grows by theta ** (-2i / D) per position, with transformers' bits.",
    frequencies_probe,
    bitwise(frequencies_peer),
)
REGISTRY.add(
    "L1.B.half",
    "A quarter turn maps the pair (x[i], x[i + D/2]) to (-x[i + D/2], x[i]).",
    half_probe,
    bitwise(half_spec),
)
REGISTRY.add(
    "L1.B.table",
    "Cosine and sine of any positions have transformers' bits: float32 angles, cast to the dtype at the end.",
    table_probe,
    bitwise(table_peer),
    asks_peer=True,
)
REGISTRY.add(
    "L1.B.turn",
    "Applying a table to heads [T, heads, D] has transformers' bits and leaves its inputs alone.",
    turn_probe,
    bitwise(turn_peer),
    asks_peer=True,
)
REGISTRY.add(
    "L1.B.values",
    "From position and theta to rotated heads: each pair is a complex number turned by its angle (float64, 1e-5).",
    whole_turn_probe,
    close(whole_turn_spec, 1e-5),
)


# L1.C, L1.D ---------------------------------------------------------------------------------------------------------


def qkv(seed: int, shape: tuple[int, int, int, int, int], dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q [Hq, Tq, D], k and v [Hkv, Tk, D]."""
    heads, kv_heads, dim, q_len, kv_len = shape
    q = random_tensor(heads, q_len, dim, seed=seed, dtype=dtype)
    k = random_tensor(kv_heads, kv_len, dim, seed=seed + 1, dtype=dtype)
    return q, k, random_tensor(kv_heads, kv_len, dim, seed=seed + 2, dtype=dtype)


def describe(shape: tuple[int, int, int, int, int], dtype: str) -> str:
    """Name an attention case."""
    heads, kv_heads, dim, q_len, kv_len = shape
    return f"{heads} query and {kv_heads} key heads of {dim}, {q_len} queries over {kv_len} keys, {dtype}"


MASKS = ((1, 1), (4, 4), (1, 6), (3, 7), (2, 5))


def mask_probe(seed: int) -> Values:
    """Build masks, and one on another device."""
    from mini_engine.attention.dense import causal_mask

    values: Values = {f"{q_len} queries, {kv_len} keys": causal_mask(q_len, kv_len) for q_len, kv_len in MASKS}
    with PretendGpu():
        return values | {"device": device_of(causal_mask(3, 7, "cuda")).type}


def device_on_gpu(kernel: Any) -> str:
    """Attend on another device: what is made on the CPU cannot be combined with q, k and v -> where the result is."""
    with PretendGpu():
        return device_of(kernel(*(x.to("cuda") for x in qkv(0, CALLS["a chunk"], "float32")))).type


def mask_spec(seed: int) -> Values:
    """Query i stands at position kv_len - q_len + i and sees the keys up to there."""
    values: Values = {
        f"{q_len} queries, {kv_len} keys": torch.tensor(
            [[key <= kv_len - q_len + query for key in range(kv_len)] for query in range(q_len)]
        )
        for q_len, kv_len in MASKS
    }
    return values | {"device": "cuda"}


def kernel_probe(kernel_name: str, shapes: tuple[tuple[int, int, int, int, int], ...], dtypes: tuple[str, ...]) -> Any:
    """Return a probe that calls one kernel on every case."""

    def probe(seed: int) -> Values:
        from mini_engine.attention import dense

        return on_cases(getattr(dense, kernel_name), seed, shapes, dtypes)

    return probe


def on_cases(
    kernel: Any, seed: int, shapes: tuple[tuple[int, int, int, int, int], ...], dtypes: Iterable[str]
) -> Values:
    """Call ``kernel`` on every case, and keep its inputs as they are after the call."""
    values: Values = {}
    for shape in shapes:
        for dtype in dtypes:
            inputs = qkv(seed, shape, dtype)
            values[describe(shape, dtype)] = kernel(*inputs)
            values[f"after the call, {describe(shape, dtype)}"] = dict(zip("qkv", inputs, strict=True))
    return values


def kernel_peer(implementation: str, shapes: tuple[tuple[int, int, int, int, int], ...]) -> Any:
    """Return transformers' attention on every case."""
    return lambda seed: on_cases(lambda q, k, v: peer.attention(q, k, v, implementation), seed, shapes, DTYPES)


def kernel_spec(seed: int) -> Values:
    """Attend row by row in float64."""
    return on_cases(rows.causal_attention, seed, ATTENTION_CASES, ("float32",))


def softmax_inputs() -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Yield decode steps of 512 heads in bfloat16 that give back their weights: the values are unit vectors.

    The scores are such that torch's softmax of bfloat16 rounds one of the weights otherwise than one of float32 does.
    Then two queries over keys whose scores are lower than any number that a mask is likely to have for minus infinity.
    """
    far = torch.full((1, 2, 1), 2.0**17, dtype=torch.bfloat16)
    yield "scores below -1e10", far, -far, torch.tensor([[[10.0], [20.0]]], dtype=torch.bfloat16)
    for seed in (0, 17, 49):
        q, k = torch.zeros(512, 1, 64), torch.zeros(512, 33, 64)
        q[..., 0] = 8.0
        k[..., 0] = 5.0 * random_tensor(512, 33, seed=seed)
        v = torch.eye(33, 64).expand(512, -1, -1).contiguous()
        yield f"scores {seed}", q.bfloat16(), k.bfloat16(), v.bfloat16()


def softmax_probe(seed: int) -> Values:
    """Attend where a softmax in bfloat16 shows, and on another device."""
    from mini_engine.attention.dense import eager_attention

    values: Values = {name: eager_attention(*inputs) for name, *inputs in softmax_inputs()}
    return values | {"device": device_on_gpu(eager_attention)}


def softmax_peer(seed: int) -> Values:
    """Return transformers' attention."""
    return {"device": "cuda", **{name: peer.attention(q, k, v, "eager") for name, q, k, v in softmax_inputs()}}


def dense_probe(seed: int) -> Values:
    """Attend with token-first tensors through ``DenseAttention``, one token too, and through a kernel of the probe."""
    from mini_engine.attention.dense import DenseAttention, eager_attention

    def marked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat((k + 10 * v, 100 * q[k.shape[0] :]))  # says where each input went

    q, k, v = (x.transpose(0, 1) for x in qkv(seed, (6, 2, 32, 9, 9), "float32"))
    return {
        "eager kernel": DenseAttention(eager_attention)(3, q, k, v),
        "eager kernel, one token": DenseAttention(eager_attention)(3, q[:1], k[:1], v[:1]),
        "kernel of the caller": DenseAttention(marked)(0, q, k, v),
    }


def dense_peer(seed: int) -> Values:
    """Compute the same with heads first."""
    q, k, v = qkv(seed, (6, 2, 32, 9, 9), "float32")
    return {
        "eager kernel": peer.attention(q, k, v, "eager").transpose(0, 1),
        "eager kernel, one token": peer.attention(q[:, :1], k[:, :1], v[:, :1], "eager").transpose(0, 1),
        "kernel of the caller": torch.cat((k + 10 * v, 100 * q[2:])).transpose(0, 1),
    }


class FusedCalls(TorchFunctionMode):
    """Notes how torch's fused attention is called: with a mask or its own causal one, and with how many key heads."""

    def __init__(self) -> None:
        """Begin with no call."""
        super().__init__()
        self.calls: list[list[int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a call of the fused attention and go on."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            causal = args[5] if len(args) > 5 else kwargs.get("is_causal", False)
            key = args[1] if len(args) > 1 else kwargs["key"]
            self.calls.append([mask is not None, bool(causal), key.shape[-3]])
        return func(*args, **kwargs)


CALLS = {
    **{"a whole prompt": (6, 2, 32, 7, 7), "a single query": (5, 1, 24, 1, 19), "a chunk": (9, 3, 64, 5, 40)},
    "a prompt of one token": (3, 3, 16, 1, 1),
}
NOTED = "[a mask is given, is_causal, heads of the given keys] of each call"


def calls_probe(seed: int) -> Values:
    """Note the calls of the fused kernel for a whole prompt, a single query and a chunk in the middle."""
    from mini_engine.attention.dense import sdpa_attention

    values: Values = {}
    for name, shape in CALLS.items():
        with FusedCalls() as noted:
            sdpa_attention(*qkv(seed, shape, "float32"))
        values[f"{name}: {NOTED}"] = noted.calls
    return values | {"device of a chunk": device_on_gpu(sdpa_attention)}


def calls_spec(seed: int) -> Values:
    """Write down what the page says; ``enable_gqa`` lets the kernel share heads, so none is copied."""
    masks = {"a whole prompt": [False, True], "a chunk": [True, False]}
    values: Values = {
        f"{name}: {NOTED}": [[*masks.get(name, [False, False]), kv_heads]] for name, (_, kv_heads, *_) in CALLS.items()
    }
    return values | {"device of a chunk": "cuda"}


WHOLE_OR_DECODE = tuple(shape for shape in ATTENTION_CASES if shape[3] in (1, shape[4]))
REGISTRY.add(
    "L1.C.mask",
    "Query i sees the keys up to its own position, the last query sees every key.",
    mask_probe,
    bitwise(mask_spec),
)
REGISTRY.add(
    "L1.C.values",
    "eager_attention is softmax(q k / sqrt(D)) v over the keys that are not in the future (float64 rows, 1e-5).",
    kernel_probe("eager_attention", ATTENTION_CASES, ("float32",)),
    close(kernel_spec, 1e-5),
)
REGISTRY.add(
    "L1.C.bits",
    "eager_attention has the bits of transformers' eager attention, in both dtypes, and leaves its inputs alone.",
    kernel_probe("eager_attention", WIDE_CASES, tuple(DTYPES)),
    bitwise(kernel_peer("eager", WIDE_CASES)),
)
REGISTRY.add(
    "L1.C.softmax",
    "The softmax of bfloat16 scores is taken in float32 and cast back, as transformers does; a hidden key has no "
    "weight, however low the other scores are. The mask lies on the device of q.",
    softmax_probe,
    bitwise(softmax_peer),
)
REGISTRY.add(
    "L1.C.dense",
    "DenseAttention hands tokens-first tensors to its kernel heads first and gives the result back tokens first.",
    dense_probe,
    bitwise(dense_peer),
)
REGISTRY.add(
    "L1.D.values",
    "sdpa_attention is causal attention for whole prompts, single queries and chunks in the middle (float64, 1e-5).",
    kernel_probe("sdpa_attention", ATTENTION_CASES, ("float32",)),
    close(kernel_spec, 1e-5),
)
REGISTRY.add(
    "L1.D.bits",
    "sdpa_attention has the bits of transformers' sdpa attention for whole prompts and single queries.",
    kernel_probe("sdpa_attention", WHOLE_OR_DECODE, tuple(DTYPES)),
    bitwise(kernel_peer("sdpa", WHOLE_OR_DECODE)),
)
REGISTRY.add(
    "L1.D.calls",
    "A whole prompt is one call with the kernel's own causal mask, a single query has no mask, a chunk has one, on the "
    "device of q.",
    calls_probe,
    bitwise(calls_spec),
)
