"""Rank 0 decides and the others compute: every request gets what it gets from one rank, and a difference is loud.

The ranks are threads here.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mini_engine.attention.metadata import SequenceChunk, pack_batch
from mini_engine.checkpoint import TINY_MODEL, load_config, load_weights
from mini_engine.config import EngineConfig
from mini_engine.llm import build_model, make_driver, make_engine
from mini_engine.outputs import RequestOutput
from mini_engine.ranks import worker as worker_module
from mini_engine.ranks.worker import order_of, step_of
from mini_engine.sampler.driver import StepInputs, WorkerLostError
from mini_engine.sampler.params import SamplingParams
from tests.support.engines import EOS, TOKENIZER, _one_thread, encode  # noqa: F401
from tests.support.ranks import leading_driver

CONFIG = load_config(TINY_MODEL)
SERVING = EngineConfig(
    batch_invariant=True, max_running_requests=4, max_tokens_per_step=24, preemption=True, prefix_cache="radix"
)
BEGINNINGS = ["Once upon a time there was a little", "Once upon a time there was", "The cat", "Record: name"]


def weights() -> dict[str, torch.Tensor]:
    stored = load_weights(TINY_MODEL, CONFIG, EngineConfig())
    return {name: stored.take(name) for name in CONFIG.weight_shapes()}


def answers(driver: Any, params: list[SamplingParams]) -> list[RequestOutput]:
    engine = make_engine(driver, TOKENIZER)
    prompts = [encode(text) for text in BEGINNINGS]
    first = engine.generate(prompts, params)
    again = engine.generate(prompts[::-1], params[::-1])  # over what the prefix cache has now
    engine.scheduler.check_pages()
    return [own for each in (*first, *again) for own in each]


PARAMS = [
    SamplingParams(max_new_tokens=30, prompt_logprobs=1, logprobs=2),
    SamplingParams(max_new_tokens=20, temperature=1.0, top_p=0.9, seed=4, n=3, prompt_logprobs=0),
    SamplingParams(max_new_tokens=25, temperature=0.7, seed=1, repetition_penalty=1.2, stop=(" and",)),
    SamplingParams(max_new_tokens=40, regex="[a-z ]{5,30}", logprobs=0),
]


@pytest.mark.parametrize(
    "options",
    [
        {"grammar_backend": "fsm", "jump_forward": True},
        {"grammar_backend": "fsm", "drafts": "ngram", "num_pages": 12},
        {"grammar_backend": "fsm", "compute": "packed", "prefix_cache": None},
    ],
    ids=["cache", "drafts, few pages", "packed"],
)
def test_every_answer_is_that_of_one_rank(options: dict[str, Any]) -> None:
    config = replace(SERVING, **options)
    expected = answers(make_driver(build_model(CONFIG, weights(), config), config, EOS), PARAMS)
    with leading_driver(2, CONFIG, weights(), config, eos_token_ids=EOS) as driver:
        got = answers(driver, PARAMS)
    for one, other in zip(got, expected, strict=True):
        for name in ("token_ids", "text", "finish_reason", "logprobs", "prompt_logprobs", "error"):
            assert getattr(one, name) == getattr(other, name), name
    assert any(own.num_cached_tokens for own in got)  # of samples that share a prompt, or of the cache


def test_the_drivers_without_an_engine_lead_as_well() -> None:
    config = EngineConfig(batch_invariant=True)
    single = make_driver(build_model(CONFIG, weights(), config), config, EOS)
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, n=2, prompt_logprobs=1)
    with leading_driver(2, CONFIG, weights(), config, eos_token_ids=EOS) as driver:
        assert driver.generate([5, 6, 7], 20) == single.generate([5, 6, 7], 20)
        pairs = zip(driver.complete([5, 6, 7], params), single.complete([5, 6, 7], params), strict=True)
        for one, other in pairs:
            assert one.token_ids == other.token_ids
            assert all(torch.equal(a.logits, b.logits) for a, b in zip(one.steps, other.steps, strict=True))


def test_an_order_holds_all_that_a_step_needs() -> None:
    batch = pack_batch([SequenceChunk([3, 4, 5], 2, [7, 1]), SequenceChunk([9], 4, [2, 5, 6])], 4)
    copies = [(torch.tensor([1, 2]), torch.tensor([8, 9])), (torch.tensor([3]), torch.tensor([4]))]
    step = StepInputs(batch, batch.logit_rows[1:], copies, [4, 0])
    other = step_of(order_of(step))
    assert (other.clear, other.batch.metadata.page_size) == ([4, 0], 4)
    for name in ("input_ids", "positions", "logit_rows"):
        assert torch.equal(getattr(other.batch, name), getattr(batch, name))
    for name in ("cu_seqlens_q", "seq_lens_kv", "block_table", "slot_mapping"):
        one, two = getattr(other.batch.metadata, name), getattr(batch.metadata, name)
        assert torch.equal(one, two)
        assert one.dtype == two.dtype
    assert torch.equal(other.rows, step.rows)
    assert all(
        torch.equal(a, b) for own, its in zip(other.copies, copies, strict=True) for a, b in zip(own, its, strict=True)
    )


def test_an_older_worker_computes_nothing_over_the_pools_of_a_newer_one() -> None:
    with leading_driver(2, CONFIG, weights(), EngineConfig(batch_invariant=True)) as driver:
        older, newer = driver.make_worker(4), driver.make_worker(4)
        batch = pack_batch([SequenceChunk([5, 6], 0, [1])], 16)
        newer.run(StepInputs(batch, batch.logit_rows))
        with pytest.raises(RuntimeError, match="the ranks have the pool of a newer worker; use one engine"):
            older.run(StepInputs(batch, batch.logit_rows))


@pytest.mark.parametrize("what", ["was given other inputs", "has computed other numbers"])
def test_a_rank_that_disagrees_ends_the_step(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def other_ids(order: Any) -> StepInputs:
        step = step_of(order)
        step.batch.input_ids[0] += 1
        return step

    config = EngineConfig(batch_invariant=True)
    own = weights()
    with leading_driver(2, CONFIG, own, config) as driver:
        worker = driver.make_worker(4)
        if what == "was given other inputs":
            monkeypatch.setattr(worker_module, "step_of", other_ids)  # which followers alone call
        else:
            driver.model.final_norm[3] *= 1.0001
        batch = pack_batch([SequenceChunk([5, 6], 0, [1])], 16)
        with pytest.raises(WorkerLostError, match=f"rank 1 of 2 {what} than rank 0"):
            worker.run(StepInputs(batch, batch.logit_rows))
