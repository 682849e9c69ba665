"""The sampler against other hands: transformers' warpers and processors, mmh3, torch.multinomial, a full sort.

Where a peer has another rule the test says which: transformers keeps every token tied with the k-th, breaks the ties of
top-p by a sort that promises no order, and looks for bad words in the prompt too.
"""

import random

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mini_engine.sampler.batch import SamplingBatch, SamplingRequest
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.processors.base import Vocabulary
from mini_engine.sampler.sampler import Sampler

NOWHERE = torch.zeros(1, 0, dtype=torch.int64)  # warpers are given the tokens so far and do not look at them
EDGE = 2e-6  # nearer to p than this, two orders of addition in float32 may disagree


def make_logits(kind: str, size: int, seed: int = 0, rows: int = 4) -> Tensor:
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3
    if kind == "ties":
        return logits.round()
    if kind == "banned tail":
        return logits.masked_fill(torch.arange(size) >= max(2, size // 3), -torch.inf)
    if kind == "all negative":
        return logits.abs().neg() - 50
    return torch.full_like(logits, 1.5) if kind == "all equal" else logits


def one_row(logits: Tensor, prompt: list[int], output: list[int], eos: int = 0, **given: object) -> Tensor:
    """Process the single row of ``logits`` [1, V] for a request with this past."""
    request = SamplingRequest(prompt, SamplingParams(**given), output)
    return SamplingBatch.from_requests([request], Vocabulary(logits.shape[1], frozenset({eos}))).process(logits)


def chi_square_fits(counts: Tensor, expected: Tensor) -> bool:
    """Whether counts fit what is expected at one chance in 100,000 of a false alarm; nothing may come unexpected."""
    if bool(counts[expected == 0].any()):
        return False
    counts, expected = counts[expected > 0].double(), expected[expected > 0].double()
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2)) > 1e-5


# Filters and transformers


def mass_before(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Oracle: ids in falling order, the lowest first among equals, and the float64 mass before each of them."""
    masses, ids = torch.sort(logits.double().softmax(-1), dim=-1, descending=True, stable=True)
    return ids, masses.cumsum(-1) - masses


@pytest.mark.parametrize("seed", range(4))
def test_all_filters_in_a_row_are_transformers_in_its_order(seed: int) -> None:
    """transformers too goes from temperature through top-k and top-p to min-p, each on what the one before left."""
    dice = random.Random(seed)
    temperature = dice.uniform(0.3, 2)
    k = dice.randint(5, 60)
    p = dice.uniform(0.5, 0.99)
    min_p = dice.uniform(0, 0.2)
    logits = make_logits("plain", 1000, seed, rows=20)
    expected = logits
    for warper in (
        TemperatureLogitsWarper(temperature),
        TopKLogitsWarper(k),
        TopPLogitsWarper(p),
        MinPLogitsWarper(min_p),
    ):
        expected = warper(NOWHERE, expected)
    params = SamplingParams(temperature=temperature, top_k=k, top_p=p, min_p=min_p)
    batch = SamplingBatch.from_requests([SamplingRequest([1], params)] * 20, Vocabulary(1000))
    got = Sampler().filter_rows(logits, batch, list(range(20)))
    after_top_k = TopKLogitsWarper(k)(NOWHERE, logits / temperature)
    usable = ((mass_before(after_top_k)[1] - p).abs() > EDGE).all(-1)
    assert int(usable.sum()) > 15
    assert torch.equal(got[usable], expected[usable])


# Filters and a full sort


# Processors and transformers


@pytest.mark.parametrize("strength", [0.3, 0.9, 1.0, 1.2, 2.0])
def test_repetition_penalty_is_transformers_on_prompt_and_output(strength: float) -> None:
    dice = random.Random(int(strength * 10))
    for _ in range(20):
        logits = make_logits("plain", 60, dice.randrange(999), rows=1)
        logits[0, dice.randrange(60)] = 0.0
        logits[0, dice.randrange(60)] = -torch.inf
        past = [dice.randrange(60) for _ in range(dice.randint(1, 40))]
        cut = dice.randint(1, len(past))
        expected = RepetitionPenaltyLogitsProcessor(strength)(torch.tensor([past]), logits)
        got = one_row(logits, past[:cut], past[cut:], repetition_penalty=strength)
        assert torch.equal(got, expected)


def test_bad_words_are_transformers_on_the_output() -> None:
    dice = random.Random(0)
    words = [[5], [1, 2], [1, 2, 3], [4, 4], [2, 2, 2, 1]]
    banned = 0
    for _ in range(60):
        logits = make_logits("plain", 8, dice.randrange(999), rows=1)
        output = [dice.randint(1, 4) for _ in range(dice.randint(0, 9))]
        theirs = NoBadWordsLogitsProcessor(words, eos_token_id=7)
        got = one_row(logits, [6], output, bad_words=words)
        assert torch.equal(got, theirs(torch.tensor([[6, *output]]), logits))
        banned += int((got == -torch.inf).sum())
    assert banned > 80


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_repeat_ngram_is_transformers(size: int) -> None:
    dice = random.Random(size)
    banned = 0
    for _ in range(60):
        logits = make_logits("plain", 9, dice.randrange(999), rows=1)
        past = [dice.randrange(3 if size < 5 else 2) for _ in range(dice.randint(1, 30))]
        cut = dice.randint(1, len(past))
        got = one_row(logits, past[:cut], past[cut:], logits_processors={"no_repeat_ngram": {"ngram_size": size}})
        assert torch.equal(got, NoRepeatNGramLogitsProcessor(size)(torch.tensor([past]), logits))
        banned += int((got == -torch.inf).sum())
    assert banned > 30


# The hash and mmh3


# Draws and their distribution

DRAWS = 3000
SKEWED = torch.tensor([2.0, 1.5, 1.5, 0.7, 0.0, -0.3, -1.0, -torch.inf, -2.5, -3.0])
FILTERED = [
    {},
    {"top_k": 6, "top_p": 0.85, "min_p": 0.1, "temperature": 1.4},
]


def probabilities_of_transformers(given: dict[str, float]) -> Tensor:
    warpers = [TemperatureLogitsWarper(float(given.get("temperature", 1.0)))]
    warpers += [TopKLogitsWarper(int(given["top_k"]))] if "top_k" in given else []
    warpers += [TopPLogitsWarper(given["top_p"])] if "top_p" in given else []
    warpers += [MinPLogitsWarper(given["min_p"])] if "min_p" in given else []
    logits = SKEWED[None]
    for warper in warpers:
        logits = warper(NOWHERE, logits)
    return logits[0].double().softmax(-1)


@pytest.mark.parametrize("seeded", [False, True], ids=["unseeded", "seeded"])
@pytest.mark.parametrize("given", FILTERED, ids=str)
def test_drawn_tokens_are_distributed_as_transformers_filters_say(given: dict[str, float], seeded: bool) -> None:
    params = [SamplingParams(**{"temperature": 1.0, **given}, seed=i if seeded else None) for i in range(DRAWS)]
    batch = SamplingBatch.from_requests([SamplingRequest([1, 2], p) for p in params], Vocabulary(len(SKEWED)))
    sampler = Sampler(generator=torch.Generator().manual_seed(5))
    counts = torch.tensor(sampler(SKEWED.expand(DRAWS, -1), batch).token_ids).bincount(minlength=len(SKEWED))
    assert chi_square_fits(counts, probabilities_of_transformers(given) * DRAWS)
