r"""L7: from a regular expression to a tree, with the parser of Python's standard library.

Owns: which expressions are regular and what they mean. Must not know: bytes, automata.

The dialect is that of ``re.fullmatch(pattern, text, re.ASCII)``: the whole text matches; ``.`` is anything but a line
break; ``\d \w \s`` are ASCII. Look-around, back-references, word boundaries and anchors inside the expression are
refused: what they match is not regular, or not worth the automaton. Lazy and greedy repeats are the same language.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

# Private, but the one parser that is Python's own dialect, with positions in its errors; hypothesis uses it too.
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from mini_engine.grammar.automata.syntax import (
    ANY,
    LAST_CODE,
    Chars,
    Choice,
    Concat,
    Node,
    Ranges,
    Repeat,
    complement,
    merge_ranges,
)
from mini_engine.grammar.base import GrammarError

ASCII_SPACE = ((9, 13), (32, 32))
ASCII_DIGIT = ((48, 57),)
ASCII_WORD = ((48, 57), (65, 90), (95, 95), (97, 122))
LINE_BREAKS = ((10, 10), (13, 13), (0x2028, 0x2029))  # of JavaScript
CASE = ord("a") - ord("A")
SHOWN = 100  # characters of a pattern in an error
REFUSED = {
    "ASSERT": "look-ahead and look-behind",
    "ASSERT_NOT": "negative look-ahead and look-behind",
    "GROUPREF": "references to groups",
    "GROUPREF_EXISTS": "conditions on groups",
    "ATOMIC_GROUP": "atomic groups",
    "POSSESSIVE_REPEAT": "possessive repeats",
}
BEGIN = {op.AT_BEGINNING, op.AT_BEGINNING_STRING}
END = {op.AT_END, op.AT_END_STRING}


def parse_regex(pattern: str) -> Node:
    """Return the tree of the texts that ``pattern`` matches as a whole. Anchors at its ends change nothing.

    Raises ``GrammarError`` with the place for a mistake, and with the reason for what is not regular.
    """
    return Choice(tuple(node for node, *_ in alternatives(pattern)))


def parse_pattern(pattern: str) -> Node:
    r"""Return the tree of the texts in which ``pattern`` is found, as JSON Schema means it.

    Python and JavaScript differ in what ``.``, ``\s`` or ``[^\d]`` hold beyond ASCII. The tree has what is in both, so
    that no validator refuses a text of it. Raises ``GrammarError`` as ``parse_regex`` does, for ``(?i)``, and for what
    JavaScript reads as something else.
    """
    if other := python_only(pattern):
        raise GrammarError(
            f"pattern {shorten(pattern)} has {other}, which JavaScript reads otherwise; write it plainly"
        )
    around = Repeat(ANY, 0, None)
    found: dict[tuple[bool, bool], list[Node]] = defaultdict(list)  # by their anchors; what is around stands there once
    for node, *anchors in alternatives(pattern, cautious=True):
        found[anchors[0], anchors[1]].append(node)
    options = []
    for (at_begin, at_end), nodes in found.items():
        options.append(Concat((*(() if at_begin else (around,)), Choice(tuple(nodes)), *(() if at_end else (around,)))))
    return Choice(tuple(options))


PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{,\d*\}|\(\?[P#auxL]", re.DOTALL)


def python_only(pattern: str) -> str | None:
    r"""Return the first part of a pattern that is Python's alone: ``\A \Z \a``, ``{,3}``, ``[]a]``, ``(?P<n>…)``."""
    for part in PARTS.findall(pattern):
        if part.startswith(("[]", "[^]", "{", "(?")) or part in (r"\A", r"\Z", r"\a"):
            return str(part)
        if part.startswith("[") and r"\a" in re.findall(r"\\.", part, re.DOTALL):
            return r"\a"
    return None


def alternatives(pattern: str, cautious: bool = False) -> Iterator[tuple[Node, bool, bool]]:
    """Yield the tree of each alternative at the top, and whether it was anchored at its beginning, and at its end.

    Raises ``GrammarError`` as ``parse_regex`` does; ``cautious``: as ``parse_pattern`` does.
    """
    try:
        flags, branches = read(pattern)
        if cautious and flags & re.IGNORECASE:
            raise GrammarError(
                f"pattern {shorten(pattern)} ignores case, which validators do differently; write [aA] instead"
            )
        reader = PatternReader(bool(flags & re.IGNORECASE), bool(flags & re.DOTALL), cautious)
        for items in branches:
            inner, at_begin, at_end = strip_anchors(items)
            yield reader.sequence(inner), at_begin, at_end
    except RecursionError as error:
        raise GrammarError(
            f"the regular expression {shorten(pattern)} cannot be read: it nests too deeply; write it flatter"
        ) from error


def read(pattern: str) -> tuple[int, list[list[Any]]]:
    """Parse -> the flags, and the items of each alternative at the top. Raises ``GrammarError`` with the place."""
    try:
        tree = parser.parse(pattern, re.ASCII)
    except (re.error, OverflowError, ValueError) as error:
        raise GrammarError(f"the regular expression {shorten(pattern)} cannot be read: {error}") from error
    items = list(tree)
    if items and items[-1][0] is op.BRANCH:  # what the alternatives begin with stands before them, once
        head = items[:-1]
        return tree.state.flags, [[*head, *branch] for branch in items[-1][1][1]]
    return tree.state.flags, [items]


