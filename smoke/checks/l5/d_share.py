"""The checks of the scheduler's rows (L5.D), and the states in which single decisions are asked for.

Owns: schedulers that are put into a state by hand. Admission is in ``e_admission.py``, pages that run out are in
``f_preemption.py``, whole steps in ``g_step.py``. Waiting requests are ordered by a policy of these checks, so that
they need none of the candidate's.
"""

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from smoke.checks.l5.a_request import build_request
from smoke.checks.l5.spec_scheduling import Chunks, Naive, Person, Rules
from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise

REGISTRY = Registry()


class ByRule:
    """A policy of these checks: by arrival or by the longest answer."""

    def __init__(self, rule: str) -> None:
        """Follow "fcfs" or "lof"."""
        self.rule = rule

    def order(self, waiting: Sequence[Any], hits: Any) -> list[Any]:
        """Sort; every hit is looked at first, as a policy may."""
        assert all(hits[request.request_id] is not None for request in waiting)
        longest = self.rule == "lof"
        return sorted(waiting, key=lambda r: (-r.params.max_new_tokens if longest else 0, r.arrival))


def build_scheduler(rules: Rules, policy: Any = None, cache: Any = None) -> Any:
    """Build the candidate's scheduler."""
    from mini_engine.scheduler.scheduler import Scheduler, SchedulerLimits

    limits = SchedulerLimits(
        max_running_requests=rules.max_running,
        max_tokens_per_step=rules.budget,
        preemption=rules.preemption,
        max_steps_waited=rules.max_waited,
    )
    scheduler = Scheduler(rules.num_pages, rules.page_size, limits, policy or ByRule(rules.policy), cache)
    if rules.preemption:
        scheduler.growth.ratio = float(rules.ratio)
    return scheduler


def put(scheduler: Any, people: Sequence[Person]) -> dict[str, Any]:
    """Put requests where their state says, with pages of the allocator."""
    requests = {}
    for person in people:
        request = requests[person.name] = build_request(person)
        request.pages = scheduler.allocator.allocate(person.pages)
        (scheduler.running if person.state == "running" else scheduler.waiting).append(request)
    return requests


def state_of(scheduler: Any, requests: dict[str, Any]) -> Values:
    """Tell who is where and how far, and how many pages are free; the queue has no order of its own."""
    return {
        "running": [request.request_id for request in scheduler.running],
        "waiting": sorted(request.request_id for request in scheduler.waiting),
        "free pages": scheduler.allocator.num_free,
        "requests": {
            name: [str(r.state.value), r.num_computed_tokens, len(r.pages), r.num_preemptions]
            for name, r in requests.items()
        },
    }


def state_expected(naive: Naive, people: Sequence[Person]) -> Values:
    """Tell the same of the rules."""
    return {
        "running": [person.name for person in naive.running],
        "waiting": sorted(person.name for person in naive.waiting),
        "free pages": naive.free,
        "requests": {p.name: [p.state, p.computed, p.pages, p.preemptions] for p in people},
    }


def chunk_list(chunks: Sequence[Any]) -> list[list[Any]]:
    """Return chunks as name, start, length and whether they sample."""
    return [[c.request.request_id, int(c.start), int(c.num_tokens), bool(c.samples)] for c in chunks]


def tokens_for(chunks: Sequence[Any]) -> dict[str, list[int]]:
    """Make up the token of every request that samples: 500 and the number of tokens before it."""
    return {c.request.request_id: [500 + c.request.num_tokens] for c in chunks if c.samples}


def running(name: int, prompt: int, most: int = 8, **more: Any) -> Person:
    """Return a running request; ``name`` is the arrival too."""
    return Person(f"r{name}", prompt, most, name, state="running", **more)


def waiting(name: int, prompt: int, most: int = 8, **more: Any) -> Person:
    """Return a waiting request."""
    return Person(f"r{name}", prompt, most, name, **more)


@dataclass(frozen=True)
class Case:
    """A scheduler's state. ``rows`` are left of the step's budget."""

    rules: Rules
    people: tuple[Person, ...]
    rows: int | None = None

    def naive(self) -> tuple[Naive, list[Person]]:
        """Return a scheduler by the rules in this state, and its requests."""
        people = deepcopy(list(self.people))
        ready = [person for person in people if person.state == "running"]
        return Naive(self.rules, [person for person in people if person not in ready], ready), people

    def scheduler(self) -> tuple[Any, dict[str, Any]]:
        """Return the candidate's scheduler in this state, and its requests."""
        scheduler = build_scheduler(self.rules)
        return scheduler, put(scheduler, self.people)


Cases = Callable[[int], dict[str, Case]]


# L5.D ---------------------------------------------------------------------------------------------------------------

