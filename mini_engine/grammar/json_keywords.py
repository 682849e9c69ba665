"""L7: the closed list of JSON Schema's keywords, and their values, checked.

Owns: which keyword belongs to which type, places in a schema, the errors that name them. Must not know: trees.
"""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from mini_engine.grammar.base import GrammarError, UnsupportedKeywordError
from mini_engine.grammar.json_values import MAX_DEPTH, type_of

MAX_DIGITS = 64  # of a bound
ELSEWHERE = "take the backend xgrammar or llguidance"

ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly $comment $schema $defs definitions "
    "discriminator".split()
)
WHOLE = ["$ref", "anyOf", "oneOf", "allOf", "enum", "const"]  # nothing stands beside them, but type beside the last two
BOUNDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
ASSERTIONS: dict[str, list[str]] = {
    "null": [],
    "boolean": [],
    "integer": BOUNDS,
    "number": BOUNDS,
    "string": ["minLength", "maxLength", "pattern", "format"],
    "array": ["items", "prefixItems", "minItems", "maxItems", "uniqueItems"],
    "object": ["properties", "required", "additionalProperties"],
}
KNOWN = {"type", *WHOLE, *(keyword for keywords in ASSERTIONS.values() for keyword in keywords)}
ENDLESS = "allows any JSON, which nests without end and is not regular"


def escaped(name: str) -> str:
    """Write a name as it stands in a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


@dataclass(frozen=True)
class Place:
    """Where in the schema: a JSON pointer, how deep below the root, and the references that led here."""

    path: str = ""
    depth: int = 0
    references: tuple[str, ...] = ()

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

    def error(self, message: str) -> GrammarError:
        """Return an error that names the place."""
        return GrammarError(f"JSON Schema at {self.path or '/'}: {message}")

    def refusal(self, keyword: str, reason: str) -> UnsupportedKeywordError:
        """Return the error that refuses a keyword at this place."""
        return UnsupportedKeywordError(keyword, self.path, reason)


# --- keywords and their values ---


def check_keywords(schema: Any, place: Place) -> None:
    """Check that every keyword is known and that the converter will look at it. Raises ``GrammarError`` if not."""
    if isinstance(schema, bool):
        raise place.error(f"true {ENDLESS}; say what is valid" if schema else "nothing is valid: the schema is false")
    if not isinstance(schema, Mapping):
        raise place.error(f"a schema is an object, this one of type {type_of(schema)}; a list belongs to prefixItems")
    given = [keyword for keyword in schema if keyword not in ANNOTATIONS]
    for keyword in given:
        if keyword not in KNOWN:
            raise place.refusal(keyword, f"is no keyword that is known here; remove it, or {ELSEWHERE}")
    whole = whole_of(schema)
    if whole:
        others = [other for other in given if other != whole and (other != "type" or not is_finite(schema))]
        if others:
            raise place.refusal(others[0], f"beside {whole} asks for an intersection; keep one, or {ELSEWHERE}")
        return
    types = types_of(schema, place)
    for keyword in given:
        if keyword != "type" and not any(keyword in ASSERTIONS[each] for each in types):
            raise place.refusal(keyword, f"says nothing about {' or '.join(types)}; remove it, or change the type")


def whole_of(schema: Mapping[str, Any]) -> str | None:
    """Return the keyword that says all that there is to say, if there is one."""
    return next((keyword for keyword in WHOLE if keyword in schema), None)


def types_of(schema: Mapping[str, Any], place: Place) -> list[str]:
    """Return the types that are generated; without ``type`` the one that all keywords are about.

    Raises ``GrammarError`` for an unknown type, or if there is no such one.
    """
    if "type" in schema:
        types = list_of(schema, "type", place) if isinstance(schema["type"], list) else [schema["type"]]
        unknown = [each for each in types if each not in list(ASSERTIONS)]
        if unknown:
            raise place.error(f"type is {unknown[0]!r:.60}; choose out of {', '.join(ASSERTIONS)}")
        return list(dict.fromkeys(types))
    given = [keyword for keyword in schema if keyword not in ANNOTATIONS]
    if not given:
        raise place.error(f"a schema without a type {ENDLESS}; give a type, or {ELSEWHERE}")
    fitting = [each for each, keywords in ASSERTIONS.items() if set(given) <= set(keywords)]
    if not fitting:
        raise place.error(f"{', '.join(given)} are about different types; give the type")
    return fitting[-1:]  # bounds alone are about integers and other numbers: the wider of the two


def properties_of(schema: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
    """Return the schemas of the properties by name. Raises ``GrammarError`` if they are no object."""
    value = schema.get("properties", {})
    if not isinstance(value, Mapping):
        raise place.error(f"properties is {value!r:.60}; write an object of schemas")
    return value


def count_of(schema: Mapping[str, Any], keyword: str, place: Place) -> int | None:
    """Return a length; ``None`` without the keyword. Raises ``GrammarError`` if it is none."""
    value = schema.get(keyword)
    if keyword in schema and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise place.error(f"{keyword} is {value!r}; it counts, so write an integer that is not negative")
    return value


def counts_of(schema: Mapping[str, Any], least: str, most: str, place: Place) -> tuple[int, int | None]:
    """Return the least and the greatest length. Raises ``GrammarError`` if no length is between them."""
    low, high = count_of(schema, least, place) or 0, count_of(schema, most, place)
    if high is not None and low > high:
        raise place.error(f"nothing is valid: {least} {low} is more than {most} {high}")
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
    """Return a bound of integers. Raises ``GrammarError`` if it is no number, or has too many digits."""
    value: int | float = schema[keyword]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise place.error(f"{keyword} is {value!r:.60}; write a number")
    if abs(value) >= 10**MAX_DIGITS:
        raise place.error(f"{keyword} has more than {MAX_DIGITS} digits; leave it out")
    return value


def is_finite(schema: Mapping[str, Any]) -> bool:
    """Whether the schema lists its values."""
    return "enum" in schema or "const" in schema


def constants_of(schema: Mapping[str, Any], place: Place) -> list[Any]:
    """Return the values of ``enum`` or ``const`` that are of the type, if one is given."""
    values = list_of(schema, "enum", place) if "enum" in schema else [schema["const"]]
    types = types_of(schema, place) if "type" in schema else list(ASSERTIONS)
    return [each for each in values if has_type(each, types)]


def has_type(value: object, types: Container[object]) -> bool:
    """Whether a JSON value is of one of the types; an integer is a number."""
    kind = type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def valid_types(schema: Mapping[str, Any], place: Place) -> set[str]:
    """Return the types of values that a validator may let pass, where integers are numbers.

    A schema without ``type`` says something about one type, and lets every value of another type pass.
    """
    if is_finite(schema):
        types = [type_of(value) for value in constants_of(schema, place)]
    else:
        types = types_of(schema, place) if "type" in schema else list(ASSERTIONS)
    return {"number" if each == "integer" else each for each in types}
