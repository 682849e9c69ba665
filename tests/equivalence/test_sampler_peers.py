"""The sampler against other hands: transformers' warpers and processors, mmh3, torch.multinomial, a full sort.

Where a peer has another rule the test says which: transformers keeps every token tied with the k-th, breaks the ties of
top-p by a sort that promises no order, and looks for bad words in the prompt too.
"""

import random
import struct

import mmh3
import pytest
import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mini_engine.sampler.batch import SamplingBatch, SamplingRequest
from mini_engine.sampler.draw import draw_seeded, draw_uniform, murmur3
from mini_engine.sampler.filters import apply_min_p, apply_temperature, apply_top_k, apply_top_p
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.processors.base import Vocabulary
from mini_engine.sampler.sampler import Sampler

NOWHERE = torch.zeros(1, 0, dtype=torch.int64)  # warpers are given the tokens so far and do not look at them
EDGE = 2e-6  # nearer to p than this, two orders of addition in float32 may disagree
SIZES = [7, 100, 1000, 32_000]
KINDS = ["plain", "ties", "banned tail", "all negative", "all equal"]


def make_logits(kind: str, size: int, seed: int = 0, rows: int = 4) -> Tensor:
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3
    if kind == "ties":
        return logits.round()
    if kind == "banned tail":
        return logits.masked_fill(torch.arange(size) >= max(2, size // 3), -torch.inf)
    if kind == "all negative":
        return logits.abs().neg() - 50
    return torch.full_like(logits, 1.5) if kind == "all equal" else logits


def column(value: float, logits: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.full((len(logits),), value, dtype=dtype)


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


@pytest.mark.parametrize("temperature", [1e-6, 0.1, 0.7, 1.0, 1.3, 100.0, 1e4])
def test_temperature_is_transformers_to_the_bit(temperature: float) -> None:
    logits = make_logits("banned tail", 1000)
    expected = TemperatureLogitsWarper(temperature)(NOWHERE, logits)
    assert torch.equal(apply_temperature(logits, column(temperature, logits, torch.float32)), expected)


@pytest.mark.parametrize("k", [1, 2, 5, 64, 99])
@pytest.mark.parametrize("shift", [0.0, -50.0])
@pytest.mark.parametrize("size", [100, 1000, 32_000])
def test_top_k_is_transformers_to_the_bit_where_nothing_is_tied(size: int, shift: float, k: int) -> None:
    orders = [torch.randperm(size, generator=torch.Generator().manual_seed(row)) for row in range(4)]
    logits = torch.stack(orders) / size * 10 + shift
    assert all(len(row.unique()) == size for row in logits)
    assert torch.equal(apply_top_k(logits, column(k, logits, torch.int64)), TopKLogitsWarper(k)(NOWHERE, logits))


def test_among_equals_top_k_keeps_the_lowest_ids_and_transformers_keeps_all() -> None:
    logits = make_logits("ties", 1000)
    ours = apply_top_k(logits, column(50, logits, torch.int64)).isfinite()
    theirs = TopKLogitsWarper(50)(NOWHERE, logits).isfinite()
    assert (ours.sum(-1) == 50).all()
    assert (theirs.sum(-1) > 50).all()
    assert not (ours & ~theirs).any()
    for row in range(len(logits)):
        extra = (theirs & ~ours)[row].nonzero()[:, 0]
        tied = logits[row, extra[0]]
        assert (logits[row, extra] == tied).all()
        assert int((ours[row] & (logits[row] == tied)).nonzero()[:, 0].max()) < int(extra.min())


def mass_before(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Oracle: ids in falling order, the lowest first among equals, and the float64 mass before each of them."""
    masses, ids = torch.sort(logits.double().softmax(-1), dim=-1, descending=True, stable=True)
    return ids, masses.cumsum(-1) - masses


def away_from_edges(logits: Tensor, p: float) -> Tensor:
    """Return the rows whose masses keep a distance from p."""
    return logits[((mass_before(logits)[1] - p).abs() > EDGE).all(-1)]


@pytest.mark.parametrize("p", [1e-4, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["plain", "all negative", "banned tail"])
@pytest.mark.parametrize("size", [7, 100, 1000])
def test_top_p_has_the_support_and_the_values_of_transformers(size: int, kind: str, p: float) -> None:
    logits = away_from_edges(make_logits(kind, size, rows=40), p)
    assert len(logits) > 0
    assert torch.equal(apply_top_p(logits, column(p, logits)), TopPLogitsWarper(p)(NOWHERE, logits))


def test_among_equals_top_p_keeps_the_lowest_ids_and_as_many_as_transformers() -> None:
    """Which of the equals stay is open in transformers (a sort that is not stable); how many is not."""
    logits = torch.zeros(1, 10)
    ours, theirs = apply_top_p(logits, column(0.35, logits)), TopPLogitsWarper(0.35)(NOWHERE, logits)
    assert ours.isfinite().nonzero()[:, 1].tolist() == [0, 1, 2, 3]
    assert int(theirs.isfinite().sum()) == 4


@pytest.mark.parametrize("min_p", [1e-6, 0.05, 0.3, 0.99, 1.0])
@pytest.mark.parametrize("kind", ["plain", "ties", "banned tail", "all negative", "all equal"])
@pytest.mark.parametrize("size", SIZES)
def test_min_p_is_transformers(size: int, kind: str, min_p: float) -> None:
    logits = make_logits(kind, size)
    assert torch.equal(apply_min_p(logits, column(min_p, logits)), MinPLogitsWarper(min_p)(NOWHERE, logits))


@pytest.mark.parametrize("seed", range(8))
def test_all_filters_in_a_row_are_transformers_in_its_order(seed: int) -> None:
    """transformers too goes from temperature through top-k and top-p to min-p, each on what the one before left."""
    dice = random.Random(seed)
    temperature, k, p, min_p = dice.uniform(0.3, 2), dice.randint(5, 60), dice.uniform(0.5, 0.99), dice.uniform(0, 0.2)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_top_p_keeps_what_float64_masses_of_a_full_stable_sort_say(size: int, kind: str) -> None:
    """The support exactly, ties included, wherever the float64 masses do not lie on p itself (distance ``EDGE``)."""
    compared = 0
    logits = make_logits(kind, size, rows=8)
    p = torch.tensor([1.0, 1e-6, 0.05123, 0.30317, 0.50171, 0.77713, 0.95119, 0.99991], dtype=torch.float64)
    got = apply_top_p(logits, p)
    ids, before = mass_before(logits)
    for row, limit in enumerate(p.tolist()):
        if limit == 1.0:
            assert torch.equal(got[row], logits[row])
        elif float((before[row] - limit).abs().min()) > EDGE:
            kept = ids[row, before[row] < limit]
            expected = torch.full_like(logits[row], -torch.inf)
            expected[kept] = logits[row, kept]
            assert torch.equal(got[row], expected)
            compared += 1
    assert compared >= 4 or size == 32_000


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


def test_least_length_is_transformers() -> None:
    logits = make_logits("plain", 30, rows=1)
    for done in range(6):
        past = [3, 4, 5, *range(10, 10 + done)]
        theirs = MinNewTokensLengthLogitsProcessor(3, 4, eos_token_id=[2, 7, 9])
        got = one_row(logits, past[:3], past[3:], eos=2, min_new_tokens=4, stop_token_ids=[7, 9])
        assert torch.equal(got, theirs(torch.tensor([past]), logits))


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


def test_a_bad_word_that_the_prompt_begins_is_banned_by_transformers_and_not_here() -> None:
    """As in vLLM: a prompt may quote a bad word, and what follows its first half is no completion of ours."""
    logits = make_logits("plain", 8, rows=1)
    theirs = NoBadWordsLogitsProcessor([[1, 2]], eos_token_id=7)(torch.tensor([[6, 1]]), logits)
    assert theirs[0, 2] == -torch.inf
    assert torch.equal(one_row(logits, [6, 1], [], bad_words=[[1, 2]]), logits)


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


def test_bias_is_transformers_for_single_tokens() -> None:
    bias = {0: 100.0, 3: -100.0, 7: 0.25, 8: -0.1}
    logits = make_logits("plain", 12, rows=1)
    logits[0, 3] = -torch.inf
    theirs = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    assert torch.equal(one_row(logits, [1], [], logit_bias=bias), theirs(torch.tensor([[1]]), logits))


# The hash and mmh3


def test_the_hash_is_mmh3_at_random_and_at_the_ends_of_the_ranges() -> None:
    dice = random.Random(0)
    ends = [0, 1, -1, 42, 2**31, 2**32 - 1, 2**32, -(2**32), 2**63 - 1, -(2**63), -(2**63) + 1]
    positions = [0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1]
    ids = [0, 1, 255, 65_536, 151_935, 2**31, 2**32 - 1]
    cases = [(seed, position, token) for seed in ends for position in positions for token in ids]
    cases += [
        (dice.randint(-(2**63), 2**63 - 1), dice.randrange(2**32), dice.randrange(2 ** dice.randint(1, 32)))
        for _ in range(20_000)
    ]
    got = murmur3(*torch.tensor(cases).T)
    expected = [mmh3.hash(struct.pack("<QII", s % 2**64, p, token), 0, signed=False) for s, p, token in cases]
    assert got.tolist() == expected


# Draws and their distribution

DRAWS = 6000
SKEWED = torch.tensor([2.0, 1.5, 1.5, 0.7, 0.0, -0.3, -1.0, -torch.inf, -2.5, -3.0])
FILTERED = [
    {},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.15},
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


def test_one_seed_at_many_positions_has_the_distribution_too() -> None:
    """One request is one seed at rising positions; the hash that this one replaced failed exactly here."""
    seeds, positions = torch.full((DRAWS,), 42), torch.arange(DRAWS)
    counts = draw_seeded(SKEWED.expand(DRAWS, -1), seeds, positions).bincount(minlength=len(SKEWED))
    assert chi_square_fits(counts, SKEWED.double().softmax(-1) * DRAWS)


def test_neighbouring_positions_of_one_seed_are_independent() -> None:
    """Pairs of successive tokens: 3 by 3 cells against the product of the probabilities."""
    logits = torch.tensor([1.0, 0.0, 0.5])
    tokens = draw_seeded(logits.expand(DRAWS, -1), torch.full((DRAWS,), 7), torch.arange(DRAWS))
    pairs = (tokens[0::2] * 3 + tokens[1::2]).bincount(minlength=9)
    masses = logits.double().softmax(-1)
    assert chi_square_fits(pairs, (masses[:, None] * masses).flatten() * (DRAWS // 2))


def test_drawing_by_inversion_has_the_frequencies_of_multinomial() -> None:
    """Two samples, one statistic: counts of both against their common mean."""
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(DRAWS, generator=generator, dtype=torch.float64)
    ours = draw_uniform(SKEWED.expand(DRAWS, -1), uniform).bincount(minlength=len(SKEWED))
    drawn = torch.multinomial(SKEWED.softmax(-1), DRAWS, replacement=True, generator=generator)
    theirs = drawn.bincount(minlength=len(SKEWED))
    mean = (ours + theirs).double() / 2
    possible = mean > 0
    statistic = sum(((counts - mean)[possible] ** 2 / mean[possible]).sum() for counts in (ours, theirs))
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    assert float(torch.special.gammaincc(freedom, statistic / 2)) > 1e-5
    assert ours[7] == theirs[7] == 0


@pytest.mark.parametrize("size", [1000, 32_000])
def test_inversion_finds_the_token_that_float64_edges_say(size: int) -> None:
    """Also at the far end of the row, where float32 sums lose what is rare; numbers on an edge itself are left out."""
    logits = make_logits("plain", size, rows=1)
    edges = logits[0].double().softmax(-1).cumsum(-1)
    drawn = torch.rand(500, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ends = torch.tensor([0.0, 0.25, 1 - 1e-6, 1 - 2**-53], dtype=torch.float64)
    uniform = torch.cat((drawn, ends))
    clear = (edges - uniform[:, None]).abs().amin(-1) > 1e-7
    clear[[500, 503]] = True
    expected = torch.searchsorted(edges, uniform * edges[-1], right=True)
    got = draw_uniform(logits.expand(len(uniform), -1), uniform)
    assert int(clear.sum()) > 100
    assert torch.equal(got[clear], expected[clear])


def test_the_chi_square_rule_itself_can_say_no() -> None:
    fair = torch.full((4,), 250.0)
    assert chi_square_fits(torch.tensor([240, 255, 260, 245]), fair)
    assert not chi_square_fits(torch.tensor([150, 350, 250, 250]), fair)
    assert not chi_square_fits(torch.tensor([500, 498, 2, 0]), torch.tensor([500.0, 500.0, 0.0, 0.0]))
