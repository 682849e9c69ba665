"""The checks of how much a request guesses (L10.B): by what came of its guesses, and of nothing else. No model."""

import random
from collections.abc import Sequence
from typing import Any

from smoke.checks.l5.a_request import build_request, output_of, prompt_of
from smoke.checks.l5.spec_scheduling import Person
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()
RUNS = 30


class Noted:
    """Proposes numbers that go on from the newest token, and notes what it is asked."""

    def __init__(self) -> None:
        """Nothing was asked yet."""
        self.asked: list[tuple[list[int], int]] = []

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return ``most`` ids."""
        self.asked.append(([int(token) for token in tokens], int(most)))
        return [tokens[-1] + 1 + place for place in range(most)]


def runs(seed: int) -> dict[str, tuple[Person, list[tuple[int, int]]]]:
    """Draw requests, and for each call the most that may be drafted and how many tokens come afterwards."""
    found = {}
    for number in range(RUNS):
        rng = random.Random(f"guesses {seed} {number}")
        person = Person("r0", rng.randint(1, 9), 900, outputs=rng.choice([0, 3]))
        found[f"request {number}"] = (person, [(rng.randint(1, 9), rng.randint(1, 4)) for _ in range(12)])
    return found


def text_probe(seed: int) -> Values:
    """Guess for requests that grow by tokens that go on from the newest one."""
    from mini_engine.scheduler.drafts import Guesses

    values = Values()
    for name, (person, calls) in runs(seed).items():
        drafter = Noted()
        guesses = Guesses(drafter)
        request = build_request(person)
        drafts = []
        for most, count in calls:
            drafts.append([int(token) for token in guesses.next(request, most)])
            start = request.tokens(0, request.num_tokens)[-1]
            request.output_ids += [start + 1 + place for place in range(count)]
        values[name] = {"drafts": drafts, "asked": [list(asked) for asked in drafter.asked]}
    return values


def text_verdict(seed: int, got: Values) -> list[Failure]:
    """The drafter is asked once a call, for the whole text; a draft is the beginning of what it says."""
    failures = []
    for name, (person, calls) in runs(seed).items():
        text: list[Any] = [*prompt_of(person), *output_of(person)]
        texts = []
        for _, count in calls:
            texts.append(list(text))
            text += [text[-1] + 1 + place for place in range(count)]
        failures += differences(texts, [asked[0] for asked in got[name]["asked"]], None, f"{name}, the text asked for")
        for (most, _), own, draft in zip(calls, texts, got[name]["drafts"], strict=True):
            whole = [own[-1] + 1 + place for place in range(most)]
            failures += differences(whole[: len(draft)], draft, None, f"{name}, a draft of at most {most}")
    return failures


REGISTRY.add(
    "L10.B.text",
    "In every step the drafter is asked once, with all that is known of the text, and a draft is the beginning of what "
    "it says.",
    text_probe,
    text_verdict,
)
