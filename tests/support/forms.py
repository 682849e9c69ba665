"""Grammars of many kinds, as parameters of a request."""

from typing import Any

TEXT, INT = {"type": "string"}, {"type": "integer"}
WORD = {"type": "string", "minLength": 1, "maxLength": 8}
TYPES = {
    "name": TEXT,
    "age": INT,
    "city": WORD,
    "job": WORD,
    "pet": TEXT,
    "color": WORD,
    "food": TEXT,
    "happy": {"type": "boolean"},
}


def record(*names: str, required: int = 99) -> dict[str, Any]:
    properties = {name: TYPES[name] for name in names}
    return {
        "type": "object",
        "properties": properties,
        "required": list(names)[:required],
        "additionalProperties": False,
    }


def of_type(*types: str, **more: Any) -> dict[str, Any]:
    return {"type": types[0] if len(types) == 1 else list(types), **more}


SCHEMAS: list[dict[str, Any]] = [
    record("name", "age"),
    record("name", "age", "city"),
    record("name", "happy"),
    record("name", "age", "happy", required=0),
    record("city", "pet", required=1),
    record("happy", "name", required=1),
    of_type("integer"),
    of_type("integer", minimum=0, maximum=120),
    of_type("integer", minimum=-7, exclusiveMaximum=7),
    of_type("number"),
    of_type("boolean"),
    of_type("null"),
    of_type("string"),
    of_type("string", minLength=2, maxLength=5),
    of_type("string", pattern="^[A-Z][a-z]{2,6}$"),
    of_type("string", format="date"),
    of_type("string", format="uuid"),
    of_type("boolean", "string", maxLength=4),
    {"enum": ["red", "green", 7, None, [1, 2], {"a": "b"}]},
    {"const": {"é": ["😀", 1.5]}},
    of_type("array", items=INT, maxItems=4),
    of_type("array", items=WORD, minItems=1, maxItems=3),
    of_type("array", items=record("name"), maxItems=2),
    of_type("array", prefixItems=[WORD, INT], items=False),
    of_type("array", items=of_type("array", items=INT, maxItems=2), maxItems=2),
    {"anyOf": [INT, WORD]},
    {"anyOf": [record("name"), of_type("array", items=INT, maxItems=2)]},
    {"oneOf": [of_type("null"), record("age")]},
    {"$ref": "#/$defs/p", "$defs": {"p": record("name", "pet")}},
    of_type(
        "object",
        properties={"a": {"$ref": "#/$defs/q"}, "b": {"$ref": "#/$defs/q"}},
        required=["a"],
        additionalProperties=False,
        **{"$defs": {"q": {"enum": [1, "x"]}}},
    ),
    of_type("object", additionalProperties=INT),
    of_type("object", properties={"id": INT}, required=["id"], additionalProperties=False, description="text"),
]
REGEXES = [
    r"[a-z]{3,9}",
    r"[0-9]+(\.[0-9]+)?",
    r"foo(bar)?",
    r"(the|they|there) [a-z]+!?",
    r"\+\d{1,3} \d{3} \d{4}",
    r"a{3,5}b{2}",
    r"[^\n]{1,20}",
    r"\w{4,8}",
    r"[一-龥]{1,4}",
    r"(霍格华兹|霍比特人)!",
    r"[à-ÿ]{2,5}",
    r"[😀-🙏]{1,3}",
    r"(?i)once upon",
    r"[\s\S]{0,12}",
    r"",
    r"x?",
    r"(ab|abc|abcd)(d|e)",
    r"\[\d(, \d)*\]",
    r'"[^"\\]{0,10}"',
    r"[0-9]{1,3}(\.[0-9]{1,3}){3}",
    r"\t?\r?\n",
    r"<b>[^<]{1,12}</b>",
    r"(?:[a-z]+, ){1,3}and [a-z]+",
    r"(?P<year>19|20)\d\d",
    r"a|ab|abc|[x-z]+",
    r"Once upon a time[a-z ,]{0,20}\.",
]
GRAMMARS: list[dict[str, Any]] = [{"json_schema": schema} for schema in SCHEMAS] + [{"regex": text} for text in REGEXES]
