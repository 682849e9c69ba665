"""The checks of walks (L6.C), and how the candidate's cache lives through a history of operations.

Owns: random trees with questions to them, histories and their verdict: the spec lives through the same one with a dict.
No model.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from smoke.checks.l6.a_pages import PAGE_SIZES, Trees, Twig, cache_values, distinct, make_cache, plant, tree_faults
from smoke.checks.l6.spec_prefixes import (
    SNAPSHOTS,
    STATISTICS,
    Chances,
    Entry,
    Operation,
    Prefixes,
    draw_history,
    live,
    numbered,
    ranks,
)
from smoke.framework.check import Failure, Probe, Registry, Values, Verdict, noting
from smoke.framework.compare import bitwise, differences

REGISTRY = Registry()


def books_of(values: Values, page_size: int) -> list[list[Any]]:
    """Return all that the candidate knows of every page, as ``Prefixes.books`` does."""
    created, used = (ranks([node[part] for node in values["tree"]]) for part in ("created", "used"))
    rows = []
    for node in values["tree"]:
        above = len(node["path"]) - len(node["tokens"])
        for place, page in enumerate(node["pages"], start=1):
            times = [created[node["created"]], used[node["used"]]]
            known = [page, *times, node["uses"], node["priority"], node["locks"]]
            rows.append([str(node["key"]), node["path"][: above + place * page_size], *known])
    return sorted(rows, key=lambda row: row[:2])


def relive(cache: Any, history: Sequence[Operation]) -> Values:
    """Live through a history with the candidate's cache."""
    held: list[Any] = []
    results: list[Any] = []
    snapshots: list[Any] = []
    with noting() as done:
        for number, operation in enumerate(history, start=1):
            done.append(operation)
            results.append([happen(cache, held, operation), [cache.num_pages, cache.num_evictable]])
            if number % SNAPSHOTS == 0 or number == len(history):
                snapshots.append(cache_values(cache))
    stats = cache.stats
    counted = (
        stats.num_uses,
        stats.num_tokens,
        stats.num_tokens_hit,
        stats.num_pages_inserted,
        stats.num_pages_evicted,
    )
    return {"results": results, "snapshots": snapshots, "statistics": dict(zip(STATISTICS, counted, strict=True))}


def happen(cache: Any, held: list[Any], operation: Operation) -> Any:
    """Do one operation and return what it gives; a list that belongs to the caller must stay as it was."""
    kind, *rest = operation
    if kind in ("insert", "match", "hold"):
        tokens = tuple(rest[0]) if len(rest[0]) % 3 == 0 else list(rest[0])  # any sequence will do
        pages = numbered(rest[1], rest[0], cache.page_size) if kind == "insert" else []
        own, more = list(pages), rest[2:] if rest[-1] else rest[2:-1]  # without a priority it is 0
        hit = cache.insert(tokens, own, *more) if kind == "insert" else cache.match(tokens, rest[1])
        given: list[Any] = [int(page) for page in hit.pages]
        if kind == "hold":
            held.append(hit)
            given = [given, cache.lock(hit)]
        return given if (list(tokens), own) == (rest[0], pages) else "the caller's list was changed"
    if kind == "again":
        held.append(held[rest[0]])
        return cache.lock(held[-1])
    if kind == "record":
        return cache.record(held[rest[0]], rest[1])
    return cache.unlock(held.pop(rest[0])) if kind == "release" else sorted(cache.evict(*rest))


Draw = Callable[[int], dict[int, list[Operation]]]


def histories(name: str, chances: Chances, count: int = 160) -> Draw:
    """Return a function from a seed to histories, one for each page size."""

    def draw(seed: int) -> dict[int, list[Operation]]:
        return {size: draw_history(f"{name} {seed}", size, count, chances) for size in PAGE_SIZES}

    return draw


def history_probe(draw: Draw, order: str = "lru") -> Probe:
    """Return a probe that lives through histories."""

    def probe(seed: int) -> Values:
        return {f"page size {size}": relive(make_cache(size, order), history) for size, history in draw(seed).items()}

    return probe


def history_verdict(draw: Draw, order: str = "lru") -> Verdict:
    """Return a verdict that lives through the same histories with a dict."""

    def verdict(seed: int, got: Values) -> list[Failure]:
        failures: list[Failure] = []
        for size, history in draw(seed).items():
            where = f"page size {size}, {order}"
            values = got[f"page size {size}"]
            prefixes = Prefixes(size, order)
            results, books = live(prefixes, history)
            failures += first_step(history, results, values["results"], where)
            for number, (book, snapshot) in enumerate(zip(books, values["snapshots"], strict=True), start=1):
                place = f"{where}, after {number * SNAPSHOTS} operations"
                failures += tree_faults(snapshot, size, place)
                failures += differences(book, books_of(snapshot, size), None, f"{place}, {BOOK}")
            failures += differences(prefixes.statistics, values["statistics"], None, f"{where}, statistics")
        return failures[:8]

    return verdict


