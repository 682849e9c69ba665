"""L7: from a JSON Schema to a tree of JSON texts.

Owns: how each type of value is written. Must not know: automata, tokens, what references and branches mean.

The promise is soundness: every text of the tree is JSON, and valid under the schema by the rules of draft 2020-12. The
converse is not promised, as a generator need not be able to write everything. It writes an object's declared properties
in their order and no others, a string in one spelling, no ``-0`` as an integer, integers without a bound in at most 15
digits, numbers in 16 digits before the point, 21 after it and 2 in the exponent. Where any JSON is valid, it writes
arrays and objects that nest at most ``ANY_LEVELS`` deep.

    {"properties": {"a": A, "b": B}, "required": ["b"]}  ──►  { ("a": A, )? "b": B }

What cannot be promised is refused, by name and place: two patterns at once, references to themselves (finitely many
states cannot count brackets). Keywords that do not limit values are listed: ``Conversion.ignored``.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from mini_engine.checks import key_twice
from mini_engine.config import Whitespace
from mini_engine.grammar.automata.regex import parse_regex
from mini_engine.grammar.automata.syntax import (
    EMPTY,
    Choice,
    Concat,
    Node,
    Repeat,
    lengths_of,
    literal,
    optional,
    size_of,
)
from mini_engine.grammar.base import ANY_LEVELS, SHALLOW, GrammarError
from mini_engine.grammar.schema.facts import ALL_TYPES, Facts, Parts
from mini_engine.grammar.schema.keywords import (
    BOUNDS,
    BY_LLGUIDANCE,
    DIGITS,
    FEW_DIGITS,
    FIRST_ITEMS,
    FRACTION,
    INTEGERS,
    ORDER,
    OTHER_NAMES,
    OTHER_TYPES,
    REPEATED,
    SPELLING,
    UNDECLARED,
    NothingValidError,
    Place,
    counts_of,
)
from mini_engine.grammar.schema.reader import SchemaReader
from mini_engine.grammar.schema.values import (
    FORMATS,
    LEFT_OUT,
    MAX_DEPTH,
    NO_INTEGER,
    NUMBER,
    OPEN_DIGITS,
    PUNCTUATIONS,
    SIGNIFICANT_DIGITS,
    Punctuation,
    decimals_between,
    either,
    format_note,
    integers_between,
    name,
    quoted,
    string_of_format,
    string_of_length,
    text_of_format,
    text_of_pattern,
    texts_without,
    type_of,
)
from mini_engine.sampler.params import GrammarKind

MANY = 200  # states of one keyword, before an error names it


@dataclass(frozen=True)
class Conversion:
    """The tree of a schema, and the places (JSON pointers) that do not limit values, and what is valid and not in it.

    ``sizes``: about how many states the repeats of each keyword take, by keyword and place.
    """

    node: Node
    ignored: Sequence[str] = ()
    narrowed: Sequence[str] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    def largest(self) -> str:
        """Say which keyword takes the most states, if any takes many."""
        name, size = max(self.sizes.items(), key=lambda item: item[1], default=("", 0))
        return f"{name} takes about {size} of them" if size >= MANY else ""


def parse_schema(text: str) -> Mapping[str, Any] | bool:
    """Read a schema. Raises ``GrammarError`` with the place if it is not JSON, and for a name given twice."""
    try:
        schema = json.loads(text, object_pairs_hook=unique_members, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise GrammarError(f"the JSON Schema is not JSON: {error.msg} at {where}") from error
    except RecursionError as error:
        raise GrammarError(f"the JSON Schema nests too deep; {MAX_DEPTH} levels are allowed") from error
    except ValueError as error:  # also a number of thousands of digits
        raise error if isinstance(error, GrammarError) else GrammarError(f"the JSON Schema: {error}") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"a JSON Schema is an object, this one is of type {type_of(schema)}")
    return schema


def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raises ``GrammarError`` if a name stands in it twice: one of the two would be ignored."""
    if (twice := key_twice(pairs)) is not None:
        raise GrammarError(f"the JSON Schema has an object with two members {twice!r}; keep one of them")
    return dict(pairs)


