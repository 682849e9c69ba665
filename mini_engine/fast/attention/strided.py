"""A faster form of L2's plain path: the decode rows of a batch in few kernel calls, keys and values in place.

A loop over sequences costs a few calls into torch for each; gathering all of them into one padded tensor copies the
whole cache in every step. Neither is needed for sequences that lie in consecutive pages and begin at equal distances:
then ``as_strided`` describes all of them as one tensor [B, Hkv, L, D] without a copy. What lies beyond a sequence's
end, and grid places that no row asks about, are masked.

Any two sequences are a grid, and a few that begin anywhere are several:

    slots      0    32    64    96   128   160        what is read for
    begins     a           b     c           d        {a, b, c, d}: places of 32, two of six idle
                                                      {a, b} of 64 and {c, d} of 64: nothing idle, one more call

The rows of a draft (``scheduler/drafts.py``) all begin at one place. They are rows of one matrix there, so the keys are
read once for a draft.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.attention.dense import AttentionKernel
from mini_engine.fast.attention.ragged import StepCache, attend_alone, length_mask

BYTES_PER_CALL = 1 << 17  # about as much is read in the time that one more call costs


class DecodeRow(NamedTuple):
    """A sequence with one new token: the slot of its first key, its number of keys and its packed row."""

    first: int
    kv_len: int
    row: int


@dataclass(frozen=True)
class Grid:
    """Decode rows of a step that one call serves.

    Place i begins at slot ``first + i * distance``. As many packed rows ask there as at the fullest place, and ``rows``
    are those of all places; where fewer ask it is any row, and its result is dropped: it ``is_idle``. ``mask``
    [places, 1, rows of a place, L]: 0 for a row's keys, ``ragged.HIDDEN`` for what lies beyond.
    """

    rows: list[int]
    is_idle: list[bool]
    first: int
    distance: int
    mask: Tensor


def find_grids(cache: StepCache) -> list[Grid]:
    """Return the grids of a step's decode rows, cut so that calls and keys read for nothing cost least together."""
    found = defaultdict[int, list[DecodeRow]](list)
    for (start, end), kv_len, first in zip(cache.metadata.query_ranges, cache.lengths, cache.first_slots, strict=True):
        if end - start == 1 and first is not None:
            found[first].append(DecodeRow(first, kv_len, start))
    pool = cache.pool
    call = BYTES_PER_CALL // (2 * pool.keys[0][:, 0].nbytes)  # in keys
    _, parts = cheapest(sorted(map(max, found.values())), call, pool.zero_slot + 1) if found else (0, [])
    grids = [[found[longest.first] for longest in part] for part in parts]
    return [make_grid(grid, pool.keys[0].dtype) for grid in grids if sum(map(len, grid)) > 1]


