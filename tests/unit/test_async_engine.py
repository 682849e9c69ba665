"""Many coroutines over one engine: each gets the answer that it would have got alone."""

import asyncio

import pytest
import torch

from mini_engine import llm
from mini_engine.async_engine import AsyncEngine
from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.config import EngineConfig
from mini_engine.llm import load_driver
from mini_engine.sampler.params import SamplingParams

TEXTS = ["Once upon a time there was a fox named Mila", "A bear went", "Tell me a story about an owl.", "The", "Who?"]
CONFIG = EngineConfig(batch_invariant=True, max_running_requests=4, max_tokens_per_step=16, preemption=True)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_MODEL)


def make_engine(tokenizer, config=CONFIG):
    return llm.make_engine(load_driver(None, config), tokenizer.backend_tokenizer)


def params_of(index):
    return SamplingParams(temperature=0.8 * (index % 2), seed=index, max_new_tokens=12 + index)


async def collect(engine, ids, params):
    return "".join([delta.text async for delta in engine.stream(ids, params)])


def test_streams_side_by_side_give_the_lonely_answers(tokenizer):
    prompts = [tokenizer.encode(text) for text in TEXTS]
    alone = make_engine(tokenizer, EngineConfig(batch_invariant=True))
    expected = [alone.generate([ids], params_of(i))[0][0].text for i, ids in enumerate(prompts)]

    async def serve():
        engine = AsyncEngine(make_engine(tokenizer))
        texts = await asyncio.gather(*(collect(engine, ids, params_of(i)) for i, ids in enumerate(prompts)))
        later = await collect(engine, prompts[0], params_of(0))  # after a pause without work
        allocator = engine.engine.scheduler.allocator
        await engine.close()
        return texts, later, allocator.num_free == allocator.num_pages, engine.engine.entries

    texts, later, all_free, entries = asyncio.run(serve())
    assert list(texts) == expected
    assert later == expected[0]
    assert all_free
    assert not entries


def test_a_cancelled_stream_is_aborted_and_the_others_go_on(tokenizer):
    prompts = [tokenizer.encode(text) for text in TEXTS[:2]]
    long = SamplingParams(max_new_tokens=400, ignore_eos=True)

    async def serve():
        engine = AsyncEngine(make_engine(tokenizer))
        lost = asyncio.create_task(collect(engine, prompts[0], long))
        kept = asyncio.create_task(collect(engine, prompts[1], params_of(0)))
        await asyncio.sleep(0.2)
        lost.cancel()
        text = await kept
        with pytest.raises(asyncio.CancelledError):
            await lost
        await asyncio.sleep(0.05)
        running = engine.engine.scheduler.has_work
        await engine.close()
        return text, running

    text, running = asyncio.run(serve())
    assert text
    assert not running


def test_a_refused_request_raises_and_a_failing_step_reaches_every_stream(tokenizer):
    async def serve():
        engine = AsyncEngine(make_engine(tokenizer))
        with pytest.raises(ValueError, match="the prompt has 0 tokens"):
            await collect(engine, [], params_of(0))

        def fail(*_):
            raise RuntimeError("the machine is on fire")

        engine.engine.driver.sampler = fail
        streams = (collect(engine, tokenizer.encode(text), params_of(0)) for text in TEXTS[:2])
        answers = await asyncio.gather(*streams, return_exceptions=True)
        await engine.close()
        return answers

    answers = asyncio.run(serve())
    assert [str(answer) for answer in answers] == ["the machine is on fire"] * 2


def test_the_event_loop_is_free_while_the_engine_steps(tokenizer):
    torch.set_num_threads(1)

    async def serve():
        engine = AsyncEngine(make_engine(tokenizer))
        ticks = 0
        request = asyncio.create_task(
            collect(engine, tokenizer.encode(TEXTS[0]), SamplingParams(max_new_tokens=200, ignore_eos=True))
        )
        while not request.done():
            await asyncio.sleep(0.001)
            ticks += 1
        await engine.close()
        return ticks

    assert asyncio.run(serve()) > 20
