"""L7: how JSON values are spelled, as trees.

Owns: characters in strings, digits of numbers, constants, commas and white space. Must not know: JSON Schema.

One spelling per string, the one of ``json.dumps(ensure_ascii=False)``: whatever can stand for itself does. The language
is narrower than JSON then, and a model has one way less to go astray.
"""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, lru_cache
from typing import Any

from mini_engine.config import Whitespace
from mini_engine.grammar.automata.regex import parse_pattern, parse_regex
from mini_engine.grammar.automata.syntax import (
    ANY,
    EMPTY,
    Chars,
    Choice,
    Concat,
    Node,
    Repeat,
    complement,
    intersect,
    literal,
    merge_ranges,
    optional,
)
from mini_engine.grammar.base import GrammarError

MAX_DEPTH = 32  # arrays and objects in each other; trees are walked by functions that call themselves
OPEN_DIGITS = 15  # of an integer without bounds: that many are exact in a double, which many programs read it into
LONGEST_WORD = 100  # that may be excluded: each character of it is a level of the tree
NUM_KEPT = 256  # trees of ranges and patterns: references can ask for the same ones again and again

# --- strings ---

ESCAPED = [*range(0x20), ord('"'), ord("\\")]  # what may not stand for itself between quotes
UNESCAPED = complement([(code, code) for code in ESCAPED])
QUOTE = literal('"')


def spell_chars(chars: Chars) -> Node:
    r"""Return how one character out of a set is spelled between quotes: as itself, or escaped.

    Escapes that differ in their last character alone are one option: ``\\[bt]``, ``\\u000[0-7]``.
    """
    itself = Chars(intersect(chars.ranges, UNESCAPED))
    escapes = [json.dumps(chr(code))[1:-1] for code in ESCAPED if any(a <= code <= b for a, b in chars.ranges)]
    options: list[Node] = [itself] if itself.ranges else []
    for begin in ("\\", "\\u000", "\\u001"):
        last = [ord(escape[-1]) for escape in escapes if escape[:-1] == begin]
        if last:
            options.append(Concat((literal(begin), Chars(merge_ranges(zip(last, last, strict=True))))))
    return either(options)


def spell_text(node: Node) -> Node:
    """Return the tree of the JSON texts, quotes not included, of the strings that ``node`` matches."""
    match node:
        case Chars():
            return spell_chars(node)
        case Concat(parts):
            return Concat(tuple(map(spell_text, parts)))
        case Choice(options):
            return Choice(tuple(map(spell_text, options)))
        case Repeat(inner, least, most):
            return Repeat(spell_text(inner), least, most)


def quoted(node: Node) -> Node:
    """Return the tree of the JSON strings whose value ``node`` matches."""
    return Concat((QUOTE, spell_text(node), QUOTE))


def string_of_length(least: int = 0, most: int | None = None) -> Node:
    """Return the tree of the JSON strings of ``least`` to ``most`` characters; an escape spells one character."""
    return quoted(Repeat(ANY, least, most))


def texts_without(words: Set[str], least: int = 0, most: int | None = None) -> Node | None:
    """Return the tree of the texts of ``least`` to ``most`` characters but for ``words``, ``None`` without any.

    Raises ``GrammarError`` for a word of more than ``LONGEST_WORD`` characters.
    """
    if not words:
        return Repeat(ANY, least, most)
    if max(map(len, words)) > LONGEST_WORD:
        raise GrammarError(f"a text of more than {LONGEST_WORD} characters cannot be excluded; shorten it")
    options: list[Node] = [] if least or "" in words else [EMPTY]
    if most != 0:
        rest = max(least - 1, 0), None if most is None else most - 1
        firsts = sorted({word[0] for word in words if word})
        others = Chars(complement([(ord(first), ord(first)) for first in firsts]))
        options.append(Concat((others, Repeat(ANY, *rest))))
        for first in firsts:
            tail = texts_without({word[1:] for word in words if word.startswith(first)}, *rest)
            options += [Concat((literal(first), tail))] if tail else []
    return either(options) if options else None


