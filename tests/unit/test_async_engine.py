"""Requests of many coroutines: what is refused, aborted and reported, and an event loop that stays free."""

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from mini_engine import llm
from mini_engine.async_engine import AsyncEngine, RequestRefusedError
from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.config import EngineConfig
from mini_engine.llm import load_driver
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.request import RequestOptions

TEXTS = ["Once upon a time there was a fox named Mila", "A bear went", "Tell me a story about an owl.", "The", "Who?"]
CONFIG = EngineConfig(batch_invariant=True, max_running_requests=4, max_tokens_per_step=16, preemption=True)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_MODEL)


def make_engine(tokenizer, config=CONFIG):
    return llm.make_engine(load_driver(None, config), tokenizer.backend_tokenizer)


async def collect(engine, ids, params):
    return "".join([delta.text async for delta in engine.stream(ids, params)])


def run(work, **options):
    """Run ``work(engine)`` and close the engine."""

    async def serve():
        engine = AsyncEngine(make_engine(load_tokenizer(TINY_MODEL), options.pop("config", CONFIG)), **options)
        try:
            return await asyncio.wait_for(work(engine), 60)
        finally:
            await engine.close()

    return asyncio.run(serve())


@pytest.mark.parametrize(
    ("ids", "params", "message", "param"),
    [
        ([], SamplingParams(), "the prompt has 0 tokens", "prompt"),
        ([1], SamplingParams(max_new_tokens=5000), "5001 positions", "prompt"),
        ([1], SamplingParams(stop_token_ids=[4000]), "stop_token_ids names token id 4000", "stop_token_ids"),
        ([1], SamplingParams(regex="("), "missing", "regex"),
        ([1], SamplingParams(json_schema={"type": "thing"}), "thing", "json_schema"),
    ],
)
def test_a_refusal_names_the_parameter_and_leaves_nothing_behind(ids, params, message, param):
    async def work(engine):
        with pytest.raises(RequestRefusedError, match=message) as refused:
            await engine.submit(ids, params)
        return refused.value.param, engine.handles, engine.owners, engine.engine.entries

    config = replace(CONFIG, grammar_backend="auto")
    assert run(work, config=config) == (param, {}, {}, {})


def test_an_aborted_request_keeps_what_it_has(tokenizer):
    async def work(engine):
        handle = await engine.submit(tokenizer.encode(TEXTS[0]), SamplingParams(max_new_tokens=900, ignore_eos=True))
        async for _ in handle.steps():
            engine.abort(handle.id)
        answer = await handle.result()
        return answer.finish_reason, 0 < len(answer.token_ids) < 900, engine.engine.entries

    assert run(work) == ("abort", True, {})


def test_the_samples_of_a_seed_are_those_of_generate(tokenizer):
    ids = tokenizer.encode(TEXTS[0])
    params = SamplingParams(temperature=0.9, seed=5, n=2, best_of=3, max_new_tokens=9)
    expected = make_engine(tokenizer).generate([ids], params)[0]

    async def work(engine):
        return await (await engine.submit(ids, params)).results()

    assert [answer.text for answer in run(work)] == [answer.text for answer in expected]


def test_a_report_from_a_token_on_computes_only_what_it_needs(tokenizer):
    ids = tokenizer.encode(" ".join(TEXTS * 2))
    params = SamplingParams(prompt_logprobs=1)
    config = replace(CONFIG, prefix_cache="radix")
    (whole,) = make_engine(tokenizer).generate([ids], replace(params, max_new_tokens=1))[0]
    start = len(ids) - 5

    async def work(engine):
        await (await engine.submit(ids, params, RequestOptions(score_only=True))).result()
        options = RequestOptions(prompt_logprobs_start=start, score_only=True)
        return await (await engine.submit(ids, params, options)).result()

    answer = run(work, config=config)
    assert answer.prompt_logprobs == [None] * start + whole.prompt_logprobs[start:]
    assert answer.num_cached_tokens == (start - 1) // config.page_size * config.page_size
    assert (answer.token_ids, answer.text, answer.finish_reason) == ([], "", "length")


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


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted as Linux shows them")
@pytest.mark.parametrize("compute", ["reference", "packed"])
def test_the_thread_that_loaded_keeps_no_helpers_while_another_serves(compute: str) -> None:
    code = f"""
import asyncio, os
import torch
from mini_engine import LLM
from mini_engine.async_engine import AsyncEngine
torch.set_num_threads(3)
engine = AsyncEngine(LLM(compute="{compute}", num_pages=4096).engine)
asyncio.run(engine.call(lambda: None))
before = len(os.listdir("/proc/self/task"))
torch.ones(1 << 22).sum()
print(len(os.listdir("/proc/self/task")) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "2\n"  # the helpers that the sum needs are new
