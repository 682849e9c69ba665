"""The engine with the radix cache against the cold, lonely run: sharing pages changes what is computed, never a bit.

The oracle is that of ``test_engine``: the driver of L4, one request, nothing cached. Freed pages are filled with NaN,
so that whoever reads a page that was given back shows. The matrix of random traces runs ``MINI_ENGINE_TRACES`` of them,
6 without that variable.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mini_engine.attention.metadata import BatchInputs
from mini_engine.attention.pool import KVPool
from mini_engine.config import EngineConfig
from mini_engine.engine import Engine
from mini_engine.outputs import StepOutput
from mini_engine.radix_cache import EVICTIONS, RadixCache
from mini_engine.sampler.driver import sample_params
from mini_engine.sampler.head import LogitsHead
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.policy import POLICIES
from mini_engine.scheduler.prefix_cache import NullPrefixCache
from tests.support.engines import (
    TRACES,
    Planned,
    Spoiler,
    _one_thread,  # noqa: F401
    alone,
    assert_like,
    check_equal,
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
    for seed in range(2):
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


PROMPT = list(range(100, 120))
ONE, GREEDY = SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=6, ignore_eos=True)


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


# ---- priorities ----


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
