"""Run the same requests in different batches, and count what padding would have cost."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from mini_engine.attention.allocator import pages_needed
from mini_engine.attention.metadata import BatchInputs, SequenceChunk, pack_batch
from mini_engine.attention.pool import KVPool
from mini_engine.driver import GreedyDriver

TIMING_RUNS = 5


@dataclass(frozen=True)
class Cost:
    """Work and memory of one step: packed ``rows``, query-key ``scores``, KV ``slots`` held, measured ``seconds``."""

    rows: int
    scores: int
    slots: int
    seconds: float


@dataclass(frozen=True)
class BatchCost:
    """One batch, packed and padded to its longest sequence."""

    name: str
    packed: Cost
    padded: Cost


def scattered_pages(lengths: Sequence[int], page_size: int, seed: int | None) -> tuple[list[list[int]], int]:
    """Give every sequence its pages from a pool of just enough, shuffled by ``seed`` (None: in order).

    Returns the pages of each sequence and their total number.
    """
    counts = [pages_needed(length, page_size) for length in lengths]
    free = list(range(sum(counts)))
    if seed is not None:
        random.Random(seed).shuffle(free)
    pages = []
    for count in counts:
        pages.append(free[:count])
        free = free[count:]
    return pages, sum(counts)


@torch.inference_mode()
def run_together(
    driver: GreedyDriver, sequences: Sequence[Sequence[int]], chunk: int | None = None, seed: int | None = None
) -> list[Tensor]:
    """Compute the logits of all positions of all ``sequences`` in one batch -> one [tokens, V] per sequence.

    ``chunk``: new tokens of a sequence per step (``None``: all at once). ``seed``: shuffle the pages. A sequence leaves
    the batch when it is finished.
    """
    size = driver.config.page_size
    pages, num_pages = scattered_pages([len(ids) for ids in sequences], size, seed)
    pool = KVPool(driver.model.config, num_pages, size, driver.model.embedding.dtype)
    pool.poison(list(range(num_pages)))  # a slot that is read before it is written shows as NaN
    parts: list[list[Tensor]] = [[] for _ in sequences]
    step = chunk or max(len(ids) for ids in sequences)
    for start in range(0, max(len(ids) for ids in sequences), step):
        live = [n for n, ids in enumerate(sequences) if start < len(ids)]
        chunks = [SequenceChunk(sequences[n][start : start + step], start, pages[n]) for n in live]
        batch = pack_batch(chunks, size)
        logits = driver.model(batch.input_ids, batch.positions, driver.make_attention(pool, batch.metadata))
        for n, (first, end) in zip(live, batch.metadata.query_ranges, strict=True):
            parts[n].append(logits[first:end])
    return [torch.cat(part) for part in parts]


def with_page_size(driver: GreedyDriver, page_size: int) -> GreedyDriver:
    """Return a driver of the same model with another page size."""
    config = replace(driver.config, page_size=page_size)
    return GreedyDriver(driver.model, config, attention=driver.make_attention)


def measure_padding(driver: GreedyDriver, name: str, sequences: Sequence[tuple[int, int]]) -> BatchCost:
    """Count and time one step of ``sequences``, given as (cached tokens, new tokens), packed and padded.

    Padded means that every sequence is as long as the longest, cached and new, and holds KV slots for it.
    """
    cached, new = max(c for c, _ in sequences), max(n for _, n in sequences)
    return BatchCost(name, step_cost(driver, sequences), step_cost(driver, [(cached, new)] * len(sequences)))


def step_cost(driver: GreedyDriver, sequences: Sequence[tuple[int, int]]) -> Cost:
    """Count the work of one step on made-up tokens, and time it: the best of several runs."""
    size = driver.config.page_size
    pages, num_pages = scattered_pages([cached + new for cached, new in sequences], size, seed=None)
    batch = pack_batch(
        [SequenceChunk([1] * new, cached, own) for (cached, new), own in zip(sequences, pages, strict=True)], size
    )
    pool = KVPool(driver.model.config, num_pages, size, driver.model.embedding.dtype)
    return Cost(
        rows=len(batch.input_ids),
        scores=sum(new * (cached + new) for cached, new in sequences),
        slots=num_pages * size,
        seconds=min(timed_forward(driver, batch, pool) for _ in range(TIMING_RUNS)),
    )


def timed_forward(driver: GreedyDriver, batch: BatchInputs, pool: KVPool) -> float:
    """Return the seconds of one step."""
    start = perf_counter()
    driver.forward(batch, pool)
    return perf_counter() - start
