"""The checks of L8.E and L8.F: attention over the paged pool, tile by tile, and with the keys in splits.

Owns: pools in which everything that no sequence has is NaN, steps of ragged sequences, one sequence alone, in a crowd
and in chunks. Blocks of queries are cut here, so that a fault of L8.L does not show.
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from smoke.checks.l8.guard import FAR, ON_GPU, Guard, guarded, set_for_now
from smoke.checks.l8.spec_kernels import DTYPES, Sequences, attend_all, near, rounded_alike, rows_of
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences

REGISTRY = Registry()
UNTOUCHED = -7.0  # stands in rows of the output that are not of this launch
BOUNDS = {"float32": 2e-6, "float16": 1e-2}  # of a row's largest number
AS_EXP = (
    "these are the numbers of exp: `scale` includes log2(e) already, so the weights are exp2 of the scores, and the "
    "sums so far shrink by exp2, too"
)
Drawn = list[tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Launch:
    """One call: a step, which of its sequences are computed (None: all), and how many numbers lie between its rows.

    ``split_size`` is that of ``split_attention``; 0 is ``paged_attention``. ``queries`` of a block: 0 is what fits.
    ``is_far``: a kernel finds the rows, and the heads of the pool, 2**30 numbers apart; if there is one, its pages.
    """

    step: Sequences
    split_size: int = 0
    chosen: tuple[int, ...] | None = None
    gap: int = 0
    queries: int = 0
    is_far: bool = False

    @property
    def sequences(self) -> list[int]:
        """The sequences that are computed."""
        return list(range(len(self.step.lengths)) if self.chosen is None else self.chosen)


Launches = Callable[[int], dict[str, Launch]]


def make_pool(launch: Launch, drawn: Drawn, seed: int, guard: Guard) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values [Hkv, slots, D] and the page table, padded with -1; slots without a key are NaN."""
    step = launch.step
    pages = step.pages(seed)
    size = step.page_size
    num_pages = sum(len(own) for own in pages) + 3
    keys = torch.full((step.heads[1], num_pages * size + 1, step.dim), torch.nan, dtype=DTYPES[step.dtype])
    values = keys.clone()
    table = torch.full((len(pages), max(len(own) for own in pages) + 2), -1, dtype=torch.int32)
    for index, (own, (_, k, v)) in enumerate(zip(pages, drawn, strict=True)):
        slots = [own[position // size] * size + position % size for position in range(k.shape[1])]
        keys[:, slots] = k
        values[:, slots] = v
        table[index, : len(own)] = torch.tensor(own, dtype=torch.int32)
    pool = [guard.put("the keys", keys), guard.put("the values", values)]
    if launch.is_far:
        page = size * step.dim if step.heads[1] == 1 else 0  # numbers that stay together; 0: a head
        table = torch.where(table < 0, table, table * (FAR // page)) if page else table
        pool = [guard.stretch(name, part, page) for name, part in zip(("the keys", "the values"), pool, strict=True)]
    return pool[0], pool[1], guard.put("the page table", table, 1, -1)


def cut(launch: Launch, queries: int) -> Any:
    """Cut the launch's sequences into blocks of at most ``queries`` rows, those that see the most keys first."""
    from mini_engine.kernels.query_blocks import QueryBlock, QueryBlocks

    ranges = list(pairwise(launch.step.bounds))
    blocks = []
    for sequence in launch.sequences:
        start, end = ranges[sequence]
        keys = launch.step.lengths[sequence][1]
        for first in range(start, end, queries):
            last = min(first + queries, end)
            blocks.append(QueryBlock(sequence, first, last, keys - (end - last)))
    blocks.sort(key=lambda block: -block.visible)
    return QueryBlocks(blocks, torch.tensor(blocks, dtype=torch.int32).view(-1, 4), queries)


def attend(launch: Launch, drawn: Drawn, seed: int) -> Values:
    """Run one of the two launchers -> the output, and the tensors around which something was written."""
    from mini_engine.attention.metadata import AttentionMetadata
    from mini_engine.kernels.paged_attention import paged_attention, paged_queries
    from mini_engine.kernels.split_attention import split_attention, split_queries

    step = launch.step
    most = (split_queries if launch.split_size else paged_queries)(
        step.heads[0] // step.heads[1], step.dim, DTYPES[step.dtype]
    )
    with guarded() as guard:
        keys, values, table = make_pool(launch, drawn, seed, guard)
        packed = torch.cat([q for q, _, _ in drawn])
        q = guard.put("the queries", packed, launch.gap)
        out = guard.put("the output", torch.full_like(packed, UNTOUCHED), 2 * launch.gap, UNTOUCHED)
        for name, rows in (("the queries", q), ("the output", out)) if launch.is_far else ():
            guard.stretch(name, rows)
        metadata = AttentionMetadata(
            cu_seqlens_q=torch.tensor(step.bounds, dtype=torch.int32),
            seq_lens_kv=torch.tensor([length for _, length in step.lengths], dtype=torch.int32),
            block_table=table,
            slot_mapping=torch.zeros(len(packed), dtype=torch.int64),
            page_size=step.page_size,
        )
        blocks = cut(launch, launch.queries or most)
        if launch.split_size:
            split_attention(q, keys, values, metadata, blocks, out, launch.split_size)
        else:
            paged_attention(q, keys, values, metadata, blocks, out)
    return {"out": out, ON_GPU: guard.faults()}


def probe_of(launches: Launches) -> Callable[[int], Values]:
    """Return a probe that runs every launch."""
    return lambda seed: {name: attend(one, one.step.drawn(seed), seed) for name, one in launches(seed).items()}


def verdict_of(launches: Launches) -> Callable[[int, Values], list[Failure]]:
    """Return a verdict in float64; rows that are not of the launch stay."""

    def verdict(seed: int, got: Values) -> list[Failure]:
        failures: list[Failure] = []
        for name, launch in launches(seed).items():
            failures += compare(name, launch, launch.step.drawn(seed), got[name], BOUNDS[launch.step.dtype])
        return failures[:8]

    return verdict


def compare(name: str, launch: Launch, drawn: Drawn, got: Values, bound: float) -> list[Failure]:
    """Compare one launch's output with float64, sequence by sequence: what a row is depends on whose it is."""
    exact = attend_all(drawn)
    failures = differences([], got[ON_GPU], None, f"{name}, {ON_GPU}")
    for sequence, (start, end) in enumerate(pairwise(launch.step.bounds)):
        queries, keys = launch.step.lengths[sequence]
        case = f"{name}, sequence {sequence} ({queries} queries, {keys} keys)"
        own = exact[start:end]
        if sequence not in launch.sequences:
            case = f"{case}, which is not of this launch"
            own = torch.full_like(own, UNTOUCHED)
        wrong = near(case, own, got["out"][start:end], launch.step.dtype, 0.0, bound)
        if wrong and sequence in launch.sequences:
            as_exp = attend_all([drawn[sequence]], math.log2(math.e))
            if not near(case, as_exp, got["out"][start:end], launch.step.dtype, 0.0, bound):
                wrong = [replace(each, note=AS_EXP) for each in wrong]
        failures += wrong
    return failures


def add_checks(task: str, checks: dict[str, tuple[str, Launches]]) -> None:
    """Register checks that compare with float64."""
    for name, (proves, launches) in checks.items():
        REGISTRY.add(f"{task}.{name}", proves, probe_of(launches), verdict_of(launches))


# L8.E ---------------------------------------------------------------------------------------------------------------

RAGGED = ((1, 1), (1, 70), (5, 5), (0, 0), (40, 90), (3, 64), (0, 9))  # queries and keys; around tiles of 32
ODD = "pages of 1, 3 heads over 1, of 20"
SHAPES = {  # page size, (query heads, key-value heads), head dim
    "pages of 16, 4 heads over 2, of 32": (16, (4, 2), 32),
    ODD: (1, (3, 1), 20),
    "pages of 64, 2 heads over 2, of 64": (64, (2, 2), 64),
}


def steps(lengths: tuple[tuple[int, int], ...], dtype: str, split_size: int, queries: int = 0) -> dict[str, Launch]:
    """Return a launch of ``lengths`` in every shape."""
    return {
        f"{name}, {dtype}": Launch(Sequences(lengths, page_size, heads, dim, dtype), split_size, queries=queries)
        for name, (page_size, heads, dim) in SHAPES.items()
    }


def exact_launches(seed: int) -> dict[str, Launch]:
    """Return ragged steps of every shape."""
    return steps(RAGGED, "float32", 0)


class OneHeavy(Sequences):
    """The first key weighs 1, and every other one 2**-17.5: a sum of the weights in 16 bits stays at 1."""

    def drawn(self, seed: int) -> Drawn:
        """Return queries and keys of one number, and values of many."""
        found = super().drawn(seed)
        for q, k, _ in found:
            q[:], k[:] = 0.0, 0.0
            q[..., 0] = k[:, 0, 0] = (17.5 * math.log(2) * self.dim**0.5) ** 0.5
        return found


class NearlyTied(Sequences):
    """Keys of two kinds, whose scores of 1,000 nearly tie: a query that is scaled in 16 bits parts them."""

    def drawn(self, seed: int) -> Drawn:
        """Return queries and keys of two numbers, and values of many."""
        found = super().drawn(seed)
        for q, k, _ in found:
            q[:], k[:] = 0.0, 0.0
            q[..., 0], q[..., 1] = 1.0, 1.1
            k[:, ::2, 0], k[:, 1::2, 1] = 8000.0, 7272.0
        return found


def half_launches(seed: int) -> dict[str, Launch]:
    """Return steps of 16 bits, whose tiles have 64 keys."""
    one = Sequences(((1, 130), (2, 70)), 16, (2, 1), 64, "float16")
    return {
        **steps(((1, 1), (1, 130), (30, 100), (9, 64)), "float16", 0),
        "products of queries and keys beyond 65,504": Launch(replace(one, growth=8000.0)),
        "scores of 1,000 that nearly tie": Launch(NearlyTied(((1, 8),), 16, (1, 1), 64, "float16")),
        "weighted values that sum to more than 65,504": Launch(replace(one, offset=6000.0)),
        "one key of weight 1 before 3,839 light ones": Launch(OneHeavy(((1, 3840),), 64, (1, 1), 16, "float16")),
    }


def memory_launches(seed: int) -> dict[str, Launch]:
    """Return steps of which some sequences are computed, from and to rows that lie apart."""
    some = Sequences(((1, 1), (9, 50), (2, 33), (1, 57)), *SHAPES[ODD])
    cases = {f"{ODD}, the second and the last of four sequences": Launch(some, 0, (1, 3), gap=3)}
    for heads in ((8, 4), (2, 1)):
        step = Sequences(((4, 20), (1, 40)), 16, heads, 32)
        cases[f"rows and heads, or pages, 2**30 numbers apart, {heads[1]} key-value heads"] = Launch(step, is_far=True)
    cases["none of them"] = Launch(Sequences(((1, 3), (1, 4)), 16, (2, 1), 16), 0, ())
    return cases


SEEN = ((1, 1), (1, 32), (5, 9), (12, 30), (20, 20), (2, 32))


def seen_step() -> Launch:
    """Return a step of sequences with no more keys than a head has numbers."""
    return Launch(Sequences(SEEN, 16, (2, 2), 32))


def seen_probe(seed: int, split_size: int = 0) -> Values:
    """Attend to values of which each has a 1 in a place of its own: the output is the weights."""
    launch = replace(seen_step(), split_size=split_size)
    drawn = []
    for q, k, v in seen_step().step.drawn(seed):
        drawn.append((q, k, torch.eye(32)[: k.shape[1]].expand_as(v).contiguous()))
    out = attend(launch, drawn, seed)["out"]
    bounds = launch.step.bounds
    return {
        f"{queries} queries, {keys} keys": out[start:end, :, :keys] > 0
        for (queries, keys), (start, end) in zip(SEEN, pairwise(bounds), strict=True)
    }


def seen_verdict(seed: int, got: Values) -> list[Failure]:
    """Query i of n sees the keys before it and its own: keys - n + i + 1 of them."""
    failures: list[Failure] = []
    for queries, keys in SEEN:
        counts = torch.arange(keys - queries, keys) + 1
        expected = (torch.arange(keys) < counts[:, None])[:, None].expand(-1, 2, -1)
        failures += differences(
            expected, got[f"{queries} queries, {keys} keys"], None, f"{queries} queries, {keys} keys"
        )
    return failures


LOUD = {
    "the largest score is about 10000": 60.0,
    "every score is about -13000": -60.0,
}
LOUD_STEP = Sequences(((3, 50), (1, 33)), 16, (2, 1), 32)


def loud(seed: int, factor: float) -> Drawn:
    """Return queries and keys whose scores overflow or vanish in exp; below 0 all of them are far below."""
    if factor > 0:
        return [(q * factor, k * factor, v) for q, k, v in LOUD_STEP.drawn(seed)]
    return [(q.abs() * factor, k.abs() * -factor, v) for q, k, v in LOUD_STEP.drawn(seed)]


def loud_probe(split_size: int) -> Callable[[int], Values]:
    """Return a probe that attends with large scores."""
    launch = Launch(LOUD_STEP, split_size)
    return lambda seed: {name: attend(launch, loud(seed, factor), seed) for name, factor in LOUD.items()}


def loud_verdict(seed: int, got: Values) -> list[Failure]:
    """Such scores have few places after the point left, so the weights are less exact."""
    failures: list[Failure] = []
    for name, factor in LOUD.items():
        failures += compare(name, Launch(LOUD_STEP), loud(seed, factor), got[name], 3e-2)
    return failures


ALONE = (9, 110)  # queries and keys of the sequence that is computed alone and in a crowd
CROWDS = {
    "between others": ((3, 40), ALONE, (1, 150), (2, 33)),
    "before a longer one": (ALONE, (8, 140)),
    "after a shorter one": ((1, 5), ALONE),
}


def alone_probe(split_size: int) -> Callable[[int], Values]:
    """Return a probe that computes a sequence alone and in crowds, on other pages of another size."""

    def probe(seed: int) -> Values:
        single = Sequences((ALONE,), 16, (2, 1), 20)
        alone = attend(Launch(single, split_size), single.drawn(seed), seed)["out"]
        values: Values = {"alone, finite": bool(alone.isfinite().all())}
        for name, lengths in CROWDS.items():
            step = Sequences(lengths, 4, (2, 1), 20)
            out = attend(Launch(step, split_size), step.drawn(seed), seed + 1)["out"]
            values[name] = torch.equal(out[rows_of(step, [lengths.index(ALONE)])], alone)
        return values

    return probe


def same_verdict(seed: int, got: Values) -> list[Failure]:
    """All comparisons hold."""
    return [Failure(name, "", "the same bits as alone", "other bits") for name, same in got.items() if same is not True]


add_checks(
    "L8.E",
    {
        "exact": (
            "Every row of ragged steps is that of float64, for all page sizes, shared heads and widths of heads.",
            exact_launches,
        ),
        "half": ("In 16 bits, too, where tiles are larger and the weights are rounded.", half_launches),
        "memory": (
            "Only rows of the launch's sequences are written, from and to rows any distance apart.",
            memory_launches,
        ),
    },
)
REGISTRY.add("L8.E.causal", "A query sees its own key and those before it, and no other.", seen_probe, seen_verdict)
REGISTRY.add(
    "L8.E.scores",
    "Scores of thousands, of either sign, give finite rows: the largest score so far is subtracted before exp.",
    loud_probe(0),
    loud_verdict,
)
REGISTRY.add(
    "L8.E.alone", "A sequence has the same bits alone and among others, on other pages.", alone_probe(0), same_verdict
)

# L8.F ---------------------------------------------------------------------------------------------------------------

DECODE = ((1, 1), (1, 70), (0, 0), (1, 64), (1, 33))
SPLIT = {"float32": 32, "float16": 64}  # one tile: the most splits from the fewest keys
PROMPT = (20, 75)  # of its queries, number 9 is the first to see the split from 64 on
CHUNKS = ((0, 1), (3, 5), (5, 15), (9, 10), (19, 20))


def decode_launches(seed: int) -> dict[str, Launch]:
    """Return decoding steps; the split sizes are one tile, two, and more than there are keys."""
    cases = steps(DECODE, "float32", 32, queries=2)
    step = Sequences(DECODE, 16, (4, 2), 32)
    return cases | {f"one query in a block, splits of {size} keys": Launch(step, size, queries=1) for size in (64, 128)}


def split_half_launches(seed: int) -> dict[str, Launch]:
    """Return steps of 16 bits."""
    return steps(((1, 1), (1, 130), (3, 64)), "float16", 64, queries=2)


EVEN = Launch(Sequences(((1, 130), (3, 200)), 16, (2, 1), 64, "float16"), 64, queries=2)


def even(seed: int) -> Drawn:
    """Return queries of zeros: every key weighs the same, so a row is a mean of values."""
    return [(torch.zeros_like(q), k, v) for q, k, v in EVEN.step.drawn(seed)]


def even_verdict(seed: int, got: Values) -> list[Failure]:
    """Count the numbers that are not the nearest to the exact mean."""
    exact = attend_all(even(seed))
    name = "mean of values"
    rule = "what the splits leave is rounded to float32, and the merged row to float16"
    failures = near(name, exact, got["out"], EVEN.step.dtype, 0.0, BOUNDS[EVEN.step.dtype])
    return failures or rounded_alike(name, exact.to(got["out"].dtype), got["out"], rule)


def query_launches(seed: int) -> dict[str, Launch]:
    """Return sequences with more queries than a block holds, whose rows see different numbers of splits."""
    return {
        f"{ODD}, as many queries in a block as fit": Launch(Sequences(((9, 100), (3, 66)), *SHAPES[ODD]), 32),
        "three queries in a block": Launch(Sequences(((7, 80), (2, 2)), 16, (4, 2), 32), 32, queries=3),
    }


def many_launches(seed: int) -> dict[str, Launch]:
    """Return more splits than are merged at once, of which the later ones weigh more, and then the earlier ones."""
    lengths = ((1, 630), (1, 40))
    return {
        "20 splits, and 2, later ones weigh more": Launch(
            Sequences(lengths, 16, (2, 1), 16, growth=2.0), 32, queries=1
        ),
        "20 splits, and 2, earlier ones weigh more": Launch(Sequences(lengths, 16, (2, 1), 16, growth=-0.9), 32),
    }


def split_memory_launches(seed: int) -> dict[str, Launch]:
    """Return steps of which some sequences are computed, from and to rows that lie apart."""
    return {name: replace(launch, split_size=32, queries=2) for name, launch in memory_launches(seed).items()}


def chunk_probe(seed: int) -> Values:
    """Compute chunks of a prompt: its keys before the chunk are in the cache."""
    whole = Sequences((PROMPT,), 16, (2, 1), 32)
    (q, k, v) = whole.drawn(seed)[0]
    (queries, keys) = PROMPT
    rows = attend(Launch(whole, 32), [(q, k, v)], seed)["out"]
    values: Values = {"whole prompt, finite": bool(rows.isfinite().all())}
    for start, end in CHUNKS:
        seen = keys - queries + end
        step = replace(whole, lengths=((end - start, seen),))
        out = attend(Launch(step, 32), [(q[start:end], k[:, :seen], v[:, :seen])], seed)["out"]
        values[f"queries {start} to {end - 1} of {queries}, {seen} keys"] = torch.equal(out, rows[start:end])
    return values


def masked_probe(seed: int) -> Values:
    """Attend, and note in which programs ``attend_tiles`` is called how often, and with which ``MASKED``."""
    from triton.runtime.interpreter import interpreter_builder

    import mini_engine.kernels.split_attention as op
    from mini_engine.kernels.paged_attention import attend_tiles

    parameters = inspect.signature(attend_tiles.fn)
    programs = Counter[Any]()
    masked = set[bool]()

    def noted(*arguments: Any, **named: Any) -> Any:
        programs[interpreter_builder.grid_idx] += 1
        masked.add(bool(parameters.bind(*arguments, **named).arguments["MASKED"]))
        return attend_tiles(*arguments, **named)

    step = Sequences(((3, 100), (1, 32)), 16, (4, 2), 32)
    with set_for_now(op, attend_tiles=noted):
        attend(Launch(step, 32, queries=2), step.drawn(seed), seed)
    return {"calls in a program": sorted(set(programs.values())), "MASKED": sorted(masked)}


SIZES = [
    (max_kv_len, blocks, heads, processors)
    for max_kv_len in (0, 1, 100, 128, 1000, 4096, 131072)
    for blocks in (1, 7, 64, 1000)
    for heads, processors in ((8, 132), (1, 132), (8, 1))
]


def size_probe(seed: int) -> Values:
    """Choose the split for steps of many kinds."""
    from mini_engine.kernels import split_attention as op

    return {
        "sizes": [op.choose_split_size(*arguments) for arguments in SIZES],
        "LEAST_SPLIT, PROGRAMS_PER_PROCESSOR": [op.LEAST_SPLIT, op.PROGRAMS_PER_PROCESSOR],
    }


def size_verdict(seed: int, got: Values) -> list[Failure]:
    """Whole multiples; enough programs unless a split is as short as it may be; not many more than enough."""
    least, wanted = got["LEAST_SPLIT, PROGRAMS_PER_PROCESSOR"]
    failures: list[Failure] = []
    for (keys, blocks, heads, processors), size in zip(SIZES, got["sizes"], strict=True):
        splits = -(-keys // max(size, 1))
        aim = wanted * processors
        programs = blocks * heads * splits
        fault = ""
        if type(size) is not int or size < 1 or size % least:
            fault = f"a multiple of {least}"
        elif size > least and programs * 2 < aim:
            fault = f"a shorter split: {programs} programs for {processors} processors"
        elif splits > 1 and programs > 2 * aim:
            fault = f"a longer split: {programs} programs for {processors} processors"
        elif size >= max(keys, 1) + least:
            fault = f"no split beyond the {keys} keys"
        if fault:
            case = f"{keys} keys, {blocks} blocks, {heads} key-value heads, {processors} processors"
            failures.append(Failure(case, "", fault, str(size)))
    return failures[:6]


add_checks(
    "L8.F",
    {
        "decode": (
            "Every row of a decoding step is that of float64, for all page sizes, heads and sizes of a split.",
            decode_launches,
        ),
        "half": ("In 16 bits, too, where tiles are larger and the weights are rounded.", split_half_launches),
        "queries": ("Rows of one block that see different numbers of splits are merged from as many.", query_launches),
        "many": (
            "More splits than are merged at once: what was merged is corrected as the largest grows.",
            many_launches,
        ),
        "memory": (
            "Only rows of the launch's sequences are written, from and to rows any distance apart.",
            split_memory_launches,
        ),
    },
)
REGISTRY.add(
    "L8.F.rounding",
    "In 16 bits a row is rounded once: what the splits leave is of 32 bits.",
    lambda seed: attend(EVEN, even(seed), seed),
    even_verdict,
)
REGISTRY.add(
    "L8.F.scores",
    "Scores of thousands, of either sign, give finite rows, also when splits are merged.",
    loud_probe(32),
    loud_verdict,
)
REGISTRY.add(
    "L8.F.alone",
    "A sequence has the same bits alone and among others, longer ones too, on other pages.",
    alone_probe(32),
    same_verdict,
)
REGISTRY.add(
    "L8.F.chunks",
    "A row has the same bits in its whole prompt, in any chunk of it, and in decoding.",
    chunk_probe,
    same_verdict,
)
REGISTRY.add(
    "L8.F.masked",
    "A program calls attend_tiles once, with MASKED: where an unmasked part ends would depend on the block's other "
    "rows.",
    masked_probe,
    bitwise(lambda seed: {"calls in a program": [1], "MASKED": [True]}),
)
REGISTRY.add(
    "L8.F.split_size",
    "The chosen split gives every processor programs to run, in whole multiples of the least, and no needless ones.",
    size_probe,
    size_verdict,
)
