"""What a greedy decode decided at every step, how sure it was, and what each step cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mini_engine.attention.metadata import BatchInputs
from mini_engine.attention.pool import KVPool
from mini_engine.driver import GreedyDriver, GreedyStep

TIMING_RUNS = 3
CONTEXT_TOKENS = 6  # shown before a crossroads
LABEL_LENGTH = 44  # characters
CLOSE_BITS = 1.0  # below this gap the runner-up had more than half of the winner's probability


@dataclass(frozen=True)
class StepDistribution:
    """The next-token distribution of one step, likeliest token first.

    ``probabilities`` of ``token_ids``; the first one is what greedy takes. ``entropy_bits``: how open the choice was,
    0 for certain, 1 for a fair coin. ``gap_bits``: log2 of how many times likelier the first is than the second.
    """

    token_ids: list[int]
    probabilities: list[float]
    entropy_bits: float
    gap_bits: float


@dataclass(frozen=True)
class Crossroads:
    """A close call: at ``step`` the driver took ``taken[0]``, and ``other[0]`` was nearly as likely.

    ``taken`` and ``other`` also hold the tokens that followed. ``probabilities``: of the two first tokens.
    """

    step: int
    gap_bits: float
    probabilities: tuple[float, float]
    taken: list[int]
    other: list[int]


@dataclass(frozen=True)
class StepCost:
    """What one step of a driver cost: tokens fed to the model and seconds."""

    tokens: int
    seconds: float


def describe_step(logits: Tensor, k: int = 5) -> StepDistribution:
    """Turn the logits [V] of one step into its distribution, in float64, with the ``k`` likeliest tokens."""
    log_probabilities = torch.log_softmax(logits.double(), dim=-1)  # [V], nats
    # A stable sort keeps the lower id first among equals, as argmax does; topk promises no order.
    order = torch.sort(log_probabilities, descending=True, stable=True).indices[:k]
    chosen = log_probabilities[order]
    probabilities = log_probabilities.exp()
    entropy = -torch.where(probabilities > 0, probabilities * log_probabilities, 0.0).sum()
    return StepDistribution(
        token_ids=order.tolist(),
        probabilities=chosen.exp().tolist(),
        entropy_bits=float(entropy) / math.log(2),
        gap_bits=float(chosen[0] - chosen[1]) / math.log(2),
    )


def max_entropy_bits(logits: Tensor) -> float:
    """Return the largest possible entropy, that of a uniform distribution over the vocabulary of ``logits`` [V]."""
    return math.log2(len(logits))


def describe_steps(steps: Sequence[GreedyStep], k: int = 5) -> list[StepDistribution]:
    """Describe every step of a decode."""
    return [describe_step(step.logits, k) for step in steps]


def closest_steps(distributions: Sequence[StepDistribution], count: int) -> list[int]:
    """Return the ``count`` steps with the smallest gap, closest first."""
    return sorted(range(len(distributions)), key=lambda i: distributions[i].gap_bits)[:count]


def contrasting_steps(distributions: Sequence[StepDistribution], count: int) -> list[int]:
    """Return up to ``count`` steps, in order, whose top probabilities spread evenly from the lowest to the highest."""
    top = [d.probabilities[0] for d in distributions]
    low = min(top)
    high = max(top)
    picked: set[int] = set()
    for index in range(min(count, len(top))):
        target = low + (high - low) * index / max(1, count - 1)
        picked.add(min((i for i in range(len(top)) if i not in picked), key=lambda i: abs(top[i] - target)))
    return sorted(picked)


def take_other_way(
    driver: GreedyDriver,
    prompt_ids: Sequence[int],
    steps: Sequence[GreedyStep],
    distributions: Sequence[StepDistribution],
    step: int,
    length: int,
) -> Crossroads:
    """Go back to ``step``, take the runner-up instead, and generate greedily to ``length`` tokens from there."""
    taken = [s.token_id for s in steps]
    runner_up = distributions[step].token_ids[1]
    other = [runner_up]
    if runner_up not in driver.eos_token_ids and length > 1:
        other += driver.generate([*prompt_ids, *taken[:step], runner_up], length - 1).token_ids
    first, second = distributions[step].probabilities[:2]
    return Crossroads(step, distributions[step].gap_bits, (first, second), taken[step : step + length], other)


def crossroads_texts(
    tokenizer: PreTrainedTokenizerBase, generated: Sequence[int], crossroads: Sequence[Crossroads]
) -> list[tuple[str, str, str]]:
    """Return for every crossroads the words before it, the words taken and the other words."""
    texts = []
    for fork in crossroads:
        before = tokenizer.decode(generated[max(0, fork.step - CONTEXT_TOKENS) : fork.step])
        if fork.step > CONTEXT_TOKENS:
            before = before.partition(" ")[2]  # the first word is cut
        texts.append((before, *(tokenizer.decode(ids).strip() for ids in (fork.taken, fork.other))))
    return [(one_line(before), one_line(taken), one_line(other)) for before, taken, other in texts]


def one_line(text: str) -> str:
    """Make line breaks visible and cut what is too long for a label."""
    return text.replace("\n", "⏎")[:LABEL_LENGTH]


class MeasuredDriver(GreedyDriver):
    """A driver that records the cost of every step in ``costs``."""

    def __init__(self, driver: GreedyDriver, *, use_kv_cache: bool) -> None:
        """Share the model and the options of ``driver``, with or without a KV cache."""
        super().__init__(
            driver.model,
            driver.config,
            driver.eos_token_ids,
            use_kv_cache=use_kv_cache,
            attention=driver.make_attention,
        )
        self.costs: list[StepCost] = []

    def forward(self, batch: BatchInputs, pool: KVPool) -> Tensor:
        """Run one step as the driver does. Mutates ``costs``."""
        start = perf_counter()
        logits = super().forward(batch, pool)
        self.costs.append(StepCost(len(batch.input_ids), perf_counter() - start))
        return logits


def measure_decode(
    driver: GreedyDriver, prompt_ids: Sequence[int], max_new_tokens: int, *, use_kv_cache: bool
) -> list[StepCost]:
    """Decode greedily several times; return for every step its work and its best time."""
    runs = []
    for _ in range(TIMING_RUNS):
        measured = MeasuredDriver(driver, use_kv_cache=use_kv_cache)
        measured.generate(prompt_ids, max_new_tokens)
        runs.append(measured.costs)
    return [min(costs, key=lambda cost: cost.seconds) for costs in zip(*runs, strict=True)]
