"""The scheduler without a model: tokens are made up, everything else is real.

A simulated world draws arrivals, lengths, budgets, pages, policies and aborts from one seed and asks after every step
whether the books balance. Rules (victims, order, refusal, aging) are compared with a brute force written here.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.budget import DECAY_STEPS, FIRST_RATIO, LEAST_RATIO, GrowthEstimate
from mini_engine.scheduler.policy import LPM_QUEUE_LIMIT, POLICIES, make_policy, register_policy
from mini_engine.scheduler.prefix_cache import NullPrefixCache, PrefixHit
from mini_engine.scheduler.request import FinishReason, Request, RequestState, RequestTimes
from mini_engine.scheduler.scheduler import ScheduledBatch, Scheduler, SchedulerLimits


def make_request(name: int, prompt: int, most: int, arrival: int | None = None) -> Request:
    return Request(str(name), [7] * prompt, SamplingParams(max_new_tokens=most), name if arrival is None else arrival)


def make_scheduler(
    pages: int = 100, page_size: int = 4, policy: str = "fcfs", cache: NullPrefixCache | None = None, **limits: object
) -> Scheduler:
    limits = {"max_running_requests": 8} | limits
    return Scheduler(pages, page_size, SchedulerLimits(**limits), make_policy(policy), cache)


def compute(scheduler: Scheduler, batch: ScheduledBatch) -> None:
    """Do as if the step had run: every sampled token is the length of the sequence."""
    scheduler.update(batch, {c.request.request_id: c.request.num_tokens for c in batch.chunks if c.samples})


def run_step(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    compute(scheduler, batch)
    for request in list(scheduler.running):
        if request.num_output_tokens == request.params.max_new_tokens:
            scheduler.finish(request, "length")
    return batch


def names(requests: Sequence[Request]) -> list[str]:
    return [request.request_id for request in requests]


class Optimist(GrowthEstimate):
    """Expects that nobody grows, so that pages run out in almost every step."""

    def decay(self) -> None:
        self.ratio = 0.0

    def raise_after_preemption(self, running: Iterable[Request]) -> None:
        self.ratio = 0.0


@dataclass
class World:
    """A scheduler, the requests that will come, and what each is really going to do."""

    seed: int
    policy: str
    preemption: bool
    count: int = 250
    requests: list[Request] = field(default_factory=list)
    living: dict[str, Request] = field(default_factory=dict)  # added and not finished
    real_lengths: dict[str, int] = field(default_factory=dict)
    num_preemptions: int = 0
    num_steps: int = 0
    num_aborts: int = 0

    def __post_init__(self) -> None:
        dice = self.dice = random.Random(f"{self.seed} {self.policy} {self.preemption}")
        # A third of the worlds: one page a token, long answers, a pool for little more than one request.
        tight = self.seed % 3 == 0
        self.page_size = 1 if tight else dice.choice([1, 1, 2, 4, 16])
        longest_prompt, longest_answer = (3, 30) if tight else dice.choice([(3, 30), (20, 20), (60, 8), (1, 5)])
        fitting = -(-(longest_prompt + longest_answer) // self.page_size)
        self.budget = dice.choice([17, 64, None] if tight else [1, 2, 5, 17, 64, None])
        self.scheduler = make_scheduler(
            pages=int(fitting * (1.3 if tight else dice.choice([1, 1.3, 2, 5]))) + 1,
            page_size=self.page_size,
            policy=self.policy,
            max_running_requests=32 if tight else dice.choice([1, 2, 7, 32]),
            max_tokens_per_step=self.budget,
            preemption=self.preemption,
            max_steps_waited=dice.choice([3, 40, 256]),
        )
        if self.preemption and (tight or dice.random() < 0.5):
            self.scheduler.growth = Optimist(True)
        self.abort_rate = dice.choice([0, 0, 0.02, 0.3])
        self.arrivals_per_step = dice.choice([0.2, 1, 5, self.count][2 * tight :])
        for name in range(self.count):
            most = dice.randint(1, longest_answer)
            self.requests.append(make_request(name, dice.randint(1, longest_prompt), most))
            self.real_lengths[str(name)] = dice.choice([most, dice.randint(1, most)])

    def run(self) -> None:
        """Run until nothing is left to do; every step must compute something, so the number of steps is bounded."""
        coming = list(reversed(self.requests))
        bound = 10 + 3 * sum(r.num_prompt_tokens + 2 * r.params.max_new_tokens for r in self.requests)
        for _ in range(bound + int(self.count / self.arrivals_per_step)):
            for _ in range(self.num_arrivals()):
                if coming:
                    request = coming.pop()
                    self.scheduler.add(request)
                    self.living[request.request_id] = request
            self.abort_some()
            if not coming and not self.scheduler.has_work:
                break
            self.step()
        assert all(r.state is RequestState.FINISHED for r in self.requests), "some request never ended"
        assert self.scheduler.allocator.num_free == self.scheduler.allocator.num_pages, "pages leaked"

    def num_arrivals(self) -> int:
        whole = int(self.arrivals_per_step)
        return whole + (self.dice.random() < self.arrivals_per_step - whole)

    def abort_some(self) -> None:
        while self.dice.random() < self.abort_rate:
            if self.living:
                self.finish(self.dice.choice(list(self.living.values())), "abort")
                self.num_aborts += 1
                self.check_places()

    def finish(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request, reason)
        self.scheduler.finish(request, "error")  # a second end changes nothing
        assert (request.state, request.finish_reason, request.pages) == (RequestState.FINISHED, reason, [])
        del self.living[request.request_id]

    def step(self) -> None:
        before = list(self.scheduler.running)
        outputs = {id(r): list(r.output_ids) for r in self.living.values()}
        pending = {id(r): r.num_pending_tokens for r in before}
        expected_victims = victims(self.scheduler)
        batch = self.scheduler.schedule()
        assert batch.preempted == expected_victims
        self.num_preemptions += len(batch.preempted)
        self.num_steps += 1
        self.check_batch(batch, [r for r in before if r not in batch.preempted], pending)
        self.check_places()
        assert all(r.output_ids == outputs[id(r)] for r in self.living.values()), "scheduling changed an output"
        computed = {id(r): r.num_computed_tokens for r in self.scheduler.running}
        compute(self.scheduler, batch)
        for chunk in batch.chunks:
            assert chunk.request.num_computed_tokens == computed[id(chunk.request)] + chunk.num_tokens
            assert chunk.request.num_output_tokens == len(outputs[id(chunk.request)]) + chunk.samples
            if chunk.request.num_output_tokens == self.real_lengths[chunk.request.request_id]:
                self.finish(chunk.request, self.dice.choice(["stop", "length", "error"]))
        self.check_places()

    def check_batch(self, batch: ScheduledBatch, before: list[Request], pending: Mapping[int, int]) -> None:
        """The step is within its limits, in its order, and wastes nothing."""
        scheduler, chunks = self.scheduler, batch.chunks
        assert len(scheduler.running) <= scheduler.limits.max_running_requests
        assert not scheduler.running or chunks, "requests run and nothing is computed"
        assert scheduler.running or not scheduler.waiting or batch.preempted, "the pool is empty and nobody is let in"
        assert self.budget is None or batch.num_tokens <= self.budget
        assert len({id(c.request) for c in chunks}) == len(chunks)
        kinds = [2 if c.request not in before else int(pending[id(c.request)] > 1) for c in chunks]
        assert not batch.preempted or 2 not in kinds, "who was sent back would be let in again at once"
        assert kinds == sorted(kinds), "decodes, then chunks of what runs, then new requests"
        for chunk in chunks:
            request = chunk.request
            assert chunk.start == request.num_computed_tokens
            assert chunk.num_tokens == request.num_scheduled_tokens >= 1
            assert chunk.samples == (chunk.start + chunk.num_tokens == request.num_tokens)
            assert request.num_tokens <= len(request.pages) * self.page_size
        cut = [chunk for chunk in chunks if not chunk.samples]
        assert cut in ([], chunks[-1:]), "only the last chunk may be cut"
        if cut or len(chunks) < len(scheduler.running):
            assert batch.num_tokens == self.budget, "something was left over and someone was left out"

    def check_places(self) -> None:
        """Every page and every request is in exactly one place."""
        scheduler = self.scheduler
        scheduler.check_pages()
        owned = [page for request in scheduler.running for page in request.pages]
        assert len(set(owned)) == len(owned)
        assert len(owned) + scheduler.allocator.num_free == scheduler.allocator.num_pages
        assert not any(scheduler.allocator.is_free(page) for page in owned), "a page is free and in use"
        places = Counter(names([*scheduler.waiting, *scheduler.running]))
        assert places == Counter(dict.fromkeys(self.living, 1)), "a request is lost, in two places, or not gone"
        running = set(map(id, scheduler.running))
        for request in self.living.values():
            if id(request) in running:
                assert request.state is RequestState.RUNNING
                request.check()
            else:
                past = RequestState.PREEMPTED if request.num_preemptions else RequestState.WAITING
                assert (request.state, request.pages) == (past, [])
                assert request.num_computed_tokens == request.num_scheduled_tokens == 0


def victims(scheduler: Scheduler) -> list[Request]:
    """Brute force: who must go so that everybody left gets pages. Fewest outputs, then longest prompt, then newest."""
    left, gone = list(scheduler.running), []
    page_size = scheduler.page_size

    def short() -> int:
        return sum(-(-r.num_tokens // page_size) - len(r.pages) for r in left)

    free = scheduler.allocator.num_free
    while short() > free:
        fewest = min(r.num_output_tokens for r in left)
        candidates = [r for r in left if r.num_output_tokens == fewest]
        longest = max(r.num_prompt_tokens for r in candidates)
        victim = max((r for r in candidates if r.num_prompt_tokens == longest), key=lambda r: r.arrival)
        left.remove(victim)
        gone.append(victim)
        free += len(victim.pages)
    return gone


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("preemption", [False, True])
def test_ten_thousand_requests_and_the_books_balance_after_every_step(policy: str, preemption: bool) -> None:
    """12 cases of 900 requests in nine worlds each."""
    worlds = [World(seed, policy, preemption, count=100) for seed in range(9)]
    for world in worlds:
        world.run()
    assert sum(world.num_aborts for world in worlds) > 10
    rates = [world.num_preemptions / world.num_steps for world in worlds]
    assert sum(rate > 0.3 for rate in rates) >= 2 if preemption else max(rates) == 0


def test_ten_thousand_waiting_requests_take_seconds_and_not_minutes() -> None:
    """Every step used to copy every waiting prompt, to look it up in a prefix cache that no policy asked about."""
    scheduler = make_scheduler(pages=4000, page_size=16, max_running_requests=256, max_tokens_per_step=8192)
    for name in range(10_000):
        scheduler.add(make_request(name, 40, 5))
    copied = 0
    plain = Request.tokens

    def tokens(self: Request, start: int, stop: int) -> list[int]:
        nonlocal copied
        copied += 1
        return plain(self, start, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "tokens", tokens)
        steps = 0
        while scheduler.has_work:
            run_step(scheduler)
            steps += 1
    assert steps < 10_000 * 5 / 256 * 2
    assert copied <= 4 * 10_000, f"{copied} copies for 10,000 requests"  # a look-up and two offers each


def test_a_request_that_could_never_fit_is_refused_at_once_with_the_numbers() -> None:
    """10 pages of 4 tokens hold 40 keys; a prompt of 31 with 10 new tokens needs exactly 40, the last has no key."""
    scheduler = make_scheduler(pages=10, page_size=4)
    scheduler.add(make_request(0, 31, 10))
    with pytest.raises(ValueError, match=r"request 1 may need 11 pages \(32 prompt tokens and max_new_tokens=10, 4 "):
        scheduler.add(make_request(1, 32, 10))
    assert names(scheduler.waiting) == ["0"]
    for _ in range(10):
        run_step(scheduler)
    assert not scheduler.has_work
    assert scheduler.allocator.num_free == 10


def test_nobody_overtakes_the_head_of_the_line() -> None:
    """8 pages: A holds 4, B needs 6 and waits; C would fit beside A and waits too, or B could wait for ever."""
    scheduler = make_scheduler(pages=8, page_size=1)
    a, b, c = make_request(0, 2, 3), make_request(1, 5, 2), make_request(2, 1, 1)
    for request in (a, b, c):
        scheduler.add(request)
    for _ in range(3):
        batch = run_step(scheduler)
        assert [chunk.request for chunk in batch.chunks] == [a]
        assert scheduler.waiting == [b, c]
    run_step(scheduler)
    assert (a.num_output_tokens, b.num_output_tokens, c.num_output_tokens) == (3, 1, 1)


def test_the_victim_has_the_fewest_outputs_then_the_longest_prompt_then_came_last() -> None:
    cases = [
        ([(9, 2), (3, 1), (9, 3)], 1),  # (prompt, outputs): fewest outputs, whatever the prompt
        ([(3, 2), (9, 2), (4, 3)], 1),  # a tie: the longest prompt
        ([(5, 2), (5, 2), (5, 2)], 2),  # another: the newest
        ([(5, 0), (8, 4), (2, 0)], 0),
    ]
    for shapes, expected in cases:
        scheduler = make_scheduler(pages=sum(p + o for p, o in shapes), page_size=1, preemption=True)
        for name, (prompt, outputs) in enumerate(shapes):
            request = make_request(name, prompt, 9)
            request.output_ids, request.state = [7] * max(outputs - 1, 0), RequestState.RUNNING
            request.pages = scheduler.allocator.allocate(request.num_tokens)
            request.num_computed_tokens = request.num_tokens - 1
            request.output_ids += [7]  # the newest token wants a page of its own
            scheduler.running.append(request)
        scheduler.allocator.allocate(scheduler.allocator.num_free)
        assert names(scheduler.schedule().preempted) == [str(expected)]


def test_a_preempted_request_keeps_its_output_and_its_place_and_computes_all_of_it_again() -> None:
    scheduler = make_scheduler(pages=12, page_size=1, preemption=True, max_tokens_per_step=5)
    scheduler.growth = Optimist(True)
    old, new = make_request(0, 4, 8), make_request(1, 4, 6)
    scheduler.add(old)
    scheduler.add(new)
    while not (batch := run_step(scheduler)).preempted:
        pass
    assert batch.preempted == [new]
    assert (new.state, new.num_computed_tokens, new.num_preemptions, new.pages) == (RequestState.PREEMPTED, 0, 1, [])
    kept = list(new.output_ids)
    assert len(kept) >= 1
    later = make_request(2, 1, 1)
    scheduler.add(later)
    while new.state is not RequestState.RUNNING:
        batch = run_step(scheduler)
        assert later.state is RequestState.WAITING, "a later one came first"
    (first,) = [chunk for chunk in batch.chunks if chunk.request is new]
    assert first.start == 0
    while scheduler.has_work:
        run_step(scheduler)
    assert new.output_ids[: len(kept)] == kept
    assert new.output_ids == [4, 5, 6, 7, 8, 9]
    assert old.output_ids == [4, 5, 6, 7, 8, 9, 10, 11]


def test_a_chunk_that_does_not_reach_the_newest_token_samples_nothing() -> None:
    scheduler = make_scheduler(max_tokens_per_step=4)
    request = make_request(0, 10, 2)
    scheduler.add(request)
    seen = [(c.start, c.num_tokens, c.samples) for _ in range(4) for c in run_step(scheduler).chunks]
    assert seen == [(0, 4, False), (4, 4, False), (8, 2, True), (10, 1, True)]
    assert request.output_ids == [10, 11]


def test_the_worked_example_a_chunk_a_decode_and_a_new_prompt_in_one_step() -> None:
    scheduler = make_scheduler(max_tokens_per_step=9, max_running_requests=3)
    decoding, long, short = make_request(0, 3, 9), make_request(1, 11, 9), make_request(2, 6, 9)
    for request in (decoding, long, short):
        scheduler.add(request)
    run_step(scheduler)  # 3 + 6 of 11
    batch = run_step(scheduler)
    assert [(c.request, c.start, c.num_tokens, c.samples) for c in batch.chunks] == [
        (decoding, 3, 1, True),
        (long, 6, 5, True),
        (short, 0, 3, False),
    ]


def test_decodes_come_before_chunks_in_any_order_of_admission() -> None:
    """Whoever is in the middle of a prompt was admitted last, but no code relies on it."""
    scheduler = make_scheduler(max_tokens_per_step=4)
    decoding, long = make_request(0, 3, 9), make_request(1, 11, 9)
    scheduler.add(decoding)
    scheduler.add(long)
    run_step(scheduler)
    scheduler.running.reverse()
    assert [(c.request, c.num_tokens) for c in scheduler.schedule().chunks] == [(decoding, 1), (long, 3)]


# ---- how much room is promised ----


def test_the_ratio_decays_a_little_every_quiet_step_and_jumps_after_a_preemption() -> None:
    growth = GrowthEstimate(preemption=True)
    values = [growth.ratio]
    for _ in range(DECAY_STEPS + 5):
        growth.decay()
        values.append(growth.ratio)
    assert values[0] == FIRST_RATIO == 0.7
    assert values[300] == pytest.approx((FIRST_RATIO + LEAST_RATIO) / 2)
    assert values[-1] == LEAST_RATIO == pytest.approx(0.14 * 0.7)
    left = [make_request(0, 3, 100), make_request(1, 3, 50)]
    left[0].output_ids, left[1].output_ids = [1] * 30, [1] * 5
    growth.raise_after_preemption(left)
    assert growth.ratio == pytest.approx((35 + 2 * 20) / (150 + 1))
    growth.raise_after_preemption([replace(left[1], output_ids=[1] * 49)])
    assert growth.ratio == 1.0


def test_without_preemption_the_whole_answer_is_reserved_and_the_ratio_stays() -> None:
    growth = GrowthEstimate(preemption=False)
    growth.decay()
    assert growth.ratio == 1.0
    assert growth.expected_pages(make_request(0, 5, 9000), 4) == -(-(5 + 8999) // 4)


def test_an_estimate_is_clipped_and_never_less_than_what_is_there() -> None:
    growth = GrowthEstimate(preemption=True)
    assert growth.expected_pages(make_request(0, 10, 100_000), 1) == 10 + -(-4096 * 7 // 10)
    assert growth.expected_pages(make_request(0, 10, 1), 4) == 3
    running = make_request(1, 10, 11)
    running.pages = [0, 1, 2, 3, 4]
    assert growth.promised_pages([running], 4) == 0  # 17 tokens are expected, 20 fit
    running.pages = [0, 1, 2]
    assert growth.promised_pages([running], 4) == 2


def test_promises_to_running_requests_count_when_the_next_one_is_let_in() -> None:
    """20 pages of one token. Two requests of 2 + 9 need 10 each in the end: exactly two fit, a third does not."""
    scheduler = make_scheduler(pages=20, page_size=1)
    for name in range(3):
        scheduler.add(make_request(name, 2, 9))
    run_step(scheduler)
    assert names(scheduler.running) == ["0", "1"]
    scheduler = make_scheduler(pages=19, page_size=1)
    for name in range(3):
        scheduler.add(make_request(name, 2, 9))
    run_step(scheduler)
    assert names(scheduler.running) == ["0"]


def steps_until_served(policy: str, preemption: bool, max_steps_waited: int) -> int:
    """One request that its policy likes least, 20 before it, and a stream after it that is more than fits."""
    scheduler = make_scheduler(
        pages=40,
        page_size=1,
        policy=policy,
        max_running_requests=4,
        max_tokens_per_step=8,
        preemption=preemption,
        max_steps_waited=max_steps_waited,
    )
    for name in range(20):
        scheduler.add(make_request(name, 3, 9))
    poor = make_request(20, 1, 2) if policy == "lof" else make_request(20, 30, 2)
    scheduler.add(poor)
    for step in range(400):
        scheduler.add(make_request(21 + step, 3, 9))
        run_step(scheduler)
        scheduler.check_pages()
        if poor.state is RequestState.FINISHED:
            return step
    return 400


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("preemption", [False, True])
def test_no_request_starves_while_others_keep_coming(policy: str, preemption: bool) -> None:
    """50 steps until it goes first, then at most the 20 older ones, at least two at a time, 12 steps each."""
    assert steps_until_served(policy, preemption, max_steps_waited=50) <= 50 + 20 / 2 * 12 + 30


def test_without_aging_the_same_stream_starves_it() -> None:
    """The negative control: longest first never comes to a short one."""
    assert steps_until_served("lof", preemption=False, max_steps_waited=10**9) == 400


@pytest.mark.parametrize("policy", ["lof", "shortest"])
def test_a_preempted_request_keeps_its_age(policy: str) -> None:
    """A long prompt, no growth expected, pages short in every other step: it is sent back again and again.

    It used to start its 50 steps anew each time, and took 228 and 208 steps instead of about 75.
    """
    scheduler = make_scheduler(
        pages=33, page_size=1, policy=policy, max_tokens_per_step=8, preemption=True, max_steps_waited=50
    )
    scheduler.growth = Optimist(True)
    for name in range(20):
        scheduler.add(make_request(name, 3, 9))
    poor = make_request(20, 25, 8)
    scheduler.add(poor)
    for step in range(120):
        scheduler.add(make_request(21 + step, random.Random(step).choice([1, 3, 6]), 9))
        run_step(scheduler)
    assert poor.state is RequestState.FINISHED


# ---- policies ----


def hits_of(paths: Mapping[int, Sequence[int]]) -> dict[str, PrefixHit]:
    return {str(name): PrefixHit(tuple(range(len(path))), tuple(path)) for name, path in paths.items()}


def shuffled_requests(dice: random.Random, count: int) -> list[Request]:
    requests = [make_request(name, dice.randint(1, 50), dice.randint(1, 50)) for name in range(count)]
    for request in requests:
        request.steps_waited = dice.choice([0, 0, 1, 2, 5])
        request.output_ids = [7] * dice.choice([0, 0, 3])
    dice.shuffle(requests)
    return requests


@pytest.mark.parametrize("seed", range(20))
def test_policies_against_their_definitions(seed: int) -> None:
    """Each by selection: take the best of what is left, again and again."""
    dice = random.Random(seed)
    waiting = shuffled_requests(dice, 30)
    hits = {r.request_id: PrefixHit(tuple(range(dice.randint(0, 4)))) for r in waiting}
    better = {
        "fcfs": lambda a, b: a.arrival < b.arrival,
        "lpm": lambda a, b: (
            len(hits[a.request_id].pages) > len(hits[b.request_id].pages)
            or (len(hits[a.request_id].pages) == len(hits[b.request_id].pages) and a.arrival < b.arrival)
        ),
        "lof": lambda a, b: (
            a.params.max_new_tokens > b.params.max_new_tokens
            or (a.params.max_new_tokens == b.params.max_new_tokens and a.arrival < b.arrival)
        ),
        "shortest": lambda a, b: (
            a.num_tokens - 16 * a.steps_waited < b.num_tokens - 16 * b.steps_waited
            or (a.num_tokens - 16 * a.steps_waited == b.num_tokens - 16 * b.steps_waited and a.arrival < b.arrival)
        ),
    }
    for name, wins in better.items():
        before, left, expected = list(waiting), list(waiting), []
        while left:
            best = next(a for a in left if all(a is b or wins(a, b) for b in left))
            expected.append(best)
            left.remove(best)
        assert make_policy(name).order(waiting, hits) == expected, name
        assert waiting == before, "a policy must not touch the queue"


def test_longest_prefix_match_gives_up_in_a_long_queue() -> None:
    """At 128 it still sorts by match, at 129 by arrival."""
    for count, first in ((LPM_QUEUE_LIMIT, str(LPM_QUEUE_LIMIT - 1)), (LPM_QUEUE_LIMIT + 1, "0")):
        waiting = [make_request(name, 5, 5) for name in range(count)]
        hits = {str(name): PrefixHit(tuple(range(name))) for name in range(count)}
        assert make_policy("lpm").order(waiting, hits)[0].request_id == first


def depth_first(waiting: Sequence[Request], paths: Mapping[int, Sequence[int]]) -> list[str]:
    """Build the tree and walk it: heavier children first, then older ones; a node's own requests after its children."""

    def walk(prefix: tuple[int, ...]) -> list[Request]:
        below = [r for r in waiting if tuple(paths[int(r.request_id)])[: len(prefix)] == prefix]
        children = Counter(
            tuple(paths[int(r.request_id)])[len(prefix)] for r in below if len(paths[int(r.request_id)]) > len(prefix)
        )
        out = []
        for child in sorted(children, key=lambda node: (-children[node], node)):
            out += walk((*prefix, child))
        return out + sorted((r for r in below if r not in out), key=lambda r: r.arrival)

    return names(walk(()))