text_of_pattern = lru_cache(NUM_KEPT)(parse_pattern)


# Texts of the formats of JSON Schema; LEFT_OUT says which others are valid. Years begin with 1, and leap years have a
# 29th of February; times have an offset, as RFC 3339 demands; names of hosts and mailboxes keep to the limits of their
# RFCs, and those of hosts in a URI have none.
YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
DAYS = r"(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
FOURTH = "(0[48]|[2468][048]|[13579][26])"  # two digits that four divides, 00 apart
DATE = rf"({YEAR}-({DAYS})|([0-9]{{2}}{FOURTH}|{FOURTH}00)-02-29)"
CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{CLOCK}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{CLOCK})"
HEX = "[0-9a-fA-F]"
OCTET = r"([0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])"
IPV4 = rf"{OCTET}(\.{OCTET}){{3}}"
GROUP = f"{HEX}{{1,4}}"
# Eight groups, or fewer with :: once: as many as there are before it leave room for the others behind it.
BEFORE = ["", GROUP, *(f"{GROUP}(:{GROUP}){{{count - 1}}}" for count in range(2, 8))]
BEHIND = ["", f"({GROUP})?", *(f"({GROUP}(:{GROUP}){{0,{count - 1}}})?" for count in range(2, 8))]
IPV6 = "|".join([f"({GROUP}:){{7}}{GROUP}", *(f"{BEFORE[count]}::{BEHIND[7 - count]}" for count in range(8))])
LABEL = "([A-Za-z0-9-]{0,34}[A-Za-z0-9])?"  # behind its first character
HOST = rf"([A-Za-z0-9]{LABEL}\.){{0,5}}[A-Za-z]{LABEL}"
IDN_HOST = HOST.replace(LABEL, "(-?[A-Za-z0-9]){0,17}")  # two hyphens begin what is encoded
LOCAL = r"[A-Za-z0-9_+-]{1,20}(\.[A-Za-z0-9_+-]{1,20}){0,2}"
EMAIL = rf"{LOCAL}@([A-Za-z0-9]{LABEL}\.){{0,4}}[A-Za-z]{{2,16}}"
WORDS = "[A-Za-z0-9]*(-+[A-Za-z0-9]+)*"
URI_HOST = rf"(([A-Za-z0-9]{WORDS}\.)*[A-Za-z]{WORDS}|{IPV4})"
PORT = "([0-9]|[1-9][0-9]{1,3}|[1-5][0-9]{4}|6([0-4][0-9]{3}|5([0-4][0-9]{2}|5([0-2][0-9]|3[0-5]))))"
PERCENT = f"%{HEX}{{2}}"
USER = rf"([A-Za-z0-9._~+-]|{PERCENT})+"
FIRST = rf"([A-Za-z0-9._~!$&'()*+,;=@-]|{PERCENT})"  # of a reference without a scheme: no colon
SEGMENT = rf"([A-Za-z0-9._~!$&'()*+,;=:@-]|{PERCENT})"
BEHIND_PATH = rf"(\?({SEGMENT}|[/?])*)?(#({SEGMENT}|[/?])*)?"
PATH = f"(/{SEGMENT}*)*"
URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*://({USER}(:{USER})?@)?{URI_HOST}(:{PORT})?{PATH}{BEHIND_PATH}|file:///({SEGMENT}+{PATH})?"
    rf"|mailto:{USER}@{URI_HOST}(\?{SEGMENT}+)?|urn:[A-Za-z0-9][A-Za-z0-9-]{{1,30}}:{SEGMENT}+|tel:\+?[0-9-]{{3,20}}"
)
REFERENCE = rf"{URI}|(/({SEGMENT}+{PATH})?|{FIRST}+{PATH})?{BEHIND_PATH}"
POINTER = "(/([^/~]|~[01])*)*"
AMOUNT = "[0-9]{1,4}"
AT_TIME = rf"T({AMOUNT}H({AMOUNT}M({AMOUNT}S)?)?|{AMOUNT}M({AMOUNT}S)?|{AMOUNT}S)"
DAY_PART = rf"({AMOUNT}Y({AMOUNT}M({AMOUNT}D)?)?|{AMOUNT}M({AMOUNT}D)?|{AMOUNT}D)"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": rf"P({DAY_PART}({AT_TIME})?|{AT_TIME}|{AMOUNT}W)",
    "uuid": f"{HEX}{{8}}(-{HEX}{{4}}){{3}}-{HEX}{{12}}",
    "ipv4": IPV4,
    "ipv6": IPV6,
    "hostname": HOST,
    "idn-hostname": IDN_HOST,
    "email": EMAIL,
    "idn-email": EMAIL,
    "uri": URI,
    "iri": URI,
    "uri-template": URI.replace("'", ""),
    "uri-reference": REFERENCE,
    "iri-reference": REFERENCE,
    "json-pointer": POINTER,
    "relative-json-pointer": rf"(0|[1-9]{{1,3}}0?)(#|{POINTER})",
}
OF_TIMES = "leap seconds, more than 6 digits of a second, lower-case t and z"
OF_HOSTS = "more than 6 labels, labels of more than 36 characters, a last one that begins with a digit"
OF_MAILS = "quotes and signs other than . _ + - before the @, more than 5 labels"
OF_URIS = "IPv6 hosts, and without // other schemes than mailto, urn and tel"
BEYOND = "characters beyond ASCII"
LEFT_OUT = {
    "time": OF_TIMES,
    "date-time": OF_TIMES,
    "duration": "numbers of more than 4 digits",
    "ipv6": "an IPv4 address at its end",
    "hostname": OF_HOSTS,
    "idn-hostname": f"more than 6 labels, labels of more than 18 characters, two hyphens, {BEYOND}",
    "email": OF_MAILS,
    "idn-email": f"{OF_MAILS}, {BEYOND}",
    "uri": OF_URIS,
    "iri": f"{OF_URIS}, {BEYOND}",
    "uri-template": f"{OF_URIS}, {BEYOND}, expressions in braces",
    "uri-reference": f"{OF_URIS}, hosts without a scheme",
    "iri-reference": f"{OF_URIS}, hosts without a scheme, {BEYOND}",
    "relative-json-pointer": "numbers with a zero inside, or of more than 4 digits",
}