def refuse_constant(text: str) -> None:
    """Raise ``GrammarError`` for ``NaN`` and ``Infinity``, which Python would read."""
    raise GrammarError(f"the JSON Schema holds {text}, which is not JSON")


def convert(schema: Mapping[str, Any] | bool, whitespace: Whitespace = "spaced") -> Conversion:
    """Return the tree of JSON texts that are valid under ``schema``, with ``whitespace`` between their tokens.

    Raises ``UnsupportedKeywordError`` for what the converter does not compute or cannot promise, ``GrammarError`` for a
    schema that is wrong, too large, or that nothing is valid under.
    """
    converter = Converter(schema, PUNCTUATIONS[whitespace])
    try:
        node = converter.node(((schema, Place()),), Place())
    except RecursionError as error:  # in a pattern; the schema itself ends at MAX_DEPTH
        raise GrammarError("a pattern of the JSON Schema nests too deep; write it flatter") from error
    return Conversion(node, list(converter.reader.ignored), list(converter.narrowed), converter.sizes)


def grammar_tree(kind: GrammarKind, text: str, whitespace: Whitespace) -> Conversion:
    """Return the tree of a regular expression or a JSON Schema. Raises ``GrammarError``."""
    return Conversion(parse_regex(text)) if kind == "regex" else convert(parse_schema(text), whitespace)


def schema_node(schema: Mapping[str, Any] | bool, whitespace: Whitespace = "spaced") -> Node:
    """Return the tree alone. Raises as ``convert`` does."""
    return convert(schema, whitespace).node


# --- types without parts ---


def bounds_of(limits: Mapping[str, Any]) -> tuple[list[tuple[Any, bool]], list[tuple[Any, bool]]]:
    """Return the lower bounds of a number, and the upper ones: each with whether it is itself excluded."""
    lows = [(limits[key], key != "minimum") for key in ("minimum", "exclusiveMinimum") if key in limits]
    highs = [(limits[key], key != "maximum") for key in ("maximum", "exclusiveMaximum") if key in limits]
    return lows, highs


def integer(facts: Facts) -> Node:
    """Return the tree of the integers within bounds. Raises ``NothingValidError`` if there are none.

    A side without a bound ends at 15 digits, or at as many as the bound on the other side has.
    """
    above, below = bounds_of(facts.limits)
    lows = [math.floor(bound) + 1 if is_excluded else math.ceil(bound) for bound, is_excluded in above]
    highs = [math.ceil(bound) - 1 if is_excluded else math.floor(bound) for bound, is_excluded in below]
    limit = 10 ** max([OPEN_DIGITS, *(len(str(abs(bound))) for bound in [*lows, *highs])]) - 1
    low = max(lows, default=-limit)
    high = min(highs, default=limit)
    if low > high:
        raise facts.place.nothing(f"no integer is at least {low} and at most {high}")
    return integers_between(low, high)


def number(facts: Facts) -> Node:
    """Return the tree of numbers within bounds. Raises ``GrammarError`` for bounds of too many digits."""
    if "multipleOf" in facts.limits:
        return integer(facts)
    bounds = {key: Decimal(repr(facts.limits[key])) for key in BOUNDS if key in facts.limits}
    if not bounds:
        return NUMBER
    for key, bound in bounds.items():
        if len(bound.as_tuple().digits) > SIGNIFICANT_DIGITS or abs(bound.adjusted()) >= SIGNIFICANT_DIGITS:
            raise facts.place.refusal(key, f"of a number has at most {SIGNIFICANT_DIGITS} digits; write fewer")
    lows, highs = bounds_of(bounds)
    low = max(lows, default=(None, False))
    high = min(highs, key=lambda end: (end[0], not end[1]), default=(None, False))
    node = decimals_between(*low, *high)
    if node is None:
        raise facts.place.nothing("no number lies between the bounds")
    return node


