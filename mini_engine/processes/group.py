"""What ranks can tell each other, and how one says that it cannot go on."""

from typing import Protocol

from torch import Tensor


class RankLost(Exception):  # noqa: N818, it is what happened
    """A rank cannot go on, so none can. ``rank`` is its number, ``reason`` what it said: the same on every rank."""

    def __init__(self, rank: int, reason: str) -> None:
        """Name the rank and its reason."""
        super().__init__(rank, reason)
        self.rank = rank
        self.reason = reason

    def __str__(self) -> str:
        """Return "rank 1: ValueError: …"."""
        return f"rank {self.rank}: {self.reason}"


class Group(Protocol):
    """The ranks of one model, seen from one of them.

    All ranks make the same calls in the same order. A call waits for the others. It raises ``RankLost`` if one of them
    has left, and where a rank is silent for too long.
    """

    rank: int  # this one, from 0
    size: int  # how many there are

    def all_gather(self, part: Tensor) -> list[Tensor]:
        """Return the ``part`` of every rank, in the order of ranks. All have the same shape and dtype."""
        ...

    def broadcast(self, tensor: Tensor) -> None:
        """Write what rank 0 has in ``tensor`` into those of the others, which have its shape and dtype. Mutates."""
        ...

    def leave(self, fault: RankLost) -> None:
        """Say why, and go. Whoever waits for this rank, or will, gets ``fault``."""
        ...
