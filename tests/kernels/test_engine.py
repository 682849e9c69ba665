"""The engine over kernels: what lesson 8 promises of whole answers."""

import random
from typing import Any

import pytest
import torch

from mini_engine.attention.allocator import pages_needed
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.engine import Engine
from mini_engine.kernels.launch import INTERPRETED
from mini_engine.llm import build_model, load_driver, make_driver, make_engine
from mini_engine.sampler.params import SamplingParams
from tests.kernels.conftest import DEVICE
from tests.support.shapes import ONE_LAYER

# Small in the interpreter, which needs milliseconds for every program.
NUM_PROMPTS, LONGEST, NEW_TOKENS = (3, 14, 3) if INTERPRETED else (12, 90, 60)
DTYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.compiled)]


def random_prompts(count: int, longest: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def random_weights(config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)).to(DEVICE, dtype)
        for name, shape in config.weight_shapes().items()
    }


def tiny_engine(**options: object) -> Engine:
    config = EngineConfig(**{"device": DEVICE, "page_size": 4, "max_running_requests": 8, **options})
    model = build_model(ONE_LAYER, random_weights(ONE_LAYER, getattr(torch, config.dtype)), config)
    return make_engine(make_driver(model, config, frozenset({60})))


def answers(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [samples[0].token_ids for samples in engine.generate(prompts, params)]


@pytest.mark.compiled
def test_greedy_answers_are_those_of_torch():
    prompts = random_prompts(100, 300, 1019)
    params = SamplingParams(max_new_tokens=64)
    found = []
    for compute in ("reference", "triton"):
        config = EngineConfig(compute=compute, device=DEVICE, max_running_requests=100)
        found.append(answers(make_engine(load_driver(engine=config)), prompts, params))
    assert found[0] == found[1]


def logits_of(engine: Engine, prompts: list[list[int]], new_tokens: int) -> dict[str, list[torch.Tensor]]:
    names = [
        engine.add_request(prompt, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)) for prompt in prompts
    ]
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    while engine.has_work:
        for delta in engine.step().deltas:
            rows[delta.request_id].append(delta.logits.clone())
    return rows


def together_and_alone(**options: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the logits of every step of every request: in chunks, preempted and with a shared prefix; and alone."""
    prompts = random_prompts(NUM_PROMPTS, LONGEST, 60)
    prompts[-1] = prompts[0][:9] + prompts[-1]  # something to share
    pages = pages_needed(2 * (LONGEST + NEW_TOKENS), 4)
    pressure = {"max_tokens_per_step": 7, "preemption": True, "num_pages": pages, "prefix_cache": "radix"}
    crowd = tiny_engine(compute="triton", max_running_requests=3, **pressure, **options)
    together = logits_of(crowd, prompts, NEW_TOKENS).values()
    lonely = tiny_engine(compute="triton", **options)
    alone = [rows for prompt in prompts for rows in logits_of(lonely, [prompt], NEW_TOKENS).values()]
    return [pair for rows in zip(together, alone, strict=True) for pair in zip(*rows, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_invariant_logits_are_those_of_the_lonely_run(dtype):
    assert all(torch.equal(*pair) for pair in together_and_alone(batch_invariant=True, dtype=dtype))


@pytest.mark.slow
def test_without_invariance_the_batch_shows_in_the_bits():
    """The control: if this did not differ, the test above would show nothing."""
    assert not all(torch.equal(*pair) for pair in together_and_alone())


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "seed": 1},
    {"temperature": 0.9, "min_p": 0.1, "seed": 2},
    {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logprobs": 2},
]


@pytest.mark.slow
def test_drawn_and_penalised_answers_are_those_of_torch():
    """The first has no seed: its row takes the same uniform numbers."""
    prompts = random_prompts(len(SAMPLED), 6, 60)
    params = [SamplingParams(max_new_tokens=2, ignore_eos=True, **own) for own in SAMPLED]
    found = []
    for compute in ("reference", "triton"):
        engine = tiny_engine(compute=compute)
        engine.driver.sampler.generator.manual_seed(5)
        found.append([one for samples in engine.generate(prompts, params) for one in samples])
    for plain, ours in zip(*found, strict=True):
        assert ours.token_ids == plain.token_ids
        assert ours.finish_reason == plain.finish_reason
    for plain, ours in zip(found[0][-1].logprobs, found[1][-1].logprobs, strict=True):
        assert [entry.token_id for entry in ours] == [entry.token_id for entry in plain]
        assert [entry.logprob for entry in ours] == pytest.approx([entry.logprob for entry in plain], abs=1e-5)


def test_a_row_of_nan_ends_its_own_request_alone():
    engine = tiny_engine(compute="triton")
    model = engine.driver.model
    head = model.lm_head
    model.lm_head = lambda x: head(x).index_fill_(0, torch.tensor([1], device=x.device), torch.nan)
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    fine, spoilt = (samples[0] for samples in engine.generate([[3, 5], [17, 4]], params))
    assert spoilt.finish_reason == "error"
    assert "NaN" in spoilt.error
    assert fine.finish_reason == "length"


def test_invariance_on_a_gpu_needs_kernels():
    with pytest.raises(ValueError, match="set compute='triton'"):
        EngineConfig(batch_invariant=True, device="cuda")
    assert EngineConfig(batch_invariant=True, device="cuda", compute="triton").batch_invariant