def format_note(name: str) -> str:
    """Say which valid values of a format of ``LEFT_OUT`` are not written."""
    return f"the format {name} is written without {LEFT_OUT[name]}"


NOT_WRITTEN = ("regex",)  # formats of the specification that validators check, and that have no pattern here


@cache
def text_of_format(name: str) -> Node:
    """Return the tree of the texts of one of ``FORMATS``."""
    return parse_regex(FORMATS[name])


@cache
def string_of_format(name: str) -> Node:
    """Return the tree of the JSON strings of one of ``FORMATS``."""
    return quoted(text_of_format(name))


# --- numbers ---

DIGIT = Chars(((ord("0"), ord("9")),))
DIGIT_NODES = [literal(digit) for digit in "0123456789"]
# As many digits before and after the point as Python writes of a double, and an exponent far from overflowing it.
NUMBER = parse_regex(r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,21})?([eE][+-]?[0-9]{1,2})?")

NO_INTEGER = parse_regex(r"-?(0|[1-9][0-9]{0,8})\.[0-9]{0,5}[1-9]")  # few enough digits that no double rounds to one


@lru_cache(NUM_KEPT)
def integers_between(low: int, high: int) -> Node:
    """Return the tree of the integers from ``low`` to ``high``, both included, in digits. There is no ``-0``."""
    options: list[Node] = []
    if low < 0:
        options.append(Concat((literal("-"), naturals_between(max(1, -high), -low))))
    if high >= 0:
        options.append(naturals_between(max(0, low), high))
    return either(options)


