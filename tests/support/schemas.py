"""Drawn JSON Schemas, texts that are valid under them, and mutants of such texts."""

import json
import random
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from mini_engine.grammar.automata.syntax import Chars, Choice, Concat, Node, Repeat
from mini_engine.grammar.schema.converter import schema_node
from mini_engine.grammar.schema.values import FORMATS, type_of

NUM_SCHEMAS, NUM_SAMPLES, NUM_MUTANTS = 180, 6, 25
INT = {"type": "integer"}


def sample(node: Node, rng: random.Random) -> str:
    """Draw one text of a tree."""
    match node:
        case Chars(ranges):
            first, last = rng.choice(ranges)
            return chr(rng.randint(first, min(last, first + 300) if rng.random() < 0.8 else last))
        case Concat(parts):
            return "".join(sample(part, rng) for part in parts)
        case Choice(options):
            return sample(rng.choice(options), rng)
        case Repeat(inner, least, most):
            high = least + 3 if most is None else most
            count = rng.choice([least, min(high, least + rng.randint(0, 3)), min(high, least + 6)])
            return "".join(sample(inner, rng) for _ in range(count))


class Maker:
    """Draws schemas that the converter promises to accept."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.definitions: dict[str, Any] = {}

    def schema(self) -> dict[str, Any]:
        schema = self.node(3)
        return {**schema, "$defs": self.definitions} if self.definitions else schema

    def node(self, depth: int) -> dict[str, Any]:
        kinds = ["null", "boolean", "integer", "number", "string", "enum", "const", "types"]
        kinds += ["array", "object", "tuple", "map", "any_of", "one_of", "all_of", "reference"] * 2 if depth else []
        kinds += ["names", "beside", "depending", "anything", "denied", "condition"] if depth else []
        schema: dict[str, Any] = getattr(self, f"make_{self.rng.choice(kinds)}")(depth - 1)
        return {**schema, "description": "text"} if self.rng.random() < 0.2 else schema

    def make_null(self, depth: int) -> dict[str, Any]:
        return {"type": "null"}

    def make_boolean(self, depth: int) -> dict[str, Any]:
        return {"type": "boolean"}

    def make_number(self, depth: int) -> dict[str, Any]:
        low = self.rng.choice([0, -1, 0.5, -2.25, 1e-3, -99.99, 10**6, self.rng.randint(-500, 500) / 8])
        high = round(low + self.rng.choice([1, 0.5, 10, 99.75, 0.125]), 3)
        bounds = {
            self.rng.choice(["minimum", "exclusiveMinimum"]): low,
            self.rng.choice(["maximum", "exclusiveMaximum"]): high,
        }
        return {"type": "number", **{key: value for key, value in bounds.items() if self.rng.random() < 0.5}}

    def make_integer(self, depth: int) -> dict[str, Any]:
        low = self.rng.choice([0, 1, -5, -1000, 2.5, -2.5, 10**15, self.rng.randint(-(10**6), 10**6)])
        high = low + self.rng.choice([2, 9, 100, 7.5, 10**9])
        bounds = {
            self.rng.choice(["minimum", "exclusiveMinimum"]): low,
            self.rng.choice(["maximum", "exclusiveMaximum"]): high,
        }
        return {"type": "integer", **{key: value for key, value in bounds.items() if self.rng.random() < 0.7}}

    def make_string(self, depth: int) -> dict[str, Any]:
        low = self.rng.randint(0, 4)
        options: list[dict[str, Any]] = [
            {},
            {"minLength": low},
            {"maxLength": low},
            {"minLength": low, "maxLength": low + self.rng.randint(0, 5)},
            {"pattern": self.rng.choice(['^[a-z"]+$', r"\d{2,3}", "a|^b", r"^\S\s\S$", "^[\x00-\\x7f]{0,3}$", r"\\."])},
            {"format": self.rng.choice(list(FORMATS))},
        ]
        return {"type": "string", **self.rng.choice(options)}

    def value(self, depth: int) -> Any:
        leaf = [None, True, False, 0, 1, -3, 1.0, 2.5, 1e20, "", 'a"\\\n\x7f\u2028é😀', "b"]
        if depth <= 0 or self.rng.random() < 0.6:
            return self.rng.choice(leaf)
        if self.rng.random() < 0.5:
            return [self.value(depth - 1) for _ in range(self.rng.randint(0, 3))]
        return {key: self.value(depth - 1) for key in self.rng.sample(["x", "y", 'z"'], self.rng.randint(0, 3))}

    def make_enum(self, depth: int) -> dict[str, Any]:
        values = [self.value(2) for _ in range(self.rng.randint(1, 4))]
        return {"enum": values, "type": type_of(values[0])} if self.rng.random() < 0.3 else {"enum": values}

    def make_const(self, depth: int) -> dict[str, Any]:
        return {"const": self.value(2)}

    def make_types(self, depth: int) -> dict[str, Any]:
        types = self.rng.sample(["null", "boolean", "string", "integer"], 2)
        extra = {"minLength": 1} if "string" in types else {"maximum": 9} if "integer" in types else {}
        return {"type": types, **extra}

    def make_array(self, depth: int) -> dict[str, Any]:
        low = self.rng.randint(0, 2)
        schema = {"type": "array", "items": self.node(depth)}
        if self.rng.random() < 0.5:
            schema["minItems"] = low
        if self.rng.random() < 0.5:
            schema["maxItems"] = low + self.rng.randint(0, 2)
        return schema

    def make_tuple(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"prefixItems": [self.node(depth) for _ in range(self.rng.randint(1, 3))]}
        rest = self.rng.choice(["absent", "false", "more"])
        if rest == "more":
            schema |= {"items": self.node(depth), "minItems": self.rng.randint(0, 5)}
        return {**schema, "items": False, "uniqueItems": False} if rest == "false" else schema

    def make_map(self, depth: int) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self.node(depth)}

    def make_object(self, depth: int) -> dict[str, Any]:
        names = self.rng.sample(["a", "b", "é", 'q"', "x/y~z", "long name", ""], self.rng.randint(0, 4))
        schema: dict[str, Any] = {"properties": {key: self.node(depth) for key in names}}
        if self.rng.random() < 0.7:
            schema["required"] = [key for key in names if self.rng.random() < 0.5]
        if self.rng.random() < 0.7:
            schema |= {"type": "object", "additionalProperties": self.rng.random() < 0.3}
        return schema

    def make_any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.node(depth) for _ in range(self.rng.randint(1, 3))]}

    def make_all_of(self, depth: int) -> dict[str, Any]:
        """Objects that say something about one another's members, or one schema alone."""
        if self.rng.random() < 0.3:
            return {"allOf": [self.node(depth)]}
        one, other = ({"properties": {key: self.node(depth) for key in self.rng.sample("abc", 2)}} for _ in range(2))
        common = {key: {"type": ["string", "integer"]} for key in ("d",)}
        beside = {"properties": common, "required": self.rng.sample("de", self.rng.randint(0, 2))}
        shared = one["properties"].keys() & other["properties"].keys()
        other["properties"] = {key: value for key, value in other["properties"].items() if key not in shared}
        if self.rng.random() < 0.3:
            beside["additionalProperties"] = self.rng.choice([False, True, {"type": ["integer", "object"]}])
            beside["required"] = [key for key in beside["required"] if key == "d"]
        return {"type": "object", "allOf": [one, {"type": ["object", "null"], **other}], **beside}

    def make_names(self, depth: int) -> dict[str, Any]:
        """Members by a pattern of their names."""
        rest = self.rng.choice([{}, {"additionalProperties": False}, {"minProperties": 1, "maxProperties": 3}])
        if self.rng.random() < 0.3:
            return {"type": "object", "propertyNames": {"maxLength": 3}, "additionalProperties": self.node(depth)}
        declared = {"properties": {"xa": {}, "b": INT}} if self.rng.random() < 0.3 else {}
        declared = declared if not {"minProperties", "maxProperties"} & rest.keys() else {}
        return {"type": "object", "patternProperties": {"^x": self.node(depth)}, **declared, **rest}

    def make_beside(self, depth: int) -> dict[str, Any]:
        """Branches beside other keywords: what is said on both sides holds together."""
        inner = {"type": "object", "properties": {key: self.node(depth) for key in "abc"}}
        one, other = ({"required": [key]} for key in self.rng.sample("abc", 2))
        options: list[dict[str, Any]] = [
            inner | {"anyOf": [one, other]},
            inner | {"oneOf": [one, other]},
            inner | {"not": one},
            inner | {"minProperties": 1, "x-order": 3, "readonly": True},
            {"type": ["string", "integer", "null"], "anyOf": [{"minLength": 1}, {"maximum": 9}]},
            {"type": "string", "allOf": [{"maxLength": 5}, {"minLength": 2}, {"maxLength": 9}]},
            {"enum": ["a", "abc", 3, 30, None], "minLength": 2, "minimum": 5},
            {"pattern": "^[a-f]+$", "maxLength": 4},
        ]
        return self.rng.choice(options)

    def make_depending(self, depth: int) -> dict[str, Any]:
        """Members that bring others with them."""
        needed = {"a": self.rng.sample("bc", self.rng.randint(1, 2)), "b": ["c"]}
        return {"properties": {key: self.node(depth) for key in "abc"}, "dependentRequired": needed}

    def denied(self) -> dict[str, Any]:
        """Draw what can be said of a value and denied."""
        options: list[dict[str, Any]] = [
            {"type": self.rng.choice(["null", "integer", ["number", "string"]])},
            {"enum": self.rng.sample(["", "ab", 3, -1.5, False, None], 3)},
            {"const": self.rng.choice(["a", "ab", 0, 2.5, True, None])},
            {"minimum": self.rng.randint(-3, 3), "minLength": 2, "maxItems": self.rng.randint(0, 1)},
            {"required": self.rng.sample("abc", self.rng.randint(1, 2))},
            {"properties": {self.rng.choice("abc"): {"type": self.rng.choice(["string", "integer"])}}, "maximum": 5},
        ]
        one, other = self.rng.sample(options, 2)
        return {self.rng.choice(["allOf", "anyOf", "oneOf"]): [one, other]} if self.rng.random() < 0.4 else one

    def make_denied(self, depth: int) -> dict[str, Any]:
        """What is not valid under another schema, beside types that leave something."""
        inside = {"properties": {key: self.node(depth) for key in "abc"}}
        return {"anyOf": [{"type": ["object", "number", "string"], **inside, "not": self.denied()}, INT]}

    def make_condition(self, depth: int) -> dict[str, Any]:
        """Members that have another form if something holds."""
        inside = {"properties": {key: self.node(depth) for key in "abc"}}
        condition = {"if": self.denied(), "then": {"required": ["a"]}, "else": {"required": ["b"], "minLength": 1}}
        return {"anyOf": [{"type": ["object", "string"], **inside, **condition}, INT]}

    def make_anything(self, depth: int) -> dict[str, Any]:
        """Any JSON, by itself or inside."""
        return self.rng.choice([{}, {"type": "object"}, {"type": "array", "maxItems": 2}, {"required": ["k"]}])

    def make_one_of(self, depth: int) -> dict[str, Any]:
        if self.rng.random() < 0.3:
            return {"oneOf": [{"type": "string"}, {"type": "integer"}, {"enum": [None, [1]]}]}
        branches = []
        for tag in self.rng.sample(["cat", "dog", 1, None, True], self.rng.randint(1, 3)):
            properties = {"kind": {"const": tag}, "value": self.node(depth)}
            branches.append({"type": "object", "properties": properties, "required": ["kind"]})
        return {"oneOf": branches}

    def make_reference(self, depth: int) -> dict[str, Any]:
        key = f"d{len(self.definitions)}/~%"
        self.definitions[key] = None  # its place is taken before those of what it refers to
        self.definitions[key] = self.node(depth)
        return {"$ref": "#/$defs/" + key.replace("~", "~0").replace("/", "~1").replace("%", "%25")}


