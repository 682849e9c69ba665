"""Beside L2's plain path: paged attention that reads sequences where they lie, for pages that follow one another.

Owns: finding such sequences, and reading them without a copy. Must not know: projections, requests.

``PagedAttention`` copies the keys and values of a sequence together at every layer of every step. When the pages of
a sequence are p, p + 1, p + 2, …, its slots are one piece of the pool already, and a view of it serves the kernel as
well. That is so whenever one request has the pool for itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mini_engine.attention.allocator import pages_needed
from mini_engine.attention.dense import AttentionKernel, sdpa_attention
from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.attention.pool import KVPool


@dataclass(frozen=True)
class Run:
    """One sequence of a step: its packed rows ``start`` … ``end - 1``, and its keys from ``first_slot`` on."""

    start: int
    end: int
    first_slot: int
    kv_len: int


def find_runs(metadata: AttentionMetadata) -> list[Run] | None:
    """Return the run of every sequence; ``None`` if the pages of any sequence do not follow one another."""
    runs = []
    lengths, table = metadata.seq_lens_kv.tolist(), metadata.block_table.tolist()
    for (start, end), kv_len, row in zip(metadata.query_ranges, lengths, table, strict=True):
        pages = row[: pages_needed(kv_len, metadata.page_size)]
        if any(after != before + 1 for before, after in pairwise(pages)):
            return None
        runs.append(Run(start, end, pages[0] * metadata.page_size, kv_len))
    return runs


class ConsecutiveAttention:
    """``PagedAttention`` without copies: same signature, same bits."""

    def __init__(
        self, pool: KVPool, slot_mapping: Tensor, runs: Sequence[Run], kernel: AttentionKernel = sdpa_attention
    ) -> None:
        """Bind the pool, the slots to write [T], the runs of the same step and the kernel."""
        self.pool, self.slot_mapping, self.runs, self.kernel = pool, slot_mapping, runs, kernel

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D] -> [T, Hq, D]. Writes the step's slots of the pool."""
        self.pool.write(layer, k, v, self.slot_mapping)
        outputs = []
        for run in self.runs:
            keys = self.pool.keys[layer].narrow(1, run.first_slot, run.kv_len)  # [Hkv, kv_len, D], a view
            values = self.pool.values[layer].narrow(1, run.first_slot, run.kv_len)
            out = self.kernel(q[run.start : run.end].transpose(0, 1), keys, values)  # [Hq, q_len, D]
            outputs.append(out.transpose(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [T, Hq, D]
