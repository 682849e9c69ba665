"""Beside L2's plain path: paged attention that reads sequences where they lie, for pages that follow one another.

Owns: the loop over sequences without copies. Must not know: projections, requests.

One request that has the pool for itself always lies so, and many do most of the time. A sequence on scattered pages is
copied together, as ``PagedAttention`` does it.
"""

import torch
from torch import Tensor

from mini_engine.attention.dense import AttentionKernel, sdpa_attention
from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.attention.pool import KVPool
from mini_engine.attention.ragged import Reader


class ConsecutiveAttention:
    """``PagedAttention`` without copies: same signature, same bits."""

    def __init__(self, pool: KVPool, metadata: AttentionMetadata, kernel: AttentionKernel = sdpa_attention) -> None:
        """Bind the pool, the step's layout and the kernel."""
        self.pool, self.metadata, self.kernel = pool, metadata, kernel
        self.reader = Reader(pool, metadata)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D] -> [T, Hq, D]. Writes the step's slots of the pool."""
        self.pool.write(layer, k, v, self.metadata.slot_mapping)
        outputs = []
        for sequence, (start, end) in enumerate(self.metadata.query_ranges):
            out = self.kernel(q[start:end].transpose(0, 1), *self.reader.read(layer, sequence))  # [Hq, q_len, D]
            outputs.append(out.transpose(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [T, Hq, D]
