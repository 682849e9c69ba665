"""L7: which parts of JSON Schema the xgrammar library keeps, and how a schema is handed to it.

Owns: which schemas and expressions it is given, and in which words. Must not know: grammars, tokens.

The library ignores a keyword that it does not know, and some that it knows beside certain others. Every keyword here
was tried: texts were generated at random and judged by a validator. What let one wrong text pass is refused, or, for
the contents of a string, written as a regular expression over its JSON spelling: the library puts a ``pattern`` between
the quotes as it stands, and lets bare control characters into a string of bounded length.

It reads a negated set as any bytes of the right number, overlong ones and surrogates too, which are no UTF-8. So no
expression here has one. In strings about which a schema says nothing the library writes them itself.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from mini_engine.grammar.automata.syntax import Choice, Node, Repeat, inner_nodes, to_regex
from mini_engine.grammar.base import UnsupportedKeywordError
from mini_engine.grammar.libraries.library import map_schema, refuse_keywords, without_foreign
from mini_engine.grammar.schema.converter import schema_node
from mini_engine.grammar.schema.keywords import ANNOTATIONS, has_type

OF_STRINGS = frozenset("minLength maxLength pattern format".split())
TYPES_OF = {
    "string": OF_STRINGS,
    "number": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()),
    "array": frozenset("items prefixItems minItems maxItems".split()),
    "object": frozenset("properties required additionalProperties".split()),
}
TYPE_OF = {keyword: kind for kind, keywords in TYPES_OF.items() for keyword in keywords}
ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|.)", re.DOTALL)
ALONE = ("$ref", "anyOf", "enum", "const")  # beside one of these the library looks at nothing else
KNOWN = ANNOTATIONS | TYPE_OF.keys() | {"type", *ALONE}


def kept_schema(schema: Any) -> str:
    """Return the schema as JSON for the library. Raises ``GrammarError`` for what it would not keep."""
    return json.dumps(map_schema(schema, kept))


def kept(schema: dict[str, Any], path: str) -> Mapping[str, Any]:
    """Check one schema, whose inner ones are done, and write its strings as expressions."""
    schema = without_foreign(schema, path)
    refuse_keywords(schema, KNOWN, path, "xgrammar")
    types = schema.get("type", [])
    types = types if isinstance(types, list) else [types]
    if not types and "type" in schema:
        raise UnsupportedKeywordError("type", path, "is an empty list, and no value has none of the types")
    check_lone(schema, types, path)
    check_types(schema, types, path)
    check_object(schema, path)
    if "multipleOf" in schema and "number" in types:
        raise UnsupportedKeywordError("multipleOf", path, "is kept for the type integer alone")
    if isinstance(schema.get("multipleOf"), float) and not schema["multipleOf"].is_integer():
        raise UnsupportedKeywordError("multipleOf", path, "of a fraction is ignored by xgrammar for integers")
    bounds = ({"minimum", "exclusiveMinimum"} & schema.keys(), {"maximum", "exclusiveMaximum"} & schema.keys())
    if "multipleOf" in schema and any(bounds) and not all(bounds):
        raise UnsupportedKeywordError("multipleOf", path, "is ignored beside a bound on one side; give bounds on both")
    return with_pattern(schema, path)


def check_lone(schema: Mapping[str, Any], types: list[Any], path: str) -> None:
    """Refuse assertions beside a keyword that makes the library forget them."""
    lone = next((keyword for keyword in ALONE if keyword in schema), None)
    if lone is None:
        return
    values = schema["enum"] if lone == "enum" else [schema["const"]] if lone == "const" else []
    may_stay = {lone, "type"} if isinstance(values, list) and values else {lone}
    for keyword in schema.keys() - ANNOTATIONS - may_stay:
        raise UnsupportedKeywordError(keyword, path, f"is ignored by xgrammar beside {lone!r}; leave it out")
    if "type" in schema and not all(has_type(value, types) for value in values):
        raise UnsupportedKeywordError(lone, path, f"has a value that is not of type {schema['type']!r}; leave it out")
    reference = schema.get("$ref", "#")
    if not (isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))):
        raise UnsupportedKeywordError("$ref", path, f"is {reference!r}; xgrammar finds only places like '#/$defs/name'")


def check_types(schema: Mapping[str, Any], types: list[Any], path: str) -> None:
    """Refuse assertions about a type that the schema does not name: without it, the library takes any value."""
    for keyword in schema.keys() & TYPE_OF.keys():
        needed = TYPE_OF[keyword]
        if needed not in types and not (needed == "number" and "integer" in types):
            raise UnsupportedKeywordError(keyword, path, f"needs the type {needed!r} beside it")


def check_object(schema: Mapping[str, Any], path: str) -> None:
    """Refuse names that the library does not enforce, and members beside the declared ones, which could repeat them."""
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if isinstance(required, list) and isinstance(properties, Mapping):
        for name in required:
            if name not in properties:
                raise UnsupportedKeywordError("required", path, f"names {name!r}, which 'properties' does not declare")
    if properties and schema.get("additionalProperties", False) is not False:
        raise UnsupportedKeywordError("additionalProperties", path, "beside 'properties' must be false with xgrammar")


def with_pattern(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the schema with what it says of strings in one pattern over their JSON spelling, without the quotes."""
    of_strings = {keyword: schema[keyword] for keyword in schema.keys() & OF_STRINGS}
    if not of_strings:
        return schema
    try:
        node = schema_node({"type": "string", **of_strings})
    except UnsupportedKeywordError as error:
        reason = f"cannot be kept with {', '.join(sorted(of_strings))}; write one pattern, or take llguidance"
        raise UnsupportedKeywordError(error.keyword, path, reason) from error
    if is_misread(node):
        reason = "has a choice or an optional part with a repeat inside, which xgrammar reads as more than it says; "
        raise UnsupportedKeywordError(min(of_strings), path, reason + "take fsm or llguidance")
    rest = {keyword: value for keyword, value in schema.items() if keyword not in OF_STRINGS}
    return rest | {"pattern": exact_regex(node)[1:-1]}


def is_misread(node: Node) -> bool:
    """Whether the library may take more for a ``pattern`` than it says.

    Its automaton of a string joins the options of a choice so that one with a repeat at its end goes on in another:
    ``(x{1,3}|b|x)`` takes "bx", and ``a(x[0-9]+)?Z`` takes "a5Z". Repeats of a fixed number are written out and right.
    """
    inside = inner_nodes(node)
    is_optional = isinstance(node, Repeat) and (node.least, node.most) == (0, 1)
    is_choice = isinstance(node, Choice) and len(inside) > 1
    return any(map(is_misread, inside)) or ((is_choice or is_optional) and any(map(has_repeat, inside)))


def has_repeat(node: Node) -> bool:
    """Whether something in the tree repeats a number of times that is not fixed."""
    return (isinstance(node, Repeat) and node.least != node.most) or any(map(has_repeat, inner_nodes(node)))


def exact_regex(node: Node) -> str:
    r"""Write a tree as an expression without negated sets.

    A set stays one class: as a choice of several, inside a bounded repeat, it would cost the library a hundred times
    as long for every mask. Numbers of characters have four digits: of ``\x0a01`` the library reads all four as one.
    """
    return ESCAPE.sub(lambda found: f"\\u00{found[1]}" if found[1] else found[0], to_regex(node, may_negate=False))
