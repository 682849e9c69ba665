"""L2: attention of a packed, ragged batch over the paged pool, one sequence after the other.

This is the plain path and the oracle of every faster one. With one sequence in the batch its bits are those of
transformers.
"""

import torch
from torch import Tensor

from mini_engine.attention.dense import AttentionKernel, sdpa_attention
from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.attention.pool import KVPool


class PagedAttention:
    """Attention for one step: writes the new keys and values into the pool, then lets every query see its sequence."""

    def __init__(self, pool: KVPool, metadata: AttentionMetadata, kernel: AttentionKernel = sdpa_attention) -> None:
        """Bind the pool, the step's layout and the kernel that does the arithmetic."""
        self.pool = pool
        self.metadata = metadata
        self.kernel = kernel

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D] -> a new [T, Hq, D]. Mutates the pool alone.

        Writing comes first: a query sees its own key, and the other new keys of its chunk, through the pool.
        """
        self.pool.write(layer, k, v, self.metadata.slot_mapping)
        outputs = []
        for (start, end), slots in zip(self.metadata.query_ranges, self.metadata.kv_slots, strict=True):
            keys, values = self.pool.gather(layer, slots)  # [Hkv, kv_len, D] each
            out = self.kernel(q[start:end].transpose(0, 1), keys, values)  # [Hq, q_len, D]
            outputs.append(out.transpose(0, 1))
        return torch.cat(outputs)  # [T, Hq, D]
