"""L7: from a JSON Schema to a tree of JSON texts.

Owns: what each keyword means, references, what two schemas have in common. Must not know: automata, tokens.

The promise is soundness: every text of the tree is JSON, and valid under the schema by the rules of draft 2020-12. The
converse is not promised, as a generator need not be able to write everything. It writes an object's declared properties
in their order and no others, a string in one spelling, no ``-0`` as an integer, integers without a bound in at most 15
digits, numbers in 15 digits before and after the point and 2 in the exponent.

    {"properties": {"a": A, "b": B}, "required": ["b"]}  ──►  { ("a": A, )? "b": B }

What cannot be promised is refused, by name and place: unknown keywords, intersections (two patterns at once), what is
not regular (values that nest without end). Nothing is ignored but annotations.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any
from urllib.parse import unquote

from mini_engine.config import Whitespace
from mini_engine.grammar.base import GrammarError
from mini_engine.grammar.json_keywords import (
    BOUNDS,
    ELSEWHERE,
    ENDLESS,
    Place,
    bound_of,
    check_keywords,
    constants_of,
    counts_of,
    is_finite,
    list_of,
    names_of,
    properties_of,
    types_of,
    valid_types,
    whole_of,
)
from mini_engine.grammar.json_values import (
    FORMATS,
    MAX_DEPTH,
    NUMBER,
    OPEN_DIGITS,
    PUNCTUATIONS,
    Punctuation,
    are_same,
    either,
    integers_between,
    name,
    string_of_format,
    string_of_length,
    string_of_pattern,
    type_of,
)
from mini_engine.grammar.syntax import EMPTY, Concat, Node, literal, optional

MAX_VISITS = 20_000  # of subschemas: as often as references lead there, and for each comparison of branches of oneOf


def parse_schema(text: str) -> Mapping[str, Any] | bool:
    """Read a schema. Raises ``GrammarError`` with the place for what is no JSON, and for a name given twice."""
    try:
        schema = json.loads(text, object_pairs_hook=unique_members, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise GrammarError(f"the JSON Schema is no JSON: {error.msg} at {where}") from error
    except RecursionError as error:
        raise GrammarError(f"the JSON Schema nests too deep; {MAX_DEPTH} levels are allowed") from error
    except ValueError as error:  # also a number of thousands of digits
        raise error if isinstance(error, GrammarError) else GrammarError(f"the JSON Schema: {error}") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"a JSON Schema is an object, this one is of type {type_of(schema)}")
    return schema


def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raises ``GrammarError`` if a name stands in it twice: one of the two would be ignored."""
    members = dict(pairs)
    if len(members) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise GrammarError(f"the JSON Schema has an object with two members {twice!r}; keep one of them")
    return members


def refuse_constant(text: str) -> None:
    """Raise ``GrammarError`` for ``NaN`` and ``Infinity``, which Python would read."""
    raise GrammarError(f"the JSON Schema holds {text}, which is no JSON")


def schema_node(schema: Mapping[str, Any] | bool, whitespace: Whitespace = "spaced") -> Node:
    """Return the tree of JSON texts that are valid under ``schema``, with ``whitespace`` between their tokens.

    Raises ``UnsupportedKeywordError`` for what the converter does not know or cannot promise, ``GrammarError`` for a
    schema that is wrong, too large, or that nothing is valid under.
    """
    try:
        return Converter(schema, PUNCTUATIONS[whitespace]).node(schema, Place())
    except RecursionError as error:  # in a pattern; the schema itself ends at MAX_DEPTH
        raise GrammarError("a pattern of the JSON Schema nests too deep; write it flatter") from error


# --- types without parts ---


