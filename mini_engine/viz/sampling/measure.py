"""What a sampler does to a distribution, stage by stage, and how often each token then comes.

Three functions are wrong on purpose, so that a notebook can show the effect. ``apply_in_order`` accepts a wrong order.
``draw_old_hash`` and ``top_p_without_bypass`` are bugs that real engines have had.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Binomial
from transformers import PreTrainedTokenizerBase

from mini_engine.driver import GreedyDriver
from mini_engine.sampler.batch import SamplingBatch, SamplingRequest
from mini_engine.sampler.draw import gumbel
from mini_engine.sampler.filters import apply_joint, apply_min_p, apply_temperature, apply_top_k, apply_top_p
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.processors.base import History, Vocabulary
from mini_engine.sampler.processors.thinking import Markers, ThinkingBudget
from mini_engine.sampler.sampler import Sampler
from mini_engine.sampler.trace import SamplingTrace, Stage

ROWS_AT_ONCE = 1024  # rows of one call when a distribution is drawn from thousands of times
LEAST_EXPECTED = 5.0  # a chi-square test joins tokens that are expected less often


def next_logits(driver: GreedyDriver, prompt_ids: Sequence[int]) -> Tensor:
    """Return the logits [V] of the token after the prompt."""
    return next(iter(driver.steps(prompt_ids, 1))).logits


def likeliest(logits: Tensor, count: int) -> list[int]:
    """Return the ids of the ``count`` largest of ``logits`` [V], largest first."""
    return logits.topk(count).indices.tolist()


# --------------------------------------------------------------------------------------------------- stages and orders


def trace_row(logits: Tensor, params: SamplingParams, prompt_ids: Sequence[int]) -> list[Stage]:
    """Sample once from ``logits`` [V] and return the distribution after every stage."""
    trace = SamplingTrace()
    batch = SamplingBatch.from_requests([SamplingRequest(prompt_ids, params)], Vocabulary(len(logits)))
    Sampler(trace=trace, generator=torch.Generator().manual_seed(0))(logits[None], batch)
    return trace.stages(0)


def count_survivors(rows: Sequence[Tensor], settings: Mapping[str, SamplingParams]) -> dict[str, list[int]]:
    """Count, for every setting and every row of logits [V], the tokens that can still come after all stages."""
    return {name: [trace_row(row, params, [0])[-1].support for row in rows] for name, params in settings.items()}


def sweep_temperature(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Return the distribution of ``logits`` [V] at every temperature -> [S, V] float64."""
    column = torch.tensor(temperatures, dtype=torch.float64)
    return apply_temperature(logits.double().expand(len(column), -1), column).softmax(-1)


def entropy_bits(probs: Tensor) -> Tensor:
    """Return the entropy of every row of ``probs`` [..., V] in bits."""
    entropy: Tensor = torch.special.entr(probs.double()).sum(-1)
    return entropy / math.log(2)


def apply_in_order(
    logits: Tensor, order: Sequence[Mapping[str, float]], prompt_ids: Sequence[int] = (), output_ids: Sequence[int] = ()
) -> Tensor:
    """Apply stages to ``logits`` [V] in any order, also a wrong one -> probabilities [V] float64.

    ``order``: one mapping per step, from the name of a parameter to its value. A step is one filter, or any parameters
    of processors, or "top_k" and "top_p" together. In the last case both filters see the same distribution.
    """
    work = logits[None].float()
    for step in order:
        values = {name: torch.tensor([value], dtype=torch.float64) for name, value in step.items()}
        if step.keys() == {"top_k", "top_p"}:
            work = apply_joint(work, values["top_k"].long(), values["top_p"])
        elif "top_k" in step:
            work = apply_top_k(work, values["top_k"].long())
        elif FILTERS.keys() & step.keys():
            (name,) = step
            work = FILTERS[name](work, values[name].to(work.dtype if name == "temperature" else torch.float64))
        else:
            work = process(work, SamplingParams(**dict[str, Any](step)), prompt_ids, output_ids)
    return work[0].double().softmax(-1)


FILTERS = {"temperature": apply_temperature, "top_p": apply_top_p, "min_p": apply_min_p}


