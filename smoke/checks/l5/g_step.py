"""The checks of L5.G: whole steps, one after the other.

Owns: made-up runs in which requests come, sample made-up tokens, stop early and are aborted. The candidate's policies
decide; the prefix cache, where there is one, is a shelf.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from smoke.checks.l5 import spec_scheduling as scheduling
from smoke.checks.l5.a_request import build_request
from smoke.checks.l5.d_share import Case, build_scheduler, chunk_list, running, waiting
from smoke.checks.l5.spec_scheduling import Chunks, Naive, Person, Rules, World, draw_world, tell, token
from smoke.checks.l5.spec_shelf import build_shelf
from smoke.framework.check import Failure, Registry, Values, noting
from smoke.framework.compare import bitwise, close, remember
from smoke.framework.prepared import prepared

REGISTRY = Registry()
POLICIES = ("fcfs", "lof", "shortest", "lpm", "dfs-weight")  # without hits the last two go by arrival
MOST_IDLE = 50  # steps in which requests wait and nothing is computed: it will not get better


def make_scheduler(rules: Rules, cache: Any = None) -> Any:
    """Build the candidate's scheduler with its own policy."""
    from mini_engine.scheduler.policy import make_policy

    return build_scheduler(rules, make_policy(rules.policy), cache)


def tokens_of(batch: Any) -> dict[str, list[int]]:
    """Sample from the made-up model."""
    sampled = [chunk.request for chunk in batch.chunks if chunk.samples]
    return {request.request_id: [token(request.request_id, request.num_tokens)] for request in sampled}


def walk(world: World, requests: dict[str, Any], scheduler: Any) -> Iterator[Any]:
    """Run a world step by step and yield each batch before it is computed.

    Ends when nothing is left to do, or when nothing was done for a while.
    """
    real = {person.name: person.real for person in world.people}
    idle = 0
    with noting() as done:
        for step in range(world.most_steps):
            if not world.enter(step, requests, scheduler, done) or idle == MOST_IDLE:
                return
            done.append(f"schedule step {step}")
            batch = scheduler.schedule()
            yield batch
            idle = idle + 1 if scheduler.has_work and not batch.chunks else 0
            done.append(f"update {chunk_list(batch.chunks)}")
            scheduler.update(batch, tokens_of(batch))
            for chunk in batch.chunks:
                request = chunk.request
                if chunk.samples and request.num_output_tokens == real[request.request_id]:
                    done.append(f"finish {request.request_id} (stop)")
                    scheduler.finish(request, "stop")


def build_all(world: World) -> dict[str, Any]:
    """Build the requests of a world."""
    return {person.name: build_request(person) for person in world.people}


# One step -----------------------------------------------------------------------------------------------------------


def step_cases(seed: int) -> dict[str, Case]:
    """Return states before a step; the first are the lesson's example."""
    long = running(0, 11, 9, computed=6, pages=11)
    decoding = running(1, 3, 9, outputs=2, computed=4, pages=5)
    new = waiting(2, 6, 9)
    shared = (long, decoding, new)
    many = tuple(running(index, 2, 9, outputs=1, computed=2, pages=3) for index in range(3, 7))
    found = {
        "9 rows for a decode, 5 tokens of a prompt and a new prompt of 6": Case(Rules(100, budget=9), shared),
        "4 rows for them": Case(Rules(100, budget=4), shared),
        "1 row for them": Case(Rules(100, budget=1), shared),
        "no limit of rows": Case(Rules(100), shared),
        "5 decodes and a prompt share 5 rows": Case(Rules(100, budget=5), (long, decoding, *many)),
        "5 decodes and 4 rows: the first four": Case(Rules(100, budget=4), (long, decoding, *many)),
        "5 decodes and 6 rows": Case(Rules(100, budget=6), (*many, long, decoding, new)),
        "as many run as may": Case(Rules(100, budget=20, max_running=2), shared),
        "there is no request": Case(Rules(100, preemption=True), ()),
        "4 rows for them, with preemption": Case(Rules(100, budget=4, preemption=True), shared),
    }
    nearly = running(0, 11, 9, computed=9, pages=11)
    found["1 row: a decode goes before the last 2 tokens of a prompt"] = Case(Rules(100, budget=1), (nearly, decoding))
    found["6 rows: two running prompts keep their order"] = Case(
        Rules(100, budget=6), (long, replace(nearly, name="r3"))
    )
    back = running(4, 3, 9, outputs=5, computed=4, pages=8, preemptions=1)
    found["3 rows: a decode goes before one that computes its output again"] = Case(
        Rules(100, budget=3), (back, decoding)
    )
    short = Rules(19, budget=9, preemption=True)
    edge = tuple(running(index, 5, 4, outputs=index, computed=4 + index, pages=4 + index) for index in (1, 2, 3))
    found["no page for the newest tokens, and one waits"] = Case(short, (*edge, waiting(0, 1, 1)))
    return found


