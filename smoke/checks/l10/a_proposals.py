"""The checks of what n-grams propose (L10.A): what a search through the whole text finds, without the search. No model.

Owns: texts that grow as answers do, a search from their end, and tokens that count how often they are looked at.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise
from smoke.framework.reads import Counted

REGISTRY = Registry()
GROWTHS = 80  # texts that are drawn
LONGEST = 16  # tokens of a text that is shown whole
SHORT, LONG = 300, 3_000  # tokens of history; a search through more would only run out of time
CALLS = 40  # steps after it
MOST_LOOKS = 200  # a call with one new token: it notes 3 n-grams, looks 3 up and copies 8 tokens


def searched(text: Sequence[int], most: int) -> list[int]:
    """Go back from the end until the newest 3 tokens, else 2, else 1, stand there too, and copy what follows."""
    for count in (3, 2, 1):
        for start in range(len(text) - count - 1, -1, -1):
            if list(text[start : start + count]) == list(text[len(text) - count :]):
                whole = list(text)
                for place in range(start + count, start + count + most):
                    whole.append(whole[place])
                return whole[len(text) :]
    return []


def grown(seed: int, number: int) -> list[tuple[list[int], int]]:
    """Draw a text that grows: its tokens at each call, and how many ids may be proposed."""
    rng = random.Random(f"growth {seed} {number}")
    kinds = rng.choice([2, 3, 8])  # different tokens: few repeat at once
    pieces = [[rng.randrange(kinds) for _ in range(rng.randint(1, 6))] for _ in range(3)]
    text: list[int] = []
    calls = []
    for _ in range(14):
        piece = rng.choice(pieces) if rng.random() < 0.5 else [rng.randrange(kinds) for _ in range(rng.randint(1, 4))]
        text = [*text, *(piece if rng.random() < 0.7 else piece[:1])]
        calls.append((text, rng.choice([1, 2, 3, 7, 12])))
    return calls


TEXTS: dict[str, tuple[list[int], int]] = {
    "no token": ([], 4),
    "one token": ([5], 4),
    "two different tokens": ([5, 6], 4),
    "one token twice: it goes on": ([5, 5], 4),
    "two tokens in turn: the copy repeats itself": ([5, 6, 5, 6], 7),
    "three in turn": ([5, 6, 7, 5, 6, 7], 8),
    "3 equal tokens count more than a later place with 2": ([1, 2, 3, 8, 9, 2, 3, 7, 1, 2, 3], 3),
    "2 equal tokens count more than a later place with 1": ([2, 3, 8, 9, 3, 7, 2, 3], 2),
    "of two places the later one": ([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], 1),
    "4 equal tokens count no more than 3": ([4, 1, 2, 3, 8, 9, 1, 2, 3, 7, 4, 1, 2, 3], 1),
    "a token of the very beginning": ([5, 8, 9, 7, 5], 2),
    "1 12 is not 11 2": ([1, 12, 9, 11, 2, 8, 1, 12], 1),
    "nothing may be proposed": ([5, 6, 5], 0),
}


def named(name: str, text: Sequence[int], most: int) -> str:
    """Name one question: the text, or how a long one ends, and how many ids may be proposed."""
    shown = f"{list(text)}" if len(text) <= LONGEST else f"{len(text)} tokens, … {list(text[-LONGEST:])}"
    return f"{name}: {shown}, at most {most}"


def search_probe(seed: int) -> Values:
    """Propose for whole texts and for texts that grow, and look at the text afterwards."""
    from mini_engine.scheduler.drafts import NGramDrafts

    values = Values()
    for name, (text, most) in TEXTS.items():
        given = list(text)
        values[named(name, text, most)] = list(NGramDrafts().propose(given, most))
        values[f"{name}, a tuple"] = list(NGramDrafts().propose(tuple(text), most))
        values[f"{name}, afterwards"] = given
    for number in range(GROWTHS):
        drafts = NGramDrafts()
        calls = grown(seed, number)
        for text, most in calls:
            values[named(f"text {number}, growing", text, most)] = list(drafts.propose(list(text), most))
        text, most = calls[-1]
        values[named(f"text {number}, at once", text, most)] = list(NGramDrafts().propose(list(text), most))
    return values


def search_spec(seed: int) -> Values:
    """Search anew for every call."""
    values = Values()
    for name, (text, most) in TEXTS.items():
        found = searched(text, most)
        values |= {named(name, text, most): found, f"{name}, a tuple": found, f"{name}, afterwards": text}
    for number in range(GROWTHS):
        calls = grown(seed, number)
        values |= {named(f"text {number}, growing", *call): searched(*call) for call in calls}
        values[named(f"text {number}, at once", *calls[-1])] = searched(*calls[-1])
    return values


REGISTRY.add(
    "L10.A.search",
    "What is proposed is what a search from the end of the text finds: the last place with the newest 3 tokens, else "
    "2, else 1, and what follows it; a copy that reaches the end goes on with itself.",
    search_probe,
    bitwise(search_spec),
)


def turns(seed: int) -> Iterator[tuple[str, int, list[int], int]]:
    """Yield the questions about texts that grow two by two, in turn: a name, whose text it is, the text, how many."""
    for number in range(0, GROWTHS, 8):
        for both in zip(grown(seed, number), grown(seed, number + 1), strict=True):
            for whose, (text, most) in enumerate(both, number):
                yield named(f"text {whose}, of two in turn", text, most), whose, text, most


def apart_probe(seed: int) -> Values:
    """Let two texts grow in turn, each with a drafter of its own, and ask twice at every length."""
    from mini_engine.scheduler.drafts import NGramDrafts

    values = Values()
    drafters: defaultdict[int, Any] = defaultdict(NGramDrafts)
    for name, whose, text, most in turns(seed):
        values[name] = [list(drafters[whose].propose(list(text), most)) for _ in range(2)]
    return values


def apart_spec(seed: int) -> Values:
    """Search each text alone; asking again changes nothing."""
    return {name: [searched(text, most)] * 2 for name, _, text, most in turns(seed)}


REGISTRY.add(
    "L10.A.apart",
    "Two requests know nothing of each other's text, and asking twice gives the same.",
    apart_probe,
    bitwise(apart_spec),
)


class Looks:
    """How often tokens were compared or hashed."""

    count = 0


class Token(int):
    """A token id that counts how often it is compared or hashed."""

    def __eq__(self, other: object) -> bool:
        """Compare, and count it."""
        Looks.count += 1
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        """Compare, and count it."""
        return not self == other

    def __hash__(self) -> int:
        """Hash, and count it."""
        Looks.count += 1
        return hash(int(self))


def looks_probe(seed: int) -> Values:
    """Count looks at tokens, call by call, after a short text and after a long one."""
    from mini_engine.scheduler.drafts import NGramDrafts

    values = Values()
    rng = random.Random(f"looks {seed}")
    for length in (SHORT, LONG):
        text = Counted(Token(rng.randrange(40)) for _ in range(length))
        drafts = NGramDrafts()
        drafts.propose(text, 8)
        counts = []
        for _ in range(CALLS):
            text.append(Token(rng.randrange(40)))
            before = text.reads + Looks.count
            drafts.propose(text, 8)
            counts.append(text.reads + Looks.count - before)
        values[f"{length} tokens"] = counts
    return values


def looks_verdict(seed: int, got: Values) -> list[Failure]:
    """Allow a call after a long text no more looks than one after a short text."""
    failures = []
    for length in (SHORT, LONG):
        counts = got[f"{length} tokens"]
        if len(counts) != CALLS or max(counts) > MOST_LOOKS:
            words = f"at most {MOST_LOOKS} looks at tokens in a call with one new token"
            failures.append(Failure(f"{length} tokens of history", "", words, str(max(counts, default=0))))
    return failures


REGISTRY.add(
    "L10.A.looks",
    "A draft in a text of 3,000 tokens takes as many looks at tokens as one in a text of 300: what follows an n-gram "
    "is known, not searched.",
    looks_probe,
    looks_verdict,
)
