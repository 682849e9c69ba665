"""The checks of whole runs without a model (L6.H): whose keys and values lie on a page, and how little is computed.

Owns: worlds of requests that begin alike, the log of a run, and what it must say. A page is a list of places; what is
written to one is all tokens up to its position, so that a request which reads others' keys and values is seen at once.
The model is a function of the tokens so far: equal beginnings have equal answers.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smoke.checks.l6.a_pages import make_cache, tree_of
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()
MOST_STEPS = 900
SNAPSHOTS = 4  # steps between two looks at the whole tree
Beginning = tuple[int, ...]


def next_token(tokens: Sequence[int]) -> int:
    """Return what the model says after ``tokens``."""
    return (sum(tokens) * 7 + len(tokens)) % 3 + 1


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """Return the first ``count`` tokens that the model says after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Guest:
    """A request: it may have ``most`` new tokens and stops after ``real``. ``samples`` siblings ask the same."""

    name: str
    prompt: list[int]
    most: int
    real: int
    arrives: int = 0
    key: str | None = None
    priority: int = 0
    reports: bool = False
    samples: int = 1

    @property
    def tokens(self) -> list[int]:
        """All tokens that it will ever have."""
        return [*self.prompt, *answer(self.prompt, self.real)]


@dataclass(frozen=True)
class World:
    """The scheduler's options and who comes."""

    guests: tuple[Guest, ...]
    page_size: int = 4
    num_pages: int = 60
    policy: str = "fcfs"
    eviction: str = "lru"
    limits: Mapping[str, Any] = field(default_factory=dict)
    wait_for: int | None = None


def build_scheduler(world: World) -> Any:
    """Build the scheduler with the candidate's cache."""
    from mini_engine.scheduler.policy import make_policy
    from mini_engine.scheduler.scheduler import Scheduler, SchedulerLimits
    from mini_engine.scheduler.sharing import SharingLimits

    limits = SchedulerLimits(**world.limits, sharing=SharingLimits(world.wait_for, 32))
    cache = make_cache(world.page_size, world.eviction)
    return Scheduler(world.num_pages, world.page_size, limits, make_policy(world.policy), cache)


def requests_of(guest: Guest, arrival: int) -> list[Any]:
    """Build a guest's requests, the first of its samples first."""
    from mini_engine.sampler.params import SamplingParams
    from mini_engine.scheduler.request import Request, RequestOptions

    params = SamplingParams(max_new_tokens=guest.most, prompt_logprobs=0 if guest.reports else None)
    siblings: list[Any] = []
    for sample in range(guest.samples):
        siblings.append(
            Request(
                f"{guest.name}.{sample}",
                list(guest.prompt),
                params,
                arrival + sample,
                siblings=siblings,
                options=RequestOptions(guest.key, guest.priority),
            )
        )
    return siblings


def run(world: World, squeeze: bool = False) -> Values:
    """Run a world and log every step; ``squeeze`` lets requests in as if none would grow, so that pages run out."""
    scheduler = build_scheduler(world)
    guests = {guest.name: guest for guest in world.guests}
    steps = []
    arrived = 0
    for number in range(MOST_STEPS):
        for guest in (guest for guest in world.guests if guest.arrives == number):
            for request in requests_of(guest, arrived):
                scheduler.add(request)
                arrived += 1
        if not scheduler.has_work and number > max(guest.arrives for guest in world.guests):
            break
        scheduler.growth.ratio = 0.0 if squeeze else scheduler.growth.ratio
        batch = scheduler.schedule()
        step: Values = {"chunks": [chunk_values(chunk) for chunk in batch.chunks], "during": holders(scheduler)}
        known = {c.request.request_id: c.request.tokens(0, c.request.num_tokens) for c in batch.chunks if c.samples}
        scheduler.update(batch, {name: [next_token(tokens)] for name, tokens in known.items()})
        for request in list(scheduler.running):
            if request.num_output_tokens >= guests[request.request_id.partition(".")[0]].real:
                scheduler.finish(request, "length")
        last = number % SNAPSHOTS == 0 or not scheduler.has_work
        step |= {
            "after": holders(scheduler),
            "free": scheduler.allocator.num_free,
            "cached": scheduler.cache.num_pages,
            "preempted": len(batch.preempted),
            "tree": short_tree(scheduler.cache) if last else None,
        }
        steps.append(step)
    stats = scheduler.cache.stats
    evicted = scheduler.cache.evict(world.num_pages + 1)
    scheduler.allocator.free(evicted)
    return {
        "steps": steps,
        "free at the end": scheduler.allocator.num_free,
        "work": scheduler.has_work,
        "hit": [stats.num_uses, stats.num_tokens, stats.num_tokens_hit],
        "evicted": stats.num_pages_evicted - len(evicted),
    }


