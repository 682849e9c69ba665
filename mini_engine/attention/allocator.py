"""L2: which pages of the KV pool are free, and which are owned. Pure Python, so its tests need no model."""

from collections import deque
from collections.abc import Sequence


class PageAllocator:
    """Hands out page numbers 0 … ``num_pages - 1``, each to one owner at a time, in no promised order.

    Every page is free or owned, never both: ``num_free`` + owned pages == ``num_pages`` after every call.
    """

    def __init__(self, num_pages: int) -> None:
        """Start with all pages free. Raises ``ValueError`` for fewer than one page."""
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; a pool needs at least 1 page")
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._owned: set[int] = set()  # only asked "is it in?", never iterated: sets have no order

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    def is_free(self, page: int) -> bool:
        """Whether ``page`` has no owner."""
        return page not in self._owned

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take ``count`` free pages and return them in a new list. Mutates; takes nothing when it raises.

        Any page will do, so ``after``, the last page that the owner has, changes nothing here.

        Raises ``ValueError`` for a count below 0, and if fewer than ``count`` pages are free: ask ``num_free`` first.
        """
        if not 0 <= count <= len(self._free):
            raise ValueError(
                f"{count} pages wanted, {len(self._free)} of {self.num_pages} are free; "
                "free some or make the pool larger"
            )
        pages = [self._free.popleft() for _ in range(count)]
        self._owned.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give ``pages`` back. Mutates the allocator, not the list; gives back nothing when it raises.

        Raises ``ValueError`` for a page that is not owned or stands twice: a double free is an error at once, and not
        two owners later on.
        """
        wrong = [page for page in pages if page not in self._owned]
        if wrong or len(set(pages)) != len(pages):
            raise ValueError(f"pages {wrong or list(pages)} are freed twice or were never allocated")
        self._owned.difference_update(pages)
        self._free.extend(pages)


def pages_needed(num_tokens: int, page_size: int) -> int:
    """Return how many pages hold ``num_tokens`` tokens: the quotient, rounded up."""
    return -(-num_tokens // page_size)
