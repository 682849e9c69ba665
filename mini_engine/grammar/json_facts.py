"""L7: what a JSON Schema asks of a value: alternatives without references and without branches.

Owns: which value of a keyword says what, references, what several schemas ask together, whether two can both be valid.
Must not know: trees of texts.

    {"$ref": R, "anyOf": [A, B]}  ──►  the facts of R and A together, or those of R and B

A schema inside (of a property, of an item) stays a schema here, with its place: a ``Part``. Two schemas of one property
are two parts of it, and a value must be valid under both.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import product
from typing import Any
from urllib.parse import unquote

from mini_engine.grammar.json_keywords import (
    IDENTITIES,
    Place,
    check_keywords,
    has_type,
    limits_of,
    list_of,
    mapping_of,
    names_of,
    types_of,
)
from mini_engine.grammar.json_values import FORMATS, are_same, type_of
from mini_engine.grammar.regex import parse_pattern

MAX_VISITS = 20_000  # of subschemas: as often as references lead there, and for each comparison of branches of oneOf
ALL_TYPES = ("null", "boolean", "number", "string", "array", "object")  # an integer is a number
Part = tuple[Any, Place]
Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Members:
    """What one schema says of an object's members: by name, by patterns of names, and of all ``others``.

    ``is_open``: without ``properties`` any name may be written.
    """

    properties: Mapping[str, Part] = field(default_factory=dict)
    by_pattern: Mapping[str, Part] = field(default_factory=dict)
    others: Parts = ()
    is_open: bool = True

    def of(self, name: str) -> Parts:
        """Return what it says of the value of one member."""
        own = [self.properties[name]] if name in self.properties else []
        own += [part for pattern, part in self.by_pattern.items() if re.search(pattern, name)]
        return tuple(own) or self.others


@dataclass(frozen=True)
class Elements:
    """What one schema says of an array's items: of the first ones, and of all that come after."""

    first: Parts = ()
    rest: Parts = ()

    def of(self, index: int) -> Parts:
        """Return what it says of one item."""
        return (self.first[index],) if index < len(self.first) else self.rest


@dataclass(frozen=True)
class Facts:
    """One alternative: a value is valid if all of this holds. What is empty or ``None`` asks nothing.

    ``limits``: the strictest value of each keyword that bounds a number, a length or a count. ``is_narrow``: more is
    valid than this says.
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
    is_narrow: bool = False

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
        numbers = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"} & self.limits.keys()
        strings = {"minLength", "maxLength"} & self.limits.keys() or self.patterns or self.formats
        arrays = {"minItems", "maxItems"} & self.limits.keys() or self.elements or self.unique
        objects = {"minProperties", "maxProperties"} & self.limits.keys() or self.members or self.required or self.names
        about = {"number": numbers, "string": strings, "array": arrays, "object": objects}
        return tuple(each for each, said in about.items() if said) or ALL_TYPES

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
        return {"number" if each == "integer" else each for each in types}


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
        left.is_narrow or right.is_narrow,
    )


def common_types(left: tuple[str, ...] | None, right: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the types that both allow; the integers are what numbers and integers have in common."""
    if left is None or right is None:
        return left if right is None else right
    found = [each for each in left if each in right or (each == "integer" and "number" in right)]
    added = "number" in left and "number" not in right and "integer" in right and "integer" not in left
    return (*found, "integer") if added else tuple(found)


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


# --- one schema ---


def has_identity(value: Any) -> bool:
    """Whether references in a schema begin there and not at the root."""
    return isinstance(value, Mapping) and any(
        isinstance(value.get(key), str) and not value[key].startswith("#") for key in IDENTITIES
    )


