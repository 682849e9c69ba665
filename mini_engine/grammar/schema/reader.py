"""L7: from the keywords of a JSON Schema to the alternatives of what it asks: without references and without branches.

Owns: which value of a keyword says what, references, branches, whether two alternatives can both be valid. Must not
know: trees of texts.

    {"$ref": R, "anyOf": [A, B]}  ──►  the facts of R and A together, or those of R and B
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import combinations, product
from typing import Any
from urllib.parse import unquote

from mini_engine.grammar.automata.regex import parse_pattern
from mini_engine.grammar.base import UnsupportedKeywordError
from mini_engine.grammar.schema.facts import Elements, Facts, Members, Part, Parts, as_number, both, common_values
from mini_engine.grammar.schema.keywords import (
    ANNOTATIONS,
    IDENTITIES,
    Place,
    check_keywords,
    escaped,
    limits_of,
    list_of,
    mapping_of,
    names_of,
    types_of,
)
from mini_engine.grammar.schema.negation import OPPOSED, Opposite, opposites, without
from mini_engine.grammar.schema.values import FORMATS

MAX_VISITS = 20_000  # of subschemas: as often as references lead there, and for each comparison of branches of oneOf
DENIED = OPPOSED | {"$ref", "not", "allOf", "anyOf", "oneOf"}


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
            ("dependentSchemas", self.dependencies),
            ("dependencies", self.dependencies),
            ("if", self.condition),
            ("unevaluatedProperties", self.unevaluated),
            ("unevaluatedItems", self.unevaluated),
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
                is_whole="additionalProperties" in schema,
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
                is_whole=after in schema or not first,
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
        """Add one of the branches, and that no other holds where it could. Raises ``UnsupportedKeywordError``."""
        branches = [self.pairs(so_far, branch) for branch in self.branches(schema, keyword, place)]
        written = []
        for i, branch in enumerate(branches):
            alone = branch
            for j, other in enumerate(branches):
                if j != i and not all(self.is_invalid(one, two) for one, two in product(alone, other)):
                    alone = self.pairs(alone, self.without_branch(schema[keyword], j, i, place))
            written += alone
        return written

    def without_branch(self, branches: list[Any], index: int, beside: int, place: Place) -> list[Facts]:
        """Return the alternatives of what is not valid under a branch. Raises ``UnsupportedKeywordError``."""
        try:
            return self.negated(branches[index], place.inside("oneOf", index))
        except UnsupportedKeywordError as error:
            raise place.refusal(
                "oneOf",
                f"has branches {min(index, beside)} and {max(index, beside)} that may both be valid; give each a "
                "property with a const of its own, or write anyOf",
            ) from error

    def branches(self, schema: Mapping[str, Any], keyword: str, place: Place) -> list[list[Facts]]:
        """Return the alternatives of each branch."""
        inside = enumerate(list_of(schema, keyword, place))
        return [self.facts(branch, place.inside(keyword, index)) for index, branch in inside]

    def negation(self, schema: Mapping[str, Any], keyword: str, place: Place, so_far: list[Facts]) -> list[Facts]:
        """Add that a schema does not hold. Raises ``UnsupportedKeywordError`` where that is not computed."""
        at = place if isinstance(schema, Opposite) else place.inside(keyword)
        return self.pairs(so_far, self.negated(schema[keyword], at))

    def negated(self, schema: Any, place: Place) -> list[Facts]:
        """Return the alternatives of what is not valid under a schema. Raises ``GrammarError``. Mutates.

        What is said in a schema that does not hold makes no member known to ``unevaluatedProperties``.
        """
        return [
            replace(
                facts,
                members=tuple(replace(each, evaluates=False) for each in facts.members),
                elements=tuple(replace(each, evaluates=False) for each in facts.elements),
            )
            for facts in self.denied(schema, place)
        ]

    def denied(self, schema: Any, place: Place) -> list[Facts]:
        """Return what ``negated`` does, as if nothing was unevaluated."""
        self.count(place)
        if isinstance(schema, bool):
            return [] if schema else [Facts(place)]
        ignored = check_keywords(schema, place)
        self.ignored |= dict.fromkeys(ignored)
        if has_identity(schema):
            place = replace(place, is_moved=True)
        said = [key for key in schema if key not in ANNOTATIONS and f"{place.path}/{escaped(key)}" not in ignored]
        for key in said:
            if key not in DENIED or (key == "const" and "draft-04" in str(self.root.get("$schema"))):
                raise place.refusal(key, "is not computed where it must not hold, in not or if; write what is valid")
        if "$ref" in said and len(said) > 1:
            raise place.refusal(
                "$ref", "next to keywords that old drafts ignore, where it must not hold; keep it alone"
            )
        found = opposites({key: schema[key] for key in said}, place)
        if "$ref" in schema:
            found += self.negated(*self.target(schema["$ref"], place))
        if "not" in schema:
            found += self.facts(schema["not"], place if isinstance(schema, Opposite) else place.inside("not"))
        for keyword in [key for key in ("allOf", "anyOf", "oneOf") if key in schema]:
            inside = enumerate(list_of(schema, keyword, place))
            each = [self.negated(branch, place.inside(keyword, index)) for index, branch in inside]
            none = [facts for branch in each for facts in branch] if keyword == "allOf" else each[0]
            for branch in each[1:] if keyword != "allOf" else ():
                none = self.pairs(none, branch)
            found += none
        for one, other in combinations(self.branches(schema, "oneOf", place), 2):
            found += self.pairs(one, other)
        return found

    def condition(self, schema: Mapping[str, Any], keyword: str, place: Place, so_far: list[Facts]) -> list[Facts]:
        """Add that ``if`` and ``then`` hold, or ``else`` and not ``if``."""
        if not {"then", "else", "unevaluatedProperties", "unevaluatedItems"} & schema.keys():
            return so_far
        then, other = (self.facts(schema.get(key, True), place.inside(key)) for key in ("then", "else"))
        at = place.inside("if")
        yes = self.pairs(self.facts(schema["if"], at), then)
        return self.pairs(so_far, [*yes, *self.pairs(self.negated(schema["if"], at), other)])

    def unevaluated(self, schema: Mapping[str, Any], keyword: str, place: Place, so_far: list[Facts]) -> list[Facts]:
        """Add what is said of the members or items of which no schema speaks that holds here."""
        rest = ((schema[keyword], place.inside(keyword)),)
        found = []
        for facts in so_far:
            members = [each for each in facts.members if each.evaluates]
            elements = [each for each in facts.elements if each.evaluates]
            if keyword == "unevaluatedProperties":
                names = {name: (True, place) for each in members for name in each.properties}
                patterns = {pattern: (True, place) for each in members for pattern in each.by_pattern}
                more = Facts(place, members=(Members(names, patterns, rest, not names, is_whole=True),))
            else:
                first = ((True, place),) * max((len(each.first) for each in elements), default=0)
                more = Facts(place, elements=(Elements(first, rest, is_whole=True),))
            is_whole = any(each.is_whole for each in (members if more.members else elements))
            found += [facts] if is_whole else self.pairs([facts], [more])
        return found

    def dependencies(self, schema: Mapping[str, Any], keyword: str, place: Place, so_far: list[Facts]) -> list[Facts]:
        """Add that a member is not there, or others are too, or a schema holds."""
        for name, needed in mapping_of(schema, keyword, place).items():
            others = {"required": needed} if isinstance(needed, list) else needed
            there = self.pairs([Facts(place, required=(name,))], self.facts(others, place.inside(keyword, name)))
            absent = replace(without(name, place), types=None)
            so_far = self.pairs(so_far, [absent, *there])
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
        if other.left_out:
            return False
        if written.values is not None and other.values is not None:
            return not common_values(written.typed_values(), other.typed_values())
        types = {*map(as_number, written.written_types())} & other.valid_types()
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
