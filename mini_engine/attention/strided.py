"""Beside L2's plain path: the decode rows of a batch in one kernel call, keys and values read where they lie.

Owns: finding sequences that lie on a grid in the pool, and the call over that grid. Must not know: requests, who
allocated the pages so.

A loop over sequences costs a few calls into torch for each; gathering all of them into one padded tensor copies the
whole cache in every step. Neither is needed when every sequence lies in consecutive pages and the first pages are a
multiple of one distance apart: then ``as_strided`` describes all of them as one tensor [B, Hkv, L, D] without a copy.
What lies beyond a sequence's end, and grid places that nobody asks about, are masked or not read.
"""

from dataclasses import dataclass
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.attention.dense import AttentionKernel
from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.attention.pool import KVPool
from mini_engine.attention.ragged import HIDDEN, attend_alone, length_mask

BYTES_PER_CALL = 1 << 17  # about as much is read in the time that one more call costs


@dataclass(frozen=True)
class Grid:
    """Decode rows of a step that one call serves.

    ``rows`` [N]: their packed rows. ``places`` [N]: which of the ``count`` grid places each sequence lies at; place i
    begins at slot ``first + i * distance``. ``mask`` [count, 1, 1, L]: 0 for a sequence's keys, ``HIDDEN`` beyond.
    """

    rows: Tensor
    places: Tensor
    first: int
    distance: int
    count: int
    mask: Tensor


def find_grid(metadata: AttentionMetadata, pool: KVPool) -> Grid | None:
    """Return the grid of a step's decode rows; ``None`` if there are fewer than two or they lie on none."""
    page_size = metadata.page_size
    if len(metadata.query_ranges) < 2:
        return None
    starts, rows, lengths = [], [], []
    firsts, kv_lens = metadata.block_table[:, 0].tolist(), metadata.seq_lens_kv.tolist()
    for (start, end), kv_len, first, whole in zip(
        metadata.query_ranges, kv_lens, firsts, consecutive(metadata), strict=True
    ):
        if end - start == 1 and whole:
            starts.append(first * page_size)
            rows.append(start)
            lengths.append(kv_len)
    if len(rows) < 2:
        return None
    first, longest = min(starts), max(lengths)
    distance = gcd(*(start - first for start in starts)) or page_size
    count = (max(starts) - first) // distance + 1
    # Every place is read as far as the longest sequence goes. A call for each sequence reads no more than it has.
    wasted = (count * longest - sum(lengths)) * 2 * pool.keys[0][:, 0].nbytes
    if wasted > len(rows) * BYTES_PER_CALL or max(starts) + longest > pool.zero_slot + 1:
        return None
    places = torch.tensor([(start - first) // distance for start in starts])
    mask = torch.full((count, 1, 1, longest), HIDDEN, dtype=pool.keys[0].dtype)
    mask[places] = length_mask(torch.tensor(lengths), mask.dtype)
    return Grid(torch.tensor(rows), places, first, distance, count, mask)


def consecutive(metadata: AttentionMetadata) -> list[bool]:
    """Return, for every sequence, whether its pages follow one another."""
    table = metadata.block_table.long()
    column = torch.arange(table.shape[1], device=table.device)
    beyond = column * metadata.page_size >= metadata.seq_lens_kv[:, None]  # pages without a key yet
    whole: list[bool] = ((table == table[:, :1] + column) | beyond).all(1).tolist()
    return whole


def attend_grid(q: Tensor, keys: Tensor, values: Tensor, grid: Grid) -> Tensor:
    """Attend for the rows of ``grid``. ``q`` [N, Hq, D]; ``keys``, ``values`` [Hkv, slots, D] -> [N, Hq, D].

    The query heads that share a key-value head are rows of one matrix, as in ``dense.grouped_attention``.
    """
    num_kv_heads, slots, dim = keys.shape
    shape = (grid.count, num_kv_heads, grid.mask.shape[-1], dim)
    strides, offset = (grid.distance * dim, slots * dim, dim, 1), grid.first * dim
    placed = q.new_zeros(grid.count, *q.shape[1:]).index_copy_(0, grid.places, q)  # [count, Hq, D]
    out = F.scaled_dot_product_attention(
        placed.view(grid.count, num_kv_heads, -1, dim),  # [count, Hkv, Hq / Hkv, D]
        keys.as_strided(shape, strides, keys.storage_offset() + offset),
        values.as_strided(shape, strides, values.storage_offset() + offset),
        attn_mask=grid.mask,
    )
    return out.reshape(placed.shape)[grid.places]


class StridedAttention:
    """``PagedAttention`` with one call for the rows on ``grid``: same signature, same values to rounding."""

    def __init__(self, pool: KVPool, metadata: AttentionMetadata, grid: Grid, kernel: AttentionKernel) -> None:
        """Bind the pool, the step's layout, its grid, and the kernel for the sequences that are not on it."""
        self.pool, self.metadata, self.grid, self.kernel = pool, metadata, grid, kernel
        on_grid = set(grid.rows.tolist())
        self.others = [i for i, (start, _) in enumerate(metadata.query_ranges) if start not in on_grid]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D] -> [T, Hq, D]. Writes the step's slots of the pool."""
        self.pool.write(layer, k, v, self.metadata.slot_mapping)
        on_grid = attend_grid(q[self.grid.rows], self.pool.keys[layer], self.pool.values[layer], self.grid)
        if not self.others and len(q) == len(self.grid.rows):
            return on_grid
        out = torch.empty_like(q).index_copy_(0, self.grid.rows, on_grid)
        attend_alone(layer, q, out, self.pool, self.metadata, self.others, self.kernel)
        return out