@pytest.mark.parametrize("seed", range(30))
def test_depth_first_by_weight_against_a_walk_of_the_tree(seed: int) -> None:
    dice = random.Random(seed)
    parents = {node: dice.randrange(node) for node in range(1, 15)}  # 0 is the root

    def path(node: int) -> list[int]:
        return [*path(parents[node]), node] if node else []

    waiting = shuffled_requests(dice, 25)
    paths = {int(r.request_id): path(dice.randrange(15)) for r in waiting}
    assert names(make_policy("dfs-weight").order(waiting, hits_of(paths))) == depth_first(waiting, paths)


def test_the_random_policy_is_seeded_and_shuffles_anew_each_time() -> None:
    waiting = [make_request(name, 5, 5) for name in range(50)]
    one, two = make_policy("random"), make_policy("random")
    first, second = one.order(waiting, {}), one.order(waiting, {})
    assert first != second
    assert (first, second) == (two.order(waiting, {}), two.order(waiting, {}))
    assert sorted(names(first)) == sorted(names(waiting))
    assert POLICIES["random"]().order(waiting, {}) == first


def test_the_registry_takes_new_policies_and_names_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_engine.scheduler.policy.POLICIES", dict(POLICIES))

    class Backwards:
        def order(self, waiting: Sequence[Request], hits: object) -> list[Request]:
            return sorted(waiting, key=lambda request: -request.arrival)

    register_policy("lifo", Backwards)
    assert isinstance(make_policy("lifo"), Backwards)
    with pytest.raises(ValueError, match="'fcfs' exists already"):
        register_policy("fcfs", Backwards)
    with pytest.raises(ValueError, match="no policy 'lru'; choose one of fcfs, lpm, dfs-weight, lof, random, shortest"):
        make_policy("lru")


