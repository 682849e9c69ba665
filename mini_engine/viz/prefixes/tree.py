"""The tree of a prefix cache, recorded event by event, and a place in the picture for each of its nodes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Literal

from mini_engine.radix_cache import Node, RadixCache

Path = tuple[tuple[int, ...] | str | None, ...]  # cache key, then the tokens of every page from the root on


BoxState = Literal["kept", "new", "evicted"]


@dataclass(frozen=True)
class Edge:
    """A node after an event.

    ``path``: of its last page, which is the tokens of every page from the root on. ``texts``: of each of its pages.
    """

    path: Path
    pages: tuple[int, ...]
    texts: tuple[str, ...]
    locks: int

    def cells(self) -> Iterator[tuple[Path, int, str]]:
        """Yield the path, number and text of each of its pages."""
        above = len(self.path) - len(self.pages)
        for index, (page, text) in enumerate(zip(self.pages, self.texts, strict=True)):
            yield self.path[: above + index + 1], page, text


@dataclass(frozen=True)
class Frame:
    """A tree after an event."""

    caption: str
    edges: tuple[Edge, ...]


class Film:
    """Records the tree of a cache after each event."""

    def __init__(self, cache: RadixCache, decode: Callable[[list[int]], str] | None = None) -> None:
        """Record ``cache``. ``decode`` turns tokens into text; by default a token is the code of a letter."""
        self.cache = cache
        self.frames = list[Frame]()
        self.decode = decode or letters

    def shoot(self, caption: str) -> None:
        """Record the tree as it is now. Mutates."""
        self.frames.append(Frame(caption, tuple(self.edge(node) for _, node in self.cache.descend())))

    def edge(self, node: Node) -> Edge:
        """Return a node as it is now."""
        above = list[int]()
        top = node
        size = self.cache.page_size
        while top.parent is not None:
            above = top.tokens + above
            top = top.parent
        own = [node.tokens[i : i + size] for i in range(0, len(node.tokens), size)]
        path = (top.cache_key, *(tuple(above[i : i + size]) for i in range(0, len(above), size)))
        return Edge(path, tuple(node.pages), tuple(map(self.decode, own)), node.lock_count)


def letters(tokens: list[int]) -> str:
    """Return the text whose letters are ``tokens``."""
    return "".join(map(chr, tokens))


@dataclass(frozen=True)
class Box:
    """A node, or the evicted part of one, in its place: ``start`` pages from the root, in line ``row``.

    ``parent_row``: the line of its parent; ``None`` below a root.
    """

    start: int
    row: int
    parent_row: int | None
    pages: tuple[int, ...]
    texts: tuple[str, ...]
    state: BoxState
    locks: int = 0


def boxes(frames: Sequence[Frame]) -> list[list[Box]]:
    """Return the boxes of every frame: its nodes, and what was evicted since the frame before.

    Branches keep the order in which they first appeared, so that a tree changes as little as possible.
    """
    seen: dict[Path, int] = {}
    for frame in frames:
        for edge in frame.edges:
            for path, _, _ in edge.cells():
                seen.setdefault(path, len(seen))
    return [place(before, now, seen) for before, now in pairwise((Frame("", ()), *frames))]


def place(before: Frame, now: Frame, seen: dict[Path, int]) -> list[Box]:
    """Return the boxes of the frame ``now``, line by line. ``seen``: path of a page -> when it was first seen."""
    known = {path: page for edge in before.edges for path, page, _ in edge.cells()}
    held = {path for edge in now.edges for path, _, _ in edge.cells()}
    drawn: list[tuple[Edge, BoxState]] = [
        (edge, "new" if all(known.get(path) != page for path, page, _ in edge.cells()) else "kept")
        for edge in now.edges
    ]
    for edge in before.edges:  # evicted pages are always the end of an edge
        gone = sum(path not in held for path, _, _ in edge.cells())
        if gone:
            drawn.append((replace(edge, pages=edge.pages[-gone:], texts=edge.texts[-gone:], locks=0), "evicted"))
    rows = lines_of([edge for edge, _ in drawn], seen)
    made = [
        Box(start, rows[edge.path], rows.get(edge.path[: start + 1]), edge.pages, edge.texts, state, edge.locks)
        for edge, state in drawn
        for start in [len(edge.path) - len(edge.pages) - 1]
    ]
    return sorted(made, key=lambda box: (box.row, box.start))


def lines_of(edges: Sequence[Edge], seen: dict[Path, int]) -> dict[Path, int]:
    """Return the line of every page, by path. The first child stays in the line of its parent, others come below.

    A page that continues an edge comes first, because an edge must lie in one line. Then comes the one seen first.
    """
    inner = {path for edge in edges for path, _, _ in list(edge.cells())[1:]}
    below: dict[Path, list[Path]] = {}
    for path in sorted(
        {path for edge in edges for path, _, _ in edge.cells()}, key=lambda p: (p not in inner, seen[p])
    ):
        below.setdefault(path[:-1], []).append(path)
    lines = count()
    rows = dict[Path, int]()

    def go(path: Path, row: int) -> None:
        rows[path] = row
        for index, child in enumerate(below.get(path, ())):
            go(child, next(lines) if index else row)

    for top in [path for path in below if len(path) == 1]:
        for path in below[top]:
            go(path, next(lines))
    return rows
