"""The engine with the radix cache against the cold, lonely run: sharing pages changes what is computed, never a bit.

The oracle is that of ``test_engine``: the driver of L4, one request, nothing cached. Freed pages are filled with NaN,
so that whoever reads a page that was given back shows. The matrix of random traces runs ``MINI_ENGINE_TRACES`` of them,
10 without that variable.
"""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mini_engine.attention.metadata import BatchInputs
from mini_engine.attention.pool import KVPool
from mini_engine.bench.reuse import computed_tokens, edge_tokens
from mini_engine.config import EngineConfig
from mini_engine.engine import Engine
from mini_engine.outputs import StepOutput
from mini_engine.radix_cache import EVICTIONS, RadixCache
from mini_engine.sampler.driver import sample_params
from mini_engine.sampler.head import LogitsHead
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.policy import POLICIES
from mini_engine.scheduler.prefix_cache import NullPrefixCache
from mini_engine.scheduler.request import Request
from tests.support.engines import (
    BEGINNINGS,
    TRACES,
    Planned,
    Spoiler,
    _one_thread,  # noqa: F401
    alone,
    assert_like,
    check_equal,
    encode,
    make_engine,
    make_model,
    serving,
)

WHOLE = 10**6


def shared(**changes: Any) -> EngineConfig:
    return serving(**({"prefix_cache": "radix", "page_size": 4} | changes))


def radix(engine: Engine) -> RadixCache:
    assert isinstance(engine.scheduler.cache, RadixCache)
    return engine.scheduler.cache


def check_sharing(engine: Engine) -> None:
    """Pages add up, the tree is one, and it is locked exactly by those who run on it."""
    engine.scheduler.check_pages()
    cache = radix(engine)
    cache.check()
    locks: Counter[int] = Counter()
    for request in engine.scheduler.running:
        assert tuple(request.pages[: len(request.hit.pages)]) == request.hit.pages
        path = list(cache.ancestry(request.hit))
        assert [page for node in reversed(path) for page in node.pages] == list(request.hit.pages)
        tokens = [token for node in reversed(path) for token in node.tokens]
        assert tokens == request.tokens(0, len(tokens)), "somebody else's tokens"
        locks.update(node.number for node in path)
    assert {number: node.lock_count for number, node in cache.nodes.items() if node.lock_count} == dict(locks)


def check_nothing_held(engine: Engine) -> None:
    """Everything is free or cached, and what is cached could be given up."""
    scheduler, cache = engine.scheduler, radix(engine)
    assert not scheduler.has_work
    assert engine.entries == {}
    assert scheduler.allocator.num_free + cache.num_pages == scheduler.allocator.num_pages
    assert cache.num_evictable == cache.num_pages


def poison_freed_pages(engine: Engine) -> None:
    allocator, pool = engine.scheduler.allocator, engine.pool
    plain = allocator.free
    pool.poison(list(range(allocator.num_pages)))

    def free(pages: Sequence[int]) -> None:
        plain(pages)
        pool.poison(list(pages))

    allocator.free = free


# ---- the matrix ----


@dataclass
class Turn:
    """A request that will come: its prompt, or what goes on from the answer of an earlier one."""

    prompt: list[int]
    params: SamplingParams
    arrives: int
    key: str | None
    priority: int
    after: "Turn | None" = None
    abort_after: int | None = None
    answers: list[Planned] = field(default_factory=list)


