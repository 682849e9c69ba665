"""The checks of L5.E: admission.

Owns: states in which requests wait, and which of them the rules admit. The candidate's policies are not used.
"""

import random
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from smoke.checks.l5.a_request import build_request
from smoke.checks.l5.d_share import (
    Case,
    Cases,
    build_scheduler,
    chunk_list,
    put,
    running,
    state_expected,
    state_of,
    waiting,
)
from smoke.checks.l5.spec_scheduling import Chunks, Naive, Person, Rules, expected_pages, touched
from smoke.checks.l5.spec_shelf import build_shelf
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise
from smoke.framework.prepared import prepared

REGISTRY = Registry()
RATIOS = (Fraction(1), Fraction(1, 2), Fraction(3, 8))  # exact in binary: no rounding decides


def register_admission(check_id: str, proves: str, cases: Cases) -> None:
    """Register a check that calls ``admit`` in every case and compares chunks and state with the rules."""

    def probe(seed: int) -> Values:
        values: Values = {}
        for name, case in cases(seed).items():
            scheduler, requests = case.scheduler()
            chunks: list[Any] = []
            scheduler.admit(case.rows, chunks)
            waited = {who: request.steps_waited for who, request in requests.items()}
            values[name] = {"chunks": chunk_list(chunks), "steps waited": waited, **state_of(scheduler, requests)}
        return values

    def spec(seed: int) -> Values:
        values: Values = {}
        for name, case in cases(seed).items():
            naive, people = case.naive()
            chunks: Chunks = []
            naive.let_in(10**9 if case.rows is None else case.rows, chunks)
            waited = {person.name: person.waited for person in people}
            values[name] = {"chunks": chunks, "steps waited": waited, **state_expected(naive, people)}
        return values

    REGISTRY.add(check_id, proves, probe, bitwise(spec))


def line_cases(seed: int) -> dict[str, Case]:
    """Return queues whose head does not fit, and ends of every other kind."""
    large, small = waiting(1, 5, 4), waiting(2, 1, 1)
    busy = running(0, 1, 4, outputs=1, computed=1, pages=2)  # it decodes
    four = tuple(waiting(index, 3 + index, 2) for index in range(4))
    return {
        "8 pages: one runs and needs 4, the head needs 8, the next needs 1": Case(Rules(8), (busy, large, small)),
        "the same with room for the head": Case(Rules(13), (busy, large, small)),
        "the head fits to the page": Case(Rules(12), (busy, large)),
        "one page is missing for the head": Case(Rules(11), (busy, large)),
        "the last stands in front of the queue": Case(Rules(8), (busy, small, large)),
        "room for two requests more": Case(Rules(100, max_running=3), (busy, *four[1:])),
        "as many run as may": Case(Rules(100, max_running=1), (busy, *four[1:])),
        "no rows are left": Case(Rules(100), (busy, *four[1:]), rows=0),
        "9 rows for prompts of 3, 4, 5 and 6": Case(Rules(100), four, rows=9),
        "7 rows for prompts of 3, 4, 5 and 6": Case(Rules(100), four, rows=7),
        "no limit of rows": Case(Rules(100), four),
        "the longest answer first": Case(
            Rules(20, policy="lof"), (waiting(0, 3, 2), waiting(1, 3, 9), waiting(2, 3, 5))
        ),
        "3 pages of 130 for two prompts of 131": Case(Rules(3, 130), (waiting(0, 131, 1), waiting(1, 131, 1))),
        "no request waits": Case(Rules(8), (busy,)),
        "preempted, 4 and 5 tokens": Case(Rules(20, 4), (waiting(0, 4, 9, outputs=5, preemptions=1),), rows=30),
    }


@prepared
def promise_cases(seed: int) -> dict[str, Case]:
    """Return many requests that need little now and more later; each must count what was promised just before."""
    rng = random.Random(f"promises {seed}")
    found = {}
    for number in range(12):
        size = rng.choice([1, 2, 4])
        preemption = rng.random() < 0.5
        ratio = rng.choice(RATIOS)
        prompt, most = rng.randint(1, 4), rng.randint(10, 30)
        each = expected_pages(Person("r0", prompt, most), size, ratio, preemption)
        pages = max(each * 3 + rng.choice([-1, 0, 1]), touched(prompt + most, size))
        rules = Rules(pages, size, max_running=20, preemption=preemption, ratio=ratio)
        people = tuple(waiting(index, prompt, most) for index in range(6))
        name = f"six times {prompt} + {most} in {pages} pages of {size}"
        found[f"{name}, ratio {float(ratio) if preemption else 'off'}, case {number}"] = Case(rules, people)
    return found


