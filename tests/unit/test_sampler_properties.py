"""What holds for any mix of requests: rows know nothing of each other, batches remember, nothing is written twice.

Everything is compared bit for bit. The oracle of a mixed batch is every row alone; that of a batch whose rows came and
went is a batch built from the histories.
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
from mini_engine.sampler.filters import (
    apply_joint,
    apply_min_p,
    apply_temperature,
    apply_top_k,
    apply_top_p,
)
from mini_engine.sampler.logprobs import prompt_logprobs, token_logprobs
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.processors.base import Vocabulary
from mini_engine.sampler.sampler import NO_TOKEN, Sampler, SamplerOutput
from mini_engine.sampler.trace import SamplingTrace
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


def make_params(dice: random.Random, size: int, seeded: bool = True) -> SamplingParams:
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
        seed=dice.randint(-(2**63), 2**63 - 1) if seeded else None,
        logprobs=maybe(dice.choice([0, 3, size, -1]), None),
        logprobs_mode=dice.choice(["raw", "processed"]),
    )


def make_request(dice: random.Random, size: int, seeded: bool = True) -> SamplingRequest:
    prompt, output = ([dice.randrange(size) for _ in range(dice.randint(least, 9))] for least in (1, 0))
    return SamplingRequest(prompt, make_params(dice, size, seeded), output)


def make_batch(requests: list[SamplingRequest], size: int) -> SamplingBatch:
    return SamplingBatch.from_requests(requests, Vocabulary(size, frozenset({EOS})))


def sample(logits: Tensor, requests: list[SamplingRequest], sampler: Sampler | None = None) -> SamplerOutput:
    return (sampler or Sampler())(logits, make_batch(requests, logits.shape[1]))


# Rows know nothing of each other


def filters_of(dice: random.Random, rows: int, size: int) -> dict[str, tuple]:
    """Every filter with one parameter per row, some of them off."""
    k = torch.tensor([dice.choice([0, 1, 3, size // 2, size, size + 5]) for _ in range(rows)])
    p = torch.tensor([dice.choice([1.0, 1e-9, 0.3, 0.9, 0.9999]) for _ in range(rows)], dtype=torch.float64)
    min_p = torch.tensor([dice.choice([0.0, 0.01, 0.5, 1.0]) for _ in range(rows)])
    temperature = torch.tensor([dice.choice([1e-6, 0.5, 1.0, 1e4]) for _ in range(rows)])
    return {
        "temperature": (apply_temperature, temperature),
        "top_k": (apply_top_k, k),
        "top_p": (apply_top_p, p),
        "min_p": (apply_min_p, min_p),
        "joint": (apply_joint, k, p),
    }


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


@repeat
@given(worlds, st.integers(1, 6), st.sampled_from(SIZES))
def test_unseeded_rows_take_one_number_each_in_their_order(dice: random.Random, rows: int, size: int) -> None:
    logits = make_logits(dice, rows, size)
    requests = [make_request(dice, size, seeded=dice.random() < 0.3) for _ in range(rows)]
    together = sample(logits, requests, Sampler(generator=torch.Generator().manual_seed(8)))
    one_by_one = Sampler(generator=torch.Generator().manual_seed(8))
    alone = [sample(logits[row : row + 1], [request], one_by_one) for row, request in enumerate(requests)]
    assert together.token_ids == [output.token_ids[0] for output in alone]


# Off is off, nothing empties a row, nothing is written to


@repeat
@given(worlds, st.integers(1, 6), st.sampled_from(SIZES))
def test_no_filter_empties_a_row_raises_a_logit_or_brings_back_a_token(
    dice: random.Random, rows: int, size: int
) -> None:
    logits = make_logits(dice, rows, size)
    for name, (apply, *parameters) in filters_of(dice, rows, size).items():
        got = apply(logits, *parameters)
        assert not got.isnan().any(), name
        assert (got > -torch.inf).any(-1).all(), name
        if name != "temperature":
            assert ((got == logits) | (got == -torch.inf)).all(), name
            assert got.gather(-1, logits.argmax(-1)[:, None]).isfinite().all(), name  # the lowest of the largest stays


@repeat
@given(worlds, st.integers(1, 5), st.sampled_from(SIZES), st.sampled_from(["plain", "transposed", "bfloat16"]))
def test_the_caller_gets_the_logits_back_as_they_were(dice: random.Random, rows: int, size: int, form: str) -> None:
    logits = make_logits(dice, rows, size)
    if form == "transposed":
        logits = logits.T.contiguous().T
    elif form == "bfloat16":
        logits = logits.bfloat16()
    before = logits.clone()
    requests = [make_request(dice, size) for _ in range(rows)]
    sample(logits, requests, Sampler(trace=SamplingTrace()))
    for apply, *parameters in filters_of(dice, rows, size).values():
        if form != "bfloat16":
            apply(logits, *parameters)
    uniform, numbers = torch.rand(rows, dtype=torch.float64), torch.arange(rows)
    draw_uniform(logits, uniform)
    draw_seeded(logits, numbers, numbers)
    prompt_logprobs(logits, [0] * rows, 2)
    assert torch.equal(logits, before)
    assert torch.equal(numbers, torch.arange(rows))


def test_other_memory_layouts_and_inference_tensors_give_the_same_tokens() -> None:
    dice = random.Random(0)
    logits = make_logits(dice, 6, 131)
    requests = [make_request(dice, 131) for _ in range(6)]
    expected = sample(logits, requests)
    with torch.inference_mode():
        frozen = logits.clone()
    for other in (logits.T.contiguous().T, logits.repeat(1, 2)[:, :131], frozen, logits.clone().requires_grad_()):
        assert sample(other, requests) == expected


def test_bfloat16_rows_are_sampled_as_their_float32_values() -> None:
    dice = random.Random(1)
    logits = make_logits(dice, 8, 131).bfloat16()
    requests = [make_request(dice, 131) for _ in range(8)]
    assert sample(logits, requests) == sample(logits.float(), requests)


def test_batches_without_rows_and_vocabularies_of_one_token() -> None:
    assert sample(torch.randn(0, 9), []) == SamplerOutput([], [])
    params = SamplingParams(temperature=1, top_k=1, top_p=0.5, min_p=0.5, logprobs=-1)
    output = sample(torch.randn(2, 1), [SamplingRequest([0], params), SamplingRequest([0], SamplingParams())])
    assert output.token_ids == [0, 0]
    nothing = torch.zeros(0, dtype=torch.int64)
    assert len(draw_uniform(torch.zeros(0, 5), torch.zeros(0, dtype=torch.float64))) == 0
    assert len(draw_seeded(torch.zeros(0, 5), nothing, nothing)) == 0
    assert token_logprobs(torch.zeros(0, 5), nothing, []) == []


@repeat
@given(worlds, st.integers(1, 5), st.sampled_from(SIZES), st.sampled_from(["sequential", "joint"]))
def test_a_trace_changes_no_token(dice: random.Random, rows: int, size: int, order: str) -> None:
    logits = make_logits(dice, rows, size)
    requests = [make_request(dice, size, seeded=dice.random() < 0.5) for _ in range(rows)]
    plain, traced = (Sampler(order, torch.Generator().manual_seed(3), trace) for trace in (None, SamplingTrace()))
    assert sample(logits, requests, plain) == sample(logits, requests, traced)
    assert torch.equal(plain.generator.get_state(), traced.generator.get_state())


# A row that cannot be sampled


FAULTS = {
    "NaN": "holds NaN",
    "minus infinity": "allows no token",
    "plus infinity": "holds plus infinity",
    "overflow": "beyond float32",
}


def spoil(row: Tensor, fault: str) -> None:
    if fault == "NaN":
        row[-1] = torch.nan
    elif fault == "minus infinity":
        row[:] = -torch.inf
    elif fault == "plus infinity":
        row[0] = torch.inf
    else:
        row[:] = -1e35
        row[0] = 1e35


@pytest.mark.parametrize("fault", FAULTS)
def test_a_spoilt_row_is_an_error_of_its_own_and_changes_no_neighbour(fault: str) -> None:
    """A finite logit that the temperature carries beyond float32 once drew an id outside the vocabulary."""

    @repeat
    @given(worlds, st.integers(1, 5), st.sampled_from([2, 17, 131, 600]))
    def check(dice: random.Random, rows: int, size: int) -> None:
        logits = make_logits(dice, rows, size)
        requests = [make_request(dice, size) for _ in range(rows)]
        bad = dice.randrange(rows)
        requests[bad] = SamplingRequest(
            [1], SamplingParams(temperature=1e-5, seed=1, top_p=dice.choice([0.5, 1.0]), logprobs=2)
        )
        sound = sample(logits, requests)
        spoil(logits[bad], fault)
        spoilt = sample(logits, requests)
        assert spoilt.token_ids[bad] == NO_TOKEN
        assert spoilt.logprobs[bad] is None
        assert FAULTS[fault] in spoilt.errors[bad]
        for row in set(range(rows)) - {bad}:
            assert spoilt.token_ids[row] == sound.token_ids[row]
            assert spoilt.logprobs[row] == sound.logprobs[row]
            assert spoilt.errors.get(row) == sound.errors.get(row)

    check()


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.5, 1e4, 1e6])
def test_logits_of_1e30_are_no_fault_at_any_temperature(temperature: float) -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0, -torch.inf], [-1e30, -2e30, -3e30, -torch.inf]])
    output = sample(logits, [SamplingRequest([1], SamplingParams(temperature=temperature, top_p=0.9, logprobs=3))] * 2)
    assert output.token_ids == [0, 0]
    assert not output.errors


# Rows that come and go


def assert_same_batch(batch: SamplingBatch, requests: list[SamplingRequest], size: int, logits: Tensor) -> None:
    """``batch`` must be what a batch built from the histories is: tensors, flags, stages and their effect."""
    fresh = make_batch(requests, size)
    assert list(batch.processors) == list(fresh.processors)
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "positions"):
        assert torch.equal(getattr(batch, name), getattr(fresh, name)), name
    for name in (
        "params",
        "num_tokens",
        "random_rows",
        "all_greedy",
        "need_top_k",
        "need_top_p",
        "need_min_p",
        "need_logprobs",
    ):
        assert getattr(batch, name) == getattr(fresh, name), name
    assert torch.equal(batch.process(logits), fresh.process(logits))
    assert Sampler()(logits, batch) == Sampler()(logits, fresh)


@pytest.mark.slow
@settings(parent=repeat, max_examples=150)
@given(worlds, st.lists(st.sampled_from(["filter", "merge", "cumulate", "cumulate"]), max_size=9))
def test_a_batch_whose_rows_came_and_went_is_the_batch_built_from_the_histories(
    dice: random.Random, steps: list[str]
) -> None:
    """Penalties counted, windows moved, budgets spent, flags and order recomputed: nothing forgotten, nothing stale.

    Spent processors may linger (a least length that is reached), so finished ones are compared by what they do.
    """
    size = 11  # small, so that tokens repeat
    requests = [make_request(dice, size) for _ in range(dice.randint(0, 4))]
    batch = make_batch(requests, size)
    for step in steps:
        if step == "filter":
            keep = dice.sample(range(len(requests)), dice.randint(0, len(requests)))
            requests = [requests[row] for row in keep]
            batch.filter(keep)
        elif step == "merge":
            newcomers = [make_request(dice, size) for _ in range(dice.randint(0, 3))]
            requests = requests + newcomers
            batch.merge(make_batch(newcomers, size))
        else:
            tokens = [dice.randrange(size) for _ in requests]
            for request, token in zip(requests, tokens, strict=True):
                request.output_ids.append(token)
            batch.cumulate(tokens)
        drop_spent(batch)
        assert_same_batch(batch, requests, size, make_logits(dice, len(requests), size))


def drop_spent(batch: SamplingBatch) -> None:
    """Remove least lengths that are reached: a batch built now would not have them, and they do nothing."""
    least = batch.processors.get("min_new_tokens")
    if least is not None:
        least.states = {row: state for row, state in least.states.items() if state.remaining > 0}
        if not least.states:
            del batch.processors["min_new_tokens"]


# Threads


def test_one_and_two_threads_give_the_same_bits_at_the_vocabulary_of_a_real_model() -> None:
    size = 151_936
    dice = random.Random(4)
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(0)) * 4
    logits[1] = (logits[1] * 4).round() / 4
    requests = [
        SamplingRequest([1, 2], SamplingParams(temperature=1.3, seed=5, logprobs=20)),
        SamplingRequest([1, 2], SamplingParams(temperature=1.0, top_k=300, top_p=0.95, min_p=0.001, seed=6)),
        SamplingRequest([1, 2], SamplingParams(temperature=0.9, top_p=0.999, logprobs=4, logprobs_mode="processed")),
        SamplingRequest([1, 2], SamplingParams(repetition_penalty=1.5, logprobs=2)),
    ]
    uniform = torch.tensor([dice.random() for _ in range(4)], dtype=torch.float64)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        masses = logits.softmax(-1)
        sampler = Sampler(generator=torch.Generator().manual_seed(1))
        results.append(
            [
                sample(logits, requests, sampler),
                masses.max(-1).indices,
                masses,
                masses.cumsum(-1, dtype=torch.float64),
                logits.log_softmax(-1),
                apply_top_p(logits, torch.full((4,), 0.9, dtype=torch.float64)),
                apply_min_p(logits, torch.full((4,), 0.01)),
                draw_uniform(logits, uniform),
                gumbel(torch.arange(2**17)),
            ]
        )
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
