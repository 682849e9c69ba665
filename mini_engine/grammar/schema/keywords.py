"""L7: the closed list of JSON Schema's keywords, and their values, checked.

Owns: which keyword belongs to which type, places in a schema, the errors that name them. Must not know: trees.
"""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any
from urllib.parse import unquote

from mini_engine.grammar.base import GrammarError, UnsupportedKeywordError
from mini_engine.grammar.schema.values import FORMATS, MAX_DEPTH, NOT_WRITTEN, type_of

MAX_DIGITS = 64  # of a bound
LONG, SIMILAR = 5, 0.85  # of two words, as difflib measures it: "minLenght" and "minLength" are
ELSEWHERE = "take the backend xgrammar or llguidance"  # only where they keep what is refused here
BY_LLGUIDANCE = "take the backend llguidance"

ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly $comment $schema $defs definitions "
    "discriminator".split()
)
# What is valid and never written: ``GrammarStats.narrowed`` lists each with its place.
SPELLING = "strings are spelled in one way, without \\/ and without \\uXXXX where a character can stand for itself"
INTEGERS = "integers have no point and no exponent"
DIGITS = "numbers have no more digits than a double needs, an integer without bounds has 15"
ORDER = "members come in the order of the schema"
UNDECLARED = "members that no schema declares are not written"
OTHER_NAMES = "members whose names no pattern finds are not written"
OTHER_TYPES = "without a type, other values are valid too, and only this is written: "
FIRST_ITEMS = "all of prefixItems are written, and nothing after them that items does not describe"
NO_MORE_ITEMS = "nothing is written after prefixItems"
LEFT_OPEN = "some of the arrays and objects that not leaves open are not written"
FEW_DIGITS = "numbers that are no integers have 9 digits before the point and 6 behind it at most"
REPEATED = "a name may come twice, and readers keep its last value"

BOUNDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
COUNTS = ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"]
OF_TYPE: dict[str, list[str]] = {
    "null": [],
    "boolean": [],
    "integer": [*BOUNDS, "multipleOf"],
    "number": [*BOUNDS, "multipleOf"],
    "string": "minLength maxLength pattern format".split(),
    "array": "items prefixItems additionalItems unevaluatedItems minItems maxItems uniqueItems".split(),
    "object": (
        "properties patternProperties additionalProperties unevaluatedProperties propertyNames required minProperties "
        "maxProperties dependentRequired dependentSchemas dependencies".split()
    ),
}
FRACTION = "fraction"  # a type of our own: the numbers that are no integers
OF_ANY_TYPE = ["type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"]
KNOWN = {*OF_ANY_TYPE, *(keyword for keywords in OF_TYPE.values() for keyword in keywords)}
IDENTITIES = ("$id", "id")  # they matter to references alone
# Keywords of some draft that are not computed.
REFUSED = frozenset(
    "contains minContains maxContains divisibleBy disallow extends $dynamicRef $recursiveRef contentEncoding "
    "contentMediaType contentSchema".split()
)