BOOK = "every page [key, tokens up to its end, page, age, last use, uses, priority, locks]"


def first_step(history: Sequence[Operation], expected: list[Any], results: list[Any], where: str) -> list[Failure]:
    """Return the first operation that gave something else, with what it was."""
    for number, (operation, want, have) in enumerate(zip(history, expected, results, strict=True)):
        place = f"{where}, operation {number}: {operation}, gives and leaves [pages, evictable pages]"
        found = differences(want, have, None, place)
        if found:
            return found
    return []


# L6.C ---------------------------------------------------------------------------------------------------------------


def draw_twig(rng: random.Random, size: int, pages: list[int], used: int, depth: int) -> Twig:
    """Draw a node of one to four pages and what hangs under it; children differ in their first page."""
    length = rng.randint(1, 4)
    first = [0] * (size - 1) + [rng.randrange(3)]
    tokens = first + [token for _ in range(length - 1) for token in [rng.randrange(2)] * size]
    own = [pages.pop() for _ in range(length)]
    below: dict[tuple[int, ...], Twig] = {}
    for _ in range(rng.choice([0, 1, 3]) if depth < 3 else 0):
        twig = draw_twig(rng, size, pages, used - rng.randint(0, 9), depth + 1)
        below.setdefault(tuple(twig.tokens[:size]), twig)
    return Twig(tokens, own, tuple(below.values()), used, rng.randrange(50), rng.randrange(5), rng.randrange(3))


def draw_trees(seed: int, size: int) -> Trees:
    """Draw trees of three keys; the empty string is a key like others."""
    rng = random.Random(f"trees {seed} {size}")
    pages = rng.sample(range(1000), 1000)
    trees: dict[str | None, list[Twig]] = {}
    for key in (None, "tenant", ""):
        twigs = [draw_twig(rng, size, pages, 100 + rng.randrange(20), 0) for _ in range(4)]
        trees[key] = list({tuple(twig.tokens[:size]): twig for twig in twigs}.values())
    return trees


def entries_of(trees: Trees, size: int) -> Prefixes:
    """Return the same as a dict."""
    prefixes = Prefixes(size)
    waiting: list[tuple[str | None, tuple[int, ...], Twig]] = [
        (key, (), twig) for key, twigs in trees.items() for twig in twigs
    ]
    while waiting:
        key, above, twig = waiting.pop()
        for place, page in enumerate(twig.pages, start=1):
            entry = Entry(page, twig.created, twig.used, twig.uses, twig.priority, twig.locks)
            prefixes.entries[key, (*above, *twig.tokens[: place * size])] = entry
            prefixes.now = max(prefixes.now, twig.used, twig.created)
        waiting += [(key, (*above, *twig.tokens), below) for below in twig.twigs]
    return prefixes


def questions(seed: int, size: int) -> list[tuple[str | None, list[int]]]:
    """Return beginnings of what is cached, gone on with and broken off, some of them under another key."""
    rng = random.Random(f"questions {seed} {size}")
    names = sorted(entries_of(draw_trees(seed, size), size).entries, key=str)
    asked: list[tuple[str | None, list[int]]] = [(None, []), ("tenant", [0] * (size - 1)), ("nobody", [0] * size * 2)]
    for _ in range(18):
        key, tokens = rng.choice(names)
        more = [rng.randrange(3) for _ in range(rng.choice([0, 0, 1, size, 3 * size]))]
        key = rng.choice([key, key, key, None, "tenant", "", "nobody"])
        asked.append((key, [*tokens[: len(tokens) - rng.choice([0, 0, 0, 1, size])], *more]))
    return asked


def longest_probe(seed: int) -> Values:
    """Ask each question of a fresh tree, with a list and with a tuple."""
    values: Values = {}
    for size in PAGE_SIZES:
        for number, (key, tokens) in enumerate(questions(seed, size)):
            cache = plant(size, draw_trees(seed, size))
            given = list(tokens)
            hit = cache.match(given, key)
            as_tuple = cache.match(tuple(tokens), key)
            values[f"page size {size}, question {number}"] = {
                "pages": list(hit.pages),
                "as a tuple": list(as_tuple.pages),
                "tokens": given,
                "kinds": [isinstance(hit.pages, tuple), isinstance(hit.path, tuple)],
            }
    return values


def longest_spec(seed: int) -> Values:
    """Look up every beginning."""
    values: Values = {}
    for size in PAGE_SIZES:
        prefixes = entries_of(draw_trees(seed, size), size)
        for number, (key, tokens) in enumerate(questions(seed, size)):
            pages = prefixes.pages(prefixes.match(tokens, key))
            values[f"page size {size}, question {number}"] = {
                "pages": pages,
                "as a tuple": pages,
                "tokens": tokens,
                "kinds": [True, True],
            }
    return values


