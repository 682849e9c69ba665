"""The checks of locks (L6.E) and of what a cache has saved (L6.G).

Owns: hits that are locked while others cut the nodes they end in, and uses that are counted. No model.
"""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from smoke.checks.l6.a_pages import PAGE_SIZES, Twig, cache_values, distinct, make_cache, plant, tree_faults, tree_of
from smoke.checks.l6.c_walk import histories, history_probe, history_verdict
from smoke.checks.l6.spec_prefixes import Chances, Prefixes
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, close, differences

REGISTRY = Registry()

# L6.E ---------------------------------------------------------------------------------------------------------------

HOLDS = histories("holds", Chances(insert=5, match=3, hold=4, again=1, release=4))

REGISTRY.add(
    "L6.E.history",
    "Through hundreds of inserts, matches, locks and unlocks, every page is locked as often as in a dict of prefixes, "
    "and pages that could be evicted are counted right.",
    history_probe(HOLDS),
    history_verdict(HOLDS),
)

# What is done, one after the other: lock or unlock the hit of the first n pages of a prompt.
Step = tuple[str, str, int]
PROMPTS = {"a": [0, 1, 2, 3, 4, 5], "b": [0, 1, 2, 7, 8], "c": [9, 9]}  # pages, each one token repeated
STORIES: dict[str, list[Step]] = {
    "one": [("lock", "a", 6), ("unlock", "a", 6)],
    "a part": [("lock", "a", 2), ("unlock", "a", 2)],
    "two that share": [("lock", "a", 6), ("lock", "b", 5), ("unlock", "a", 6), ("unlock", "b", 5)],
    "the other way round": [("lock", "a", 6), ("lock", "b", 5), ("unlock", "b", 5), ("unlock", "a", 6)],
    "the same hit twice": [("lock", "a", 4), ("lock", "a", 4), ("unlock", "a", 4), ("unlock", "a", 4)],
    "long, then a part of it": [("lock", "a", 6), ("lock", "a", 3), ("unlock", "a", 6), ("unlock", "a", 3)],
    "a part, then all of it": [("lock", "a", 1), ("lock", "a", 6), ("unlock", "a", 1), ("unlock", "a", 6)],
    "nothing": [("lock", "c", 0), ("lock", "a", 0), ("unlock", "a", 0), ("unlock", "c", 0)],
    "ever shorter": [
        *(("lock", "a", count) for count in (6, 5, 4, 2, 1)),
        *(("unlock", "a", count) for count in (6, 5, 4, 2, 1)),
    ],
    "all of them": [
        ("lock", "c", 2),
        ("lock", "b", 4),
        ("lock", "a", 5),
        ("unlock", "b", 4),
        ("lock", "b", 2),
        ("unlock", "c", 2),
        ("unlock", "a", 5),
        ("unlock", "b", 2),
    ],
}


def spelled(pages: Sequence[int], size: int) -> list[int]:
    """Return tokens: each page is one token repeated."""
    return [token for token in pages for _ in range(size)]


def stories_probe(seed: int) -> Values:
    """Lock and unlock, and read all sizes after each step."""
    values: Values = {}
    for size in PAGE_SIZES:
        for name, steps in STORIES.items():
            cache = make_cache(size)
            for number, pages in enumerate(PROMPTS.values()):
                cache.insert(spelled(pages, size), [10 * number + place for place in range(len(pages))])
            results: list[Any] = []
            hits: dict[tuple[str, int], Any] = {}
            for what, prompt, count in steps:
                if what == "lock":
                    hits[prompt, count] = cache.match(spelled(PROMPTS[prompt][:count], size))
                    given = cache.lock(hits[prompt, count])
                else:
                    given = cache.unlock(hits[prompt, count])
                sizes = [cache.num_pages, cache.num_evictable]
                results.append([given, *sizes, cache.total_size, cache.evictable_size, cache.protected_size])
            values[f"page size {size}, {name}"] = {"results": results, "cache": cache_values(cache)}
    return values


def stories_verdict(seed: int, got: Values) -> list[Failure]:
    """Do the same with a dict."""
    failures: list[Failure] = []
    for size in PAGE_SIZES:
        for name, steps in STORIES.items():
            where = f"page size {size}, {name}"
            values = got[f"page size {size}, {name}"]
            prefixes = Prefixes(size)
            for number, pages in enumerate(PROMPTS.values()):
                prefixes.insert(spelled(pages, size), [10 * number + place for place in range(len(pages))], None, 0)
            results: list[Any] = []
            for what, prompt, count in steps:
                names = prefixes.match(spelled(PROMPTS[prompt][:count], size))
                given: Any = prefixes.lock if what == "lock" else prefixes.unlock
                results.append([given(names), *prefixes.sizes()])
            place = f"{where}, [given, pages, evictable, then tokens: total, evictable, protected] after each step"
            failures += differences(results, values["results"], None, place)
            failures += tree_faults(values["cache"], size, where)
    return failures[:8]