# ---- with a prefix cache ----


class SmallCache(NullPrefixCache):
    """Knows some prompts by their first token; each page is evictable until locked, and gone when evicted."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[int, ...]] = {}
        self.locks: Counter[int] = Counter()

    @property
    def num_pages(self) -> int:
        return sum(map(len, self.pages.values()))

    @property
    def num_evictable(self) -> int:
        return sum(len(pages) for key, pages in self.pages.items() if not self.locks[key])

    def match(self, token_ids: Sequence[int], key: str | None = None) -> PrefixHit:
        key = token_ids[0] if token_ids else None
        return PrefixHit(self.pages[key], (key,)) if key in self.pages else PrefixHit()

    def lock(self, hit: PrefixHit) -> int:
        before = self.num_evictable
        self.locks.update(hit.path)
        return before - self.num_evictable

    def unlock(self, hit: PrefixHit) -> None:
        self.locks.subtract(hit.path)
        assert all(count >= 0 for count in self.locks.values()), "unlocked twice"

    def evict(self, count: int) -> list[int]:
        gone: list[int] = []
        for key in [key for key in self.pages if not self.locks[key]]:
            if len(gone) < count:
                gone += self.pages.pop(key)
        return gone


def scheduler_with_cache(pages: int, cached: Mapping[int, int], **limits: object) -> tuple[Scheduler, SmallCache]:
    cache = SmallCache()
    scheduler = make_scheduler(pages=pages, page_size=1, cache=cache, **limits)
    for key, count in cached.items():
        cache.pages[key] = tuple(scheduler.allocator.allocate(count))
    return scheduler, cache


def prompt_request(name: int, first: int, prompt: int, most: int) -> Request:
    return Request(str(name), [first] * prompt, SamplingParams(max_new_tokens=most), name)


def test_a_hit_is_used_locked_and_given_back() -> None:
    scheduler, cache = scheduler_with_cache(10, {1: 4})
    request = prompt_request(0, 1, 6, 2)
    scheduler.add(request)
    chunk = scheduler.schedule().chunks[0]
    assert (chunk.start, chunk.num_tokens) == (4, 2)
    assert tuple(request.pages[:4]) == cache.pages[1]
    assert cache.num_evictable == 0
    scheduler.check_pages()
    scheduler.finish(request, "abort")
    assert cache.num_evictable == 4
    assert scheduler.allocator.num_free == 6
    scheduler.check_pages()


def test_locking_a_hit_takes_its_pages_from_what_is_available() -> None:
    """11 pages, 4 cached, 1 taken. A request of 4 cached and 6 own keys fits exactly; one key more does not.

    Counting the 4 both as cached and as evictable would let it in, and the pool would run out.
    """
    for most, runs in ((3, True), (4, False)):
        scheduler, cache = scheduler_with_cache(11, {1: 4})
        request = prompt_request(0, 1, 8, most)  # 8 + most - 1 keys, 4 of them cached
        scheduler.running = running = [prompt_request(9, 9, 1, 1)]  # somebody has one page
        running[0].state, running[0].pages = RequestState.RUNNING, scheduler.allocator.allocate(1)
        scheduler.add(request)
        scheduler.schedule()
        assert (request.state is RequestState.RUNNING) is runs
        assert cache.num_evictable == (0 if runs else 4), "a lock was left behind"
        scheduler.check_pages()


def test_what_an_admission_evicts_is_no_hit_for_the_next_one() -> None:
    """Both requests were matched before either was let in; the first then evicted the second's prefix.

    Its pages had a new owner by the time the second locked them: two requests wrote to the same memory.
    """
    scheduler, cache = scheduler_with_cache(14, {1: 2, 3: 3}, policy="lpm")
    first, second = prompt_request(1, 3, 13, 1), prompt_request(0, 1, 3, 1)  # 3 and 2 pages cached, 10 and 1 wanted
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()
    assert 1 not in cache.pages, "the first was meant to evict it"
    assert not set(first.pages) & set(second.pages), "two owners"
    assert (first.state, second.state) == (RequestState.RUNNING, RequestState.WAITING)
    scheduler.check_pages()


def test_check_pages_sees_a_page_that_nobody_has() -> None:
    """It used to ask only that no more pages were in use than were not free, so a leak passed."""
    scheduler = make_scheduler()
    scheduler.add(make_request(0, 9, 9))
    scheduler.schedule()
    scheduler.check_pages()
    scheduler.running[0].pages.pop()
    with pytest.raises(AssertionError, match="1 have no owner"):
        scheduler.check_pages()


def test_check_pages_sees_two_owners() -> None:
    scheduler = make_scheduler()
    for name in range(2):
        scheduler.add(make_request(name, 4, 4))
    scheduler.schedule()
    scheduler.running[0].pages[0] = scheduler.running[1].pages[0]
    with pytest.raises(AssertionError, match="two owners"):
        scheduler.check_pages()


def test_times_of_a_request() -> None:
    times = RequestTimes(added=1.0)
    assert (times.queue_s, times.ttft_s, times.tpot_s) == (None, None, None)
    times.started, times.tokens = 1.5, [3.0]
    assert (times.queue_s, times.ttft_s, times.tpot_s) == (0.5, 2.0, None)
    times.tokens = [3.0, 4.0, 6.0]
    assert times.tpot_s == 1.5


def test_the_four_lengths_and_the_invariant() -> None:
    request = make_request(0, 5, 3)
    request.output_ids, request.num_computed_tokens = [21, 22], 6
    lengths = (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens, request.num_pending_tokens)
    assert lengths == (5, 2, 7, 1)
    assert request.max_computed_tokens == 7
    whole = [7] * 5 + [21, 22]
    for start, stop in itertools.combinations(range(8), 2):
        assert request.tokens(start, stop) == whole[start:stop]
    request.check()
    request.num_computed_tokens = 7
    with pytest.raises(AssertionError, match="7 computed of 7"):
        request.check()
