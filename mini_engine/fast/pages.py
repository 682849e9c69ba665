"""Pages for many requests, each request's one after the other where that is possible.

Any free page would do; consecutive ones are faster, because attention can then read a sequence without copying it
together (``fast/attention/consecutive.py``), and all sequences at once if they begin at equal distances
(``fast/attention/strided.py``). So the pool is a row of places ``spacing`` pages apart, a request begins at a free
place and grows from there. When no place is free it begins with the longest free run; when that is too short, or the
page after its last one is taken, it gets the lowest free pages.
"""

from collections.abc import Sequence
from itertools import groupby


class PlacedAllocator:
    """Hands out page numbers 0 … ``num_pages - 1``, each to one owner at a time. The interface of ``PageAllocator``."""

    def __init__(self, num_pages: int, spacing: int) -> None:
        """Start with all pages free. Raises ``ValueError`` for fewer than one page."""
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; a pool needs at least 1 page")
        self.num_pages = num_pages
        self.spacing = max(spacing, 1)
        self.num_free = num_pages
        self.free_pages = [True] * num_pages

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take ``count`` pages: those behind page ``after``, or a place of their own if it is ``None``. Mutates.

        Raises ``ValueError`` if fewer than ``count`` pages are free, and takes nothing then.
        """
        if not 0 <= count <= self.num_free:
            raise ValueError(
                f"{count} pages wanted, {self.num_free} of {self.num_pages} are free; free some or make the pool larger"
            )
        if count == 0:
            return []  # most steps of most requests; looking for nothing would go through all pages
        pages = self.run(count, after + 1) if after is not None else self.place(count)
        pages = pages or [page for page, free in enumerate(self.free_pages) if free][:count]
        for page in pages:
            self.free_pages[page] = False
        self.num_free -= count
        return pages

    def is_free(self, page: int) -> bool:
        """Whether ``page`` has no owner."""
        return self.free_pages[page]

    def run(self, count: int, first: int) -> list[int]:
        """Return ``count`` pages from ``first`` on if all of them are free, else none."""
        pages = range(first, first + count)
        return list(pages) if pages.stop <= self.num_pages and all(self.free_pages[page] for page in pages) else []

    def place(self, count: int) -> list[int]:
        """Return a free run of ``count`` pages: at a place with room to grow, at any place, anywhere; else none."""
        places = range(0, self.num_pages, self.spacing)
        roomy = (self.run(count, first) for first in places if self.run(max(self.spacing, count), first))
        tight = (self.run(count, first) for first in places)
        return next(roomy, []) or next(filter(None, tight), []) or self.longest(count)

    def longest(self, count: int) -> list[int]:
        """Return the first ``count`` pages of the longest free run, where most room to grow is; none if it is short."""
        free = [page for page, is_free in enumerate(self.free_pages) if is_free]
        # Pages that follow one another are as far from their place in the list as each other.
        runs = [[page for _, page in run] for _, run in groupby(enumerate(free), lambda pair: pair[1] - pair[0])]
        best = max(runs, key=len, default=[])
        return best[:count] if len(best) >= count else []

    def free(self, pages: Sequence[int]) -> None:
        """Give ``pages`` back. Mutates; gives back nothing when it raises.

        Raises ``ValueError`` for a page that is free already or given twice.
        """
        wrong = [page for page in pages if self.free_pages[page]]
        if wrong or len(set(pages)) != len(pages):
            raise ValueError(f"pages {wrong or list(pages)} are freed twice or were never allocated")
        for page in pages:
            self.free_pages[page] = True
        self.num_free += len(pages)
