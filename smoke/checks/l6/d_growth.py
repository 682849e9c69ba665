"""The checks of growth (L6.D): what is inserted, what is there already, and whose pages are whose.

Owns: histories of inserts and single inserts into a known tree, and what they must give. No model.
"""

from copy import deepcopy
from typing import Any

from smoke.checks.l6.a_pages import cache_values, distinct, make_cache, tree_faults
from smoke.checks.l6.c_walk import BOOK, books_of, histories, history_probe, history_verdict
from smoke.checks.l6.spec_prefixes import Chances, Prefixes
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences

REGISTRY = Registry()
INSERTS = histories("inserts", Chances(insert=6, match=3))

REGISTRY.add(
    "L6.D.history",
    "Hundreds of inserts and matches give the pages of a dict of prefixes and leave the same pages with the same ages.",
    history_probe(INSERTS),
    history_verdict(INSERTS),
)

# One more ------------------------------------------------------------------------------------------------------------

Insert = tuple[list[int], list[int], str | None, int]  # tokens, pages, key, priority
SIZE = 4
LATER, TUPLES = "after the caller has changed its lists", "of tuples, [pages, a list finds them without a cut]"
STEM = distinct(12)  # three pages
# What is there: a stem of three pages that goes on in two ways, and another key. Pages are not in order on purpose.
BEFORE: tuple[Insert, ...] = (
    ([*STEM, *distinct(8, 300)], [14, 10, 13, 11, 12], None, 1),
    ([*STEM, *distinct(4, 400)], [24, 20, 23, 21], None, 0),
    (STEM, [34, 30, 33], "tenant", 0),
)
CASES: dict[str, Insert] = {
    "the same again": ([*STEM, *distinct(8, 300)], [54, 50, 53, 51, 52], None, 0),
    "the beginning of it": (STEM[:8], [54, 50], None, 0),
    "a leaf goes on": ([*STEM, *distinct(12, 300)], [54, 50, 53, 51, 52, 55], None, 0),
    "a leaf goes on with part of a page": ([*STEM, *distinct(10, 300)], [54, 50, 53, 51, 52, 55], None, 0),
    "a third way": ([*STEM, *distinct(8, 500)], [54, 50, 53, 51, 52], None, 0),
    "it differs in the second page": ([*STEM[:4], *distinct(8, 600)], [54, 50, 53], None, 0),
    "it differs in the last token of the first page": ([*STEM[:3], 7, *STEM[4:8]], [54, 50], None, 0),
    "the first token is the same and no more": ([100, 1, 2, 3, 4, 5, 6, 7], [54, 50], None, 0),
    "it differs inside a leaf": ([*STEM, *distinct(4, 300), *distinct(8, 700)], [54, 50, 53, 51, 52, 55], None, 0),
    "another key": ([*STEM, *distinct(8, 300)], [54, 50, 53, 51, 52], "tenant", 0),
    "a key that is new": (STEM, [54, 50, 53], "somebody", 0),
    "a key that is the empty string": (STEM, [54, 50, 53], "", 0),
    "nothing": ([], [], None, 3),
    "less than a page": (STEM[:3], [54], None, 3),
    "less than a page of a new key": (STEM[:3], [54], "somebody", 3),
    "part of a page more": (STEM[:6], [54, 50], None, 0),
    "a higher priority": ([*STEM, *distinct(4, 400)], [54, 50, 53, 51], None, 5),
    "a higher priority for a part": (STEM[:8], [54, 50], None, 5),
    "a lower priority": ([*STEM, *distinct(8, 300)], [54, 50, 53, 51, 52], None, 0),
}


def cases_probe(seed: int) -> Values:
    """Insert into the same tree each time."""
    values: Values = {}
    for name, (tokens, pages, key, priority) in CASES.items():
        cache = make_cache(SIZE)
        for before, own, *more in BEFORE:
            cache.insert(list(before), list(own), *more)
        given = [list(tokens), list(pages)]
        ticks = cache.now
        hit = cache.insert(*given, key=key, priority=priority)
        values[name] = {
            "ticks": cache.now - ticks,
            "hit": list(hit.pages),
            "path": list(hit.path),
            "the caller's lists": deepcopy(given),
            "cache": cache_values(cache),
            "inserted": cache.stats.num_pages_inserted,
            "again": list(cache.match(list(tokens), key).pages),
        }
        for own in given:
            own[:] = [-5] * len(own)
        values[name][LATER] = list(cache.match(list(tokens), key).pages)
        values[name][TUPLES] = tuples_hit(tokens, pages, key, priority)
    return values


def tuples_hit(tokens: list[int], pages: list[int], key: str | None, priority: int) -> list[Any]:
    """Insert the same, all as tuples; return the pages of the hit, and whether a list finds them without a cut."""
    cache = make_cache(SIZE)
    for before, own, *more in BEFORE:
        cache.insert(tuple(before), tuple(own), *more)
    hit = cache.insert(tuple(tokens), tuple(pages), key, priority)
    return [list(hit.pages), cache.match(list(tokens), key).path == hit.path]


