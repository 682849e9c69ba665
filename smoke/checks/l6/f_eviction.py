"""The checks of eviction (L6.F): which pages go, how many, and what stays.

Owns: histories that fill a cache and empty it again. The order of nodes must be the order of their pages, worked out
one by one. No model.
"""

from collections.abc import Sequence
from typing import Any

from smoke.checks.l6.a_pages import PAGE_SIZES, cache_values, distinct, make_cache, tree_faults, tree_of
from smoke.checks.l6.c_walk import Draw, books_of, histories, history_probe, history_verdict
from smoke.checks.l6.spec_prefixes import ORDERS, Chances, Operation, Prefixes, draw_history
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences

REGISTRY = Registry()

# Exact --------------------------------------------------------------------------------------------------------------

LINE = ([7, 5, 6, 3], [2, 9], [8, 4, 1])  # pages of a node, of its child and of another node, which is older


def line_inserts(size: int) -> list[tuple[list[int], list[int]]]:
    """Return the tokens and pages that make the three nodes."""
    stem = distinct(size * 4)
    return [(distinct(size * 3, 900), LINE[2]), (stem, LINE[0]), ([*stem, *distinct(size * 2, 500)], LINE[0] + LINE[1])]


def exact_probe(seed: int) -> Values:
    """Evict every number of pages from the same tree, then from what is left once more."""
    values: Values = {}
    for size in PAGE_SIZES:
        for count in range(12):
            cache = make_cache(size)
            for tokens, pages in line_inserts(size):
                cache.insert(tokens, list(pages))
            got = cache.evict(count)
            first = cache_values(cache)
            again = cache.evict(2)
            values[f"page size {size}, {count} pages"] = {
                "gone": [sorted(got), sorted(again)],
                "evicted": cache.stats.num_pages_evicted,
                "left": first,
                "left of that": cache_values(cache),
                "is a list": isinstance(got, list),
            }
    return values


def exact_verdict(seed: int, got: Values) -> list[Failure]:
    """Take the pages one by one from the end of the oldest."""
    order = [*LINE[2][::-1], *LINE[1][::-1], *LINE[0][::-1]]
    failures: list[Failure] = []
    for size in PAGE_SIZES:
        for count in range(12):
            where = f"page size {size}, evict({count})"
            values = got[f"page size {size}, {count} pages"]
            expected = {
                "gone": [sorted(order[:count]), sorted(order[count : count + 2])],
                "is a list": True,
                "evicted": min(count + 2, len(order)),
            }
            failures += differences(expected, {part: values[part] for part in expected}, None, where)
            for name, gone in (("left", count), ("left of that", count + 2)):
                failures += tree_faults(values[name], size, f"{where}, {name}")
                prefixes = Prefixes(size)
                for tokens, pages in line_inserts(size):
                    prefixes.insert(tokens, pages, None, 0)
                kept = [row for row in prefixes.books() if row[2] in order[gone:]]
                held = [row[:3] for row in books_of(values[name], size)]
                failures += differences([row[:3] for row in kept], held, None, f"{where}, [key, tokens, page] {name}")
    return failures[:8]


REGISTRY.add(
    "L6.F.exact",
    "As many pages go as were asked for and no more: of the last node its tail alone, so that what is left still "
    "begins where it began. If there are fewer, all of them go.",
    exact_probe,
    exact_verdict,
)

# Orders -------------------------------------------------------------------------------------------------------------

FILLED = Chances(insert=8, match=5, hold=3, record=4, release=1)
AMOUNTS = (1, 2, 1, 3, 5, 1, 8, 13, 2, 1)


def filled(name: str, size: int) -> list[Operation]:
    """Return a history that fills a cache and leaves some of it locked."""
    history = draw_history(name, size, 90, FILLED)
    while history[-1][0] == "release":
        history.pop()
    return history


def num_held(history: Sequence[Operation]) -> int:
    """Return how many hits are held at the end."""
    return sum({"hold": 1, "release": -1}.get(kind, 0) for kind, *_ in history)


def emptying(order: str) -> Draw:
    """Return histories that fill a cache, unlock all of it, and evict a few pages again and again until it is empty."""

    def draw(seed: int) -> dict[int, list[Operation]]:
        histories_: dict[int, list[Operation]] = {}
        for size in PAGE_SIZES:
            history = filled(f"orders {order} {seed}", size)
            history += [("release", 0)] * num_held(history)
            histories_[size] = [*history, *(("evict", amount) for amount in AMOUNTS * 6), ("evict", 10_000)]
        return histories_

    return draw


def orders_probe(seed: int) -> Values:
    """Empty a cache in each order."""
    return {order: history_probe(emptying(order), order)(seed) for order in ORDERS}


