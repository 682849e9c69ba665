"""The checks of L7.J's store: what is compiled once, who shares it, and what is forgotten.

Owns: a backend whose grammars count, a pool whose work is done when the probe says so, and what the candidate's store
must hand out. The queue over the store is in it, too: a grammar that came too late is there for the next one.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from smoke.checks.l7.j_queue import HandClock, build_queue
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()
SECONDS = 3.0  # a compile takes so long by the clock


class HandPool:
    """Does the submitted work when it is told to, in the order in which it is told; ``at_once`` in the submit."""

    def __init__(self, at_once: bool = False) -> None:
        """Start with nothing to do."""
        self.at_once = at_once
        self.work: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
        """Take work."""
        self.work.append((Future(), lambda: function(*args, **kwargs)))
        future = self.work[-1][0]
        if self.at_once:
            self.do(len(self.work) - 1)
        return future

    def do(self, number: int) -> None:
        """Do the work of this number, unless it was given up."""
        future, function = self.work[number]
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except ValueError as error:
                future.set_exception(error)


def counter_class() -> Any:
    """Define a grammar object that allows nothing and counts what it is told all the same."""
    from mini_engine.grammar.base import GrammarObject

    class Counter(GrammarObject):
        """Counts its tokens."""

        def __init__(self, text: str, count: int = 0) -> None:
            super().__init__()
            self.text = text
            self.count = count

        def accept_token(self, token_id: int) -> None:
            self.count += 1

        def rollback(self, count: int) -> None:
            self.count -= count

        def is_terminated(self) -> bool:
            return False

        def is_complete(self) -> bool:
            return False

        def fill_vocab_mask(self, mask: Any, row: int) -> None:
            mask[row] = 0

        def copy(self) -> Any:
            return type(self)(self.text, self.count)

    return Counter


def build_store(log: list[str], at_once: bool = False) -> Any:
    """Build the candidate's store over a backend that logs what it compiles; a text with an X in it is wrong."""
    from mini_engine.grammar.base import GrammarBackend, GrammarError
    from mini_engine.grammar.store import GrammarStore
    from mini_engine.grammar.tokens import TokenTable

    clock = HandClock()
    counter = counter_class()

    class Backend(GrammarBackend):
        """Takes ``SECONDS`` for each grammar."""

        name = "counter"

        def build(self, kind: Any, text: str) -> Any:
            log.append(text)
            clock.now += SECONDS
            if "X" in text and log.count(text) == 1:  # wrong the first time alone
                raise GrammarError(f"{text} is wrong")
            return counter(text)

    store: Any = GrammarStore(Backend(TokenTable((b"", b"a"), frozenset({0}))), clock)
    store.pool.shutdown()
    store.pool = HandPool(at_once)
    return store


def seen(grammar: Any) -> Values | None:
    """Return what can be seen of a grammar."""
    if grammar is None:
        return None
    stats = [str(grammar.stats.kind), float(grammar.stats.compile_s), bool(grammar.stats.is_cache_hit)]
    return {"text": grammar.text, "count": int(grammar.count), "stats": [*stats, int(grammar.stats.num_masks)]}


def totals(store: Any) -> list[Any]:
    """Return the store's statistics."""
    stats = store.stats
    counts = [stats.num_compiled, stats.num_failed, stats.num_hits, stats.num_shared]
    return [*map(int, counts), float(stats.compile_s), len(store.pending), len(store.kept)]


def compiled(text: str, count: int = 0, hit: bool = False, masks: int = 0) -> Values:
    """Return what is to be seen of a grammar."""
    return {"text": text, "count": count, "stats": ["regex", SECONDS, hit, masks]}


# Copies -------------------------------------------------------------------------------------------------------------


def copies_probe(seed: int) -> Values:
    """Take the same grammar three times, use what was handed out, and look at each."""
    store = build_store([])
    key = ("regex", "a")
    missing = store.cached(key)
    future = store.compile(key)
    early = store.cached(key)
    store.pool.do(0)
    first = store.copy_of(future.result())
    first.accept_token(1)
    first.stats.num_masks = 5
    second = store.cached(key)
    second.accept_token(1)
    second.accept_token(1)
    second.stats.num_masks += 7
    third = store.cached(key)
    other = store.cached(("regex", "b"))
    return {
        "before": [seen(missing), seen(early)],
        "of the compile, after the hits": seen(store.copy_of(future.result())),
        "after": [seen(each) for each in (first, second, third, other)],
        "another kind": seen(store.cached(("ebnf", "a"))),
        "totals": totals(store),
    }


def copies_verdict(seed: int, got: Values) -> list[Failure]:
    """Every copy begins at the beginning, with statistics of its own."""
    want = {
        "before": [None, None],
        "of the compile, after the hits": compiled("a"),
        "after": [compiled("a", 1, False, 5), compiled("a", 2, True, 7), compiled("a", 0, True), None],
        "another kind": None,
        "totals": [1, 0, 2, 0, SECONDS, 0, 1],
    }
    return differences(want, got, None)