def asked_probe(seed: int) -> Values:
    """Ask all questions of one tree, one after the other, with lists and tuples, and look at the tree after each."""
    values: Values = {}
    for size in PAGE_SIZES:
        cache = plant(size, draw_trees(seed, size))
        answers: list[Values] = []
        for key, tokens in questions(seed, size):
            hit = cache.match(tuple(tokens) if len(answers) % 2 else tokens, key)
            known = {"now": cache.now, "cache": cache_values(cache)}
            answers.append({"pages": list(hit.pages), "path": list(hit.path), **known})
        values[f"page size {size}"] = answers
    return values


def cuts_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask that the path of a hit is its pages and nothing more, that the tree holds what it held, and of one cut."""
    failures: list[Failure] = []
    for size in PAGE_SIZES:
        prefixes = entries_of(draw_trees(seed, size), size)
        most = math.inf
        for (key, tokens), answer in zip(questions(seed, size), got[f"page size {size}"], strict=True):
            where = f"page size {size}, match of {tokens} under {key!r}"
            found = prefixes.match(tokens, key)
            failures += differences(prefixes.pages(found), answer["pages"], None, f"{where}, pages")
            nodes = {node["number"]: node for node in answer["cache"]["tree"]}
            if len(nodes) > most:
                failures.append(Failure(f"{where}, nodes", "", f"at most {most}, after one cut", str(len(nodes))))
            most = len(nodes) + 1
            on_path = [page for number in answer["path"] for page in nodes[number]["pages"]]
            failures += differences(prefixes.pages(found), on_path, None, f"{where}, pages on its path")
            ends = [nodes[number]["parent"] for number in answer["path"]]
            failures += differences([None, *answer["path"]][:-1] if ends else [], ends, None, f"{where}, parents")
            failures += tree_faults(answer["cache"], size, where)
            held = [row[:3] for row in books_of(answer["cache"], size)]
            failures += differences([row[:3] for row in prefixes.books()], held, None, f"{where}, [key, tokens, page]")
            if failures:
                return failures[:4]
    return failures


def recency_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare the order of the last uses of all pages after every question, and the clock."""
    for size in PAGE_SIZES:
        prefixes = entries_of(draw_trees(seed, size), size)
        for (key, tokens), answer in zip(questions(seed, size), got[f"page size {size}"], strict=True):
            prefixes.match(tokens, key)
            where = f"page size {size}, after match of {tokens} under {key!r}"
            failures = differences(prefixes.books(), books_of(answer["cache"], size), None, f"{where}, {BOOK}")
            failures += differences(prefixes.now, answer["now"], None, f"{where}, now")
            used = [node["used"] for node in answer["cache"]["tree"] if node["number"] in answer["path"]]
            ticks = [answer["now"]] * len(answer["path"])
            failures += differences(ticks, used, None, f"{where}, last uses on its path")
            if failures:
                return failures
    return []


def nothing_probe(seed: int) -> Values:
    """Look for what cannot be there, in an empty cache and in one of pages of 4."""
    values: Values = {}
    for name, cache in {"an empty cache": make_cache(4), "three pages": plant(4, THREE_PAGES)}.items():
        before = cache_values(cache)
        for tokens, key in NOWHERE:
            hit = cache.match(tokens, key)
            values[f"{name}, {tokens} under {key!r}"] = [list(hit.pages), list(hit.path)]
        values[f"{name} is as it was"] = differences(before, cache_values(cache), None) == []
    return values


THREE_PAGES: Trees = {None: [Twig(distinct(12), [5, 3, 4])]}
NOWHERE: list[tuple[list[int], str | None]] = [
    (tokens, key)
    for tokens in ([], [100], distinct(3), [*distinct(3), 0, 0, 0, 0], distinct(8, 101))
    for key in (None, "tenant", "")
]
NOWHERE += [(distinct(count), key) for count in (4, 8, 12, 13) for key in ("tenant", "", "None")]


def nothing_spec(seed: int) -> Values:
    """Nothing is found, and no root is left behind by looking."""
    values: Values = {}
    for name in ("an empty cache", "three pages"):
        for tokens, key in NOWHERE:
            values[f"{name}, {tokens} under {key!r}"] = [[], []]
        values[f"{name} is as it was"] = True
    return values


REGISTRY.add(
    "L6.C.longest",
    "A match is exactly the pages of the longest beginning that is cached under its key, whole pages only.",
    longest_probe,
    bitwise(longest_spec),
)
REGISTRY.add(
    "L6.C.cuts",
    "A match that ends inside a node cuts it there: the hit's path holds its pages and no others, and nothing is lost.",
    asked_probe,
    cuts_verdict,
)
REGISTRY.add(
    "L6.C.recency",
    "What a match passes becomes the latest used, also the part of a node that it ends in, and nothing else does. "
    "Every match is one tick, also one that finds nothing.",
    asked_probe,
    recency_verdict,
)
REGISTRY.add(
    "L6.C.nothing",
    "An empty prompt, less than a page, another key and unknown tokens find nothing and change nothing.",
    nothing_probe,
    bitwise(nothing_spec),
)