def process(logits: Tensor, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Tensor:
    """Apply the processors of one request with this past to ``logits`` [1, V]."""
    request = SamplingRequest(prompt_ids, params, list(output_ids))
    return SamplingBatch.from_requests([request], Vocabulary(logits.shape[1])).process(logits)


# --------------------------------------------------------------------------------------------------------- many draws


@dataclass(frozen=True)
class Draws:
    """How often each token came: ``counts`` [V] int64."""

    name: str
    counts: Tensor

    @property
    def total(self) -> int:
        """How many tokens were drawn."""
        return int(self.counts.sum())


def draw_many(name: str, logits: Tensor, params: SamplingParams, count: int, generator_seed: int = 0) -> Draws:
    """Sample ``count`` tokens from ``logits`` [V]. Draw i is at position i, because a seeded draw depends on it."""
    sampler = Sampler(generator=torch.Generator().manual_seed(generator_seed))
    counts = torch.zeros(len(logits), dtype=torch.int64)
    for start in range(0, count, ROWS_AT_ONCE):
        lengths = range(start + 1, min(start + ROWS_AT_ONCE, count) + 1)  # position i is that of the last of i + 1
        batch = SamplingBatch([params] * len(lengths), lengths, {})
        chosen = sampler(logits.expand(len(lengths), -1), batch).token_ids
        counts += torch.bincount(torch.tensor(chosen), minlength=len(logits))
    return Draws(name, counts)


def draw_old_hash(name: str, logits: Tensor, seed: int, count: int) -> Draws:
    """Draw ``count`` tokens from ``logits`` [V] at the positions 0, 1, ... by the hash that SGLang used first.

    Everything else is as in ``draw_seeded``, so the hash alone causes the errors. It takes the low 24 bits of products
    of primes and an exclusive or, and the hashes of neighbouring positions and ids are not independent.
    """
    ids = (logits > -torch.inf).nonzero()[:, 0]
    positions = torch.arange(count)[:, None]
    step = (seed * 19_349_663) ^ (positions * 73_856_093)
    hashes = (step * 8_589_934_591) ^ (ids * 479_001_599)  # products wrap modulo 2**64, as they did there
    uniform = hashes.remainder(1 << 24) * 256  # 24 bits, as numbers of 32 bits for ``gumbel``
    chosen = ids[(logits[ids].double() + gumbel(uniform)).argmax(-1)]
    return Draws(name, torch.bincount(chosen, minlength=len(logits)))


def binomial_band(probs: Tensor, count: int, level: float = 0.999) -> tuple[Tensor, Tensor]:
    """Return between how often and how often tokens of ``probs`` [K] come in ``count`` draws, at that level [K]."""
    times = torch.arange(count + 1, dtype=torch.float64)[:, None]
    below = Binomial(count, probs.double().clamp(0, 1)).log_prob(times).exp().cumsum(0).T.contiguous()  # [K, count + 1]
    tail = torch.full((len(probs), 1), (1 - level) / 2, dtype=torch.float64)
    return torch.searchsorted(below, tail)[:, 0], torch.searchsorted(below, 1 - tail)[:, 0].clamp(max=count)


@dataclass(frozen=True)
class ChiSquare:
    """A goodness-of-fit test. ``p_value``: how often a correct sampler is at least as far off."""

    statistic: float
    degrees: int
    p_value: float


def chi_square(draws: Draws, probs: Tensor) -> ChiSquare:
    """Test ``draws`` against the target ``probs`` [V]. All tokens that are rarely expected count as one."""
    if int(draws.counts[probs == 0].sum()):
        return ChiSquare(math.inf, 0, 0.0)  # a token with probability 0 was drawn
    expected = probs.double() * draws.total
    common = expected >= LEAST_EXPECTED
    bins = torch.cat((expected[common], expected[~common].sum()[None]))
    counts = torch.cat((draws.counts[common], draws.counts[~common].sum()[None]))
    used = bins > 0
    statistic = ((counts - bins)[used].square() / bins[used]).sum()
    degrees = int(used.sum()) - 1
    p_value = torch.special.gammaincc(torch.tensor(degrees / 2, dtype=torch.float64), statistic / 2)
    return ChiSquare(float(statistic), degrees, float(p_value))


# ------------------------------------------------------------------------------------------- penalties along one text


def penalised_logits(
    rows: Sequence[Tensor], prompt_ids: Sequence[int], output_ids: Sequence[int], settings: Mapping[str, SamplingParams]
) -> dict[str, Tensor]:
    """Return the logits of every step of one text under each setting -> name: [S, V].

    ``rows``: the raw logits [V] of every step. The text is ``output_ids`` under every setting. All settings are rows of
    one batch.
    """
    requests = [SamplingRequest(prompt_ids, params) for params in settings.values()]
    batch = SamplingBatch.from_requests(requests, Vocabulary(len(rows[0])))
    steps = []
    for row, token in zip(rows, output_ids, strict=True):
        steps.append(batch.process(row.expand(len(requests), -1)).clone())
        batch.cumulate([token] * len(requests))
    return dict(zip(settings, torch.stack(steps, dim=1), strict=True))


# --------------------------------------------------------------------------------------------------- thinking budgets


def think_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Return the prompt that asks ``question`` and opens a block of thought."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer.encode(text + "<think>", add_special_tokens=False)
    return ids


def think_arguments(tokenizer: PreTrainedTokenizerBase, budget: int) -> dict[str, int]:
    """Return the arguments of the processor ``thinking_budget`` for this tokenizer."""
    start, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    (newline,) = tokenizer.encode("\n", add_special_tokens=False)
    return {"budget": budget, "start": start, "end": end, "newline": newline}


def thought_kinds(prompt_ids: Sequence[int], output_ids: Sequence[int], arguments: Mapping[str, int]) -> list[str]:
    """Say of every output token whether it was a free "thought", "forced" by the budget, or part of the "answer"."""
    markers = Markers(arguments["start"], arguments["end"], arguments["newline"])
    size = max(*prompt_ids, *output_ids, *vars(markers).values()) + 1
    state = ThinkingBudget.start(History(prompt_ids, ()), arguments, Vocabulary(size))
    assert state is not None, "a thinking budget always has a state"
    kinds = []
    for token in output_ids:
        spent = state.used is not None and state.used >= state.budget
        kinds.append("answer" if state.used is None else "forced" if spent else "thought")
        state = state.after(token)
    return kinds


# ------------------------------------------------------------------------------------------- a row and another row


@dataclass(frozen=True)
class MixedRow:
    """A row with top_p = 1.0 in one batch with a row with 0.9.

    ``excess`` [V] float64: the sum of its float32 probabilities minus 1, likeliest token first. ``kept``: how many
    of its V tokens a correct filter keeps. ``kept_without_bypass``: how many one that computes "off" as p = 1.
    """

    excess: Tensor
    kept: int
    kept_without_bypass: int


def top_p_without_bypass(logits: Tensor, p: Tensor) -> Tensor:
    """Filter all rows if one of them is below 1, as many sources do. ``logits`` [R, V], ``p`` [R] -> [R, V].

    Wrong for a row with p = 1: probabilities are rounded, their sum may pass 1, and the tokens after that are cut.
    """
    values, ids = logits.sort(descending=True, dim=-1)
    before = F.pad(values.softmax(-1).cumsum(-1, dtype=torch.float64)[:, :-1], (1, 0))
    values = values.masked_fill(before > p[:, None], -torch.inf)
    return torch.empty_like(logits).scatter_(-1, ids, values)


def mix_rows(vocab_size: int, likely: Iterable[int]) -> list[MixedRow]:
    """Filter a row at top_p 1.0 in one batch with the same row at 0.9, for each number of ``likely`` tokens.

    These are equally likely; the other tokens of ``vocab_size`` are e**40 times rarer.
    """
    mixed = []
    p = torch.tensor([1.0, 0.9], dtype=torch.float64)
    for count in likely:
        logits = torch.full((2, vocab_size), -40.0)
        logits[:, :count] = 0
        mass = logits[0].softmax(-1).cumsum(-1, dtype=torch.float64)
        kept, without = ((way(logits, p)[0] > -torch.inf).sum() for way in (apply_top_p, top_p_without_bypass))
        mixed.append(MixedRow(mass - 1, int(kept), int(without)))
    return mixed