BUDGETS = (None, 0, 1, 4, 9, 10, 11, 30)
TAKERS = {
    "a prompt of 10": running(0, 10),
    "a prompt of 10, 6 of it computed": running(0, 10, computed=6),
    "decoding": running(0, 10, outputs=3, computed=12),
    "preempted and admitted again: 4 and 6 tokens": running(0, 4, outputs=6, preemptions=1),
}


# computed by the request itself, its outputs, and how many of the 10 prompt tokens it copies; L5.K finds that out
COPIES: dict[str, tuple[int, int, int]] = {
    "2 of 10 computed, 5 to copy": (2, 0, 5),
    "9 of 10 to copy": (0, 0, 9),
    "10 of 13 to copy": (0, 3, 10),
    "4 of 10 computed, nothing to copy": (4, 0, 0),
    "its own prompt is computed": (10, 1, 0),
}


def copied_probe() -> Values:
    """Give rows to a request that copies a part of its prompt from a sibling."""
    import mini_engine.scheduler.scheduler as module

    scheduler = build_scheduler(Rules(100, 4))
    values: Values = {}
    for name, (own, outputs, copied) in COPIES.items():
        for budget in BUDGETS:
            source = build_request(running(0, 10))
            request = build_request(running(1, 10, outputs=outputs, computed=own))
            source.siblings = request.siblings = [source, request]
            found = (source, copied) if copied else (None, 0)
            chunks = list[Any]()
            with patch.object(module, "prefix_to_copy", lambda request, found=found: found):
                rest = scheduler.schedule_chunk(request, budget, chunks)
            copies = [[c.num_copied, c.copied_from.request_id if c.copied_from else None] for c in chunks]
            values[f"{name}, budget {budget}"] = {"rest": rest, "chunks": chunk_list(chunks), "copies": copies}
    return values


def copied_spec() -> Values:
    """Start after the copied tokens."""
    values: Values = {}
    for name, (own, outputs, copied) in COPIES.items():
        for budget in BUDGETS:
            pending = 10 + outputs - own - copied
            count = pending if budget is None else min(pending, budget)
            values[f"{name}, budget {budget}"] = {
                "rest": None if budget is None else budget - count,
                "chunks": [["r1", own + copied, count, count == pending]] if count else [],
                "copies": [[copied, "r0" if copied else None]] if count else [],
            }
    return values


def shared_people(seed: int) -> list[Person]:
    """Return who shares one budget."""
    rng = random.Random(f"shared {seed}")
    people = [running(index, rng.randint(1, 12)) for index in range(6)]
    for person in people:
        person.computed = rng.randrange(person.prompt)
    return people


def take_probe(seed: int) -> Values:
    """Give rows to single requests, and to several out of one budget."""
    scheduler = build_scheduler(Rules(100, 4))
    values: Values = {}
    for name, person in TAKERS.items():
        for budget in BUDGETS:
            request = build_request(person)
            request.num_scheduled_tokens = 3  # of a step that failed
            chunks = list[Any]()
            rest = scheduler.schedule_chunk(request, budget, chunks)
            values[f"{name}, budget {budget}"] = {
                "rest": rest,
                "chunks": chunk_list(chunks),
                "scheduled": request.num_scheduled_tokens,
                "computed": request.num_computed_tokens,
            }
    for budget in (1, 12, 25):
        left = budget
        chunks = []
        for person in shared_people(seed):
            left = scheduler.schedule_chunk(build_request(person), left, chunks)
        values[f"six requests share {budget}"] = {"rest": left, "chunks": chunk_list(chunks)}
    return values | copied_probe()


def take_spec(seed: int) -> Values:
    """Give one row after the other."""
    naive = Naive(Rules(100, 4))
    values: Values = {}
    for name, person in TAKERS.items():
        for budget in BUDGETS:
            chunks: Chunks = []
            count = naive.give_rows(person, 10**9 if budget is None else budget, chunks)
            values[f"{name}, budget {budget}"] = {
                "rest": None if budget is None else budget - count,
                "chunks": chunks,
                "scheduled": count,
                "computed": person.computed,
            }
    for budget in (1, 12, 25):
        left = budget
        chunks = []
        for person in shared_people(seed):
            left -= naive.give_rows(person, left, chunks)
        values[f"six requests share {budget}"] = {"rest": left, "chunks": chunks}
    return values | copied_spec()


