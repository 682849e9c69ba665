"""The checks of L7.J's queue: requests that wait for grammars, none of them for the grammar of another.

Owns: a store whose futures are completed by hand, a clock that is set by hand, days of orders, ranks that report, and
what must come of them by ``specs.grammar_queue``. No thread runs here but one, in the check of the wait.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from smoke.checks.l7.spec_grammar_queue import Desk, Order, orders
from smoke.framework.check import Failure, Registry, Values, noting
from smoke.framework.compare import differences

REGISTRY = Registry()
TIMEOUT = 8.5
NUM_DAYS = 60
Key = tuple[str, str]


class HandStore:
    """A store whose compiles end when the probe says so. A grammar is a text: its key, and whose copy."""

    def __init__(self) -> None:
        """Start with nothing compiled."""
        self.kept: set[Key] = set()
        self.pending: dict[Key, Future[str]] = {}
        self.cancelled: list[str] = []
        self.num_copies = 0

    def cached(self, key: Key) -> str | None:
        """Return a copy if the key is kept."""
        return self.copy_of(key[1]) if key in self.kept else None

    def compile(self, key: Key) -> "Future[str]":
        """Return the future under way, or a new one."""
        if key not in self.pending:
            future = self.pending[key] = Future()
            future.add_done_callback(lambda done: self.settle(key, done))
        return self.pending[key]

    def settle(self, key: Key, done: "Future[str]") -> None:
        """Forget a future that is done, and note what became of it."""
        del self.pending[key]
        if done.cancelled():
            self.cancelled.append(key[1])
        elif done.exception() is None:
            self.kept.add(key)

    def copy_of(self, grammar: str) -> str:
        """Return a copy."""
        self.num_copies += 1
        return f"{grammar}, copy {self.num_copies}"

    def end(self, key: Key, state: str) -> None:
        """Begin, finish or fail what is under way."""
        future = self.pending.get(key)
        if future is None:
            return
        if not future.running():
            future.set_running_or_notify_cancel()
        if state == "done":
            future.set_result(key[1])
        elif state == "failed":
            future.set_exception(ValueError(f"the regex {key[1]!r} is wrong"))


class HandClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        """Start at 100 seconds: a deadline is not a time since the beginning."""
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def build_queue(store: Any, clock: Callable[[], float], gather: Any = None) -> Any:
    """Build the candidate's queue."""
    from mini_engine.grammar.queue import GrammarQueue

    return GrammarQueue(store, TIMEOUT, clock, gather)


STATES = {"begin": "running", "finish": "done", "fail": "failed"}

# Days ---------------------------------------------------------------------------------------------------------------


def live(day: Sequence[Order]) -> list[Any]:
    """Carry out a day's orders with the candidate's queue, and look after each."""
    store = HandStore()
    clock = HandClock()
    queue = build_queue(store, clock)
    seen = list[Any]()
    with noting() as done:
        for what, *rest in day:
            done.append(" ".join(map(str, [what, *rest])))
            answer = None
            if what == "submit":
                queue.submit(rest[0], ("regex", rest[1]))
            elif what == "tick":
                clock.now += float(rest[0])
            elif what == "drop":
                queue.drop(rest[0])
            elif what == "poll":
                ready, failed = queue.poll()
                reasons = [[name, str(why)] for name, why in failed.items()]
                answer = [[[name, grammar] for name, grammar in ready], reasons]
            else:
                store.end(("regex", str(rest[0])), STATES[str(what)])
            seen.append([answer, list(queue.waiting), sorted(store.cancelled), int(queue.num_timeouts)])
    return seen


def days_probe(seed: int) -> Values:
    """Live every day."""
    return {f"day {day}": live(orders(seed * NUM_DAYS + day, TIMEOUT)) for day in range(NUM_DAYS)}


def days_verdict(seed: int, got: Values) -> list[Failure]:
    """Live the same days at the desk."""
    failures = []
    for day in range(NUM_DAYS):
        desk = Desk(TIMEOUT)
        said = list[str]()
        copies: set[str] = set()
        for order, seen in zip(orders(seed * NUM_DAYS + day, TIMEOUT), got[f"day {day}"], strict=True):
            said.append(" ".join(map(str, order)))
            found = judge_order(desk, order, seen, copies, f"day {day}: {', '.join(said)}")
            if found:
                failures += found[:1]
                break
    return failures


