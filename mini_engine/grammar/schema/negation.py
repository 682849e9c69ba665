"""L7: what is not valid under the keywords of a JSON Schema, said by other keywords.

Owns: the opposite of each keyword that leads to no other schema. Must not know: references, branches, trees of texts.

    not {"type": "object", "maxProperties": 3, "required": ["a"]}
      ──►  another type, or an object of 4 and more members, or one without a
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from mini_engine.grammar.schema.facts import ALL_TYPES, Facts, Members
from mini_engine.grammar.schema.keywords import (
    FRACTION,
    LEFT_OPEN,
    Place,
    limits_of,
    list_of,
    mapping_of,
    names_of,
    types_of,
)
from mini_engine.grammar.schema.values import type_of

FLIPPED = {  # limit -> whose it is, the limit of what lies beyond, and how far beyond that begins
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    **{
        f"{side}{of}": (kind, f"{other}{of}", step)
        for of, kind in (("Length", "string"), ("Items", "array"), ("Properties", "object"))
        for side, other, step in (("min", "max", -1), ("max", "min", 1))
    },
}
OPPOSED = {*FLIPPED, "type", "enum", "const", "required", "properties"}


class Opposite(dict[str, Any]):
    """A schema with ``not`` alone that stands at the place of what it denies."""


def opposites(schema: Mapping[str, Any], place: Place) -> list[Facts]:
    """Return the alternatives of what is not valid under those keywords of a schema that are in ``OPPOSED``.

    Raises ``GrammarError`` for values that a keyword does not have.
    """
    found = []
    if "type" in schema:
        types = types_of(schema, place) or ()
        others = [each for each in ALL_TYPES if each not in types]
        if "integer" in types and "number" in others:
            others[others.index("number")] = FRACTION
        found.append(Facts(place, types=tuple(others)))
    for limit, bound in limits_of(schema, place).items():
        kind, other, step = FLIPPED[limit]
        if kind == "number" or bound + step >= 0:
            found.append(Facts(place, types=(kind,), limits={other: bound + step}))
    found += [without(name, place) for name in names_of(schema, "required", place)]
    for name, inner in mapping_of(schema, "properties", place).items():
        denied = Members({name: (Opposite({"not": inner}), place.inside("properties", name))})
        found.append(Facts(place, types=("object",), required=(name,), members=(denied,)))
    if "const" in schema:
        found += others_than([schema["const"]], place)
    if "enum" in schema:
        found += others_than(list_of(schema, "enum", place), place)
    return found


def without(name: str, place: Place) -> Facts:
    """Return the facts of an object that lacks a member."""
    return Facts(place, types=("object",), members=(Members({name: (False, place)}),))


def others_than(values: Sequence[Any], place: Place) -> list[Facts]:
    """Return the alternatives of all values but these.

    Only arrays that are longer than each of them, and objects that lack the first name of each of them.
    """
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault("number" if type_of(value) == "integer" else type_of(value), []).append(value)
    found = [Facts(place, types=tuple(each for each in ALL_TYPES if each not in by_type))]
    if "string" in by_type:
        found.append(Facts(place, types=("string",), excluded=tuple(by_type["string"])))
    if "boolean" in by_type:
        found.append(Facts(place, values=tuple(each for each in (True, False) if each not in by_type["boolean"])))
    if "number" in by_type:
        for low, high in pairwise([None, *sorted({*by_type["number"]}), None]):
            limits = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            said = {key: value for key, value in limits.items() if value is not None}
            found.append(Facts(place, types=("number",), limits=said))
    if "array" in by_type:
        longer = {"minItems": max(map(len, by_type["array"])) + 1}
        found.append(Facts(place, types=("array",), limits=longer, left_out=(LEFT_OPEN,)))
    if "object" in by_type:
        names = {name: (False, place) for value in by_type["object"] for name in list(value)[:1]}
        limits = {} if all(by_type["object"]) else {"minProperties": 1}
        found.append(Facts(place, ("object",), limits=limits, members=(Members(names),), left_out=(LEFT_OPEN,)))
    return found
