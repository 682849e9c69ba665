"""``select``: the log-probabilities of every choice's tokens, and three ways to compare them. A higher score is better.

Source: SGLang's choices methods. A log-probability of exactly 0 is a certain token and counts like any other.
"""

from collections.abc import Sequence
from statistics import fmean

from mini_engine.lang.backends import Call
from mini_engine.lang.context import Answer, Context
from mini_engine.lang.expressions import Select
from mini_engine.lang.hub import Work
from mini_engine.prompts import encode_text
from mini_engine.sampler.params import SamplingParams

SCORED = SamplingParams(prompt_logprobs=0, max_new_tokens=1)
Row = Sequence[float]  # the log-probabilities of one choice's tokens, at least one


def mean_scores(rows: Sequence[Row]) -> list[float]:
    """Return the mean over each choice's tokens. It prefers long choices whose end follows from their beginning."""
    return [fmean(row) for row in rows]


def greedy_scores(rows: Sequence[Row]) -> list[float]:
    """Return how many tokens each choice stays among the best, as a greedy decoder would compare them one by one.

    A choice that has no more tokens goes on with its mean. Those that stay to the end are equal.
    """
    length = max(map(len, rows))
    padded = [[*row, *[fmean(row)] * (length - len(row))] for row in rows]
    scores = [0.0] * len(rows)
    best = list(range(len(rows)))
    for column in range(length):
        highest = max(padded[row][column] for row in best)
        best = [row for row in best if padded[row][column] == highest]
        for row in best:
            scores[row] += 1.0
    return scores


def unconditional_scores(rows: Sequence[Row], alone: Sequence[Row]) -> list[float]:
    """Return the mean of what the prompt adds to each token: ``alone`` has the tokens' values without the prompt.

    The first token of a choice has no value without a prompt; it is taken as 0.
    """
    return [fmean([a - b for a, b in zip(row, own, strict=True)]) for row, own in zip(rows, alone, strict=True)]


def best_choice(scores: Sequence[float]) -> int:
    """Return the place of the highest score, the first of equals."""
    return max(range(len(scores)), key=scores.__getitem__)


def same_values(ids: Sequence[Sequence[int]], rows: Sequence[Row]) -> list[list[float]]:
    """Return ``rows`` with one value for the same token after the same tokens, that of the first choice which has it.

    Two calls may differ in the last bits, and a difference there must not end a tie.
    """
    known: dict[tuple[int, ...], float] = {}
    return [
        [known.setdefault(tuple(own[: place + 1]), value) for place, value in enumerate(row)]
        for own, row in zip(ids, rows, strict=True)
    ]


def choose(context: Context, select: Select) -> Work:
    """Score the choices and append the best. Mutates ``context``.

    The first choice is scored before the others, which find the prompt in the prefix cache then. Raises ``ValueError``
    if nothing comes before.
    """
    prompt = context.prompt()
    if not prompt:
        raise ValueError("select compares choices after a text, and there is none; append one first")
    ids = [encode_text(context.tokenizer, choice) for choice in select.choices]
    conditional = [Call([*prompt, *own], SCORED, start=len(prompt)) for own in ids]
    yield from context.ask(conditional[0])
    alone = context.hub.alone
    new = {tuple(own): Call(own, SCORED, start=1) for own in ids if len(own) > 1 and tuple(own) not in alone}
    yield from context.ask(*conditional[1:], *new.values())
    alone.update({own: [0.0, *call.scores] for own, call in new.items()})
    rows = same_values(ids, [call.scores for call in conditional])
    scores = {
        "mean": mean_scores(rows),
        "greedy": greedy_scores(rows),
        "unconditional": unconditional_scores(rows, [alone.get(tuple(own), [0.0]) for own in ids]),
    }
    place = best_choice(scores[select.method])
    context.extend(select.choices[place], ids[place])
    context.set(select.name, Answer(select.choices[place], scores=scores, logprobs=rows))