def fraction(facts: Facts) -> Node:
    """Return the tree of numbers that are no integers. Raises ``UnsupportedKeywordError`` for bounds."""
    for key in {*BOUNDS, "multipleOf"} & facts.limits.keys():
        raise facts.place.refusal(key, "of numbers that are no integers is not computed; remove it")
    return NO_INTEGER


def string(facts: Facts) -> Node:
    """Return the tree of strings: of some length, with a pattern, or in a format. Raises ``GrammarError``."""
    least, most = counts_of(facts.limits, "minLength", "maxLength", facts.place)
    given = [*facts.patterns, *facts.formats]
    if facts.excluded and given:
        raise facts.place.refusal("not", "of a constant next to a pattern or format is not computed; remove it")
    if not given:
        others = texts_without({*facts.excluded}, least, most)
        if others is None:
            raise facts.place.nothing("no string of the length is left")
        return quoted(others)
    if len(given) > 1:
        keyword = "pattern" if facts.patterns else "format"
        raise facts.place.refusal(keyword, f"next to another asks for an intersection; keep one, or {BY_LLGUIDANCE}")
    if facts.formats and not facts.limits.keys() & {"minLength", "maxLength"}:
        return string_of_format(given[0])
    try:
        text = text_of_pattern(given[0]) if facts.patterns else text_of_format(given[0])
    except GrammarError as error:
        raise facts.place.error(str(error)) from error
    shorter = of_length(text, least, most)
    if shorter is None:
        keyword = "minLength" if lengths_of(text)[0] < least else "maxLength"
        raise facts.place.refusal(
            keyword, f"next to a pattern asks for an intersection; write the length in the pattern, or {BY_LLGUIDANCE}"
        )
    return quoted(shorter)


def of_length(text: Node, least: int, most: int | None) -> Node | None:
    """Return the tree of the texts of a tree that have a length, ``None`` if that would be an intersection."""
    shortest, longest = lengths_of(text)
    if shortest >= least and longest <= (math.inf if most is None else most):
        return text
    while (
        isinstance(text, Concat | Choice)
        and len(inside := text.parts if isinstance(text, Concat) else text.options) == 1
    ):
        text = inside[0]
    if isinstance(text, Repeat) and lengths_of(text.node) == (1, 1):
        low = max(text.least, least)
        high = most if text.most is None else text.most if most is None else min(text.most, most)
        return Repeat(text.node, low, high) if high is None or low <= high else None
    return None


# --- types with parts, and what says it all ---


