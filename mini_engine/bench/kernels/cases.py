"""What ``bench kernels`` runs: one operation at one size, its reference, its peers, and the least memory traffic.

Bytes are those that an operation cannot avoid: every input read once and every output written once. A kernel that reads
something twice from memory is further from the limit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.grammar.masks import num_words, pack_allowed
from mini_engine.kernels import kv_store, matmul, rms_norm, rotary, silu_and_mul, token_bitmask
from mini_engine.model import rotary_frequencies, rotary_table

Inputs = tuple[Any, ...]
Function = Callable[..., Any]
Check = Callable[[Any, Any, Inputs], str | None]

EPS = 1e-6
TOKENS_PER_ALLOWED = 512  # a grammar that allows one token in so many
BANDWIDTH, MATMUL = "bandwidth", "matmul"  # limits of the device, as the first word of a goal
BANDWIDTH_GOAL = (BANDWIDTH, 0.8)
LARGE_BYTES = 64 << 20  # a share of the bandwidth is promised from this size on


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that an operation sees."""

    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    layers: int


SHAPES = {
    "0.6b": Shape(1024, 16, 8, 128, 3072, 151_936, 28),  # Qwen3-0.6B
    "4b": Shape(2560, 32, 8, 128, 9728, 151_936, 36),  # Qwen3-4B
    "toy": Shape(24, 4, 2, 16, 40, 80, 2),  # for the interpreter
}


@dataclass(frozen=True)
class Sizes:
    """The sizes at which cases run."""

    rows: tuple[int, ...]  # tokens of a step
    mask_rows: tuple[int, ...]
    contexts: tuple[int, ...]  # keys of a decoding sequence
    batches: tuple[int, ...]  # decoding sequences
    prompts: tuple[int, ...]  # tokens
    prompt_batches: tuple[int, ...]
    sampled_rows: tuple[int, ...]
    product_rows: tuple[int, ...]
    engine_batches: tuple[int, ...]
    engine_tokens: int  # of a prompt, and generated


FULL = Sizes(
    (64, 32_768),
    (64, 256),
    (4096, 8192, 16_384, 32_768),
    (1, 4, 16, 64),
    (512, 2048, 8192),
    (1, 4),
    (1, 16, 64),
    (1, 16, 512),
    (1, 16, 64),
    128,
)
QUICK = Sizes((32_768,), (256,), (4096,), (1, 16), (2048,), (1,), (64,), (1, 512), (16,), 32)
TOY = Sizes((3,), (2,), (40,), (2,), (20,), (2,), (2,), (1, 3), (2,), 3)


@dataclass(frozen=True)
class Setting:
    """Where and in which shapes the cases are made. ``compiled``: whether torch.compile is one of the peers."""

    shape: Shape
    sizes: Sizes
    device: torch.device
    dtype: torch.dtype
    page_size: int = 16
    compiled: bool = False

    def normal(self, seed: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw normal numbers on the device."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device, dtype=dtype or self.dtype)

    @property
    def rounding(self) -> float:
        """How far two results may be apart, relative to the largest number of a row: two roundings to the dtype."""
        return 2 * torch.finfo(self.dtype).eps if self.dtype != torch.float32 else 1e-5

    def peers(self, reference: Function, **others: Function) -> dict[str, Function]:
        """Return the peers of an operation: the others, and its reference through torch.compile."""
        compiled = {"torch.compile": torch.compile(reference, dynamic=False)} if self.compiled else {}
        return {**compiled, **others}


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    ``make``: from a seed to the inputs of ``kernel``, ``reference`` and ``peers``, which may change them in place.
    ``num_bytes`` and ``num_flops``: the least that the operation needs. ``goal``: a limit of the device and the least
    share of it, or a peer and how many times longer it must take. ``tolerance``: largest error over the largest number
    of a row, 0 for equal bits. ``check``: replaces ``tolerance`` and returns what is wrong.
    """

    part: str
    name: str
    size: str
    make: Callable[[int], Inputs]
    kernel: Function
    reference: Function
    num_bytes: int
    num_flops: int = 0
    peers: dict[str, Function] = field(default_factory=dict)
    goal: tuple[str, float] | None = None
    tolerance: float = 0.0
    check: Check | None = None
    in_place: bool = False
    is_reference_timed: bool = True

    def verify(self, seed: int) -> None:
        """Assert that kernel and reference agree: on what they return, and on the inputs that they change."""
        inputs = self.make(seed)
        others = tuple(copied(each) for each in inputs) if self.in_place else inputs
        got = self.kernel(*inputs)
        expected = self.reference(*others)
        if self.check is not None:
            fault = self.check(got, expected, inputs)
        else:
            if self.in_place:
                got, expected = (got, inputs), (expected, others)
            error = largest_error(got, expected)
            fault = None if error <= self.tolerance else f"the largest error is {error:.2g}, not {self.tolerance:.2g}"
        assert fault is None, f"it differs from its reference: {fault}"


def copied(value: Any) -> Any:
    """Return a copy of a tensor with its strides; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return fresh.copy_(value)


def tensors_of(result: Any) -> list[Tensor]:
    """Return the tensors of a result, in order."""
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in tensors_of(part)] if isinstance(result, tuple) else []


