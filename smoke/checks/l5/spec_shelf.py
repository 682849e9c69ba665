"""A prefix cache of a few lines for the scheduler's checks: pages on a shelf, found by all tokens up to their end.

Owns: what lies on the shelf and who holds it. Must not know: trees, ages, ``mini_engine`` (``build_shelf`` borrows its
null cache, for whatever else a scheduler may ask).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

Beginning = tuple[int, ...]  # all tokens up to the end of a page


class Shelf:
    """Whole pages by the tokens up to their end. A page and those before it can be held; what is not, can be evicted.

    ``surplus``: evicting gives that many pages more than was asked for, as a cache that evicts whole nodes does.
    """

    def __init__(self, hit_type: Any, page_size: int, surplus: int = 0) -> None:
        """Start empty; hits are built by ``hit_type``."""
        self.hit_type = hit_type
        self.page_size = page_size
        self.surplus = surplus
        self.pages: dict[Beginning, int] = {}
        self.holders: Counter[int] = Counter()
        self.evicted = 0
        self.records = list[list[int]]()

    @property
    def num_pages(self) -> int:
        """Pages on the shelf."""
        return len(self.pages)

    @property
    def num_evictable(self) -> int:
        """Pages that no request holds."""
        return sum(1 for page in self.pages.values() if not self.holders[page])

    def beginnings(self, token_ids: Sequence[int]) -> list[Beginning]:
        """Return the beginnings of ``token_ids`` that end with a page."""
        ends = range(self.page_size, len(token_ids) + 1, self.page_size)
        return [tuple(token_ids[:end]) for end in ends]

    def match(self, token_ids: Sequence[int], *_: Any, **__: Any) -> Any:
        """Return the pages of the longest beginning; one node, named by its last page, is the path."""
        found: list[int] = []
        for beginning in self.beginnings(token_ids):
            if beginning not in self.pages:
                break
            found.append(self.pages[beginning])
        return self.hit_type(tuple(found), tuple(found[-1:]))

    def record(self, hit: Any, num_tokens: int) -> None:
        """Note how many pages a request starts from, and how many tokens it has."""
        self.records.append([len(hit.pages), int(num_tokens)])

    def insert(self, token_ids: Sequence[int], pages: Sequence[int], *_: Any, **__: Any) -> Any:
        """Take what is not there yet."""
        for beginning, page in zip(self.beginnings(token_ids), pages, strict=False):
            self.pages.setdefault(beginning, page)
        return self.match(token_ids)

    def lock(self, hit: Any) -> int:
        """Hold pages."""
        before = self.num_evictable
        self.holders.update(hit.pages)
        return before - self.num_evictable

    def unlock(self, hit: Any) -> None:
        """Hold them no longer."""
        assert all(self.holders[page] > 0 for page in hit.pages), "pages are unlocked that no request holds"
        self.holders.subtract(hit.pages)

    def drop(self, hit: Any) -> list[int]:
        """Give up the pages of ``hit`` from its end on, until one is held or a longer entry goes on from it."""
        gone: list[int] = []
        for beginning in sorted((b for b, page in self.pages.items() if page in hit.pages), key=len, reverse=True):
            goes_on = any(len(b) > len(beginning) and b[: len(beginning)] == beginning for b in self.pages)
            if goes_on or self.holders[self.pages[beginning]]:
                break
            gone.append(self.pages.pop(beginning))
        return gone

    def evict(self, count: int) -> list[int]:
        """Give up the longest beginnings that no request holds."""
        gone: list[int] = []
        for beginning in sorted(self.pages, key=len, reverse=True):
            if len(gone) < count + self.surplus and not self.holders[self.pages[beginning]]:
                gone.append(self.pages.pop(beginning))
        self.evicted += len(gone)
        return gone


def build_shelf(page_size: int, surplus: int = 0) -> Any:
    """Build a shelf that the candidate's scheduler takes for a prefix cache."""
    from mini_engine.scheduler.prefix_cache import NullPrefixCache, PrefixHit

    kind = type("ShelfCache", (Shelf, NullPrefixCache), {})
    return kind(PrefixHit, page_size, surplus)