def escaped(name: str) -> str:
    """Write a name as it stands in a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


class NothingValidError(GrammarError):
    """No value is valid under a subschema: a member that is not required is left out, a branch is not taken."""


@dataclass(frozen=True)
class Place:
    """Where in the schema: a JSON pointer, how deep below the root, and the references that led here.

    ``is_moved``: an ``$id`` above it changes where references begin.
    """

    path: str = ""
    depth: int = 0
    references: tuple[str, ...] = ()
    is_moved: bool = False

    def inside(self, *tokens: str | int) -> "Place":
        """Return the place further down. Raises ``GrammarError`` below ``MAX_DEPTH`` levels."""
        if self.depth == MAX_DEPTH:
            raise self.error(f"the schema nests deeper than {MAX_DEPTH} levels; flatten it, or {ELSEWHERE}")
        steps = [escaped(str(token)) for token in tokens]
        return replace(self, path="/".join([self.path, *steps]), depth=self.depth + 1)

    def follow(self, reference: str) -> "Place":
        """Return the place that a local reference names. Raises ``UnsupportedKeywordError`` if that is recursion."""
        target = unquote(reference[1:])
        if target in self.references:
            raise self.refusal("$ref", f"refers to itself: nesting without end is not regular; {ELSEWHERE}")
        return replace(self.inside(), path=target, references=(*self.references, target))

    def note(self, what: str) -> str:
        """Return what is said of this place."""
        return f"{self.path or '/'}: {what}"

    def error(self, message: str) -> GrammarError:
        """Return an error that names the place."""
        return GrammarError(f"JSON Schema at {self.path or '/'}: {message}")

    def nothing(self, reason: str) -> "NothingValidError":
        """Return the error that says that no value is valid here."""
        return NothingValidError(f"JSON Schema at {self.path or '/'}: nothing is valid: {reason}")

    def refusal(self, keyword: str, reason: str) -> UnsupportedKeywordError:
        """Return the error that refuses a keyword at this place."""
        return UnsupportedKeywordError(keyword, self.path, reason)


# --- keywords and their values ---


def check_keywords(schema: Any, place: Place) -> list[str]:
    """Return the places of the keywords that say nothing about values here: annotations, by the specification.

    These are words of no vocabulary (``x-order``, ``readonly``), formats that are not known, and keywords about other
    types than the schema's own. Raises ``GrammarError`` if ``schema`` is not a schema, ``UnsupportedKeywordError`` for
    a keyword that is not computed, and for a word that looks like a misspelled one (``foreign_words``).
    """
    if not isinstance(schema, Mapping):
        raise place.error(f"a schema is an object, this one of type {type_of(schema)}; a list belongs to prefixItems")
    types = types_of(schema, place) or tuple(OF_TYPE)
    for keyword in schema:
        if keyword in REFUSED:
            raise place.refusal(keyword, "is not computed by any backend; remove it")
    if schema.get("format") in NOT_WRITTEN:
        raise place.refusal("format", f"is {schema['format']!r}, which no backend writes; write a pattern")
    said = {*OF_ANY_TYPE, *(keyword for each in types for keyword in OF_TYPE[each])}
    ignored = [*foreign_words(schema, place), *(keyword for keyword in schema if keyword in KNOWN - said)]
    return [f"{place.path}/{escaped(str(keyword))}" for keyword in schema if keyword in ignored]


def foreign_words(schema: Mapping[str, Any], place: Place) -> list[str]:
    """Return the keywords of no vocabulary, and ``format`` if no draft knows its value.

    Raises ``UnsupportedKeywordError`` for a word of ``LONG`` letters that is ``SIMILAR`` to a keyword.
    """
    foreign = [keyword for keyword in schema if keyword not in KNOWN | REFUSED | ANNOTATIONS]
    for keyword in foreign:  # words with other characters, such as x-order, are not misspelled keywords
        if len(keyword) >= LONG and keyword.isalpha() and (meant := get_close_matches(keyword, KNOWN, 1, SIMILAR)):
            raise place.refusal(keyword, f"is not a keyword; did you mean {meant[0]}? Correct or remove it")
    is_unknown = isinstance(schema.get("format"), str) and schema["format"] not in [*FORMATS, *NOT_WRITTEN]
    return [*foreign, "format"] if is_unknown else foreign


def types_of(schema: Mapping[str, Any], place: Place) -> tuple[str, ...] | None:
    """Return the types that ``type`` allows, ``None`` without it. Raises ``GrammarError`` for an unknown one."""
    if "type" not in schema:
        return None
    types = list_of(schema, "type", place) if isinstance(schema["type"], list) else [schema["type"]]
    unknown = [each for each in types if each not in list(OF_TYPE)]
    if unknown:
        raise place.error(f"type is {unknown[0]!r:.60}; choose out of {', '.join(OF_TYPE)}")
    return tuple(dict.fromkeys(types))


def limits_of(schema: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Return what bounds a number, a length or a count, by keyword. Raises ``GrammarError`` for other values.

    In draft 4, ``exclusiveMinimum`` is a boolean that says what ``minimum`` means.
    """
    limits: dict[str, Any] = {key: count_of(schema, key, place) for key in COUNTS if key in schema}
    for side in ("Minimum", "Maximum"):
        plain = side.lower()
        exclusive = f"exclusive{side}"
        if isinstance(schema.get(exclusive), bool) and plain in schema:
            limits[exclusive if schema[exclusive] else plain] = bound_of(schema, plain, place)
        else:
            limits |= {key: bound_of(schema, key, place) for key in (plain, exclusive) if key in schema}
    if "multipleOf" in schema:
        limits["multipleOf"] = bound_of(schema, "multipleOf", place)
        if limits["multipleOf"] != 1:
            raise place.refusal("multipleOf", f"is known as 1 alone; remove it, or {BY_LLGUIDANCE}")
    return limits


def mapping_of(schema: Mapping[str, Any], keyword: str, place: Place) -> Mapping[str, Any]:
    """Return the schemas of a keyword by name. Raises ``GrammarError`` if they are no object."""
    value = schema.get(keyword, {})
    if not isinstance(value, Mapping):
        raise place.error(f"{keyword} is {value!r:.60}; write an object of schemas")
    return value


def count_of(schema: Mapping[str, Any], keyword: str, place: Place) -> int | None:
    """Return a length; ``None`` without the keyword. Raises ``GrammarError`` if it is none."""
    value = schema.get(keyword)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if keyword in schema and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise place.error(f"{keyword} is {value!r}; it counts, so write an integer that is not negative")
    return value


def counts_of(limits: Mapping[str, Any], least: str, most: str, place: Place) -> tuple[int, int | None]:
    """Return the least and the greatest length. Raises ``NothingValidError`` if no length is between them."""
    low = limits.get(least, 0)
    high = limits.get(most)
    if high is not None and low > high:
        raise place.nothing(f"{least} {low} is more than {most} {high}")
    return low, high


def list_of(schema: Mapping[str, Any], keyword: str, place: Place, least: int = 1) -> list[Any]:
    """Return the list of a keyword, ``[]`` without it. Raises ``GrammarError`` for something else or a short one."""
    value = schema.get(keyword, [])
    if not isinstance(value, list) or (keyword in schema and len(value) < least):
        raise place.error(f"{keyword} is {type_of(value)} {value!r:.60}; write a list of at least {least}")
    return value


def names_of(schema: Mapping[str, Any], keyword: str, place: Place) -> list[str]:
    """Return a list of strings. Raises ``GrammarError`` if it is something else."""
    names = list_of(schema, keyword, place, least=0)
    if not all(isinstance(each, str) for each in names):
        raise place.error(f"{keyword} is {names!r:.60}; write a list of strings")
    return names


def bound_of(schema: Mapping[str, Any], keyword: str, place: Place) -> int | float:
    """Return a bound of integers. Raises ``GrammarError`` if it is not a number, or has too many digits."""
    value: int | float = schema[keyword]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise place.error(f"{keyword} is {value!r:.60}; write a number")
    if abs(value) >= 10**MAX_DIGITS:
        raise place.error(f"{keyword} has more than {MAX_DIGITS} digits; leave it out")
    return value


def has_type(value: object, types: Container[object]) -> bool:
    """Whether a JSON value is of one of the types; an integer is a number."""
    kind = type_of(value)
    return kind in types or (kind == "integer" and "number" in types) or (kind == "number" and FRACTION in types)