def largest_error(got: Any, expected: Any) -> float:
    """Return the largest error over the largest finite number of its row, 0.0 for equal bits.

    Infinity where only one of the two is finite, where integers differ, and for NaN.
    """
    error = 0.0
    for ours, theirs in zip(tensors_of(got), tensors_of(expected), strict=True):
        if torch.equal(ours, theirs):
            continue
        if not ours.is_floating_point() or not same_but_for_finite(ours, theirs):
            return torch.inf
        wide = theirs.double().nan_to_num(0.0, 0.0, 0.0)
        apart = (ours.double().nan_to_num(0.0, 0.0, 0.0) - wide).abs().amax(-1)
        error = max(error, float((apart / wide.abs().amax(-1).clamp(min=1e-30)).max()))
    return error


def same_but_for_finite(ours: Tensor, theirs: Tensor) -> bool:
    """Whether both have the same infinities at the same places, and no NaN."""
    finite = ours.isfinite()
    return torch.equal(finite, theirs.isfinite()) and torch.equal(ours[~finite], theirs[~finite])


def norm_cases(setting: Setting) -> Iterator[Case]:
    """Yield the operations between two matrix products: norms, rotation, activation."""
    for rows in setting.sizes.rows:
        yield from (make(setting, rows) for make in (norm_case, add_norm_case, rotary_case, silu_case))


def large(num_bytes: int) -> tuple[str, float] | None:
    """Return the goal of an operation that memory limits; ``None`` if it is too small to fill the device."""
    return BANDWIDTH_GOAL if num_bytes >= LARGE_BYTES else None


def bandwidth_case(
    setting: Setting,
    part: str,
    size: str,
    make: Callable[[int], Inputs],
    pair: tuple[Function, Function],
    num_bytes: int,
    **more: Any,
) -> Case:
    """Return the case of a kernel that memory limits. ``pair``: the kernel and its reference; ``more``: of ``Case``."""
    kernel, reference = pair
    more = {"peers": setting.peers(reference), "goal": large(num_bytes)} | more
    return Case(part, kernel.__name__, size, make, kernel, reference, num_bytes, **more)


def norm_case(setting: Setting, rows: int) -> Case:
    """Norm ``rows`` rows: read and written once, the weight read once."""
    width, item = setting.shape.hidden, setting.dtype.itemsize
    num_bytes = (2 * rows * width + width) * item

    def make(seed: int) -> Inputs:
        return setting.normal(seed, rows, width), setting.normal(seed + 1, width), EPS

    pair = rms_norm.rms_norm, rms_norm.rms_norm_reference
    peers = setting.peers(pair[1], **{"F.rms_norm": lambda x, weight, eps: F.rms_norm(x, (width,), weight, eps)})
    more = {"peers": peers, "tolerance": setting.rounding}
    return bandwidth_case(setting, "norm", f"{rows} x {width}", make, pair, num_bytes, **more)


def add_norm_case(setting: Setting, rows: int) -> Case:
    """Add and norm ``rows`` rows: both summands read, the sum and its norm written."""
    width, item = setting.shape.hidden, setting.dtype.itemsize
    num_bytes = (4 * rows * width + width) * item

    def make(seed: int) -> Inputs:
        x = setting.normal(seed, rows, width)
        residual = setting.normal(seed + 1, rows, width)
        return x, residual, setting.normal(seed + 2, width), EPS

    pair = rms_norm.add_rms_norm, rms_norm.add_rms_norm_reference
    more = {"tolerance": setting.rounding, "in_place": True}
    return bandwidth_case(setting, "norm", f"{rows} x {width}", make, pair, num_bytes, **more)


