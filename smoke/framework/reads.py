"""A list that counts what is read of it: what a rule says about time is a number of reads, never of seconds."""

from collections.abc import Iterable, Iterator
from typing import Any


class Counted(list[Any]):
    """A list whose ``reads`` grow by one with each item that is handed out, alone or in a slice."""

    def __init__(self, items: Iterable[Any]) -> None:
        """Begin with these items, and no reads."""
        super().__init__(items)
        self.reads = 0

    def __getitem__(self, place: Any) -> Any:
        """Hand out an item or a slice."""
        found = super().__getitem__(place)
        self.reads += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self) -> Iterator[Any]:
        """Hand out item by item."""
        for item in super().__iter__():
            self.reads += 1
            yield item

    def __add__(self, other: Any) -> Any:
        """Hand out everything, before another list."""
        return [*self, *other]

    def __radd__(self, other: Any) -> Any:
        """Hand out everything, behind another list."""
        return [*other, *self]

    def copy(self) -> Any:
        """Hand out everything."""
        return [*self]