def aged_cases(seed: int) -> dict[str, Case]:
    """Return queues in which some have waited for long; the policy would take the longest answers."""
    queue = [waiting(index, 2, 30 - index, waited=wait) for index, wait in enumerate([0, 3, 39, 40, 41, 0])]
    return {
        "two of six have aged, room for one": Case(
            Rules(200, policy="lof", max_running=1, max_waited=40), tuple(queue)
        ),
        "two of six have aged, room for three": Case(
            Rules(200, policy="lof", max_running=3, max_waited=40), tuple(queue)
        ),
        "they stand at the end": Case(Rules(200, policy="lof", max_running=3, max_waited=40), tuple(queue[::-1])),
        "an aged one does not fit": Case(Rules(25, policy="lof", max_waited=40), (*queue[:4], waiting(8, 20, 2))),
        "a preempted one has aged": Case(
            Rules(200, policy="lof", max_running=1, max_waited=40),
            (*queue[:3], Person("r8", 2, 4, 8, outputs=1, waited=40, state="preempted", preemptions=1)),
        ),
        "no request has aged": Case(Rules(200, policy="lof", max_running=3, max_waited=42), tuple(queue)),
    }


@prepared
def drawn_cases(seed: int) -> dict[str, Case]:
    """Draw states: some run, some wait, and the pool is about as large as what is promised."""
    found = {}
    for number in range(60):
        rng = random.Random(f"admission {seed} {number}")
        size = rng.choice([1, 2, 4])
        preemption = rng.random() < 0.5
        people = []
        for index in range(rng.randint(2, 9)):
            person = waiting(index, rng.randint(1, 9), rng.randint(1, 12), waited=rng.choice([0, 2, 5]))
            person.outputs = rng.choice([0, 0, rng.randrange(person.most)])
            if rng.random() < 0.4:
                person.state, person.pages = "running", touched(person.known, size)
                person.computed = rng.randrange(person.known)
            people.append(person)
        held = sum(person.pages for person in people)
        rules = Rules(
            held + rng.randint(1, 25),
            size,
            rng.choice(["fcfs", "lof"]),
            rng.randint(1, 8),
            None,
            preemption,
            rng.choice([5, 256]),
            rng.choice(RATIOS),
        )
        rng.shuffle(people)
        found[f"state {number}"] = Case(rules, tuple(people), rng.choice([None, 0, 1, 5, 20]))
    return found


# pages, page size, prompt, most; the pages that it may need
SIZES: dict[str, tuple[Rules, int, int, int]] = {
    "31 + 10 in 10 pages of 4: 40 keys, the last token has none": (Rules(10, 4), 31, 10, 10),
    "32 + 10 in 10 pages of 4": (Rules(10, 4), 32, 10, 11),
    "9 + 2 in 10 pages of 1": (Rules(10, 1), 9, 2, 10),
    "10 + 2 in 10 pages of 1": (Rules(10, 1), 10, 2, 11),
    "10 + 2 in 10 pages of 1, with preemption": (Rules(10, 1, preemption=True), 10, 2, 11),
    "5 + 60 in 32 pages of 2, with preemption": (Rules(32, 2, preemption=True), 5, 60, 32),
    "1 + 9000 in 500 pages of 16, with preemption": (Rules(500, 16, preemption=True), 1, 9000, 563),
    "700 + 1 in 10 pages of 64": (Rules(10, 64), 700, 1, 11),
}


def add_probe(seed: int) -> Values:
    """Queue requests when one waits already."""
    values: Values = {}
    for name, (rules, prompt, most, _) in SIZES.items():
        scheduler = build_scheduler(rules)
        scheduler.add(build_request(waiting(0, 1, 1)))
        try:
            scheduler.add(build_request(waiting(1, prompt, most)))
            words = "accepted"
        except ValueError as error:
            words = f"ValueError: {error}"
        values[name] = {"words": words, "waiting": [request.request_id for request in scheduler.waiting]}
    return values