REGISTRY.add(
    "L6.E.sizes",
    "A lock returns the pages that could be evicted until then; total, evictable and protected size add up after every "
    "lock and unlock, nested ones too.",
    stories_probe,
    stories_verdict,
)


CUT_ORDERS = ((1,), (5,), (3, 1), (3, 5), (1, 2, 3, 4, 5), (5, 4, 3, 2, 1))


def later_cuts_probe(seed: int) -> Values:
    """Lock a node of six pages, cut it by what others look for and insert, lock it again, and unlock it by the hit."""
    values: Values = {}
    for cuts in CUT_ORDERS:
        for way in ("match", "insert"):
            cache = make_cache(2)
            tokens = distinct(12)
            cache.insert(tokens, [5, 0, 4, 1, 3, 2])
            hit = cache.match(tokens)
            taken = cache.lock(hit)
            for number, cut in enumerate(cuts):
                if way == "match":
                    cache.match(tokens[: 2 * cut])
                else:
                    cache.insert([*tokens[: 2 * cut], 7, 7], [*[90] * cut, 50 + number])
            locked = {str(node["pages"]): node["locks"] for node in tree_of(cache)}
            during = cache.num_evictable
            again = cache.lock(hit)
            cache.unlock(hit)
            cache.unlock(hit)
            values[f"cuts by {way} after {cuts} pages"] = {
                "taken": taken,
                "locked": locked,
                "evictable meanwhile": during,
                "taken once more": again,
                "cache": cache_values(cache),
                "evictable at the end": cache.num_evictable,
            }
    return values


