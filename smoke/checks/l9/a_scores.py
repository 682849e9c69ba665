"""The checks of the scores of choices (L9.A): pure functions of log-probabilities. No model."""

import random
from copy import deepcopy
from typing import Any

from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise, close

REGISTRY = Registry()
Rows = list[list[float]]
NEXT = -1.0 - 2.0**-52  # the number below -1


def drawn_rows(seed: int, what: str, count: int = 60) -> list[Rows]:
    """Draw log-probabilities of 1 to 5 choices of 1 to 5 tokens: quarters, so that sums are exact, and zeros."""
    rng = random.Random(f"{what} {seed}")
    return [
        [[-rng.choice((0, 0, 1, 2, 3, 8)) / 4 for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 5))]
        for _ in range(count)
    ]


def named(cases: list[Any]) -> dict[str, Any]:
    """Name cases by what they are."""
    return {f"case {place}, {case}": case for place, case in enumerate(cases)}


def mean_cases(seed: int) -> dict[str, Rows]:
    """Return rows of every kind: certain tokens, one token, one choice."""
    return named([[[0.0]], [[0.0, 0.0], [-1.0, 0.0]], [[-2.0, 0.0, 0.0, 0.0], [-1.0]], *drawn_rows(seed, "mean")])


def mean_probe(seed: int) -> Values:
    """Score them, and look whether the rows are what they were."""
    from mini_engine.lang.choices import mean_scores

    values = Values()
    for name, rows in mean_cases(seed).items():
        given = deepcopy(rows)
        values[name] = [list(mean_scores(given)), given == rows]
    return values


def mean_spec(seed: int) -> Values:
    """Add up and divide by the number of tokens."""
    return {name: [[sum(row) / len(row) for row in rows], True] for name, rows in mean_cases(seed).items()}


def greedy_cases(seed: int) -> dict[str, Rows]:
    """Return rows that are tied for a while, to the end, and whose shorter ones are decided by their mean."""
    return named(
        [
            [[-1.0, -1.0], [-0.5, -3.0], [-2.0]],
            [[-1.0, -2.0], [-1.0, -1.0], [-1.0, -1.0]],
            [[-1.0], [-1.0, -2.0], [-1.0, -0.5]],
            [[-1.0, -3.0], [-1.0, -2.5, -4.0], [-1.0, -2.0, -9.0]],
            [[0.0], [0.0, 0.0, 0.0]],
            [[-1.0, -2.0], [NEXT, -0.5]],
            *drawn_rows(seed, "greedy", 150),
        ]
    )


def greedy_probe(seed: int) -> Values:
    """Score them, and look whether the scores are floats and the rows are what they were."""
    from mini_engine.lang.choices import greedy_scores

    values = Values()
    for name, rows in greedy_cases(seed).items():
        given = deepcopy(rows)
        scores = list(greedy_scores(given))
        values[name] = [scores, all(isinstance(score, float) for score in scores), given == rows]
    return values


def greedy_spec(seed: int) -> Values:
    """Ask for every choice and place whether no choice that is still in has a higher value there."""
    values = Values()
    for name, rows in greedy_cases(seed).items():
        longest = max(len(row) for row in rows)

        def value(row: list[float], place: int) -> float:
            return row[place] if place < len(row) else sum(row) / len(row)

        scores = [0.0 for _ in rows]
        for place in range(longest):
            inside = [i for i in range(len(rows)) if scores[i] == place]
            for i in inside:
                if all(value(rows[i], place) >= value(rows[j], place) for j in inside):
                    scores[i] = place + 1.0
        values[name] = [scores, True, True]
    return values


def pairs(seed: int) -> dict[str, list[Rows]]:
    """Return values with and without the prompt; without it the first is 0."""
    rng = random.Random(f"pairs {seed}")
    cases = [[[[-1.0, -1.0], [-0.5, -3.0], [-2.0]], [[0.0, -1.0], [0.0, -3.0], [0.0]]]]
    for rows in drawn_rows(seed, "unconditional"):
        cases.append([rows, [[0.0, *(-rng.randint(0, 12) / 4 for _ in row[1:])] for row in rows]])
    return named(cases)


def unconditional_probe(seed: int) -> Values:
    """Score them, and look whether the rows are what they were."""
    from mini_engine.lang.choices import unconditional_scores

    values = Values()
    for name, pair in pairs(seed).items():
        given = deepcopy(pair)
        values[name] = [list(unconditional_scores(*given)), given == pair]
    return values


def unconditional_spec(seed: int) -> Values:
    """Subtract token by token and take the mean of all of them, the first included."""
    return {
        name: [
            [
                sum(row[place] - own[place] for place in range(len(row))) / len(row)
                for row, own in zip(rows, alone, strict=True)
            ],
            True,
        ]
        for name, (rows, alone) in pairs(seed).items()
    }


def score_lists(seed: int) -> dict[str, list[float]]:
    """Return scores with the highest anywhere, once and several times; all equal; one alone."""
    rng = random.Random(f"best {seed}")
    drawn = [[-rng.randint(0, 4) / 2 for _ in range(rng.randint(1, 6))] for _ in range(60)]
    return named([[0.0], [-1.0, -1.0, -1.0], [-2.0, -1.0, -1.0], [-1.0, -2.0, -1.0], [3.0, 3.0], [NEXT, -1.0], *drawn])


def best_probe(seed: int) -> Values:
    """Choose, and look whether the scores are what they were."""
    from mini_engine.lang.choices import best_choice

    values = Values()
    for name, scores in score_lists(seed).items():
        given = list(scores)
        values[name] = [int(best_choice(given)), given == scores]
    return values


def best_spec(seed: int) -> Values:
    """Take the first that no other exceeds."""
    return {
        name: [next(i for i, score in enumerate(scores) if not any(other > score for other in scores)), True]
        for name, scores in score_lists(seed).items()
    }


REGISTRY.add(
    "L9.A.mean",
    "The mean counts every token, also one whose log-probability is exactly 0.",
    mean_probe,
    close(mean_spec, 1e-12),
)
REGISTRY.add(
    "L9.A.greedy",
    "The greedy score is the number of places at which a choice is among the best; a choice that has no more tokens "
    "goes on with its mean, and who is out stays out.",
    greedy_probe,
    bitwise(greedy_spec),
)
REGISTRY.add(
    "L9.A.unconditional",
    "The unconditional score is the mean, over all tokens, of what the prompt adds to each.",
    unconditional_probe,
    close(unconditional_spec, 1e-12),
)
REGISTRY.add(
    "L9.A.best",
    "The best choice is the one with the highest score, and the first of equals.",
    best_probe,
    bitwise(best_spec),
)
