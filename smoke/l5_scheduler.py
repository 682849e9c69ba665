"""The checks of the scheduler's rows (L5.D) and of pages that run out (L5.F).

Owns: schedulers that are put into a state by hand and asked for one thing. Admission is in ``l5_admission.py``, whole
steps in ``l5_step.py``. The order of waiting requests is a policy of these checks: they need none of the candidate's.
"""

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from smoke.check import Registry, Values
from smoke.compare import bitwise, close
from smoke.l5 import build_request, output_of
from smoke.specs.scheduling import Chunks, Naive, Person, Rules, touched
from smoke.specs.shelf import build_shelf

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

    limits = SchedulerLimits(rules.max_running, rules.budget, rules.preemption, rules.max_waited)
    return Scheduler(rules.num_pages, rules.page_size, limits, policy or ByRule(rules.policy), cache)


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


def tokens_for(chunks: Sequence[Any]) -> dict[str, int]:
    """Make up the token of every request that samples: 500 and the number of tokens before it."""
    return {c.request.request_id: 500 + c.request.num_tokens for c in chunks if c.samples}


def running(name: int, prompt: int, most: int = 8, **more: Any) -> Person:
    """Return somebody who runs; ``name`` is the arrival too."""
    return Person(f"r{name}", prompt, most, name, state="running", **more)


def waiting(name: int, prompt: int, most: int = 8, **more: Any) -> Person:
    """Return somebody who waits."""
    return Person(f"r{name}", prompt, most, name, **more)


@dataclass(frozen=True)
class Case:
    """A scheduler's state. ``ratio`` counts with preemption alone; ``rows`` are left of the step's budget."""

    rules: Rules
    people: tuple[Person, ...]
    rows: int | None = None
    ratio: Fraction = Fraction(1)

    def naive(self) -> tuple[Naive, list[Person]]:
        """Return a scheduler by the rules in this state, and its requests."""
        people = deepcopy(list(self.people))
        naive = Naive(
            self.rules, [p for p in people if p.state != "running"], [p for p in people if p.state == "running"]
        )
        naive.ratio = self.ratio if self.rules.preemption else naive.ratio
        return naive, people

    def scheduler(self) -> tuple[Any, dict[str, Any]]:
        """Return the candidate's scheduler in this state, and its requests."""
        scheduler = build_scheduler(self.rules)
        if self.rules.preemption:
            scheduler.growth.ratio = float(self.ratio)
        return scheduler, put(scheduler, self.people)


Cases = Callable[[int], dict[str, Case]]


# L5.D ---------------------------------------------------------------------------------------------------------------

BUDGETS = (None, 0, 1, 4, 9, 10, 11, 30)
TAKERS = {
    "a prompt of 10": running(0, 10),
    "a prompt of 10, 6 of it computed": running(0, 10, computed=6),
    "decoding": running(0, 10, outputs=3, computed=12),
    "sent back and let in again: 4 and 6 tokens": running(0, 4, outputs=6, preemptions=1),
}


def shared_people(seed: int) -> list[Person]:
    """Return who shares one budget."""
    dice = random.Random(f"shared {seed}")
    people = [running(index, dice.randint(1, 12)) for index in range(6)]
    for person in people:
        person.computed = dice.randrange(person.prompt)
    return people


def take_probe(seed: int) -> Values:
    """Give rows to single requests, and to several out of one budget."""
    scheduler = build_scheduler(Rules(100, 4))
    values: Values = {}
    for name, person in TAKERS.items():
        for budget in BUDGETS:
            request, chunks = build_request(person), list[Any]()
            rest = scheduler.take(request, budget, chunks)
            values[f"{name}, budget {budget}"] = {
                "rest": rest, "chunks": chunk_list(chunks), "scheduled": request.num_scheduled_tokens,
                "computed": request.num_computed_tokens,
            }  # fmt: skip
    for budget in (1, 12, 25):
        left, chunks = budget, []
        for person in shared_people(seed):
            left = scheduler.take(build_request(person), left, chunks)
        values[f"six requests share {budget}"] = {"rest": left, "chunks": chunk_list(chunks)}
    return values


