"""The checks of pages that agree (L6.A) and of a node that is cut in two (L6.B).

Owns: trees that are built by hand, because what grows them is a later task, and the way from the candidate's tree to
plain values. Walks are in ``c_walk.py``, growth in ``d_growth.py``, locks in ``e_locks.py``, eviction in
``f_eviction.py``. No model.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences
from smoke.framework.reads import Counted

REGISTRY = Registry()
PAGE_SIZES = (1, 2, 4, 16)


@dataclass(frozen=True)
class Twig:
    """A node to be: its tokens and pages, what hangs under it, and what is known of it."""

    tokens: list[int]
    pages: list[int]
    twigs: tuple["Twig", ...] = ()
    used: int = 0
    created: int = 0
    uses: int = 0
    priority: int = 0
    locks: int = 0


Trees = Mapping[str | None, Sequence[Twig]]


def make_cache(page_size: int, order: str = "lru") -> Any:
    """Build the candidate's cache, with nothing in it."""
    from mini_engine.radix_cache import RadixCache

    return RadixCache(page_size, order)


def plant(page_size: int, trees: Trees) -> Any:
    """Build the candidate's cache with trees in it."""
    from mini_engine.radix_cache import Node

    cache = make_cache(page_size)
    for key, twigs in trees.items():
        cache.roots[key] = Node(next(cache.numbers), [], [], None, cache_key=key)
        waiting = [(cache.roots[key], twig) for twig in twigs]
        while waiting:
            parent, twig = waiting.pop(0)
            node = Node(
                next(cache.numbers),
                list(twig.tokens),
                list(twig.pages),
                parent,
                twig.created,
                twig.used,
                twig.uses,
                twig.priority,
                twig.locks,
            )
            parent.children[tuple(twig.tokens[:page_size])] = cache.nodes[node.number] = node
            if not twig.twigs:
                cache.leaves[node.number] = node
            cache.num_pages += len(twig.pages)
            cache.num_evictable += 0 if twig.locks else len(twig.pages)
            cache.now = max(cache.now, twig.used, twig.created)
            waiting += [(node, below) for below in twig.twigs]
    return cache


def node_at(cache: Any, page: int) -> Any:
    """Return the node that holds a page."""
    return next(node for node in cache.nodes.values() if page in node.pages)


def tree_of(cache: Any) -> list[Values]:
    """Return the tree as it hangs together, root by root, each node before what hangs under it."""
    found: list[Values] = []
    waiting: list[Any] = [(root, [], None) for root in cache.roots.values()]
    while waiting:
        node, above, parent = waiting.pop(0)
        path = [*above, *node.tokens]
        if parent is not None:
            found.append(node_values(cache, node, parent, path))
        waiting += [(child, path, node) for child in node.children.values()]
    return found


def node_values(cache: Any, node: Any, parent: Any, path: list[int]) -> Values:
    """Return what is known of one node, with all tokens up to its end."""
    root = node
    while root.parent is not None:
        root = root.parent
    return {
        "key": root.cache_key,
        "number": node.number,
        "tokens": list(node.tokens),
        "pages": list(node.pages),
        "path": path,
        "parent": parent.number if parent.parent is not None else None,
        "right parent": node.parent is parent,
        "root is registered": cache.roots.get(root.cache_key) is root,
        "name": [list(name) for name, child in parent.children.items() if child is node],
        "in nodes": cache.nodes.get(node.number) is node,
        "in leaves": cache.leaves.get(node.number) is node,
        "children": len(node.children),
        "used": node.last_used,
        "created": node.created,
        "uses": node.num_uses,
        "priority": node.priority,
        "locks": node.lock_count,
    }


def cache_values(cache: Any) -> Values:
    """Return the tree with its counters and registers."""
    return {
        "tree": tree_of(cache),
        "num_pages": cache.num_pages,
        "num_evictable": cache.num_evictable,
        "nodes": sorted(cache.nodes),
        "leaves": sorted(cache.leaves),
        "roots": sorted([str(key), len(root.children)] for key, root in cache.roots.items()),
    }