def integer(schema: Mapping[str, Any], place: Place) -> Node:
    """Return the tree of the integers within bounds. Raises ``GrammarError`` if there are none.

    A side without a bound ends at 15 digits, or at as many as the bound on the other side has.
    """
    bounds = {keyword: bound_of(schema, keyword, place) for keyword in BOUNDS if keyword in schema}
    lows, highs = [], []
    if "minimum" in bounds:
        lows.append(math.ceil(bounds["minimum"]))
    if "exclusiveMinimum" in bounds:
        lows.append(math.floor(bounds["exclusiveMinimum"]) + 1)
    if "maximum" in bounds:
        highs.append(math.floor(bounds["maximum"]))
    if "exclusiveMaximum" in bounds:
        highs.append(math.ceil(bounds["exclusiveMaximum"]) - 1)
    limit = 10 ** max([OPEN_DIGITS, *(len(str(abs(bound))) for bound in [*lows, *highs])]) - 1
    low, high = max(lows, default=-limit), min(highs, default=limit)
    if low > high:
        raise place.error(f"nothing is valid: no integer is at least {low} and at most {high}")
    return integers_between(low, high)


def number(schema: Mapping[str, Any], place: Place) -> Node:
    """Return the tree of numbers. Raises ``UnsupportedKeywordError`` for bounds: digits after the point never end."""
    for keyword in BOUNDS:
        if keyword in schema:
            raise place.refusal(keyword, f'is known for "type": "integer" alone; take that, or {ELSEWHERE}')
    return NUMBER


def string(schema: Mapping[str, Any], place: Place) -> Node:
    """Return the tree of strings: of some length, with a pattern, or in a format. Raises ``GrammarError``."""
    given = [keyword for keyword in ("pattern", "format", "minLength", "maxLength") if keyword in schema]
    if given and given[0] in ("pattern", "format"):
        if len(given) > 1:
            raise place.refusal(given[1], f"beside {given[0]} asks for an intersection; keep one, or {ELSEWHERE}")
        return patterned(schema["pattern"], place) if given == ["pattern"] else formatted(schema["format"], place)
    return string_of_length(*counts_of(schema, "minLength", "maxLength", place))


def patterned(pattern: Any, place: Place) -> Node:
    """Return the tree of the strings in which ``pattern`` is found. Raises ``GrammarError`` with the place."""
    if not isinstance(pattern, str):
        raise place.error(f"pattern is {pattern!r:.60}; write a regular expression")
    try:
        return string_of_pattern(pattern)
    except GrammarError as error:
        raise place.error(str(error)) from error


def formatted(form: Any, place: Place) -> Node:
    """Return the tree of the strings in a format. Raises ``UnsupportedKeywordError`` for an unknown one."""
    if form not in list(FORMATS):
        raise place.refusal("format", f"is {form!r:.60}; {', '.join(FORMATS)} are known; write a pattern instead")
    return string_of_format(form)


def boolean(schema: Mapping[str, Any], place: Place) -> Node:
    """Return the tree of ``true`` and ``false``."""
    return either([literal("true"), literal("false")])


def null(schema: Mapping[str, Any], place: Place) -> Node:
    """Return the tree of ``null``."""
    return literal("null")


# --- types with parts, and what says it all ---

Writer = Callable[[Mapping[str, Any], Place], Node]


