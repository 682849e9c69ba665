"""L1's blocks and whole models: their logits are transformers' logits.

Owns: probes that build ``mini_engine.model.Qwen3``, and what it must give. Needs no later lesson.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from smoke.framework import peer, rows
from smoke.framework.cases import (
    DTYPES,
    LENGTHS,
    ModelCase,
    embedded_case,
    random_case,
    random_cases,
    random_ids,
    random_tensor,
)
from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise, close

REGISTRY = Registry()
FROM_4 = torch.arange(4, 15)  # positions
BLOCKS = ("GQA 6:2, tied", "MHA 3:3, untied, theta 1e6", "GQA 9:3, wide heads")

# L1.E, L1.F ---------------------------------------------------------------------------------------------------------


def bare_model(case: ModelCase, dtype: str) -> Any:
    """Build a ``Qwen3`` with its layers alone, so that a block can be tested before the rotary functions exist."""
    from mini_engine.config import ModelConfig
    from mini_engine.linear import TorchProjections
    from mini_engine.model import Qwen3

    model = object.__new__(Qwen3)
    model.config = ModelConfig.from_hf(case.hf_config)
    model.projections = TorchProjections()
    model.take_layers(case.weights(dtype))
    return model


def block_inputs(seed: int) -> Iterator[tuple[str, ModelCase, str, Tensor]]:
    """Yield name, model, dtype and hidden rows x [T, H]."""
    for name in BLOCKS:
        case = random_case(name, seed)
        for dtype in DTYPES:
            x = random_tensor(len(FROM_4), case.hf_config["hidden_size"], seed=seed + 7, dtype=dtype)
            yield f"{name}, {dtype}", case, dtype, x


@torch.no_grad()
def mlp_probe(seed: int) -> Values:
    """Call the feed-forward block of layer 1."""
    values: Values = {}
    for name, case, dtype, x in block_inputs(seed):
        model = bare_model(case, dtype)
        values[name] = model.mlp_block(model.layers[1], x)
        values[f"input after the call, {name}"] = x
    return values


def mlp_peer(seed: int) -> Values:
    """Return transformers' feed-forward of layer 1, and the inputs unchanged."""
    values: Values = {}
    for name, case, dtype, x in block_inputs(seed):
        values[name] = peer.mlp_block(case, dtype, 1, x)
        values[f"input after the call, {name}"] = x
    return values


@torch.no_grad()
def mlp_values_probe(seed: int) -> Values:
    """Call the float32 feed-forward of one model on two rows, with torch's SiLU and with one that is three times it."""
    from mini_engine.linear import TorchProjections

    class Tripled(TorchProjections):
        def silu(self, x: Tensor) -> Tensor:
            return 3.0 * super().silu(x)

    case = random_case(BLOCKS[0], seed)
    model = bare_model(case, "float32")
    x = random_tensor(2, 128, seed=seed)
    values: Values = {"2 rows": model.mlp_block(model.layers[0], x)}
    model.projections = Tripled()
    return values | {"2 rows, projections whose silu is tripled": model.mlp_block(model.layers[0], x)}


def mlp_spec(seed: int) -> Values:
    """Compute two rows in float64."""
    weights = random_case(BLOCKS[0], seed).weights("float32")
    layer = {name.removeprefix("model.layers.0."): w for name, w in weights.items() if ".layers.0." in name}
    x = rows.rms_norm(random_tensor(2, 128, seed=seed), layer["post_attention_layernorm.weight"], 1e-6)
    gate, up, down = (layer[f"mlp.{name}_proj.weight"].double().tolist() for name in ("gate", "up", "down"))
    out = [rows.swiglu(row, gate, up, down) for row in x.tolist()]
    exact = torch.tensor(out, dtype=torch.float64)
    return {"2 rows": exact, "2 rows, projections whose silu is tripled": 3.0 * exact}


@torch.no_grad()
def attention_block_probe(seed: int) -> Values:
    """Call the attention block of layer 1 with eager attention and given tables."""
    from mini_engine.attention.dense import DenseAttention, eager_attention

    values: Values = {}
    for name, case, dtype, x in block_inputs(seed):
        model = bare_model(case, dtype)
        cfg = case.hf_config
        table = peer.rotary_table(FROM_4, cfg["head_dim"], cfg["rope_theta"], x.dtype)
        values[name] = model.attention_block(1, model.layers[1], x, *table, DenseAttention(eager_attention))
        values[f"after the call, {name}"] = dict(zip(("x", "cos", "sin"), (x, *table), strict=True))
    return values