def tree_faults(values: Values, page_size: int, where: str) -> list[Failure]:
    """Recount a tree: nothing hangs elsewhere than it is listed, every counter is the sum of its nodes."""
    nodes = values["tree"]
    pages = [page for node in nodes for page in node["pages"]]
    expected = {
        "num_pages": len(set(pages)),
        "nodes": sorted(node["number"] for node in nodes),
        "num_evictable": sum(len(node["pages"]) for node in nodes if node["locks"] == 0),
        "leaves": sorted(node["number"] for node in nodes if node["children"] == 0),
    }
    got = {part: values[part] for part in expected}
    failures = differences(expected, got, None, f"{where}, a recount")
    failures += differences(len(set(pages)), len(pages), None, f"{where}, pages that lie in one node only")
    for node in nodes:
        place = f"{where}, the node of {node['path']}"
        shape = {
            "tokens": len(node["pages"]) * page_size,
            "empty": False,
            "name": [node["tokens"][:page_size]],
            "right parent": True,
            "root is registered": True,
            "in nodes": True,
            "in leaves": node["children"] == 0,
        }
        own = {**node, "tokens": len(node["tokens"]), "empty": not node["pages"]}
        failures += differences(shape, {part: own[part] for part in shape}, None, place)
    for key, children in values["roots"]:
        if not children:
            failures.append(Failure(f"{where}, roots", key, "a root goes with its last child", "a root without any"))
    return failures


# L6.A ---------------------------------------------------------------------------------------------------------------


def distinct(count: int, first: int = 100) -> list[int]:
    """Return tokens that are all different."""
    return list(range(first, first + count))


def first_page_probe(seed: int) -> Values:
    """Ask for the first page of nodes of one to four pages, and use it as a name."""
    values: Values = {}
    for size in PAGE_SIZES:
        for pages in range(1, 5):
            cache = plant(size, {None: [Twig(distinct(size * pages), list(range(pages)))]})
            name = cache.first_page(cache.nodes[1])
            known = {name: "found"}.get(tuple(distinct(size)), "not found")
            values[f"page size {size}, {pages} pages"] = [isinstance(name, tuple), list(name), known]
    return values


def first_page_spec(seed: int) -> Values:
    """Take that many tokens one by one."""
    return {
        f"page size {size}, {pages} pages": [True, [distinct(16)[place] for place in range(size)], "found"]
        for size in PAGE_SIZES
        for pages in range(1, 5)
    }


@dataclass(frozen=True)
class Agreement:
    """A node's tokens, and the tokens that are looked up from a start on."""

    page_size: int
    own: list[int]
    tokens: list[int]
    start: int


def agreeing(seed: int) -> dict[str, Agreement]:
    """Return every number of agreeing pages at several starts, with something else or nothing after them."""
    cases: dict[str, Agreement] = {}
    for size in PAGE_SIZES:
        for total in (1, 2, 3, 5, 8):
            own = distinct(size * total)
            for agree in range(1, total + 1):
                for start in (0, size, 3 * size):
                    before = distinct(start, 900)
                    same = own[: size * agree]
                    for name, rest in {"nothing": [], "others": distinct(size * total + 1, 500)}.items():
                        case = f"page size {size}, {agree} of {total} pages from token {start} on, then {name}"
                        cases[case] = Agreement(size, own, before + same + rest, start)
    return cases


