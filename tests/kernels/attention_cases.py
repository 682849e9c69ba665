"""Batches over a poisoned pool, and attention over them in float64, for the tests of attention kernels."""

import random as python_random
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.kernels.query_blocks import QueryBlocks, cut_queries, whole_sequences
from tests.kernels.cases import random
from tests.kernels.conftest import DEVICE

Lengths = list[tuple[int, int]]  # of each sequence: queries, keys


@dataclass(frozen=True)
class Batch:
    """A step and the keys and values [Hkv, N, kv_len, D] it should read, in the order of positions."""

    q: Tensor
    keys: Tensor
    values: Tensor
    metadata: AttentionMetadata
    exact: Tensor  # [T, Hq, D] float64

    def blocks(self, queries: int, sequences: list[int] | None = None) -> QueryBlocks:
        chosen = [b for b in whole_sequences(self.metadata) if sequences is None or b.sequence in sequences]
        return cut_queries(chosen, queries, DEVICE)

    def poisoned(self) -> Tensor:
        return torch.full_like(self.q, torch.nan)


def make_batch(
    lengths: Lengths,
    page_size: int,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    """Put sequences on pages in random order; every other slot of the pool holds NaN, and the page table ends in -1."""
    num_heads, num_kv_heads = heads
    counts = [-(-kv_len // page_size) for _, kv_len in lengths]
    free = list(range(sum(counts) + 3))
    python_random.Random(seed).shuffle(free)
    table = torch.full((len(lengths), max(counts) + 2), -1, dtype=torch.int32)
    keys = torch.full((num_kv_heads, len(free) * page_size + 1, dim), torch.nan, dtype=dtype)
    values = keys.clone()
    bounds = torch.tensor([0, *(q_len for q_len, _ in lengths)]).cumsum(0)
    q = random(int(bounds[-1]), num_heads, dim, dtype=dtype, seed=seed)
    exact = torch.zeros(q.shape, dtype=torch.float64, device=DEVICE)
    for i, ((_, kv_len), (start, end)) in enumerate(zip(lengths, pairwise(bounds.tolist()), strict=True)):
        pages, free = free[: counts[i]], free[counts[i] :]
        table[i, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        slots = [pages[p // page_size] * page_size + p % page_size for p in range(kv_len)]
        # A sequence's numbers depend on its length and the seed, not on its company.
        key = random(num_kv_heads, kv_len, dim, dtype=dtype, seed=seed + 1000 + kv_len)
        value = random(num_kv_heads, kv_len, dim, dtype=dtype, seed=seed + 2000 + kv_len)
        keys[:, slots] = key.cpu()
        values[:, slots] = value.cpu()
        exact[start:end] = exact_attention(q[start:end], key, value)
    metadata = AttentionMetadata(
        cu_seqlens_q=bounds.int().to(DEVICE),
        seq_lens_kv=torch.tensor([kv_len for _, kv_len in lengths], dtype=torch.int32, device=DEVICE),
        block_table=table.to(DEVICE),
        slot_mapping=torch.zeros(len(q), dtype=torch.int64, device=DEVICE),
        page_size=page_size,
    )
    return Batch(q, keys.to(DEVICE), values.to(DEVICE), metadata, exact)


def exact_attention(q: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend in float64, one query and head at a time. ``q`` [n, Hq, D], ``key``, ``value`` [Hkv, L, D]."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    before = key.shape[1] - len(q)
    group = q.shape[1] // key.shape[0]
    for i in range(len(q)):
        for head in range(q.shape[1]):
            seen, seen_values = (x[head // group, : before + i + 1].double() for x in (key, value))
            scores = (seen * q[i, head].double()).sum(1) / q.shape[2] ** 0.5
            out[i, head] = (torch.softmax(scores, 0)[:, None] * seen_values).sum(0)
    return out