def shorten(pattern: str) -> str:
    """Return the pattern as an error shows it: both ends of a long one."""
    return repr(pattern) if len(pattern) <= SHOWN else f"{pattern[: SHOWN // 2]!r}…{pattern[-SHOWN // 2 :]!r}"


def strip_anchors(items: list[Any]) -> tuple[list[Any], bool, bool]:
    """Cut anchors off both ends -> what is between, whether it was anchored at its beginning, and at its end."""
    start = 0
    stop = len(items)
    while start < stop and items[start][0] is op.AT and items[start][1] in BEGIN:
        start += 1
    while start < stop and items[stop - 1][0] is op.AT and items[stop - 1][1] in END:
        stop -= 1
    return items[start:stop], start > 0, stop < len(items)


@dataclass(frozen=True)
class PatternReader:
    """Turns the parser's items into nodes. ``cautious``: leave out what Python and JavaScript do not agree about."""

    ignore_case: bool
    dot_all: bool
    cautious: bool = False

    def sequence(self, items: Iterable[Any]) -> Node:
        """Read items that follow each other."""
        return Concat(tuple(self.node(code, value) for code, value in items))

    def node(self, code: Any, value: Any) -> Node:
        """Read one item. Raises ``GrammarError`` for what is not regular."""
        if code in (op.LITERAL, op.NOT_LITERAL):
            return self.chars([(op.LITERAL, value)], code is op.NOT_LITERAL)
        if code is op.IN:
            negated = value[0][0] is op.NEGATE
            return self.chars(value[1:] if negated else value, negated)
        if code is op.ANY:
            breaks = () if self.dot_all else LINE_BREAKS if self.cautious else LINE_BREAKS[:1]
            return Chars(complement(breaks))
        if code is op.BRANCH:
            return Choice(tuple(map(self.sequence, value[1])))
        if code is op.SUBPATTERN:
            _, added, removed, items = value
            return self.with_flags(added, removed).sequence(items)
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, items = value
            return Repeat(self.sequence(items), least, None if most is op.MAXREPEAT else int(most))
        where = (
            "anchors and word boundaries inside the expression" if code is op.AT else REFUSED.get(str(code), str(code))
        )
        raise GrammarError(f"{where} cannot be turned into an automaton; write the expression without them")

    def with_flags(self, added: int, removed: int) -> "PatternReader":
        """Return the reader for a group such as ``(?i:…)``."""
        if added & re.UNICODE:
            raise GrammarError(
                r"(?u:…) makes \w, \d and \s hold more than ASCII, which is not read; write what they hold"
            )
        if self.cautious and added & re.IGNORECASE:
            raise GrammarError("(?i:…) in a pattern ignores case, which validators do differently; write [aA] instead")

        def is_on(before: bool, flag: int) -> bool:
            return (before or bool(added & flag)) and not removed & flag

        return PatternReader(is_on(self.ignore_case, re.IGNORECASE), is_on(self.dot_all, re.DOTALL), self.cautious)

    def chars(self, items: Sequence[Any], negated: bool) -> Chars:
        """Read the members of a character class."""
        ranges: list[tuple[int, int]] = []
        for code, value in items:
            if code is op.CATEGORY:
                ranges += self.category(value, wide=negated and self.cautious)
            else:
                ranges.append((value, value) if code is op.LITERAL else value)
        if self.ignore_case:
            ranges += other_case(ranges)
        return Chars(complement(ranges) if negated else merge_ranges(ranges))

    def category(self, name: Any, wide: bool) -> Ranges:
        r"""Return what ``\d`` and its like hold; ``wide``: everything that some dialect counts among it."""
        kind = str(name).removeprefix("CATEGORY_")
        if kind.startswith("NOT_"):
            inner = kind.removeprefix("NOT_")
            return complement(CATEGORIES[inner] if wide or not self.cautious else wide_category(inner))
        return wide_category(kind) if wide else CATEGORIES[kind]


CATEGORIES: dict[str, Ranges] = {"DIGIT": ASCII_DIGIT, "SPACE": ASCII_SPACE, "WORD": ASCII_WORD}
WIDE: dict[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal,
    "SPACE": lambda character: character.isspace() or character == "\ufeff",
    "WORD": lambda character: character.isalnum() or character == "_",
}


@cache
def wide_category(kind: str) -> Ranges:
    """Return every character of a category by Unicode: a second's work, done once."""
    test = WIDE[kind]
    return merge_ranges((code, code) for code in range(LAST_CODE + 1) if test(chr(code)))


def other_case(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ASCII letters of ``ranges`` in their other case."""
    pairs = []
    for first, last in ranges:
        for low, high, shift in ((65, 90, CASE), (97, 122, -CASE)):
            a, b = max(first, low), min(last, high)
            pairs += [(a + shift, b + shift)] if a <= b else []
    return pairs
