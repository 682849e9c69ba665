"""The checks of eviction (L6.F): who goes, how much of it, and what stays behind.

Owns: trees in which every page has its own place in each order, and histories with all operations. The order of a tree
must be the order of its pages, worked out one by one. No model.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from smoke.check import Failure, Registry, Values
from smoke.compare import bitwise, differences
from smoke.l6 import PAGE_SIZES, Trees, Twig, cache_values, distinct, make_cache, plant, tree_faults, tree_of
from smoke.l6_walk import (
    BOOK,
    books_of,
    draw_trees,
    entries_of,
    histories,
    history_probe,
    history_verdict,
)
from smoke.specs.prefixes import ORDERS, Chances

REGISTRY = Registry()

# Exact --------------------------------------------------------------------------------------------------------------

LINE = ([7, 5, 6, 3], [2, 9], [8, 4, 1])  # pages of a node, of its child and of another node, which is older


def line_trees(size: int) -> Trees:
    """Return the three nodes."""
    child = Twig(distinct(size * 2, 500), LINE[1], used=6)
    return {None: [Twig(distinct(size * 4), LINE[0], (child,), used=8), Twig(distinct(size * 3, 900), LINE[2], used=3)]}


def exact_probe(seed: int) -> Values:
    """Evict every number of pages from the same tree, then from what is left once more."""
    values: Values = {}
    for size in PAGE_SIZES:
        for count in range(12):
            cache = plant(size, line_trees(size))
            got = cache.evict(count)
            first = cache_values(cache)
            again = cache.evict(2)
            values[f"page size {size}, {count} pages"] = {
                "gone": [sorted(got), sorted(again)], "evicted": cache.stats.num_pages_evicted, "left": first,
                "left of that": cache_values(cache), "is a list": isinstance(got, list),
            }  # fmt: skip
    return values


def exact_verdict(seed: int, got: Values) -> list[Failure]:
    """Take the pages one by one from the end of the oldest."""
    order = [*LINE[2][::-1], *LINE[1][::-1], *LINE[0][::-1]]
    failures: list[Failure] = []
    for size in PAGE_SIZES:
        for count in range(12):
            where, values = f"page size {size}, evict({count})", got[f"page size {size}, {count} pages"]
            expected = {
                "gone": [sorted(order[:count]), sorted(order[count : count + 2])], "is a list": True,
                "evicted": min(count + 2, len(order)),
            }  # fmt: skip
            failures += differences(expected, {part: values[part] for part in expected}, None, where)
            for name, gone in (("left", count), ("left of that", count + 2)):
                failures += tree_faults(values[name], size, f"{where}, {name}")
                prefixes = entries_of(line_trees(size), size)
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


def aged(twigs: Sequence[Twig], dice: random.Random, times: list[int]) -> list[Twig]:
    """Give every node times of its own, and few different uses and priorities, so that ties are broken by time."""
    return [
        replace(
            twig, twigs=tuple(aged(twig.twigs, dice, times)), used=times.pop(), created=times.pop(),
            uses=dice.randrange(3), priority=dice.randrange(3),
        )
        for twig in twigs
    ]  # fmt: skip


def aged_trees(seed: int, size: int) -> Trees:
    """Draw trees in which each order is another one."""
    dice = random.Random(f"aged {seed} {size}")
    times = dice.sample(range(2000), 2000)
    return {key: aged(twigs, dice, times) for key, twigs in draw_trees(seed, size).items()}


AMOUNTS = (1, 2, 1, 3, 5, 1, 8, 13, 2, 1)


def orders_probe(seed: int) -> Values:
    """Evict a few pages again and again until nothing is left."""
    from mini_engine.radix_cache import EVICTIONS

    values: Values = {}
    for order in ORDERS:
        for size in (1, 4):
            cache = plant(size, aged_trees(seed, size))
            cache.rank = EVICTIONS[order]
            gone: list[list[int]] = []
            while cache.num_pages and len(gone) < 1000:
                gone.append(sorted(cache.evict(AMOUNTS[len(gone) % len(AMOUNTS)])))
            values[f"{order}, page size {size}"] = {"gone": gone, "cache": cache_values(cache)}
    return values


def orders_verdict(seed: int, got: Values) -> list[Failure]:
    """Do the same page by page."""
    failures: list[Failure] = []
    for order in ORDERS:
        for size in (1, 4):
            where, values = f"{order}, page size {size}", got[f"{order}, page size {size}"]
            prefixes = entries_of(aged_trees(seed, size), size)
            prefixes.order = order
            gone: list[list[int]] = []
            while prefixes.entries:
                gone.append(prefixes.evict(AMOUNTS[len(gone) % len(AMOUNTS)]))
            failures += differences(gone, values["gone"], None, f"{where}, pages evicted {AMOUNTS} at a time")
            failures += tree_faults(values["cache"], size, f"{where}, at the end")
    return failures[:8]


REGISTRY.add(
    "L6.F.orders",
    "Leaf after leaf goes as each order says (lru, lfu, fifo, mru, priority), a parent in its turn once its last child "
    "has gone.",
    orders_probe,
    orders_verdict,
)

# Locked -------------------------------------------------------------------------------------------------------------


def locked_twigs(twigs: Sequence[Twig], dice: random.Random, most: int) -> list[Twig]:
    """Lock some nodes; none more often than its parent."""
    found = []
    for twig in twigs:
        locks = min(most, dice.choice([0, 0, 1, 2]))
        found.append(replace(twig, locks=locks, twigs=tuple(locked_twigs(twig.twigs, dice, locks))))
    return found


def locked_trees(seed: int, size: int) -> Trees:
    """Draw trees of which parts are locked."""
    dice = random.Random(f"locked {seed} {size}")
    return {key: locked_twigs(twigs, dice, 2) for key, twigs in aged_trees(seed, size).items()}


def locked_probe(seed: int) -> Values:
    """Evict some, then all that can be had, then once more."""
    values: Values = {}
    for size in PAGE_SIZES:
        cache = plant(size, locked_trees(seed, size))
        before = cache.num_evictable
        gone = [sorted(cache.evict(count)) for count in (5, 10_000, 1)]
        values[f"page size {size}"] = {"before": before, "gone": gone, "cache": cache_values(cache)}
    return values


def locked_verdict(seed: int, got: Values) -> list[Failure]:
    """Do the same page by page; something must be locked and something free, or nothing was proved."""
    failures: list[Failure] = []
    for size in PAGE_SIZES:
        where, values = f"page size {size}", got[f"page size {size}"]
        prefixes = entries_of(locked_trees(seed, size), size)
        free = prefixes.sizes()[1]
        assert 0 < free < len(prefixes.entries), "a tree that is all locked or all free proves nothing"
        gone = [prefixes.evict(count) for count in (5, 10_000, 1)]
        expected = {"before": free, "gone": gone}
        failures += differences(expected, {part: values[part] for part in expected}, None, where)
        failures += tree_faults(values["cache"], size, where)
        failures += differences(prefixes.books(), books_of(values["cache"], size), None, f"{where}, {BOOK}")
    return failures[:8]


REGISTRY.add(
    "L6.F.locked",
    "A locked page never goes, and neither does what it hangs on; when nothing else is left, fewer pages come back.",
    locked_probe,
    locked_verdict,
)

# Nothing stays behind -----------------------------------------------------------------------------------------------

TENANTS = ("a", "b", None, "")


def emptied_probe(seed: int) -> Values:
    """Fill and empty a cache for several keys, twice, with one of them locked the first time."""
    cache, values = make_cache(2), Values()
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
    "When the last page of a key has gone, so has its root; what is empty can be filled again.",
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
