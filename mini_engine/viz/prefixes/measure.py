"""What a prefix cache did: which pages were found or computed, and how many pages each run held."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from mini_engine.llm import make_engine
from mini_engine.radix_cache import RadixStats
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.params import SamplingParams
from mini_engine.view import EngineView
from mini_engine.viz.scheduling.measure import Run, chunk_kinds, sample_labels, with_options

CellKind = Literal["found", "first", "again"]


# ----------------------------------------------------------------------------------------------- a tree, event by event


# ------------------------------------------------------------------------------------------ one request after the other


@dataclass(frozen=True)
class Visit:
    """An admitted request: the index of its prompt, and how many of its tokens were in the cache."""

    prompt: int
    found: int


def visits(chunks: Iterable[tuple[str, int, int]]) -> list[Visit]:
    """Return the admissions of a run in order, from its ``chunks``, such as those of ``bench.reuse.run_load``.

    The run must have one request at a time and no chunked prompts. Then all tokens before a chunk were in the cache.
    """
    return [Visit(int(name), start) for name, start, _ in chunks]


@dataclass(frozen=True)
class Cell:
    """A page of a prompt in the visit that needed it. ``line``: where the page is drawn."""

    visit: int
    line: int
    kind: CellKind


def page_cells(prompts: Sequence[Sequence[int]], page_size: int, orders: Sequence[Sequence[Visit]]) -> list[list[Cell]]:
    """Return for each run, for every page of every prompt, whether it was found or computed.

    A last page may be filled in part. A page has the same line in all runs; the first run numbers the lines.
    """
    lines: dict[tuple[int, ...], int] = {}
    runs = []
    for order in orders:
        computed, cells = set[int](), list[Cell]()
        for index, visit in enumerate(order):
            prompt = tuple(prompts[visit.prompt])
            for end in range(page_size, len(prompt) + page_size, page_size):
                line = lines.setdefault(prompt[:end], len(lines))
                kind: CellKind = "found" if end <= visit.found else "again" if line in computed else "first"
                cells.append(Cell(index, line, kind))
                computed.add(line)
        runs.append(cells)
    return runs


# ------------------------------------------------------------------------------------- loads that tell evictions apart

HOT, COLD, ROUND, TOPIC = 8, 3, 4, 4  # pages of a document


def eviction_loads(page_size: int, num_prompts: int = 120) -> dict[str, list[list[int]]]:
    """Return three loads by name. A prompt is a document and one more token that no other prompt has.

    In the first load one hot document comes again and again between documents that come once. In the second, eight
    documents take turns. In the third, four documents are in use at a time, and every quarter of the load has others.
    """
    source = rng(1)
    own = count()
    hot = [source.random() < 0.4 for _ in range(num_prompts)]
    topics = [4 * (4 * i // num_prompts) + source.randrange(4) for i in range(num_prompts)]
    picks = {
        "A hot one among others": [(0, HOT) if yes else (1 + i, COLD) for i, yes in enumerate(hot)],
        "Eight by turns": [(i % 8, ROUND) for i in range(num_prompts)],
        "The topic changes": [(topic, TOPIC) for topic in topics],
    }
    return {
        name: [
            [*range(1000 * number, 1000 * number + pages * page_size), -1 - next(own)] for number, pages in documents
        ]
        for name, documents in picks.items()
    }


def rng(seed: int) -> random.Random:
    """Return a random generator that gives the same numbers on every machine."""
    return random.Random(seed)


# ------------------------------------------------------------------------------------------------- runs of the engine


@dataclass(frozen=True)
class Served:
    """A run of the engine, and the pages after each of its steps.

    ``named``: entries in the block tables of running requests, which is what they would need without sharing.
    ``in_use``: the different pages among them. ``kept``: pages that only the cache holds. ``stats``: ``None`` without a
    cache.
    """

    run: Run
    named: list[int]
    in_use: list[int]
    kept: list[int]
    stats: RadixStats | None

    @property
    def ttft_s(self) -> list[float]:
        """Seconds to the first token of every request, by arrival."""
        times = [output.times for output in self.run.outputs.values()]
        return [own.ttft_s for own in times if own is not None and own.ttft_s is not None]

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(len(output.prompt_ids) for output in self.run.outputs.values())

    @property
    def num_computed(self) -> int:
        """Rows that were computed for prompts."""
        return sum(rows for step in chunk_kinds(self.run) for kind, rows in step.values() if kind != "decode")


def serve_all(
    name: str,
    driver: SamplingDriver,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    **options: Any,
) -> Served:
    """Run ``prompts``, which all arrive at once, in an engine with these options, and record its pages."""
    engine = make_engine(with_options(driver, **options))
    added = enumerate(zip(prompts, params, strict=True))
    labels = {engine.add_request(ids, own): sample_labels(number, 1)[0] for number, (ids, own) in added}
    named, in_use, kept = list[int](), list[int](), list[int]()
    view = EngineView(engine)
    while view.has_work:
        used = engine.step().num_pages_used
        tables = [page for request in view.running for page in request.pages]
        named.append(len(tables))
        in_use.append(len(set(tables)))
        kept.append(used - in_use[-1])
    outputs = {request_id: engine.take_output(request_id) for request_id in labels}
    run = Run(name, list(engine.log), outputs, labels, view.config, view.num_pages)
    return Served(run, named, in_use, kept, None if view.tree is None else view.tree.stats)
