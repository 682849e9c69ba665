"""Beside L2's plain path: what its faster forms share, for sequences of unequal length.

Owns: the mask for keys that a row must not see, and the loop over sequences that one call does not serve. Must not
know: which sequences those are, and how the others are computed.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from mini_engine.attention.dense import AttentionKernel
from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.attention.pool import KVPool

# A finite mask: under -inf the kernel reports log-sum-exp 0 for keys that a row cannot see at all, and they would be
# merged as if they held probability. Under -1e30 their weight is exp(-1e30 - max), exactly 0. What is masked must be
# finite too, since 0 times NaN is NaN: a caller that sees NaN asks the plain path whose it is.
HIDDEN = -1e30


def length_mask(lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask of N rows, each of its own number of keys, the longest being L -> [N, 1, 1, L].

    ``lengths`` [N] int64. 0 for a row's keys, ``HIDDEN`` for what follows them.
    """
    visible = torch.arange(int(lengths.max())) < lengths[:, None]  # [N, L]
    mask = torch.full(visible.shape, HIDDEN, dtype=dtype).masked_fill(visible, 0.0)
    return mask[:, None, None]


def attend_alone(
    layer: int, q: Tensor, out: Tensor, pool: KVPool, metadata: AttentionMetadata, sequences: Iterable[int],
    kernel: AttentionKernel,
) -> None:  # fmt: skip
    """Attend for some ``sequences`` of the step, one after the other, as ``PagedAttention`` does. Mutates ``out``.

    ``q`` and ``out`` [T, Hq, D]; only the rows of these sequences are read and written.
    """
    for index in sequences:
        start, end = metadata.query_ranges[index]
        keys, values = pool.gather(layer, metadata.kv_slots[index])  # [Hkv, kv_len, D] each
        out[start:end] = kernel(q[start:end].transpose(0, 1), keys, values).transpose(0, 1)