REGISTRY.add(
    "L7.J.copies",
    "What the store keeps is never handed out: every caller gets a copy at the beginning, with its own statistics.",
    copies_probe,
    copies_verdict,
)

# Sharing and failing ------------------------------------------------------------------------------------------------


def sharing_probe(seed: int) -> Values:
    """Ask for the same while it is compiled, for another, and again afterwards."""
    log: list[str] = []
    store = build_store(log)
    first, second, third = [store.compile(("regex", "a")) for _ in range(3)]
    other, kind = store.compile(("regex", "b")), store.compile(("ebnf", "a"))
    for number in (1, 0):
        store.pool.do(number)
    later = store.cached(("regex", "a"))
    return {
        "one future": first is second is third,
        "others": [other is first, kind is first],
        "log": list(log),
        "work": len(store.pool.work),
        "done": [first.done(), other.done(), kind.done()],
        "later": seen(later),
        "totals": totals(store),
    }


def sharing_verdict(seed: int, got: Values) -> list[Failure]:
    """One compile for three requests, one for each other key."""
    want = {
        "one future": True,
        "others": [False, False],
        "log": ["b", "a"],
        "work": 3,
        "done": [True, True, False],
        "later": compiled("a", hit=True),
        "totals": [2, 0, 1, 2, 2 * SECONDS, 1, 2],
    }
    return differences(want, got, None)


REGISTRY.add(
    "L7.J.sharing",
    "Who asks for a grammar that is being compiled joins that compile; another key, another compile.",
    sharing_probe,
    sharing_verdict,
)


def failing_probe(seed: int) -> Values:
    """Let two compiles fail, another be given up, and try one that failed and that one again."""
    log: list[str] = []
    store = build_store(log)
    first = store.compile(("regex", "X"))
    store.compile(("regex", "XX"))
    for number in (0, 1):
        store.pool.do(number)
    given_up = store.compile(("regex", "a"))
    cancelled = given_up.cancel()
    values: Values = {
        "error": str(first.exception()),
        "cancelled": cancelled,
        "totals": totals(store),
        "kept": [seen(store.cached(("regex", text))) for text in "Xa"],
    }
    again = [store.compile(("regex", text)) for text in "Xa"]
    values["new"] = [again[0] is not first, again[1] is not given_up]
    for number in range(2, len(store.pool.work)):
        store.pool.do(number)
    values["done"] = [future.done() and not future.cancelled() and future.exception() is None for future in again]
    return {
        **values,
        "again": [seen(store.cached(("regex", t))) for t in "Xa"],
        "totals again": totals(store),
        "log": log,
    }


def failing_verdict(seed: int, got: Values) -> list[Failure]:
    """Remember nothing of what brought no grammar."""
    want = {
        "error": "X is wrong",
        "cancelled": True,
        "kept": [None, None],
        "totals": [0, 2, 0, 0, 0.0, 0, 0],
        "new": [True, True],
        "done": [True, True],
        "again": [compiled("X", hit=True), compiled("a", hit=True)],
        "totals again": [2, 2, 2, 0, 2 * SECONDS, 0, 2],
        "log": ["X", "XX", "X", "a"],
    }
    return differences(want, got, None)


REGISTRY.add(
    "L7.J.failing",
    "A compile that failed or was given up is forgotten: the next request tries anew.",
    failing_probe,
    failing_verdict,
)

# Limits -------------------------------------------------------------------------------------------------------------


def limit_probe(seed: int) -> Values:
    """Compile as many grammars as are kept, use the first again, and compile two more."""
    from mini_engine.grammar.store import KEPT_GRAMMARS

    store = build_store([])
    for number in range(KEPT_GRAMMARS):
        store.compile(("regex", f"g{number}"))
        store.pool.do(number)
    kept = len(store.kept)
    store.cached(("regex", "g0"))
    for number in range(KEPT_GRAMMARS, KEPT_GRAMMARS + 2):
        store.compile(("regex", f"g{number}"))
        store.pool.do(number)
    looked_for = [0, 1, 2, 3, KEPT_GRAMMARS - 1, KEPT_GRAMMARS, KEPT_GRAMMARS + 1]
    found = [store.cached(("regex", f"g{number}")) is not None for number in looked_for]
    return {"limit": int(KEPT_GRAMMARS), "kept": kept, "afterwards": len(store.kept), "found": found}


def limit_verdict(seed: int, got: Values) -> list[Failure]:
    """Forget the two that were used the longest time ago."""
    want = {"limit": got["limit"], "kept": got["limit"], "afterwards": got["limit"]}
    return differences({**want, "found": [True, False, False, True, True, True, True]}, got, None)