def step_probe(seed: int) -> Values:
    """Choose one step in each state."""
    values: Values = {}
    for name, case in step_cases(seed).items():
        scheduler, requests = case.scheduler()
        batch = scheduler.schedule()
        values[name] = {
            "chunks": chunk_list(batch.chunks),
            "rows": batch.num_tokens,
            "preempted": sorted(request.request_id for request in batch.preempted),
            "still waiting": sorted(request.request_id for request in scheduler.waiting),
            "running": [request.request_id for request in scheduler.running],
            "steps waited": {who: request.steps_waited for who, request in requests.items()},
            "ratio": float(scheduler.growth.ratio),
        }
    return values


def step_spec(seed: int) -> Values:
    """Choose it by the rules."""
    values: Values = {}
    for name, case in step_cases(seed).items():
        naive, people = case.naive()
        planned = naive.step()
        values[name] = {
            "chunks": planned["chunks"],
            "rows": sum(chunk[2] for chunk in planned["chunks"]),
            "preempted": sorted(planned["preempted"]),
            "still waiting": sorted(person.name for person in naive.waiting),
            "running": [person.name for person in naive.running],
            "steps waited": {person.name: person.waited for person in people},
            "ratio": float(naive.ratio),
        }
    return values


# Runs ---------------------------------------------------------------------------------------------------------------


@prepared
def worlds(seed: int, preemption: bool) -> dict[str, World]:
    """Draw three worlds a policy, of 20 requests each: 300 in all."""
    return {
        f"{policy}, world {number}": draw_world(f"{seed} {number}", policy, preemption, 20)
        for policy in POLICIES
        for number in range(3)
    }


def runs_probe(preemption: bool) -> Any:
    """Return a probe that tells every step of every world, and what became of each request."""

    def probe(seed: int) -> Values:
        values: Values = {}
        for name, world in worlds(seed, preemption).items():
            requests = build_all(world)
            steps = [
                {
                    "chunks": chunk_list(batch.chunks),
                    "preempted": sorted(request.request_id for request in batch.preempted),
                }
                for batch in walk(world, requests, make_scheduler(world.rules))
            ]
            values[name] = {
                "steps": steps,
                "outputs": {who: list(map(int, r.output_ids)) for who, r in requests.items()},
                "not finished": [who for who, r in requests.items() if r.state.value != "finished"],
            }
        return values

    return probe


def stories(preemption: bool) -> Any:
    """Return a function that lives through the worlds of a seed by the rules, once."""
    return remember(lambda seed: {name: tell(world) for name, world in worlds(seed, preemption).items()})


def runs_verdict(preemption: bool) -> Any:
    """Return the verdict of ``runs_probe``: every step follows the rules, each token comes once, each request ends."""
    planned = stories(preemption)

    def verdict(seed: int, got: Values) -> list[Failure]:
        failures = []
        for name, world in worlds(seed, preemption).items():
            story = planned(seed)[name]
            steps = got[name]["steps"]
            failures += step_failures(name, story, steps)
            if got[name]["not finished"] or len(steps) >= world.most_steps:
                who = got[name]["not finished"]
                failures.append(Failure(name, f"after {len(steps)} steps", "all have finished", f"{who} have not"))
            failures += output_failures(name, world, story, got[name]["outputs"])
        return failures

    return verdict


