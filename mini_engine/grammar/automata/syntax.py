"""L7: regular languages over characters, as trees of four kinds of nodes.

Owns: the nodes, sets of characters, and how a tree reads as a regular expression. Must not know: how a tree comes about
(``regex``, ``schema``), what becomes of it (``automaton``).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]  # of code points: first and last, in order, neither overlapping nor touching
LAST_CODE = 0x10FFFF
LAST_ASCII = 0x7F
WIDE = 8  # states of any character: of one byte, and of what follows a first byte of two, three and four
SURROGATES = (0xD800, 0xDFFF)  # halves of UTF-16 pairs: no characters, and no UTF-8 spells them


@dataclass(frozen=True)
class Chars:
    """One character out of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Concat:
    """One part after the other; without parts, the empty text."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Choice:
    """Any one of the options; without options, nothing matches."""

    options: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    """``least`` to ``most`` times the same node; ``None`` is without end."""

    node: "Node"
    least: int
    most: int | None


Node = Chars | Concat | Choice | Repeat
EMPTY = Concat(())


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union in its one form, without surrogates."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(part for one in merged for part in without_surrogates(*one))


def without_surrogates(first: int, last: int) -> list[tuple[int, int]]:
    """Cut the surrogates out of a range."""
    low, high = SURROGATES
    return [(a, b) for a, b in ((first, min(last, low - 1)), (max(first, high + 1), last)) if a <= b]


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return every other character."""
    gaps = []
    free = 0
    for first, last in merge_ranges([*ranges, SURROGATES]) or ():
        gaps.append((free, first - 1))
        free = last + 1
    return merge_ranges([gap for gap in [*gaps, (free, LAST_CODE)] if gap[0] <= gap[1]])


def intersect(left: Ranges, right: Ranges) -> Ranges:
    """Return the characters that are in both."""
    return complement([*complement(left), *complement(right)])


ANY = Chars(complement(()))


def literal(text: str) -> Node:
    """Return the node that matches exactly ``text``."""
    return Concat(tuple(Chars(((ord(c), ord(c)),)) for c in text))


def optional(node: Node) -> Node:
    """Return the node that matches ``node`` or nothing."""
    return Repeat(node, 0, 1)


def inner_nodes(node: Node) -> tuple[Node, ...]:
    """Return the nodes directly inside a node."""
    match node:
        case Concat(parts) | Choice(parts):
            return parts
        case Repeat(inner):
            return (inner,)
    return ()


def lengths_of(node: Node) -> tuple[int, float]:
    """Return how many characters the shortest and the longest text of a tree have; ``math.inf`` is without end."""
    match node:
        case Chars():
            return 1, 1
        case Concat(parts):
            ends = [lengths_of(part) for part in parts]
            return sum(low for low, _ in ends), sum(high for _, high in ends)
        case Choice(options):
            ends = [lengths_of(option) for option in options]
            return min((low for low, _ in ends), default=0), max((high for _, high in ends), default=0)
        case Repeat(inner, least, most):
            low, high = lengths_of(inner)
            return low * least, 0 if 0 in (high, most) else high * (math.inf if most is None else most)


def size_of(node: Node) -> int:
    """Return about how many states of bytes a tree takes, every repeat written out: up to ``WIDE`` for a character."""
    known: dict[int, int] = {}  # by identity: a part may stand in the tree many times

    def size(part: Node) -> int:
        if id(part) not in known:
            match part:
                case Chars(ranges):
                    known[id(part)] = WIDE if ranges and ranges[-1][1] > LAST_ASCII else 1
                case Concat(parts) | Choice(parts):
                    known[id(part)] = sum(map(size, parts))
                case Repeat(inner, least, most):
                    known[id(part)] = max(least, most or 0, 1) * size(inner)
        return known[id(part)]

    return size(node)


def to_regex(node: Node, may_negate: bool = True) -> str:
    """Write a tree as a regular expression that Python's ``re.fullmatch`` understands.

    ``may_negate``: a set may be written as the class of what is not in it, where that is shorter.
    """
    match node:
        case Chars(ranges):
            return write_chars(ranges, may_negate)
        case Concat(parts):
            return "".join(
                grouped(part, may_negate) if isinstance(part, Choice) else to_regex(part, may_negate) for part in parts
            )
        case Choice(()):
            return "(?!)"
        case Choice(options):
            return "|".join(to_regex(option, may_negate) for option in options)
        case Repeat(inner, least, most):
            simple = isinstance(inner, Chars) or (
                isinstance(inner, Concat) and len(inner.parts) == 1 and isinstance(inner.parts[0], Chars)
            )
            return (to_regex if simple else grouped)(inner, may_negate) + write_counts(least, most)


def grouped(node: Node, may_negate: bool) -> str:
    """Write a tree in parentheses."""
    return f"({to_regex(node, may_negate)})"


def write_counts(least: int, most: int | None) -> str:
    """Write how often something repeats, as short as regular expressions allow."""
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    if (least, most) in short:
        return short[least, most]
    return f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"


def write_chars(ranges: Ranges, may_negate: bool) -> str:
    """Write a set of characters: alone, as a class, or, if it may, as the class of what is not in it if shorter."""
    if not ranges:
        return "(?!)"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return escape(ranges[0][0], r"\.^$*+?{}[]|()")
    inside, outside = (
        "".join(write_range(first, last) for first, last in part) for part in (ranges, complement(ranges))
    )
    if not may_negate or len(inside) <= len(outside) + 1:
        return f"[{inside}]"
    return f"[^{outside}]" if outside else r"[\s\S]"


def write_range(first: int, last: int) -> str:
    """Write a range as it stands in a character class."""
    ends = [escape(code, r"\]^-[&~|") for code in (first, last)]
    return ends[0] if first == last else "".join(ends) if last == first + 1 else "-".join(ends)


def escape(code: int, special: str) -> str:
    r"""Write one character: a backslash before the ``special`` ones, a number for what cannot be seen.

    Beyond U+FFFF every one is written as itself: not all libraries know ``\U0010ffff``.
    """
    character = chr(code)
    if character in special:
        return "\\" + character
    if character.isprintable() or code > 0xFFFF:
        return character
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
