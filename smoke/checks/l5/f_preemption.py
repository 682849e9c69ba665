"""The checks of L5.F: pages that run out, and what becomes of the pages of who leaves.

Owns: states in which pages are short, and who must go by the rules.
"""

import random
from collections.abc import Sequence
from typing import Any

from smoke.checks.l5.a_request import build_request, output_of, prompt_of
from smoke.checks.l5.d_share import (
    Case,
    build_scheduler,
    chunk_list,
    put,
    running,
    state_expected,
    state_of,
    tokens_for,
    waiting,
)
from smoke.checks.l5.spec_scheduling import Person, Rules, touched
from smoke.checks.l5.spec_shelf import build_shelf
from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise, close
from smoke.framework.prepared import prepared

REGISTRY = Registry()


@prepared
def room_cases(seed: int) -> dict[str, Case]:
    """Return states before a step: newest tokens on page boundaries, and pools with nothing, just enough, more."""
    found = {}
    for number in range(40):
        rng = random.Random(f"room {seed} {number}")
        size = rng.choice([1, 1, 2, 4])
        people = []
        for index in range(rng.randint(2, 8)):
            person = running(
                index, rng.choice([1, 4, 4, 5, 9]), rng.choice([20, 90, 200]), outputs=rng.choice([0, 1, 1, 2, 6])
            )
            person.waited = rng.choice([0, 3, 70])
            person.preemptions = rng.choice([0, 2])
            decoding = person.outputs and rng.random() < 0.8
            person.computed = person.known - 1 if decoding else rng.randrange(person.known)
            person.pages = touched(person.computed if decoding else person.known, size)
            people.append(person)
        rng.shuffle(people)
        arrivals = list(range(len(people)))  # the last that came is not the last that was admitted
        rng.shuffle(arrivals)
        for person, arrival in zip(people, arrivals, strict=True):
            person.arrival = arrival
        held = sum(person.pages for person in people)
        lacking = sum(touched(person.known, size) - person.pages for person in people)
        free = rng.choice([0, 0, 1, lacking // 2, max(lacking - 1, 0), lacking, lacking + 3])
        people.append(waiting(20, 3, 4))
        rules = Rules(held + free, size, preemption=True)
        found[f"{lacking} pages are lacking, {free} free, state {number}"] = Case(rules, tuple(people))
    return found


def note_places(scheduler: Any) -> list[int | None]:
    """Return a list that fills with the page behind which each request of pages is to lie."""
    asked: list[int | None] = []
    allocate = scheduler.allocator.allocate

    def noting(count: int, after: int | None = None) -> Any:
        asked.extend([after] * (count > 0))
        return allocate(count, after)

    scheduler.allocator.allocate = noting
    return asked


def room_probe(seed: int) -> Values:
    """Make room, and look whether pages that were there stay and whether an output or an arrival changed."""
    values: Values = {}
    for name, case in room_cases(seed).items():
        scheduler, requests = case.scheduler()
        before = {who: list(request.pages) for who, request in requests.items()}
        behind = note_places(scheduler)
        gone = scheduler.make_room()
        pages = [page for request in requests.values() for page in request.pages]
        free = [page for page in range(scheduler.allocator.num_pages) if scheduler.allocator.is_free(page)]
        ends = {before[who][-1] for who, request in requests.items() if len(request.pages) > len(before[who]) > 0}
        values[name] = {
            **state_of(scheduler, requests),
            "preempted": [request.request_id for request in gone],
            "ratio": float(scheduler.growth.ratio),
            "every page in one place": sorted([*pages, *free]) == list(range(case.rules.num_pages)),
            "pages stay": all(r.pages[: len(before[who])] == before[who] for who, r in requests.items() if r.pages),
            "kept": {who: [r.num_output_tokens, r.arrival, r.steps_waited] for who, r in requests.items()},
            "each grows behind its last page": None not in behind and ends <= set(behind),
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
            "preempted": gone,
            "ratio": float(naive.ratio),
            "every page in one place": True,
            "pages stay": True,
            "each grows behind its last page": True,
            "kept": {p.name: [p.outputs, p.arrival, p.waited] for p in people},
            "missing afterwards": [0 for _ in naive.running],
        }
    return values


@prepared
def missing_people() -> dict[str, tuple[Person, int]]:
    """Return requests around page boundaries, some with pages for tokens to come, with page sizes."""
    return {
        f"{tokens} tokens, {pages} pages of {size}": (running(0, tokens - outputs, outputs=outputs, pages=pages), size)
        for size in (1, 4, 16, 130)
        for tokens in (2, 4, 5, 8, 9, 16, 17, 33, 131)
        for outputs in (0, 1)
        for pages in {touched(tokens - 1, size), touched(tokens, size), touched(tokens, size) + 2}
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


# The victims one by one: (prompt, outputs) by arrival, pages of one token, none free, each request needs one.
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
        for order, group in (("", people), (", admitted in the other order", people[::-1])):
            scheduler, _ = Case(rules, tuple(group)).scheduler()
            values[name + order] = [request.request_id for request in scheduler.make_room()]
    return values


def victims_spec(seed: int) -> Values:
    """Worked out by hand."""
    orders = ("", ", admitted in the other order")
    return {name + order: [victim] for name, (_, victim) in VICTIMS.items() for order in orders}


LEAVERS = {
    "runs": running(1, 5, outputs=2, computed=6, pages=7),
    "waits": waiting(2, 5),
    "was preempted": Person("r3", 4, arrival=3, outputs=3, state="preempted", preemptions=1),
    "is in the middle of its prompt": running(4, 9, computed=3, pages=9),
}
REASONS = ("stop", "length", "abort", "error")


def others_than(person: Person) -> list[Person]:
    """Return the other requests that are there when one leaves."""
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
            request.num_scheduled_tokens = 3 if person.state == "running" else 0
            pages = request.pages  # the engine still looks at them
            scheduler.finish(request, reason)
            scheduler.finish(request, "abort" if reason == "stop" else "stop")
            values[f"{name}, {reason}"] = {
                **state_of(scheduler, {}),
                "state": [str(request.state.value), len(request.pages), request.num_preemptions],
                "reason": str(request.finish_reason),
                "scheduled": request.num_scheduled_tokens,
                "output": list(request.output_ids),
                "pages it had": len(pages),
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
                "scheduled": 0,
                "output": output_of(person),
                "pages it had": person.pages,
                "pages of others": held,
            }
    return values


def shared_probe(seed: int) -> Values:
    """Let two requests run on three cached pages, send one back and end the other; then let the cache shrink."""
    return {**shared_by("error"), **shared_by("abort"), "pages of the cache make room": shrunk()}


def shared_by(reason: str) -> Values:
    """End the one that goes on with ``reason``."""
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
        "one is preempted": lambda: scheduler.preempt(requests["r1"]),
        f"the other ends, {reason}": lambda: scheduler.finish(requests["r0"], reason),
        f"after that {reason} the one that was preempted is ended": lambda: scheduler.finish(requests["r1"], "abort"),
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


def shrunk() -> Values:
    """Let two requests lack a page each, while one is free and the cache has three that no request needs."""
    shelf = build_shelf(1)
    scheduler = build_scheduler(Rules(8, preemption=True), cache=shelf)
    shelf.insert([1, 2, 3], scheduler.allocator.allocate(3))
    people = [running(index, 2, outputs=1, computed=2, pages=2) for index in range(2)]
    requests = put(scheduler, people)
    gone = scheduler.make_room()
    return {
        "preempted": [request.request_id for request in gone],
        "pages": [len(request.pages) for request in requests.values()],
        "pages of the cache": shelf.num_pages,
    }


def shared_spec(seed: int) -> Values:
    """Worked out by hand: 20 pages, 3 in the cache, 2 and 3 of their own.

    What fails takes its beginning with it; what is aborted leaves the page of its fourth token as well.
    """

    def state(own: int, holders: int, hits: list[int], cached: int = 3) -> Values:
        return {
            "own pages": own,
            "free pages": 20 - cached - own,
            "pages of the cache": cached,
            "held by": [holders] * 3,
            "hits": hits,
        }

    return {
        "before": state(5, 2, [3, 3]),
        "one is preempted": state(2, 1, [3, 0]),
        "the other ends, error": state(0, 0, [0, 0], cached=0),
        "after that error the one that was preempted is ended": state(0, 0, [0, 0], cached=0),
        "the other ends, abort": state(0, 0, [0, 0], cached=4),
        "after that abort the one that was preempted is ended": state(0, 0, [0, 0], cached=4),
        "pages of the cache make room": {"preempted": [], "pages": [3, 3], "pages of the cache": 2},
    }


def again_probe(seed: int) -> Values:
    """Send a request back and let it in again, in chunks of 4, until it has two tokens more."""
    from mini_engine.scheduler.scheduler import ScheduledBatch

    person = running(1, 5, 20, outputs=4, computed=8, pages=9)
    scheduler, requests = Case(Rules(30, preemption=True), (person, waiting(2, 2))).scheduler()
    request = requests["r1"]
    log = list[Any]()
    scheduler.preempt(request)
    for step in range(5):
        chunks: list[Any] = []
        if step:
            scheduler.make_room()
            scheduler.schedule_chunk(request, 4, chunks)
        else:
            scheduler.admit(4, chunks)
        log.append(chunk_list(chunks))
        scheduler.update(ScheduledBatch(chunks, []), tokens_for(chunks))
    return {
        "chunks": log,
        "output": list(map(int, request.output_ids)),
        "arrival": request.arrival,
        "pages": len(request.pages),
        "preemptions": request.num_preemptions,
    }


def again_spec(seed: int) -> Values:
    """Worked out by hand: 9 tokens again, then one at a time."""
    return {
        "chunks": [
            [["r1", 0, 4, False]],
            [["r1", 4, 4, False]],
            [["r1", 8, 1, True]],
            [["r1", 9, 1, True]],
            [["r1", 10, 1, True]],
        ],
        "output": [10_000, 10_001, 10_002, 10_003, 509, 510, 511],
        "arrival": 1,
        "pages": 11,
        "preemptions": 1,
    }


ENDS = ("stop", "length", "abort", "error")


def build_listener() -> Any:
    """Build a prefix cache that notes what it is offered and takes nothing."""
    from mini_engine.scheduler.prefix_cache import NullPrefixCache, PrefixHit

    def insert(self: Any, token_ids: Sequence[int], pages: Sequence[int], *_: Any, **__: Any) -> Any:
        self.offers.append([list(map(int, token_ids)), len(pages)])
        return PrefixHit()

    listener = type("Listener", (NullPrefixCache,), {"insert": insert})()
    listener.offers = []
    return listener


def offered_probe(seed: int) -> Values:
    """Compute a prompt of 11 tokens in two chunks on pages of 4, then three tokens more, and end in every way."""
    from mini_engine.scheduler.scheduler import ScheduledBatch, ScheduledChunk

    values: Values = {}
    for reason in ENDS:
        listener = build_listener()
        scheduler = build_scheduler(Rules(100, 4), cache=listener)
        request = put(scheduler, [running(0, 11, 8, pages=4)])["r0"]
        longest = []
        for start, count, samples in ((0, 6, False), (6, 5, True), (11, 1, True), (12, 1, True)):
            chunk = ScheduledChunk(request, start, count, samples)
            scheduler.update(ScheduledBatch([chunk], []), {"r0": [500 + start]} if samples else {})
            longest.append(max(listener.offers, default=[[], 0]))
        before = len(listener.offers)
        scheduler.finish(request, reason)
        # Offering after a decode as well is not a mistake.
        last = listener.offers[before if reason == "error" else 0 :]
        values[reason] = [longest[0], longest[1], max(last, default=[[], 0])]
    return values


def offered_spec(seed: int) -> Values:
    """Count whole pages: 1 of 6 tokens, 2 of 11, 3 of the 13 in the end, and nothing more after an error."""
    known = [*prompt_of(running(0, 11)), 506]
    ends = {reason: [known[:12], 3] for reason in ENDS} | {"error": [[], 0]}
    return {reason: [[known[:4], 1], [known[:8], 2], ends[reason]] for reason in ENDS}


REGISTRY.add(
    "L5.F.missing",
    "A request lacks the pages of its known tokens, the newest one included; none before a boundary or if it has more.",
    missing_probe,
    bitwise(missing_spec),
)
REGISTRY.add(
    "L5.F.room",
    "In 40 drawn states every request that stays gets the pages of the known tokens, as few as needed are preempted, "
    "the ratio jumps, and every page is in one place.",
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
    "A request ends wherever it is, once, with the first reason; its pages are free and no other request is touched.",
    finish_probe,
    bitwise(finish_spec),
)
REGISTRY.add(
    "L5.F.shared",
    "Pages of a hit stay the cache's: unlocked once for each who leaves, and freed only if an error drops them.",
    shared_probe,
    bitwise(shared_spec),
)
REGISTRY.add(
    "L5.F.again",
    "A request that was preempted keeps its output and its arrival and computes all of its tokens again.",
    again_probe,
    bitwise(again_spec),
)
REGISTRY.add(
    "L5.F.offered",
    "The prefix cache is offered the whole pages that are computed, after a piece of a prompt and at the end.",
    offered_probe,
    bitwise(offered_spec),
)
