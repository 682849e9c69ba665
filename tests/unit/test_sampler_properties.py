"""Bits of the sampler: a row in any company has those that it has alone, in any layout and at any number of threads.

Lesson 4 checks what the numbers are.
"""

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_engine.sampler.batch import SamplingBatch, SamplingRequest
from mini_engine.sampler.draw import draw_seeded, draw_uniform, gumbel
from mini_engine.sampler.logprobs import prompt_logprobs, token_logprobs
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.processors.base import Vocabulary
from mini_engine.sampler.sampler import Sampler, SamplerOutput
from tests.support.engines import EXAMPLES

# One token, sizes below and above what the filters look at first, sizes that no vector width divides
SIZES = [1, 2, 17, 63, 131, 257, 600]
EOS = 0
repeat = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
worlds = st.builds(random.Random, st.integers(0, 2**32))


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_logits(dice: random.Random, rows: int, size: int) -> Tensor:
    """Rows of all kinds side by side: plain, rounded to few values, with bans, flat, huge, far below 0."""
    generator = torch.Generator().manual_seed(dice.randrange(2**31))
    logits = torch.randn(rows, size, generator=generator) * 3
    for row in range(rows):
        kind = dice.choice(["plain", "plain", "ties", "bans", "flat", "huge", "negative"])
        if kind == "ties":
            logits[row] = logits[row].round()
        elif kind == "bans":
            logits[row, torch.rand(size, generator=generator) < 0.6] = -torch.inf
            logits[row, dice.randrange(size)] = 1.0
        elif kind == "flat":
            logits[row] = -2.5
        elif kind == "huge":
            logits[row] *= 1e30
        elif kind == "negative":
            logits[row] -= 1e4
    return logits


def make_params(dice: random.Random, size: int) -> SamplingParams:
    """Any mix of parameters, each off in about half of the cases."""

    def maybe(value: object, off: object) -> object:
        return value if dice.random() < 0.5 else off

    def ids(count: int) -> list[int]:
        return [dice.randrange(size) for _ in range(count)]

    processors = {
        "no_repeat_ngram": maybe({"ngram_size": dice.randint(2, 3), "window_size": dice.choice([None, 5])}, None),
        "disallowed_tokens": maybe({"token_ids": ids(2)}, None),
        "thinking_budget": maybe({"budget": dice.randint(0, 3), "start": 0, "end": size - 1}, None),
    }
    return SamplingParams(
        temperature=maybe(dice.choice([1e-6, 0.3, 1.0, 1.7, 1e4]), 0.0),
        top_k=maybe(dice.randint(1, size + 1), 0),
        top_p=maybe(dice.choice([1e-9, 0.3, 0.8, 0.999]), 1.0),
        min_p=maybe(dice.choice([0.01, 0.3, 1.0]), 0.0),
        repetition_penalty=maybe(dice.uniform(0.5, 2), 1.0),
        frequency_penalty=maybe(dice.uniform(-2, 2), 0.0),
        presence_penalty=maybe(dice.uniform(-2, 2), 0.0),
        min_new_tokens=maybe(dice.randint(1, 6), 0),
        stop_token_ids=ids(dice.randint(0, 2)),
        logit_bias=maybe({token: dice.uniform(-9, 9) for token in ids(2)}, None),
        allowed_token_ids=maybe(ids(3), None) if dice.random() < 0.4 else None,
        bad_words=maybe([ids(dice.randint(1, 2)) for _ in range(2)], ()),
        logits_processors={name: arguments for name, arguments in processors.items() if arguments is not None}
        if dice.random() < 0.4
        else None,
        seed=dice.randint(-(2**63), 2**63 - 1),
        logprobs=maybe(dice.choice([0, 3, size, -1]), None),
        logprobs_mode=dice.choice(["raw", "processed"]),
    )


def make_request(dice: random.Random, size: int) -> SamplingRequest:
    prompt, output = ([dice.randrange(size) for _ in range(dice.randint(least, 9))] for least in (1, 0))
    return SamplingRequest(prompt, make_params(dice, size), output)


def sample(logits: Tensor, requests: list[SamplingRequest], sampler: Sampler | None = None) -> SamplerOutput:
    vocabulary = Vocabulary(logits.shape[1], frozenset({EOS}))
    return (sampler or Sampler())(logits, SamplingBatch.from_requests(requests, vocabulary))


