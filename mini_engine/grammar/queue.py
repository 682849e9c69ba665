"""L7: requests that wait until their grammar is compiled, while all others go on.

Owns: who waits for which compile, time-outs, and what several ranks agree on. Must not know: backends, the scheduler,
tensors.

    submit ──► waiting for a compile ──► poll ──► ready: a grammar of its own
                                             └──► failed: a reason; ends that request alone

A request leaves when *its* grammar is there, in the order in which they came among those that are ready: a slow schema
holds no other request back. Parallel to SGLang's ``grammar_manager.py``.
"""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from mini_engine.sampler.params import GrammarKey

Grammar = TypeVar("Grammar")
Report = tuple[list[str], dict[str, str]]  # ids that are ready, reasons of those that failed
Gather = Callable[[Report], list[Report]]


class Store(Protocol[Grammar]):
    """What compiles: ``GrammarStore``."""

    def cached(self, key: GrammarKey) -> Grammar | None:
        """Return a copy of what was compiled before."""

    def compile(self, key: GrammarKey) -> Future[Grammar]:
        """Begin to compile, or join a compile of the same grammar that is running."""

    def copy_of(self, grammar: Grammar) -> Grammar:
        """Return a copy of what a compile brought: it is kept, and others wait for it too."""


@dataclass
class Waiting(Generic[Grammar]):
    """A request in the queue: its grammar, or the compile that will bring it, and when that has taken too long."""

    key: GrammarKey
    deadline: float
    grammar: Grammar | None
    future: Future[Grammar] | None


class GrammarQueue(Generic[Grammar]):
    """The requests whose grammars are not there yet. One thread uses it; the compiles run in the store's."""

    def __init__(
        self, store: Store[Grammar], timeout_s: float, clock: Callable[[], float], gather: Gather | None = None
    ) -> None:
        """Wait at most ``timeout_s`` for a compile. ``gather`` collects every rank's report."""
        self.store = store
        self.timeout_s = timeout_s
        self.clock = clock
        self.gather = gather
        self.waiting: dict[str, Waiting[Grammar]] = {}  # in the order of arrival
        self.num_timeouts = 0

    def submit(self, request_id: str, key: GrammarKey) -> None:
        """Queue a request. One whose grammar is kept already is ready at the next ``poll``. Mutates."""
        grammar = self.store.cached(key)
        future = self.store.compile(key) if grammar is None else None
        self.waiting[request_id] = Waiting(key, self.clock() + self.timeout_s, grammar, future)

    def poll(self, wait_s: float = 0.0) -> tuple[list[tuple[str, Grammar]], dict[str, str]]:
        """Return who is ready, in the order of arrival, with a grammar each, and who failed, with the reason. Mutates.

        Waits up to ``wait_s`` for the first compile that ends, if nothing is ready. With several ranks, ready is who is
        ready everywhere and failed is who failed anywhere, so that all of them schedule the same requests.
        """
        futures = [entry.future for entry in self.waiting.values() if entry.future is not None]
        if wait_s > 0 and len(futures) == len(self.waiting):
            wait(futures, wait_s, FIRST_COMPLETED)
        report = self.report()
        reports = [report] if self.gather is None else self.gather(report)
        failed = {name: reason for _, reasons in reversed(reports) for name, reason in reasons.items()}
        everywhere = set.intersection(*(set(names) for names, _ in reports))
        ready = [name for name in self.waiting if name in everywhere]
        grammars = [(name, self.take(name)) for name in ready]
        for name in failed:
            self.drop(name)
        return grammars, failed

    def report(self) -> Report:
        """Return who is ready here, and who failed here and why. Mutates the count of time-outs.

        The reason of a compile is what ``describe`` says; that of a time-out names the kind of grammar, the seconds and
        ``grammar_timeout_s``.
        """
        ready = []
        failed = {}
        for name, entry in self.waiting.items():
            if entry.future is None:
                ready.append(name)
            elif entry.future.done():
                error = None if entry.future.cancelled() else entry.future.exception()
                if entry.future.cancelled() or error is not None:
                    failed[name] = describe(error)
                else:
                    ready.append(name)
            elif self.clock() >= entry.deadline:
                self.num_timeouts += 1
                failed[name] = (
                    f"its {entry.key[0]} was not compiled within {self.timeout_s:g} s; simplify it, or raise "
                    "grammar_timeout_s"
                )
        return ready, failed

    def take(self, request_id: str) -> Grammar:
        """Remove a request that is ready and return a grammar of its own. Mutates."""
        entry = self.waiting.pop(request_id)
        if entry.future is not None:
            return self.store.copy_of(entry.future.result())
        assert entry.grammar is not None, "neither a grammar nor a compile"
        return entry.grammar

    def drop(self, request_id: str) -> None:
        """Remove a request, if it is here. Mutates.

        A compile that no request waits for is dropped, unless it has begun: then its grammar is kept.
        """
        entry = self.waiting.pop(request_id, None)
        if entry is not None and entry.future is not None and not self.is_awaited(entry.future):
            entry.future.cancel()

    def is_awaited(self, future: Future[Grammar]) -> bool:
        """Whether some request waits for a compile."""
        return any(entry.future is future for entry in self.waiting.values())


def describe(error: BaseException | None) -> str:
    """Return why a compile brought nothing, in a sentence."""
    if error is None:
        return "its grammar was given up before it was compiled; send it again"
    return str(error) if isinstance(error, ValueError) else f"its grammar could not be compiled: {error!r}"