def judge_order(desk: Desk, order: Order, seen: list[Any], copies: set[str], case: str) -> list[Failure]:
    """Carry out an order at the desk and compare; every grammar that is handed out is its own copy."""
    keys = {guest.name: guest.key for guest in desk.guests}
    what = order[0]
    rest = [str(each) for each in order[1:]]
    failures: list[Failure] = []
    if what == "submit":
        desk.submit(*rest)
    elif what == "tick":
        desk.now += float(rest[0])
    elif what == "drop":
        desk.drop(rest[0])
    elif what == "poll":
        ready, failed = desk.poll()
        given, reasons = seen[0]
        failures += differences(ready, [name for name, _ in given], None, f"{case}: ready")
        failures += differences(sorted(failed), sorted(name for name, _ in reasons), None, f"{case}: failed")
        for name, grammar in given if not failures else []:
            label, _, number = str(grammar).partition(", copy ")
            if label != keys[name] or not number or number in copies:
                failures.append(Failure(case, name, f"its own copy of {keys[name]!r}", repr(grammar)))
            copies.add(number)
        for name, reason in reasons if not failures else []:
            failures += judge_reason(case, name, keys[name], failed[name], reason)
    else:
        desk.end(rest[0], STATES[str(what)])
    failures += differences([guest.name for guest in desk.guests], seen[1], None, f"{case}: who waits")
    failures += differences(sorted(desk.cancelled), seen[2], None, f"{case}: compiles that were given up")
    return failures + differences(desk.num_timeouts, seen[3], None, f"{case}: num_timeouts")


def judge_reason(case: str, name: str, key: str, why: str, reason: str) -> list[Failure]:
    """Look for the words in a reason that its reader needs."""
    words = [f"the regex {key!r} is wrong"] if why == "failed" else ["regex", f"{TIMEOUT:g}", "grammar_timeout_s"]
    missing = [word for word in words if word not in reason]
    return [Failure(f"{case}: the reason of {name}", "", f"a sentence with {missing[0]!r}", reason)] if missing else []


REGISTRY.add(
    "L7.J.days",
    "A request leaves when its own grammar is there, with its own copy, or when it failed or took too long; "
    "no other request is held up, and a compile is cancelled when none waits for it any more.",
    days_probe,
    days_verdict,
)

# One by one ---------------------------------------------------------------------------------------------------------

NAMES = "abcdefghijkl"  # a set has some order, and of so few as three the right one now and then
ALL_COME = ", ".join(f"submit {name} {name}" for name in NAMES)
ALL_END = ", ".join(f"finish {name}" for name in reversed(NAMES))
LATE = f"tick {TIMEOUT}"
TWICE_LATE = f"tick {2 * TIMEOUT}"
STORIES: dict[str, str] = {  # orders, split at commas
    "the second is ready before the first": "submit slow a, submit quick b, finish b, poll, finish a, poll",
    "the order of arrival and not of the compiles": f"{ALL_COME}, {ALL_END}, poll",
    "known before: ready at the next poll, and not before": "submit r0 a, finish a, poll, submit r1 a, poll",
    "one is too late, the other in time": "submit r0 a, tick 1, submit r1 b, begin a, begin b, "
    "tick 7.25, poll, tick 0.25, poll, finish b, poll",
    "late, and the same grammar later: it was kept": f"submit r0 a, begin a, {LATE}, poll, finish a, submit r1 a, poll",
    "late, while another waits for the same compile": f"submit r0 a, tick {TIMEOUT - 1}, submit r1 a, tick 1, poll, "
    "finish a, poll",
    "ready and overdue at once is ready": f"submit r0 a, finish a, {TWICE_LATE}, poll",
    "a kept grammar is never late": f"submit r0 a, finish a, poll, submit r1 a, {TWICE_LATE}, poll",
    "gone before the compile began": "submit r0 a, drop r0, submit r1 a, finish a, poll",
    "gone while it runs": "submit r0 a, begin a, drop r0, finish a, submit r1 a, poll",
    "one of two is gone": "submit r0 a, submit r1 a, drop r0, finish a, poll",
    "an unknown request is gone": "drop who, submit r0 a, drop who, finish a, poll",
    "a failure waits, and the new compile of the same text is given up": "submit r0 a, fail a, submit r1 a, drop r1, "
    "poll",
    "a failure for all that wait, and none for a later request": "submit r0 a, submit r1 a, fail a, submit r2 a, poll, "
    "finish a, poll",
}


