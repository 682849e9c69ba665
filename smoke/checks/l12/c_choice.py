"""The checks of a router's choice (L12.C): by match, by queue, and where one outweighs the other. No model.

Owns: queues and matches around every limit, a choice by sorted lists, and the life of a small fleet.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smoke.checks.l12.c_belief import apply, drawn_tokens, longest
from smoke.framework.check import Registry, Values, noting
from smoke.framework.compare import bitwise

REGISTRY = Registry()
NUM_CHOICES, NUM_LIVES, NUM_EVENTS = 500, 12, 40
NAMES = ("ada", "ben", "cleo", "dan")
TOKENS = list(range(100, 112))
SHARES, AHEAD, RATIOS = (0.25, 0.5, 0.75), (0, 2, 4), (1.0, 1.5, 2.0)


@dataclass(frozen=True)
class Limits:
    """What a router is given."""

    share: float
    most_ahead: int
    ratio_ahead: float


@dataclass(frozen=True)
class Choice:
    """A moment: the limits, the length of the request, and each worker's queue and match."""

    limits: Limits
    length: int
    queues: tuple[int, ...]
    matches: tuple[int, ...]

    def __str__(self) -> str:
        """Name it for a message."""
        given = f"share {self.limits.share}, most_ahead {self.limits.most_ahead}, ratio_ahead {self.limits.ratio_ahead}"
        return f"{given}; {self.length} tokens, matches {list(self.matches)}, queues {list(self.queues)}"


def chosen(limits: Limits, length: int, queues: Sequence[int], matches: Sequence[int]) -> int:
    """Choose by hand: the place of the worker."""
    places = range(len(queues))
    by_match = sorted(places, key=lambda place: (matches[place], -queues[place], -place))[-1]
    by_queue = sorted(places, key=lambda place: (queues[place], length - matches[place], place))[0]
    if 100 * matches[by_match] <= round(100 * limits.share) * length:
        return by_queue
    far = queues[by_match] - min(queues)
    if far > limits.most_ahead and 10 * queues[by_match] > round(10 * limits.ratio_ahead) * min(queues):
        return by_queue
    return by_match


def beside_none() -> list[Choice]:
    """Return moments where one worker knows the request and has a queue, and the other has none."""
    limits = [Limits(0.5, ahead, ratio) for ahead in AHEAD for ratio in RATIOS]
    return [Choice(each, 4, (queue, 0), (4, 0)) for each in limits for queue in range(4)]


