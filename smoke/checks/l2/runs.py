"""L2's whole runs: models over packed, chunked, paged batches.

Owns: the loop that plays a schedule over a pool, and the checks built on it. Single functions are in ``l2.py``.
"""

import random
from typing import Any

import torch
from torch import Tensor

from smoke.checks.l1.runs import build_model
from smoke.checks.l2 import spec_paging as paging
from smoke.checks.l2.functions import PAGE_SIZES
from smoke.checks.l2.spec_paging import Schedule, make_schedule
from smoke.framework import peer, rows
from smoke.framework.cases import DTYPES, LENGTHS, ModelCase, embedded_case, random_case, random_ids, random_tensor
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, close, differences, remember
from smoke.framework.prepared import prepared

REGISTRY = Registry()
RAGGED = (33, 1, 70, 8, 17)  # prompt lengths of a batch
RUN_CASES = ("GQA 6:2, tied", "MQA 5:1, tied, theta 5e5", "GQA 9:3, wide heads")


def play(model: Any, schedule: Schedule, dtype: str, make_attention: Any) -> list[Tensor]:
    """Compute every sequence of a schedule -> per sequence the logits [len, V] of all its rows.

    All pages start poisoned with NaN and are poisoned again when their sequence is finished.
    """
    from mini_engine.attention.metadata import SequenceChunk, pack_batch
    from mini_engine.attention.pool import KVPool

    pool = KVPool(model.config, schedule.num_pages, schedule.page_size, DTYPES[dtype])
    pool.poison(list(range(schedule.num_pages)))
    outputs: list[list[Tensor]] = [[] for _ in schedule.sequences]
    for step in schedule.steps:
        chunks = []
        for sequence, start, end in step.parts:
            room = -(-end // schedule.page_size)
            chunks.append(
                SequenceChunk(schedule.sequences[sequence][start:end], start, schedule.pages[sequence][:room])
            )
        batch = pack_batch(chunks, schedule.page_size)
        logits = model(batch.input_ids, batch.positions, make_attention(pool, batch.metadata))
        row = 0
        for sequence, start, end in step.parts:
            outputs[sequence].append(logits[row : row + end - start])
            row += end - start
        pool.poison(step.retired)
    return [torch.cat(parts) for parts in outputs]


def paged(kernel_name: str) -> Any:
    """Return a maker of the candidate's ``PagedAttention`` with one kernel."""

    def make(pool: Any, metadata: Any) -> Any:
        from mini_engine.attention import dense
        from mini_engine.attention.paged import PagedAttention

        return PagedAttention(pool, metadata, getattr(dense, kernel_name))

    return make


# L2.D: raw tensors ----------------------------------------------------------------------------------------------------

RAW_CHUNKS = ((5, 0), (9, 6), (12, 11), (1, 0))  # tokens, of which in the cache


def raw_inputs(seed: int) -> tuple[list[list[int]], Tensor, Tensor, Tensor]:
    """Draw pages of four sequences (page size 4) and one long q, k, v over all their positions."""
    pages = list(range(12))
    random.Random(seed).shuffle(pages)
    owned = [[pages.pop() for _ in range(-(-total // 4))] for total, _ in RAW_CHUNKS]
    total = sum(total for total, _ in RAW_CHUNKS)
    q = random_tensor(total, 6, 32, seed=seed)
    return owned, q, random_tensor(total, 2, 32, seed=seed + 1), random_tensor(total, 2, 32, seed=seed + 2)


@torch.no_grad()
@prepared
def cached_slots(pages: list[int], computed: int) -> list[int]:
    """Return the slots of the first tokens of a sequence, on pages of 4."""
    return [paging.slot(pages, position, 4) for position in range(computed)]


def raw_probe(seed: int) -> Values:
    """Fill the cached part of a pool, then attend with the packed rest, on layer 1."""
    from mini_engine.attention.metadata import SequenceChunk, pack_batch
    from mini_engine.attention.pool import KVPool
    from mini_engine.config import ModelConfig

    owned, q, k, v = raw_inputs(seed)
    config = ModelConfig.from_hf(random_case("GQA 6:2, tied", seed).hf_config)
    values: Values = {}
    for kernel in ("eager_attention", "sdpa_attention"):
        pool = KVPool(config, 12, 4, torch.float32)
        pool.poison(list(range(12)))
        rows_now = []
        chunks = []
        first = 0
        for pages, (total, computed) in zip(owned, RAW_CHUNKS, strict=True):
            slots = torch.tensor(cached_slots(pages, computed), dtype=torch.int64)
            pool.write(1, k[first : first + computed], v[first : first + computed], slots)
            chunks.append(SequenceChunk([0] * (total - computed), computed, pages))
            rows_now += list(range(first + computed, first + total))
            first += total
        attention = paged(kernel)(pool, pack_batch(chunks, 4).metadata)
        query = q[rows_now]
        out = attention(1, query, k[rows_now], v[rows_now])
        values |= {kernel: out.clone(), f"{kernel}, q afterwards": query}
        attention(0, 2 * query, k[rows_now], v[rows_now])
        values[f"{kernel}, after the call of another layer"] = out
    return values


def raw_spec(seed: int) -> Values:
    """Attend each sequence alone in float64, and keep the rows after the cached ones."""
    _, q, k, v = raw_inputs(seed)
    out, asked = [], []
    first = 0
    for total, computed in RAW_CHUNKS:
        part = slice(first, first + total)
        asked.append(q[part][computed:])
        whole = rows.causal_attention(q[part].transpose(0, 1), k[part].transpose(0, 1), v[part].transpose(0, 1))
        out.append(whole.transpose(0, 1)[computed:])
        first += total
    values: Values = {}
    for kernel in ("eager_attention", "sdpa_attention"):
        values |= {kernel: torch.cat(out), f"{kernel}, q afterwards": torch.cat(asked)}
        values[f"{kernel}, after the call of another layer"] = torch.cat(out)
    return values


REGISTRY.add(
    "L2.D.values",
    "Every packed query attends to its own sequence up to its own position, through the pool (float64 rows, 1e-5). "
    "Nothing changes but the pool.",
    raw_probe,
    close(raw_spec, 1e-5),
)


# L2.D: models ---------------------------------------------------------------------------------------------------------


def alone_cases(seed: int) -> list[ModelCase]:
    """Return the models on which one whole prompt must keep L1's bits."""
    return [embedded_case(), random_case("GQA 9:3, wide heads", seed)]


@torch.no_grad()
def alone_probe(seed: int) -> Values:
    """Run single whole prompts over pools of several page sizes."""
    values: Values = {}
    for case in alone_cases(seed):
        for dtype in DTYPES:
            model = build_model(case, dtype)
            for length, page_size in zip(LENGTHS, (16, 1, 4, 16, 64, 16), strict=True):
                sequence = random_ids(case.vocab_size, length, seed)
                schedule = make_schedule([sequence], page_size, seed, [length])
                for kernel in ("eager", "sdpa"):
                    name = f"{case.name}, {dtype}, {length} tokens, {kernel}, page size {page_size}"
                    values[name] = play(model, schedule, dtype, paged(f"{kernel}_attention"))[0]
    return values


def alone_peer(seed: int) -> Values:
    """Return transformers' logits."""
    return {
        f"{case.name}, {dtype}, {length} tokens, {kernel}, page size {page_size}": peer.logits(
            case, dtype, kernel, random_ids(case.vocab_size, length, seed)
        )
        for case in alone_cases(seed)
        for dtype in DTYPES
        for length, page_size in zip(LENGTHS, (16, 1, 4, 16, 64, 16), strict=True)
        for kernel in ("eager", "sdpa")
    }


REGISTRY.add(
    "L2.D.alone",
    "One sequence, whole prompt: paged attention has the bits of L1, and so of transformers, with either kernel.",
    alone_probe,
    bitwise(alone_peer),
)


def batch_probe(chunk_sizes: tuple[int, ...]) -> Any:
    """Return a probe that computes ragged sequences together."""

    @torch.no_grad()
    def probe(seed: int) -> Values:
        values: Values = {}
        for name in RUN_CASES:
            case = random_case(name, seed)
            model = build_model(case, "float32")
            sequences = [random_ids(case.vocab_size, length, seed) for length in RAGGED]
            for page_size in PAGE_SIZES:
                schedule = make_schedule(sequences, page_size, seed, chunk_sizes)
                values[f"{name}, page size {page_size}"] = {
                    f"sequence {i} of {len(ids)} tokens": logits
                    for i, (ids, logits) in enumerate(
                        zip(sequences, play(model, schedule, "float32", paged("sdpa_attention")), strict=True)
                    )
                }
        return values

    return probe


def solo_logits(seed: int) -> Values:
    """Return transformers' logits of every sequence of a batch alone."""
    values: Values = {}
    for name in RUN_CASES:
        case = random_case(name, seed)
        alone = {
            f"sequence {i} of {length} tokens": peer.logits(
                case, "float32", "sdpa", random_ids(case.vocab_size, length, seed)
            )
            for i, length in enumerate(RAGGED)
        }
        values |= {f"{name}, page size {page_size}": alone for page_size in PAGE_SIZES}
    return values


SOLO = remember(solo_logits)


def batch_verdict(seed: int, got: Values) -> list[Failure]:
    """Logits within 1e-5 of each sequence alone, and the same likeliest id wherever it is not a tie."""
    expected = SOLO(seed)
    failures = differences(expected, got, 1e-5)
    for name, sequences in expected.items():
        for sequence, want in sequences.items():
            have = got[name][sequence]
            top = want.topk(2).values
            clear = top[:, 0] - top[:, 1] > 1e-4
            wrong = (want.argmax(-1) != have.argmax(-1)) & clear
            if bool(wrong.any()):
                row = int(wrong.nonzero()[0])
                best, other = (f"token {int(logits[row].argmax())}" for logits in (want, have))
                failures.append(Failure(f"{name}, {sequence}", f"row {row}", best, other, "the likeliest ids differ"))
    return failures


REGISTRY.add(
    "L2.D.packed",
    "Ragged whole prompts, packed over scattered pages, give each sequence the logits it has alone (1e-5, same ids).",
    batch_probe((1000,)),
    batch_verdict,
)
REGISTRY.add(
    "L2.D.chunked",
    "Prompts cut into chunks of 1 to 40 tokens among others, with stale pages poisoned, give the same logits "
    "(1e-5, same ids).",
    batch_probe((1, 1, 3, 7, 16, 40)),
    batch_verdict,
)


# L2.C: the layout under batch-invariant arithmetic ------------------------------------------------------------------

INVARIANT_LENGTHS = (1, 140, 40, 260)
THREADS = (1, 2, 4, 8)


@torch.no_grad()
def invariant_probe(seed: int) -> Values:
    """Compute every sequence alone and whole, then all together in random ways and thread counts."""
    from mini_engine.config import EngineConfig, ModelConfig
    from mini_engine.fast.products import make_projections
    from mini_engine.invariant.attention import InvariantAttention
    from mini_engine.model import Qwen3

    case = random_case("GQA 6:2, tied", seed)
    values: Values = {}
    for dtype in DTYPES:
        engine = EngineConfig(dtype=dtype, batch_invariant=True)  # type: ignore[arg-type]
        model = Qwen3(ModelConfig.from_hf(case.hf_config), case.weights(dtype), make_projections(engine))

        def make(pool: Any, metadata: Any) -> Any:
            return InvariantAttention(pool, metadata, 6)

        sequences = [random_ids(case.vocab_size, length, seed) for length in INVARIANT_LENGTHS]
        alone = [play(model, make_schedule([ids], 16, seed, [1000]), dtype, make)[0] for ids in sequences]
        values[f"{dtype}, alone"] = list(alone)
        for threads, page_size in zip(THREADS, PAGE_SIZES, strict=True):
            torch.set_num_threads(threads)
            try:
                schedule = make_schedule(sequences, page_size, seed + threads, [1, 3, 16, 50, 128, 300])
                values[f"{dtype}, {threads} threads, page size {page_size}"] = play(model, schedule, dtype, make)
            finally:
                torch.set_num_threads(1)
    return values


def invariant_peer(seed: int) -> Values:
    """Return transformers' logits, which the bits may differ from and the values may not."""
    case = random_case("GQA 6:2, tied", seed)
    return {
        "float32, alone": [
            peer.logits(case, "float32", "sdpa", random_ids(case.vocab_size, length, seed))
            for length in INVARIANT_LENGTHS
        ]
    }


INVARIANT_PEER = remember(invariant_peer)


def invariant_verdict(seed: int, got: Values) -> list[Failure]:
    """Every run has the bits of the lone ones, and those have transformers' values."""
    failures = differences(INVARIANT_PEER(seed), {"float32, alone": got["float32, alone"]}, 1e-4)
    for dtype in DTYPES:
        for threads, page_size in zip(THREADS, PAGE_SIZES, strict=True):
            name = f"{dtype}, {threads} threads, page size {page_size}"
            failures += differences(got[f"{dtype}, alone"], got[name], None, name)
    return failures


REGISTRY.add(
    "L2.C.invariant",
    "With batch_invariant arithmetic over your packing and pool, all logits are bitwise the same, alone or packed, "
    "whole or in chunks, on any pages, at 1, 2, 4 and 8 threads.",
    invariant_probe,
    invariant_verdict,
    needs=("L2.B",),
    seconds=60.0,
)
