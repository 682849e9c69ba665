"""A fleet of workers in whole numbers of time: chats come, a rule sends each turn to a worker, caches fill and evict.

The rule that matches is the lesson's own ``Router``. Nothing here depends on a clock or on rounding.
"""

import bisect
import random
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mini_engine.processes.routing import Router, Tree

OPENINGS, OPENING, TURN, ANSWER, TURNS = 6, 48, 16, 12, 5  # beginnings that chats share; tokens; turns of a chat
PER_TOKEN, PER_ANSWER = 2, 120  # time for a prompt token that is not cached, and for an answer
BEGINNING = 4  # tokens of which the hash decides


@dataclass(frozen=True)
class Request:
    """A turn of a chat: when it comes, its prompt, and the prompt with what will be answered."""

    time: int
    prompt: tuple[int, ...]
    whole: tuple[int, ...]


def chats(count: int, seed: int, gap: int) -> list[Request]:
    """Draw the turns of ``count`` chats, in the order of their times. ``gap``: time between chats, on average."""
    dice = random.Random(seed)
    openings = [tuple(dice.randrange(1000) for _ in range(OPENING)) for _ in range(OPENINGS)]
    found, begin = [], 0
    for _ in range(count):
        begin += dice.randrange(2 * gap)
        text = openings[min(dice.randrange(OPENINGS), dice.randrange(OPENINGS))]  # some are more popular
        time = begin
        for _ in range(dice.randrange(1, TURNS + 1)):
            prompt = text + tuple(dice.randrange(1000) for _ in range(TURN))
            text = prompt + tuple(dice.randrange(1000) for _ in range(ANSWER))
            found.append(Request(time, prompt, text))
            time += 400 + dice.randrange(1200)  # the answer is read, and the next question written
    return sorted(found, key=lambda request: request.time)


class Rule(Protocol):
    """Sends requests to workers. ``Router`` is one."""

    queues: dict[str, int]

    def choose(self, tokens: Sequence[int]) -> str:
        """Return a worker."""
        ...

    def begin(self, worker: str, tokens: Sequence[int]) -> None:
        """Note that a request was sent."""
        ...

    def end(self, worker: str, tokens: Sequence[int]) -> None:
        """Note that a request is done."""
        ...


class Counting:
    """A rule that knows queues and no tokens; ``pick`` chooses among the workers."""

    def __init__(self, workers: Sequence[str], pick: Callable[["Counting", Sequence[int]], str]) -> None:
        """Begin with empty queues."""
        self.queues = dict.fromkeys(workers, 0)
        self.pick = pick
        self.turn = 0

    def choose(self, tokens: Sequence[int]) -> str:
        """Return what ``pick`` says."""
        self.turn += 1
        return self.pick(self, tokens)

    def begin(self, worker: str, tokens: Sequence[int]) -> None:
        """Count."""
        self.queues[worker] += 1

    def end(self, worker: str, tokens: Sequence[int]) -> None:
        """Count."""
        self.queues[worker] -= 1


def in_turns(rule: Counting, tokens: Sequence[int]) -> str:
    """Return one worker after the other."""
    return list(rule.queues)[rule.turn % len(rule.queues)]


def shortest(rule: Counting, tokens: Sequence[int]) -> str:
    """Return the worker with the shortest queue; of equal ones another each time."""
    names = list(rule.queues)
    start = rule.turn % len(names)
    return min(names[start:] + names[:start], key=lambda worker: rule.queues[worker])


def hashed(rule: Counting, tokens: Sequence[int]) -> str:
    """Return the worker that the hash of the first tokens names."""
    return list(rule.queues)[zlib.crc32(repr(tokens[:BEGINNING]).encode()) % len(rule.queues)]


