"""A faster form of L2's plain path: sequences are read where they lie, if their pages follow one another.

One request that has the pool for itself always lies so, and many do most of the time. A sequence on scattered pages is
copied together, as ``PagedAttention`` does it. Several sequences may have a form that serves them in one call.
"""

import math

import torch
from torch import Tensor

from mini_engine.attention.dense import AttentionKernel, sdpa_attention
from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.attention.pool import KVPool
from mini_engine.fast.attention.cascade import CascadeAttention, find_cascade, find_scattered
from mini_engine.fast.attention.ragged import StepCache, grouped_attention
from mini_engine.fast.attention.strided import StridedAttention, find_grids
from mini_engine.model import Attention


class ConsecutiveAttention:
    """``PagedAttention`` without copies: same signature, same bits."""

    def __init__(self, cache: StepCache, kernel: AttentionKernel = sdpa_attention) -> None:
        """Bind the step's part of the cache and the kernel."""
        self.cache = cache
        self.kernel = kernel

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D] -> [T, Hq, D]. Writes the step's slots of the pool."""
        self.cache.write(layer, k, v)
        outputs = []
        for sequence, (start, end) in enumerate(self.cache.metadata.query_ranges):
            out = self.kernel(q[start:end].transpose(0, 1), *self.cache.read(layer, sequence))  # [Hq, q_len, D]
            outputs.append(out.transpose(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [T, Hq, D]


def consecutive(pool: KVPool, metadata: AttentionMetadata, kernel: AttentionKernel = sdpa_attention) -> Attention:
    """Read each sequence where it lies, if its pages follow one another."""
    return ConsecutiveAttention(StepCache(pool, metadata), kernel)


class UnlessNaN:
    """An attention that reads across gaps in the pool, where a sequence can catch its neighbour's NaN.

    A layer whose result is not finite is computed again by the plain attention, in which only the guilty one has NaN.
    """

    def __init__(self, attention: Attention, plain: Attention) -> None:
        """Attend by ``attention``, or by ``plain``. Both write the same slots."""
        self.attention = attention
        self.plain = plain

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D] -> [T, Hq, D]. Writes the step's slots of the pool."""
        out = self.attention(layer, q, k, v)
        return out if math.isfinite(float(out.sum())) else self.plain(layer, q, k, v)


def grouped(pool: KVPool, metadata: AttentionMetadata) -> Attention:
    """Compute common prefixes once, or decode rows in few calls; otherwise each sequence by itself."""
    cache = StepCache(pool, metadata)
    alone = ConsecutiveAttention(cache, grouped_attention)
    if len(cache.lengths) > 1:
        if (cascade := find_cascade(cache) or find_scattered(cache)) is not None:
            return UnlessNaN(CascadeAttention(cache, cascade, grouped_attention), alone)
        if grids := find_grids(cache):
            return UnlessNaN(StridedAttention(cache, grids, grouped_attention), alone)
    return alone