def rotary_case(setting: Setting, rows: int) -> Case:
    """Turn the heads of ``rows`` tokens in place: read and written once, and half of each table read."""
    shape = setting.shape
    item = setting.dtype.itemsize
    heads = shape.q_heads + shape.kv_heads
    num_bytes = (2 * rows * heads * shape.head_dim + rows * shape.head_dim) * item
    frequencies = rotary_frequencies(shape.head_dim, 1e6).to(setting.device)

    def make(seed: int) -> Inputs:
        q = setting.normal(seed, rows, shape.q_heads, shape.head_dim)
        k = setting.normal(seed + 1, rows, shape.kv_heads, shape.head_dim)
        return q, k, *rotary_table(torch.arange(rows, device=setting.device), frequencies, setting.dtype)

    pair = rotary.apply_rotary, rotary.apply_rotary_reference
    size = f"{rows} x {heads} x {shape.head_dim}"
    more = {"tolerance": setting.rounding, "in_place": True}
    return bandwidth_case(setting, "norm", size, make, pair, num_bytes, **more)


def silu_case(setting: Setting, rows: int) -> Case:
    """Activate ``rows`` rows: gate and up read, their product written."""
    inner = setting.shape.inner
    num_bytes = 3 * rows * inner * setting.dtype.itemsize
    pair = silu_and_mul.silu_and_mul, silu_and_mul.silu_and_mul_reference

    def make(seed: int) -> Inputs:
        return (setting.normal(seed, rows, 2 * inner),)

    more = {"tolerance": setting.rounding}
    return bandwidth_case(setting, "norm", f"{rows} x 2 x {inner}", make, pair, num_bytes, **more)


def store_cases(setting: Setting) -> Iterator[Case]:
    """Yield the copy into the pool and the bitmask."""
    yield from (store_case(setting, rows) for rows in setting.sizes.rows)
    yield from (bitmask_case(setting, rows) for rows in setting.sizes.mask_rows)


def store_case(setting: Setting, rows: int) -> Case:
    """Store keys and values of ``rows`` tokens in slots all over the pool: both read and written, the slots read."""
    heads, dim = setting.shape.kv_heads, setting.shape.head_dim
    num_bytes = 4 * rows * heads * dim * setting.dtype.itemsize + rows * torch.int64.itemsize

    def make(seed: int) -> Inputs:
        k, v = setting.normal(seed, 2, rows, heads, dim)
        keys, values = torch.zeros((2, heads, 2 * rows + 1, dim), dtype=setting.dtype, device=setting.device)
        generator = torch.Generator(setting.device).manual_seed(seed)
        slots = torch.randperm(2 * rows, generator=generator, device=setting.device)[:rows]
        return k, v, keys, values, slots

    def index_copy(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        keys.index_copy_(1, slots, k.transpose(0, 1))
        values.index_copy_(1, slots, v.transpose(0, 1))

    pair = kv_store.store_kv, kv_store.store_kv_reference
    more = {"peers": {"index_copy_": index_copy}, "in_place": True}
    return bandwidth_case(setting, "store", f"{rows} x 2 x {heads} x {dim}", make, pair, num_bytes, **more)


def bitmask_case(setting: Setting, rows: int) -> Case:
    """Ban all but a few tokens of ``rows`` rows of logits: the mask read, the banned logits written."""
    vocab = setting.shape.vocab
    words = num_words(setting.shape.vocab)
    allowed = max(1, vocab // TOKENS_PER_ALLOWED)
    num_bytes = rows * (words * torch.int32.itemsize + (vocab - allowed) * torch.float32.itemsize)

    def make(seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        mask = torch.zeros((rows, vocab), dtype=torch.bool)
        for row in mask:
            row[torch.randperm(vocab, generator=generator)[:allowed]] = True
        return setting.normal(seed, rows, vocab, dtype=torch.float32), pack_allowed(mask).to(setting.device)

    pair = token_bitmask.apply_token_bitmask, token_bitmask.apply_token_bitmask_reference
    return bandwidth_case(setting, "store", f"{rows} x {vocab}", make, pair, num_bytes, in_place=True)


def matmul_cases(setting: Setting) -> Iterator[Case]:
    """Yield products of few and of many rows with the largest matrix of a layer."""
    columns = 2 * setting.shape.inner
    depth = setting.shape.hidden
    for rows in setting.sizes.product_rows:
        num_bytes = (rows * depth + columns * depth + rows * columns) * setting.dtype.itemsize
        yield Case(
            "matmul",
            "invariant_matmul",
            f"{rows} x {depth} x {columns}",
            product_inputs(setting, rows, depth, columns),
            matmul.invariant_matmul,
            matmul.invariant_matmul_reference,
            num_bytes,
            num_flops=2 * rows * depth * columns,
            peers={"F.linear": F.linear},
            tolerance=setting.rounding,
            is_reference_timed=False,
        )


def product_inputs(setting: Setting, rows: int, depth: int, columns: int) -> Callable[[int], Inputs]:
    """Return a function from a seed to the rows and the weight of a product."""
    return lambda seed: (setting.normal(seed, rows, depth), setting.normal(seed + 1, columns, depth))
