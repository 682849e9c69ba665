"""Another form of L2's plain path: paged attention whose bits do not depend on the batch, on chunks or on threads.

A sum of floats depends on its order, and a fused kernel chooses the order by the shape of its input. So the shape is
fixed here. The keys of a sequence are cut into tiles of ``TILE`` positions, aligned to position 0 whatever the chunk;
each tile is a batch entry of its own, always ``TILE`` keys wide, with padding masked; and the partial results are
merged in tile order by their log-sum-exp, as FlashDecoding does (Dao et al., 2023) but with a fixed tile *size* instead
of a fixed number of tiles. A tile that several sequences share, as they begin alike, is read once: their queries are
rows of one matrix. Query rows are padded to a number of rows for which an experiment on this machine found the
same bits at every place: beneath the kernel lies a BLAS, which has other orders for some numbers of rows.

Measured: the plain path differs in nearly every row between "alone" and "in a batch", this one in none.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, groupby
from math import gcd
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.attention.pool import KVPool
from mini_engine.invariant.findings import cpu, remembered
from mini_engine.invariant.probe import Rows, opposite_terms, row_numbers, rows_that_hold

TILE = 128  # keys in a tile, and at most as many queries in an item
KEYS = torch.arange(TILE)
T = TypeVar("T")
HIDDEN = -1e30  # finite, since 0 times infinity is NaN; its weight is exactly 0
CALL_BYTES = 1 << 22  # of keys that one call reads at most: a larger copy would not stay in the cache
LEAST_SAVED = 1 << 17  # bytes of keys; to read fewer twice takes less time than one more call
ENLARGED = 1 << 12  # makes scores out of the rounding of opposite terms


@dataclass(frozen=True)
class Item:
    """Up to ``TILE`` consecutive queries of one sequence: packed rows ``start`` … ``start + q_len - 1``.

    ``kv_len``: the keys of the sequence that the last of these queries sees.
    """

    sequence: int
    start: int
    q_len: int
    kv_len: int

    @property
    def num_tiles(self) -> int:
        """Tiles that hold this item's keys, the last one partly filled."""
        return -(-self.kv_len // TILE)


@dataclass(frozen=True)
class Call:
    """One kernel call over S tiles, for each of which as many items ask.

    With a single tile and a single key-value head there would be one unit of work. The kernel then runs outside any
    parallel region and the BLAS beneath it splits rows among threads, which changes bits; so that tile is listed twice
    and the second result is not read.
    """

    slots: Tensor  # [S * TILE] slots of the keys, tile after tile
    items: Tensor | slice  # [S * n] the items that ask, tile after tile
    mask: Tensor  # [S, 1, R, TILE] 0 or HIDDEN; R query rows of one key-value head, padded as ``query_rows`` says
    num_results: int  # that are read, n for each tile


@dataclass(frozen=True)
class Group:
    """G items of equal ``q_len``, most tiles first, and the kernel calls for their P (item, tile) pairs.

    The pairs are ordered by tile and then by item, so the items that have a tile t are always the first
    ``items_per_tile[t]`` ones.
    """

    rows: Tensor | slice  # [G * q_len] packed rows, item after item
    calls: list[Call]
    order: Tensor | slice  # [P] where each pair is among the results of all calls
    owner: Tensor  # [P] the item of each pair
    items_per_tile: list[int]


def make_items(metadata: AttentionMetadata, longest: int) -> list[Item]:
    """Cut every sequence's queries into items of at most ``longest``; each sees the keys up to its own last query."""
    items = []
    kv_lens = metadata.seq_lens_kv.tolist()
    for sequence, ((start, end), kv_len) in enumerate(zip(metadata.query_ranges, kv_lens, strict=True)):
        for first in range(start, end, longest):
            last = min(first + longest, end)
            items.append(Item(sequence, first, last - first, kv_len - (end - last)))
    return items


def tile_slots(metadata: AttentionMetadata, zero_slot: int) -> Tensor:
    """Return the slots of every sequence's keys, tile after tile -> [N, tiles, TILE]; padding is the zero slot."""
    own = metadata.kv_slots
    slots = own[0][None] if len(own) == 1 else pad_sequence(own, batch_first=True, padding_value=zero_slot)
    return F.pad(slots, (0, -slots.shape[1] % TILE), value=zero_slot).view(len(slots), -1, TILE)


def make_group(
    items: Sequence[Item], slots: Tensor, pool: KVPool, num_attention_heads: int, numbers: Sequence[int]
) -> Group:
    """Lay out ``items`` of equal q_len; see ``Group``.

    ``slots`` [N, tiles, TILE]: those of all sequences. ``numbers``: the numbers of query rows that there may be.
    """
    num_kv_heads = pool.keys[0].shape[0]
    items = sorted(items, key=lambda item: -item.num_tiles)
    items_per_tile = [sum(item.num_tiles > tile for item in items) for tile in range(items[0].num_tiles)]
    pairs = [(number, tile) for tile, count in enumerate(items_per_tile) for number in range(count)]
    places = [items[number].sequence * slots.shape[1] + tile for number, tile in pairs]
    tiles = slots.view(-1, TILE).index_select(0, torch.tensor(places))  # [P, TILE]
    first = [first_hidden(items[number], tile) for number, tile in pairs]
    heads_per_kv = num_attention_heads // num_kv_heads
    query = query_of_row(numbers[-1], heads_per_kv)
    calls = list[Call]()
    found = list[int]()
    for shares in share_calls(tiles, first, pool, numbers[-1] // (items[0].q_len * heads_per_kv)):
        leads = [share[0] for share in shares]
        asking = list(chain(*shares))
        padded = next(n for n in numbers if n >= len(shares[0]) * items[0].q_len * heads_per_kv)
        twice = 2 if len(leads) * num_kv_heads == 1 else 1
        mask = tile_masks(torch.tensor([first[pair] for pair in leads] * twice), query[:padded], pool.keys[0].dtype)
        own = index([pairs[pair][0] for pair in asking] * twice)
        calls.append(Call(tiles[leads * twice].view(-1), own, mask, len(asking)))
        found += asking
    return Group(
        rows=index([row for item in items for row in range(item.start, item.start + items[0].q_len)]),
        calls=calls,
        order=index(sorted(range(len(found)), key=found.__getitem__)),
        owner=torch.tensor([number for number, _ in pairs]),
        items_per_tile=items_per_tile,
    )


def share_calls(tiles: Tensor, first: Sequence[int], pool: KVPool, most: int) -> list[list[list[int]]]:
    """Return for each kernel call which of the P pairs ask at each of its tiles; for all its tiles as many do.

    ``tiles`` [P, TILE] slots, ``first`` [P] as from ``first_hidden``. At most ``most`` pairs ask at one tile. Pairs
    share a tile if all their queries see all of it: then each row meets what it meets alone.
    """
    steps = tiles[:, :: gcd(TILE, pool.page_size)].tolist()  # a slot in each page tells which page it is
    same = defaultdict[object, list[int]](list)
    for pair, (slots, hidden) in enumerate(zip(steps, first, strict=True)):
        same[tuple(slots) if hidden >= TILE else pair].append(pair)
    by_size = defaultdict[int, list[list[int]]](list)
    for share in chain(*(pieces(pairs, most) for pairs in same.values())):
        by_size[len(share)].append(share)
    tile_bytes = pool.keys[0][:, :TILE].nbytes
    for size in [size for size in by_size if size > 1]:
        if (size - 1) * len(by_size[size]) * tile_bytes < LEAST_SAVED:
            by_size[1] += [[pair] for pair in chain(*by_size.pop(size))]
    at_once = max(1, CALL_BYTES // tile_bytes)
    return [part for shares in by_size.values() if shares for part in pieces(shares, at_once)]


def pieces(values: list[T], size: int) -> list[list[T]]:
    """Cut ``values`` into pieces of at most ``size``."""
    return [values[start : start + size] for start in range(0, len(values), size)]


def first_hidden(item: Item, tile: int) -> int:
    """Return the place in the ``tile``, negative if it lies before it, of the first key that query 0 does not see."""
    return item.kv_len - item.q_len + 1 - tile * TILE


def index(rows: list[int]) -> Tensor | slice:
    """Return ``rows`` as an index; a slice where they are consecutive, since that one copies nothing."""
    consecutive = rows == list(range(rows[0], rows[0] + len(rows)))
    return slice(rows[0], rows[0] + len(rows)) if consecutive else torch.tensor(rows)


@cache  # asked for in every step
def query_of_row(rows: int, heads_per_kv: int) -> Tensor:
    """Return the query of each row of a matrix whose row i * heads_per_kv + h is query i of head h -> [rows]."""
    return torch.arange(rows) // heads_per_kv


def tile_masks(first: Tensor, query: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive causal masks of S tiles -> [S, 1, R, TILE]: ``HIDDEN`` for keys after a query, 0 for others.

    ``first`` [S] as from ``first_hidden``; ``query`` [R] as from ``query_of_row``.
    """
    is_later = (first[:, None] + query)[:, None, :, None] <= KEYS
    return is_later.to(dtype).mul_(HIDDEN)


def query_rows(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[int]:
    """Return the numbers of query rows for which the kernel gives a row the same bits everywhere on this machine.

    Raises ``ValueError`` if there is none that holds the query heads of one key-value head.
    """
    return find_query_rows(heads, kv_heads, head_dim, dtype, torch.get_num_threads())


@cache  # asked for in every step
def find_query_rows(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, threads: int) -> list[int]:
    """See ``query_rows``; there are ``threads`` in use."""
    shape = f"{heads} query heads, {kv_heads} key-value heads of {head_dim}, {str(dtype).removeprefix('torch.')}"
    numbers: list[int] = remembered(
        f"invariant attention: {shape}",
        lambda: query_rows_that_hold(kv_heads, head_dim, dtype, row_numbers(TILE * heads // kv_heads)),
    )
    if not numbers or numbers[-1] < heads // kv_heads:
        raise ValueError(
            f"batch_invariant=True cannot be kept on this CPU ({cpu()['model name']}) with {threads} threads: "
            f"attention with {shape} gives a row other bits in other batches; leave batch_invariant off, or try "
            "another dtype or number of threads"
        )
    return numbers


def query_rows_that_hold(kv_heads: int, head_dim: int, dtype: torch.dtype, numbers: Sequence[int]) -> list[int]:
    """Try the kernel as ``InvariantAttention`` calls it: for one tile (twice, if that is one unit) and for three.

    Every score is a sum of opposite terms, so it is rounding alone, made large enough to change the weights. And every
    key is there twice, with opposite values. The log-sum-exp shows the scores' order of additions, the output that of
    the values.
    """
    row, vectors = opposite_terms(head_dim, TILE // 2, dtype)  # [D], [TILE / 2, D]; their products are 0
    of_pair, values = opposite_terms(TILE, head_dim, dtype)  # [TILE] with one number for each pair, [D, TILE]
    row, keys = row * ENLARGED, vectors[of_pair.unique(return_inverse=True)[1]]  # [TILE, D]

    def attend(pairs: int) -> Rows:
        shape = (pairs, kv_heads, -1, -1)
        all_keys = keys.expand(*shape).contiguous()
        all_values = values.T.expand(*shape).contiguous()

        def attend_all(x: Tensor) -> Tensor:
            out, lse = kernel(x.expand(*shape), all_keys, all_values, torch.zeros(pairs, 1, len(x), TILE, dtype=dtype))
            return torch.cat((out.float(), lse.float()[..., None]), dim=-1).permute(2, 0, 1, 3)  # [R, S, Hkv, D + 1]

        return attend_all

    for pairs in (2 if kv_heads == 1 else 1, 3):
        numbers = rows_that_hold(attend(pairs), row, numbers)
    return list(numbers)


def kernel(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Attend over one tile of keys per pair. ``q`` [S, Hkv, R, D], ``keys``, ``values`` [S, Hkv, TILE, D].

    ``scale``: the factor of the scores, ``None`` for 1 / sqrt(D). Returns out [S, Hkv, R, D] and the log-sum-exp of the
    scores [S, Hkv, R].
    """
    return torch._scaled_dot_product_flash_attention_for_cpu(q, keys, values, attn_mask=mask, scale=scale)


class InvariantAttention:
    """``PagedAttention`` with a fixed order of additions: same signature, same values to rounding."""

    def __init__(
        self, pool: KVPool, metadata: AttentionMetadata, num_attention_heads: int, scale: float | None = None
    ) -> None:
        """Plan the step once, for all layers. ``scale``: the factor of the scores, ``None`` for 1 / sqrt(D)."""
        self.pool = pool
        self.scale = scale
        self.metadata = metadata
        num_kv_heads, _, head_dim = pool.keys[0].shape
        numbers = query_rows(num_attention_heads, num_kv_heads, head_dim, pool.keys[0].dtype)
        longest = min(TILE, numbers[-1] // (num_attention_heads // num_kv_heads))
        slots = tile_slots(metadata, pool.zero_slot)
        by_length = sorted(make_items(metadata, longest), key=lambda item: item.q_len)
        self.groups = [
            make_group(list(items), slots, pool, num_attention_heads, numbers)
            for _, items in groupby(by_length, key=lambda item: item.q_len)
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D] -> [T, Hq, D]. Writes the step's slots of the pool."""
        self.pool.write(layer, k, v, self.metadata.slot_mapping)
        if len(self.groups) == 1 and isinstance(self.groups[0].rows, slice):  # all rows, in order
            return self.attend(layer, q, self.groups[0])
        out = torch.empty_like(q)
        for group in self.groups:
            out[group.rows] = self.attend(layer, q[group.rows], group)
        return out

    def attend(self, layer: int, q: Tensor, group: Group) -> Tensor:
        """Attend for one group. ``q`` [G * q_len, Hq, D] -> [G * q_len, Hq, D]."""
        queries = pack_query_rows(q, group.items_per_tile[0], self.pool.keys[0].shape[0])  # [G, Hkv, r, D]
        found = [self.attend_tiles(layer, queries, call) for call in group.calls]
        out, lse = found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
        merged = merge_tiles(out[group.order], lse[group.order], group.owner, group.items_per_tile)
        return unpack_query_rows(merged, q)

    def attend_tiles(self, layer: int, queries: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Make one kernel call. ``queries`` [G, Hkv, r, D] -> out [S * n, Hkv, r, D] and log-sum-exp [S * n, Hkv, r].

        r: the query rows of an item.
        """
        count, _, padded, _ = call.mask.shape  # S, 1, R, TILE
        keys, values = self.pool.gather(layer, call.slots)  # [Hkv, S * TILE, D]
        asking = queries[call.items]  # [S * n, Hkv, r, D]
        total, num_kv_heads, rows, head_dim = asking.shape
        num_asking = total // count  # n
        if num_asking > 1:
            asking = asking.view(count, num_asking, num_kv_heads, rows, head_dim).transpose(1, 2).flatten(2, 3)
        missing = padded - num_asking * rows
        out, lse = kernel(
            torch.constant_pad_nd(asking, (0, 0, 0, missing)) if missing else asking,  # [S, Hkv, R, D]
            keys.view(num_kv_heads, count, TILE, head_dim).transpose(0, 1),  # [S, Hkv, TILE, D]
            values.view(num_kv_heads, count, TILE, head_dim).transpose(0, 1),
            call.mask,
            self.scale,
        )  # out [S, Hkv, R, D], lse [S, Hkv, R]
        out, lse = out.narrow(2, 0, num_asking * rows), lse.narrow(2, 0, num_asking * rows)
        if num_asking > 1:
            out = out.unflatten(2, (num_asking, rows)).transpose(1, 2).flatten(0, 1)
            lse = lse.unflatten(2, (num_asking, rows)).transpose(1, 2).flatten(0, 1)
        return out.narrow(0, 0, call.num_results), lse.narrow(0, 0, call.num_results)


def pack_query_rows(q: Tensor, count: int, num_kv_heads: int) -> Tensor:
    """Put the query heads of one key-value head, for all queries of an item, into rows of one matrix.

    ``q`` [G * q_len, Hq, D] -> [G, Hkv, q_len * Hq / Hkv, D].
    """
    total, num_heads, head_dim = q.shape
    q_len, heads_per_kv = total // count, num_heads // num_kv_heads
    if q_len == 1:
        return q.view(count, num_kv_heads, heads_per_kv, head_dim)
    return q.view(count, q_len, num_kv_heads, heads_per_kv, head_dim).transpose(1, 2).flatten(2, 3)


def unpack_query_rows(rows: Tensor, q: Tensor) -> Tensor:
    """Undo ``pack_query_rows``: ``rows`` [G, Hkv, r, D] -> the shape of ``q`` [G * q_len, Hq, D]."""
    count, num_kv_heads, _, head_dim = rows.shape
    q_len, heads_per_kv = q.shape[0] // count, q.shape[1] // num_kv_heads
    if q_len > 1:
        rows = rows.view(count, num_kv_heads, q_len, heads_per_kv, head_dim).transpose(1, 2)
    return rows.reshape(q.shape)


def merge_tiles(out: Tensor, lse: Tensor, owner: Tensor, items_per_tile: Sequence[int]) -> Tensor:
    """Merge softmax-weighted sums over disjoint keys, tile after tile, in float32.

    ``out`` [P, Hkv, r, D] and ``lse`` [P, Hkv, r] ordered as in ``Group`` -> [G, Hkv, r, D] in the dtype of ``out``.
    With ``m`` the largest log-sum-exp of a row's tiles, a tile's weight is exp(lse - m). A tile that a row cannot see
    weighs exactly 0, so further masked tiles change no bit.
    """
    count = items_per_tile[0]
    if len(items_per_tile) == 1:
        return out
    if count == 1:
        top = lse.amax(0, keepdim=True)  # [1, Hkv, r]
    else:
        largest, *others = lse.split_with_sizes(items_per_tile)
        largest = largest.clone()  # [G, Hkv, r]
        for part in others:
            shared = largest[: len(part)]
            torch.maximum(shared, part, out=shared)
        top = largest.index_select(0, owner)  # [P, Hkv, r]
    weights = (lse - top).exp_()  # [P, Hkv, r]
    total, *other_weights = weights.split_with_sizes(items_per_tile)
    merged, *others = (out * weights[..., None]).split_with_sizes(items_per_tile)  # float32
    for part, weight in zip(others, other_weights, strict=True):
        merged[: len(part)].add_(part)
        total[: len(part)].add_(weight)
    return merged.div_(total[..., None]).to(out.dtype)