def add_verdict(seed: int, got: Values) -> list[Failure]:
    """Refuse what could never fit, with its pages and the pool's; a refused request does not wait."""
    failures = []
    for name, (rules, _, _, pages) in SIZES.items():
        words, queue = got[name]["words"], got[name]["waiting"]
        if pages <= rules.num_pages:
            expected = "accepted"
            right = words == "accepted" and queue == ["r0", "r1"]
        else:
            expected = f"a ValueError that names {pages} and {rules.num_pages} pages, and nothing queued"
            right = words.startswith("ValueError") and str(pages) in words and str(rules.num_pages) in words
            right = right and queue == ["r0"]
        if not right:
            failures.append(Failure(name, "", expected, f"{words}; {queue} wait"))
    return failures


PASSED_OVER = {"a sibling computes its prompt": 1, "another request computes its beginning": 1, "it waits for none": 0}


def siblings_probe(seed: int) -> Values:
    """Let a request whose prompt is being computed wait in front of others, and one whose prompt is not."""
    from mini_engine.scheduler.sharing import SharingLimits

    values: Values = {}
    for name in PASSED_OVER:
        scheduler = build_scheduler(Rules(100))
        first = running(0, 10, computed=4, pages=10)
        people = [first, waiting(1, 10, waited=300), waiting(2, 3), waiting(3, 4)]  # r1 has aged
        requests = put(scheduler, people)
        if name == "a sibling computes its prompt":
            for sibling in ("r0", "r1"):
                requests[sibling].siblings = [requests["r0"], requests["r1"]]
        elif name == "another request computes its beginning":
            requests["r1"].prompt_ids = list(requests["r0"].prompt_ids)
            scheduler.limits = replace(scheduler.limits, sharing=SharingLimits(wait_for_prefix=8))
        chunks: list[Any] = []
        scheduler.admit(9, chunks)
        values[name] = {"chunks": chunk_list(chunks), **state_of(scheduler, requests)}
    return values


def siblings_spec(seed: int) -> Values:
    """Pass over that request only."""
    values: Values = {}
    for name, passed in PASSED_OVER.items():
        people = [running(0, 10, computed=4, pages=10), waiting(1, 10, waited=300), waiting(2, 3), waiting(3, 4)]
        naive = Naive(Rules(100), people[1 + passed :], [people[0]])
        chunks: Chunks = []
        naive.let_in(9, chunks)
        naive.waiting += people[1 : 1 + passed]
        values[name] = {"chunks": chunks, **state_expected(naive, people)}
    return values


@dataclass(frozen=True)
class Shelved:
    """Pages of 2 tokens: ``free`` ones, and beginnings of prompts that are cached. Who waits has the shortest first."""

    free: int
    cached: tuple[list[int], ...]  # tokens, whole pages
    queue: tuple[tuple[list[int], int], ...]  # prompt and most
    surplus: int = 0
    admitted: list[str] = field(default_factory=list)  # and then what is expected: who
    computed: dict[str, int] = field(default_factory=dict)  # from where
    held: int = 0  # locks on all pages
    left: int = 0  # pages on the shelf
    outputs: int = 0  # so many of the tokens are output, of a request that was preempted
    scored: bool = False  # the prompt's log-probabilities are asked for, so every row must be computed


A = [1, 2, 3, 4, 5, 6, 7, 8]
B = [1, 2, 3, 4, 9, 9]
C = [50, 51, 52]
# A of 8 tokens and at most 5 more needs 12 keys in the end, which is 6 pages; 3 of them can come from the cache, for
# the newest token is always computed.
SHELVES: dict[str, Shelved] = {
    "3 of 6 pages cached, 3 more free": Shelved(3, (A[:6],), ((A, 5),), 0, ["r0"], {"r0": 6}, 3, 3),
    "3 of 6 pages cached, 2 more free: not 2 and 3": Shelved(2, (A[:6],), ((A, 5),), 0, [], {"r0": 0}, 0, 3),
    "all of the prompt is cached": Shelved(3, (A,), ((A, 5),), 0, ["r0"], {"r0": 6}, 3, 4),
    "the same, preempted with 2 tokens of output": Shelved(3, (A,), ((A, 7),), 0, ["r0"], {"r0": 6}, 3, 4, outputs=2),
    "the prompt is scored": Shelved(6, (A,), ((A, 5),), 0, ["r0"], {"r0": 0}, 0, 4, scored=True),
    "2 of 6 pages found, 4 others cached": Shelved(0, (B[:4], [7] * 8), ((A, 5),), 0, ["r0"], {"r0": 4}, 2, 4),
    "2 of 6 pages found, 3 others cached": Shelved(0, (B[:4], [7] * 6), ((A, 5),), 0, [], {"r0": 0}, 0, 5),
    "two find the same pages": Shelved(7, (A[:4],), ((A, 5), (B, 5)), 0, ["r0", "r1"], {"r0": 4, "r1": 4}, 4, 2),
    "what the second found is gone": Shelved(
        0, (A[:6], [7] * 2), ((C, 2), (A, 1)), 0, ["r0"], {"r0": 0, "r1": 0}, 0, 2
    ),
    "the cache gives more than asked for": Shelved(0, (A[:4],), ((C, 1),), 1, ["r0"], {"r0": 0}, 0, 0),
}


