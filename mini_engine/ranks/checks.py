"""Whether this machine's libraries compute a part of a result as they compute the whole, to the bit.

A library chooses the order of a sum by the shape of all that it computes at once. ``batch_invariant`` fixes that order
for products and SiLU. What is not fixed is tried when a model is loaded, for the numbers of rows in ``ROWS``.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.attention.metadata import SequenceChunk, pack_batch
from mini_engine.attention.pool import KVPool
from mini_engine.config import ModelConfig
from mini_engine.driver import AttentionFactory
from mini_engine.fast.products import (
    COMPARED_ROWS,
    LARGEST_PIECE,
    SMALL_WEIGHT,
    FastProjections,
    InvariantProjections,
    describe,
)
from mini_engine.fast.quantized_products import QuantizedProjections, Rows
from mini_engine.invariant.findings import cpu, remembered
from mini_engine.invariant.probe import opposite_terms
from mini_engine.linear import Linear, Projections

ROWS = (*COMPARED_ROWS, 100, 257)
STEPS = (  # of each sequence the new tokens, and those before them
    [(40, 0)],
    [(300, 0)],
    [(16, 284)],
    [(1, 700)],
    [(1, 20), (1, 35), (1, 50), (1, 33)],
    [(7, 0), (1, 90), (33, 8)],
)
PAGE = 16


def needs_padding(projections: Projections, part: Any, whole: int, ranks: int) -> bool:
    """Whether ``part`` [own, in] has other bits alone than in a matrix with ``whole`` rows, which is small.

    Of a large matrix some rows are tried. Raises ``ValueError`` if its part has other bits.
    """
    own, in_features = part.shape
    most = max(ranks, LARGEST_PIECE // in_features)
    own, tried = (own, whole) if whole <= most else (own * most // whole, most)
    kind = " ".join([type(projections).__name__, *getattr(projections, "usable", ())])
    if isinstance(projections, QuantizedProjections):
        kind += f" of {type(part).__name__} to {projections.quantize}, batch_invariant={projections.batch_invariant}"
    name = f"{own} of {describe(tried, in_features, part.dtype)} by {kind}"
    form: Any = type(part)
    stored = form.of if isinstance(part, Rows) else Tensor.contiguous

    @torch.inference_mode()
    def experiment() -> list[int]:
        on_trial = deepcopy(projections)  # so that its choices are not added to
        row, vectors = opposite_terms(in_features, tried, part.dtype)
        x = row * torch.arange(1, ROWS[-1] + 1)[:, None].sin().to(part.dtype)
        differ = set()
        for bias in (None, vectors[:, 0].contiguous()):
            every = on_trial.linear(stored(vectors), bias)
            for at in (slice(own), slice(tried - own, tried)):
                alone = linear_of(on_trial, stored(vectors[at].clone()), whole, bias if bias is None else bias[at])
                differ |= {n for n in ROWS if not torch.equal(every(x[:n])[:, at], alone(x[:n]))}
        return sorted(differ)

    differ = remembered(f"part of a product: {name}", experiment)
    if isinstance(part, Tensor) and whole * in_features <= SMALL_WEIGHT:
        return bool(differ)
    refuse(differ, f"rows in a product with {name}", ranks)
    return False


def linear_of(projections: Projections, part: Any, whole: int, bias: Tensor | None = None) -> Linear:
    """Return the product with ``part`` of a matrix of ``whole`` rows, in the way of the whole."""
    if isinstance(projections, FastProjections | InvariantProjections):
        return projections.linear(part, bias, whole)
    return projections.linear(part, bias)


def check_silu(size: int, ranks: int, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless SiLU of a rank's share of ``size`` columns has the bits of that of all columns."""
    name = f"{size // ranks} of {size} columns in {str(dtype).removeprefix('torch.')}"

    def experiment() -> list[int]:
        x = torch.randn(ROWS[-1], size, generator=torch.Generator().manual_seed(size)).mul(4).to(dtype)

        def in_shares(rows: Tensor) -> Tensor:
            return torch.cat([F.silu(share.contiguous()) for share in rows.chunk(ranks, dim=-1)], dim=-1)

        return [n for n in ROWS if not torch.equal(F.silu(x[:n]), in_shares(x[:n]))]

    refuse(remembered(f"part of SiLU: {name}", experiment), f"rows in SiLU of {name}", ranks)


def check_attention(
    make: Callable[[ModelConfig], AttentionFactory], whole: ModelConfig, own: ModelConfig, dtype: torch.dtype
) -> None:
    """Raise ``ValueError`` unless a rank's heads of an attention have the bits that they have among all heads.

    ``make`` returns what makes the attention of each step of a model.
    """
    each = [f"{cfg.num_attention_heads} heads over {cfg.num_key_value_heads}" for cfg in (own, whole)]
    makers = [(make(cfg), replace(cfg, num_hidden_layers=1)) for cfg in (whole, own)]
    factory: Any = makers[0][0]
    name = f"{getattr(factory, 'func', factory).__qualname__}, {' of '.join(each)}, "
    name += f"{own.head_dim} {str(dtype).removeprefix('torch.')}"

    def experiment() -> list[int]:
        return [number for number, step in enumerate(STEPS) if not torch.equal(*attended(step, makers, dtype))]

    ranks = whole.num_attention_heads // own.num_attention_heads
    refuse(remembered(f"part of attention: {name}", experiment), f"heads in attention with {name}", ranks)


def attended(
    step: Sequence[tuple[int, int]], makers: Sequence[tuple[AttentionFactory, ModelConfig]], dtype: torch.dtype
) -> list[Tensor]:
    """Attend in one step with each of ``makers``, the last of which has the fewest heads: theirs are the last ones.

    Returns the results for these heads [T, heads, D].
    """
    needed = [-(-(new + before) // PAGE) for new, before in step]
    first = [0, *accumulate(needed)]
    chunks = [
        SequenceChunk([0] * new, before, range(at, at + count))
        for (new, before), at, count in zip(step, first, needed, strict=False)
    ]
    batch = pack_batch(chunks, PAGE)
    generator = torch.Generator().manual_seed(len(step))
    most = makers[0][1]
    q, k, v, keys, values = (
        torch.randn(heads, count, most.head_dim, generator=generator).to(dtype)
        for heads, count in [
            (most.num_attention_heads, len(batch.input_ids)),
            *[(most.num_key_value_heads, len(batch.input_ids))] * 2,
            *[(most.num_key_value_heads, first[-1] * PAGE)] * 2,
        ]
    )
    heads = makers[-1][1].num_attention_heads
    results = []
    for make, cfg in makers:
        pool = KVPool(cfg, first[-1], PAGE, dtype)
        own_q, own_kv = slice(-cfg.num_attention_heads, None), slice(-cfg.num_key_value_heads, None)
        pool.keys[0][:, :-1], pool.values[0][:, :-1] = keys[own_kv], values[own_kv]
        each = (x[own].transpose(0, 1).contiguous() for x, own in ((q, own_q), (k, own_kv), (v, own_kv)))
        results.append(make(pool, batch.metadata)(0, *each)[:, -heads:])
    return results


def refuse(failed: Sequence[int], what: str, ranks: int) -> None:
    """Raise ``ValueError`` if what was tried has ``failed``."""
    if failed:
        raise ValueError(
            f"tensor_parallel={ranks} cannot keep the bits of one rank on this CPU ({cpu()['model name']}) with "
            f"{torch.get_num_threads()} threads: {' '.join(map(str, failed))} {what} differ; set batch_invariant=True, "
            "another number of ranks or threads, or tensor_parallel_mode='sum', which promises no bits"
        )
