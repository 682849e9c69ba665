"""Chats on the simulated workers of ``mini_engine.router``, with the lesson's own ``Router`` as one of the rules."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mini_engine.processes.routing import Router, Tree
from mini_engine.router.rules import ConsistentHashing, RoundRobin, Rule, TwoChoices
from mini_engine.router.simulation import Costs, Job, Limits, Session, Simulation, Turn

OPENINGS, OPENING, TURN, ANSWER, TURNS = 6, 48, 16, 12, 5  # beginnings that chats share; tokens; turns of a chat
COSTS = Costs(step=0.02, token=0.004, row=0.002)
RUNNING, STEP = 4, 128  # of a worker: requests that share a step, and tokens of a step
MATCH, SILENT = "match", "match, never told what was dropped"
RULES = (MATCH, "hashing", "two choices", "round robin")


def chats(count: int, seed: int, gap_s: float) -> list[Session]:
    """Draw ``count`` chats. ``gap_s``: seconds between two of them, on average."""
    dice = random.Random(seed)

    def draw(size: int) -> list[int]:
        return [dice.randrange(1000) for _ in range(size)]

    openings = [draw(OPENING) for _ in range(OPENINGS)]
    found, begin = [], 0.0
    for _ in range(count):
        begin += 2 * gap_s * dice.random()
        opening = openings[min(dice.randrange(OPENINGS), dice.randrange(OPENINGS))]  # some are more popular
        first = Turn(opening + draw(TURN), draw(ANSWER))
        later = [Turn(draw(TURN), draw(ANSWER), 0.5 + 2 * dice.random()) for _ in range(dice.randrange(TURNS))]
        found.append(Session(begin, [first, *later]))
    return found


class Match(Router):
    """The lesson's router as a rule of the simulation. ``believed``: tokens of each request that it took for cached."""

    def __init__(self, share: float, is_told: bool) -> None:
        """Start without workers. ``is_told``: whether it learns what workers drop."""
        super().__init__([], share=share)
        self.is_told = is_told
        self.believed: list[int] = []

    def add(self, worker: str) -> None:
        """Let ``worker`` take requests. Mutates."""
        self.trees[worker] = Tree()
        self.queues[worker] = 0

    def begin(self, worker: str, tokens: Sequence[int]) -> None:
        """Note that a request was sent, and what was believed before. Mutates."""
        self.believed.append(self.trees[worker].match(tokens))
        super().begin(worker, tokens)

    def dropped(self, worker: str, tokens: Sequence[int], length: int) -> None:
        """Forget what ``worker`` does not hold any more, if it is told so. Mutates."""
        if self.is_told:
            self.trees[worker].dropped(tokens, length)


class Fleet(Simulation):
    """The simulation, with its requests in the order in which they come."""

    def __init__(self, rule: Rule, workers: int, costs: Costs, limits: Limits) -> None:
        """Start without requests."""
        super().__init__(rule, workers, costs, limits)
        self.jobs: list[Job] = []

    def arrive(self, now: float, job: Job) -> None:
        """Keep the request, and send it. Mutates."""
        self.jobs.append(job)
        super().arrive(now, job)


@dataclass(frozen=True)
class Outcome:
    """What came of a load: the share of prompt tokens that were cached, and the longest queue.

    ``mistaken``: for each request, how many of its tokens the router believed to be cached that were not, when its turn
    came.
    """

    hit_rate: float
    longest_queue: int
    mistaken: list[int]


def rule_of(name: str, share: float) -> Rule:
    """Return a rule by the name that figures show."""
    if name in (MATCH, SILENT):
        return Match(share, name == MATCH)
    return {"hashing": ConsistentHashing(OPENING), "two choices": TwoChoices(), "round robin": RoundRobin()}[name]


def simulate(sessions: Sequence[Session], name: str, size: int, pool: int, share: float = 0.5) -> Outcome:
    """Serve ``sessions`` with ``size`` workers by a rule of ``RULES`` or ``SILENT``. ``pool``: tokens of each cache."""
    rule = rule_of(name, share)
    fleet = Fleet(rule, size, COSTS, Limits(pool, RUNNING, STEP))
    outcome = fleet.run(sessions)
    believed = rule.believed if isinstance(rule, Match) else [0] * len(fleet.jobs)
    mistaken = [max(min(own, len(job.prompt) - 1) - job.hit, 0) for own, job in zip(believed, fleet.jobs, strict=True)]
    return Outcome(outcome.hit_rate, outcome.longest_queue, mistaken)


def endless(sessions: Sequence[Session]) -> float:
    """Return the share of prompt tokens that one cache without an end finds, if every answer is there at once."""
    return Simulation(RoundRobin(), 1, Costs(0.0, 0.0, 0.0), Limits(pool=2**30)).run(sessions).hit_rate