@repeat
@given(worlds, st.integers(1, 6), st.sampled_from(SIZES), st.sampled_from(["sequential", "joint"]))
def test_the_sampler_treats_every_seeded_row_as_if_it_were_alone(
    dice: random.Random, rows: int, size: int, order: str
) -> None:
    """Ids, errors, and every bit of every log-probability, whatever the neighbours asked for."""
    logits = make_logits(dice, rows, size)
    requests = [make_request(dice, size) for _ in range(rows)]
    together = sample(logits, requests, Sampler(order))
    for row, request in enumerate(requests):
        alone = sample(logits[row : row + 1].clone(), [request], Sampler(order))
        assert together.token_ids[row] == alone.token_ids[0]
        assert together.logprobs[row] == alone.logprobs[0]
        assert together.errors.get(row) == alone.errors.get(0)


def test_other_memory_layouts_and_inference_tensors_give_the_same_tokens() -> None:
    dice = random.Random(0)
    logits = make_logits(dice, 6, 131)
    requests = [make_request(dice, 131) for _ in range(6)]
    expected = sample(logits, requests)
    with torch.inference_mode():
        frozen = logits.clone()
    for other in (logits.T.contiguous().T, logits.repeat(1, 2)[:, :131], frozen, logits.clone().requires_grad_()):
        assert sample(other, requests) == expected


def test_batches_without_rows_and_vocabularies_of_one_token() -> None:
    assert sample(torch.randn(0, 9), []) == SamplerOutput([], [])
    params = SamplingParams(temperature=1, top_k=1, top_p=0.5, min_p=0.5, logprobs=-1)
    output = sample(torch.randn(2, 1), [SamplingRequest([0], params), SamplingRequest([0], SamplingParams())])
    assert output.token_ids == [0, 0]
    nothing = torch.zeros(0, dtype=torch.int64)
    assert len(draw_uniform(torch.zeros(0, 5), torch.zeros(0, dtype=torch.float64))) == 0
    assert len(draw_seeded(torch.zeros(0, 5), nothing, nothing)) == 0
    assert token_logprobs(torch.zeros(0, 5), nothing, []) == []


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.5, 1e4, 1e6])
def test_logits_of_1e30_are_no_fault_at_any_temperature(temperature: float) -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0, -torch.inf], [-1e30, -2e30, -3e30, -torch.inf]])
    output = sample(logits, [SamplingRequest([1], SamplingParams(temperature=temperature, top_p=0.9, logprobs=3))] * 2)
    assert output.token_ids == [0, 0]
    assert not output.errors


def test_one_and_two_threads_give_the_same_bits_at_the_vocabulary_of_a_real_model() -> None:
    logits = torch.randn(4, 151_936, generator=torch.Generator().manual_seed(0)) * 4
    logits[1] = (logits[1] * 4).round() / 4
    requests = [
        SamplingRequest([1, 2], SamplingParams(temperature=1.3, seed=5, logprobs=20)),
        SamplingRequest([1, 2], SamplingParams(temperature=1.0, top_k=300, top_p=0.95, min_p=0.001, seed=6)),
        SamplingRequest([1, 2], SamplingParams(temperature=0.9, top_p=0.999, logprobs=4, logprobs_mode="processed")),
        SamplingRequest([1, 2], SamplingParams(repetition_penalty=1.5, logprobs=2)),
    ]
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        sampler = Sampler(generator=torch.Generator().manual_seed(1))
        masses = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
        results.append([sample(logits, requests, sampler), masses, logits.log_softmax(-1), gumbel(torch.arange(2**17))])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two) if isinstance(one, Tensor) else one == two


def test_ranks_are_those_of_logits_that_differ_in_their_last_bit() -> None:
    """As float32 log-probabilities they are equal, and the greedy token had rank 2 behind a lower id."""
    base = torch.full((40,), 0.3)
    above = torch.nextafter(base[0], torch.tensor(torch.inf))
    base[30] = above
    base[5] = torch.nextafter(above, torch.tensor(torch.inf))
    base[3] = torch.nextafter(torch.tensor(0.3), torch.tensor(-torch.inf))
    assert base.log_softmax(-1).unique().numel() == 1
    batch = SamplingBatch.from_requests([SamplingRequest([], SamplingParams(logprobs=-1))], Vocabulary(40))
    (entries,) = Sampler()(base[None], batch).logprobs
    assert entries is not None
    order = [5, 30, *(token for token in range(40) if token not in (3, 5, 30)), 3]
    assert [entry.token_id for entry in entries] == [5, *order]
    assert [entry.rank for entry in entries] == [1, *range(1, 41)]
    (_, table) = prompt_logprobs(base[None].repeat(2, 1), [0, 30], 2)
    assert table is not None
    assert [(entry.token_id, entry.rank) for entry in table] == [(30, 2), (5, 1), (30, 2)]