def take_spec(seed: int) -> Values:
    """Give one row after the other."""
    naive = Naive(Rules(100, 4))
    values: Values = {}
    for name, person in TAKERS.items():
        for budget in BUDGETS:
            chunks: Chunks = []
            count = naive.give_rows(person, 10**9 if budget is None else budget, chunks)
            values[f"{name}, budget {budget}"] = {
                "rest": None if budget is None else budget - count, "chunks": chunks, "scheduled": count,
                "computed": person.computed,
            }  # fmt: skip
    for budget in (1, 12, 25):
        left, chunks = budget, []
        for person in shared_people(seed):
            left -= naive.give_rows(person, left, chunks)
        values[f"six requests share {budget}"] = {"rest": left, "chunks": chunks}
    return values


# person, start, num_tokens, samples, num_copied; state afterwards: computed, outputs
UPDATES: dict[str, tuple[Person, int, int, bool, int, int, int]] = {
    "a chunk in the middle": (running(0, 20, computed=4), 4, 7, False, 0, 11, 0),
    "the last chunk": (running(1, 20, computed=11), 11, 9, True, 0, 20, 1),
    "a whole prompt": (running(2, 5), 0, 5, True, 0, 5, 1),
    "decoding": (running(3, 5, outputs=2, computed=6), 6, 1, True, 0, 7, 3),
    "sent back, all of it again": (running(4, 5, outputs=4), 0, 9, True, 0, 9, 5),
    "sent back, a part of it": (running(5, 5, outputs=4), 0, 7, False, 0, 7, 4),
    "behind 6 tokens copied from a sibling": (running(6, 9, computed=2), 8, 1, True, 6, 9, 1),
    "ended meanwhile": (Person("r7", 5, arrival=7, outputs=1, computed=5, state="finished"), 5, 1, True, 0, 5, 1),
}


def update_probe(seed: int) -> Values:
    """Note one step with all of them; only who samples has a token, and the one that ended has none."""
    from mini_engine.scheduler.scheduler import ScheduledBatch, ScheduledChunk

    scheduler = build_scheduler(Rules(100, 4))
    requests, chunks = {}, []
    for name, (person, start, count, samples, copied, *_) in UPDATES.items():
        request = requests[name] = build_request(person)
        request.num_scheduled_tokens = count
        source = build_request(running(9, 9, computed=9)) if copied else None
        chunks.append(ScheduledChunk(request, start, count, samples, copied, source))
    tokens = tokens_for(chunks)
    del tokens["r7"]
    scheduler.update(ScheduledBatch(chunks, []), tokens)
    return {name: [r.num_computed_tokens, list(map(int, r.output_ids))] for name, r in requests.items()}


def update_spec(seed: int) -> Values:
    """Say how far everyone is; a new token is 500 and the number of those before it."""
    values: Values = {}
    for name, (person, *_, computed, outputs) in UPDATES.items():
        old = [10_000 + place for place in range(person.outputs)]
        values[name] = [computed, old + [500 + person.known] * (outputs - person.outputs)]
    return values


def budgets_of_rounds(seed: int) -> dict[str, list[int | None]]:
    """Return the budgets of step after step."""
    dice = random.Random(f"rounds {seed}")
    return {
        "4 rows a step": [4] * 12,
        "23 rows, as long as the prompt": [23] * 4,
        "no limit": [None] * 4,
        "drawn": [dice.randint(0, 6) for _ in range(30)],
    }


def rounds_probe(seed: int) -> Values:
    """Take and update in turn, for a prompt of 23 tokens."""
    from mini_engine.scheduler.scheduler import ScheduledBatch

    values: Values = {}
    for name, budgets in budgets_of_rounds(seed).items():
        scheduler, log = build_scheduler(Rules(100, 4)), []
        request = build_request(running(0, 23, 100))
        for budget in budgets:
            chunks: list[Any] = []
            scheduler.take(request, budget, chunks)
            log += chunk_list(chunks)
            scheduler.update(ScheduledBatch(chunks, []), tokens_for(chunks))
            log.append([request.num_computed_tokens, request.num_scheduled_tokens, list(request.output_ids)])
        values[name] = log
    return values