def chunk_values(chunk: Any) -> list[Any]:
    """Return a chunk: whose, first position, length, how many before it are copied and from whom."""
    source = chunk.copied_from.request_id if chunk.copied_from is not None else None
    return [chunk.request.request_id, chunk.start, chunk.num_tokens, chunk.num_copied, source]


def holders(scheduler: Any) -> dict[str, list[Any]]:
    """Return who runs with which pages, how many of them belong to the cache, and how much is computed."""
    return {r.request_id: [list(r.pages), list(r.hit.pages), r.num_computed_tokens] for r in scheduler.running}


def short_tree(cache: Any) -> list[list[Any]]:
    """Return the tree's nodes: key, tokens up to the end, pages, locks."""
    return [[str(node["key"]), node["path"], node["pages"], node["locks"]] for node in tree_of(cache)]


# The replay ---------------------------------------------------------------------------------------------------------


class Replay:
    """Writes and reads places as a log says, and notes everything that is not as it must be."""

    def __init__(self, world: World, where: str) -> None:
        """Start with nothing written."""
        self.world = world
        self.where = where
        self.guests = {guest.name: guest for guest in world.guests}
        self.written: dict[tuple[int, int], Beginning] = {}
        self.computed: Counter[str] = Counter()
        self.failures: list[Failure] = []

    def guest(self, name: str) -> Guest:
        """Return whose request it is."""
        return self.guests[name.partition(".")[0]]

    def tokens(self, name: str) -> list[int]:
        """Return all tokens that a request will ever have."""
        return self.guest(name).tokens

    def fail(self, case: str, expected: object, got: object) -> None:
        """Note a difference."""
        self.failures += differences(expected, got, None, f"{self.where}, {case}")

    def step(self, number: int, step: Values) -> None:
        """Replay one step: all copies, all writes, all reads; then count the pages."""
        held = {name: pages for name, (pages, _, _) in step["during"].items()}
        for name, start, _, copied, source in step["chunks"]:
            for position in range(start - copied, start):
                theirs, own = (self.place(held[who], position) for who in (source, name))
                self.written[own] = self.written.get(theirs, ())
        for name, start, count, copied, _ in step["chunks"]:
            if self.guest(name).reports and not self.computed[name]:
                self.fail(f"step {number}, {name} reports on its prompt and begins at", copied, start)
            self.computed[name] += count
            for position in range(start, start + count):
                self.written[self.place(held[name], position)] = tuple(self.tokens(name)[: position + 1])
        for name, start, count, _, _ in step["chunks"]:
            case = f"step {number}, {name} reads at each position the tokens up to it"
            self.read(case, held[name], self.tokens(name)[: start + count])
        self.count_pages(f"step {number}", step)
        if step["tree"] is not None:
            self.look_at(f"step {number}", step)

    def place(self, pages: Sequence[int], position: int) -> tuple[int, int]:
        """Return page and place of a position."""
        return pages[position // self.world.page_size], position % self.world.page_size

    def read(self, case: str, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Ask every position for its beginning."""
        for position in range(len(tokens)):
            want = tuple(tokens[: position + 1])
            got = self.written.get(self.place(pages, position), ())
            if want != got:
                self.fail(f"{case}, position {position}", list(want), list(got))
                return

    def count_pages(self, case: str, step: Values) -> None:
        """Ask that every page is free, cached or owned by one request."""
        own = [page for pages, hit, _ in step["after"].values() for page in pages[len(hit) :]]
        self.fail(f"{case}, pages with one owner", len(own), len(set(own)))
        total = step["free"] + step["cached"] + len(own)
        self.fail(f"{case}, free, cached and own pages", self.world.num_pages, total)
        for name, (pages, hit, computed) in step["after"].items():
            self.fail(f"{case}, {name}, pages of its hit", hit, pages[: len(hit)])
            if computed < len(hit) * self.world.page_size:
                self.fail(f"{case}, {name}, computed tokens", f"at least {len(hit) * self.world.page_size}", computed)

    def look_at(self, case: str, step: Values) -> None:
        """Ask that cached pages hold the tokens they are found by, and have a lock for each request that holds them."""
        size = self.world.page_size
        by_key: dict[tuple[str, int], int] = {}
        for key, path, pages, locks in step["tree"]:
            above = len(path) - size * len(pages)
            for place, page in enumerate(pages):
                by_key[key, page] = locks
                end = above + size * (place + 1)
                held = [self.written.get((page, offset), ()) for offset in range(size)]
                want = [tuple(path[: end - size + offset + 1]) for offset in range(size)]
                self.fail(
                    f"{case}, what is written on cached page {page}", [list(w) for w in want], list(map(list, held))
                )
        locks_wanted = Counter(
            (str(self.guest(name).key), page) for name, (_, hit, _) in step["after"].items() for page in hit
        )
        locked = {place: locks for place, locks in by_key.items() if locks}
        self.fail(f"{case}, locks by [key, page]", named(locks_wanted), named(locked))


def named(locks: Mapping[tuple[str, int], int]) -> dict[str, int]:
    """Return the same with names for keys."""
    return {f"{key}, page {page}": count for (key, page), count in sorted(locks.items())}


def replay(world: World, log: Values, where: str) -> Replay:
    """Replay a log to its first step with a fault."""
    replayed = Replay(world, where)
    for number, step in enumerate(log["steps"]):
        replayed.step(number, step)
        if replayed.failures:
            return replayed
    replayed.fail("work left at the end", False, log["work"])
    replayed.fail("pages free after everything was evicted", world.num_pages, log["free at the end"])
    return replayed


# Worlds -------------------------------------------------------------------------------------------------------------


def draw_guests(rng: random.Random, count: int) -> Iterator[Guest]:
    """Draw guests: stems that several begin with, talks that go on, keys, reports and samples."""
    stems = [[rng.randrange(1, 4) for _ in range(rng.choice([5, 8, 13]))] for _ in range(3)]
    talks: list[list[int]] = []
    step = 0
    for index in range(count):
        prompt = [*rng.choice(stems), *(rng.randrange(1, 4) for _ in range(rng.randrange(5)))]
        if talks and rng.random() < 0.4:
            prompt = [*rng.choice(talks), *(rng.randrange(1, 4) for _ in range(rng.choice([1, 2, 6])))]
        if len(prompt) > 30:
            prompt = prompt[: rng.randint(6, 30)]
        most = rng.randint(1, 14)
        guest = Guest(
            f"r{index}",
            prompt,
            most,
            rng.choice([most, rng.randint(1, most)]),
            step,
            rng.choice([None, None, None, "tenant"]),
            rng.choice([0, 0, 2]),
            rng.random() < 0.1,
            rng.choice([1, 1, 1, 1, 3]),
        )
        talks.append(guest.tokens)
        step += rng.choice([0, 0, 1, 4])
        yield guest


def worlds(seed: int) -> dict[str, World]:
    """Return worlds in which prompts come in chunks, pages run out, requests wait for each other and samples copy."""
    rng = random.Random(f"worlds {seed}")

    def guests() -> tuple[Guest, ...]:
        return tuple(draw_guests(rng, 22))

    return {
        "one at a time": World(guests(), 4, 24),
        "many at a time": World(guests(), 4, 60, "lpm", limits={"max_running_requests": 6}),
        "chunks of 5 rows": World(
            guests(), 2, 50, "dfs-weight", "lfu", {"max_running_requests": 5, "max_tokens_per_step": 5}
        ),
        "pages of one token run out": World(
            guests(), 1, 60, "fcfs", "lru", {"max_running_requests": 8, "max_tokens_per_step": 17, "preemption": True}
        ),
        "pages of 4 run out": World(
            guests(), 4, 14, "lpm", "priority", {"max_running_requests": 8, "preemption": True}, 4
        ),
        "they wait for each other": World(
            guests(), 2, 80, "lpm", "fifo", {"max_running_requests": 8, "max_tokens_per_step": 9}, 3
        ),
    }


def worlds_probe(seed: int) -> Values:
    """Run all worlds."""
    return {name: run(world, squeeze="run out" in name) for name, world in worlds(seed).items()}


def worlds_verdict(seed: int, got: Values) -> list[Failure]:
    """Replay every log; something must have been found, evicted and preempted, or nothing was proved."""
    failures: list[Failure] = []
    for name, world in worlds(seed).items():
        failures += replay(world, got[name], name).failures
    totals = {
        "tokens found": sum(log["hit"][2] for log in got.values()),
        "pages evicted": sum(log["evicted"] for log in got.values()),
        "preemptions": sum(step["preempted"] for log in got.values() for step in log["steps"]),
        "tokens copied": sum(chunk[3] for log in got.values() for step in log["steps"] for chunk in step["chunks"]),
    }
    for what, total in totals.items():
        if not total:
            failures.append(Failure("all worlds", what, "some", "none"))
    return failures[:6]


REGISTRY.add(
    "L6.H.places",
    "Whatever is shared, copied, evicted or preempted, a request reads at every position what its own tokens wrote; "
    "cached pages hold what they are found by, are locked as often as they are held, and none is lost.",
    worlds_probe,
    worlds_verdict,
    needs=("L6.F", "L6.G", "L6.I"),
    seconds=40.0,
)

# The bound ----------------------------------------------------------------------------------------------------------


def bound_prompts(seed: int, size: int) -> list[list[int]]:
    """Draw prompts that branch again and again. None is the beginning of another: each ends with a token of its own."""
    rng = random.Random(f"bound {seed} {size}")
    prompts: list[list[int]] = []
    for index in range(40):
        start = rng.choice(prompts) if prompts and rng.random() < 0.8 else []
        kept = start[: rng.randrange(len(start))] if start else []
        more = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        prompts.append([*kept, *more, 100 + index])
    rng.shuffle(prompts)
    return prompts


def bound_world(seed: int, size: int) -> World:
    """Return them all at once, one running at a time, with no more pages than the longest prompt has."""
    prompts = bound_prompts(seed, size)
    guests = tuple(Guest(f"r{index}", prompt, 1, 1) for index, prompt in enumerate(prompts))
    pages = max(-(-len(prompt) // size) for prompt in prompts)
    return World(guests, size, pages, "lpm", limits={"max_running_requests": 1, "max_steps_waited": 10**6})


def bound_probe(seed: int) -> Values:
    """Run them by the longest match."""
    return {f"page size {size}": run(bound_world(seed, size)) for size in (1, 4)}


def bound_verdict(seed: int, got: Values) -> list[Failure]:
    """Count the edges: different whole pages by all tokens up to their end, and each prompt's rest."""
    failures: list[Failure] = []
    for size in (1, 4):
        where = f"page size {size}"
        log = got[f"page size {size}"]
        prompts = bound_prompts(seed, size)
        edges = {tuple(prompt[:end]) for prompt in prompts for end in range(size, len(prompt) + 1, size)}
        least = size * len(edges) + sum(len(prompt) % size for prompt in prompts)
        replayed = replay(bound_world(seed, size), log, where)
        failures += replayed.failures
        total = sum(len(prompt) for prompt in prompts)
        failures += differences(least, sum(replayed.computed.values()), None, f"{where}, tokens computed of {total}")
        failures += differences([40, total, total - least], log["hit"], None, f"{where}, [requests, tokens, found]")
    return failures


REGISTRY.add(
    "L6.H.bound",
    "All prompts at hand, one at a time, the longest match first, no more pages than the longest prompt has: every "
    "edge of the tree is computed once, the least that there can be.",
    bound_probe,
    bound_verdict,
    needs=("L6.F", "L6.G", "L6.I"),
)
