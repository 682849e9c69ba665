"""The radix cache against a dict of prefixes.

The model has no tree: one entry per cached page, named by its key and by all tokens up to its end. Who is evicted is
recomputed page by page: of the pages that no cached page goes on from and nobody locks, the one of the smallest rank.
That is the order of nodes, because the pages of a node share their rank. The fast loop runs
``MINI_ENGINE_RADIX_OPERATIONS`` operations, 40,000 without that variable; before a release run

    MINI_ENGINE_RADIX_OPERATIONS=1000000 pytest tests/unit/test_radix_cache.py -k books
"""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from mini_engine.radix_cache import EVICTIONS, Node, RadixCache, register_eviction
from mini_engine.scheduler.prefix_cache import PrefixHit

OPERATIONS = int(os.environ.get("MINI_ENGINE_RADIX_OPERATIONS", "40000"))
NUM_PAGES = 48
KEYS = [None, None, "tenant"]
Name = tuple[str | None, tuple[int, ...]]  # key, and the tokens up to the end of the page


@dataclass
class Entry:
    page: int
    created: int
    last_used: int
    num_uses: int = 0
    priority: int = 0
    locks: int = 0


# Written anew: the smallest goes first.
RANKS: dict[str, Callable[[Entry], object]] = {
    "lru": lambda e: e.last_used,
    "lfu": lambda e: (e.num_uses, e.last_used),
    "fifo": lambda e: e.created,
    "mru": lambda e: -e.last_used,
    "priority": lambda e: (e.priority, e.last_used),
}