def part_cases(seed: int) -> dict[str, Agreement]:
    """Return tokens that end or differ inside a page, and pages that are equal again after one that is not."""
    cases: dict[str, Agreement] = {}
    for size in (2, 4, 16):
        own = distinct(size * 7)
        rng = random.Random(f"parts {seed} {size}")
        for pages in range(1, 7):
            for name, extra in {"one token": 1, "all but one token": size - 1}.items():
                case = f"page size {size}, {pages} of 7 pages and {name} of the next"
                cases[case] = Agreement(size, own, own[: size * pages + extra], 0)
                cases[f"{case}, then others"] = Agreement(size, own, own[: size * pages + extra] + distinct(99, 700), 0)
    for size in PAGE_SIZES:
        own = distinct(size * 7)
        for wrong in range(1, 7):
            place = size * wrong + rng.randrange(size)
            tokens = [*own[:place], -1, *own[place + 1 :], *distinct(size)]
            cases[f"page size {size}, page {wrong} of 0 to 6 differs at token {place}, the later ones do not"] = (
                Agreement(size, own, tokens, 0)
            )
        same = [7] * size * 5
        cases[f"page size {size}, five equal pages, three of them"] = Agreement(size, same, same[: size * 3], 0)
        cases[f"page size {size}, five equal pages of seven"] = Agreement(size, same, [7] * size * 7, 0)
        cases[f"page size {size}, five equal pages from the second on"] = Agreement(size, same, same, size)
    return cases


