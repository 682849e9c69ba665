"""The engine over kernels: what lesson 8 promises of whole answers."""

import random
from functools import cache

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

# Tiny in the interpreter, which needs milliseconds for every program.
NUM_PROMPTS = 6 if INTERPRETED else 100
NEW_TOKENS = 2 if INTERPRETED else 64
LONGEST_PROMPT = 2 if INTERPRETED else 300


def random_prompts(count: int, longest: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def random_weights(config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    from mini_engine.checkpoint import weight_shapes

    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)).to(DEVICE, dtype)
        for name, shape in weight_shapes(config).items()
    }


def tiny_engine(**options: object) -> Engine:
    config = EngineConfig(**{"device": DEVICE, "page_size": 4, "max_running_requests": 8, **options})
    model = build_model(ONE_LAYER, random_weights(ONE_LAYER, getattr(torch, config.dtype)), config)
    return make_engine(make_driver(model, config, frozenset({60})))


def answers(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [samples[0].token_ids for samples in engine.generate(prompts, params)]


@pytest.mark.slow
def test_greedy_answers_are_those_of_torch():
    prompts = random_prompts(NUM_PROMPTS, LONGEST_PROMPT, 1019)
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    found = {
        compute: answers(
            make_engine(
                load_driver(engine=EngineConfig(compute=compute, device=DEVICE, max_running_requests=NUM_PROMPTS))
            ),
            prompts,
            params,
        )
        for compute in ("reference", "triton")
    }
    assert found["triton"] == found["reference"]


def logits_of(engine: Engine, prompts: list[list[int]], new_tokens: int) -> dict[str, list[torch.Tensor]]:
    names = [
        engine.add_request(prompt, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)) for prompt in prompts
    ]
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    while engine.has_work:
        for delta in engine.step().deltas:
            rows[delta.request_id].append(delta.logits.clone())
    return rows


@cache
def logits_alone(prompt: tuple[int, ...], new_tokens: int) -> list[torch.Tensor]:
    """What the request gives alone, which is the same whatever it is compared with."""
    (rows,) = logits_of(tiny_engine(compute="triton", batch_invariant=True), [list(prompt)], new_tokens).values()
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"max_running_requests": 3, "max_tokens_per_step": 7},
        {"max_running_requests": 3, "max_tokens_per_step": 5, "preemption": True, "num_pages": 13},
        {"max_running_requests": 2, "prefix_cache": "radix", "page_size": 2},
    ],
    ids=["chunks", "preemption", "radix"],
)
def test_batch_invariant_logits_are_those_of_the_lonely_run(options):
    prompts = random_prompts(4, 20, 60)
    prompts[3] = prompts[0][:9] + prompts[3]  # something to share
    new_tokens = 4 if INTERPRETED else 40
    if "num_pages" in options and not INTERPRETED:
        options = {**options, "num_pages": pages_needed(2 * (30 + new_tokens), 4)}
    together = logits_of(tiny_engine(compute="triton", batch_invariant=True, **options), prompts, new_tokens)
    for prompt, rows in zip(prompts, together.values(), strict=True):
        alone = logits_alone(tuple(prompt), new_tokens)
        assert len(rows) == len(alone) == new_tokens
        for step, (row, expected) in enumerate(zip(rows, alone, strict=True)):
            assert torch.equal(row, expected), f"step {step} differs by {(row - expected).abs().max()}"


@pytest.mark.slow
def test_without_invariance_the_batch_shows_in_the_bits():
    """The control: if this did not differ, the test above would show nothing."""
    prompts = random_prompts(4, 20, 60)
    together = logits_of(tiny_engine(compute="triton", max_tokens_per_step=7), prompts, 4)
    lonely = tiny_engine(compute="triton")
    alone = [row for prompt in prompts for rows in logits_of(lonely, [prompt], 4).values() for row in rows]
    assert not all(
        torch.equal(a, b) for a, b in zip(alone, [row for rows in together.values() for row in rows], strict=True)
    )


SAMPLED = [
    SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, max_new_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=7, max_new_tokens=4, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=9, top_p=0.8, seed=1, max_new_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.9, min_p=0.1, seed=2, max_new_tokens=4, ignore_eos=True),
    SamplingParams(
        temperature=0.7, seed=3, repetition_penalty=1.3, presence_penalty=0.4, max_new_tokens=4, ignore_eos=True
    ),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, logprobs=2, max_new_tokens=4, ignore_eos=True),
]


@pytest.mark.slow
def test_drawn_and_penalised_answers_are_those_of_torch():
    """The first has no seed: its row takes the same uniform numbers."""
    prompts = random_prompts(len(SAMPLED), 6, 60)
    found = []
    for compute in ("reference", "triton"):
        engine = tiny_engine(compute=compute)
        engine.driver.sampler.generator.manual_seed(5)
        found.append([one for samples in engine.generate(prompts, SAMPLED) for one in samples])
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


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_the_equivalence_holds_in_both_dtypes(dtype):
    prompts = random_prompts(12, 90, 60)
    options = {"dtype": dtype, "compute": "triton", "batch_invariant": True}
    together = logits_of(
        tiny_engine(**options, max_tokens_per_step=32, max_running_requests=6, prefix_cache="radix"), prompts, 60
    )
    lonely = tiny_engine(**options)
    for prompt, rows in zip(prompts, together.values(), strict=True):
        (alone,) = logits_of(lonely, [prompt], 60).values()
        assert all(torch.equal(a, b) for a, b in zip(rows, alone, strict=True))


def test_invariance_on_a_gpu_needs_kernels():
    with pytest.raises(ValueError, match="set compute='triton'"):
        EngineConfig(batch_invariant=True, device="cuda")
    assert EngineConfig(batch_invariant=True, device="cuda", compute="triton").batch_invariant