def cheapest(rows: list[DecodeRow], call: int, limit: int) -> tuple[int, list[list[DecodeRow]]]:
    """Cut ``rows``, which are in order, into parts for a call each -> the keys that this costs, the parts.

    ``call``: the keys that could be read in the time of one call. ``limit``: the slots of the pool. Every place is read
    as far as the longest sequence of its part goes; a call for a sequence alone reads no more than it has.
    """
    longest = max(row.kv_len for row in rows)
    distance, places = spacing(rows)
    together = call + places * longest
    wasted = places * longest - sum(row.kv_len for row in rows)
    fits = rows[-1].first + longest <= limit
    if len(rows) == 1 or (fits and wasted <= call):
        return together, [rows]
    halves = [cheapest(half, call, limit) for half in split(rows, distance, wasted // longest)]
    apart = sum(cost for cost, _ in halves)
    if fits and together <= apart:
        return together, [rows]
    return apart, [part for _, parts in halves for part in parts]


def spacing(rows: list[DecodeRow]) -> tuple[int, int]:
    """Return the largest distance that puts all ``rows``, which are in order, on a grid, and how many places it has."""
    first = rows[0].first
    distance = gcd(*(row.first - first for row in rows)) or 1
    return distance, (rows[-1].first - first) // distance + 1


def split(rows: list[DecodeRow], distance: int, idle: int) -> tuple[list[DecodeRow], list[DecodeRow]]:
    """Cut ``rows`` at their widest gap if most of the ``idle`` places lie there, otherwise into every other place."""
    gaps = [(after.first - before.first) // distance - 1 for before, after in pairwise(rows)]
    widest = max(gaps)
    if widest and 2 * widest >= idle:
        cut = gaps.index(widest) + 1
        return rows[:cut], rows[cut:]
    halves: tuple[list[DecodeRow], list[DecodeRow]] = [], []
    for row in rows:  # both get some, since no larger distance divides all
        halves[(row.first - rows[0].first) // distance % 2].append(row)
    return halves


def make_grid(found: Sequence[Sequence[DecodeRow]], dtype: torch.dtype) -> Grid:
    """Return the grid of two and more rows: for each slot at which some begin, in order, those that do."""
    first = found[0][0].first
    distance, places = spacing([rows[0] for rows in found])
    deep = max(map(len, found))
    asked = [found[0][0].row] * (places * deep)
    lengths = [0] * len(asked)
    is_idle = [True] * len(asked)
    for rows in found:
        for place, row in enumerate(rows, (rows[0].first - first) // distance * deep):
            asked[place] = row.row
            lengths[place] = row.kv_len
            is_idle[place] = False
    mask = length_mask(lengths, dtype)  # [places * deep, 1, 1, L]
    return Grid(asked, is_idle, first, distance, mask.view(places, 1, deep, -1))


def mask_of_heads(mask: Tensor, heads: int) -> Tensor:
    """Return the mask of the query rows of a grid, ``heads`` for each key-value head, from the grid's ``mask``.

    [places, 1, deep, L] -> [places, 1, deep * heads, L]; where ``deep`` is 1 the one row stands for all heads.
    """
    return mask if mask.shape[2] == 1 else mask.repeat_interleave(heads, 2)


def attend_grid(q: Tensor, keys: Tensor, values: Tensor, grid: Grid, mask: Tensor) -> Tensor:
    """Attend for the rows of ``grid``. ``q`` [rows, Hq, D]; ``keys``, ``values`` [Hkv, slots, D] -> as ``q``.

    At each place, the query heads that share a key-value head are rows of one matrix, as in
    ``ragged.grouped_attention``. ``mask``: that of ``mask_of_heads``.
    """
    num_kv_heads, slots, dim = keys.shape
    places, _, deep, length = grid.mask.shape
    rows = q
    if deep > 1:
        rows = q.view(places, deep, num_kv_heads, -1, dim).transpose(1, 2)  # [places, Hkv, deep, Hq / Hkv, D]
    shape = (places, num_kv_heads, length, dim)
    strides = (grid.distance * dim, slots * dim, dim, 1)
    offset = grid.first * dim
    out = F.scaled_dot_product_attention(
        rows.reshape(places, num_kv_heads, -1, dim),
        keys.as_strided(shape, strides, keys.storage_offset() + offset),
        values.as_strided(shape, strides, values.storage_offset() + offset),
        attn_mask=mask,
    )
    return (out if deep == 1 else out.view(rows.shape).transpose(1, 2)).reshape(q.shape)


class StridedAttention:
    """``PagedAttention`` with a call for each of ``grids``: same signature, same values to rounding."""

    def __init__(self, cache: StepCache, grids: list[Grid], kernel: AttentionKernel) -> None:
        """Bind the step's part of the cache, its grids, and the kernel for the sequences that are on none."""
        self.cache = cache
        self.grids = grids
        self.kernel = kernel
        self.masks = list[Tensor]()  # of the grids, once the first layer shows how many query heads share keys
        asked = [row for grid in grids for row in grid.rows]
        is_idle = [idle for grid in grids for idle in grid.is_idle]
        place_of = {row: place for place, (row, idle) in enumerate(zip(asked, is_idle, strict=True)) if not idle}
        ranges = cache.metadata.query_ranges
        self.others = [i for i, (start, end) in enumerate(ranges) if start not in place_of and end > start]
        self.asked = torch.tensor(asked)  # [P], the rows of all grids: the packed row whose query goes there
        self.places = torch.tensor([place_of.get(row, 0) for row in range(ranges[-1][1])])  # [T]: and the way back
        self.is_in_order = asked == list(range(ranges[-1][1]))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D] -> [T, Hq, D]. Writes the step's slots of the pool."""
        self.cache.write(layer, k, v)
        queries = q if self.is_in_order else q[self.asked]  # [P, Hq, D]
        keys, values = self.cache.pool.keys[layer], self.cache.pool.values[layer]
        each = queries.split_with_sizes([len(grid.rows) for grid in self.grids])
        self.masks = self.masks or [mask_of_heads(grid.mask, q.shape[1] // k.shape[1]) for grid in self.grids]
        asked = zip(each, self.grids, self.masks, strict=True)
        found = [attend_grid(own, keys, values, grid, mask) for own, grid, mask in asked]
        out = found[0] if len(found) == 1 else torch.cat(found)
        if self.is_in_order:
            return out
        out = out[self.places]  # rows on no grid hold another row's result until attend_alone
        attend_alone(layer, q, out, self.cache, self.others, self.kernel)
        return out
