"""What the policy of the router is compared with: rules that know nothing of prefixes, and variants of itself.

They have the methods of ``PrefixPolicy`` that a simulation calls. Equal seeds give equal choices.
"""

import hashlib
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Protocol

from mini_engine.router.policy import PrefixPolicy
from mini_engine.router.tree import as_tokens

HASHED_TOKENS = 160  # of a prompt: more than all have in common, and no more than the first one of a chat has
POINTS = 64  # of each worker on the ring


class Rule(Protocol):
    """Says where requests go, and is told what became of them."""

    def add(self, worker: str) -> None:
        """Let a worker take requests."""

    def choose(self, tokens: Sequence[int]) -> str:
        """Return the worker for a prompt."""

    def begin(self, worker: str, tokens: Sequence[int]) -> None:
        """Note that a prompt was sent to ``worker``."""

    def end(self, worker: str, tokens: Sequence[int]) -> None:
        """Note that a request ended there."""

    def dropped(self, worker: str, tokens: Sequence[int], length: int) -> None:
        """Note what ``worker`` does not hold any more."""


class RoundRobin:
    """Every worker in turn."""

    def __init__(self) -> None:
        """Start without workers."""
        self.queues: dict[str, int] = {}
        self.turn = 0

    def add(self, worker: str) -> None:
        """Let ``worker`` take requests. Mutates."""
        self.queues[worker] = 0

    def choose(self, tokens: Sequence[int]) -> str:
        """Return the next worker. Mutates."""
        self.turn += 1
        return list(self.queues)[(self.turn - 1) % len(self.queues)]

    def begin(self, worker: str, tokens: Sequence[int]) -> None:
        """Note that a prompt was sent to ``worker``. Mutates."""
        self.queues[worker] += 1

    def end(self, worker: str, tokens: Sequence[int]) -> None:
        """Note that a request ended there. Mutates."""
        self.queues[worker] -= 1

    def dropped(self, worker: str, tokens: Sequence[int], length: int) -> None:
        """Take no note: nothing here knows of prefixes."""


class Random(RoundRobin):
    """Any worker."""

    def __init__(self, seed: int = 0) -> None:
        """Seed the choices."""
        super().__init__()
        self.source = random.Random(seed)

    def choose(self, tokens: Sequence[int]) -> str:
        """Draw a worker. Mutates."""
        return self.source.choice(list(self.queues))


class TwoChoices(Random):
    """The shorter queue of two that are drawn (Mitzenmacher, 2001)."""

    def choose(self, tokens: Sequence[int]) -> str:
        """Draw two workers and return the one with fewer requests. Mutates."""
        return min(self.source.sample(list(self.queues), min(2, len(self.queues))), key=self.queues.__getitem__)


class ConsistentHashing(RoundRobin):
    """The worker whose point on a ring follows the hash of the first ``hashed_tokens`` (Karger et al., 1997)."""

    def __init__(self, hashed_tokens: int = HASHED_TOKENS) -> None:
        """Start with an empty ring."""
        super().__init__()
        self.hashed_tokens = hashed_tokens
        self.ring: list[tuple[bytes, str]] = []

    def add(self, worker: str) -> None:
        """Put the points of ``worker`` on the ring. Mutates."""
        super().add(worker)
        for number in range(POINTS):
            insort(self.ring, (hashlib.sha256(f"{worker} {number}".encode()).digest(), worker))

    def choose(self, tokens: Sequence[int]) -> str:
        """Return the worker of the next point."""
        place = bisect_left(self.ring, (hashlib.sha256(as_tokens(tokens[: self.hashed_tokens]).tobytes()).digest(), ""))
        return self.ring[place % len(self.ring)][1]


class QueueFirst(PrefixPolicy):
    """The policy with its limits for all: no match counts while any queue is too far ahead."""

    def too_far_ahead(self, queue: int, shortest: int) -> bool:
        """Ask it of the longest queue."""
        return super().too_far_ahead(max(own.queue for own in self.workers.values()), shortest)


class Untold(PrefixPolicy):
    """The policy when no worker says what it dropped."""

    def dropped(self, worker: str, tokens: Sequence[int], length: int) -> None:
        """Take no note."""


RULES: dict[str, Callable[[int], Rule]] = {  # by name; from the seed
    "prefix": lambda seed: PrefixPolicy(),
    "round robin": lambda seed: RoundRobin(),
    "random": Random,
    "two choices": TwoChoices,
    "hashing": lambda seed: ConsistentHashing(),
}
VARIANTS: dict[str, Callable[[int], Rule]] = {  # of the policy
    "prefix, 1 ahead": lambda seed: PrefixPolicy(most_ahead=1),
    "prefix, 64 ahead": lambda seed: PrefixPolicy(most_ahead=64),
    "prefix, queue first": lambda seed: QueueFirst(),
    "prefix, untold": lambda seed: Untold(),
}
