"""An allocator that keeps its free pages in a heap and an owned flag per page."""

import heapq


class PageAllocator:
    """Hands out the lowest free page first."""

    def __init__(self, num_pages: int) -> None:
        """Start with all pages free."""
        if num_pages < 1:
            raise ValueError(f"{num_pages} pages make no pool")
        self.num_pages = num_pages
        self._heap = list(range(num_pages))
        self._owned = [False] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._heap)

    def is_free(self, page: int) -> bool:
        """Whether ``page`` has no owner."""
        return not self._owned[page]

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take the ``count`` lowest free pages."""
        if count < 0 or count > self.num_free:
            raise ValueError(f"cannot allocate {count} pages: {self.num_free} are free")
        taken: list[int] = []
        while len(taken) < count:
            page = heapq.heappop(self._heap)
            self._owned[page] = True
            taken.append(page)
        return taken

    def free(self, pages: list[int]) -> None:
        """Give pages back."""
        if len(pages) != len(set(pages)):
            raise ValueError(f"{pages} names a page twice")
        for page in pages:
            if not 0 <= page < self.num_pages or not self._owned[page]:
                raise ValueError(f"page {page} is not owned")
        for page in pages:
            self._owned[page] = False
            heapq.heappush(self._heap, page)


def pages_needed(num_tokens: int, page_size: int) -> int:
    """Round up with divmod."""
    full, rest = divmod(num_tokens, page_size)
    return full + bool(rest)