def orders_of(story: str) -> list[Order]:
    """Split a story into its orders."""
    return [[*order.split()] for order in story.split(", ")]


def stories_probe(seed: int) -> Values:
    """Tell every story, and one of a store that is closed while a request waits."""
    store = HandStore()
    queue = build_queue(store, HandClock())
    queue.submit("r0", ("regex", "a"))
    store.pending["regex", "a"].cancel()
    ready, failed = queue.poll()
    closed = [list(ready), {name: str(why) for name, why in failed.items()}, list(queue.waiting)]
    return {**{name: live(orders_of(story)) for name, story in STORIES.items()}, "closed": closed}


def stories_verdict(seed: int, got: Values) -> list[Failure]:
    """Tell them at the desk."""
    failures = []
    for name, story in STORIES.items():
        desk = Desk(TIMEOUT)
        copies = set[str]()
        for place, (order, seen) in enumerate(zip(orders_of(story), got[name], strict=True)):
            where = f"{name}, order {place}: {' '.join(map(str, order))}"
            failures += judge_order(desk, order, seen, copies, where)[:1]
    ready, failed, waiting = got["closed"]
    case = "a compile that is cancelled while r0 waits for it"
    failures += differences([[], ["r0"], []], [ready, list(failed), waiting], None, f"{case}: ready, failed, who waits")
    if "given up" not in failed.get("r0", "given up"):
        failures.append(Failure(f"{case}: the reason of r0", "", "what describe(None) says", failed["r0"]))
    return failures


REGISTRY.add(
    "L7.J.stories",
    "The cases that a queue goes wrong in: out of order, late, late but needed, gone, failed, cancelled, known before.",
    stories_probe,
    stories_verdict,
)

# Ranks --------------------------------------------------------------------------------------------------------------

# What each of three ranks has compiled, what failed there; who may run and who has failed, on every rank.
RANKS: dict[str, tuple[list[tuple[str, str]], list[str], list[str]]] = {
    "all are ready": ([(NAMES, "")] * 3, [*NAMES], []),
    "one rank lacks one": ([("abc", ""), ("ac", ""), ("abc", "")], ["a", "c"], []),
    "every rank lacks another": ([("bc", ""), ("ac", ""), ("ab", "")], [], []),
    "one has failed on one rank and is ready on the others": (
        [("abc", ""), ("ac", "b"), ("abc", "")],
        ["a", "c"],
        ["b"],
    ),
    "failed on two ranks": ([("c", "b"), ("c", "b"), ("bc", "")], ["c"], ["b"]),
    "each fails somewhere": ([("", "a"), ("a", "b"), ("ab", "c")], [], ["a", "b", "c"]),
    "nothing is ready": ([("", ""), ("", ""), ("", "")], [], []),
}


def rank_queue(done: str, failed: str, gather: Any, rank: int) -> Any:
    """Build a rank's queue of ``NAMES``; its compiles end in the order of their letters, rank by rank another one."""
    store = HandStore()
    queue = build_queue(store, HandClock(), gather)
    for name in NAMES:
        queue.submit(name, ("regex", f"{name} of rank {rank}"))
    for name in sorted(done, reverse=rank % 2 == 1):
        store.end(("regex", f"{name} of rank {rank}"), "done")
    for name in failed:
        store.end(("regex", f"{name} of rank {rank}"), "failed")
    return queue


def ranks_probe(seed: int) -> Values:
    """Let every rank poll; the gather gives all three reports, which were made beforehand."""
    values: Values = {}
    for name, (states, _, _) in RANKS.items():
        reports = [rank_queue(*state, None, rank).report() for rank, state in enumerate(states)]
        answers = []
        for rank, state in enumerate(states):
            calls: list[Any] = []

            def gather(report: Any, calls: list[Any] = calls, reports: Any = reports) -> Any:
                calls.append(report)
                return reports

            queue = rank_queue(*state, gather, rank)
            ready, failed = queue.poll()
            again = [[each[0] for each in ready], [[who, str(why)] for who, why in failed.items()]]
            answers.append([*again, sorted(queue.waiting), len(calls)])
        values[name] = answers
    calls = []

    def gather_two(report: Any) -> Any:
        calls.append(report)
        return [report, ([], {})]

    empty = build_queue(HandStore(), HandClock(), gather_two)
    values["none waits"] = [list(empty.poll()[0]), len(calls)]
    return values