def step_failures(name: str, story: scheduling.Story, steps: list[Any]) -> list[Failure]:
    """Compare step by step, as far as the story goes, and return the first difference."""
    for index, planned in enumerate(story.steps):
        expected = {"chunks": planned["chunks"], "preempted": sorted(planned["preempted"])}
        if index >= len(steps):
            return [Failure(name, f"step {index}", str(expected), "there is no such step")]
        for part, want in expected.items():
            if steps[index][part] != want:
                return [Failure(f"{name}, {part}", f"step {index}", str(want), str(steps[index][part]))]
    if story.whole and len(steps) > len(story.steps):
        place = f"step {len(story.steps)}"
        return [Failure(name, place, "nothing is left to do", str(steps[len(story.steps)]))]
    return []


def output_failures(name: str, world: World, story: scheduling.Story, outputs: dict[str, list[int]]) -> list[Failure]:
    """Find a request that lost a token, has one twice or has one too many."""
    for person in world.people:
        mine = outputs[person.name]
        right = [token(person.name, person.prompt + place) for place in range(len(mine))]
        count = story.outputs[person.name] if story.whole else len(mine)
        if mine != right or len(mine) != count or len(mine) > person.real:
            expected = [token(person.name, person.prompt + place) for place in range(count)]
            return [Failure(f"{name}, the output of {person.name}", "", str(expected), str(mine))]
    return []


# Pages --------------------------------------------------------------------------------------------------------------

BEGINNINGS = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 40, 41], [60, 61, 62])


@prepared
def page_worlds(seed: int) -> dict[str, tuple[World, bool]]:
    """Draw worlds with and without preemption, and each with and without a prefix cache."""
    return {
        f"{policy}, preemption {preemption}, cache {shelved}": (
            draw_world(f"pages {seed} {shelved}", policy, preemption, 40),
            shelved,
        )
        for policy in ("fcfs", "lpm", "random")
        for preemption in (False, True)
        for shelved in (False, True)
    }


def books(scheduler: Any, shelf: Any, batch: Any | None) -> list[Any]:
    """Tell who has which page now: free, in the cache, and each running request's own; then what lacks one."""
    own = {r.request_id: list(map(int, r.pages[len(r.hit.pages) :])) for r in scheduler.running}
    free = [page for page in range(scheduler.allocator.num_pages) if scheduler.allocator.is_free(page)]
    cached = sorted(map(int, shelf.pages.values())) if shelf else []
    faults = [f"{r.request_id} waits and holds pages" for r in scheduler.waiting if r.pages]
    for request in scheduler.running:
        if any(page not in cached for page in request.hit.pages):
            faults.append(f"{request.request_id} reads pages that the cache has given up")
    for chunk in batch.chunks if batch else []:
        if (chunk.start + chunk.num_tokens) > len(chunk.request.pages) * scheduler.page_size:
            faults.append(f"{chunk.request.request_id} has no page for a token of this step")
        if len(set(chunk.request.pages)) != len(chunk.request.pages):
            faults.append(f"{chunk.request.request_id} has a page twice")
    return [free, cached, own, faults]


def pages_probe(seed: int) -> Values:
    """Run every world and keep the books: after each choice of a step and after each update."""
    values: Values = {}
    for name, (world, shelved) in page_worlds(seed).items():
        rng = random.Random(f"beginnings {name} {seed}")
        requests = build_all(world)
        for request in requests.values():
            start = rng.choice(BEGINNINGS) if shelved else []
            request.prompt_ids = [*start, *request.prompt_ids][: len(request.prompt_ids)]
        shelf = build_shelf(world.rules.page_size, surplus=1) if shelved else None
        scheduler = make_scheduler(world.rules, shelf)
        log = []
        for batch in walk(world, requests, scheduler):
            log += [books(scheduler, shelf, batch)]
        log += [books(scheduler, shelf, None)]
        values[name] = {"books": log, "held": sum(shelf.holders.values()) if shelf else 0}
    return values


def pages_verdict(seed: int, got: Values) -> list[Failure]:
    """Every page is in one place at every moment, and in the end no request owns or holds one."""
    failures = []
    for name, (world, _) in page_worlds(seed).items():
        found = list(book_failures(name, world.rules.num_pages, got[name]["books"]))
        failures += found[:1]
        if not found and (got[name]["books"][-1][2] or got[name]["held"]):
            owned = f"{got[name]['books'][-1][2]} own pages, {got[name]['held']} locks"
            failures.append(Failure(name, "at the end", "no request owns or holds a page", owned))
    return failures


