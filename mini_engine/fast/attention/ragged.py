"""What the faster forms of L2's plain path share, for sequences of unequal length."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.attention.allocator import pages_needed
from mini_engine.attention.dense import AttentionKernel, sdpa_attention
from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.attention.pool import KVPool

# A finite mask: under -inf the kernel reports log-sum-exp 0 for keys that a row cannot see at all, and they would be
# merged as if they held probability. Under -1e30 their weight is exp(-1e30 - max), exactly 0. What is masked must be
# finite too, since 0 times NaN is NaN: ``UnlessNaN`` asks the plain path whose it is.
HIDDEN = -1e30


def first_slots(metadata: AttentionMetadata) -> list[int | None]:
    """Return the slot of every sequence's first key; ``None`` if its pages do not follow one another.

    Pages without a key yet do not count.
    """
    found: list[int | None] = []
    for kv_len, row in zip(metadata.seq_lens_kv.tolist(), metadata.block_table.tolist(), strict=True):
        pages = row[: pages_needed(kv_len, metadata.page_size)]
        follow = pages == list(range(pages[0], pages[0] + len(pages)))
        found.append(pages[0] * metadata.page_size if follow else None)
    return found


class StepCache:
    """The pool as one step sees it: where its new keys and values go, and those of a single sequence.

    ``PagedAttention`` copies those of a sequence together at every layer of every step. When its pages are p, p + 1,
    p + 2, …, its slots are one piece of the pool already, and a view of it serves the kernel as well.
    """

    def __init__(self, pool: KVPool, metadata: AttentionMetadata) -> None:
        """Bind the pool and the step's layout."""
        self.pool = pool
        self.metadata = metadata
        self.first_slots = first_slots(metadata)
        self.lengths = metadata.seq_lens_kv.tolist()

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the step's new ``k`` and ``v`` [T, Hkv, D] in the slots of one layer. Mutates the pool."""
        self.pool.write(layer, k, v, self.metadata.slot_mapping)

    def read(self, layer: int, sequence: int) -> tuple[Tensor, Tensor]:
        """Return K and V of one sequence, [Hkv, kv_len, D] each: views if they lie together, else copies."""
        first = self.first_slots[sequence]
        if first is None:
            return self.pool.gather(layer, self.metadata.kv_slots[sequence])
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        return keys.narrow(1, first, self.lengths[sequence]), values.narrow(1, first, self.lengths[sequence])


def length_mask(lengths: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the additive mask of rows with ``lengths`` keys each, the longest having L -> [N, 1, 1, L].

    0 for a row's keys, ``HIDDEN`` for what follows them.
    """
    is_beyond = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]  # [N, L]
    return torch.zeros(is_beyond.shape, dtype=dtype).masked_fill_(is_beyond, HIDDEN)[:, None, None]


def grouped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute ``dense.sdpa_attention``, faster for a single query. Shapes as there.

    The query heads that share a key-value head become the rows of one matrix: keys are read once for all of them. No
    mask is needed, since every row is the last position. Longer queries go to ``sdpa_attention``.
    """
    if q.shape[1] != 1:
        return sdpa_attention(q, k, v)
    rows = q.view(k.shape[0], -1, q.shape[2])  # [Hkv, Hq / Hkv, D]
    return F.scaled_dot_product_attention(rows[None], k[None], v[None]).view(q.shape)


def attend_alone(
    layer: int, q: Tensor, out: Tensor, cache: StepCache, sequences: Iterable[int], kernel: AttentionKernel
) -> None:
    """Attend for some ``sequences`` of the step, one after the other, as ``PagedAttention`` does. Mutates ``out``.

    ``q`` and ``out`` [T, Hq, D]; only the rows of these sequences are read and written.
    """
    for sequence in sequences:
        start, end = cache.metadata.query_ranges[sequence]
        out[start:end] = kernel(q[start:end].transpose(0, 1), *cache.read(layer, sequence)).transpose(0, 1)
