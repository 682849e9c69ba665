"""Run many requests, and read in the event log what happened to each of them.

Time is counted in steps, so that a run is the same on every machine.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tokenizers import Tokenizer

from mini_engine.config import EngineConfig
from mini_engine.engine import Engine
from mini_engine.llm import make_engine
from mini_engine.outputs import Delta, RequestOutput, StepOutput
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.params import SamplingParams
from mini_engine.view import EngineView
from mini_engine.viz.tokens import visible
from mini_engine.ways import way_of

PieceKind = Literal["waiting", "prompt", "copied", "again", "decode"]


# ------------------------------------------------------------------------------------------------- runs of the engine


@dataclass(frozen=True)
class Arrival:
    """A request that arrives before step ``step``."""

    step: int
    prompt_ids: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True)
class Run:
    """The log of an engine's steps, and the answers by request id in the order of arrival.

    ``labels``: request id -> its name in figures. ``num_pages``: of the pool.
    """

    name: str
    log: Sequence[StepOutput]
    outputs: Mapping[str, RequestOutput]
    labels: Mapping[str, str]
    config: EngineConfig
    num_pages: int


class StepClock:
    """A clock whose time is the number of the step."""

    def __init__(self) -> None:
        """Begin with step 0."""
        self.now = 0

    def __call__(self) -> float:
        """Return the time."""
        return float(self.now)


def with_options(driver: SamplingDriver, **options: Any) -> SamplingDriver:
    """Return a driver of the same model with other options."""
    config = replace(driver.config, **options)
    attention = way_of(config).attention(config, driver.model)
    return SamplingDriver(driver.model, config, driver.eos_token_ids, attention=attention)


def serve(
    name: str,
    driver: SamplingDriver,
    tokenizer: Tokenizer,
    arrivals: Iterable[Arrival],
    static: bool = False,
    **options: Any,
) -> Run:
    """Run all ``arrivals`` in an engine with these options, and return what it did.

    ``static``: use static batches. A batch starts when the one before has ended, and no request joins it later.
    """
    clock = StepClock()
    engine = make_engine(with_options(driver, **options), tokenizer, clock=clock)
    pending = deque(sorted(arrivals, key=lambda arrival: arrival.step))
    labels: dict[str, str] = {}
    number = 0
    while pending or engine.has_work:
        for _ in range(num_let_in(pending, clock.now, engine, static)):
            coming = pending.popleft()
            samples = engine.add_samples(coming.prompt_ids, coming.params)
            labels |= dict(zip(samples, sample_labels(number, len(samples)), strict=True))
            number += 1
        engine.step()  # without requests it does nothing, and is not logged
        clock.now += 1
    outputs = {request_id: engine.take_output(request_id) for request_id in labels}
    return Run(name, list(engine.log), outputs, labels, engine.driver.config, EngineView(engine).num_pages)


def sample_labels(number: int, count: int) -> list[str]:
    """Name the samples of one request: "a", or "a1", "a2" if there are several; after "z" come numbers."""
    name = chr(ord("a") + number) if number < 26 else f"{number} "
    return [name.strip()] if count == 1 else [f"{name}{i + 1}" for i in range(count)]


def num_let_in(pending: Sequence[Arrival], now: int, engine: Engine, static: bool) -> int:
    """Return how many of the pending requests are given to the engine before this step."""
    if static and engine.has_work:
        return 0
    due = sum(arrival.step <= now for arrival in pending)
    return min(due, engine.driver.config.max_running_requests) if static else due


# ------------------------------------------------------------------------------------------------ what the log tells


@dataclass(frozen=True)
class Piece:
    """``length`` steps from ``step`` on in which one request did the same thing.

    ``tokens``: computed in these steps, or copied.
    """

    kind: PieceKind
    step: int
    length: int
    tokens: int


def chunk_kinds(run: Run) -> list[dict[str, tuple[PieceKind, int]]]:
    """Return for every step what each request computed, by request id: the kind and the number of its rows."""
    reached = dict.fromkeys(run.outputs, 0)
    kinds: list[dict[str, tuple[PieceKind, int]]] = []
    for step in run.log:
        kinds.append({})
        for request_id, start, count in step.chunks:
            kind: PieceKind = "prompt"
            if request_id in step.copied:
                kind = "copied"
            elif start < reached[request_id]:
                kind = "again"  # it was preempted, and its keys and values were dropped
            elif start >= len(run.outputs[request_id].prompt_ids):
                kind = "decode"
            kinds[-1][request_id] = kind, count
            reached[request_id] = max(reached[request_id], start + count)
    return kinds


def timeline(run: Run) -> dict[str, list[Piece]]:
    """Return what each request did from its arrival to its last step.

    Waiting or decoding for several steps is one piece. Each chunk of a prompt is one piece. A copied chunk counts the
    copied tokens, not its single row.
    """
    kinds = chunk_kinds(run)
    pieces: dict[str, list[Piece]] = {}
    for request_id, output in run.outputs.items():
        own: list[Piece] = []
        here = [i for i, step in enumerate(kinds) if request_id in step]
        added = output.times.added if output.times is not None else 0.0  # a refused request has no times
        first = next((i for i, step in enumerate(run.log) if step.began >= added), len(run.log))
        for index in range(first, here[-1] + 1 if here else first):
            kind, tokens = kinds[index].get(request_id, ("waiting", 0))
            tokens = run.log[index].copied[request_id] if kind == "copied" else tokens
            joined = own and own[-1].kind == kind and kind in ("waiting", "decode")
            last = own.pop() if joined else Piece(kind, index, 0, 0)
            own.append(replace(last, length=last.length + 1, tokens=last.tokens + tokens))
        pieces[request_id] = own
    return pieces


def rows_per_step(run: Run) -> dict[str, list[int]]:
    """Return the rows of every step by purpose: decodes, prompts (copied ones included), and computed again."""
    kinds = chunk_kinds(run)
    names = {"decode": ("decode",), "prompt": ("prompt", "copied"), "again": ("again",)}
    return {
        name: [sum(rows for kind, rows in step.values() if kind in those) for step in kinds]
        for name, those in names.items()
    }


@dataclass(frozen=True)
class Stay:
    """A request in one place of the batch for ``length`` steps from ``step`` on.

    ``prompt``: how many of them, at the beginning, computed its prompt.
    """

    request_id: str
    place: int
    step: int
    length: int
    prompt: int


def stays(run: Run) -> list[Stay]:
    """Return which request was in which place of the batch.

    A request takes the lowest free place, and leaves it when it waits.
    """
    kinds = chunk_kinds(run)
    taken = dict[int, str]()
    found = list[Stay]()
    open_stays: dict[str, Stay] = {}
    for index, step in enumerate(kinds):
        for request_id in [r for r in open_stays if r not in step]:
            stay = open_stays.pop(request_id)
            found.append(stay)
            del taken[stay.place]
        for request_id, (kind, _) in step.items():
            if request_id not in open_stays:
                place = next(p for p in range(len(run.outputs)) if p not in taken)
                taken[place] = request_id
                open_stays[request_id] = Stay(request_id, place, index, 0, 0)
            stay = open_stays[request_id]
            open_stays[request_id] = replace(stay, length=stay.length + 1, prompt=stay.prompt + (kind != "decode"))
    return sorted([*found, *open_stays.values()], key=lambda stay: (stay.step, stay.place))


def idle_share(run: Run) -> float:
    """Return the share of places and steps without a request."""
    cells = run.config.max_running_requests * len(run.log)
    return 1 - sum(stay.length for stay in stays(run)) / cells


# -------------------------------------------------------------------------------------------------- a text that grows


@dataclass(frozen=True)
class StreamLine:
    """One delta of a stream: the text of its token, the text shown before, the new text, and the text held back.

    ``cut``: the text that is held back is never shown, because it contains a stop string.
    """

    token: str
    before: str
    new: str
    held: str
    cut: bool


def stream_lines(deltas: Iterable[Delta], tokenizer: Tokenizer) -> list[StreamLine]:
    """Return what a reader of a stream saw, delta by delta, and what was held back."""
    lines: list[StreamLine] = []
    token_ids: list[int] = []
    shown = ""
    for delta in deltas:
        if delta.token_id is None:  # the start of a stream, or an end without a token
            continue
        token_ids.append(delta.token_id)
        whole = tokenizer.decode(token_ids, skip_special_tokens=True)
        held = whole[len(shown) + len(delta.text) :]
        token = visible(tokenizer.decode([delta.token_id], skip_special_tokens=False))
        lines.append(StreamLine(token, shown, delta.text, held, delta.finish_reason == "stop"))
        shown += delta.text
    return lines


# ------------------------------------------------------------------------------------------------- without a model
