"""Specs of L7's trees: what a tree matches, by trying everything. No automaton, no regular expression.

Owns: the plain form of a tree, its texts and its ends. A tree is a list: ``["chars", [[first, last], …]]``,
``["concat", [tree, …]]``, ``["choice", [tree, …]]``, ``["repeat", tree, least, most or None]``. Must not know: the
engine, JSON.
"""

from typing import Any

Tree = list[Any]
MOST_TEXTS = 20_000


class TooManyTextsError(ValueError):
    """A tree matches more texts than a spec lists."""


def plain(node: Any) -> Tree:
    """Return a tree of the engine in its plain form; the classes are told apart by their names."""
    kind = type(node).__name__
    if kind == "Chars":
        return ["chars", [[int(first), int(last)] for first, last in node.ranges]]
    if kind == "Concat":
        return ["concat", [plain(part) for part in node.parts]]
    if kind == "Choice":
        return ["choice", [plain(option) for option in node.options]]
    if kind == "Repeat":
        return ["repeat", plain(node.node), int(node.least), node.most if node.most is None else int(node.most)]
    raise TypeError(f"a tree has a {kind} in it; Chars, Concat, Choice and Repeat are the nodes")


def size_of(tree: Tree) -> int:
    """Return how many nodes a tree has."""
    if tree[0] in ("concat", "choice"):
        return 1 + sum(map(size_of, tree[1]))
    return 1 + size_of(tree[1]) if tree[0] == "repeat" else 1


def texts(tree: Tree, most: int = MOST_TEXTS) -> set[str]:
    """Return every text that a tree matches. Raises ``TooManyTextsError`` for more than ``most``."""
    if tree[0] == "chars":
        if sum(last - first + 1 for first, last in tree[1]) > most:
            raise TooManyTextsError(f"more than {most} texts")
        return {chr(code) for first, last in tree[1] for code in range(first, last + 1)}
    if tree[0] == "choice":
        return bounded({text for option in tree[1] for text in texts(option, most)}, most)
    if tree[0] == "concat":
        found = {""}
        for part in tree[1]:
            found = joined(found, texts(part, most), most)
        return found
    _, inner, least, last = tree
    if last is None:
        raise TooManyTextsError("a repeat without an end")
    once = texts(inner, most)
    found = set[str]()
    power = {""}
    for count in range(last + 1):
        found = bounded(found | power if count >= least else found, most)
        power = joined(power, once, most) if count < last else power
    return found


def joined(left: set[str], right: set[str], most: int) -> set[str]:
    """Return every text of the left followed by every one of the right."""
    if len(left) * len(right) > 4 * most:
        raise TooManyTextsError(f"more than {most} texts")
    return bounded({a + b for a in left for b in right}, most)


def bounded(found: set[str], most: int) -> set[str]:
    """Return the texts. Raises ``TooManyTextsError`` for more than ``most``."""
    if len(found) > most:
        raise TooManyTextsError(f"more than {most} texts")
    return found


def matches(tree: Tree, text: str) -> bool:
    """Whether a tree matches a whole text."""
    return len(text) in ends(tree, text, frozenset({0}))


def ends(tree: Tree, text: str, starts: frozenset[int]) -> frozenset[int]:
    """Return the places at which a tree can end that begins at one of ``starts``."""
    if tree[0] == "chars":
        return frozenset(
            place + 1
            for place in starts
            if place < len(text) and any(first <= ord(text[place]) <= last for first, last in tree[1])
        )
    if tree[0] == "concat":
        for part in tree[1]:
            if not starts:
                break
            starts = ends(part, text, starts)
        return starts
    if tree[0] == "choice":
        return frozenset[int]().union(*(ends(option, text, starts) for option in tree[1]))
    _, inner, least, last = tree
    for _ in range(least):
        starts, before = ends(inner, text, starts), starts
        if starts == before:  # there is nothing left, or the inner tree matches the empty text alone
            break
    found, count = starts, least
    while starts and (last is None or count < last):
        starts = ends(inner, text, starts)
        if last is None:
            starts -= found  # where it was before it has gone on already
        elif starts <= found and count > least + len(text):
            break  # longer than the text: nothing new can come
        found = found | starts
        count += 1
    return found
