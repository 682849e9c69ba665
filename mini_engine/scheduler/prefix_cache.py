"""L5: the interface of a prefix cache, and its null form, which caches nothing. L6 has the real one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class PrefixHit:
    """Pages whose keys and values can be used as they are: those of the first ``len(pages) * page_size`` tokens.

    ``path`` names the nodes from below the root to the last one matched; requests with equal starts share a path.
    """

    pages: tuple[int, ...] = ()
    path: tuple[int, ...] = ()


class PrefixCache(Protocol):
    """The scheduler's view. Pages in the cache belong to the cache; a lock keeps the pages of a hit from eviction."""

    @property
    def num_pages(self) -> int:
        """Pages that the cache owns, locked or not."""

    @property
    def num_evictable(self) -> int:
        """Pages that ``evict`` could give back now."""

    def match(self, token_ids: Sequence[int], key: str | None = None) -> PrefixHit:
        """Return the longest cached prefix of ``token_ids`` among what was inserted under ``key``."""

    def record(self, hit: PrefixHit, num_tokens: int) -> None:
        """Note that a request of ``num_tokens`` tokens starts from ``hit``: for statistics and eviction. Mutates."""

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], key: str | None = None, priority: int = 0
    ) -> PrefixHit:
        """Take over the ``pages`` of ``token_ids``, whole pages only, and return the hit that they are from now on.

        Where the cache has a page of the same tokens already, the hit names that one and the caller keeps its own. A
        cache that does not want them returns a shorter hit. Mutates.
        """

    def lock(self, hit: PrefixHit) -> int:
        """Protect the pages of ``hit``; return how many stop being evictable by that. Mutates."""

    def unlock(self, hit: PrefixHit) -> None:
        """Undo one ``lock``. Mutates."""

    def drop(self, hit: PrefixHit) -> list[int]:
        """Give up the pages of ``hit`` that no other request needs, and return them: the caller owns them. Mutates."""

    def evict(self, count: int) -> list[int]:
        """Give up at least ``count`` pages if there are as many, and return them: the caller owns them. Mutates."""


class NullPrefixCache:
    """Caches nothing: the off value of L6."""

    num_pages = 0
    num_evictable = 0

    def match(self, token_ids: Sequence[int], key: str | None = None) -> PrefixHit:
        """Return no pages."""
        return PrefixHit()

    def record(self, hit: PrefixHit, num_tokens: int) -> None:
        """Note nothing."""

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], key: str | None = None, priority: int = 0
    ) -> PrefixHit:
        """Take over no pages."""
        return PrefixHit()

    def lock(self, hit: PrefixHit) -> int:
        """Protect nothing."""
        return 0

    def unlock(self, hit: PrefixHit) -> None:
        """Release nothing."""

    def drop(self, hit: PrefixHit) -> list[int]:
        """Return no pages."""
        return []

    def evict(self, count: int) -> list[int]:
        """Return no pages."""
        return []
