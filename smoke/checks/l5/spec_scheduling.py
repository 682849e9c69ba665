"""The scheduler's rules as one would tell them: slow, with counts in place of pages, one row and one request at a time.

Owns: what a request is as plain numbers, the orders by comparing two requests at a time, the tree walk, sums by
counting, and ``Naive``, a scheduler that decides from the rules. Must not know: ``mini_engine``, page numbers.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

FIRST = Fraction(7, 10)
LEAST = Fraction(98, 1000)
DECAY_STEPS = 600
CLIP, SLACK = 4096, 20
LPM_LIMIT, AGING = 128, 16
Path = tuple[int, ...]
Chunks = list[list[Any]]  # name, start, number of tokens, whether it samples
StepPlan = dict[str, list[Any]]  # a step: "chunks" and "preempted"


class Ambiguous(Exception):  # noqa: N818
    """A product lies so close to a whole number that float rounding decides: no candidate can be blamed."""


@dataclass
class Person:
    """A request in numbers. ``real`` is how many tokens it will want in the end, whatever it may have."""

    name: str
    prompt: int
    most: int = 8
    arrival: int = 0
    outputs: int = 0
    computed: int = 0
    waited: int = 0
    pages: int = 0
    preemptions: int = 0
    state: str = "waiting"
    matched: int = 0  # tokens found in the prefix cache, in pages
    path: Path = ()
    real: int = 10**9

    @property
    def known(self) -> int:
        """Tokens of the prompt and of the output, counted."""
        return sum(1 for _ in [*range(self.prompt), *range(self.outputs)])

    @property
    def pending(self) -> int:
        """Tokens without keys, counted."""
        return len(range(self.computed, self.known))


def touched(tokens: int, page_size: int) -> int:
    """Return how many pages the tokens 0 … n - 1 fall into."""
    return len({token // page_size for token in range(tokens)})


def most_computed(person: Person) -> int:
    """Generate to the very end and return how many tokens were fed."""
    tokens = person.prompt
    fed = 0
    for _ in range(person.most):
        fed = tokens  # everything known is fed, then one more is known
        tokens += 1
    return fed


def shared_ceiling(ratio: Fraction, tokens: int) -> int:
    """Return the least whole number that is not below ``ratio * tokens``. Raises ``Ambiguous`` near a whole number."""
    exact = ratio * tokens
    rounds = ratio.denominator & (ratio.denominator - 1)  # a float holds the ratio only over a power of two
    if tokens and rounds and abs(exact - round(exact)) < Fraction(1, 10**9):
        raise Ambiguous
    whole = 0
    while whole < exact:
        whole += 1
    return whole


def expected_pages(person: Person, page_size: int, ratio: Fraction, preemption: bool) -> int:
    """Return the pages that a request is expected to hold at its end."""
    coming = len(range(person.known, most_computed(person)))
    if preemption:
        coming = shared_ceiling(ratio, CLIP if coming > CLIP else coming)
    return touched(person.known + coming, page_size)


def promised_pages(running: Iterable[Person], page_size: int, ratio: Fraction, preemption: bool) -> int:
    """Count page by page what running requests are expected to take yet."""
    pages = 0
    for person in running:
        for _ in range(person.pages, expected_pages(person, page_size, ratio, preemption)):
            pages += 1
    return pages


# Orders -------------------------------------------------------------------------------------------------------------


def goes_before(policy: str, one: Person, other: Person) -> bool:
    """Whether ``one`` goes before ``other``, by the rule and then by arrival."""
    if policy == "lof" and one.most != other.most:
        return one.most > other.most
    if policy == "lpm" and one.matched != other.matched:
        return one.matched > other.matched
    if policy == "shortest":
        lead = AGING * (one.waited - other.waited) - (one.pending - other.pending)
        if lead:
            return lead > 0
    return one.arrival < other.arrival


def in_order(policy: str, waiting: Sequence[Person]) -> list[Person]:
    """Take the best of what is left, again and again."""
    if policy == "lpm" and len(waiting) > LPM_LIMIT:
        policy = "fcfs"
    left = list(waiting)
    order = []
    while left:
        best = left[0]
        for person in left:
            if goes_before(policy, person, best):
                best = person
        order.append(best)
        left.remove(best)
    return order


def walk_faults(order: Sequence[str], people: Mapping[str, Person], prefix: Path = ()) -> Iterator[str]:
    """Walk the tree along an order and yield what is not depth first, heaviest branch first.

    Branches of equal weight may come in any order; a node's own requests come after its branches, by arrival.
    """
    depth = len(prefix)
    below = [people[name] for name in order]
    own = [person for person in below if len(person.path) == depth]
    if below[len(below) - len(own) :] != own:
        yield f"requests that end at the node {list(prefix)} come before some that lie deeper: {list(order)}"
        return
    if [p.arrival for p in own] != sorted(p.arrival for p in own):
        yield f"requests of the node {list(prefix)} do not come by arrival: {[p.name for p in own]}"
    branches: dict[int, list[str]] = {}
    last = None
    for person in below[: len(below) - len(own)]:
        node = person.path[depth]
        if node in branches and node != last:
            yield f"the branch {node} below {list(prefix)} is left and entered again: {list(order)}"
            return
        branches.setdefault(node, []).append(person.name)
        last = node
    weights = [len(branch) for branch in branches.values()]
    if weights != sorted(weights, reverse=True):
        yield f"the branches {list(branches)} below {list(prefix)} have {weights} requests: the heaviest goes first"
    for node, branch in branches.items():
        yield from walk_faults(branch, people, (*prefix, node))


# A scheduler by the rules -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """What a scheduler is configured with."""

    num_pages: int
    page_size: int = 1
    policy: str = "fcfs"
    max_running: int = 8
    budget: int | None = None
    preemption: bool = False
    max_waited: int = 256
    ratio: Fraction = FIRST  # of the estimate, to begin with; 1 without preemption


@dataclass
class Naive:
    """Decides from the rules. Every method does what its name says, and no request is looked at twice as fast."""

    rules: Rules
    waiting: list[Person] = field(default_factory=list)
    running: list[Person] = field(default_factory=list)
    ratio: Fraction = field(init=False)

    def __post_init__(self) -> None:
        """Expect the whole answer without preemption: nothing may run out."""
        self.ratio = self.rules.ratio if self.rules.preemption else Fraction(1)

    @property
    def free(self) -> int:
        """Pages that no request holds."""
        return self.rules.num_pages - sum(person.pages for person in self.running)

    def step(self) -> StepPlan:
        """Choose a step and return its chunks and who was preempted."""
        gone = self.make_room()
        rows = 10**9 if self.rules.budget is None else self.rules.budget
        chunks: Chunks = []
        decoding = [person for person in self.running if person.pending == 1]
        for person in [*decoding, *(p for p in self.running if p not in decoding)]:
            rows -= self.give_rows(person, rows, chunks)
        if not gone:
            self.let_in(rows, chunks)
            if chunks and self.rules.preemption:
                self.ratio -= (FIRST - LEAST) / DECAY_STEPS
                self.ratio = max(self.ratio, LEAST)
        for person in self.waiting:
            person.waited += 1
        return {"chunks": chunks, "preempted": gone}

    def give_rows(self, person: Person, rows: int, chunks: Chunks) -> int:
        """Give a request one row after the other while it wants one and there is one."""
        given = 0
        while given < rows and person.computed + given < person.known:
            given += 1
        if given:
            chunks.append([person.name, person.computed, given, person.computed + given == person.known])
        return given

    def missing(self, person: Person) -> int:
        """Count the pages that a request's known tokens lie on and that it does not hold."""
        return len(range(person.pages, touched(person.known, self.rules.page_size)))

    def make_room(self) -> list[str]:
        """Preempt requests until each that is left gets the pages of the known tokens."""
        gone = []
        while sum(self.missing(person) for person in self.running) > self.free:
            victim = self.victim()
            self.running.remove(victim)
            victim.pages = victim.computed = 0
            victim.preemptions += 1
            victim.state = "preempted"
            self.waiting.append(victim)
            gone.append(victim.name)
        for person in self.running:
            person.pages += self.missing(person)
        if gone:
            outputs = sum(person.outputs + SLACK for person in self.running)
            self.ratio = min(Fraction(1), Fraction(outputs, sum(person.most for person in self.running) + 1))
        return gone

    def victim(self) -> Person:
        """Sieve: the fewest outputs, then the longest prompt, then the latest arrival."""
        fewest = min(person.outputs for person in self.running)
        left = [person for person in self.running if person.outputs == fewest]
        longest = max(person.prompt for person in left)
        left = [person for person in left if person.prompt == longest]
        latest = max(person.arrival for person in left)
        return next(person for person in left if person.arrival == latest)

    def let_in(self, rows: int, chunks: Chunks) -> None:
        """Admit requests until one does not fit. None overtakes it."""
        while self.waiting and rows and len(self.running) < self.rules.max_running:
            aged = [person for person in self.waiting if person.waited >= self.rules.max_waited]
            first = in_order("fcfs", aged)[0] if aged else in_order(self.rules.policy, self.waiting)[0]
            size = self.rules.page_size
            ratio = self.ratio
            preemption = self.rules.preemption
            promised = promised_pages(self.running, size, ratio, preemption)
            if expected_pages(first, size, ratio, preemption) + promised > self.free:
                return
            self.waiting.remove(first)
            first.state, first.computed, first.pages = "running", 0, touched(first.known, size)
            self.running.append(first)
            rows -= self.give_rows(first, rows, chunks)

    def compute(self, chunks: Chunks) -> None:
        """Do as if the step had run."""
        people = {person.name: person for person in self.running}
        for name, start, count, samples in chunks:
            people[str(name)].computed = int(start) + int(count)
            people[str(name)].outputs += int(samples)

    def leave(self, name: str) -> None:
        """Take a request out, wherever it is."""
        for group in (self.waiting, self.running):
            group[:] = [person for person in group if person.name != name]


