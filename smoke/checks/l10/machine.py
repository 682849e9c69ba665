"""Drafters that know what comes, or what does not, and steps that are made by hand.

Owns: ``Prophet``, which knows whole texts and spoils a guess now and then, ``Liar``, whose guesses never come, requests
and steps of plain numbers. Must not know: the candidate's functions.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from smoke.checks.l5.a_request import build_request
from smoke.checks.l5.spec_scheduling import Person

FILLER = 3  # the token of a guess where no text says more
SPOILT = (-1, 10**6)  # ids that no token has


class Prophet:
    """Knows whole texts. A guess may be wrong at a place, cut short or too long, or hold an id that no token has."""

    def __init__(self, texts: Sequence[Sequence[int]], dice: random.Random, spoilt: float = 0.4) -> None:
        """Guess what ``texts`` say; each guess is spoilt with probability ``spoilt``."""
        self.texts = texts
        self.dice = dice
        self.spoilt = spoilt

    def ahead(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return ``most`` ids: what the longest of the texts has behind ``tokens``, and then fillers."""
        known = len(tokens)
        found = [list(text[known:]) for text in self.texts if list(text[:known]) == list(tokens)]
        return [*max(found, key=len, default=[]), *[FILLER] * most][:most]

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return what comes, now and then with a fault, and now and then more of it than was asked for."""
        draft = self.ahead(tokens, most + self.dice.choice([0, 0, 2]))
        if self.dice.random() < self.spoilt:
            place = self.dice.randrange(len(draft))
            draft[place] = self.dice.choice([(draft[place] + 1) % 90] * 3 + [*SPOILT])
            draft = draft[: self.dice.choice([1, 3, 100])]
        return draft


class Liar(Prophet):
    """Says what will not come."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return as many ids as asked for; none is the token that comes in its place."""
        return [token - 1 if token else 1 for token in self.ahead(tokens, most)]


class Keen:
    """Stands in for what decides how much a request guesses: as much as there is room for, however wrong it was."""

    def __init__(self, drafter: Any) -> None:
        """Ask ``drafter``."""
        self.drafter = drafter

    def next(self, request: Any, most: int) -> list[int]:
        """Return what the drafter says."""
        tokens = request.tokens(0, request.num_tokens)
        return list(self.drafter.propose(tokens, most))[:most]


@contextmanager
def keen() -> Iterator[None]:
    """Let all requests guess as much as there is room for."""
    with patch("mini_engine.scheduler.drafts.Guesses", Keen):
        yield


@dataclass(frozen=True)
class Row:
    """A chunk of a step: how far its request is, what it computes, and its draft."""

    prompt: int
    outputs: int
    start: int
    count: int
    draft: tuple[int, ...] = ()
    page_size: int = 4

    @property
    def known(self) -> int:
        """Tokens of prompt and output."""
        return self.prompt + self.outputs

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the newest token."""
        return self.start + self.count == self.known

    @property
    def pages(self) -> int:
        """Pages for all known tokens and the draft."""
        return -(-(self.known + len(self.draft)) // self.page_size)


def draw_rows(rng: random.Random) -> list[Row]:
    """Draw the chunks of a step: pieces of prompts, ends of prompts, single tokens; most that sample have a draft."""
    rows = []
    for _ in range(rng.randint(1, 6)):
        prompt = rng.randint(1, 9)
        outputs = rng.choice([0, rng.randint(1, 5)])
        count = rng.choice([1, rng.randint(1, prompt + outputs)])
        start = prompt + outputs - count
        if rng.random() < 0.2 and count > 1:
            count -= 1  # a piece that does not sample
        samples = start + count == prompt + outputs
        draft = tuple(rng.randrange(500, 600) for _ in range(rng.choice([0, 1, 2, 5]))) if samples else ()
        rows.append(Row(prompt, outputs, start, count, draft))
    return rows


def build_step(rows: Sequence[Row], preempted: Sequence[Any] = ()) -> Any:
    """Build the step of these chunks. No two requests have a page or a name in common."""
    from mini_engine.scheduler.scheduler import ScheduledBatch, ScheduledChunk

    chunks = []
    for index, row in enumerate(rows):
        request = build_request(
            Person(f"r{index}", row.prompt, 50, index, row.outputs, row.start, pages=row.pages, state="running")
        )
        request.pages = [100 * index + page for page in reversed(range(row.pages))]
        chunks.append(ScheduledChunk(request, row.start, row.count, row.samples, draft=row.draft))
    return ScheduledBatch(chunks, list(preempted))