def book_failures(name: str, num_pages: int, log: list[Any]) -> Iterator[Failure]:
    """Yield pages with two owners and with none."""
    for step, (free, cached, own, faults) in enumerate(log):
        place = f"step {step}"
        places = ["free"] * len(free) + ["cached"] * len(cached) + [who for who, pages in own.items() for _ in pages]
        pages = [*free, *cached, *(page for group in own.values() for page in group)]
        for page in range(num_pages):
            owners = [who for who, number in zip(places, pages, strict=True) if number == page]
            if len(owners) != 1:
                yield Failure(name, f"{place}, page {page}", "one owner", str(owners or "none"))
        if faults:
            yield Failure(name, place, "pages for all that is computed", faults[0])


# None is forgotten --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """Requests that come without end, and one among them that the policy likes least."""

    rules: Rules
    poor: Person
    steps: int = 160


STREAMS = {
    "longest first, a short one": Stream(
        Rules(40, policy="lof", max_running=4, budget=8, max_waited=50), waiting(20, 1, 2)
    ),
    "shortest first, a long one": Stream(
        Rules(40, policy="shortest", max_running=4, budget=8, max_waited=50), waiting(20, 30, 2)
    ),
    "shortest first without the rule of steps": Stream(
        Rules(40, policy="shortest", max_running=4, budget=8, max_waited=10**6), waiting(20, 30, 2), 200
    ),
    "a large one that rarely fits, by arrival": Stream(Rules(40, max_running=8, budget=16), waiting(20, 34, 6)),
}


def stream_people(stream: Stream) -> dict[int, list[Person]]:
    """Return who comes before which step: 20 and the poor one at once, then one a step."""
    first = [waiting(index, 3, 9) for index in range(20)]
    return {0: [*first, stream.poor], **{step: [waiting(20 + step, 3, 9)] for step in range(1, stream.steps)}}


def stream_probe(seed: int) -> Values:
    """Run each stream until the one is through."""
    values: Values = {}
    for name, stream in STREAMS.items():
        scheduler = make_scheduler(stream.rules)
        poor = build_request(stream.poor)
        values[name] = "never"
        for step, people in stream_people(stream).items():
            for person in people:
                scheduler.add(poor if person is stream.poor else build_request(person))
            batch = scheduler.schedule()
            scheduler.update(batch, tokens_of(batch))
            for request in list(scheduler.running):
                if request.num_output_tokens == request.params.max_new_tokens:
                    scheduler.finish(request, "length")
            if poor.num_output_tokens == stream.poor.most:
                values[name] = step
                break
    return values


def stream_spec(seed: int) -> Values:
    """Let the rules run it."""
    values: Values = {}
    for name, stream in STREAMS.items():
        naive = Naive(stream.rules)
        values[name] = "never"
        for step, people in stream_people(stream).items():
            naive.waiting += [Person(p.name, p.prompt, p.most, p.arrival) for p in people]
            chunks: Chunks = naive.step()["chunks"]
            naive.compute(chunks)
            done = [person.name for person in naive.running if person.outputs == person.most]
            for who in done:
                naive.leave(who)
            if stream.poor.name in done:
                values[name] = step
                break
    return values


REGISTRY.add(
    "L5.G.step",
    "One step: decodes, then chunks of running prompts, then new requests, within the rows; no request "
    "is preempted and admitted in the same step.",
    step_probe,
    close(step_spec, 1e-9),
)
REGISTRY.add(
    "L5.G.runs",
    "Five policies, 300 requests that come, stop early and are aborted: every step is the one that the rules give, "
    "every token is there once, and all requests end.",
    runs_probe(False),
    runs_verdict(False),
    seconds=40.0,
)
REGISTRY.add(
    "L5.G.preemption",
    "The same where pages run out and requests are preempted.",
    runs_probe(True),
    runs_verdict(True),
    seconds=40.0,
)
REGISTRY.add(
    "L5.G.pages",
    "In every step of twelve runs every page is free, cached or owned by one request, and at the end none is owned.",
    pages_probe,
    pages_verdict,
    seconds=40.0,
)
REGISTRY.add(
    "L5.G.starvation",
    "While others come without end, the request that a policy likes least is served, after as many steps as promised.",
    stream_probe,
    bitwise(stream_spec),
)
