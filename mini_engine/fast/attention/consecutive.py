"""A faster form of L2's plain path: sequences are read where they lie, if their pages follow one another.

Owns: the loop over sequences without copies. Must not know: projections, requests.

One request that has the pool for itself always lies so, and many do most of the time. A sequence on scattered pages is
copied together, as ``PagedAttention`` does it.
"""

import torch
from torch import Tensor

from mini_engine.attention.dense import AttentionKernel, sdpa_attention
from mini_engine.fast.attention.ragged import StepCache


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