class Converter:
    """Turns the parts of one schema into trees. ``narrowed``: what is valid and not written, with its place."""

    def __init__(self, root: Mapping[str, Any] | bool, punctuation: Punctuation) -> None:
        """Say who writes which type."""
        self.punctuation = punctuation
        self.reader = SchemaReader(root)
        self.narrowed: dict[str, None] = {}
        self.any_json: dict[int, Node] = {}
        self.sizes: dict[str, int] = {}
        self.writers: dict[str, Callable[[Facts], Node]] = {
            "null": lambda facts: literal("null"),
            "boolean": lambda facts: either([literal("true"), literal("false")]),
            "integer": integer,
            FRACTION: fraction,
            "number": number,
            "string": string,
            "array": self.array,
            "object": self.object,
        }

    def node(self, parts: Parts, place: Place) -> Node:
        """Return the tree of what is valid under every part. Raises ``GrammarError``.

        A branch or type under which nothing is valid is not written; ``NothingValidError`` if none is left.
        """
        place = parts[0][1] if len(parts) == 1 else place
        nodes = []
        errors = [place.nothing("the schema is false, or its parts have no type in common")]
        for facts in self.reader.together(parts, place):
            if facts.is_empty:
                return self.anything(place)
            self.say(facts)
            by_type = [self.writers[each] for each in facts.written_types()]
            for write in by_type if facts.values is None else [self.enumeration]:
                try:
                    nodes.append(self.measured(write(facts), facts))
                except NothingValidError as error:
                    errors.append(error)
        if not nodes:
            raise errors[-1]
        return either(nodes)

    def say(self, facts: Facts) -> None:
        """Note what is valid under one alternative and not written, whatever its types. Mutates."""
        types = facts.written_types()
        if facts.types is None and facts.values is None and types != ALL_TYPES:
            self.note(facts.place, OTHER_TYPES + " and ".join(types))
        for what in facts.left_out:
            self.note(facts.place, what)
        if {"string", "object"} & {*types}:
            self.note(Place(), SPELLING)
        if FRACTION in types:
            self.note(facts.place, FEW_DIGITS)
        if {"number", "integer"} & {*types}:
            self.note(Place(), INTEGERS)
            self.note(Place(), DIGITS)
        if facts.values is None and "string" in types:
            for form in facts.formats:
                if form in LEFT_OUT:
                    self.note(facts.place, format_note(form))

    def note(self, place: Place, what: str) -> None:
        """Keep what is said of a place. Mutates."""
        self.narrowed[place.note(what)] = None

    def measured(self, node: Node, facts: Facts) -> Node:
        """Return ``node``, and note what the repeats of a length, a count or a pattern take. Mutates."""
        keywords = [key for key in ("maxLength", "minLength", "maxItems", "minItems") if facts.limits.get(key, 0) > 1]
        for keyword in (keywords or (["pattern"] if facts.patterns else []))[:1]:
            value = facts.limits.get(keyword, facts.patterns[:1] and repr(facts.patterns[0])[:60])
            self.sizes[f"{keyword} {value} at {facts.place.path or '/'}"] = size_of(node)
        return node

    def anything(self, place: Place, levels: int = ANY_LEVELS) -> Node:
        """Return the tree of any JSON that nests at most ``levels`` deep. Mutates."""
        for what in (SHALLOW, REPEATED):
            self.note(place, what)
        for what in (SPELLING, DIGITS):
            self.note(Place(), what)
        if levels not in self.any_json:
            options = [literal("null"), literal("true"), literal("false"), NUMBER, string_of_length()]
            if levels:
                inner = self.anything(place, levels - 1)
                options += [self.punctuation.array(self.punctuation.repeated([], inner)), self.map(inner)]
            self.any_json[levels] = either(options)
        return self.any_json[levels]

    def array(self, facts: Facts) -> Node:
        """Return the tree of arrays: the ``prefixItems``, all of them, then so many ``items`` as the bounds allow."""
        least, most = counts_of(facts.limits, "minItems", "maxItems", facts.place)
        if facts.unique and (most is None or most > 1):
            raise facts.place.refusal("uniqueItems", "makes an item depend on all others; remove it")
        num_first = max((len(each.first) for each in facts.elements), default=0)
        first: list[Node] = []
        if num_first and (least < num_first or most is None or most > num_first):
            self.note(facts.place, FIRST_ITEMS)
        try:
            for index in range(num_first if most is None else min(num_first, most)):
                first.append(self.node(facts.element(index), facts.place))
            item = self.inner(facts.element(num_first), facts)
        except NothingValidError:  # the array ends before such an item
            if least > len(first):
                raise
            return self.punctuation.array(self.punctuation.joined(first))
        if most is not None and most <= len(first):
            return self.punctuation.array(self.punctuation.joined(first))
        rest = max(least - len(first), 0), None if most is None else most - len(first)
        return self.punctuation.array(self.punctuation.repeated(first, item, *rest))

    def inner(self, parts: Parts, facts: Facts) -> Node:
        """Return the tree of an item or a member that no schema names: one level less of any JSON. Mutates."""
        return self.node(parts, facts.place) if parts else self.anything(facts.place, ANY_LEVELS - 1)

    def object(self, facts: Facts) -> Node:
        """Return the tree of objects: the declared members, or any names if none are declared."""
        names = dict.fromkeys([*(key for each in facts.members for key in each.properties), *facts.required])
        least, most = counts_of(facts.limits, "minProperties", "maxProperties", facts.place)
        if not names and all(each.is_open for each in facts.members):
            return self.open(facts, least, most)
        check_names(facts, names)
        if allows_others(facts) or any(each.by_pattern for each in facts.members):
            self.note(facts.place, UNDECLARED)
        if len(names) > 1:
            self.note(Place(), ORDER)
        members = []
        for key in names:
            try:
                value = self.inner(facts.member(key), facts)
            except NothingValidError:
                if key in facts.required:
                    raise
                continue
            members.append((self.punctuation.member(name(key), value), key in facts.required))
        num_required = sum(needed for _, needed in members)
        if len(members) < least and allows_others(facts):
            raise facts.place.refusal("minProperties", f"is {least}, and {len(members)} are declared; declare as many")
        if len(members) < least:
            raise facts.place.nothing(f"minProperties is {least}, and only {len(members)} members are written")
        if (least > max(num_required, 1) and least < len(members)) or (most is not None and most < len(members)):
            keyword = "maxProperties" if most is not None and most < len(members) else "minProperties"
            raise facts.place.refusal(keyword, "makes a member depend on all others; write them into required")
        if least == len(members):
            members = [(node, True) for node, _ in members]
        if least == 1 and members and not num_required:
            return self.punctuation.object(self.some(members))
        return self.punctuation.object(self.members(members))

    def open(self, facts: Facts, least: int, most: int | None) -> Node:
        """Return the tree of objects with any names, or with those that a pattern finds.

        A name that is written twice does no harm, as both values are valid; but it counts once.
        """
        self.note(facts.place, REPEATED)
        if least > 1:
            raise facts.place.refusal("minProperties", "counts different names; write some into required")
        patterns = list(dict.fromkeys(pattern for each in facts.members for pattern in each.by_pattern))
        if len(patterns) > 1 or (patterns and facts.names):
            raise facts.place.refusal("patternProperties", f"of several patterns is not computed; {BY_LLGUIDANCE}")
        if patterns and allows_others(facts):
            self.note(facts.place, OTHER_NAMES)
        if patterns:  # the schemas of other members may forbid the names of this one
            parts = tuple(p for each in facts.members for p in (each.by_pattern.values() or each.others))
            key = quoted(text_of_pattern(patterns[0]))
        else:
            parts = tuple(part for each in facts.members for part in each.others)
            key = self.node((({"type": "string"}, facts.place), *facts.names), facts.place)
        try:
            return self.map(self.inner(parts, facts), key, least, most)
        except NothingValidError:
            if least:
                raise
            return self.punctuation.object(EMPTY)

    def map(self, value: Node, key: Node | None = None, least: int = 0, most: int | None = None) -> Node:
        """Return the tree of objects with ``least`` to ``most`` members of one kind."""
        member = self.punctuation.member(string_of_length() if key is None else key, value)
        return self.punctuation.object(self.punctuation.repeated([], member, least, most))

    def members(self, members: Sequence[tuple[Node, bool]]) -> Node:
        """Return the tree of the members that are required and any of the others, in order, with commas between them.

        A required member is an anchor, which has no comma of its own: those before it bring one behind them, those
        after it one before them. The first required one is taken.
        """
        comma = self.punctuation.comma
        for anchor, (member, needed) in enumerate(members):
            if needed:
                before = [optional(Concat((each, comma))) for each, _ in members[:anchor]]
                return Concat((*before, member, *self.followers(members[anchor + 1 :])))
        return optional(self.some(members)) if members else EMPTY

    def followers(self, members: Sequence[tuple[Node, bool]]) -> list[Node]:
        """Return the tree of each member with its comma, where something stands before it."""
        with_comma = [(Concat((self.punctuation.comma, member)), needed) for member, needed in members]
        return [member if needed else optional(member) for member, needed in with_comma]

    def some(self, members: Sequence[tuple[Node, bool]]) -> Node:
        """Return the tree of one or more of the members, none of which is required.

        The first one that is there is in the left part, and any of the right part follow, or it is in the right part.
        The members of the right part are written twice, so it is short; but each cut is a level of the tree. Of n = 30
        members 2n are written, of 1,000 some 3n. A choice of the first out of all, followed by any of the others, has
        n² / 2.
        """
        if len(members) == 1:
            return members[0][0]
        cut = len(members) - max(1, len(members) // 16)
        left, right = members[:cut], members[cut:]
        return either([Concat((self.some(left), *self.followers(right))), self.some(right)])

    def enumeration(self, facts: Facts) -> Node:
        """Return the tree of the values of ``enum`` or ``const`` that are valid. Raises ``GrammarError``."""
        values = [value for value in facts.typed_values() if holds(value, facts)]
        if not values:
            raise facts.place.nothing("no value of enum or const is of the type, and within the keywords next to it")
        if {"array", "object"} & {*map(type_of, values)}:
            self.note(Place(), INTEGERS)
            self.note(Place(), ORDER)
        try:
            return either([self.punctuation.constant(value) for value in values])
        except GrammarError as error:
            raise facts.place.error(str(error)) from error


def allows_others(facts: Facts) -> bool:
    """Whether members may be valid that no schema declares."""
    return not any(part[0] is False for each in facts.members for part in each.others)


def check_names(facts: Facts, names: Iterable[str]) -> None:
    """Raise ``UnsupportedKeywordError`` if keywords about names cannot be applied to the declared names."""
    has_patterns = any(each.by_pattern for each in facts.members)
    if has_patterns and not all(key.isascii() and key.isprintable() for key in names):
        raise facts.place.refusal("patternProperties", f"next to names that are not plain ASCII; {BY_LLGUIDANCE}")
    if facts.names:
        raise facts.place.refusal("propertyNames", "next to properties is not computed by any backend; remove it")


def holds(value: Any, facts: Facts) -> bool:
    """Whether a constant is valid, as far as it can be decided: within bounds, of a length, with patterns, in formats.

    Raises ``UnsupportedKeywordError`` for an array or object that something more is said about.
    """
    kind = type_of(value)
    limits = facts.limits
    if kind in ("array", "object"):
        if facts.members or facts.required or facts.elements or facts.unique or facts.names:
            raise facts.place.refusal("enum", f"of arrays or objects stands alone; keep one, or {BY_LLGUIDANCE}")
        least, most = ("minItems", "maxItems") if kind == "array" else ("minProperties", "maxProperties")
        return is_within(len(value), limits, least, most)
    if kind == "string":
        is_plain = value.isascii() and value.isprintable()  # of other texts, dialects of patterns think differently
        found = all(is_plain and re.search(each, value) for each in facts.patterns)
        fits = all(re.fullmatch(FORMATS[each], value) for each in facts.formats)
        is_left = value not in facts.excluded
        return is_left and found and fits and is_within(len(value), limits, "minLength", "maxLength")
    if kind in ("integer", "number"):
        is_inside = limits.get("exclusiveMinimum", -math.inf) < value < limits.get("exclusiveMaximum", math.inf)
        is_multiple = kind == "integer" or "multipleOf" not in limits
        return is_within(value, limits, "minimum", "maximum") and is_multiple and is_inside
    return True


def is_within(number: float, limits: Mapping[str, Any], least: str, most: str) -> bool:
    """Whether a number lies between two limits, where there are any."""
    return bool(limits.get(least, number) <= number <= limits.get(most, number))
