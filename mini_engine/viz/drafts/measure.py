"""Follow the drafts of a request, count guesses in a text that is known, and verify drafts in two ways."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random

from mini_engine.config import EngineConfig
from mini_engine.llm import LLM
from mini_engine.outputs import RequestOutput
from mini_engine.prompts import Prompt
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.drafts import NGramDrafts

# --------------------------------------------------------------------------------------------- a request, step by step


@dataclass(frozen=True)
class DraftedStep:
    """What one step gave a request: the ids that came, and those that were drafted for the same places."""

    came: tuple[int, ...]
    draft: tuple[int, ...]

    @property
    def num_right(self) -> int:
        """How many drafted ids came."""
        return num_equal(self.came, self.draft)


def drafted_steps(
    config: EngineConfig, prompt: Prompt, params: SamplingParams
) -> tuple[list[DraftedStep], RequestOutput]:
    """Answer ``prompt``. Return what each step that gave tokens has given, and the answer."""
    llm = LLM(config=config)
    (answer,) = llm.generate([prompt], params)
    steps = []
    for step in llm.engine.log:
        came = tuple(delta.token_id for delta in step.deltas if delta.token_id is not None)
        accepted, refused = sum(step.accepted.values()), chain(*step.refused.values())  # of the only request
        if came:
            steps.append(DraftedStep(came, (*came[:accepted], *refused)))
    return steps, answer


# ------------------------------------------------------------------------------------------------ a text that is known


@dataclass(frozen=True)
class GuessCount:
    """Of ``total`` tokens, how many were guessed, and how many of them rightly."""

    total: int
    guessed: int
    right: int

    def __add__(self, other: "GuessCount") -> "GuessCount":
        """Count both."""
        return GuessCount(self.total + other.total, self.guessed + other.guessed, self.right + other.right)


NO_GUESSES = GuessCount(0, 0, 0)


def count_guesses(tokens: Sequence[int], start: int, length: int) -> GuessCount:
    """Guess each token from ``start`` on by what followed the ``length`` tokens before it the last time."""
    follows: dict[tuple[int, ...], int] = {}
    guessed = right = 0
    for place in range(length, len(tokens)):
        end = tuple(tokens[place - length : place])
        if place >= start and end in follows:
            guessed += 1
            right += follows[end] == tokens[place]
        follows[end] = tokens[place]
    return GuessCount(len(tokens) - start, guessed, right)


def steps_with(tokens: Sequence[int], start: int, most: int) -> list[DraftedStep]:
    """Return the steps that give ``tokens`` from ``start`` on, if each drafts ``most`` tokens where it can guess."""
    drafter = NGramDrafts()
    steps = []
    while start < len(tokens):
        draft = tuple(drafter.propose(tokens[:start], most)) if most else ()
        end = min(start + num_equal(tokens[start:], draft) + 1, len(tokens))
        steps.append(DraftedStep(tuple(tokens[start:end]), draft))
        start = end
    return steps


def num_equal(tokens: Sequence[int], draft: Sequence[int]) -> int:
    """Return how many tokens from the first on are equal."""
    pairs = enumerate(zip(tokens, draft, strict=False))
    return next((place for place, (own, other) in pairs if own != other), min(len(tokens), len(draft)))


# -------------------------------------------------------------------------------------------------- two ways to verify


@dataclass(frozen=True)
class Verified:
    """How often each token came in ``num_draws`` draws, and how often it was the drafted one."""

    counts: tuple[int, ...]
    num_right: int

    @property
    def num_draws(self) -> int:
        """Draws of a token."""
        return sum(self.counts)

    def chi_square(self, weights: Sequence[int]) -> float:
        """Return how far the counts are from those that ``weights`` let expect, as Pearson's chi-square."""
        expected = [self.num_draws * own / sum(weights) for own in weights]
        return sum((count - own) ** 2 / own for count, own in zip(self.counts, expected, strict=True))


def draw(weights: Sequence[int], dice: Random) -> int:
    """Draw a token with a chance that is proportional to its weight, a whole number."""
    return dice.choice([token for token, own in enumerate(weights) for _ in range(own)])


def verified(weights: Sequence[int], guess: Sequence[int], way: str, num_draws: int, seed: int = 0) -> Verified:
    """Draw drafts from ``guess`` and verify each.

    ``weights`` are the model's, ``guess`` the draft model's, whole numbers with the same sum. ``way``: "again" draws
    from the model and compares; "rejection" accepts by the quotient of both chances, and else draws from what the model
    has more.
    """
    dice = Random(seed)
    counts, num_right = [0] * len(weights), 0
    for _ in range(num_draws):
        token = draft = draw(guess, dice)
        if way == "again":
            token = draw(weights, dice)
        elif dice.randrange(guess[draft]) >= weights[draft]:
            token = draw([max(own - other, 0) for own, other in zip(weights, guess, strict=True)], dice)
        counts[token] += 1
        num_right += token == draft
    return Verified(tuple(counts), num_right)
