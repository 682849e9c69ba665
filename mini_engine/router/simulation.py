"""A load on simulated workers behind a real policy: what is found in caches, and how long requests wait.

A worker is an engine in numbers: a step takes as long as ``Costs`` say, prompts are computed in chunks beside the
decoding rows, and what was computed stays in a cache until others need the room. A request finds what was in the cache
when it was admitted. Time is simulated, so that equal loads give equal outcomes on every machine.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from mini_engine.router.rules import Rule
from mini_engine.router.tree import Edge, TokenTree


@dataclass(frozen=True)
class Costs:
    """Seconds of a step: ``step``, ``token`` for each token of a prompt that it computes, and ``row`` for each row."""

    step: float
    token: float
    row: float


@dataclass(frozen=True)
class Limits:
    """Of a worker: tokens of its pool, requests that share a step, and tokens of a step."""

    pool: int = 16_384
    running: int = 32
    step: int = 512


@dataclass(frozen=True)
class Turn:
    """One request: its ``own`` tokens come ``pause_s`` seconds after the answer before, and get ``answer``."""

    own: list[int]
    answer: list[int]
    pause_s: float = 0.0


@dataclass(frozen=True)
class Session:
    """Requests that continue each other; the first comes at ``arrival_s``, without its pause."""

    arrival_s: float
    turns: list[Turn]


@dataclass(eq=False)
class Job:
    """One request at a worker: ``hit`` tokens of its prompt were found, ``left`` are to compute; ``done`` generated."""

    session: Session
    turn: int
    prompt: list[int]
    arrival_s: float
    left: int = 0
    hit: int = 0
    done: int = 0

    @property
    def answer(self) -> list[int]:
        """The tokens it generates."""
        return self.session.turns[self.turn].answer


class Cache(TokenTree):
    """The tokens that a worker holds. ``lost``: what it dropped, as ``PrefixPolicy.dropped`` wants it."""

    def __init__(self, most_tokens: int) -> None:
        """Start empty."""
        super().__init__(most_tokens)
        self.lost: list[tuple[list[int], int]] = []

    def shorten(self, edge: Edge, count: int) -> Edge:
        """Note what goes. Mutates."""
        way: list[Edge] = [edge]
        while way[-1].parent is not None:
            way.append(way[-1].parent)
        tokens = [token for one in reversed(way) for token in one.tokens]
        self.lost.append((tokens, len(tokens) - count))
        return super().shorten(edge, count)


class Worker:
    """A simulated engine."""

    def __init__(self, costs: Costs, limits: Limits) -> None:
        """Start idle, with an empty cache."""
        self.costs = costs
        self.limits = limits
        self.cache = Cache(limits.pool)
        self.waiting = deque[Job]()
        self.running: list[Job] = []
        self.chunks: dict[Job, int] = {}  # of the step that runs: tokens of a prompt, 0 for a row that decodes
        self.busy_s = 0.0

    @property
    def queue(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.running)

    def admit(self) -> None:
        """Let waiting requests run as far as there is room, in order. Mutates."""
        needed = sum(len(job.prompt) + len(job.answer) for job in self.running)
        while self.waiting and len(self.running) < self.limits.running:
            job = self.waiting[0]
            needed += len(job.prompt) + len(job.answer)
            if self.running and needed > self.limits.pool:
                break
            self.running.append(self.waiting.popleft())
            job.hit = min(self.cache.match(job.prompt), len(job.prompt) - 1)  # a row to sample from
            job.left = len(job.prompt) - job.hit

    def start(self) -> float:
        """Begin a step and return its seconds. Mutates."""
        self.admit()
        self.chunks = {job: 0 for job in self.running if not job.left}
        room = self.limits.step - len(self.chunks)
        for job in self.running:
            size = min(job.left, room)
            if size:
                self.chunks[job] = size
                room -= size
        rows = len(self.chunks)
        seconds = self.costs.step + self.costs.token * sum(self.chunks.values()) + self.costs.row * rows
        self.busy_s += seconds
        return seconds

    def finish(self) -> tuple[list[Job], list[Job]]:
        """End the step; return the requests that got their first token, and those that ended. Mutates."""
        begun = list[Job]()
        for job, size in self.chunks.items():
            job.left -= size
            if job.left:
                continue
            job.done += 1
            if size:
                begun.append(job)
                self.cache.insert(job.prompt)
        ended = [job for job in self.chunks if job.done == len(job.answer)]
        for job in ended:
            self.cache.insert(job.prompt + job.answer)
            self.running.remove(job)
        return begun, ended


@dataclass
class Outcome:
    """What became of a load. ``longest_queue``: the most requests that a worker had, waiting or running.

    ``ttft``: seconds from arrival to first token. ``busy``: share of the time in which workers compute.
    """

    num_tokens: int = 0
    num_hit: int = 0
    longest_queue: int = 0
    busy: float = 0.0
    ttft: list[float] = field(default_factory=list, repr=False)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that did not have to be computed."""
        return self.num_hit / self.num_tokens if self.num_tokens else 0.0


class Simulation:
    """Workers, a rule, and what happens next."""

    def __init__(self, rule: Rule, workers: int, costs: Costs, limits: Limits) -> None:
        """Start at time 0 with ``workers`` idle workers, which ``rule`` gets to know."""
        self.rule = rule
        self.workers = {f"w{number:03}": Worker(costs, limits) for number in range(workers)}
        for name in self.workers:
            rule.add(name)
        self.events: list[
            tuple[float, int, Job | str]
        ] = []  # a job that arrives, or the name of a worker whose step ends
        self.numbers = count()
        self.outcome = Outcome()

    def run(self, sessions: Sequence[Session]) -> Outcome:
        """Serve ``sessions`` to the end. Mutates."""
        for session in sessions:
            self.plan(session.arrival_s, Job(session, 0, session.turns[0].own, session.arrival_s))
        now = 0.0
        while self.events:
            now, _, what = heapq.heappop(self.events)
            if isinstance(what, Job):
                self.arrive(now, what)
            else:
                self.step_ends(now, what)
        self.outcome.busy = sum(worker.busy_s for worker in self.workers.values()) / (now * len(self.workers))
        return self.outcome

    def plan(self, when: float, what: Job | str) -> None:
        """Let something happen later. Mutates."""
        heapq.heappush(self.events, (when, next(self.numbers), what))

    def arrive(self, now: float, job: Job) -> None:
        """Send a request where the rule says. Mutates."""
        name = self.rule.choose(job.prompt)
        self.rule.begin(name, job.prompt)
        worker = self.workers[name]
        worker.waiting.append(job)
        self.outcome.longest_queue = max(self.outcome.longest_queue, worker.queue)
        if worker.queue == 1:
            self.plan(now + worker.start(), name)

    def step_ends(self, now: float, name: str) -> None:
        """Take in what a step gave, tell the rule, and begin the next step. Mutates."""
        worker = self.workers[name]
        begun, ended = worker.finish()
        for job in begun:
            self.outcome.ttft.append(now - job.arrival_s)
            self.outcome.num_tokens += len(job.prompt)
            self.outcome.num_hit += job.hit
        for job in ended:
            self.rule.end(name, job.prompt + job.answer)
            if job.turn + 1 < len(job.session.turns):
                turn = job.session.turns[job.turn + 1]
                prompt = job.prompt + job.answer + turn.own
                self.plan(now + turn.pause_s, Job(job.session, job.turn + 1, prompt, now + turn.pause_s))
        if worker.queue:
            self.plan(now + worker.start(), name)
        for tokens, length in worker.cache.lost:
            self.rule.dropped(name, tokens, length)
        worker.cache.lost.clear()
