"""``bench grammar --part masks``: the price of compiling a grammar, of a mask and of a token, for every backend.

The machine's other work hardly counts: compiling is timed in CPU seconds of the process, all threads together, masks
in CPU seconds of the thread. ``accept`` alone is wall time, as a clock of CPU time takes half as long as it does.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from mini_engine.bench.grammar.loads import GRAMMARS
from mini_engine.bench.workload import percentile
from mini_engine.grammar.backends import make_backend
from mini_engine.grammar.base import SHALLOW, GrammarBackend, GrammarError, GrammarObject, GrammarOptions
from mini_engine.grammar.fsm import FsmGrammar
from mini_engine.grammar.libraries.llguidance import LLGuidanceGrammar
from mini_engine.grammar.libraries.xgrammar import XGrammarGrammar
from mini_engine.grammar.tokens import TokenTable

AGAIN, ENOUGH_US = 20, 200.0  # calls in a row, as one alone may be too short for a clock of CPU time, unless it is long
FSM = "fsm"


@dataclass
class Times:
    """Microseconds of one walk along the texts of a grammar, one entry per token. ``raw``: the library's own calls."""

    first: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    accept: list[float] = field(default_factory=list)
    raw_fill: list[float] = field(default_factory=list)
    raw_accept: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class MaskRow:
    """One backend on one grammar: medians over the rounds, microseconds but for ``compile_ms``.

    ``first``: the mask of a state that was not visited before, over the states: median, 99th percentile and longest.
    ``fill``: the mask of a state that was, median; ``raw_fill`` and ``raw_accept`` without our adapter around it.
    ``compile_over_xgrammar``: CPU time of compiling over xgrammar's of the same round.
    """

    vocab: int
    grammar: str
    backend: str
    compile_ms: float
    compile_over_xgrammar: float | None
    first_p50: float
    first_p99: float
    first_max: float
    fill: float
    raw_fill: float | None
    accept: float
    raw_accept: float | None


@dataclass(frozen=True)
class SetUp:
    """What a backend does once for a vocabulary, milliseconds of CPU time."""

    vocab: int
    backend: str
    ms: float


def raw_calls(grammar: GrammarObject, mask: Tensor) -> tuple[Callable[[], object], Callable[[int], object]] | None:
    """Return how the library itself fills row 0 and accepts a token, ``None`` where there is no library."""
    if isinstance(grammar, XGrammarGrammar):
        matcher = grammar.matcher
        return lambda: matcher.fill_next_token_bitmask(mask, 0), matcher.accept_token
    if isinstance(grammar, LLGuidanceGrammar):
        words = mask.numpy()
        fill = grammar.fill
        own = grammar.matcher
        return lambda: fill(own, words, 0), own.consume_token
    return None


def walk(compiled: GrammarObject, texts: Sequence[list[int]]) -> Times:
    """Follow the tokens of ``texts`` and time every mask and every token."""
    times = Times()
    for tokens in texts:
        grammar, twin = compiled.copy(), compiled.copy()
        mask = grammar.allocate_vocab_mask(vocab_size_of(grammar), 1)
        raw = raw_calls(twin, mask)
        for token in tokens:
            forget_masks(grammar)
            fill = partial(grammar.fill_vocab_mask, mask, 0)
            times.first.append(thread_us(fill, 1))
            times.again.append(thread_us(fill))
            times.accept.append(wall_us(grammar.accept_token, token))
            if raw is not None:
                times.raw_fill.append(thread_us(raw[0]))
                times.raw_accept.append(wall_us(raw[1], token))
    return times


def vocab_size_of(grammar: GrammarObject) -> int:
    """Return the columns of a grammar's masks."""
    table = grammar.compiled.table if isinstance(grammar, FsmGrammar) else getattr(grammar, "table", None)
    assert isinstance(table, TokenTable), f"{type(grammar).__name__} has no token table"
    return table.vocab_size


def forget_masks(grammar: GrammarObject) -> None:
    """Let the next mask be that of a first visit: ``fsm`` keeps them, the libraries do not. Mutates."""
    if isinstance(grammar, FsmGrammar):
        grammar.compiled.masks.clear()


def thread_us(call: Callable[[], object], times: int | None = None) -> float:
    """Return microseconds of this thread's CPU time per call, of ``times``, or of as many as the clock needs."""
    if times is None:
        once = thread_us(call, 1)
        if once > ENOUGH_US:
            return once
        times = AGAIN
    began = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - began) / times * 1e6


def wall_us(call: Callable[[int], object], token: int) -> float:
    """Return microseconds of one call."""
    began = time.perf_counter()
    call(token)
    return (time.perf_counter() - began) * 1e6