@dataclass
class World:
    """A cache, its model and the pages that nobody has. Every operation is done on both and compared."""

    page_size: int
    eviction: str
    num_pages: int = NUM_PAGES
    entries: dict[Name, Entry] = field(default_factory=dict)
    locked: list[tuple[PrefixHit, list[Name]]] = field(default_factory=list)
    now: int = 0
    uses: tuple[int, int, int] = (0, 0, 0)  # requests, tokens, tokens hit
    inserted: int = 0
    evicted: int = 0

    def __post_init__(self) -> None:
        self.cache = RadixCache(self.page_size, self.eviction)
        self.free = list(range(self.num_pages))

    def names(self, tokens: Sequence[int], key: str | None) -> list[Name]:
        size = self.page_size
        return [(key, tuple(tokens[: (i + 1) * size])) for i in range(len(tokens) // size)]

    def known(self, tokens: Sequence[int], key: str | None) -> list[Name]:
        """The pages from the start on that are cached; looking makes them the most recently used."""
        self.now += 1
        found = []
        for name in self.names(tokens, key):
            if name not in self.entries:
                break
            self.entries[name].last_used = self.now
            found.append(name)
        return found

    def insert(self, tokens: Sequence[int], key: str | None, priority: int) -> None:
        names = self.names(tokens, key)
        if len(names) > len(self.free):
            return
        own = [self.free.pop() for _ in names]
        before, given = self.known(tokens, key), list(own)
        hit = self.cache.insert(tokens, given, key, priority)
        assert given == own, "the caller's list is the caller's"
        for name, page in zip(names, own, strict=True):
            if name in before:
                self.free.append(page)  # a duplicate
            else:
                self.entries[name] = Entry(page, self.now, self.now)
            self.entries[name].priority = max(self.entries[name].priority, priority)
        self.inserted += len(names) - len(before)
        assert list(hit.pages) == self.pages(names)

    def match(self, tokens: Sequence[int], key: str | None, lock: bool) -> None:
        found = self.known(tokens, key)
        hit = self.cache.match(tokens, key)
        assert list(hit.pages) == self.pages(found)
        if not lock:
            return
        expected = sum(self.entries[name].locks == 0 for name in found)
        assert self.cache.lock(hit) == expected
        for name in found:
            self.entries[name].locks += 1
        self.locked.append((hit, found))

    def unlock(self, index: int) -> None:
        hit, names = self.locked.pop(index)
        self.cache.unlock(hit)
        for name in names:
            self.entries[name].locks -= 1

    def record(self, index: int, num_tokens: int) -> None:
        hit, names = self.locked[index]
        self.cache.record(hit, num_tokens)
        for name in names:
            self.entries[name].num_uses += 1
        count, tokens, hits = self.uses
        self.uses = (count + 1, tokens + num_tokens, hits + len(names) * self.page_size)

    def evict(self, count: int) -> None:
        expected = []
        while len(expected) < count and (victim := self.next_victim()) is not None:
            expected.append(self.entries.pop(victim).page)
        got = self.cache.evict(count)
        assert sorted(got) == sorted(expected)
        self.free += got
        self.evicted += len(got)

    def next_victim(self) -> Name | None:
        """The page of the smallest rank that nothing goes on from and nobody holds."""
        size = self.page_size
        continued = {(key, tokens[:-size]) for key, tokens in self.entries}
        ends = [name for name, entry in self.entries.items() if entry.locks == 0 and name not in continued]
        return min(ends, key=lambda name: RANKS[self.eviction](self.entries[name]), default=None)

    def pages(self, names: Sequence[Name]) -> list[int]:
        return [self.entries[name].page for name in names]

    def check_counts(self) -> None:
        """What is cheap enough for every operation."""
        cache, size = self.cache, self.page_size
        locked = sum(entry.locks > 0 for entry in self.entries.values())
        assert len(self.free) + len(self.entries) == self.num_pages
        assert cache.num_pages == len(self.entries)
        assert cache.num_evictable == len(self.entries) - locked
        sizes = (cache.total_size, cache.evictable_size, cache.protected_size)
        assert sizes == (len(self.entries) * size, (len(self.entries) - locked) * size, locked * size)
        stats = cache.stats
        assert (stats.num_uses, stats.num_tokens, stats.num_tokens_hit) == self.uses
        assert (stats.num_pages_inserted, stats.num_pages_evicted) == (self.inserted, self.evicted)

    def check_tree(self) -> None:
        """Every page of the tree with all that is known of it, and every hit that is held, however often it was cut."""
        self.cache.check()
        held = sorted([*self.free, *(entry.page for entry in self.entries.values())])
        assert held == list(range(self.num_pages)), "a page is in two places or in none"
        seen = {}
        for node in self.cache.nodes.values():
            key, above = place(node)
            for i, page in enumerate(node.pages, start=1):
                name = (key, (*above, *node.tokens[: i * self.page_size]))
                assert name not in seen, "the same tokens are cached twice"
                seen[name] = Entry(page, node.created, node.last_used, node.num_uses, node.priority, node.lock_count)
        assert seen == self.entries
        for hit, names in self.locked:
            assert list(hit.pages) == self.pages(names), "a page that was locked is gone"
            assert pages_on_path(self.cache, hit) == list(hit.pages), "a cut has led a hit astray"


def place(node: Node) -> tuple[str | None, tuple[int, ...]]:
    """The key of the tree that a node is in, and the tokens above it."""
    above: tuple[int, ...] = ()
    while (node := node.parent).parent is not None:
        above = (*node.tokens, *above)
    return node.cache_key, above


def pages_on_path(cache: RadixCache, hit: PrefixHit) -> list[int]:
    return [page for node in reversed(list(cache.ancestry(hit))) for page in node.pages]


# ---- a million operations ----


def random_tokens(dice: random.Random, page_size: int) -> list[int]:
    """Few different pages, so that much is shared; lengths that are no whole pages."""
    tokens: list[int] = []
    for _ in range(dice.randrange(8)):
        page = [dice.choice([0, 0, 0, 1, 2])] * (page_size - 1)
        tokens += [*page, dice.choice([0, 0, 0, 1])]
    return tokens[: len(tokens) - dice.choice([0, 0, 1, page_size // 2])]


def run_operations(world: World, dice: random.Random, count: int, check_every: int) -> None:
    for step in range(count):
        choice, key = dice.random(), dice.choice(KEYS)
        if choice < 0.35:
            world.insert(random_tokens(dice, world.page_size), key, dice.choice([0, 0, 1, 2]))
        elif choice < 0.65:
            world.match(random_tokens(dice, world.page_size), key, lock=dice.random() < 0.4)
        elif choice < 0.75 and world.locked:
            world.record(dice.randrange(len(world.locked)), dice.randrange(1, 200))
        elif choice < 0.9 and world.locked:
            world.unlock(dice.randrange(len(world.locked)))
        else:
            world.evict(dice.choice([0, 1, 1, 2, 5, 5, 30]))
        world.check_counts()
        if step % check_every == 0:
            world.check_tree()
    world.check_tree()
    while world.locked:
        world.unlock(0)
    world.evict(world.num_pages)
    world.check_tree()
    assert world.cache.num_pages == 0
    assert (world.cache.nodes, world.cache.leaves, world.cache.roots) == ({}, {}, {})


@pytest.mark.parametrize("eviction", list(RANKS))
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_the_books_balance_after_every_operation(page_size: int, eviction: str) -> None:
    """20 cases, each in worlds of 500 operations."""
    assert set(RANKS) == set(EVICTIONS), "an order without an oracle"
    left, seed, evicted = OPERATIONS // 20, 0, 0
    while left > 0:
        dice = random.Random(f"{seed} {page_size} {eviction}")
        world = World(page_size, eviction, dice.choice([12, NUM_PAGES]))
        run_operations(world, dice, min(left, 500), check_every=10)
        evicted += world.evicted
        left, seed = left - 500, seed + 1
    assert evicted > OPERATIONS // 20 / 10, "too little was evicted to say anything"


# ---- stories ----


def filled(page_size: int = 1, eviction: str = "lru", *prompts: Sequence[int]) -> RadixCache:
    """A cache of ``prompts``, whose pages are numbered in the order in which they came."""
    cache, pages = RadixCache(page_size, eviction), iter(range(1000))
    for prompt in prompts:
        cache.insert(prompt, [next(pages) for _ in range(len(prompt) // page_size)])
    return cache


def test_errors_say_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_engine.radix_cache.EVICTIONS", dict(EVICTIONS))
    with pytest.raises(ValueError, match="no eviction order 'clock'; choose one of lru, lfu, fifo, mru, priority"):
        RadixCache(1, "clock")
    with pytest.raises(ValueError, match="'lru' exists already"):
        register_eviction("lru", lambda node: (0,))
    register_eviction("longest", lambda node: (-len(node.pages),))
    cache = filled(1, "longest", [1], [2, 3, 4], [5, 6])
    assert sorted(cache.evict(4)) == [1, 2, 3, 5]
    hit = cache.match([1])
    cache.lock(hit)
    cache.unlock(hit)
    with pytest.raises(AssertionError, match="unlocked more often than it was locked"):
        cache.unlock(hit)
    with pytest.raises(AssertionError, match="1 pages cannot hold 2 pages"):
        cache.insert([7, 8], [0])


def broken(cache: RadixCache, what: str) -> None:
    _, node = next(cache.descend())
    leaf = next(iter(cache.leaves.values()))
    match what:
        case "pages counted":
            cache.num_pages += 1
        case "evictable pages":
            cache.num_evictable -= 1
        case "hang nowhere":
            cache.nodes[99] = leaf
        case "leaves miscounted":
            cache.leaves[node.number] = node
        case "pages differ":
            leaf.tokens.append(5)
        case "misnamed":
            name, child = node.children.popitem()
            node.children[(*name, 99)] = child
        case "another parent":
            leaf.parent = leaf
        case "locked more often":
            leaf.lock_count = 1
            cache.num_evictable -= len(leaf.pages)
        case "used later":
            leaf.last_used = 10**6
        case "pages held":
            leaf.pages[0] = node.pages[0]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("pages counted", "pages counted"),
        ("evictable pages", "evictable pages miscounted"),
        ("hang nowhere", "hang nowhere"),
        ("leaves miscounted", "leaves miscounted"),
        ("pages differ", "tokens and pages differ"),
        ("misnamed", "misnamed"),
        ("another parent", "another parent"),
        ("locked more often", "locked more often"),
        ("used later", "used later"),
        ("pages held", "pages counted"),
    ],
)
def test_check_sees_a_broken_tree(what: str, message: str) -> None:
    cache = filled(1, "lru", [1, 2, 3], [1, 2, 4, 5])
    cache.check()
    broken(cache, what)
    with pytest.raises(AssertionError, match=message):
        cache.check()