def cases_verdict(seed: int, got: Values) -> list[Failure]:
    """Do the same with a dict."""
    failures: list[Failure] = []
    for name, (tokens, pages, key, priority) in CASES.items():
        prefixes = Prefixes(SIZE)
        values = got[name]
        for before in BEFORE:
            prefixes.insert(*before)
        hit = prefixes.pages(prefixes.insert(tokens, pages, key, priority))
        expected = {
            "ticks": 1,
            "hit": hit,
            "the caller's lists": [tokens, pages],
            "again": hit,
            LATER: hit,
            TUPLES: [hit, True],
            "inserted": prefixes.statistics["inserted"],
        }
        failures += differences(expected, {part: values[part] for part in expected}, None, name)
        failures += tree_faults(values["cache"], SIZE, name)
        failures += differences(prefixes.books(), books_of(values["cache"], SIZE), None, f"{name}, {BOOK}")
        held = {node["number"]: node["pages"] for node in values["cache"]["tree"]}
        on_path = [page for number in values["path"] for page in held[number]]
        failures += differences(hit, on_path, None, f"{name}, pages on the hit's path")
    return failures[:8]


REGISTRY.add(
    "L6.D.canonical",
    "A page that is there already is kept and named in the hit; the caller's is taken only where there is none, so no "
    "tokens are cached twice.",
    cases_probe,
    cases_verdict,
)

# Roots and leaves ----------------------------------------------------------------------------------------------------


def roots_probe(seed: int) -> Values:
    """Ask for roots, and grow by hand."""
    cache = make_cache(2)
    keys = (None, "", "tenant", "None")
    roots = [cache.root(key) for key in keys]
    values: Values = {
        "each key has its own": len({id(root) for root in roots}) == len(keys),
        "the second time the same": all(cache.root(key) is root for key, root in zip(keys, roots, strict=True)),
        "keys": [root.cache_key for root in roots],
        "empty": [[list(root.tokens), list(root.pages), root.parent is None] for root in roots],
        "not counted": [cache.num_pages, cache.num_evictable, len(cache.nodes), len(cache.leaves)],
    }
    cache.now = 7
    first = cache.grow(roots[2], [1, 2, 3, 4], [8, 5])
    values["after the first"] = [cache.num_pages, cache.num_evictable, leaf_pages(cache)]
    cache.now = 9
    second = cache.grow(first, [5, 6], [3])
    values["after one below it"] = [cache.num_pages, cache.num_evictable, leaf_pages(cache)]
    first.lock_count = 1
    cache.num_evictable = 1
    third = cache.grow(first, [5, 7], [4])
    values["after another below it"] = [cache.num_pages, cache.num_evictable, leaf_pages(cache)]
    nodes = (first, second, third)
    values["times"] = [[node.created, node.last_used] for node in nodes]
    values["blank"] = [[node.num_uses, node.priority, node.lock_count, len(node.children)] for node in nodes]
    values["parents"] = [node.parent is parent for node, parent in zip(nodes, (roots[2], first, first), strict=True)]
    values["names"] = [list(name) for name in [*roots[2].children, *first.children]]
    return values


def leaf_pages(cache: Any) -> list[list[int]]:
    """Return the pages of the leaves."""
    return sorted(list(leaf.pages) for leaf in cache.leaves.values())


def roots_spec(seed: int) -> Values:
    """Worked out by hand."""
    return {
        "each key has its own": True,
        "the second time the same": True,
        "keys": [None, "", "tenant", "None"],
        "empty": [[[], [], True]] * 4,
        "not counted": [0, 0, 0, 0],
        "after the first": [2, 2, [[8, 5]]],
        "after one below it": [3, 3, [[3]]],
        "after another below it": [4, 2, [[3], [4]]],
        "times": [[7, 7], [9, 9], [9, 9]],
        "blank": [[0, 0, 1, 2], [0, 0, 0, 0], [0, 0, 0, 0]],
        "parents": [True, True, True],
        "names": [[1, 2], [5, 6], [5, 7]],
    }


REGISTRY.add(
    "L6.D.leaves",
    "Each key has one root, which counts for nothing; a new leaf is counted, is new, and its parent is a leaf no more.",
    roots_probe,
    bitwise(roots_spec),
)


# Priority -----------------------------------------------------------------------------------------------------------

# tokens and priority of each insert; page size 1
PRIORITIES: dict[str, list[tuple[list[int], int]]] = {
    "it goes up the path": [([1, 2, 3], 0), ([1, 2, 3, 4, 5], 3)],
    "and up to the cut alone": [([1, 2, 3, 4], 1), ([1, 2], 4)],
    "not to the sibling": [([1, 2, 3], 1), ([1, 2, 4], 5)],
    "never down": [([1, 2, 3], 5), ([1, 2, 3, 4], 2), ([1, 2], 0)],
}


def priority_probe(seed: int) -> Values:
    """Insert, and look at every page's priority."""
    values: Values = {}
    for name, inserts in PRIORITIES.items():
        cache = make_cache(1)
        for number, (tokens, priority) in enumerate(inserts):
            cache.insert(tokens, [10 * number + place for place in range(len(tokens))], None, priority)
        rows = books_of(cache_values(cache), 1)
        values[name] = {str(row[1]): row[6] for row in rows}
    return values


def priority_spec(seed: int) -> Values:
    """Take the highest of all inserts that begin with a page's tokens."""
    values: Values = {}
    for name, inserts in PRIORITIES.items():
        ends = sorted({tuple(tokens[:end]) for tokens, _ in inserts for end in range(1, len(tokens) + 1)})
        values[name] = {
            str(list(end)): max(priority for tokens, priority in inserts if tuple(tokens[: len(end)]) == end)
            for end in ends
        }
    return values


REGISTRY.add(
    "L6.D.priority",
    "A page has the highest priority of all that was inserted through it, on the whole way from the root.",
    priority_probe,
    bitwise(priority_spec),
)