def naturals_between(low: int, high: int) -> Node:
    """Return the tree of the integers from ``low`` to ``high``, neither of them negative.

    The range is cut into blocks: digits that are the same in the whole block, one digit out of a few, and digits that
    are free. The blocks of 17 to 345 are ``1[7-9]``, ``[2-9][0-9]``, ``[12][0-9]{2}``, ``3[0-3][0-9]``, ``34[0-5]``.
    """
    blocks = []
    while low <= high:
        free = 0  # digits; one more can be free if low ends in zeros, and ten times the block still fits
        while 10 ** (free + 1) <= min(low, high + 1 - low) and low % 10 ** (free + 1) == 0:
            free += 1
        size = 10**free
        digit = low // size % 10
        count = min(10 - digit, (high + 1 - low) // size)
        fixed = str(low // size // 10) if low >= 10 * size else ""
        few = Chars(((ord("0") + digit, ord("0") + digit + count - 1),))
        rest = [DIGIT] if free == 1 else [Repeat(DIGIT, free, free)] if free else []
        blocks.append(Concat((literal(fixed), few, *rest)))
        low += count * size
    return either(blocks)


SIGNIFICANT_DIGITS = 15  # so many of a decimal survive being read into a double: two that differ stay two
OPEN_WHOLE = 9  # digits before the point of a decimal with a bound on its other side alone
Bound = tuple[str, bool]  # the digits after the point, without zeros at the end, and whether it is itself excluded
OPEN: Bound = ("", False)


def decimals_between(low: Decimal | None, above_low: bool, high: Decimal | None, below_high: bool) -> Node | None:
    """Return the tree of the decimals between two bounds, ``None`` if there are none.

    ``above_low`` and ``below_high``: the bound itself is not among them. No exponent is written, and no ``-0``.
    """
    zero = Decimal(0)
    options: list[Node] = []
    if low is None or low < 0:
        least, above = (zero, True) if high is None or high >= 0 else (-high, below_high)
        negative = magnitudes_between(least, above, None if low is None else -low, above_low)
        options += [Concat((literal("-"), negative))] if negative else []
    if high is None or high >= 0:
        least, above = (zero, False) if low is None or low < 0 else (low, above_low)
        positive = magnitudes_between(least, above, high, below_high)
        options += [positive] if positive else []
    return either(options) if options else None


def magnitudes_between(low: Decimal, above_low: bool, high: Decimal | None, below_high: bool) -> Node | None:
    """Return the tree of the decimals without a sign between two bounds, ``None`` if there are none."""
    first, after_first = f"{low:f}".partition(".")[::2]
    last, after_last = ("9" * max(OPEN_WHOLE, len(first)), "") if high is None else f"{high:f}".partition(".")[::2]
    is_near = (above_low and low > 0) or (below_high and high is not None)  # a double could be the bound itself
    num_after = SIGNIFICANT_DIGITS - (len(last) if is_near else 0)
    num_after = max(num_after, len(after_first), len(after_last))
    begin = (after_first.rstrip("0"), above_low)
    end = None if high is None else (after_last.rstrip("0"), below_high)
    cases = [(first, begin, end)] if first == last else [(first, begin, None), (last, OPEN, end)]
    options: list[Node] = []
    for whole, lower, upper in cases if int(first) <= int(last) else []:
        fraction = digits_between(lower, upper, num_after, ".")
        if fraction is not None:
            options.append(Concat((literal(whole), fraction)))
    if int(last) - int(first) > 1:
        inner = naturals_between(int(first) + 1, int(last) - 1)
        options.append(Concat((inner, digits_between(OPEN, None, num_after, ".") or EMPTY)))
    return either(options) if options else None


def digits_between(low: Bound, high: Bound | None, count: int, point: str = "") -> Node | None:
    """Return the tree of up to ``count`` digits that continue a number between two bounds, ``None`` if none do.

    ``point`` stands before the first digit. ``high`` is ``None`` without an upper bound.
    """
    if not point and low == OPEN and high is None:
        return Repeat(DIGIT, 0, count) if count else EMPTY
    options: list[Node] = []
    floor = int(low[0][:1] or 0)
    ceiling = 9 if high is None else int(high[0][:1] or 0)
    for digit in range(floor, ceiling + 1) if count else ():
        lower = (low[0][1:], low[1]) if digit == floor else OPEN
        upper = (high[0][1:], high[1]) if high is not None and digit == ceiling else None
        tail = digits_between(lower, upper, count - 1)
        options += [Concat((DIGIT_NODES[digit], tail))] if tail else []
    if point and options:
        options = [Concat((literal(point), either(options)))]
    if low == OPEN and high != ("", True):  # only zeros follow, so the number may end here
        options.append(EMPTY)
    return either(options) if options else None


# --- arrays, objects, constants ---


@dataclass(frozen=True)
class Punctuation:
    """What stands between the values: ``padding`` inside of brackets, and the two separators."""

    comma: Node
    colon: Node
    padding: Node

    def array(self, items: Node) -> Node:
        """Return the tree of ``[items]``."""
        return Concat((literal("["), self.padding, items, self.padding, literal("]")))

    def object(self, members: Node) -> Node:
        """Return the tree of ``{members}``."""
        return Concat((literal("{"), self.padding, members, self.padding, literal("}")))

    def member(self, key: Node, value: Node) -> Node:
        """Return the tree of ``key: value``."""
        return Concat((key, self.colon, value))

    def repeated(self, first: Sequence[Node], item: Node, least: int = 0, most: int | None = None) -> Node:
        """Return the tree of all of ``first``, then ``least`` to ``most`` times ``item``, with commas between them."""
        if first:
            return Concat((self.joined(first), Repeat(Concat((self.comma, item)), least, most)))
        if most == 0:
            return EMPTY
        some = self.repeated([item], item, max(least - 1, 0), None if most is None else most - 1)
        return some if least else optional(some)

    def joined(self, items: Sequence[Node]) -> Node:
        """Return the tree of all ``items`` with commas between them."""
        return Concat(tuple(part for item in items for part in (self.comma, item))[1:])

    def constant(self, value: Any, levels: int = MAX_DEPTH) -> Node:
        """Return the tree of one JSON value, as ``json.dumps`` spells it but for the white space.

        Raises ``GrammarError`` for a value that JSON does not have, and for one that nests deeper than ``levels``.
        """
        if not levels:
            raise GrammarError(f"a constant nests deeper than {MAX_DEPTH} levels; flatten it")
        if isinstance(value, list):
            return self.array(self.joined([self.constant(item, levels - 1) for item in value]))
        if isinstance(value, Mapping):
            members = [self.member(name(key), self.constant(item, levels - 1)) for key, item in value.items()]
            return self.object(self.joined(members))
        return scalar(value)


SPACE = Repeat(Chars(((9, 10), (13, 13), (32, 32))), 0, None)
PUNCTUATIONS: dict[Whitespace, Punctuation] = {
    "spaced": Punctuation(literal(", "), literal(": "), EMPTY),
    "compact": Punctuation(literal(","), literal(":"), EMPTY),
    "any": Punctuation(Concat((SPACE, literal(","), SPACE)), Concat((SPACE, literal(":"), SPACE)), SPACE),
}


def scalar(value: Any) -> Node:
    """Return the tree of a string, number, boolean or null. Raises ``GrammarError`` for another value."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # half of a surrogate pair is a character in Python, and no text
    except (TypeError, ValueError) as error:
        raise GrammarError(
            f"a constant is not a JSON value: {error}; write null, a boolean, number or string"
        ) from error
    return literal(text)


def name(key: Any) -> Node:
    """Return the tree of the name of one member. Raises ``GrammarError`` if it is not a string."""
    if not isinstance(key, str):
        raise GrammarError(f"the name of a member is {key!r}, and names are strings in JSON")
    return scalar(key)


def type_of(value: Any) -> str:
    """Return the JSON type of a value. A boolean is not an integer, and 1.0 is one."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if value == value // 1 else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def are_same(left: Any, right: Any) -> bool:
    """Whether two values are one in JSON, inside of others too: 1 and 1.0 are the same, 1 and true are not."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(are_same, left, right))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(are_same(left[key], right[key]) for key in left)
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def either(nodes: Sequence[Node]) -> Node:
    """Return a choice, or its only option."""
    return nodes[0] if len(nodes) == 1 else Choice(tuple(nodes))
