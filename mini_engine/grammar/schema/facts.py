"""L7: what a JSON Schema asks of a value: alternatives without references and without branches.

Owns: what one alternative asks, and two of them together. Must not know: keywords of a schema, trees of texts.

A schema inside (of a property, of an item) stays a schema here, with its place: a ``Part``. Two schemas of one property
are two parts of it, and a value must be valid under both.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mini_engine.grammar.schema.keywords import FRACTION, OF_TYPE, Place, has_type
from mini_engine.grammar.schema.values import are_same, type_of

ALL_TYPES = ("null", "boolean", "number", "string", "array", "object")  # an integer is a number
Part = tuple[Any, Place]
Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Members:
    """What one schema says of an object's members: by name, by patterns of names, and of all ``others``.

    ``is_open``: without ``properties`` any name may be written. ``unevaluatedProperties`` does not apply to the members
    that it names, if it ``evaluates``, and to none if it ``is_whole``.
    """

    properties: Mapping[str, Part] = field(default_factory=dict)
    by_pattern: Mapping[str, Part] = field(default_factory=dict)
    others: Parts = ()
    is_open: bool = True
    evaluates: bool = True
    is_whole: bool = False

    def of(self, name: str) -> Parts:
        """Return what it says of the value of one member."""
        own = [self.properties[name]] if name in self.properties else []
        own += [part for pattern, part in self.by_pattern.items() if re.search(pattern, name)]
        return tuple(own) or self.others


@dataclass(frozen=True)
class Elements:
    """What one schema says of an array's items: of the first ones, and of all that come after; as ``Members``."""

    first: Parts = ()
    rest: Parts = ()
    evaluates: bool = True
    is_whole: bool = False

    def of(self, index: int) -> Parts:
        """Return what it says of one item."""
        return (self.first[index],) if index < len(self.first) else self.rest


@dataclass(frozen=True)
class Facts:
    """One alternative: a value is valid if all of this holds. What is empty or ``None`` asks nothing.

    ``limits``: the strictest value of each keyword that bounds a number, a length or a count. ``excluded``: strings
    that are not valid. ``left_out``: notes on what more is valid than this says.
    """

    place: Place
    types: tuple[str, ...] | None = None
    values: tuple[Any, ...] | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    unique: bool = False
    members: tuple[Members, ...] = ()
    names: Parts = ()
    required: tuple[str, ...] = ()
    elements: tuple[Elements, ...] = ()
    excluded: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all is asked."""
        return self == Facts(self.place)

    def member(self, name: str) -> Parts:
        """Return all that is asked of one member."""
        return tuple(part for each in self.members for part in each.of(name))

    def element(self, index: int) -> Parts:
        """Return all that is asked of one item."""
        return tuple(part for each in self.elements for part in each.of(index))

    def written_types(self) -> tuple[str, ...]:
        """Return the types that are written: without ``type`` those that something is said about."""
        if self.types is not None:
            return self.types
        if self.values is not None:
            return tuple(dict.fromkeys(map(type_of, self.values)))
        about = {
            "number": (),
            "string": self.patterns or self.formats,
            "array": self.elements or self.unique,
            "object": self.members or self.required or self.names,
        }
        return tuple(each for each in about if about[each] or self.limits.keys() & {*OF_TYPE[each]}) or ALL_TYPES

    def typed_values(self) -> tuple[Any, ...]:
        """Return the listed values that are of the type."""
        return tuple(each for each in self.values or () if has_type(each, self.types or ALL_TYPES))

    def valid_types(self) -> set[str]:
        """Return the types of values that a validator may let pass, where integers are numbers.

        A schema without ``type`` says something about one type, and lets every value of another type pass.
        """
        if self.values is not None:
            types: Iterable[str] = map(type_of, self.typed_values())
        else:
            types = ALL_TYPES if self.types is None else self.types
        return {as_number(each) for each in types}


def as_number(kind: str) -> str:
    """Return a type, the numbers for a part of them."""
    return "number" if kind in ("integer", FRACTION) else kind


# --- two together ---


def both(left: Facts, right: Facts) -> Facts:
    """Return what two alternatives ask together. ``types`` is empty if they have none in common."""
    if left.is_empty or right.is_empty:
        return right if left.is_empty else left
    return Facts(
        left.place,
        common_types(left.types, right.types),
        common_values(left.values, right.values),
        strictest(left.limits, right.limits),
        tuple(dict.fromkeys([*left.patterns, *right.patterns])),
        tuple(dict.fromkeys([*left.formats, *right.formats])),
        left.unique or right.unique,
        left.members + right.members,
        left.names + right.names,
        tuple(dict.fromkeys([*left.required, *right.required])),
        left.elements + right.elements,
        left.excluded + right.excluded,
        tuple(dict.fromkeys([*left.left_out, *right.left_out])),
    )


def common_types(left: tuple[str, ...] | None, right: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the types that both allow: what numbers and integers have in common is the integers."""
    if left is None or right is None:
        return left if right is None else right
    parts = ("integer", FRACTION)  # of the numbers
    found = [each for each in left if each in right or (each in parts and "number" in right)]
    added = [each for each in right if each in parts and "number" in left and "number" not in right]
    return tuple(dict.fromkeys([*found, *added]))


def common_values(left: tuple[Any, ...] | None, right: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Return the values that both list."""
    if left is None or right is None:
        return left if right is None else right
    return tuple(value for value in left if any(are_same(value, other) for other in right))


def strictest(left: Mapping[str, Any], right: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the limits of both: of two lower ones the higher, of two upper ones the lower."""
    choose = {key: max if key.lower().startswith(("min", "exclusivemin")) else min for key in [*left, *right]}
    given = {key: [side[key] for side in (left, right) if key in side] for key in choose}
    return {key: choose[key](values) for key, values in given.items()}