def later_cuts_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask that all parts are locked once, whatever was added is not, and all is free at the end."""
    failures: list[Failure] = []
    for cuts in CUT_ORDERS:
        for way in ("match", "insert"):
            where = f"cuts by {way} after {cuts} pages"
            values = got[f"cuts by {way} after {cuts} pages"]
            added = len(cuts) if way == "insert" else 0
            ends = sorted({0, *cuts, 6})
            parts = {str([5, 0, 4, 1, 3, 2][a:b]): 1 for a, b in pairwise(ends)}
            expected = {
                "taken": 6,
                "locked": parts | {f"[{50 + number}]": 0 for number in range(added)},
                "evictable meanwhile": added,
                "taken once more": 0,
                "evictable at the end": 6 + added,
            }
            failures += differences(expected, {part: values[part] for part in expected}, None, where)
            failures += tree_faults(values["cache"], 2, where)
    return failures[:8]


REGISTRY.add(
    "L6.E.cuts",
    "A locked node that is cut later is locked in all of its parts, and one unlock by the old hit frees all of them.",
    later_cuts_probe,
    later_cuts_verdict,
)


def twice_probe(seed: int) -> Values:
    """Lock a hit twice and unlock it twice, and once too often."""
    cache = make_cache(2)
    cache.insert(distinct(6), [0, 1, 2])
    hit = cache.match(distinct(4))
    results: list[Any] = [cache.lock(hit), cache.lock(hit), cache.num_evictable]
    cache.unlock(hit)
    results.append(cache.num_evictable)
    cache.unlock(hit)
    results.append(cache.num_evictable)
    try:
        cache.unlock(hit)
    except AssertionError:
        results.append("refused")
    path = [[list(node.pages) for node in cache.ancestry(found)] for found in (hit, cache.match(distinct(6)))]
    nothing = [list(cache.ancestry(cache.match([1])))]
    return {
        "results": results,
        "ancestry": path,
        "ancestry of nothing": nothing,
        "path": [len(hit.path), len(hit.pages)],
    }


def twice_spec(seed: int) -> Values:
    """Worked out by hand: two pages, locked by the first lock alone, free after the second unlock."""
    return {
        "results": [2, 0, 1, 1, 3, "refused"],
        "ancestry": [[[0, 1]], [[2], [0, 1]]],
        "ancestry of nothing": [[]],
        "path": [1, 2],
    }


REGISTRY.add(
    "L6.E.twice",
    "A hit that was locked twice is protected until it is unlocked twice, and cannot be unlocked once more; the way up "
    "ends below the root.",
    twice_probe,
    bitwise(twice_spec),
)

# L6.G ---------------------------------------------------------------------------------------------------------------

USES = histories("uses", Chances(insert=5, match=3, hold=4, record=5, release=3))

REGISTRY.add(
    "L6.G.uses",
    "Requests, their tokens and the tokens they found are counted where a use is recorded; every page on the way "
    "counts it, and neither a match nor an insert is a use.",
    history_probe(USES),
    history_verdict(USES),
)


# tokens of each request and how many pages of 4 it found
RATES: dict[str, list[tuple[int, int]]] = {
    "no request yet": [],
    "nothing found": [(9, 0)],
    "half of it": [(16, 2)],
    "two requests": [(16, 2), (5, 1)],
    "a short and a long one: not the mean of both": [(4, 0), (40, 9)],
    "a third": [(12, 1)],
}


def rate_probe(seed: int) -> Values:
    """Record uses and read the rate."""
    values: Values = {}
    for name, uses in RATES.items():
        cache = plant(4, {None: [Twig(distinct(40), list(range(10)))]})
        for tokens, pages in uses:
            cache.record(cache.match(distinct(4 * pages)), tokens)
        stats = cache.stats
        values[name] = [float(stats.hit_rate), stats.num_uses, stats.num_tokens, stats.num_tokens_hit]
    return values


def rate_spec(seed: int) -> Values:
    """Add up the tokens one by one."""
    values: Values = {}
    for name, uses in RATES.items():
        found = [token < 4 * pages for tokens, pages in uses for token in range(tokens)]
        values[name] = [found.count(True) / max(len(found), 1), len(uses), len(found), found.count(True)]
    return values


REGISTRY.add(
    "L6.G.rate",
    "The hit rate is the share of all tokens that were found, and 0 before there are any.",
    rate_probe,
    close(rate_spec, 1e-12),
)


def descent_twigs(rng: random.Random, depth: int, pages: list[int]) -> tuple[Twig, ...]:
    """Draw nodes of one page of one token whose uses all differ among siblings."""
    count = rng.choice([0, 2, 3]) if 0 < depth < 4 else 3 if depth == 0 else 0
    uses = rng.sample(range(20), count)
    return tuple(
        Twig([token], [pages.pop()], descent_twigs(rng, depth + 1, pages), uses=uses[token]) for token in range(count)
    )


def descent_probe(seed: int) -> Values:
    """Go through a drawn tree of two keys, and through siblings that were used equally often."""
    pages = list(range(1000))
    trees = {key: descent_twigs(random.Random(f"descent {seed} {key}"), 0, pages) for key in (None, "tenant")}
    cache = plant(1, trees)
    results = []
    for depth, node in cache.descend():
        root = node
        while root.parent is not None:
            root = root.parent
        results.append([str(root.cache_key), int(depth), list(node.pages), node.num_uses])
    equal = plant(1, {None: [Twig([9], [4], tuple(Twig([token], [token]) for token in range(4)))]})
    return {
        "results": results,
        "empty": list(plant(1, {}).descend()),
        "equal": sorted(list(node.pages) for _, node in equal.descend()),
    }


def descent_rows(twigs: Sequence[Twig], depth: int, key: str) -> list[list[Any]]:
    """Return the rows below ``twigs``, the heaviest branch first, as far down as it goes."""
    rows: list[list[Any]] = []
    for twig in sorted(twigs, key=lambda twig: -twig.uses):
        rows += [[key, depth, twig.pages, twig.uses], *descent_rows(twig.twigs, depth + 1, key)]
    return rows


def descent_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for every branch in one piece and in order; which root, or which of its children, comes first is free."""
    pages = list(range(1000))
    failures = differences([], got["empty"], None, "an empty cache")
    failures += differences([[0], [1], [2], [3], [4]], got["equal"], None, "pages of nodes of equal uses")
    left = [list(row) for row in got["results"]]
    branches = {}
    for key in (None, "tenant"):
        for twig in descent_twigs(random.Random(f"descent {seed} {key}"), 0, pages):
            branches[twig.pages[0]] = descent_rows((twig,), 0, str(key))
    while left:
        rows = branches.pop(left[0][2][0] if left[0][2] else -1, None)
        if rows is None:
            return [*failures, Failure("the first of a branch", "", "a child of a root, once", str(left[0]))]
        failures += differences(rows, left[: len(rows)], None, "[key, depth, pages, uses] in the order of the descent")
        left = left[len(rows) :]
    return failures + differences(0, len(branches), None, "branches that are missing")


REGISTRY.add(
    "L6.G.descend",
    "The descent passes every node once with its depth, parents before children and the most used child first.",
    descent_probe,
    descent_verdict,
)