@dataclass
class Converter:
    """Turns the parts of one schema into trees. ``num_visits``: how many subschemas it has looked at so far."""

    root: Mapping[str, Any] | bool
    punctuation: Punctuation
    num_visits: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Say who writes what: a keyword that says it all, or a type."""
        self.writers: dict[str, Writer] = {
            "$ref": self.reference,
            "anyOf": self.any_of,
            "oneOf": self.one_of,
            "allOf": self.all_of,
            "enum": self.enumeration,
            "const": self.enumeration,
            "null": null,
            "boolean": boolean,
            "integer": integer,
            "number": number,
            "string": string,
            "array": self.array,
            "object": self.object,
        }

    def node(self, schema: Any, place: Place) -> Node:
        """Return the tree of one schema, and so on for those in it. Raises ``GrammarError``."""
        self.count(place)
        check_keywords(schema, place)
        whole = whole_of(schema)
        names = [whole] if whole else types_of(schema, place)
        return either([self.writers[each](schema, place) for each in names])

    def count(self, place: Place) -> None:
        """Count one more visit. Raises ``GrammarError`` above the limit, as references can multiply. Mutates."""
        self.num_visits += 1
        if self.num_visits > MAX_VISITS:
            raise place.error(f"the schema has more than {MAX_VISITS} subschemas, references followed; simplify it")

    def array(self, schema: Mapping[str, Any], place: Place) -> Node:
        """Return the tree of arrays: the ``prefixItems``, all of them, then so many ``items`` as the bounds allow."""
        if schema.get("uniqueItems", False) is not False:
            raise place.refusal("uniqueItems", f"makes an item depend on all others; remove it, or {ELSEWHERE}")
        least, most = counts_of(schema, "minItems", "maxItems", place)
        prefix = list_of(schema, "prefixItems", place)
        first = [self.node(item, place.inside("prefixItems", index)) for index, item in enumerate(prefix)]
        if not first and "items" not in schema:
            raise place.refusal("type", f"is array, and without items it {ENDLESS}; give items, or {ELSEWHERE}")
        if most is not None and most < len(first):
            raise place.error(f"maxItems is {most}, and all {len(first)} prefixItems are written; raise it")
        if schema.get("items", False) is False:  # absent is "any JSON" to a validator, and not written here
            if least > len(first):
                raise place.error(f"minItems is {least}, and only {len(first)} prefixItems are written; give items")
            return self.punctuation.array(self.punctuation.joined(first))
        item = self.node(schema["items"], place.inside("items"))
        rest = max(least - len(first), 0), None if most is None else most - len(first)
        return self.punctuation.array(self.punctuation.repeated(first, item, *rest))

    def object(self, schema: Mapping[str, Any], place: Place) -> Node:
        """Return the tree of objects: the declared properties, or any names with values of ``additionalProperties``."""
        properties, required = properties_of(schema, place), names_of(schema, "required", place)
        others = schema.get("additionalProperties", True)
        for key in required:
            if key not in properties:
                raise place.refusal("required", f"names {key!r}, which is none of the properties; declare it")
        if isinstance(others, Mapping) and not properties:
            return self.map(self.node(others, place.inside("additionalProperties")))
        if not isinstance(others, bool):
            raise place.refusal("additionalProperties", "beside properties would never be written; write false")
        if others and "properties" not in schema:
            raise place.refusal("type", f"is object, and without properties it {ENDLESS}; give some, or {ELSEWHERE}")
        members = []
        for key, schema_of_value in properties.items():
            value = self.node(schema_of_value, place.inside("properties", key))
            members.append((self.punctuation.member(name(key), value), key in required))
        return self.punctuation.object(self.members(members))

    def map(self, value: Node) -> Node:
        """Return the tree of objects with any names. One that is written twice does no harm: both values are valid."""
        member = self.punctuation.member(string_of_length(), value)
        return self.punctuation.object(self.punctuation.repeated([], member))

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

        The first one that is there is in the left half, and any of the right half follow, or it is in the right half.
        The tree has n log n parts; a choice of the first out of all, followed by any of the others, has n² / 2.
        """
        if len(members) == 1:
            return members[0][0]
        left, right = members[: len(members) // 2], members[len(members) // 2 :]
        return either([Concat((self.some(left), *self.followers(right))), self.some(right)])

    def enumeration(self, schema: Mapping[str, Any], place: Place) -> Node:
        """Return the tree of the values of ``enum`` or ``const`` that are of the type. Raises ``GrammarError``."""
        values = constants_of(schema, place)
        if not values:
            raise place.error("nothing is valid: no value of enum or const is of the type")
        try:
            return either([self.punctuation.constant(value) for value in values])
        except GrammarError as error:
            raise place.error(str(error)) from error

    def any_of(self, schema: Mapping[str, Any], place: Place) -> Node:
        """Return the tree of what is valid under one branch or several."""
        return either(self.branches(schema, "anyOf", place))

    def all_of(self, schema: Mapping[str, Any], place: Place) -> Node:
        """Return the tree of the only branch. Raises ``UnsupportedKeywordError`` for several."""
        if len(list_of(schema, "allOf", place)) > 1:
            raise place.refusal("allOf", f"of several schemas is an intersection; merge them, or {ELSEWHERE}")
        return either(self.branches(schema, "allOf", place))

    def one_of(self, schema: Mapping[str, Any], place: Place) -> Node:
        """Return the tree of what is valid under exactly one branch.

        Raises ``UnsupportedKeywordError`` if two branches could have a value in common.
        """
        nodes = self.branches(schema, "oneOf", place)
        for (i, left), (j, right) in combinations(enumerate(schema["oneOf"]), 2):
            if not self.are_disjoint(left, right, place):
                raise place.refusal(
                    "oneOf",
                    f"has branches {i} and {j} that may both be valid; give each a property with a const of its own, "
                    f"write anyOf, or {ELSEWHERE}",
                )
        return either(nodes)

    def branches(self, schema: Mapping[str, Any], keyword: str, place: Place) -> list[Node]:
        """Return the tree of each branch."""
        return [
            self.node(branch, place.inside(keyword, index))
            for index, branch in enumerate(list_of(schema, keyword, place))
        ]

    def reference(self, schema: Mapping[str, Any], place: Place) -> Node:
        """Return the tree of what a reference names. Raises ``UnsupportedKeywordError`` for recursion."""
        target = self.target(schema["$ref"], place)
        return self.node(target, place.follow(schema["$ref"]))

    def target(self, reference: Any, place: Place) -> Any:
        """Return the subschema that ``#/…`` names: a JSON pointer (RFC 6901) in the form of a URI's fragment."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise place.refusal("$ref", f"is {reference!r:.60}; only a place in the schema itself, #/…, is followed")
        value: Any = self.root
        for token in unquote(reference[1:]).split("/")[1:]:
            key = token.replace("~1", "/").replace("~0", "~")
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif isinstance(value, list) and key in map(str, range(len(value))):
                value = value[int(key)]
            else:
                raise place.error(f"$ref is {reference!r:.60}, and the schema has no {key!r:.60} there")
        return value

    def are_disjoint(self, left: Any, right: Any, place: Place) -> bool:
        """Whether no text of either schema is valid under the other, as far as can be told. Both were converted."""
        pairs = product(self.alternatives(left, place), self.alternatives(right, place))
        return all(self.are_apart(one, other, place) for one, other in pairs)

    def alternatives(self, schema: Mapping[str, Any], place: Place) -> list[Mapping[str, Any]]:
        """Return the schemas without references and branches of which one holds where ``schema`` does."""
        if "$ref" in schema:
            return self.alternatives(self.target(schema["$ref"], place), place)
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema:
                return [each for branch in schema[keyword] for each in self.alternatives(branch, place)]
        return [schema]

    def are_apart(self, left: Mapping[str, Any], right: Mapping[str, Any], place: Place) -> bool:
        """Whether different values, types or values of a property that both require keep two schemas apart. Mutates."""
        self.count(place)
        if is_finite(left) and is_finite(right):
            pairs = product(constants_of(left, place), constants_of(right, place))
            return not any(are_same(one, other) for one, other in pairs)
        if not valid_types(left, place) & valid_types(right, place):
            return True
        if is_finite(left) or is_finite(right) or {*types_of(left, place), *types_of(right, place)} != {"object"}:
            return False
        mine, other = properties_of(left, place), properties_of(right, place)
        common = [key for key in left.get("required", []) if key in right.get("required", [])]
        return any(self.are_disjoint(mine[key], other[key], place) for key in common)