@dataclass
class SchemaReader:
    """Reads the parts of one schema. ``ignored``: the places of what says nothing about which values are valid."""

    root: Any
    num_visits: int = field(default=0, init=False)
    ignored: dict[str, None] = field(default_factory=dict, init=False)

    def count(self, place: Place) -> None:
        """Count one more visit. Raises ``GrammarError`` above the limit, as references can multiply. Mutates."""
        self.num_visits += 1
        if self.num_visits > MAX_VISITS:
            raise place.error(f"the schema has more than {MAX_VISITS} subschemas, references followed; simplify it")

    def together(self, parts: Parts, place: Place) -> list[Facts]:
        """Return the alternatives of values that are valid under every part. Raises ``GrammarError``. Mutates."""
        return reduce(self.pairs, (self.facts(schema, at) for schema, at in parts), [Facts(place)])

    def pairs(self, lefts: list[Facts], rights: list[Facts]) -> list[Facts]:
        """Return what each of ``lefts`` asks together with each of ``rights``, where they have types in common."""
        found = []
        for left, right in product(lefts, rights):
            self.count(left.place)
            found.append(both(left, right))
        return [facts for facts in found if facts.types != () and facts.values != ()]

    def facts(self, schema: Any, place: Place) -> list[Facts]:
        """Return the alternatives of one schema; none where nothing is valid. Raises ``GrammarError``. Mutates."""
        self.count(place)
        if isinstance(schema, bool):
            return [Facts(place)] if schema else []
        self.ignored |= dict.fromkeys(check_keywords(schema, place))
        if place.path and has_identity(schema):
            place = replace(place, is_moved=True)
        found = [self.own(schema, place)]
        for keyword, read in (
            ("$ref", self.reference),
            ("allOf", self.all_of),
            ("anyOf", self.any_of),
            ("oneOf", self.one_of),
            ("not", self.negation),
            ("dependentRequired", self.dependencies),
            ("dependencies", self.dependencies),
        ):
            if keyword in schema:
                found = read(schema, keyword, place, found)
        return found

    def own(self, schema: Mapping[str, Any], place: Place) -> Facts:
        """Return what the keywords of one schema say that lead to no other schema. Raises ``GrammarError``."""
        texts = {key: schema[key] for key in ("pattern", "format") if key in schema}
        for key, value in texts.items():
            if not isinstance(value, str):
                raise place.error(f"{key} is {value!r:.60}; write a string")
        values = list_of(schema, "enum", place) if "enum" in schema else None
        if "const" in schema:
            values = list(common_values((schema["const"],), None if values is None else tuple(values)) or ())
        return Facts(
            place,
            types_of(schema, place),
            None if values is None else tuple(values),
            limits_of(schema, place),
            (schema["pattern"],) if "pattern" in schema else (),
            (schema["format"],) if schema.get("format") in FORMATS else (),
            schema.get("uniqueItems", False) is not False,
            self.members(schema, place),
            ((schema["propertyNames"], place.inside("propertyNames")),) if "propertyNames" in schema else (),
            tuple(names_of(schema, "required", place)),
            self.elements(schema, place),
        )

    def members(self, schema: Mapping[str, Any], place: Place) -> tuple[Members, ...]:
        """Return what a schema says of members. Raises ``GrammarError``, also for a pattern that cannot be read."""
        if not {"properties", "patternProperties", "additionalProperties"} & schema.keys():
            return ()
        inside = {
            keyword: {
                name: (value, place.inside(keyword, name)) for name, value in mapping_of(schema, keyword, place).items()
            }
            for keyword in ("properties", "patternProperties")
        }
        for pattern in inside["patternProperties"]:
            parse_pattern(pattern)
        others = schema.get("additionalProperties", True)
        return (
            Members(
                inside["properties"],
                inside["patternProperties"],
                () if others is True else ((others, place.inside("additionalProperties")),),
                "properties" not in schema or (not schema["properties"] and isinstance(others, Mapping)),
            ),
        )

    def elements(self, schema: Mapping[str, Any], place: Place) -> tuple[Elements, ...]:
        """Return what a schema says of items. A list of ``items`` is how drafts before 2020 wrote ``prefixItems``."""
        keyword, after = (
            ("items", "additionalItems") if isinstance(schema.get("items"), list) else ("prefixItems", "items")
        )
        if not {"items", "prefixItems"} & schema.keys():
            return ()
        first = list_of(schema, keyword, place)
        rest = schema.get(after, not first)  # a validator allows any more; none are written
        return (
            Elements(
                tuple((item, place.inside(keyword, index)) for index, item in enumerate(first)),
                () if rest is True else ((rest, place.inside(after)),),
            ),
        )

    # --- keywords that lead to other schemas: each takes the alternatives so far, and returns those with it ---

    def reference(self, schema: Mapping[str, Any], keyword: str, place: Place, so_far: list[Facts]) -> list[Facts]:
        """Add what a reference names. Raises ``UnsupportedKeywordError`` for recursion."""
        target, place = self.target(schema["$ref"], place)
        return self.pairs(so_far, self.facts(target, place))

    def all_of(self, schema: Mapping[str, Any], keyword: str, place: Place, so_far: list[Facts]) -> list[Facts]:
        """Add every branch."""
        return reduce(self.pairs, self.branches(schema, keyword, place), so_far)

    def any_of(self, schema: Mapping[str, Any], keyword: str, place: Place, so_far: list[Facts]) -> list[Facts]:
        """Add one of the branches."""
        return self.pairs(so_far, [facts for branch in self.branches(schema, keyword, place) for facts in branch])

    def one_of(self, schema: Mapping[str, Any], keyword: str, place: Place, so_far: list[Facts]) -> list[Facts]:
        """Add one of the branches. Raises ``UnsupportedKeywordError`` if a value could be valid under two."""
        alone = self.branches(schema, keyword, place)
        branches = [self.pairs(so_far, branch) for branch in alone]
        written = []
        for i, branch in enumerate(branches):
            own = [self.without_theirs(facts, alone[:i] + alone[i + 1 :], place) for facts in branch]
            for j, other in enumerate(branches):
                if j != i and not all(self.is_invalid(one, two) for one, two in product(own, other)):
                    raise place.refusal(
                        "oneOf",
                        f"has branches {min(i, j)} and {max(i, j)} that may both be valid; give each a property with a "
                        "const of its own, or write anyOf",
                    )
            written += own
        return written

    def without_theirs(self, facts: Facts, others: list[list[Facts]], place: Place) -> Facts:
        """Return one branch's alternative without a member that makes another branch valid too, by being there."""
        for other in (facts for branch in others for facts in branch):
            theirs = [name for name in other.required if name not in facts.required]
            if theirs and replace(other, required=()).is_empty:
                facts = replace(both(facts, self.without(theirs[0], place)), is_narrow=True)
        return facts

    def branches(self, schema: Mapping[str, Any], keyword: str, place: Place) -> list[list[Facts]]:
        """Return the alternatives of each branch."""
        inside = enumerate(list_of(schema, keyword, place))
        return [self.facts(branch, place.inside(keyword, index)) for index, branch in inside]

    def negation(self, schema: Mapping[str, Any], keyword: str, place: Place, so_far: list[Facts]) -> list[Facts]:
        """Add that one member is not there. Raises ``UnsupportedKeywordError`` for any other negation."""
        inner = schema["not"]
        names = names_of(inner, "required", place) if isinstance(inner, Mapping) and list(inner) == ["required"] else []
        if len(names) != 1:
            raise place.refusal("not", "is known for one required name alone; write what is valid")
        return self.pairs(so_far, [replace(self.without(names[0], place), types=("object",))])

    def without(self, name: str, place: Place) -> Facts:
        """Return the facts of an object that lacks a member."""
        return Facts(place, members=(Members({name: (False, place)}),))

    def dependencies(self, schema: Mapping[str, Any], keyword: str, place: Place, so_far: list[Facts]) -> list[Facts]:
        """Add that a member is not there, or others are too, or a schema holds."""
        for name, needed in mapping_of(schema, keyword, place).items():
            others = {"required": needed} if isinstance(needed, list) else needed
            there = self.pairs([Facts(place, required=(name,))], self.facts(others, place.inside(keyword, name)))
            so_far = self.pairs(so_far, [self.without(name, place), *there])
        return so_far

    def target(self, reference: Any, place: Place) -> Part:
        """Return the subschema that ``#/…`` names: a JSON pointer (RFC 6901) in the form of a URI's fragment."""
        identity = next((self.root[key] for key in IDENTITIES if isinstance(self.root.get(key), str)), "")
        local = reference
        if isinstance(reference, str) and identity and reference.startswith(identity.rstrip("#") + "#"):
            local = reference[len(identity.rstrip("#")) :]
        if not isinstance(local, str) or not (local == "#" or local.startswith("#/")):
            raise place.refusal("$ref", f"is {reference!r:.60}; only a place in the schema itself, #/…, is followed")
        if place.is_moved:
            raise place.refusal("$ref", "begins at an $id that is not computed; remove that")
        value = self.root
        at = place.follow(local)
        for token in unquote(local[1:]).split("/")[1:]:
            at = replace(at, is_moved=at.is_moved or (value is not self.root and has_identity(value)))
            key = token.replace("~1", "/").replace("~0", "~")
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif isinstance(value, list) and key in map(str, range(len(value))):
                value = value[int(key)]
            else:
                raise place.error(f"$ref is {reference!r:.60}, and the schema has no {key!r:.60} there")
        return value, at

    # --- whether two alternatives exclude each other ---

    def is_invalid(self, written: Facts, other: Facts) -> bool:
        """Whether what is written for one alternative is certainly never valid under another. Mutates."""
        self.count(other.place)
        if other.is_narrow:
            return False
        if written.values is not None and other.values is not None:
            return not common_values(written.typed_values(), other.typed_values())
        types = {"number" if each == "integer" else each for each in written.written_types()} & other.valid_types()
        if not types:
            return True
        if types != {"object"} or written.values is not None or other.values is not None:
            return False
        declared = {name for each in written.members for name in each.properties} | {*written.required}
        is_open = not declared and all(each.is_open for each in written.members)
        for name in other.required:  # a member that it never has
            if (not is_open and name not in declared) or not self.together(written.member(name), written.place):
                return True
        return any(self.exclude(written.member(name), other.member(name), other.place) for name in written.required)

    def exclude(self, mine: Parts, theirs: Parts, place: Place) -> bool:
        """Whether the values of a member that are written are never valid elsewhere. Mutates."""
        pairs = product(self.together(mine, place), self.together(theirs, place))
        return all(self.is_invalid(one, other) for one, other in pairs)