# Worlds -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """A run: the rules, the requests, who arrives before which step and who is aborted before which."""

    rules: Rules
    people: tuple[Person, ...]
    arrivals: Mapping[int, list[str]]
    aborts: Mapping[int, list[str]]

    @property
    def most_steps(self) -> int:
        """More steps than any scheduler needs that computes something in every step."""
        return max(self.arrivals) + 10 + 3 * sum(p.prompt + 2 * p.most for p in self.people)

    def enter(self, step: int, requests: Mapping[str, Any], scheduler: Any, done: list[Any]) -> bool:
        """Tell the candidate's scheduler who comes and who is aborted before a step; return whether more may happen.

        Mutates the scheduler, and ``done``, which is told of each call.
        """
        for name in self.arrivals.get(step, []):
            done.append(f"add {name}")
            scheduler.add(requests[name])
        for name in self.aborts.get(step, []):
            done.append(f"finish {name} (abort)")
            scheduler.finish(requests[name], "abort")
        return step <= max(self.arrivals) or scheduler.has_work


def draw_world(seed: str, policy: str, preemption: bool, count: int) -> World:
    """Draw a world in which pages are short, some requests stop early and some are aborted.

    With preemption answers are long and the estimate begins low, or hardly any request would be preempted.
    """
    rng = random.Random(f"world {seed} {policy} {preemption}")
    shapes = [(6, 120), (20, 70), (9, 90)] if preemption else [(6, 26), (20, 18), (30, 9)]
    size, (longest_prompt, longest_answer) = rng.choice([1, 2, 4]), rng.choice(shapes)
    people = []
    for index in range(count):
        # 0.7 of a multiple of 10 is a whole number, which floats may miss.
        most = rng.choice([m for m in range(1, longest_answer + 1) if m % 10 != 1 or m == 1])
        person = Person(f"r{index}", rng.randint(1, longest_prompt), most, index)
        person.real = rng.choice([most, most if preemption else rng.randint(1, most)])
        people.append(person)
    rules = Rules(
        int(touched(longest_prompt + longest_answer, size) * rng.choice([1.3, 1.7, 2.5])) + 1,
        size,
        policy,
        max_running=rng.choice([7, 32] if preemption else [3, 7, 32]),
        budget=rng.choice([7, 17, None] if preemption else [3, 7, 17, None]),
        preemption=preemption,
        max_waited=rng.choice([30, 256] if preemption else [6, 30, 256]),
        ratio=LEAST,
    )
    return World(rules, tuple(people), *draw_times(rng, people))


