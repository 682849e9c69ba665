"""Spec of L6: a prefix cache without a tree, and histories to try one with.

Owns: a dict with one entry per cached page, named by its key and by all tokens up to its end; who is evicted, page by
page; random histories and what each of their operations gives. Nothing is counted on the way: every number is a
recount. Must not know: nodes, ``mini_engine``.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Name = tuple[str | None, tuple[int, ...]]  # key, and the tokens up to the end of the page
Operation = tuple[Any, ...]
STATISTICS = ("uses", "tokens", "hit", "inserted", "evicted")


@dataclass
class Entry:
    """One cached page. ``created`` and ``used`` are numbers of look-ups."""

    page: int
    created: int
    used: int
    uses: int = 0
    priority: int = 0
    locks: int = 0


# Who goes first has the smallest number. Pages with equal numbers lie on one path, and its end goes first anyway.
ORDERS: dict[str, Callable[[Entry], Any]] = {
    "lru": lambda entry: entry.used,
    "lfu": lambda entry: (entry.uses, entry.used),
    "fifo": lambda entry: entry.created,
    "mru": lambda entry: -entry.used,
    "priority": lambda entry: (entry.priority, entry.used),
}


@dataclass
class Prefixes:
    """A prefix cache as a dict. What a tree calls a hit is a list of names here."""

    page_size: int
    order: str = "lru"
    entries: dict[Name, Entry] = field(default_factory=dict)
    now: int = 0
    statistics: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATISTICS, 0))

    def names(self, tokens: Sequence[int], key: str | None) -> list[Name]:
        """Name the whole pages of ``tokens``."""
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(key, tuple(tokens[:end])) for end in ends]

    def match(self, tokens: Sequence[int], key: str | None = None) -> list[Name]:
        """Return the cached pages from the beginning on; looking makes them the latest used."""
        self.now += 1
        found: list[Name] = []
        for name in self.names(tokens, key):
            if name not in self.entries:
                break
            self.entries[name].used = self.now
            found.append(name)
        return found

    def insert(self, tokens: Sequence[int], pages: Sequence[int], key: str | None, priority: int) -> list[Name]:
        """Take the pages that are new; all on the way get at least this priority."""
        known = self.match(tokens, key)
        names = self.names(tokens, key)
        for place, name in enumerate(names):
            if name not in known:
                self.entries[name] = Entry(pages[place], self.now, self.now)
                self.statistics["inserted"] += 1
            self.entries[name].priority = max(self.entries[name].priority, priority)
        return names

    def lock(self, names: Sequence[Name]) -> int:
        """Lock each page once more; return how many were not locked before."""
        free = [name for name in names if self.entries[name].locks == 0]
        for name in names:
            self.entries[name].locks += 1
        return len(free)

    def unlock(self, names: Sequence[Name]) -> None:
        """Take one lock off each page."""
        for name in names:
            self.entries[name].locks -= 1

    def record(self, names: Sequence[Name], num_tokens: int) -> None:
        """Count a use of each page."""
        self.statistics["uses"] += 1
        self.statistics["tokens"] += num_tokens
        for name in names:
            self.entries[name].uses += 1
            self.statistics["hit"] += self.page_size

    def evict(self, count: int) -> list[int]:
        """Give up one page after the other: of the unlocked ones with none after them, the first in the order.

        Sorted by number, because the order does not matter to the caller.
        """
        gone: list[int] = []
        while len(gone) < count:
            continued = {(key, tokens[: -self.page_size]) for key, tokens in self.entries}
            ends = [name for name, entry in self.entries.items() if not entry.locks and name not in continued]
            if not ends:
                break
            first = min(ends, key=lambda name: ORDERS[self.order](self.entries[name]))
            gone.append(self.entries.pop(first).page)
            self.statistics["evicted"] += 1
        return sorted(gone)

    def pages(self, names: Sequence[Name]) -> list[int]:
        """Return the pages of ``names``."""
        return [self.entries[name].page for name in names]

    def sizes(self) -> list[int]:
        """Count: pages, evictable pages, then tokens in all, that could be evicted, that are locked."""
        held = len(self.entries)
        free = sum(1 for entry in self.entries.values() if entry.locks == 0)
        return [held, free, *(self.page_size * pages for pages in (held, free, held - free))]

    def books(self) -> list[list[Any]]:
        """Return all that is known of every page, times as their ranks."""
        created = ranks([entry.created for entry in self.entries.values()])
        used = ranks([entry.used for entry in self.entries.values()])
        rows = [
            [str(key), list(tokens), e.page, created[e.created], used[e.used], e.uses, e.priority, e.locks]
            for (key, tokens), e in self.entries.items()
        ]
        return sorted(rows, key=lambda row: row[:2])


def ranks(times: Sequence[int]) -> dict[int, int]:
    """Return a number for each time, 0 for the earliest: a clock may run as it likes."""
    return {time: rank for rank, time in enumerate(sorted(set(times)))}


# Histories ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chances:
    """How often each operation is drawn, in any unit."""

    insert: int = 4
    match: int = 4
    hold: int = 0
    again: int = 0
    record: int = 0
    release: int = 0
    evict: int = 0


def draw_tokens(rng: random.Random, page_size: int) -> list[int]:
    """Draw few different pages, so that much is shared, and lengths that are not whole pages."""
    pages = [[rng.randrange(2)] * (page_size - 1) + [rng.randrange(3)] for _ in range(rng.randrange(8))]
    tokens = [token for page in pages for token in page]
    return tokens[: len(tokens) - rng.choice([0, 0, 1, page_size // 2])]


def draw_history(name: str, page_size: int, count: int, chances: Chances) -> list[Operation]:
    """Draw operations. Pages are never numbered twice; ``held`` counts hits that are locked and not yet unlocked.

    insert tokens, first page, key, priority | match tokens, key | hold tokens, key: match and lock | again i: lock the
    held hit i once more | record i, tokens | release i | evict count
    """
    rng = random.Random(f"history {name} {page_size}")
    kinds = [kind for kind, weight in vars(chances).items() for _ in range(weight)]
    operations: list[Operation] = []
    held = page = 0
    for _ in range(count):
        kind = rng.choice(kinds)
        tokens = draw_tokens(rng, page_size)
        key = rng.choice([None, None, "a", ""])
        if kind == "insert":
            operations.append((kind, tokens, page, key, rng.choice([0, 0, 1, 2])))
            page += len(tokens) + 1
        elif kind in ("match", "hold"):
            operations.append((kind, tokens, key))
            held += kind == "hold"
        elif kind == "evict":
            operations.append((kind, rng.choice([0, 1, 1, 2, 5, 30])))
        elif held:
            more = (rng.randrange(1, 50),) if kind == "record" else ()
            operations.append((kind, rng.randrange(held), *more))
            held += {"again": 1, "release": -1}.get(kind, 0)
    return [*operations, *(("release", 0) for _ in range(held))]


SNAPSHOTS = 20  # operations between two looks at all that is known


def live(prefixes: Prefixes, history: Sequence[Operation]) -> tuple[list[Any], list[Any]]:
    """Return what each operation gives with the pages held and evictable after it, and the books now and then."""
    held: list[list[Name]] = []
    results: list[Any] = []
    books: list[Any] = []
    for number, operation in enumerate(history, start=1):
        results.append([happen(prefixes, held, operation), prefixes.sizes()[:2]])
        if number % SNAPSHOTS == 0 or number == len(history):
            books.append(prefixes.books())
    return results, books


def happen(prefixes: Prefixes, held: list[list[Name]], operation: Operation) -> Any:
    """Do one operation and return what it gives."""
    kind, *rest = operation
    if kind == "insert":
        tokens, first, key, priority = rest
        pages = numbered(first, tokens, prefixes.page_size)
        return prefixes.pages(prefixes.insert(tokens, pages, key, priority))
    if kind == "match":
        return prefixes.pages(prefixes.match(*rest))
    if kind == "hold":
        held.append(prefixes.match(*rest))
        return [prefixes.pages(held[-1]), prefixes.lock(held[-1])]
    if kind == "again":
        held.append(held[rest[0]])
        return prefixes.lock(held[-1])
    if kind == "record":
        return prefixes.record(held[rest[0]], rest[1])
    return prefixes.unlock(held.pop(rest[0])) if kind == "release" else prefixes.evict(*rest)


def numbered(first: int, tokens: Sequence[int], page_size: int) -> list[int]:
    """Return the pages that ``tokens`` lie on, the last one perhaps in part; downwards, so no page is its place."""
    count = -(-len(tokens) // page_size)
    return [first + count - place for place in range(count)]