REGISTRY.add(
    "L7.J.limit",
    "The store keeps so many grammars and no more; the one that was used the longest time ago goes.",
    limit_probe,
    limit_verdict,
)


def quick_probe(seed: int) -> Values:
    """Compile with a pool that is done before its submit returns, as a thread may be; in a thread, as this may hang."""
    values: Values = {"ended": False}

    def work() -> None:
        store = build_store([], at_once=True)
        future = store.compile(("regex", "a"))
        values.update(done=future.done(), later=seen(store.cached(("regex", "a"))), totals=totals(store))
        values["ended"] = True

    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(5.0)
    if errors:
        raise errors[0]
    return values


def quick_verdict(seed: int, got: Values) -> list[Failure]:
    """Come back, with nothing under way any more."""
    if not got["ended"]:
        return [
            Failure("a compile that is over at once", "", "compile returns", "it waits for a lock that it holds itself")
        ]
    want = {"ended": True, "done": True, "later": compiled("a", hit=True), "totals": [1, 0, 1, 0, SECONDS, 0, 1]}
    return differences(want, got, None)


REGISTRY.add(
    "L7.J.quick",
    "A compile that ends before the store looks is kept like every other and does not stay under way.",
    quick_probe,
    quick_verdict,
    seconds=30.0,
)

# The lock -----------------------------------------------------------------------------------------------------------

CHANGES = ("__setitem__", "__delitem__", "pop", "popitem", "move_to_end", "setdefault", "update", "clear")


def watched_table(lock: Any, held: list[bool]) -> Any:
    """Return an empty table that notes in ``held`` at every change whether the lock is held."""

    def noted(name: str) -> Callable[..., Any]:
        def change(self: Any, *args: Any, **kwargs: Any) -> Any:
            held.append(bool(lock.locked()))
            return getattr(OrderedDict, name)(self, *args, **kwargs)

        return change

    return type("Table", (OrderedDict,), {name: noted(name) for name in CHANGES})()


def locked_probe(seed: int) -> Values:
    """Compile more grammars than are kept and find one again, with tables that notice whether the lock is held."""
    from mini_engine.grammar.store import KEPT_GRAMMARS

    store = build_store([])
    held: list[bool] = []
    store.kept, store.pending = watched_table(store.lock, held), watched_table(store.lock, held)
    values: Values = {"compile": True, "settle": True, "cached": True}

    def note(name: str) -> None:
        values[name] &= all(held)
        held.clear()

    for number in range(KEPT_GRAMMARS + 1):
        store.compile(("regex", f"g{number}"))
        note("compile")
        store.pool.do(number)
        note("settle")
    store.cached(("regex", "g9"))
    note("cached")
    return values


def locked_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for the lock at every change."""
    words = "kept and pending change only while self.lock is held"
    return [Failure(name, "", words, "a change without it") for name, is_held in got.items() if not is_held]


REGISTRY.add(
    "L7.J.locked",
    "The store's tables change only under its lock: two threads that change one at a time may lose an entry.",
    locked_probe,
    locked_verdict,
)

# With the queue -----------------------------------------------------------------------------------------------------


def late_probe(seed: int) -> Values:
    """Let requests go while their grammar is compiled, or before it is, and ask for the same again."""
    from mini_engine.grammar.queue import GrammarQueue

    values: Values = {}
    for name, begun in (("while it runs", True), ("before it began", False)):
        for way in ("late", "gone"):
            log: list[str] = []
            store = build_store(log)
            clock = HandClock()
            queue: GrammarQueue[Any] = build_queue(store, clock)
            queue.submit("r0", ("regex", "a"))
            if begun:
                store.pool.work[0][0].set_running_or_notify_cancel()
            clock.now += 100.0 if way == "late" else 0.0
            if way == "gone":
                queue.drop("r0")
            failed = sorted(queue.poll()[1])
            if begun:
                store.pool.work[0][0].set_result(store.pool.work[0][1]())
            queue.submit("r1", ("regex", "a"))
            for number in range(1, len(store.pool.work)):
                store.pool.do(number)
            ready, reasons = queue.poll()
            given = [[who, seen(grammar)] for who, grammar in ready]
            values[f"{way} {name}"] = {"failed": failed, "given": given, "reasons": sorted(reasons), "log": list(log)}
    return values


def late_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for the second request's grammar, and that nothing was compiled twice."""
    failures = []
    for name, found in got.items():
        hit = "while it runs" in name
        want = {"failed": ["r0"] if "late" in name else [], "given": [["r1", compiled("a", hit=hit)]], "reasons": []}
        failures += differences({**want, "log": ["a"]}, found, None, f"the first is {name}")
    return failures


REGISTRY.add(
    "L7.J.late",
    "A grammar that comes too late for one request is there for the next: a time-out poisons nothing.",
    late_probe,
    late_verdict,
)