@dataclass
class Worker:
    """A worker's cache: the texts that it holds, the oldest first, and the tree of their tokens."""

    capacity: int
    texts: OrderedDict[tuple[int, ...], None] = field(default_factory=OrderedDict)
    tree: Tree = field(default_factory=Tree)
    free_at: int = 0

    def hold(self, text: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
        """Keep a text as the newest one; return what is dropped for it: texts, and how much of each stays. Mutates."""
        self.texts.pop(text[:-ANSWER], None)  # an answer is kept with its prompt
        self.texts[text] = None
        self.texts.move_to_end(text)
        self.tree.insert(text)
        dropped = []
        while len(self.texts) > self.capacity:
            old, _ = self.texts.popitem(last=False)
            stays = max(common(old, other) for other in self.texts)
            self.tree.dropped(old, stays)
            dropped.append((old, stays))
        return dropped


def common(text: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first tokens two texts have in common."""
    least = min(len(text), len(other))
    return next((place for place in range(least) if text[place] != other[place]), least)


@dataclass(frozen=True)
class Outcome:
    """What came of a load: the share of prompt tokens that were cached, and the longest queue.

    For each request: its wait, and how many of its tokens the router believed to be cached that were not.
    """

    hit_rate: float
    longest_queue: int
    waits: list[int]
    mistaken: list[int]

    @property
    def late(self) -> int:
        """The wait that 95 of 100 requests do not exceed."""
        return sorted(self.waits)[len(self.waits) * 95 // 100]


def rule_of(name: str, workers: Sequence[str], share: float = 0.5) -> Rule:
    """Return a rule by the name that figures show."""
    if name in (MATCH, SILENT):
        return Router(workers, share=share)
    return Counting(workers, {"in turns": in_turns, "shortest queue": shortest, "hash": hashed}[name])


MATCH, SILENT = "match", "match, never told what was dropped"
RULES = (MATCH, "hash", "shortest queue", "in turns")


def simulate(requests: Sequence[Request], name: str, size: int, capacity: int, share: float = 0.5) -> Outcome:
    """Send ``requests`` to ``size`` workers by a rule of ``RULES`` or ``SILENT``.

    ``capacity``: texts that each cache holds. A worker answers one request after the other.
    """
    names = [f"worker {place}" for place in range(size)]
    fleet = Fleet(rule_of(name, names, share), {worker: Worker(capacity) for worker in names}, name != SILENT)
    hits = longest = 0
    waits, mistaken = list[int](), list[int]()
    for request in requests:
        fleet.finish(request.time)
        worker = fleet.rule.choose(request.prompt)
        held = fleet.workers[worker].tree.match(request.prompt)
        mistaken.append(max(fleet.believed(worker, request.prompt) - held, 0))
        cached = min(held, len(request.prompt) - 1)
        waits.append(fleet.send(worker, request, cached))
        hits += cached
        longest = max(longest, *fleet.rule.queues.values())
    return Outcome(hits / sum(len(request.prompt) for request in requests), longest, waits, mistaken)


def endless(requests: Sequence[Request]) -> float:
    """Return the share of prompt tokens that one cache without an end finds, if every answer is there at once."""
    tree, hits = Tree(), 0
    for request in requests:
        hits += min(tree.match(request.prompt), len(request.prompt) - 1)
        tree.insert(request.whole)
    return hits / sum(len(request.prompt) for request in requests)


@dataclass
class Fleet:
    """The workers, the rule that sends requests to them, and what is running: when it ends, where, and what."""

    rule: Rule
    workers: dict[str, Worker]
    tells: bool  # whether workers say what they drop
    running: list[tuple[int, str, Request]] = field(default_factory=list)

    def send(self, worker: str, request: Request, cached: int) -> int:
        """Send a request of which ``cached`` tokens need not be computed; return how long it waits. Mutates."""
        own = self.workers[worker]
        start = max(own.free_at, request.time)
        own.free_at = start + PER_TOKEN * (len(request.prompt) - cached) + PER_ANSWER
        bisect.insort(self.running, (own.free_at, worker, request), key=lambda entry: entry[:2])
        self.rule.begin(worker, request.prompt)
        self.keep(worker, request.prompt)
        return start - request.time

    def finish(self, time: int) -> None:
        """End what ends until ``time``. Mutates."""
        while self.running and self.running[0][0] <= time:
            _, worker, request = self.running.pop(0)
            self.rule.end(worker, request.whole)
            self.keep(worker, request.whole)

    def keep(self, worker: str, text: tuple[int, ...]) -> None:
        """Let a worker hold a text, and tell what it drops for it. Mutates."""
        for old, stays in self.workers[worker].hold(text):
            if self.tells and isinstance(self.rule, Router):
                self.rule.trees[worker].dropped(old, stays)

    def believed(self, worker: str, tokens: Sequence[int]) -> int:
        """Return how many of the tokens the router believes to be cached there; a rule that knows no tokens, none."""
        return self.rule.trees[worker].match(tokens) if isinstance(self.rule, Router) else 0