def draw_times(rng: random.Random, people: Sequence[Person]) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """Draw before which step each request comes, and before which a few are aborted."""
    arrivals: dict[int, list[str]] = {}
    aborts: dict[int, list[str]] = {}
    step = 0
    for person in people:
        step += rng.choice([0, 0, 0, 1, 2])
        arrivals.setdefault(step, []).append(person.name)
        if rng.random() < 0.08:
            aborts.setdefault(step + rng.randint(0, 30), []).append(person.name)
    return arrivals, aborts


@dataclass
class Story:
    """What happened: per step its chunks and who was preempted, then what became of each request.

    ``whole`` is false if the story ends early because float rounding would have decided.
    """

    steps: list[StepPlan] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)
    whole: bool = True


def tell(world: World) -> Story:
    """Live through a world by the rules."""
    naive = Naive(world.rules)
    story = Story()
    people = {p.name: Person(p.name, p.prompt, p.most, p.arrival, real=p.real) for p in world.people}
    for step in range(world.most_steps):
        naive.waiting += [people[name] for name in world.arrivals.get(step, [])]
        for name in world.aborts.get(step, []):
            naive.leave(name)
        if step > max(world.arrivals) and not naive.waiting and not naive.running:
            break
        try:
            planned = naive.step()
        except Ambiguous:
            story.whole = False
            return story
        story.steps.append(planned)
        naive.compute(planned["chunks"])
        for person in list(naive.running):
            if person.outputs == person.real:
                naive.leave(person.name)
    story.outputs = {name: person.outputs for name, person in people.items()}
    return story


def token(name: str, position: int) -> int:
    """Return the token that a made-up model samples for a request at a position."""
    return (int(name[1:]) * 31 + position * 7) % 1009