# person, start, num_tokens, samples, num_copied; state afterwards: computed, outputs
UPDATES: dict[str, tuple[Person, int, int, bool, int, int, int]] = {
    "ended meanwhile": (Person("r7", 5, arrival=7, outputs=1, computed=5, state="finished"), 5, 1, True, 0, 5, 1),
    "a chunk in the middle": (running(0, 20, computed=4), 4, 7, False, 0, 11, 0),
    "the last chunk": (running(1, 20, computed=11), 11, 9, True, 0, 20, 1),
    "a whole prompt": (running(2, 5), 0, 5, True, 0, 5, 1),
    "decoding for the first time": (running(8, 5, outputs=1, computed=5), 5, 1, True, 0, 6, 2),
    "decoding, with two tokens": (running(9, 5, outputs=2, computed=6), 6, 1, True, 0, 7, 4),
    "decoding": (running(3, 5, outputs=2, computed=6), 6, 1, True, 0, 7, 3),
    "preempted, all of it again": (running(4, 5, outputs=4), 0, 9, True, 0, 9, 5),
    "preempted, a part of it": (running(5, 5, outputs=4), 0, 7, False, 0, 7, 4),
    "after 6 tokens copied from a sibling": (running(6, 9, computed=2), 8, 1, True, 6, 9, 1),
}


def update_probe(seed: int) -> Values:
    """Note one step with all of them; only who samples has a token, and the one that ended has none."""
    from mini_engine.scheduler.scheduler import ScheduledBatch, ScheduledChunk

    scheduler = build_scheduler(Rules(100, 4))
    requests = {}
    chunks = []
    for name, (person, start, count, samples, copied, *_) in UPDATES.items():
        request = requests[name] = build_request(person)
        request.num_scheduled_tokens = count
        source = build_request(running(9, 9, computed=9)) if copied else None
        chunks.append(ScheduledChunk(request, start, count, samples, copied, source))
    tokens = tokens_for(chunks)
    del tokens["r7"]
    tokens["r9"] *= 2
    shared: list[str] = []
    scheduler.share = lambda request: shared.append(request.request_id)
    scheduler.update(ScheduledBatch(chunks, []), tokens)
    noted = {name: [r.num_computed_tokens, list(map(int, r.output_ids))] for name, r in requests.items()}
    return {**noted, "offered to the cache": sorted(shared)}


def update_spec(seed: int) -> Values:
    """Say how far everyone is; a new token is 500 and the number of those before it."""
    values: Values = {}
    for name, (person, *_, computed, outputs) in UPDATES.items():
        old = [10_000 + place for place in range(person.outputs)]
        values[name] = [computed, old + [500 + person.known] * (outputs - person.outputs)]
    offered = [person.name for person, start, *_ in UPDATES.values() if start < person.prompt]
    return {**values, "offered to the cache": sorted(offered)}


def budgets_of_rounds(seed: int) -> dict[str, list[int | None]]:
    """Return the budgets of step after step."""
    rng = random.Random(f"rounds {seed}")
    return {
        "4 rows a step": [4] * 12,
        "23 rows, as long as the prompt": [23] * 4,
        "no limit": [None] * 4,
        "drawn": [rng.randint(0, 6) for _ in range(30)],
    }


def rounds_probe(seed: int) -> Values:
    """Take and update in turn, for a prompt of 23 tokens."""
    from mini_engine.scheduler.scheduler import ScheduledBatch

    values: Values = {}
    for name, budgets in budgets_of_rounds(seed).items():
        scheduler = build_scheduler(Rules(100, 4))
        log = []
        request = build_request(running(0, 23, 100))
        for budget in budgets:
            chunks: list[Any] = []
            scheduler.schedule_chunk(request, budget, chunks)
            log += chunk_list(chunks)
            scheduler.update(ScheduledBatch(chunks, []), tokens_for(chunks))
            log.append([request.num_computed_tokens, request.num_scheduled_tokens, list(request.output_ids)])
        values[name] = log
    return values


def rounds_spec(seed: int) -> Values:
    """Compute one token after the other; the newest known one gives the next."""
    values: Values = {}
    for name, budgets in budgets_of_rounds(seed).items():
        computed = 0
        output = list[int]()
        log = list[list[Any]]()
        for budget in budgets:
            start = computed
            known = 23 + len(output)
            while computed < known and (budget is None or computed - start < budget):
                computed += 1
            if computed > start:
                log.append(["r0", start, computed - start, computed == known])
            if computed == known:
                output.append(500 + known)
            log.append([computed, 0, list(output)])
        values[name] = log
    return values


REGISTRY.add(
    "L5.D.take",
    "A request gets the rows that it wants and the budget has, after what it can copy; the chunk samples if it ends at "
    "the newest token.",
    take_probe,
    bitwise(take_spec),
)
REGISTRY.add(
    "L5.D.update",
    "After a step the tokens up to a chunk's end are computed; who sampled has one more; who ended stays as it is.",
    update_probe,
    bitwise(update_spec),
)
REGISTRY.add(
    "L5.D.rounds",
    "A prompt goes through step after step in chunks without a gap, and its first token comes after the last of them.",
    rounds_probe,
    bitwise(rounds_spec),
)