def rounds_spec(seed: int) -> Values:
    """Compute one token after the other; the newest known one gives the next."""
    values: Values = {}
    for name, budgets in budgets_of_rounds(seed).items():
        computed, output, log = 0, list[int](), list[list[Any]]()
        for budget in budgets:
            start, known = computed, 23 + len(output)
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
    "A request gets the rows that it wants and the budget has; the chunk samples if it ends at the newest token.",
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

# L5.F ---------------------------------------------------------------------------------------------------------------


def room_cases(seed: int) -> dict[str, Case]:
    """Return states before a step: newest tokens on page boundaries, and pools with nothing, just enough, more."""
    found = {}
    for number in range(40):
        dice = random.Random(f"room {seed} {number}")
        size = dice.choice([1, 1, 2, 4])
        people = []
        for index in range(dice.randint(2, 8)):
            person = running(index, dice.choice([1, 4, 4, 5, 9]), 20, outputs=dice.choice([0, 1, 1, 2, 6]))
            decoding = person.outputs and dice.random() < 0.8
            person.computed = person.known - 1 if decoding else dice.randrange(person.known)
            person.pages = touched(person.computed if decoding else person.known, size)
            people.append(person)
        dice.shuffle(people)
        arrivals = list(range(len(people)))  # the last that came is not the last that was let in
        dice.shuffle(arrivals)
        for person, arrival in zip(people, arrivals, strict=True):
            person.arrival = arrival
        held = sum(person.pages for person in people)
        lacking = sum(touched(person.known, size) - person.pages for person in people)
        free = dice.choice([0, 0, 1, lacking // 2, max(lacking - 1, 0), lacking, lacking + 3])
        people.append(waiting(20, 3, 4))
        rules = Rules(held + free, size, preemption=True)
        found[f"{lacking} pages are lacking, {free} free, state {number}"] = Case(rules, tuple(people))
    return found


def room_probe(seed: int) -> Values:
    """Make room, and look whether pages that were there stay and whether an output or an arrival changed."""
    values: Values = {}
    for name, case in room_cases(seed).items():
        scheduler, requests = case.scheduler()
        before = {who: list(request.pages) for who, request in requests.items()}
        gone = scheduler.make_room()
        pages = [page for request in requests.values() for page in request.pages]
        free = [page for page, is_free in enumerate(scheduler.allocator.is_free) if is_free]
        values[name] = {
            **state_of(scheduler, requests),
            "sent back": sorted(request.request_id for request in gone),
            "ratio": float(scheduler.growth.ratio),
            "every page in one place": sorted([*pages, *free]) == list(range(case.rules.num_pages)),
            "pages stay": all(r.pages[: len(before[who])] == before[who] for who, r in requests.items() if r.pages),
            "kept": {who: [r.num_output_tokens, r.arrival, r.num_scheduled_tokens] for who, r in requests.items()},
            "missing afterwards": [scheduler.missing_pages(request) for request in scheduler.running],
        }
    return values


def room_spec(seed: int) -> Values:
    """Send back by the rules."""
    values: Values = {}
    for name, case in room_cases(seed).items():
        naive, people = case.naive()
        gone = naive.make_room()
        values[name] = {
            **state_expected(naive, people),
            "sent back": sorted(gone),
            "ratio": float(naive.ratio),
            "every page in one place": True,
            "pages stay": True,
            "kept": {p.name: [p.outputs, p.arrival, 0] for p in people},
            "missing afterwards": [0 for _ in naive.running],
        }
    return values


def missing_people() -> dict[str, tuple[Person, int]]:
    """Return requests around page boundaries, with page sizes."""
    return {
        f"{tokens} tokens, {pages} pages of {size}": (running(0, tokens - outputs, outputs=outputs, pages=pages), size)
        for size in (1, 4, 16)
        for tokens in (2, 4, 5, 8, 9, 16, 17, 33)
        for outputs in (0, 1)
        for pages in {touched(tokens - 1, size), touched(tokens, size)}
    }


def missing_probe(seed: int) -> Values:
    """Ask what is missing."""
    return {
        name: build_scheduler(Rules(100, size)).missing_pages(build_request(person))
        for name, (person, size) in missing_people().items()
    }


def missing_spec(seed: int) -> Values:
    """Look up the page of every token."""
    return {
        name: len({place // size for place in range(person.known)} - set(range(person.pages)))
        for name, (person, size) in missing_people().items()
    }


# The victims one by one: (prompt, outputs) by arrival, pages of one token, none free, everybody needs one.
VICTIMS: dict[str, tuple[list[tuple[int, int]], str]] = {
    "the fewest outputs, whatever the prompt": ([(9, 2), (3, 1), (9, 3)], "r1"),
    "not the most outputs": ([(3, 9), (4, 5), (4, 8)], "r1"),
    "a tie: the longest prompt": ([(3, 2), (9, 2), (4, 3)], "r1"),
    "another tie: the latest arrival": ([(5, 2), (5, 2), (6, 4)], "r1"),
    "the first that came, if it has the fewest": ([(5, 1), (8, 4), (2, 2)], "r0"),
}


def victims_probe(seed: int) -> Values:
    """Run out of pages in each case, with the running requests in both orders."""
    values: Values = {}
    for name, (shapes, _) in VICTIMS.items():
        people = [
            running(index, prompt, 20, outputs=outputs, computed=prompt + outputs - 1, pages=prompt + outputs - 1)
            for index, (prompt, outputs) in enumerate(shapes)
        ]
        rules = Rules(sum(person.pages for person in people), preemption=True)
        for order, group in (("", people), (", let in the other way round", people[::-1])):
            scheduler, _ = Case(rules, tuple(group)).scheduler()
            values[name + order] = [request.request_id for request in scheduler.make_room()]
    return values


def victims_spec(seed: int) -> Values:
    """Worked out by hand."""
    orders = ("", ", let in the other way round")
    return {name + order: [victim] for name, (_, victim) in VICTIMS.items() for order in orders}


LEAVERS = {
    "runs": running(1, 5, outputs=2, computed=6, pages=7),
    "waits": waiting(2, 5),
    "was sent back": Person("r3", 4, arrival=3, outputs=3, state="preempted", preemptions=1),
    "is in the middle of its prompt": running(4, 9, computed=3, pages=9),
}
REASONS = ("stop", "length", "abort", "error")


def others_than(person: Person) -> list[Person]:
    """Return who else is there when somebody leaves."""
    return [running(0, 3, computed=2, pages=3), *(p for p in LEAVERS.values() if p is not person), waiting(9, 2)]


def finish_probe(seed: int) -> Values:
    """End each of them, then again for another reason, and see who is left."""
    values: Values = {}
    for name, person in LEAVERS.items():
        for reason in REASONS:
            scheduler = build_scheduler(Rules(40))
            others = others_than(person)
            requests = put(scheduler, [*others, person])
            request = requests[person.name]
            scheduler.finish(request, reason)
            scheduler.finish(request, "abort" if reason == "stop" else "stop")
            values[f"{name}, {reason}"] = {
                **state_of(scheduler, {}),
                "state": [str(request.state.value), len(request.pages), request.num_preemptions],
                "reason": str(request.finish_reason),
                "output": list(request.output_ids),
                "pages of others": sum(len(r.pages) for r in requests.values() if r is not request),
            }
    return values


def finish_spec(seed: int) -> Values:
    """Take it out of where it is; the first reason counts."""
    values: Values = {}
    for name, person in LEAVERS.items():
        others = others_than(person)
        for reason in REASONS:
            held = sum(p.pages for p in others)
            values[f"{name}, {reason}"] = {
                "running": [p.name for p in others if p.state == "running"],
                "waiting": sorted(p.name for p in others if p.state != "running"),
                "free pages": 40 - held,
                "requests": {},
                "state": ["finished", 0, person.preemptions],
                "reason": reason,
                "output": output_of(person),
                "pages of others": held,
            }
    return values


def shared_probe(seed: int) -> Values:
    """Let two requests run on the same three cached pages, send one back and end the other."""
    shelf = build_shelf(1)
    scheduler = build_scheduler(Rules(20, preemption=True), cache=shelf)
    tokens = [100, 101, 102]
    shelf.insert(tokens, scheduler.allocator.allocate(3))
    hit = shelf.match(tokens)
    requests = put(scheduler, [running(0, 5, computed=4), running(1, 6, computed=5)])
    for request in requests.values():
        shelf.lock(hit)
        request.hit = hit
        request.pages = [*hit.pages, *scheduler.allocator.allocate(request.num_tokens - 3)]
    values: Values = {}
    steps = {
        "before": lambda: None,
        "one is sent back": lambda: scheduler.preempt(requests["r1"]),
        "the other fails": lambda: scheduler.finish(requests["r0"], "error"),
        "the one that was sent back is ended": lambda: scheduler.finish(requests["r1"], "abort"),
    }
    for name, step in steps.items():
        step()
        own = [page for r in requests.values() for page in r.pages[len(r.hit.pages) :]]
        values[name] = {
            "own pages": len(own),
            "free pages": scheduler.allocator.num_free,
            "pages of the cache": shelf.num_pages,
            "held by": [shelf.holders[page] for page in hit.pages],
            "hits": [len(request.hit.pages) for request in requests.values()],
        }
    return values


def shared_spec(seed: int) -> Values:
    """Worked out by hand: 20 pages, 3 in the cache, 2 and 3 of their own."""

    def state(own: int, holders: int, hits: list[int]) -> Values:
        return {
            "own pages": own,
            "free pages": 17 - own,
            "pages of the cache": 3,
            "held by": [holders] * 3,
            "hits": hits,
        }

    return {
        "before": state(5, 2, [3, 3]),
        "one is sent back": state(2, 1, [3, 0]),
        "the other fails": state(0, 0, [0, 0]),
        "the one that was sent back is ended": state(0, 0, [0, 0]),
    }


def again_probe(seed: int) -> Values:
    """Send a request back and let it in again, in chunks of 4, until it has two tokens more."""
    from mini_engine.scheduler.scheduler import ScheduledBatch

    person = running(1, 5, 20, outputs=4, computed=8, pages=9)
    scheduler, requests = Case(Rules(30, preemption=True), (person, waiting(2, 2))).scheduler()
    request, log = requests["r1"], list[Any]()
    scheduler.preempt(request)
    for step in range(5):
        chunks: list[Any] = []
        if step:
            scheduler.make_room()
            scheduler.take(request, 4, chunks)
        else:
            scheduler.admit(4, chunks)
        log.append(chunk_list(chunks))
        scheduler.update(ScheduledBatch(chunks, []), tokens_for(chunks))
    return {
        "chunks": log, "output": list(map(int, request.output_ids)), "arrival": request.arrival,
        "pages": len(request.pages), "preemptions": request.num_preemptions,
    }  # fmt: skip


def again_spec(seed: int) -> Values:
    """Worked out by hand: 9 tokens again, then one at a time."""
    return {
        "chunks": [
            [["r1", 0, 4, False]], [["r1", 4, 4, False]], [["r1", 8, 1, True]], [["r1", 9, 1, True]],
            [["r1", 10, 1, True]],
        ],
        "output": [10_000, 10_001, 10_002, 10_003, 509, 510, 511],
        "arrival": 1, "pages": 11, "preemptions": 1,
    }  # fmt: skip


REGISTRY.add(
    "L5.F.missing",
    "A request lacks the pages of all tokens that are known, the newest one included, and none before a boundary.",
    missing_probe,
    bitwise(missing_spec),
)
REGISTRY.add(
    "L5.F.room",
    "In 40 drawn states everybody who stays gets the pages of the known tokens, as few as needed are sent back, the "
    "ratio jumps, and every page is in one place.",
    room_probe,
    close(room_spec, 1e-9),
)
REGISTRY.add(
    "L5.F.victims",
    "Sent back is who has the fewest outputs, then the longest prompt, then came last, in any order of admission.",
    victims_probe,
    bitwise(victims_spec),
)
REGISTRY.add(
    "L5.F.finish",
    "A request ends wherever it is, once, with the first reason; its own pages are free and nobody else is touched.",
    finish_probe,
    bitwise(finish_spec),
)
REGISTRY.add(
    "L5.F.shared",
    "Pages of a hit stay the cache's: they are unlocked once for each who leaves, and never freed.",
    shared_probe,
    bitwise(shared_spec),
)
REGISTRY.add(
    "L5.F.again",
    "A request that was sent back keeps its output and its arrival and computes all of its tokens again.",
    again_probe,
    bitwise(again_spec),
)
