"""The checks of L4.I: log-probabilities, alternatives, ranks, and those of a prompt.

Owns: probes that call ``mini_engine.sampler.logprobs`` and what they must give. Needs no other lesson.
"""

import math
from typing import Any

import torch
from torch import Tensor

from smoke.checks.l4 import spec_distribution as spec
from smoke.framework.cases import random_ids, random_tensor
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import close
from smoke.framework.prepared import prepared

REGISTRY = Registry()
TOLERANCE = 1e-5


def entries(rows: Any) -> Any:
    """Turn ``TokenLogprob`` objects into [id, log-probability, rank]; minus infinity becomes a word."""
    if rows is None:
        return None
    if isinstance(rows, list):
        return [entries(item) for item in rows]
    return entry(int(rows.token_id), float(rows.logprob), int(rows.rank))


def entry(token: int, logprob: float, rank: int) -> list[Any]:
    """Make one entry."""
    return [token, logprob if math.isfinite(logprob) else str(logprob), rank]


def wanted(row: spec.Row, token: int, count: int) -> list[Any]:
    """Return the entries of one row of log-probabilities."""
    return [entry(int(t), value, int(rank)) for t, value, rank in spec.report(row, token, count)]


@prepared
def chosen_cases(seed: int) -> dict[str, tuple[Tensor, list[int], list[int]]]:
    """Return logits [R, V], the chosen ids and the counts: ties, unlikely choices, more asked than there are."""
    rows = random_tensor(6, 30, seed=seed + 700)
    tied = random_tensor(6, 30, seed=seed + 701).round()  # about six different log-probabilities
    banned = rows.clone()
    banned[:, 1::2] = spec.BANNED
    worst, best = rows.argmin(-1).tolist(), rows.argmax(-1).tolist()
    highest = [max(t for t in range(30) if row[t] == row[spec.ranking(row)[3]]) for row in tied.tolist()]
    return {
        "each row another count": (rows, [*best[:3], *worst[3:]], [0, 1, 3, 30, -1, 37]),
        "the likeliest is chosen": (rows, best, [2] * 6),
        "the least likely is chosen": (rows, worst, [1, 2, 0, 5, 29, 30]),
        "none but the chosen": (rows, worst, [0] * 6),
        "the whole vocabulary": (tied, highest, [-1] * 6),
        "ties": (tied, highest, [5, 1, 2, 3, 10, 0]),
        "all equal, the last chosen": (torch.zeros(3, 30), [29, 0, 15], [3, 1, 30]),
        "half the tokens banned": (banned, [2 * i for i in range(6)], [0, 3, 5, 15, -1, 31]),
        "more asked than are allowed": (banned, [2 * i for i in range(6)], [16, 3, 20, 15, 29, 0]),
        "one row of one token": (torch.zeros(1, 1), [0], [5]),
        "nearly impossible ones": (torch.tensor([[-300.0, 0.0, -200.0, spec.BANNED]]), [2], [4]),
        "equals only in float32": (torch.arange(30).expand(3, 30) * 1e-9, [0, 28, 29], [30, 2, 1]),
    }


def chosen_probe(seed: int) -> Values:
    """Report every case."""
    from mini_engine.sampler.logprobs import token_logprobs

    values: Values = {}
    for name, (logits, chosen, counts) in chosen_cases(seed).items():
        table = logits.double().log_softmax(-1)
        given = table.clone()
        asked = list(counts)
        report = token_logprobs(given, torch.tensor(chosen), asked)
        values[name] = entries(report)
        kinds = {type(value).__name__ for row in report for entry in row for value in vars(entry).values()}
        values[f"{name}: kinds of numbers"] = sorted(kinds)
        values[f"{name}: the caller's objects are unchanged"] = bool(torch.equal(given, table)) and asked == counts
    return values


def chosen_spec(seed: int) -> Values:
    """Rank each row of the same numbers."""
    values: Values = {}
    for name, (logits, chosen, counts) in chosen_cases(seed).items():
        rows = logits.double().log_softmax(-1).tolist()
        values[name] = [wanted(*row) for row in zip(rows, chosen, counts, strict=True)]
        values[f"{name}: kinds of numbers"] = ["float", "int"]
        values[f"{name}: the caller's objects are unchanged"] = True
    return values


REGISTRY.add(
    "L4.I.chosen",
    "The chosen token comes first, then as many of the likeliest as were asked for; ranks from 1, by id on ties.",
    chosen_probe,
    close(chosen_spec, 1e-6),
)

PROMPTS = (
    (7, 5, "float32"),
    (12, 0, "float32"),
    (5, -1, "float32"),
    (2, 3, "float32"),
    (1, 4, "float32"),
    (9, 45, "float32"),
    (8, 6, "bfloat16"),
)
PROMPT_VOCABULARY = 40


def prompt_logits(length: int, dtype: str, seed: int) -> Tensor:
    """Draw logits that are not log-probabilities: their masses sum to far more than 1."""
    return random_tensor(length, PROMPT_VOCABULARY, seed=seed + 710 + length, dtype=dtype) + 3.0


def prompt_probe(seed: int) -> Values:
    """Report prompts of several lengths."""
    from mini_engine.sampler.logprobs import prompt_logprobs

    return {
        f"{length} tokens, {count} alternatives, {dtype}": entries(
            prompt_logprobs(prompt_logits(length, dtype, seed), random_ids(PROMPT_VOCABULARY, length, seed), count)
        )
        for length, count, dtype in PROMPTS
    }


def prompt_spec(seed: int) -> Values:
    """Let row i predict token i + 1."""
    values: Values = {}
    for length, count, dtype in PROMPTS:
        ids = random_ids(PROMPT_VOCABULARY, length, seed)
        rows = prompt_logits(length, dtype, seed).tolist()
        report: list[Any] = [None]
        for row, following in zip(rows, ids[1:], strict=False):
            report.append(wanted(spec.log_softmax(row), following, count))
        values[f"{length} tokens, {count} alternatives, {dtype}"] = report
    return values


REGISTRY.add(
    "L4.I.prompt",
    "A prompt's first token has no log-probability; row i of the logits is the distribution of token i + 1.",
    prompt_probe,
    close(prompt_spec, TOLERANCE),
)


def scale_probe(seed: int) -> Values:
    """Sum the masses of a whole vocabulary."""
    from mini_engine.sampler.logprobs import prompt_logprobs

    report = prompt_logprobs(prompt_logits(6, "float32", seed), random_ids(PROMPT_VOCABULARY, 6, seed), -1)
    return {
        f"token {i}": [math.exp(float(e.logprob)) for e in row[1:]] for i, row in enumerate(report) if row is not None
    }


def scale_verdict(seed: int, got: Values) -> list[Failure]:
    """Natural logarithms of probabilities: their masses add up to 1."""
    failures = []
    for name, masses in got.items():
        total = sum(float(mass) for mass in masses)
        if len(masses) != PROMPT_VOCABULARY or not abs(total - 1) <= TOLERANCE:
            failures.append(Failure(name, f"{len(masses)} masses", "a sum of 1", f"{total:.6g}"))
    return failures if len(got) == 5 else [Failure("tokens with log-probabilities", "", "5", str(len(got)))]


REGISTRY.add(
    "L4.I.mass",
    "The probabilities of a whole vocabulary add up to 1.",
    scale_probe,
    scale_verdict,
)
