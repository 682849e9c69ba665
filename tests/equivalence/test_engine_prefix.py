"""The engine with the radix cache against the cold, lonely run: sharing pages changes what is computed, never a bit.

The oracle is that of ``test_engine``: the driver of L4, one request, nothing cached. Freed pages are filled with NaN:
an answer that reads one shows it. The matrix of ``test_engine`` has a cache in most of its traces.
"""

import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mini_engine.attention.metadata import SequenceChunk, pack_batch
from mini_engine.config import EngineConfig
from mini_engine.engine import Engine
from mini_engine.radix_cache import RadixCache
from mini_engine.sampler.driver import StepInputs
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.prefix_cache import NullPrefixCache, PrefixHit
from mini_engine.scheduler.request import RequestOptions
from tests.support.engines import (
    Spoiler,
    _one_thread,  # noqa: F401
    alone,
    assert_like,
    check_idle,
    check_pages,
    make_driver,
    make_engine,
    poison_freed_pages,
    serving,
)

PROMPT = list(range(100, 120))
GREEDY = SamplingParams(max_new_tokens=6, ignore_eos=True)


def shared(**changes: Any) -> EngineConfig:
    return serving(**({"prefix_cache": "radix", "page_size": 4} | changes))


def radix(engine: Engine) -> RadixCache:
    assert isinstance(engine.scheduler.cache, RadixCache)
    return engine.scheduler.cache


# ---- off ----


def test_off_there_is_no_cache_and_options_that_would_do_nothing_are_refused() -> None:
    assert isinstance(make_engine().scheduler.cache, NullPrefixCache)
    for options in ({"eviction": "lfu"}, {"wait_for_prefix": 32}):
        with pytest.raises(ValueError, match="does nothing while prefix_cache is None; set prefix_cache, or leave"):
            EngineConfig(**options)
    with pytest.raises(ValueError, match="prefix_cache is 'tree'; choose one of radix, or None"):
        EngineConfig(prefix_cache="tree")
    with pytest.raises(ValueError, match="eviction is 'clock'; choose one of lru"):
        make_engine(config=shared(eviction="clock"))
    with pytest.raises(ValueError, match="cache_priority is -1; the least is 0"):
        make_engine(config=shared(eviction="priority")).add_request(
            PROMPT, GREEDY, options=RequestOptions(cache_priority=-1)
        )


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
    check_idle(engine)


def test_a_chunk_that_came_out_as_nan_does_not_poison_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at a chunk that samples nothing, and it is shared: whoever begins alike fails from then on."""
    engine = make_engine(config=shared(max_tokens_per_step=8))
    plain = engine.worker.run
    calls = iter(range(1000))

    def fail_once(step: StepInputs) -> Tensor:
        logits = plain(step)
        if next(calls) == 0:
            engine.worker.pool.poison(engine.scheduler.running[0].pages[:2])
        return logits

    monkeypatch.setattr(engine.worker, "run", fail_once)
    ((failed,),) = engine.generate([PROMPT], GREEDY)
    assert failed.finish_reason == "error"
    ((answer,),) = engine.generate([PROMPT], GREEDY)
    assert_like(answer, alone("embedded", PROMPT, GREEDY))


@pytest.mark.parametrize("place", ["run", "more", "sampler"])
def test_an_interrupted_step_shares_nothing_that_it_did_not_finish(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(config=shared(max_tokens_per_step=9))
    owner = engine.driver if place == "sampler" else engine.worker
    plain = getattr(owner, place)
    calls = iter(range(10_000))

    def interrupted(*arguments: object) -> object:
        if next(calls) % 3 == 1:
            raise KeyboardInterrupt
        return plain(*arguments)

    monkeypatch.setattr(owner, place, interrupted)
    prompts = [PROMPT, [*PROMPT[:14], 5], [*PROMPT, 9, 9]]
    names = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    while engine.scheduler.has_work:
        with suppress(KeyboardInterrupt):
            engine.step()
        check_pages(engine)
    for name, prompt in zip(names, prompts, strict=True):
        assert_like(engine.take_output(name), alone("embedded", prompt, GREEDY))
    check_idle(engine)


# ---- priorities ----


def test_an_error_leaves_stale_what_it_has_freed_and_the_next_step_clears_that() -> None:
    """Three pages, of which the prefix cache has two and drops the second."""
    engine = make_engine(config=serving(page_size=4))
    name = engine.add_request(PROMPT[: 3 * engine.scheduler.page_size], GREEDY)
    request = engine.entries[name].request
    engine.log.begin()
    engine.schedule()
    kept, dropped, own = request.pages[:3]
    engine.worker.pool.poison([kept, dropped, own])
    request.hit = PrefixHit((kept, dropped))
    engine.scheduler.cache.drop = lambda hit: [dropped]  # type: ignore[method-assign]
    engine.finish(engine.entries[name], "error", "a row of NaN")
    assert sorted(engine.stale) == sorted([dropped, own])
    engine.generate([[5]], GREEDY)
    assert engine.stale == []
    size = engine.scheduler.page_size
    held = [page for page in (kept, dropped, own) if engine.worker.pool.keys[0][:, page * size].isnan().any()]
    assert held == [kept]


def test_a_worker_clears_pages_and_then_copies_slots() -> None:
    worker = make_driver().make_worker(3)
    size = worker.pool.page_size
    worker.pool.poison([0, 1])
    inputs = pack_batch([SequenceChunk([5], 0, [2])], size)
    slots = torch.arange(size)
    logits = worker.run(StepInputs(inputs, inputs.logit_rows, [(slots, slots + size)], [0]))
    assert not any(bool(tensor.isnan().any()) for tensor in (*worker.pool.keys, *worker.pool.values))
    assert torch.equal(worker.more(inputs.logit_rows), logits)
