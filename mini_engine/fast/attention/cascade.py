"""A faster form of L2's plain path: decode rows that begin with the same pages read those once.

With a prefix cache many sequences lie on the same pages at first and on their own after that. A softmax over all keys
is the weighted mean of softmaxes over parts of them, the weights being exp(log-sum-exp). So the queries of all rows go
to the common keys together, as rows of one matrix, and to their own keys in one padded call; then both are merged.
Rows on scattered pages are the case in which nothing is common: one padded call reads all of them.
Source: cascade attention (FlashInfer), Hydragen.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mini_engine.attention.dense import AttentionKernel
from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.fast.attention.ragged import StepCache, attend_alone, length_mask

LEAST_SHARED = 64  # tokens; for fewer, a second call costs more than it saves


@dataclass(frozen=True)
class SharedPrefix:
    """Rows that begin alike: ``rows`` [n] of the cascade's N, and the ``slots`` [S] of their common keys."""

    rows: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Cascade:
    """The sequences ``members`` [N] of a step that share a prefix with others: which ones, and what is their own.

    ``rows`` [N]: their packed rows. ``own_slots`` [N * L]: the slots of each one's own keys, padded with the zero slot.
    ``mask`` [N, 1, 1, L]: 0 for a key, ``ragged.HIDDEN`` for padding.
    """

    members: list[int]
    rows: Tensor
    prefixes: list[SharedPrefix]
    own_slots: Tensor
    mask: Tensor


def find_cascade(cache: StepCache) -> Cascade | None:
    """Return the cascade of a step's decode rows; ``None`` if none would save more reading than padding costs."""
    metadata, kv_lens = cache.metadata, cache.lengths
    table = metadata.block_table.tolist()
    own = dict[int, Tensor]()
    prefixes = list[SharedPrefix]()
    for group in alike(table, decode_rows(metadata)):
        if all(cache.first_slots[i] is not None for i in group):
            continue  # a draft (``scheduler/drafts.py``) that lies in one piece: a grid reads it without a copy
        # The newest token's page may be full and still is its own: a row keeps at least one key for the second call.
        most = (min(kv_lens[i] for i in group) - 1) // metadata.page_size
        shared = len(common_pages([table[i][:most] for i in group])) * metadata.page_size
        if shared >= LEAST_SHARED:
            rows = torch.arange(len(own), len(own) + len(group))
            prefixes.append(SharedPrefix(rows, metadata.kv_slots[group[0]][:shared]))
            own |= {i: metadata.kv_slots[i][shared:] for i in group}
    if max(map(len, own.values()), default=0) * len(own) > sum(kv_lens[i] for i in own):
        return None
    return cascade_of(cache, own, prefixes) if own else None


def find_scattered(cache: StepCache) -> Cascade | None:
    """Return a cascade without prefixes, which reads all decode rows in one call; ``None`` if most rows need no copy.

    ``None`` as well if padding would double what is read. In a pool that a prefix cache has filled, a new request gets
    pages of several old ones, so hardly any sequence lies in one piece.
    """
    rows = decode_rows(cache.metadata)
    num_scattered = sum(cache.first_slots[i] is None for i in rows)
    lengths = [cache.lengths[i] for i in rows]
    if num_scattered < 2 or 2 * num_scattered < len(rows) or max(lengths) * len(rows) > 2 * sum(lengths):
        return None
    return cascade_of(cache, {i: cache.metadata.kv_slots[i] for i in rows}, [])


def decode_rows(metadata: AttentionMetadata) -> list[int]:
    """Return the sequences of a step that have one new token."""
    return [i for i, (start, end) in enumerate(metadata.query_ranges) if end - start == 1]


def cascade_of(cache: StepCache, own: dict[int, Tensor], prefixes: list[SharedPrefix]) -> Cascade:
    """Return the cascade of sequences whose own keys are in the slots ``own``."""
    slots = pad_sequence(list(own.values()), batch_first=True, padding_value=cache.pool.zero_slot)  # [N, L]
    mask = length_mask([len(each) for each in own.values()], cache.pool.keys[0].dtype)
    starts = torch.tensor([cache.metadata.query_ranges[i][0] for i in own])
    return Cascade(list(own), starts, prefixes, slots.flatten(), mask)


def alike(table: Sequence[Sequence[int]], sequences: Sequence[int]) -> list[list[int]]:
    """Return the groups of two and more ``sequences`` whose first page is the same one."""
    groups = defaultdict(list)
    for index in sequences:
        groups[table[index][0]].append(index)
    return [group for group in groups.values() if len(group) > 1]


def common_pages(tables: Sequence[Sequence[int]]) -> list[int]:
    """Return the pages with which all ``tables`` begin."""
    return [pages[0] for pages in takewhile(lambda pages: len(set(pages)) == 1, zip(*tables, strict=True))]


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attend without causality. ``q`` [B, Hkv, R, D], ``k``, ``v`` [B, Hkv, L, D] -> float32 out, log-sum-exp."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)
    return out.float(), lse  # [B, Hkv, R, D], [B, Hkv, R]


class CascadeAttention:
    """``PagedAttention`` that reads common prefixes once: same signature, same values to rounding."""

    def __init__(self, cache: StepCache, cascade: Cascade, kernel: AttentionKernel) -> None:
        """Bind the step's part of the cache, its cascade, and the kernel for all other sequences."""
        self.cache = cache
        self.cascade = cascade
        self.kernel = kernel
        self.others = sorted(set(range(len(cache.metadata.query_ranges))) - set(cascade.members))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D] -> [T, Hq, D]. Writes the step's slots of the pool."""
        self.cache.write(layer, k, v)
        rows = self.cascade.rows
        out = torch.empty_like(q).index_copy_(0, rows, self.attend(layer, q[rows], k.shape[1]))
        attend_alone(layer, q, out, self.cache, self.others, self.kernel)
        return out

    def attend(self, layer: int, q: Tensor, num_kv_heads: int) -> Tensor:
        """Attend for the decode rows. ``q`` [N, Hq, D] -> [N, Hq, D]."""
        count, _, dim = q.shape
        grouped = q.view(count, num_kv_heads, -1, dim)  # [N, Hkv, R, D]: the query heads of one key-value head
        keys, values = (
            own.view(num_kv_heads, count, -1, dim).transpose(0, 1)  # [N, Hkv, L, D]
            for own in self.cache.pool.gather(layer, self.cascade.own_slots)
        )
        out, lse = flash(grouped, keys, values, self.cascade.mask)
        for prefix in self.cascade.prefixes:
            keys, values = self.cache.pool.gather(layer, prefix.slots)  # [Hkv, S, D] each
            together = grouped[prefix.rows].transpose(0, 1)  # [Hkv, n, R, D]
            common, weight = flash(together.reshape(1, num_kv_heads, -1, dim), keys[None], values[None])
            common = common.view(together.shape).transpose(0, 1)  # [n, Hkv, R, D]
            weight = weight.view(together.shape[:3]).transpose(0, 1)  # [n, Hkv, R]
            share = torch.sigmoid(weight - lse[prefix.rows])[..., None]  # exp(a) / (exp(a) + exp(b))
            out[prefix.rows] = torch.lerp(out[prefix.rows], common, share)
        return out.view(q.shape).to(q.dtype)