class Trace:
    """One seed: a model, a configuration, requests that begin alike. ``run`` drives the engine and checks each step."""

    def __init__(self, seed: int, **changes: Any) -> None:
        dice = self.dice = random.Random(seed)
        self.name, dtype = [("embedded", "float32"), ("random", "bfloat16")][seed % 2]
        self.size = make_model(self.name, dtype, True).config.vocab_size
        self.tight = seed % 5 < 3
        page_size = dice.choice([1, 2, 4, 8, 16])
        stems = [self.tokens(dice.randint(5, 40)) for _ in range(3)]
        self.turns: list[Turn] = []
        for index in range(8):
            self.turns.append(self.make_turn(stems, index))
        longest = 40 + 8 + 25 + 5 + 25  # stem, own, answer, question, answer
        self.config = replace(
            serving(
                dtype=dtype,
                page_size=page_size,
                prefix_cache="radix",
                num_pages=math.ceil(-(-longest // page_size) * (1 if self.tight else 3)),
                max_running_requests=8 if self.tight else dice.choice([1, 3, 6]),
                max_tokens_per_step=dice.choice([3, 7, 20, None]),
                policy=dice.choice(list(POLICIES)),
                preemption=self.tight or dice.random() < 0.5,
                eviction=dice.choice(list(EVICTIONS)),
                wait_for_prefix=dice.choice([None, 4, 8]),
                wait_below_match=dice.choice([1, 32, 100]),
                max_steps_waited=dice.choice([5, 256]),
            ),
            **changes,
        )

    def tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(self.size) for _ in range(count)]

    def make_turn(self, stems: list[list[int]], index: int) -> Turn:
        dice = self.dice
        prompt = dice.choice(stems)[: dice.choice([WHOLE, WHOLE, dice.randint(1, 40)])]
        prompt = prompt + self.tokens(dice.choice([0, 1, dice.randint(0, 8)]))
        most = dice.randint(10, 25) if self.tight else dice.randint(1, 12)
        params = SamplingParams(
            max_new_tokens=most,
            ignore_eos=dice.random() < 0.7,
            temperature=dice.choice([0.0, 1.0]),
            seed=dice.randrange(10**6),
            prompt_logprobs=dice.choice([None, None, None, 1]),
            frequency_penalty=dice.choice([0.0, 0.8]),
            logprobs=dice.choice([None, 1]),
        )
        earlier = [turn for turn in self.turns if turn.after is None and turn.params.n == 1]
        after = dice.choice(earlier) if earlier and dice.random() < 0.3 else None
        if after is None and dice.random() < 0.25:
            params = replace(params, temperature=1.0, n=dice.randint(2, 3))
        key = None if params.n > 1 else after.key if after else dice.choice([None, None, None, "tenant"])
        abort_after = dice.randint(0, 6) if dice.random() < 0.12 else None
        return Turn(prompt, params, dice.choice([0, 0, 3 * index]), key, dice.randrange(3), after, abort_after)

    def run(self) -> "Trace":
        self.engine = engine = make_engine(self.name, self.config)
        poison_freed_pages(engine)
        waiting, self.names, step = list(self.turns), dict[str, Planned](), 0
        self.log: list[StepOutput] = []
        while engine.scheduler.has_work or waiting or engine.deltas:
            for turn in [turn for turn in waiting if self.is_ready(turn, step)]:
                waiting.remove(turn)
                self.add(turn)
            for name, planned in self.names.items():
                if planned.aborted is not None and planned.arrives + planned.aborted == len(planned.deltas):
                    engine.abort(name)
            if self.tight:
                engine.scheduler.growth.ratio = 0.0  # nobody is expected to grow, so pages run out soon
            output = engine.step()
            check_sharing(engine)
            self.log.append(output)
            for delta in output.deltas:
                self.names[delta.request_id].deltas.append(delta)
            step += 1
        for name, planned in self.names.items():
            planned.output = engine.take_output(name)
        check_nothing_held(engine)
        return self

    def is_ready(self, turn: Turn, step: int) -> bool:
        first = turn.after.answers[0] if turn.after and turn.after.answers else None
        ended = first is not None and any(delta.finish_reason for delta in first.deltas)
        return turn.arrives <= step and (turn.after is None or ended)

    def add(self, turn: Turn) -> None:
        engine = self.engine
        if turn.after is not None:  # the next turn of a chat
            before = turn.after.answers[0]
            output = engine.entries[next(n for n, p in self.names.items() if p is before)].output
            turn.prompt = [*before.prompt, *output.token_ids, *self.tokens(self.dice.randint(1, 5))]
        if turn.params.n > 1:
            names = engine.add_samples(turn.prompt, turn.params)
        else:
            options = {"cache_key": turn.key, "cache_priority": turn.priority}
            names = [engine.add_request(turn.prompt, turn.params, **options)]
        for name, params in zip(names, sample_params(turn.params), strict=True):
            turn.answers.append(Planned(turn.prompt, params, 0, turn.abort_after))
            self.names[name] = turn.answers[-1]


def test_matrix_every_answer_of_every_trace_is_bitwise_the_cold_lonely_run() -> None:
    seen: Counter[str] = Counter()
    for seed in range(TRACES):
        trace = Trace(seed).run()
        for turn in trace.turns:
            for planned in turn.answers:
                check_equal(planned, alone(trace.name, planned.prompt, planned.params, trace.config))
                seen[planned.output.finish_reason] += 1
                seen["turns of chats"] += turn.after is not None
        stats = radix(trace.engine).stats
        seen["hits"] += stats.num_tokens_hit
        seen["evictions"] += stats.num_pages_evicted
        seen["preemptions"] += sum(len(step.preempted) for step in trace.log)
        seen["copies"] += sum(len(step.copied) for step in trace.log)
        check_what_is_left(trace)
    assert all(seen[kind] >= TRACES for kind in ("hits", "evictions", "preemptions", "turns of chats", "length")), seen
    assert min(seen["copies"], seen["abort"], seen["stop"]) >= TRACES // 5, seen


def check_what_is_left(trace: Trace) -> None:
    """The tree at the end: whoever starts from a leaf of it now gets the bits of a cold run."""
    engine = trace.engine
    cache = radix(engine)
    for index in range(2):
        path, tokens = list(cache.leaves.values())[index % len(cache.leaves)], list[int]()
        while path.parent is not None:
            tokens, path = [*path.tokens, *tokens], path.parent
        params, prompt = SamplingParams(max_new_tokens=1), [*tokens, 7]
        if -(-len(prompt) // trace.config.page_size) > engine.scheduler.allocator.num_pages:
            continue
        before = cache.stats.num_tokens_hit
        name = engine.add_request(prompt, params, cache_key=path.cache_key)
        while engine.scheduler.has_work:
            (delta, *_) = engine.step().deltas or [None]
        engine.take_output(name)
        assert cache.stats.num_tokens_hit - before == len(tokens)
        assert torch.equal(delta.logits, alone(trace.name, prompt, params, trace.config).logits[0])


def test_without_batch_invariance_a_warm_start_changes_bits() -> None:
    """The negative control: the matrix would see it."""
    changed = 0
    for seed in range(4):
        trace = Trace(seed, batch_invariant=False).run()
        for planned in (planned for turn in trace.turns for planned in turn.answers):
            expected = alone(trace.name, planned.prompt, planned.params, trace.config)
            got = [delta.logits for delta in planned.deltas if delta.token_id is not None]
            changed += sum(not torch.equal(a, b) for a, b in zip(got, expected.logits, strict=False))
    assert changed > 10


# ---- off ----


def test_off_there_is_no_cache_and_options_that_would_do_nothing_are_refused() -> None:
    assert isinstance(make_engine().scheduler.cache, NullPrefixCache)
    for options in ({"eviction": "lfu"}, {"wait_for_prefix": 32}):
        with pytest.raises(ValueError, match="there is no prefix cache; set prefix_cache='radix'"):
            EngineConfig(**options)
    with pytest.raises(ValueError, match="prefix_cache is 'tree'; choose 'radix'"):
        EngineConfig(prefix_cache="tree")
    with pytest.raises(ValueError, match="no eviction order 'clock'"):
        make_engine(config=shared(eviction="clock"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_with_nothing_to_share_steps_and_bits_are_those_of_off(dtype: str) -> None:
    """Without batch invariance, so that any difference in what shares a step would show."""
    dice = random.Random(1)
    prompts = [[first, *(dice.randrange(1000) for _ in range(dice.randint(0, 30)))] for first in range(20, 32)]
    logs, bits = [], []
    for cache in (None, "radix"):
        engine = make_engine(config=shared(batch_invariant=False, dtype=dtype, prefix_cache=cache, num_pages=60))
        names = [engine.add_request(p, SamplingParams(max_new_tokens=8, ignore_eos=True)) for p in prompts]
        logits: dict[str, list[Tensor]] = {name: [] for name in names}
        log = []
        while engine.scheduler.has_work:
            output = engine.step()
            log.append((output.chunks, output.preempted, output.num_running, output.num_waiting))
            for delta in output.deltas:
                logits[delta.request_id].append(delta.logits)
        logs.append(log)
        bits.append([torch.stack(rows) for rows in logits.values()])
    assert logs[0] == logs[1]
    assert all(torch.equal(a, b) for a, b in zip(*bits, strict=True))


# ---- who starts from what ----


def first_chunks(engine: Engine) -> dict[str, int]:
    """Where the first chunk of each request began."""
    starts: dict[str, int] = {}
    for step in engine.log:
        for name, start, _ in step.chunks:
            starts.setdefault(name, start)
    return starts


PROMPT = list(range(100, 120))
ONE, GREEDY = SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.mark.parametrize(("page_size", "start"), [(1, 19), (2, 18), (4, 16), (5, 15), (16, 16), (32, 0)])
def test_a_prompt_that_is_cached_whole_computes_its_last_token_or_page(page_size: int, start: int) -> None:
    engine = make_engine(config=shared(page_size=page_size))
    for _ in range(2):
        engine.generate([PROMPT], ONE)
    assert first_chunks(engine) == {"0": 0, "1": start}
    check_nothing_held(engine)


def test_the_next_turn_starts_behind_the_answer_but_for_its_last_token() -> None:
    """20 prompt tokens and 6 of the answer, of which the last was never fed back: 25 keys, 24 in whole pages of 4."""
    engine = make_engine(config=shared())
    ((answer,),) = engine.generate([PROMPT], GREEDY)
    engine.generate([[*PROMPT, *answer.token_ids, 5, 6]], ONE)
    assert first_chunks(engine)["1"] == 24
    assert radix(engine).stats.num_tokens_hit == 24


def test_a_request_that_reports_its_prompt_looks_nothing_up_and_still_shares() -> None:
    engine = make_engine(config=shared())
    params = replace(ONE, prompt_logprobs=1)
    for own in (params, params, ONE):
        ((answer,),) = engine.generate([PROMPT], own)
        assert_like(answer, alone("embedded", PROMPT, own))
    assert first_chunks(engine) == {"0": 0, "1": 0, "2": 16}
    assert radix(engine).num_pages == 5, "the second one's pages were duplicates"
    check_nothing_held(engine)


def test_requests_with_other_keys_share_nothing() -> None:
    engine = make_engine(config=shared())
    for key in ("a", "b", None, "a"):
        engine.add_request(PROMPT, ONE, cache_key=key)
        while engine.scheduler.has_work:
            engine.step()
    assert list(first_chunks(engine).values()) == [0, 0, 0, 16]


def test_who_computed_the_same_side_by_side_goes_on_with_one_copy() -> None:
    """Both start cold in one step. The second's whole pages are duplicates: freed, and the first's are used."""
    engine = make_engine(config=shared(max_tokens_per_step=None))
    poison_freed_pages(engine)
    names = [engine.add_request(PROMPT, GREEDY) for _ in range(2)]
    engine.step()
    one, two = (engine.entries[name].request for name in names)
    assert one.pages[:5] == two.pages[:5] == list(one.hit.pages) == list(two.hit.pages)
    assert radix(engine).num_pages == 5
    while engine.scheduler.has_work:
        engine.step()
        check_sharing(engine)
    for name in names:
        assert_like(engine.take_output(name), alone("embedded", PROMPT, GREEDY))
    check_nothing_held(engine)


def test_samples_share_the_prompt_through_the_tree() -> None:
    engine = make_engine(config=shared(max_running_requests=8))
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=1.0, seed=4, n=5)
    (answers,) = engine.generate([PROMPT], params)
    for answer, own in zip(answers, sample_params(params), strict=True):
        assert_like(answer, alone("embedded", PROMPT, own))
    lengths = {answer.request_id: len(PROMPT) for answer in answers}
    chunks = [chunk for step in engine.log for chunk in step.chunks]
    assert computed_tokens(chunks, lengths) == len(PROMPT) + 4, "the prompt once, and a row for everyone"
    check_nothing_held(engine)


def test_an_aborted_request_leaves_what_it_computed() -> None:
    engine = make_engine(config=shared(max_tokens_per_step=9))
    name = engine.add_request(PROMPT, GREEDY)
    engine.step()
    engine.abort(name)
    engine.generate([PROMPT], ONE)
    assert first_chunks(engine) == {"0": 0, "1": 8}


# ---- errors ----


def test_a_request_whose_own_row_is_nan_leaves_a_prompt_that_others_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_engine.sampler.processors.registry.REGISTRY", {"spoiler": Spoiler})
    engine = make_engine(config=shared(max_tokens_per_step=9))
    poison_freed_pages(engine)
    for after in (0, 9):
        wrong = replace(GREEDY, max_new_tokens=12, logits_processors={"spoiler": {"after": after}})
        ((failed,), (beside,)) = engine.generate([PROMPT, [*PROMPT[:13], 3]], [wrong, GREEDY])
        assert (failed.finish_reason, len(failed.token_ids)) == ("error", after)
        assert_like(beside, alone("embedded", beside.prompt_ids, GREEDY))
        # The prompt again, and the next turn: what the failed one wrote behind its prompt was cleared, not cached.
        for prompt in (PROMPT, [*PROMPT, *failed.token_ids, 5]):
            ((answer,),) = engine.generate([prompt], GREEDY)
            assert_like(answer, alone("embedded", prompt, GREEDY))
    assert radix(engine).stats.num_tokens_hit > 0
    check_nothing_held(engine)


def test_what_a_failed_step_wrote_is_not_cached() -> None:
    """The model gives NaN once, in the keys and values as in the logits: none of it is found by the next request."""
    calls = iter(range(100))

    def fail_once(logits: Tensor) -> Tensor:
        if next(calls) == 0:
            engine.pool.poison(engine.scheduler.running[0].pages)
            logits[:] = math.nan
        return logits

    engine = make_engine(config=shared(max_tokens_per_step=None), head=LogitsHead(gather=fail_once))
    ((failed,),) = engine.generate([PROMPT], GREEDY)
    assert failed.finish_reason == "error"
    assert radix(engine).num_pages == 0
    assert not any(tensor.isnan().any() for tensor in (*engine.pool.keys, *engine.pool.values))
    ((answer,),) = engine.generate([PROMPT], GREEDY)
    assert_like(answer, alone("embedded", PROMPT, GREEDY))
    check_nothing_held(engine)


def test_a_priority_below_zero_is_refused() -> None:
    engine = make_engine(config=shared(eviction="priority"))
    with pytest.raises(ValueError, match="cache_priority is -1; the least is 0"):
        engine.add_request(PROMPT, GREEDY, cache_priority=-1)


def test_a_chunk_that_came_out_as_nan_does_not_poison_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at a chunk that samples nothing, and it is shared: whoever begins alike fails from then on."""
    engine = make_engine(config=shared(max_tokens_per_step=8))
    plain, calls = engine.driver.hidden_states, iter(range(1000))

    def fail_once(inputs: BatchInputs, pool: KVPool) -> Tensor:
        hidden = plain(inputs, pool)
        if next(calls) == 0:
            pool.poison(engine.scheduler.running[0].pages[:2])
        return hidden

    monkeypatch.setattr(engine.driver, "hidden_states", fail_once)
    ((failed,),) = engine.generate([PROMPT], GREEDY)
    assert failed.finish_reason == "error"
    ((answer,),) = engine.generate([PROMPT], GREEDY)
    assert_like(answer, alone("embedded", PROMPT, GREEDY))


@pytest.mark.parametrize("place", ["hidden_states", "logits", "sampler"])
def test_an_interrupted_step_shares_nothing_that_it_did_not_finish(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(config=shared(max_tokens_per_step=9))
    plain, calls = getattr(engine.driver, place), iter(range(10_000))

    def interrupted(*arguments: object) -> object:
        if next(calls) % 3 == 1:
            raise KeyboardInterrupt
        return plain(*arguments)

    monkeypatch.setattr(engine.driver, place, interrupted)
    prompts = [PROMPT, [*PROMPT[:14], 5], [*PROMPT, 9, 9]]
    names = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    while engine.scheduler.has_work:
        with suppress(KeyboardInterrupt):
            engine.step()
        check_sharing(engine)
    for name, prompt in zip(names, prompts, strict=True):
        assert_like(engine.take_output(name), alone("embedded", prompt, GREEDY))
    check_nothing_held(engine)


# ---- waiting ----


def prefill(config: EngineConfig, prompts: Mapping[str, list[int]]) -> tuple[Engine, int]:
    """All at once; how many prompt tokens were computed."""
    engine = make_engine(config=config)
    for name, prompt in prompts.items():
        engine.add_request(prompt, GREEDY, name)
    while engine.scheduler.has_work:
        engine.step()
        check_sharing(engine)
    for name, prompt in prompts.items():
        assert_like(engine.take_output(name), alone("embedded", prompt, GREEDY))
    chunks = [chunk for step in engine.log for chunk in step.chunks]
    return engine, computed_tokens(chunks, {name: len(prompt) for name, prompt in prompts.items()})


@pytest.mark.parametrize("budget", [None, 7, 30])
def test_waiting_for_a_prefix_computes_every_edge_once(budget: int | None) -> None:
    stem = encode(BEGINNINGS[0])[:8]
    prompts = {str(i): [*stem, *range(10 * i, 10 * i + 5)] for i in range(2, 6)}
    config = shared(max_tokens_per_step=budget, max_running_requests=8)
    _, cold = prefill(config, prompts)
    engine, waited = prefill(replace(config, wait_for_prefix=4), prompts)
    assert waited == edge_tokens(prompts.values()) == 8 + 4 * 5
    if budget is None:
        assert cold == 4 * 13
        assert [len(step.chunks) for step in engine.log][:2] == [1, 4]


def test_waiting_has_two_thresholds() -> None:
    """16 shared tokens, pages of 4. Waits for 16 and not for 17; not beside 4 cached ones if that is too many."""
    stem = list(range(200, 216))
    prompts = {str(i): [*stem, 10 + i, 20] for i in range(2)}
    for least, below, cached, waits in ((16, 32, 0, True), (17, 32, 0, False), (12, 4, 4, True), (12, 3, 4, False)):
        engine = make_engine(config=shared(max_tokens_per_step=None, wait_for_prefix=least, wait_below_match=below))
        if cached:
            engine.generate([stem[:cached]], ONE)
        for name, prompt in prompts.items():
            engine.add_request(prompt, ONE, f"asked {name}")
        assert len(engine.step().chunks) == (1 if waits else 2)


def test_nobody_waits_for_less_than_a_page_for_the_newest_token_or_for_another_key() -> None:
    """None of it will be passed on: the wait used to be for nothing, and in a busy engine for ever."""
    config = shared(page_size=16, max_tokens_per_step=24, wait_for_prefix=8)
    stem = list(range(200, 232))
    for own, key, waits in (
        ([*stem[:12], 7], None, False),  # 12 in common, no page of 16
        (stem[:16], None, False),  # one page, but its last token has to be computed anyway
        ([*stem[:16], 7], None, True),
        ([*stem[:16], 7], "other", False),
    ):
        engine = make_engine(config=config)
        engine.add_request([*stem[:20], *range(300, 302)], ONE)
        engine.add_request(own, ONE, cache_key=key)
        assert len(engine.step().chunks) == (1 if waits else 2)


def starving(**limits: Any) -> int | None:
    """Long prompts, one a step, as large as the budget: one is always being computed. When does the short one start?"""
    engine = make_engine(
        config=shared(page_size=16, max_tokens_per_step=32, num_pages=400, max_steps_waited=20, **limits)
    )
    stem, fresh = list(range(96)), iter(range(300, 1000))

    def long(count: int) -> list[int]:
        return [*stem, next(fresh), *[5] * (count - 1)]

    engine.add_request(long(40), ONE)
    for step in range(80):
        engine.add_request(long(32), ONE)
        if step == 2:
            engine.add_request([*stem[:44], next(fresh)], ONE, "short")
        output = engine.step()
        if "short" in [name for name, _, _ in output.chunks]:
            return step
    return None


def test_waiting_starves_nobody_in_a_stream_of_those_whose_prefix_one_shares() -> None:
    """Less than a page in common beyond what was found: it used to wait for each of them in turn, aged or not."""
    for least in (1, 8, 16, 32):
        assert starving(wait_for_prefix=least) <= 30


def test_a_request_that_shares_nothing_ages_and_goes_before_longer_matches() -> None:
    """lpm with a stream of full matches: after ``max_steps_waited`` steps the stranger is first."""
    waited = {}
    for limit in (10, 1000):
        engine = make_engine(config=shared(policy="lpm", max_running_requests=1, max_steps_waited=limit))
        engine.generate([PROMPT], ONE)
        stranger = engine.add_request([7, 8, 9], ONE)
        for step in range(60):
            engine.add_request([*PROMPT, 300 + step], replace(ONE, max_new_tokens=2, ignore_eos=True))
            engine.add_request([*PROMPT, 400 + step], ONE)
            if stranger in [name for name, _, _ in engine.step().chunks]:
                break
        waited[limit] = step
    assert waited[10] in range(10, 14)
    assert waited[1000] == 59


def test_priority_keeps_pages_of_the_important() -> None:
    """A pool of 12 pages: two prompts of 5 pages are cached when a third needs 5."""
    kept = {}
    for eviction in ("lru", "priority"):
        engine = make_engine(config=shared(eviction=eviction, num_pages=12, preemption=False))
        for first, priority in ((100, 2), (200, 0), (300, 0)):
            engine.add_request(list(range(first, first + 20)), ONE, cache_priority=priority)
            while engine.scheduler.has_work:
                engine.step()
        hits = {first: radix(engine).match(list(range(first, first + 20))).pages for first in (100, 200)}
        kept[eviction] = [len(pages) for pages in hits.values()]
    assert kept == {"lru": [2, 5], "priority": [5, 2]}


def test_a_preempted_request_comes_back_to_its_own_prompt() -> None:
    """Its pages stay in the tree until somebody needs them, so that computing all of it again is computing a little."""
    engine = make_engine(config=shared(page_size=1, num_pages=60, max_tokens_per_step=None))
    params = replace(GREEDY, max_new_tokens=30)
    prompts = [[*PROMPT, 1], [*PROMPT, 2]]
    names = [engine.add_request(prompt, params) for prompt in prompts]
    again: list[int] = []
    victims: list[Request] = []
    while engine.scheduler.has_work:
        engine.scheduler.growth.ratio = 0.0
        output = engine.step()
        check_sharing(engine)
        again += [start for name, start, _ in output.chunks for v in victims if name == v.request_id]
        victims = [engine.entries[name].request for name in output.preempted] or [v for v in victims if not v.pages]
    assert again
    assert again[0] >= len(PROMPT)
    for name, prompt in zip(names, prompts, strict=True):
        assert_like(engine.take_output(name), alone("embedded", prompt, params))
    check_nothing_held(engine)