def choices(seed: int) -> list[Choice]:
    """Draw moments; small numbers, so that every limit is met exactly now and then."""
    rng = random.Random(f"choices {seed}")
    found = beside_none()
    for number in range(NUM_CHOICES):
        limits = Limits(rng.choice(SHARES), rng.choice(AHEAD), rng.choice(RATIOS))
        length = rng.choice([0, 1, 4, 8, 12])
        count = rng.randint(1, 4)
        queues = [rng.choice([0, 1, 2, 3, 4, 6, 8, 9, 12]) for _ in range(count)]
        matches = [rng.choice([0, length // 4, length // 2, (3 * length) // 4, length]) for _ in range(count)]
        if number % 2 and count > 1:  # the longest match waits longest: both limits decide
            worst = matches.index(max(matches))
            queues[worst] = min(queues) + rng.choice([limits.most_ahead, limits.most_ahead + 1, limits.most_ahead + 4])
        found.append(Choice(limits, length, tuple(queues), tuple(matches)))
    return found


class Known:
    """Stands in for a tree: holds so many of the first tokens, and refuses to learn while a choice is made."""

    def __init__(self, count: int) -> None:
        """Hold the first ``count`` tokens of any request."""
        self.count = count

    def match(self, tokens: Sequence[int]) -> int:
        """Return how many are held."""
        return min(self.count, len(tokens))

    def insert(self, tokens: Sequence[int]) -> None:
        """Refuse: a choice notes nothing."""
        raise RuntimeError("a choice inserts nothing; begin does, when the request is sent")


def choose_probe(seed: int) -> Values:
    """Set up every moment, and choose twice."""
    from mini_engine.processes.routing import Router

    values: Values = {}
    for number, case in enumerate(choices(seed)):
        workers = NAMES[: len(case.queues)] if number % 2 else NAMES[::-1][: len(case.queues)]
        router: Any = Router(workers, case.limits.share, case.limits.most_ahead, case.limits.ratio_ahead)
        router.queues = dict(zip(workers, case.queues, strict=True))
        router.trees = {worker: Known(count) for worker, count in zip(workers, case.matches, strict=True)}
        with noting() as done:
            done.append(str(case))
            picked = [router.choose(TOKENS[: case.length]) for _ in range(2)]
        where = [workers.index(worker) if worker in workers else str(worker) for worker in picked]
        values[f"choice {number}: {case}; the place of its worker, asked twice"] = where
        values[f"choice {number}, the queues afterwards"] = list(router.queues.values())
    return values


def choose_spec(seed: int) -> Values:
    """Choose by hand; a choice changes nothing, so the second is the first."""
    values: Values = {}
    for number, case in enumerate(choices(seed)):
        values[f"choice {number}: {case}; the place of its worker, asked twice"] = [
            chosen(case.limits, case.length, case.queues, case.matches)
        ] * 2
        values[f"choice {number}, the queues afterwards"] = list(case.queues)
    return values


REGISTRY.add(
    "L12.C.choose",
    "The longest match decides if it is more than the share and its worker's queue is within one of the two limits, "
    "else the shortest queue; then queue or match, then the order of workers. A choice notes nothing.",
    choose_probe,
    bitwise(choose_spec),
)


Event = tuple[str, int, list[int], int]  # what happens, to which worker, with which tokens, from which length on


def events(seed: int, life: int) -> list[Event]:
    """Draw the life of a fleet: requests that are sent and answered, and what a worker says that it dropped."""
    rng = random.Random(f"life {seed} {life}")
    running: list[tuple[int, list[int]]] = []
    old: list[list[int]] = [[]]
    found: list[Event] = []
    for _ in range(NUM_EVENTS):
        kind = rng.choice(["begin", "begin", "end", "dropped"])
        worker = rng.randrange(3)
        if kind == "begin":
            tokens = rng.choice(old)[: rng.randint(0, 5)] + drawn_tokens(rng)
            running.append((worker, tokens))
            found.append((kind, worker, tokens, 0))
        elif kind == "end" and running:
            worker, tokens = running.pop(rng.randrange(len(running)))
            old.append(tokens + drawn_tokens(rng))
            found.append((kind, worker, old[-1], 0))
        elif kind == "dropped":
            tokens = rng.choice(old)
            found.append((kind, worker, tokens, rng.randint(0, len(tokens))))
    return found


def life_probe(seed: int) -> Values:
    """Live every life, and look at queues and beliefs after each event."""
    from mini_engine.processes.routing import Router

    values: Values = {}
    for life in range(NUM_LIVES):
        happened = events(seed, life)
        router: Any = Router(NAMES[:3])
        asked = [tokens for _, _, tokens, _ in happened]
        with noting() as done:
            for number, (kind, place, tokens, length) in enumerate(happened):
                worker = NAMES[place]
                done.append(f"{kind} {worker} {tokens}" + (f" from {length} on" if kind == "dropped" else ""))
                if kind == "dropped":
                    router.trees[worker].dropped(tokens, length)
                else:
                    (router.begin if kind == "begin" else router.end)(worker, tokens)
                name = f"life {life}, event {number}, {done[-1]}"
                values[f"{name}, queues"] = [router.queues[each] for each in NAMES[:3]]
                beliefs = [[router.trees[each].match(text) for text in asked] for each in NAMES[:3]]
                values[f"{name}, matches"] = beliefs
    return values


def life_spec(seed: int) -> Values:
    """Count, and hold sets of beginnings."""
    values: Values = {}
    for life in range(NUM_LIVES):
        happened = events(seed, life)
        queues, held = [0, 0, 0], [set[tuple[int, ...]](), set[tuple[int, ...]](), set[tuple[int, ...]]()]
        asked = [tokens for _, _, tokens, _ in happened]
        for number, (kind, place, tokens, length) in enumerate(happened):
            queues[place] += {"begin": 1, "end": -1, "dropped": 0}[kind]
            apply(held[place], ("dropped" if kind == "dropped" else "insert", tokens, length))
            words = f"{kind} {NAMES[place]} {tokens}" + (f" from {length} on" if kind == "dropped" else "")
            name = f"life {life}, event {number}, {words}"
            values[f"{name}, queues"] = list(queues)
            values[f"{name}, matches"] = [[longest(own, text) for text in asked] for own in held]
    return values


REGISTRY.add(
    "L12.C.life",
    "A request is in its worker's queue from begin to end, and its prompt, later its answer too, in that worker's tree "
    "alone; what the worker dropped is not.",
    life_probe,
    bitwise(life_spec),
)