def shelved_probe(seed: int) -> Values:
    """Admit requests with a prefix cache, and look at the pages of each."""
    values: Values = {}
    for name, case in SHELVES.items():
        total = case.free + sum(len(tokens) // 2 for tokens in case.cached)
        shelf = build_shelf(2, case.surplus)
        scheduler = build_scheduler(Rules(total, 2), cache=shelf)
        for tokens in case.cached:
            shelf.insert(tokens, scheduler.allocator.allocate(len(tokens) // 2))
        requests = []
        for index, (prompt, most) in enumerate(case.queue):
            request = build_request(waiting(index, len(prompt) - case.outputs, most))
            cut = request.num_prompt_tokens
            request.prompt_ids = prompt[:cut]
            request.output_ids = prompt[cut:]
            if case.scored:
                request.params = replace(request.params, prompt_logprobs=0)
            requests.append(request)
            scheduler.waiting.append(request)
        available = [scheduler.num_available]
        scheduler.admit(None, [])
        own = [page for r in requests for page in r.pages[len(r.hit.pages) :]]
        free = [page for page in range(scheduler.allocator.num_pages) if scheduler.allocator.is_free(page)]
        values[name] = {
            "admitted": [r.request_id for r in scheduler.running],
            "computed": {r.request_id: r.num_computed_tokens for r in requests},
            "locks": sum(shelf.holders.values()),
            "hits": {r.request_id: len(r.hit.pages) for r in requests},
            "reported to the cache": shelf.records,
            "pages in the cache": shelf.num_pages,
            "available before and after": [*available, scheduler.num_available],
            "every page in one place": sorted([*own, *free, *shelf.pages.values()]) == list(range(total)),
            "pages": {r.request_id: len(r.pages) for r in requests},
            "lists": all(isinstance(r.pages, list) for r in requests),
        }
    return values


def shelved_spec(seed: int) -> Values:
    """Worked out by hand, except the sums."""
    values: Values = {}
    for name, case in SHELVES.items():
        cached = sum(len(tokens) // 2 for tokens in case.cached)
        pages = {
            f"r{index}": touched(len(prompt), 2) if f"r{index}" in case.admitted else 0
            for index, (prompt, _) in enumerate(case.queue)
        }
        taken = {case.queue[int(who[1:])][0][0]: case.computed[who] // 2 for who in case.admitted}  # by first token
        own = sum(pages[who] - case.computed[who] // 2 for who in case.admitted)
        values[name] = {
            "admitted": case.admitted,
            "computed": case.computed,
            "locks": case.held,
            "hits": {who: computed // 2 for who, computed in case.computed.items()},
            "reported to the cache": [
                [case.computed[who] // 2, len(case.queue[int(who[1:])][0])] for who in case.admitted
            ],
            "pages in the cache": case.left,
            "available before and after": [case.free + cached, case.free + cached - own - sum(taken.values())],
            "every page in one place": True,
            "pages": pages,
            "lists": True,
        }
    return values


def allocate_probe(seed: int) -> Values:
    """Take pages that are free, and pages that must be evicted."""
    values: Values = {}
    for surplus in (0, 2):
        for count in (0, 3, 4, 5, 9, 10):
            shelf = build_shelf(1, surplus)
            scheduler = build_scheduler(Rules(10), cache=shelf)
            shelf.insert(list(range(6)), scheduler.allocator.allocate(6))
            before = scheduler.num_available
            pages = scheduler.allocate(count)
            free = [page for page in range(scheduler.allocator.num_pages) if scheduler.allocator.is_free(page)]
            values[f"{count} of 4 free and 6 cached pages, surplus {surplus}"] = {
                "pages": len(pages),
                "every page in one place": sorted([*pages, *free, *shelf.pages.values()]) == list(range(10)),
                "evicted": bool(shelf.evicted) if surplus else shelf.evicted,
                "available": [before, scheduler.num_available],
            }
    asked: list[list[int | None]] = []

    def noting(count: int, after: int | None = None) -> list[int]:
        asked.append([count, after])
        return [0] * count

    scheduler.allocator = SimpleNamespace(num_free=9, allocate=noting)
    scheduler.allocate(2, after=7)
    values["2 pages after page 7"] = asked
    return values


def allocate_spec(seed: int) -> Values:
    """Evict what is lacking and no more than the cache gives up."""
    values: Values = {}
    for surplus in (0, 2):
        for count in (0, 3, 4, 5, 9, 10):
            lacking = max(count - 4, 0)
            values[f"{count} of 4 free and 6 cached pages, surplus {surplus}"] = {
                "pages": count,
                "every page in one place": True,
                "evicted": lacking > 0 if surplus else lacking,
                "available": [10, 10 - count],
            }
    return {**values, "2 pages after page 7": [[2, 7]]}


def idle_cases() -> dict[str, Case]:
    """Return states in which no waiting request can come in, and two in which the policy orders two."""
    queue = tuple(waiting(index, 3, 2) for index in (1, 2))
    busy = running(0, 2, 3, computed=1, pages=2)
    return {
        "as many run as may": Case(Rules(100, max_running=1), (busy, *queue)),
        "no rows are left": Case(Rules(100), (busy, *queue), rows=0),
        "no request waits": Case(Rules(100), (busy,)),
        "there is room": Case(Rules(100), (busy, *queue)),
        "one of three has aged": Case(Rules(100, max_waited=40), (busy, *queue, waiting(3, 3, 2, waited=40))),
    }


def idle_probe(seed: int) -> Values:
    """Count how many requests the policy is asked to put in order."""
    values: Values = {}
    for name, case in idle_cases().items():
        scheduler, _ = case.scheduler()
        asked: list[int] = []
        policy = scheduler.policy
        scheduler.policy = SimpleNamespace(
            order=lambda queue, hits, asked=asked, policy=policy: asked.append(len(queue)) or policy.order(queue, hits)
        )
        scheduler.admit(case.rows, [])
        values[name] = asked
    return values


def idle_spec(seed: int) -> Values:
    """Ask once, and only if a request may come in."""
    return {name: [2] if name in ("there is room", "one of three has aged") else [] for name in idle_cases()}


REGISTRY.add(
    "L5.E.idle",
    "The policy is asked for an order once, of the requests that have not aged, and not while no request can come in: "
    "an order may look up all that wait.",
    idle_probe,
    bitwise(idle_spec),
)
REGISTRY.add(
    "L5.E.add",
    "A request that could never fit into the pool is refused at once, with the numbers; one that just fits is not.",
    add_probe,
    add_verdict,
)
REGISTRY.add(
    "L5.E.allocate",
    "Pages come from the free ones and then from the cache; what it gives beyond that is free and not lost.",
    allocate_probe,
    bitwise(allocate_spec),
)
register_admission(
    "L5.E.line",
    "Admission goes in the policy's order until one does not fit, rows run out or enough run; no request overtakes.",
    line_cases,
)
register_admission(
    "L5.E.promises",
    "Pages promised to the requests admitted just before count for the next one, to the page.",
    promise_cases,
)
register_admission(
    "L5.E.aged",
    "Who has waited for the allowed number of steps goes first, by arrival, whatever the policy.",
    aged_cases,
)
register_admission(
    "L5.E.states",
    "In 60 drawn states, with and without preemption, admission does what the rules say.",
    drawn_cases,
)
REGISTRY.add(
    "L5.E.siblings",
    "A request whose prompt a running one is computing is passed over and stops no other; others are not.",
    siblings_probe,
    bitwise(siblings_spec),
)
REGISTRY.add(
    "L5.E.hits",
    "Locking a hit takes its pages from what is available; a hit is looked up when it is used; a refusal unlocks it; "
    "the cache is told who starts.",
    shelved_probe,
    bitwise(shelved_spec),
)