@cache
def drawn(seed: int) -> tuple[dict[str, Any], Draft202012Validator]:
    schema = Maker(seed).schema()
    Draft202012Validator.check_schema(schema)
    return schema, Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)


def texts(schema: Any, count: int = NUM_SAMPLES, whitespace: Any = "spaced", seed: int = 0) -> list[str]:
    node = schema_node(schema, whitespace)
    rng = random.Random(seed)
    return [sample(node, rng) for _ in range(count)]


def mutate(text: str, rng: random.Random) -> str:
    """Change a text in one place: as text, or as the value that it spells."""
    value = json.loads(text)
    place = rng.randrange(len(text) + 1)
    other = rng.choice([None, True, False, 0, -1, 7, 10**16, 1.0, 0.5, "", "b", 'q"', [], [1], {}, {"kind": "cat"}])
    changed = {
        "drop": lambda: text[:place] + text[place + 1 :],
        "insert": lambda: text[:place] + rng.choice('"\\,:[]{} 019-.eEn\n\x01tru') + text[place:],
        "double": lambda: text[:place] + text[max(0, place - rng.randint(1, 9)) :],
        "replace": lambda: text[:place] + rng.choice('"\\,019-ab\x7f') + text[place + 1 :],
        "value": lambda: json.dumps(change(value, other, rng), ensure_ascii=False),
    }
    return changed[rng.choice(["drop", "insert", "double", "replace", "value", "value"])]()


def change(value: Any, other: Any, rng: random.Random) -> Any:
    """Change one part of a value: another value, one part less, or parts in another order."""
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        options = [
            value[:index] + value[index + 1 :],
            [*value, other],
            value[::-1],
            [change(each, other, rng) if i == index else each for i, each in enumerate(value)],
        ]
        return rng.choice(options)
    if isinstance(value, dict) and value and rng.random() < 0.8:
        chosen = rng.choice(list(value))
        options = [
            {key: each for key, each in value.items() if key != chosen},
            {**value, "new": other},
            dict(reversed(value.items())),
            {key: change(each, other, rng) if key == chosen else each for key, each in value.items()},
        ]
        return rng.choice(options)
    if isinstance(value, int | float) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 0.5, 10, -100])
    return other


def is_valid_text(text: str, validator: Draft202012Validator) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text)))
    except ValueError:
        return False