def attention_block_peer(seed: int) -> Values:
    """Return transformers' attention block of layer 1, and the inputs unchanged."""
    values: Values = {}
    for name, case, dtype, x in block_inputs(seed):
        cfg = case.hf_config
        values[name] = peer.attention_block(case, dtype, 1, x, FROM_4)
        cos, sin = peer.rotary_table(FROM_4, cfg["head_dim"], cfg["rope_theta"], x.dtype)
        values[f"after the call, {name}"] = {"x": x, "cos": cos, "sin": sin}
    return values


@torch.no_grad()
def seam_probe(seed: int) -> Values:
    """Record how a block calls its attention object, with layers whose number is not their place."""
    calls: list[str] = []

    def recorder(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(f"layer {layer}, q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}")
        return torch.zeros_like(q)

    case = random_case("GQA 9:3, wide heads", seed)
    model = bare_model(case, "float32")
    x = random_tensor(5, 72, seed=seed)
    out = [
        model.attention_block(number, layer, x, torch.ones(5, 64), torch.zeros(5, 64), recorder)
        for number, layer in zip((0, 7), model.layers, strict=True)
    ]
    return {"calls of attention": calls, "output of zeros": out}


def seam_spec(seed: int) -> Values:
    """Every block calls once, with its own index; without residual, zeros stay zeros."""
    calls = [f"layer {layer}, q [5, 9, 64], k [5, 3, 64], v [5, 3, 64]" for layer in (0, 7)]
    return {"calls of attention": calls, "output of zeros": [torch.zeros(5, 72), torch.zeros(5, 72)]}


REGISTRY.add(
    "L1.E.values",
    "mlp_block is down(silu(gate(x)) * up(x)) of the normed rows, silu that of the projections (float64 rows, 1e-4).",
    mlp_values_probe,
    close(mlp_spec, 1e-4),
)
REGISTRY.add(
    "L1.E.bits",
    "mlp_block has the bits of transformers' second norm and MLP in float32 and bfloat16, and leaves its input alone.",
    mlp_probe,
    bitwise(mlp_peer),
)
REGISTRY.add(
    "L1.F.seam",
    "attention_block calls its attention object once, with its layer's index and heads of the right shape.",
    seam_probe,
    close(seam_spec, 0.0),
)
REGISTRY.add(
    "L1.F.bits",
    "attention_block has the bits of transformers' first norm and attention in float32 and bfloat16, and leaves its "
    "inputs alone.",
    attention_block_probe,
    bitwise(attention_block_peer),
    asks_peer=True,
)


# L1.G ---------------------------------------------------------------------------------------------------------------


def build_model(case: ModelCase, dtype: str) -> Any:
    """Build the candidate's ``Qwen3`` with the case's weights."""
    from mini_engine.config import ModelConfig
    from mini_engine.model import Qwen3

    return Qwen3(ModelConfig.from_hf(case.hf_config), case.weights(dtype))


def logits_probe(cases: Any, implementation: str) -> Any:
    """Return a probe that runs prompts of every length through every case."""

    @torch.no_grad()
    def probe(seed: int) -> Values:
        from mini_engine.attention import dense

        attention = dense.DenseAttention(getattr(dense, f"{implementation}_attention"))
        values: Values = {}
        for case in cases(seed):
            for dtype in DTYPES:
                model = build_model(case, dtype)
                for length in LENGTHS:
                    ids = torch.tensor(random_ids(case.vocab_size, length, seed))
                    values[f"{case.name}, {dtype}, {length} tokens"] = model(ids, torch.arange(length), attention)
        return values

    return probe


def logits_peer(cases: Any, implementation: str) -> Any:
    """Return transformers' logits of the same prompts."""
    return lambda seed: {
        f"{case.name}, {dtype}, {length} tokens": peer.logits(
            case, dtype, implementation, random_ids(case.vocab_size, length, seed)
        )
        for case in cases(seed)
        for dtype in DTYPES
        for length in LENGTHS
    }


def embedded_cases(seed: int) -> list[ModelCase]:
    """Return the embedded model alone."""
    return [embedded_case()]


SCATTERED = [7, 8, 0, 3]  # positions of packed rows: one sequence after the other
PICKED_ROWS = ([32, 0, 31, 7], [0], list(range(32, -1, -1)))


def scaled_case(case: ModelCase) -> ModelCase:
    """Return the case with a rotary embedding that is scaled, and cosines and sines that are multiplied."""
    yarn = (("rope_type", "yarn"), ("factor", 4.0))
    return replace(case, config=(*case.config, ("rope_scaling", yarn)))


@torch.no_grad()
def call_probe(seed: int) -> Values:
    """Ask for some rows, start in the middle, and record what each call does."""
    from mini_engine.attention.dense import DenseAttention

    case = random_case("GQA 4:2, untied, odd sizes", seed)
    model = build_model(case, "float32")
    dense = DenseAttention()
    head = model.lm_head
    rotary = model.rotary
    done: list[str] = []

    def noted_head(x: Tensor) -> Any:
        done.append(f"head on {len(x)} rows")
        return head(x)

    def noted_rotary(positions: Tensor, dtype: torch.dtype) -> Any:
        done.append(f"rotary of {len(positions)} rows, {positions[:4].tolist()} first")
        return rotary(positions, dtype)

    def noted_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        done.append(f"layer {layer} attends with {len(q)} rows")
        return dense(layer, q, k, v)

    ids = torch.tensor(random_ids(case.vocab_size, 33, seed))
    scaled = build_model(scaled_case(case), "bfloat16")
    model.lm_head = noted_head
    model.rotary = noted_rotary
    values: Values = {
        f"rows {picked}": model(ids, torch.arange(33), noted_attention, torch.tensor(picked)) for picked in PICKED_ROWS
    }
    values["hidden states, through the head"] = head(model.hidden_states(ids, torch.arange(33), noted_attention))
    model.hidden_states(ids[:4], torch.tensor(SCATTERED), noted_attention)
    return values | {
        "what is done": list(done),
        "positions from 5": model(ids, torch.arange(5, 38), dense),
        "a checkpoint with YaRN": scaled(ids, torch.arange(33), dense),
    }


def call_peer(seed: int) -> Values:
    """Return transformers' answers."""
    case = random_case("GQA 4:2, untied, odd sizes", seed)
    ids = random_ids(case.vocab_size, 33, seed)
    values: Values = {
        f"rows {picked}": peer.logits(case, "float32", "eager", ids, rows=picked) for picked in PICKED_ROWS
    }
    values["hidden states, through the head"] = peer.logits(case, "float32", "eager", ids)
    body = ["rotary of 33 rows, [0, 1, 2, 3] first", *(f"layer {layer} attends with 33 rows" for layer in range(3))]
    packed = [f"rotary of 4 rows, {SCATTERED} first", *(f"layer {layer} attends with 4 rows" for layer in range(3))]
    return values | {
        "what is done": [
            *(step for picked in PICKED_ROWS for step in (*body, f"head on {len(picked)} rows")),
            *body,
            *packed,
        ],
        "positions from 5": peer.logits(case, "float32", "eager", ids, positions=list(range(5, 38))),
        "a checkpoint with YaRN": peer.logits(scaled_case(case), "bfloat16", "eager", ids),
    }


REGISTRY.add(
    "L1.G.call",
    "Each call gives the rows asked for, the head gets no others; it uses its positions, self.rotary once, and attends "
    "once per layer with all rows. The hidden states are what the head gets.",
    call_probe,
    bitwise(call_peer),
)
for _implementation in ("eager", "sdpa"):
    _needs = ("L1.D",) if _implementation == "sdpa" else ()
    REGISTRY.add(
        f"L1.G.random_{_implementation}",
        f"All logits of six random models have the bits of transformers ({_implementation}), 1 to 300 tokens.",
        logits_probe(random_cases, _implementation),
        bitwise(logits_peer(random_cases, _implementation)),
        needs=_needs,
        seconds=60.0,
    )
    REGISTRY.add(
        f"L1.G.embedded_{_implementation}",
        f"All logits of the embedded model have the bits of transformers ({_implementation}), 1 to 300 tokens.",
        logits_probe(embedded_cases, _implementation),
        bitwise(logits_peer(embedded_cases, _implementation)),
        needs=_needs,
        seconds=60.0,
    )