def agreement_values(cases: dict[str, Agreement]) -> Values:
    """Ask the candidate, and look whether anything has changed."""
    values: Values = {}
    for name, case in cases.items():
        cache = plant(case.page_size, {None: [Twig(case.own, list(range(len(case.own) // case.page_size)))]})
        tokens = list(case.tokens)
        count = cache.agreeing_pages(cache.nodes[1], tokens, case.start)
        untouched = tokens == case.tokens and list(cache.nodes[1].tokens) == case.own and len(cache.nodes) == 1
        values[name] = [int(count), untouched]
    return values


LONG = 200  # pages of a node
MOST_READS = 10  # of a token: a search that halves and begins anew each time needs 8
FEW, MANY = "each token is read a few times", "each token is read for every page"


def compared_values() -> Values:
    """Compare a long node with tokens that agree, and ask whether some page was looked at many times."""
    values: Values = {}
    for size in (1, 130):
        cache = plant(size, {None: [Twig(distinct(size * LONG), list(range(LONG)))]})
        node = cache.nodes[1]
        node.tokens, tokens = Counted(node.tokens), Counted(node.tokens)
        count = cache.agreeing_pages(node, tokens, 0)
        often = max(node.tokens.reads, tokens.reads) > MOST_READS * len(tokens)
        values[f"{LONG} pages of {size}"] = [int(count), MANY if often else FEW]
    return values


def agreement_spec(cases: dict[str, Agreement]) -> Values:
    """Walk token by token, and count a page when its last token agrees."""
    values: Values = {}
    for name, case in cases.items():
        agree = 0
        for own, token in zip(case.own, case.tokens[case.start :], strict=False):
            if own != token:
                break
            agree += 1
        values[name] = [agree // case.page_size, True]
    return values


REGISTRY.add(
    "L6.A.first_page",
    "The first page is a tuple of the first page_size tokens, so that a dict finds it, page size 1 included.",
    first_page_probe,
    bitwise(first_page_spec),
)
REGISTRY.add(
    "L6.A.agreement",
    "Every number of agreeing pages is found, from any start, whatever comes after them, and nothing is changed; no "
    "token is compared again for every page.",
    lambda seed: agreement_values(agreeing(seed)) | compared_values(),
    bitwise(lambda seed: agreement_spec(agreeing(seed)) | {f"{LONG} pages of {s}": [LONG, FEW] for s in (1, 130)}),
)
REGISTRY.add(
    "L6.A.parts",
    "Part of a page does not count, and neither do pages that agree again after one that does not.",
    lambda seed: agreement_values(part_cases(seed)),
    bitwise(lambda seed: agreement_spec(part_cases(seed))),
)

# L6.B ---------------------------------------------------------------------------------------------------------------

CUT_PAGES = 5  # of the node that is cut


def cut_tree(size: int, below: int, locks: int = 0) -> Trees:
    """Return a node of five pages, with a parent, a sibling and ``below`` children, and a tree of another key."""
    children = tuple(
        Twig(distinct(size * 2, 3000 + 100 * index), [60 + 2 * index, 61 + 2 * index], used=40)
        for index in range(below)
    )
    node = Twig(distinct(size * CUT_PAGES, 2000), [31, 35, 33, 32, 34], children, 50, 20, 6, 2, locks)
    sibling = Twig(distinct(size, 5000), [90], used=30)
    parent = Twig(distinct(size * 2, 1000), [11, 10], (node, sibling), 70, 10, 9, 4, locks + 1 if locks else 0)
    return {None: [parent], "tenant": [Twig(distinct(size * 3, 2000), [70, 71, 72], used=5)]}


CUTS = [(size, below, cut) for size in PAGE_SIZES for below in (0, 1, 3) for cut in range(1, CUT_PAGES)]


def cut_name(size: int, below: int, cut: int) -> str:
    """Name a case."""
    return f"page size {size}, {cut} of {CUT_PAGES} pages above, {below} children"


def halves_probe(seed: int) -> Values:
    """Cut the node everywhere."""
    values: Values = {}
    for size, below, cut in CUTS:
        cache = plant(size, cut_tree(size, below))
        node = node_at(cache, 31)
        upper = cache.split(node, cut)
        values[cut_name(size, below, cut)] = {
            "returned": [list(upper.tokens), list(upper.pages)],
            "left": [list(node.tokens), list(node.pages)],
            "cache": cache_values(cache),
        }
    return values


def halves_verdict(seed: int, got: Values) -> list[Failure]:
    """Join the halves again, and recount the tree."""
    failures: list[Failure] = []
    for size, below, cut in CUTS:
        where = cut_name(size, below, cut)
        values = got[cut_name(size, below, cut)]
        tokens = distinct(size * CUT_PAGES, 2000)
        pages = [31, 35, 33, 32, 34]
        expected = {
            "returned": [tokens[: cut * size], pages[:cut]],
            "left": [tokens[cut * size :], pages[cut:]],
        }
        failures += differences(expected, {part: values[part] for part in expected}, None, where)
        failures += tree_faults(values["cache"], size, where)
        failures += differences(below_cut(size, below, cut), shape_of(values["cache"]["tree"]), None, where)
    return failures[:8]


def shape_of(tree: Sequence[Values]) -> list[list[Any]]:
    """Return for every node its key, all tokens up to its end, its pages and the end of its parent, sorted."""
    ends = {node["number"]: node["path"] for node in tree}
    return sorted([str(n["key"]), n["path"], n["pages"], ends.get(n["parent"], [])] for n in tree)


def below_cut(size: int, below: int, cut: int) -> list[list[Any]]:
    """Return the shape after the cut: the children hang under the lower half."""
    first = distinct(size * 2, 1000)
    second = distinct(size * CUT_PAGES, 2000)
    upper = [*first, *second[: cut * size]]
    lower = [*first, *second]
    rows: list[list[Any]] = [
        ["None", first, [11, 10], []],
        ["None", upper, [31, 35, 33, 32, 34][:cut], first],
        ["None", lower, [31, 35, 33, 32, 34][cut:], upper],
        ["None", [*first, *distinct(size, 5000)], [90], first],
        ["tenant", distinct(size * 3, 2000), [70, 71, 72], []],
    ]
    for index in range(below):
        rows.append(
            [
                "None",
                [*lower, *distinct(size * 2, 3000 + 100 * index)],
                [60 + 2 * index, 61 + 2 * index],
                lower,
            ]
        )
    return sorted(rows)


KNOWN = ("created", "used", "uses", "priority", "locks")


def inherited(seed: int) -> dict[str, tuple[int, int, int]]:
    """Return how often the node is locked, and at which pages it is cut, first below and then above."""
    rng = random.Random(f"inherited {seed}")
    cases = [(0, 3, 1), (1, 3, 1), (3, 3, 1)]
    for _ in range(4):
        lower = rng.randrange(2, CUT_PAGES)
        cases.append((rng.randrange(9), lower, rng.randrange(1, lower)))
    return {f"{locks} locks, cut at {lower} and at {upper}": (locks, lower, upper) for locks, lower, upper in cases}


def inherits_probe(seed: int) -> Values:
    """Cut locked and unlocked nodes, the upper half once more, and tell what is known of each part."""
    values: Values = {}
    for case, (locks, lower, upper) in inherited(seed).items():
        cache = plant(2, cut_tree(2, 1, locks))
        node = node_at(cache, 31)
        middle = cache.split(node, lower)
        cache.split(middle, upper)
        found = {str(node["pages"]): node for node in tree_of(cache)}
        values[case] = {
            "known": {pages: [node[part] for part in KNOWN] for pages, node in found.items()},
            "counters": [cache.num_pages, cache.num_evictable],
        }
    return values


def inherits_spec(seed: int) -> Values:
    """All three parts are what the whole was; the others are what they were."""
    values: Values = {}
    pages = [31, 35, 33, 32, 34]
    for case, (locks, lower, upper) in inherited(seed).items():
        whole = [20, 50, 6, 2, locks]
        others = {"[11, 10]": [10, 70, 9, 4, locks + 1 if locks else 0], "[90]": [0, 30, 0, 0, 0]}
        others |= {"[60, 61]": [0, 40, 0, 0, 0], "[70, 71, 72]": [0, 5, 0, 0, 0]}
        parts = (pages[:upper], pages[upper:lower], pages[lower:])
        known = {**{str(part): whole for part in parts}, **others}
        values[case] = {"known": known, "counters": [13, 6 if locks else 13]}
    return values


def number_probe(seed: int) -> Values:
    """Note numbers before and after three cuts, and walk up from where a hit ended."""
    values: Values = {}
    for order in ((4, 2, 1), (1, 1, 1)):
        cache = plant(2, cut_tree(2, 2))
        before = {str(node["pages"]): node["number"] for node in tree_of(cache)}
        node = node_at(cache, 31)
        new = []
        for cut in order:
            part = cache.split(node, cut)
            new.append(part.number)
            node = part if order[0] == 4 else node
        walked = []
        up = cache.nodes[before["[31, 35, 33, 32, 34]"]]
        while up.parent is not None:
            walked.append(list(up.pages))
            up = up.parent
        after = {str(node["pages"]): node["number"] for node in tree_of(cache)}
        values[f"cuts after {order} pages"] = {
            "before": before,
            "after": after,
            "new": new,
            "way up from the old number": walked,
            "registered": [cache.nodes.get(number) is not None for number in new],
        }
    return values


def number_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for the whole's number at the lowest part, for new numbers above it, and for every part on the way up."""
    failures = []
    for name, values in got.items():
        before, after = values["before"], values["after"]
        lowest = "[34]" if name.startswith("cuts after (4") else "[32, 34]"
        parts = [[31], [35], [33, 32], [34]] if lowest == "[34]" else [[31], [35], [33], [32, 34]]
        failures += differences(before["[31, 35, 33, 32, 34]"], after.get(lowest), None, f"{name}, number of {lowest}")
        expected = [*parts[::-1], [11, 10]]
        failures += differences(expected, values["way up from the old number"], None, f"{name}, the way up")
        for pages in ("[11, 10]", "[90]", "[60, 61]", "[70, 71, 72]"):
            failures += differences(before[pages], after[pages], None, f"{name}, number of {pages}")
        fresh = not set(values["new"]) & set(before.values()) and len(set(values["new"])) == 3
        failures += differences(True, fresh, None, f"{name}, three new numbers")
        failures += differences([True] * 3, values["registered"], None, f"{name}, new parts in nodes")
    return failures


REGISTRY.add(
    "L6.B.halves",
    "Tokens and pages are cut at the same page, in order; the halves, the parent, the children and the registers hang "
    "together, and nothing is counted that was not there before.",
    halves_probe,
    halves_verdict,
)
REGISTRY.add(
    "L6.B.inherits",
    "Both halves have the locks, uses, times and priority of the whole.",
    inherits_probe,
    bitwise(inherits_spec),
)
REGISTRY.add(
    "L6.B.number",
    "The lower half keeps the number, so that a hit which ends there is still right and its way up passes the upper.",
    number_probe,
    number_verdict,
)