def cpu_ms(call: Callable[[], object]) -> float:
    """Return milliseconds of CPU time of all threads."""
    began = time.process_time()
    call()
    return (time.process_time() - began) * 1e3


class MaskBench:
    """The backends over one vocabulary, and what they measured."""

    def __init__(self, tokenizer: Tokenizer, table: TokenTable, names: Sequence[str]) -> None:
        """Set the backends up; one whose library is missing goes to ``unavailable`` with the reason."""
        self.tokenizer = tokenizer
        self.table = table
        self.backends: dict[str, GrammarBackend] = {}
        self.set_up: list[SetUp] = []
        self.unavailable: dict[str, str] = {}
        for name in names:
            try:
                # Once on three tokens, so that importing a library is not counted.
                make_backend(name, TokenTable((b"a", b"b", b""), frozenset({2})), GrammarOptions())
                spent = cpu_ms(lambda: self.backends.update({name: make_backend(name, table, GrammarOptions())}))  # noqa: B023
            except ValueError as error:
                self.unavailable[name] = str(error)
            else:
                self.set_up.append(SetUp(table.vocab_size, name, spent))

    def measure(self, rounds: int, names: Sequence[str]) -> list[MaskRow]:
        """Compile and walk every grammar of ``names`` with every backend in turn, after a compile that is not counted.

        A grammar that a backend refuses goes to ``unavailable`` with the reason.
        """
        rows = []
        for name in tqdm(names, desc=f"masks of {self.table.vocab_size}", unit="grammar"):
            each: dict[str, list[tuple[float, Times]]] = {backend: [] for backend in self.warm_up(name)}
            for _ in range(rounds):
                for backend, runs in each.items():
                    runs.append(self.run(backend, name))
            rows += [self.row(name, backend, each) for backend in each]
        return rows

    def warm_up(self, name: str) -> list[str]:
        """Compile with every backend once and return those that can. Mutates ``unavailable``."""
        able = []
        for backend, maker in self.backends.items():
            try:
                narrowed = maker.compile(GRAMMARS[name][0]).stats.narrowed
            except GrammarError as error:
                self.unavailable[f"{backend}, {name}"] = str(error)
                continue
            if any(SHALLOW in note for note in narrowed):
                self.unavailable[f"{backend}, {name}"] = "it writes only what nests less deep"
            else:
                able.append(backend)
        return able

    def run(self, backend: str, name: str) -> tuple[float, Times]:
        """Compile a grammar and walk along its texts."""
        key, texts = GRAMMARS[name]
        compiled: list[GrammarObject] = []
        spent = cpu_ms(lambda: compiled.append(self.backends[backend].compile(key)))
        return spent, walk(compiled[0], [self.tokenizer.encode(t, add_special_tokens=False).ids for t in texts])

    def row(self, name: str, backend: str, rounds: dict[str, list[tuple[float, Times]]]) -> MaskRow:
        """Reduce the rounds of one backend."""
        own = rounds[backend]
        times = [each for _, each in own]

        def middle(values: Sequence[list[float]], percent: float = 50) -> float | None:
            return statistics.median(percentile(each, percent) for each in values) if values[0] else None

        ratios = [ours / theirs for (ours, _), (theirs, _) in zip(own, rounds.get("xgrammar", []), strict=False)]
        first = [each.first for each in times]
        return MaskRow(
            vocab=self.table.vocab_size,
            grammar=name,
            backend=backend,
            compile_ms=statistics.median(spent for spent, _ in own),
            compile_over_xgrammar=statistics.median(ratios) if ratios else None,
            first_p50=middle(first) or 0.0,
            first_p99=middle(first, 99) or 0.0,
            first_max=middle(first, 100) or 0.0,
            fill=middle([each.again for each in times]) or 0.0,
            raw_fill=middle([each.raw_fill for each in times]),
            accept=middle([each.accept for each in times]) or 0.0,
            raw_accept=middle([each.raw_accept for each in times]),
        )


def mask_goals(rows: Sequence[MaskRow]) -> list[tuple[str, float, bool]]:
    """Return what was promised of ``fsm`` at a large vocabulary, what was reached and whether that is enough."""
    ours = [row for row in rows if row.backend == FSM and row.vocab >= 100_000]
    if not ours:
        return []
    fill = max(row.fill for row in ours)
    first = max(row.first_p99 for row in ours) / 1e3
    promised = [
        ("fsm, mask of a known state, us <= 2", fill, fill <= 2),
        ("fsm, first visit of a state, p99 in ms <= 2.5", first, first <= 2.5),
    ]
    for row in ours:
        if row.grammar == "person" and row.compile_over_xgrammar is not None:
            value = row.compile_over_xgrammar
            promised.append(("fsm, compiling person / xgrammar <= 10", value, value <= 10))
    return promised