def orders_verdict(seed: int, got: Values) -> list[Failure]:
    """Do the same page by page."""
    failures: list[Failure] = []
    for order in ORDERS:
        failures += history_verdict(emptying(order), order)(seed, got[order])
    return failures[:8]


REGISTRY.add(
    "L6.F.orders",
    "Leaf after leaf goes as each order says (lru, lfu, fifo, mru, priority), a parent in its turn once its last child "
    "has gone.",
    orders_probe,
    orders_verdict,
    needs=("L6.G",),
)

# Locked -------------------------------------------------------------------------------------------------------------


def locked(seed: int) -> dict[int, list[Operation]]:
    """Return histories that fill a cache, evict all that can be had with a part of it locked, and then the rest."""
    histories_: dict[int, list[Operation]] = {}
    for size in PAGE_SIZES:
        history = filled(f"locked {seed}", size)
        held = num_held(history)
        history += [("evict", 5), ("evict", 10_000), ("evict", 1)]
        histories_[size] = [*history, *[("release", 0)] * held, ("evict", 10_000), ("evict", 1)]
    return histories_


REGISTRY.add(
    "L6.F.locked",
    "A locked page never goes, and neither does what it hangs on; when nothing else is left, fewer pages come back.",
    history_probe(locked),
    history_verdict(locked),
    needs=("L6.G",),
)

# Nothing stays behind -----------------------------------------------------------------------------------------------

TENANTS = ("a", "b", None, "")


def emptied_probe(seed: int) -> Values:
    """Fill and empty a cache for several keys, twice, with one locked the first time. All nodes have one rank."""
    cache = make_cache(2)
    cache.rank = lambda node: (0,)
    values = Values()
    for round_ in range(2):
        for number, key in enumerate(TENANTS):
            cache.insert(distinct(8), [10 * number + place for place in range(4)], key)
        hit = cache.match(distinct(4), "b")
        if round_ == 0:
            cache.lock(hit)
        gone = cache.evict(1000)
        values[f"round {round_}, evicted"] = sorted(gone)
        values[f"round {round_}, cache"] = registers(cache)
        values[f"round {round_}, found"] = [len(cache.match(distinct(8), key).pages) for key in TENANTS]
        if round_ == 0:
            cache.unlock(hit)
            values["rest"] = sorted(cache.evict(2))
            values["rest, cache"] = registers(cache)
    first = cache.insert(distinct(4), [1, 2], "a")
    values["removed by hand"] = cache.remove(cache.nodes[first.path[-1]]).parent is None
    values["removed by hand, cache"] = [len(cache.nodes), len(cache.leaves), len(cache.roots)]
    return values


def registers(cache: Any) -> list[Any]:
    """Return what a cache holds: keys, then pages of nodes and of leaves."""
    nodes, leaves = ([list(n.pages) for n in part.values()] for part in (cache.nodes, cache.leaves))
    return [[str(key) for key in cache.roots], nodes, leaves, [node["pages"] for node in tree_of(cache)]]


def emptied_spec(seed: int) -> Values:
    """Worked out by hand: keys 0 to 3 have pages 0 to 3, 10 to 13 and so on; two pages of "b" are locked at first."""
    everything = [10 * number + place for number in range(4) for place in range(4)]
    nothing: list[Any] = [[], [], [], []]
    return {
        "round 0, evicted": [page for page in everything if page not in (10, 11)],
        "round 0, cache": [["b"], [[10, 11]], [[10, 11]], [[10, 11]]],
        "round 0, found": [0, 2, 0, 0],
        "rest": [10, 11],
        "rest, cache": nothing,
        "round 1, evicted": everything,
        "round 1, cache": nothing,
        "round 1, found": [0, 0, 0, 0],
        "removed by hand": True,
        "removed by hand, cache": [0, 0, 0],
    }


REGISTRY.add(
    "L6.F.nothing_left",
    "When the last page of a key has gone, so has its root; what is empty can be filled again. Of nodes with equal "
    "ranks any may go first.",
    emptied_probe,
    bitwise(emptied_spec),
)

# Histories ----------------------------------------------------------------------------------------------------------

ALL = Chances(insert=6, match=4, hold=3, again=1, record=4, release=4, evict=3)


def all_orders_probe(seed: int) -> Values:
    """Live through a history with all operations in each order."""
    return {order: history_probe(histories(f"all {order}", ALL, 200), order)(seed) for order in ORDERS}


def all_orders_verdict(seed: int, got: Values) -> list[Failure]:
    """Live through them with a dict."""
    failures: list[Failure] = []
    for order in ORDERS:
        failures += history_verdict(histories(f"all {order}", ALL, 200), order)(seed, got[order])
    return failures[:8]


REGISTRY.add(
    "L6.F.history",
    "A thousand operations of every kind, each order: the cache does what a dict of prefixes does, page by page.",
    all_orders_probe,
    all_orders_verdict,
    needs=("L6.G",),
    seconds=40.0,
)
