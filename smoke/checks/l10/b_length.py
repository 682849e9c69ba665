"""The checks of how much a request guesses (L10.B): by what came of its guesses, and of nothing else. No model.

Owns: guesses and what came, a rule that looks at them token by token, and texts that a drafter knows in parts.
"""

import random
from collections.abc import Sequence
from typing import Any

from smoke.checks.l5.a_request import build_request, output_of, prompt_of
from smoke.checks.l5.spec_scheduling import Person
from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise

REGISTRY = Registry()
RUNS = 40  # requests that are drawn
LENGTHS = (0, 1, 2, 3, 5, 8)


def judged(length: int, guess: Sequence[int], came: Sequence[int]) -> int:
    """Look at what came where a guess was made; nothing to look at changes nothing."""
    pairs = list(zip(guess, came, strict=False))
    if not pairs:
        return length
    for guessed, token in pairs:
        if guessed != token:
            return length // 2
    return length * 2 or 1


def judge_cases(seed: int) -> dict[str, tuple[int, list[int], list[int]]]:
    """Return lengths, guesses and what came: all of it, a part, more, another first, middle or last token, nothing."""
    whole = [7, 8, 9, 6]
    came = {
        "all, and one more": [7, 8, 9, 6, 5],
        "all": [7, 8, 9, 6],
        "the beginning": [7, 8],
        "one token": [7],
        "another first one": [5, 8, 9, 6],
        "another last one": [7, 8, 9, 5],
        "another one in the middle": [7, 8, 5],
        "another token alone": [5],
        "a token of the guess at another place": [8],
        "nothing": [],
    }
    cases = {f"length {size}, {name}": (size, whole, tokens) for size in LENGTHS for name, tokens in came.items()}
    cases |= {f"length {size}, a guess of one, {t}": (size, [7], t) for size in LENGTHS for t in ([7], [7, 3], [3, 7])}
    cases |= {f"length {size}, no guess": (size, [], [7, 8]) for size in LENGTHS}
    rng = random.Random(f"judge {seed}")
    for number in range(RUNS):
        guess, tokens = ([rng.choice([1, 2]) for _ in range(rng.randint(0, 4))] for _ in range(2))
        cases[f"case {number}, {guess}, {tokens}"] = (rng.randint(0, 12), guess, tokens)
    return cases


def judge_probe(seed: int) -> Values:
    """Judge one guess in every case."""
    from mini_engine.scheduler.drafts import Guesses

    values = Values()
    for name, (length, guess, came) in judge_cases(seed).items():
        guesses = Guesses(Partly([], 0))
        guesses.length = length
        guesses.guess = list(guess)
        guesses.judge(list(came))
        values[name] = int(guesses.length)
    return values


def judge_spec(seed: int) -> Values:
    """Judge by the rule."""
    return {name: judged(*case) for name, case in judge_cases(seed).items()}


REGISTRY.add(
    "L10.B.judge",
    "A guess of which all came, as far as tokens came, makes the next draft twice as long, at least 1; another one "
    "half as long; where nothing was guessed or nothing came, it stays.",
    judge_probe,
    bitwise(judge_spec),
)


class Partly:
    """Knows a text, but for some of its places, and notes what it is asked. May say less than it is asked for."""

    def __init__(
        self, text: Sequence[int], most: int, wrong: frozenset[int] = frozenset(), kind: type[Any] = list
    ) -> None:
        """Be wrong at the places ``wrong``, and say at most ``most`` tokens, in a sequence of this ``kind``."""
        self.text = list(text)
        self.most = most
        self.wrong = wrong
        self.kind = kind
        self.asked: list[list[Any]] = []

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return what comes, or 1 more."""
        self.asked.append([[int(token) for token in tokens], int(most)])
        places = range(len(tokens), min(len(tokens) + min(most, self.most), len(self.text)))
        made: Sequence[int] = self.kind(self.text[place] + (place in self.wrong) for place in places)
        return made


def run_of(seed: int, number: int) -> tuple[Person, Partly, list[tuple[int, int]]]:
    """Draw a request, what is known of its text, and for each step the room for a draft and what else happens.

    Besides 0 that is: 1, its draft is cut to one token; 2, a token is appended; 3, no token comes.
    """
    rng = random.Random(f"guesses {seed} {number}")
    person = Person("r0", rng.randint(1, 9), 900, outputs=rng.choice([0, 3]))
    known = [*prompt_of(person), *output_of(person)]
    text = [*known, *(rng.randrange(100, 200) for _ in range(400))]
    share = rng.choice([0.0, 0.05, 0.3, 1.0])  # of places at which the drafter is wrong
    late = len(known) + rng.choice([0, 20])  # it is wrong before this place
    wrong = frozenset(place for place in range(len(text)) if place < late or rng.random() < share)
    events = [0, 0, 0, 0, 1, 2, 3] if number % 2 else [0]
    steps = [(rng.choice([1, 2, 5, 9, 30]), rng.choice(events)) for _ in range(30)]
    drafter = Partly(text, rng.choice([0, 3, 100, 100, 100]), wrong, list if number % 3 else tuple)
    return person, drafter, steps


def coming(text: Sequence[int], known: int, draft: Sequence[int], event: int) -> list[int]:
    """Return the tokens of a step: those of the draft that are right, and one more."""
    draft = list(draft)[:1] if event == 1 else list(draft)
    right = 0
    while right < len(draft) and draft[right] == text[known + right]:
        right += 1
    return list(text[known : known + right + 1 + (event == 2)]) if event != 3 else []


def next_probe(seed: int) -> Values:
    """Guess for requests in all of their steps."""
    from mini_engine.scheduler.drafts import Guesses

    values = Values()
    for number in range(RUNS):
        person, drafter, steps = run_of(seed, number)
        guesses = Guesses(drafter)
        request = build_request(person)
        drafts = []
        for most, event in steps:
            drafts.append([int(token) for token in guesses.next(request, most)])
            request.output_ids += coming(drafter.text, request.num_tokens, drafts[-1], event)
        values[f"request {number}"] = {"drafts": drafts, "asked": drafter.asked}
    return values


def next_spec(seed: int) -> Values:
    """Guess by the rule, with the whole text at hand."""
    values = Values()
    for number in range(RUNS):
        person, drafter, steps = run_of(seed, number)
        known = len([*prompt_of(person), *output_of(person)])
        length, seen, guess = 0, 0, list[int]()
        drafts = []
        for most, event in steps:
            text = drafter.text[:known]
            length = min(judged(length, guess, text[seen:]), most)
            guess = list(drafter.propose(text, length or 1))
            seen = known
            drafts.append(guess[:length])
            known += len(coming(drafter.text, known, drafts[-1], event))
        values[f"request {number}"] = {"drafts": drafts, "asked": drafter.asked}
    return values


REGISTRY.add(
    "L10.B.next",
    "In every step the drafter is asked once, with all that is known of the text: for as many tokens as the last "
    "guesses were good for, or for one that is only judged. A guess is judged once, by what came next.",
    next_probe,
    bitwise(next_spec),
)