def ranks_verdict(seed: int, got: Values) -> list[Failure]:
    """Run who is ready everywhere; end who failed anywhere; all ranks say the same."""
    failures = []
    for name, (states, ready, failed) in RANKS.items():
        for rank, (came, reasons, waiting, calls) in enumerate(got[name]):
            case = f"{name}, rank {rank}"
            failures += differences(ready, came, None, f"{case}: ready")
            failures += differences(failed, sorted(each for each, _ in reasons), None, f"{case}: failed")
            failures += differences(sorted({*NAMES} - {*ready, *failed}), waiting, None, f"{case}: who waits on")
            failures += differences(1, calls, None, f"{case}: calls of gather")
            failures += differences(
                dict(got[name][0][1]), dict(reasons), None, f"{case}: reasons of rank 0 and its own"
            )
            for who, reason in reasons:
                first = next((place for place, (_, wrong) in enumerate(states) if who in wrong), rank)
                if f"of rank {first}" not in reason:
                    failures.append(Failure(f"{case}: the reason of {who}", "", f"that of rank {first}", reason))
    return failures + differences([[], 1], got["none waits"], None, "none waits: ready, and calls of gather")


REGISTRY.add(
    "L7.J.ranks",
    "With several ranks a request runs when it is ready on all of them and ends when it failed on one; the reasons are "
    "the same everywhere, and every poll gathers once.",
    ranks_probe,
    ranks_verdict,
)


def wait_probe(seed: int) -> Values:
    """Poll with patience: while a thread finishes a compile, with a request ready already, and with none there."""
    values: Values = {}
    store = HandStore()
    queue = build_queue(store, time.monotonic)
    queue.submit("r0", ("regex", "a"))
    queue.submit("r1", ("regex", "b"))
    timer = threading.Timer(0.2, lambda: store.end(("regex", "b"), "done"))
    timer.start()
    values["one ends"] = timed_poll(queue, 5.0)
    timer.join()
    values["no patience"] = timed_poll(queue, 0.0)
    queue.submit("r2", ("regex", "b"))
    values["one is ready"] = timed_poll(queue, 5.0)
    queue.drop("r0")
    values["none waits"] = timed_poll(queue, 5.0)
    queue.submit("r3", ("regex", "c"))
    values["none ends"] = timed_poll(queue, 0.3)
    alone = build_queue(store, time.monotonic)
    alone.submit("r4", ("regex", "b"))
    alone.drop("r4")  # its grammar was kept, so there is no compile to give up
    values["dropped"] = timed_poll(alone, 5.0)
    return values


def timed_poll(queue: Any, wait_s: float) -> list[Any]:
    """Poll and return who was ready, and the seconds that it took."""
    began = time.monotonic()
    ready, _ = queue.poll(wait_s)
    return [[name for name, _ in ready], time.monotonic() - began]


def wait_verdict(seed: int, got: Values) -> list[Failure]:
    """Be back before the patience is at its end: when a request is ready, or there is nothing to wait for."""
    failures = []
    some = {"one ends": ["r1"], "one is ready": ["r2"]}
    for name, ready in {**some, "no patience": [], "none waits": [], "dropped": []}.items():
        failures += differences(ready, got[name][0], None, f"{name}: ready")
        if got[name][1] > 3.0:
            failures.append(Failure(name, "seconds", "far less than the 5 that it may wait", f"{got[name][1]:.1f}"))
    if got["none ends"][1] < 0.25:
        failures.append(Failure("none ends", "seconds", "the 0.3 that it may wait", f"{got['none ends'][1]:.1f}"))
    return failures


REGISTRY.add(
    "L7.J.wait",
    "A poll may wait for the first compile that ends, and does not if a request is ready or none is there.",
    wait_probe,
    wait_verdict,
    seconds=30.0,
)
