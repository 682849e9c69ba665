"""From JSON Schemas to trees: what a tree generates is JSON and valid, as ``json`` and ``jsonschema`` see it.

The schemas are drawn by ``Maker`` out of the keyword list, the texts by ``sample``, which walks a tree and knows no
schema. Beside soundness the language must not be too narrow: ranges, subsets of properties and spellings are compared
with all there are.
"""

import itertools
import json
import random
import re
from datetime import date, datetime, time
from enum import Enum
from ipaddress import IPv6Address
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator
from pydantic import BaseModel, Field

from mini_engine.grammar.automata.automaton import compile_node
from mini_engine.grammar.automata.syntax import to_regex
from mini_engine.grammar.base import SHALLOW, GrammarError, UnsupportedKeywordError
from mini_engine.grammar.schema.converter import convert, parse_schema, schema_node
from mini_engine.grammar.schema.reader import MAX_VISITS
from mini_engine.grammar.schema.values import FORMATS, MAX_DEPTH, are_same
from tests.support.schemas import (
    INT,
    NUM_MUTANTS,
    NUM_SCHEMAS,
    drawn,
    is_valid_text,
    mutate,
    sample,
    texts,
)

WHITESPACES = ["spaced", "compact", "any"]


def language(schema: Any, whitespace: Any = "spaced") -> re.Pattern[str]:
    return re.compile(to_regex(schema_node(schema, whitespace)))


def accepts(schema: Any, text: str, whitespace: Any = "spaced") -> bool:
    return language(schema, whitespace).fullmatch(text) is not None


def test_what_is_generated_is_valid_and_spelled_as_json_dumps_spells_it() -> None:
    """Other spellings have numbers, which have many, and maps, where a name may come twice."""
    num_spelled = 0
    for seed in range(NUM_SCHEMAS):
        schema, validator = drawn(seed)
        has_maps = re.search('"number"|"additionalProperties": {|patternProperties', json.dumps(schema))
        has_one_spelling = not has_maps and not any(SHALLOW in note for note in convert(schema).narrowed)
        whitespace = WHITESPACES[seed % 3]
        separators = (",", ":") if whitespace == "compact" else (", ", ": ")
        for text in texts(schema, whitespace=whitespace, seed=seed):
            value = json.loads(text)
            assert validator.is_valid(value), (schema, text)
            if has_one_spelling and whitespace != "any":
                assert text == json.dumps(value, ensure_ascii=False, separators=separators)
                num_spelled += 1
    assert num_spelled > 300


@pytest.mark.slow
def test_whatever_matches_is_valid() -> None:
    """Mutants of texts that are in the language: most are not, and not one of those that are is invalid."""
    accepted = refused = valid_but_refused = 0
    for seed in range(NUM_SCHEMAS):
        schema, validator = drawn(seed)
        rng = random.Random(seed)
        pattern = language(schema)
        seeds = [*texts(schema, seed=seed), *texts(drawn((seed + 1) % NUM_SCHEMAS)[0], 2)]
        for _ in range(NUM_MUTANTS):
            text = mutate(rng.choice(seeds), rng)
            if pattern.fullmatch(text):
                accepted += 1
                assert validator.is_valid(json.loads(text)), (schema, text)
            else:
                refused += 1
                valid_but_refused += is_valid_text(text, validator)
    assert accepted > 400
    assert refused > 5 * valid_but_refused > 0


# --- not too narrow ---


@pytest.mark.parametrize(
    ("bounds", "least", "most"),
    [
        ({"minimum": -2.5, "maximum": -1.0}, -2, -1),
        ({"exclusiveMinimum": 2.5, "exclusiveMaximum": 7.5}, 3, 7),
        ({"exclusiveMinimum": 2.0, "exclusiveMaximum": 7}, 3, 6),
        ({"minimum": 0, "exclusiveMinimum": 4, "maximum": 9, "exclusiveMaximum": 8}, 5, 7),
        ({"minimum": 10**40 - 2, "maximum": 10**40 + 1}, 10**40 - 2, 10**40 + 1),
        ({"minimum": 3}, 3, 10**15 - 1),
        ({"minimum": 10**20}, 10**20, 10**21 - 1),
        ({"exclusiveMaximum": -(10**20)}, -(10**21) + 1, -(10**20) - 1),
    ],
)
def test_bounds_of_integers(bounds: dict[str, float], least: int, most: int) -> None:
    pattern = language({**INT, **bounds})
    middle = [number for number in (least + 1, most - 1, (least + most) // 2) if least <= number <= most]
    assert all(pattern.fullmatch(str(number)) for number in (least, most, *middle))
    beyond = [number for number in (10 * most, 10 * least) if not least <= number <= most]
    assert not any(pattern.fullmatch(str(number)) for number in (least - 1, most + 1, *beyond))


def test_numbers() -> None:
    pattern = language({"type": "number"})
    for text in ("0", "-0", "12", "-1.5", "0.001", "1e5", "1E+05", "-2.50e-99", "123456789012345.123456789012345"):
        assert pattern.fullmatch(text)
        assert isinstance(json.loads(text), int | float)
    for text in ("", "-", ".5", "1.", "01", "+1", "1e", "1e999", "0x1", "NaN", "Infinity", "1_0", "٣"):
        assert not pattern.fullmatch(text)


@pytest.mark.parametrize("bounds", [(0, 0), (0, 2), (1, 1), (2, 3), (3, None)])
def test_lengths_count_code_points(bounds: tuple[int, int | None]) -> None:
    least, most = bounds
    pattern = language({"minLength": least} | ({} if most is None else {"maxLength": most}))
    for unit in ("a", "😀", "\n", '"'):
        for count in range(5):
            expected = least <= count and (most is None or count <= most)
            assert bool(pattern.fullmatch(json.dumps(unit * count, ensure_ascii=False))) == expected


def test_a_pattern_is_searched_and_its_characters_are_escaped() -> None:
    for pattern in ("b", "^b", "b$", "^b$", '^"\\\\\n[\t\b]?$', "[^a-z]", "^.$", r"^\w+$", "^[\x00-\x1f]$", "^$", ""):
        regex = language({"type": "string", "pattern": pattern})
        for value in ("", "b", "ab", "bc", '"\\\n', '"\\\n\t', "\x1f", "\x00", "Ab", "ß", "\n", "b\n"):
            found = re.search(pattern, value) is not None
            matches = regex.fullmatch(json.dumps(value, ensure_ascii=False)) is not None
            assert not matches or found, (pattern, value)
            # Beyond ASCII, and before a last line break, dialects differ, and then less is generated.
            assert matches == found or not value.isascii() or value.endswith("\n"), (pattern, value)


FORMAT_CASES = {
    "date": (
        ["2024-02-29", "1999-12-31", "2024-04-30", "0001-01-01", "0987-06-05", "2000-02-29"],
        ["2023-02-29", "1900-02-29", "0000-02-29", "2024-04-31", "2024-13-01", "2024-1-1"],
    ),
    "time": (["00:00:00Z", "23:59:59.123456+02:00"], ["24:00:00Z", "12:00:00", "12:60:00Z", "12:00Z"]),
    "date-time": (
        ["2024-02-28T12:00:00Z", "2024-02-29T12:00:00Z", "0800-12-25T00:00:00Z"],
        ["2024-02-30T12:00:00Z", "2024-02-28 12:00:00Z", "2024-02-28"],
    ),
    "uuid": (
        ["01234567-89ab-cdef-0123-456789abcdef", "01234567-89AB-CDEF-0123-456789ABCDEF"],
        ["0123456789abcdef0123456789abcdef", "g1234567-89ab"],
    ),
    "duration": (["P1Y2M3D", "PT5M", "P3W", "P1DT12H"], ["P", "1D", "PT", "P1S", "P1W2D"]),
    "email": (["a.b+c@example.org", "x@y.de"], ["", "a", "a@", "@b", "a b@c.de", "a@b", "a..b@c.de"]),
    "hostname": (
        ["example.org", "a-b.cd", "localhost", "a1.b2.c3.d4.e5", "ec2-203-0-113-25.compute-1.amazonaws.com"],
        ["", "-a.de", "a-.de", "a..b", "a_b.de", "a b", f"{'a' * 64}.de"],
    ),
    "ipv6": (
        [
            "::",
            "::1",
            "1:2:3:4:5:6:7:8",
            "fe80::1:2:3:4",
            "FE80::A",
            "1:2:3:4:5:6:7::",
            "::2:3:4:5:6:7:8",
            "1::3:4:5:6:7:8",
        ],
        ["1:2:3", ":::", "g::", "1:2:3:4:5:6:7:8:9", "12345::", "1::2::3", "1::2:3:4:5:6:7:8"],
    ),
    "uri": (
        [
            "https://example.org",
            "http://a.de:80/b%20c?d=e#f",
            "urn:isbn:123",
            "http://127.0.0.1:8000/v1",
            "http://localhost:65535",
            "mailto:ada@example.org",
            "postgres://me:word@db-1:5432/data",
            "file:///etc/hosts",
            "https://a.de/b(c):d?e=%2f,*&f=?",
        ],
        ["a/b", "http//a", "http://a b", "http://a.de:65536", "http://a.de/%2", "mailto:", "://a"],
    ),
    "uri-reference": (["a/b?c#d", "/a", "#x", "https://example.org/", "", "?q=1", "../a:b"], ["a b", "\\", "%", "//"]),
    "json-pointer": (["", "/a/b~0c/~1", "/é/%"], ["a", "/~2", "/~"]),
    "relative-json-pointer": (["0", "1/a", "2#", "10"], ["", "/a", "-1", "01"]),
    "ipv4": (["0.0.0.0", "255.255.255.255", "10.99.100.249"], ["256.0.0.1", "1.2.3", "01.2.3.4", "1.2.3.4.5"]),
}


SAME_CASES = {"iri": "uri", "iri-reference": "uri-reference", "uri-template": "uri"}
SAME_CASES |= {f"idn-{form}": form for form in ("email", "hostname")}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_formats(form: str) -> None:
    schema = {"type": "string", "format": form}
    good, bad = FORMAT_CASES[SAME_CASES.get(form, form)]
    assert [text for text in good if not accepts(schema, json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in bad if accepts(schema, json.dumps(text))] == []
    readers: dict[str, Any] = {
        "date": date.fromisoformat,
        "time": time.fromisoformat,
        "date-time": datetime.fromisoformat,
    }
    checker = Draft202012Validator.FORMAT_CHECKER
    for text in good:
        checker.check(text, form)
    for text in texts(schema, 40):
        value = json.loads(text)
        checker.check(value, form)
        if form in readers:
            readers[form](value)


def test_every_date_is_written_and_no_other() -> None:
    pattern = re.compile(FORMATS["date"])
    days = [f"{month:02}-{day:02}" for month in range(14) for day in range(33)]
    years = [*range(1, 10_000, 97), *range(0, 10_000, 100), 1996, 2023, 2024]
    for text in [f"{year:04}-{day}" for year in years for day in days] + [f"{year:04}-02-29" for year in range(10_000)]:
        try:
            is_day = bool(date.fromisoformat(text))
        except ValueError:
            is_day = False
        assert bool(pattern.fullmatch(text)) == is_day, text


def test_addresses_are_those_of_the_standard_library() -> None:
    """Drawn out of groups and colons, and ports and octets counted through."""
    rng = random.Random(0)
    pattern = re.compile(FORMATS["ipv6"])
    found = set()
    for _ in range(20_000):
        text = ":".join(
            rng.choice(["", "0", "fe80", "A1", "12345"][: 4 + (rng.random() < 0.1)]) for _ in range(rng.randint(2, 10))
        )
        try:
            is_address = bool(IPv6Address(text))
        except ValueError:
            is_address = False
        assert bool(pattern.fullmatch(text)) == is_address, text
        found.add(is_address)
    assert found == {True, False}
    uri = re.compile(FORMATS["uri"])
    assert [port for port in range(66_000) if uri.fullmatch(f"ws://a:{port}")] == [*range(65_536)]
    assert [octet for octet in range(300) if re.fullmatch(FORMATS["ipv4"], f"1.{octet}.0.1")] == [*range(256)]


def test_arrays() -> None:
    two = {"prefixItems": [INT, {"type": "boolean"}]}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"items": INT}, "[] [1] [1, 2, 3]", "[,] [1,] [1,2] [1 2] 1"),
        ({"items": INT, "minItems": 1}, "[1] [1, 2, 3]", "[]"),
        ({"items": INT, "maxItems": 2}, "[] [1] [1, 2]", "[1, 2, 3]"),
        ({"items": INT, "minItems": 2, "maxItems": 3}, "[1, 2] [1, 2, 3]", "[] [1] [1, 2, 3, 4]"),
        ({"items": INT, "maxItems": 0}, "[]", "[1]"),
        ({"items": False}, "[]", "[1]"),
        (two, "[1, true]", "[] [1] [true, 1] [1, true, 1]"),
        (two | {"items": False, "minItems": 2, "maxItems": 2}, "[1, true]", "[1] [1, true, 1]"),
        (two | {"items": {"type": "null"}}, "[1, true] [1, true, null, null]", "[1] [1, true, 1]"),
        (two | {"items": {"type": "null"}, "minItems": 3, "maxItems": 4}, "[1, true, null]", "[1, true]"),
    ]
    for schema, good, bad in cases:
        for text in re.findall(r"\[.*?\]", good):
            assert accepts(schema, text), (schema, text)
            assert Draft202012Validator(schema).is_valid(json.loads(text))
        for text in re.findall(r"\[.*?\]|\d", bad):
            assert not accepts(schema, text), (schema, text)


def test_constants_and_enums() -> None:
    values = [None, True, 1, 1.5, "a\n", [], [1, [2]], {}, {"b": {"c": [None]}, "a": "é"}]
    pattern = language({"enum": values})
    for value in values:
        assert pattern.fullmatch(json.dumps(value, ensure_ascii=False))
        assert accepts({"const": value}, json.dumps(value, ensure_ascii=False))
    for text in ("false", "0", "1.0", "2", '{"a": "é", "b": {"c": [null]}}', "[1]"):
        assert not pattern.fullmatch(text)
    filtered = language({"enum": [True, 1, 2.0, 2.5, "1"], "type": ["integer", "null"]})
    assert [text for text in ("true", "1", "2.0", "2.5", '"1"') if filtered.fullmatch(text)] == ["1", "2.0"]
    assert all(accepts({"enum": [True, 2.5, 3], "type": "number"}, text) for text in ("2.5", "3"))
    assert not accepts({"enum": [True, 2.5], "type": "number"}, "true")


def test_white_space() -> None:
    schema = {"properties": {"a": {"items": INT}, "b": {"const": {"c": [1, 2]}}}, "required": ["a", "b"]}
    value = {"a": [1, 2], "b": {"c": [1, 2]}}
    spaced = json.dumps(value)
    compact = json.dumps(value, separators=(",", ":"))
    wide = json.dumps(value, indent="\t\r\n")
    empty = '{"a":[ ],"b":{"c":[1,2]}}'
    expected = {"spaced": [spaced], "compact": [compact], "any": [spaced, compact, wide, empty]}
    for whitespace, matching in expected.items():
        pattern = language(schema, whitespace)
        assert [text for text in (spaced, compact, wide, empty) if pattern.fullmatch(text)] == matching
        assert not any(pattern.fullmatch(text) for text in (f" {spaced}", f"{compact} ", compact.replace("1", "1 1")))
    assert not accepts(schema, compact.replace(",", ",\x0b"), "any")


def test_references_are_json_pointers_in_fragments() -> None:
    definitions = {"a/b": {"c~d": INT}, "e f": {"anyOf": [{"type": "null"}, INT]}, "%": INT, "~1": INT, "": {"x": INT}}
    for reference in (
        "#/$defs/a~1b/c~0d",
        "#/$defs/e%20f/anyOf/1",
        "#/$defs/%25",
        "#/$defs/~01",
        "#/$defs//x",
        "#/%24defs/%25",
    ):
        schema = {"$ref": reference, "$defs": definitions, "title": "beside it"}
        assert accepts(schema, "5"), reference
        assert Draft202012Validator(schema).is_valid(5)
    for reference in ("none", "e f/anyOf/2", "e f/anyOf/01", "e f/anyOf/-1", "/y", "a/b"):
        with pytest.raises(GrammarError, match="the schema has no"):
            schema_node({"$ref": f"#/$defs/{reference}", "$defs": definitions})


DISJOINT = [
    [{"type": "string"}, {"type": "integer"}, {"type": ["null", "boolean"]}],
    [{"const": 1}, {"const": True}, {"const": "1"}, {"const": [1]}, {"const": {"a": 1}}, {"enum": [2, 3]}],
    [{"const": 1}, {"type": "string"}],
    [{"enum": ["a", 1], "type": "string"}, {"const": 1}],
    [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    [{"allOf": [{"$ref": "#/$defs/cat"}]}, {"anyOf": [{"$ref": "#/$defs/dog"}, {"type": "null"}]}],
    [
        {"properties": {"x": {"properties": {"y": {"const": 1}}, "required": ["y"]}}, "required": ["x"]},
        {"properties": {"x": {"properties": {"y": {"const": 2}}, "required": ["y"]}}, "required": ["x"]},
    ],
]
OVERLAPPING = [
    [{"type": "integer"}, {"type": "number"}],
    [{"const": 1}, {"const": 1.0}],
    [{"const": [1]}, {"const": [1.0]}],
    [{"const": {"a": 0}}, {"enum": [1, {"a": 0.0}]}],
    [{"const": "a"}, {"type": "string"}],
    [{"type": "string"}, {"pattern": "a"}],
    [{"type": "integer"}, {"properties": {"a": INT}, "required": ["a"]}],  # without a type, numbers are valid too
    [{"type": "integer"}, {"minLength": 1}],
    [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/cat"}],
    [{"$ref": "#/$defs/cat"}, {"properties": {"kind": {"const": "dog"}}, "required": []}],
    [
        {"type": ["object", "null"], "properties": {"x": {"const": 1}}, "required": ["x"]},
        {"type": ["object", "null"], "properties": {"x": {"const": 2}}, "required": ["x"]},
    ],
    [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"anyOf": [INT, {"type": "null"}]}],
]
PETS = {
    kind: {"type": "object", "properties": {"kind": {"const": kind}, "age": INT}, "required": ["kind"]}
    for kind in ("cat", "dog")
}


@pytest.mark.parametrize("branches", DISJOINT, ids=range(len(DISJOINT)))
def test_one_of_disjoint_branches(branches: list[Any]) -> None:
    schema = {"oneOf": branches, "$defs": PETS}
    for text in texts(schema, 40):
        assert Draft202012Validator(schema).is_valid(json.loads(text))
    for branch in branches:
        for text in texts(branch | {"$defs": PETS}, 5):
            assert accepts(schema, text)


VALUES = [None, True, 1, 2.5, "a", "b", "", [1], [], {}, {"a": 1}, {"a": "x"}, *({"kind": k} for k in PETS), {"x": 1}]


@pytest.mark.parametrize("branches", OVERLAPPING, ids=range(len(OVERLAPPING)))
def test_of_branches_that_overlap_one_alone_holds(branches: list[Any]) -> None:
    """Or ``oneOf`` is refused, where what is not valid under a branch is not computed, or nothing is valid."""
    for order in (branches, branches[::-1]):
        schema = {"oneOf": order, "$defs": PETS}
        judge = Draft202012Validator(schema)
        reason = ""
        try:
            written = texts(schema, 40)
        except GrammarError as error:
            written = []
            reason = str(error)
        if "nothing is valid" in reason:
            assert not any(map(judge.is_valid, VALUES))
        elif reason:
            assert "pattern" in str(branches) or "{'a': 0}" in str(branches)
            assert re.search("branches 0 and 1 that may both be valid|enum.* of arrays or objects", reason)
        else:
            assert all(judge.is_valid(json.loads(text)) for text in written)
            assert not any(accepts(schema, json.dumps(value)) for value in VALUES if not judge.is_valid(value))


def test_values_are_the_same_as_json_sees_them() -> None:
    different = [None, False, True, 0, 1, 1.5, "", "1", [], [1], [True], {}, {"a": 1}, {"a": True}, {"b": 1}]
    for (i, left), (j, right) in itertools.product(enumerate(different), repeat=2):
        assert are_same(left, right) == (i == j), (left, right)
    assert are_same([1, {"a": 0}], [1.0, {"a": -0.0}])


# --- refused ---

REFUSED: list[tuple[Any, str, str]] = [
    ({"type": "integer", "multipleOf": 2}, "multipleOf", ""),
    ({"items": INT, "uniqueItems": True}, "uniqueItems", ""),
    ({"not": {"pattern": "a"}}, "pattern", "/not"),
    ({"not": {"properties": {"a/b": {"items": INT}}}}, "items", "/not/properties/a~1b"),
    ({"not": {"allOf": [{"$ref": "#/$defs/A", "maximum": 3}]}, "$defs": {"A": INT}}, "$ref", "/not/allOf/0"),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "not": {"const": 3}}, "const", "/not"),
    ({"if": {"uniqueItems": True}, "then": INT}, "uniqueItems", "/if"),
    ({"type": "string", "format": "date", "not": {"const": "2024-02-28"}}, "not", ""),
    ({"type": "string", "contentEncoding": "base64"}, "contentEncoding", ""),
    ({"type": "integer", "minimun": 3}, "minimun", ""),
    ({"not": {"unevaluatedProperties": False}}, "unevaluatedProperties", "/not"),
    ({"properties": {"a": INT, "b": INT, "c": INT}, "minProperties": 2}, "minProperties", ""),
    ({"properties": {"a": INT}, "minProperties": 2}, "minProperties", ""),
    ({"properties": {"a": INT, "b": INT}, "maxProperties": 1}, "maxProperties", ""),
    ({"type": "object", "minProperties": 2}, "minProperties", ""),
    ({"patternProperties": {"^a": INT, "^b": INT}}, "patternProperties", ""),
    ({"properties": {"é": INT}, "patternProperties": {"^a": INT}}, "patternProperties", ""),
    ({"properties": {"a": INT}, "propertyNames": {"pattern": "a"}}, "propertyNames", ""),
    ({"enum": [{"a": 1}], "properties": {"a": INT}}, "enum", ""),
    ({"pattern": "a", "minLength": 2}, "minLength", ""),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "pattern", "/allOf/0"),
    ({"pattern": "a", "format": "date"}, "pattern", ""),
    ({"format": "regex"}, "format", ""),
    ({"type": "number", "minimum": 1e-20}, "minimum", ""),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf", ""),
    ({"properties": {"a": {"$id": "x", "$ref": "#/$defs/A"}}, "$defs": {"A": INT}}, "$ref", "/properties/a"),
    (
        {"$ref": "#/$defs/A/not", "$defs": {"A": {"$id": "x", "not": {"$ref": "#/$defs/B"}}, "B": INT}},
        "$ref",
        "/$defs/A/not",
    ),
    ({"properties": {"a/b~c": {"items": {"contains": {}}}}}, "contains", "/properties/a~1b~0c/items"),
    ({"additionalProperties": {"contains": {}}}, "contains", "/additionalProperties"),
    ({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"contains": {}}}}, "contains", "/$defs/A"),
    ({"format": "date", "maxLength": 1}, "maxLength", ""),
    ({"$ref": "https://example.org/schema"}, "$ref", ""),
    ({"$ref": "#name"}, "$ref", ""),
    ({"$ref": "#"}, "$ref", ""),
    ({"items": {"$ref": "#"}}, "$ref", "/items"),
    ({"$ref": "#/$defs/A", "$defs": {"A": {"items": {"$ref": "#/%24defs/A"}}}}, "$ref", "/$defs/A/items"),
]


@pytest.mark.parametrize(("schema", "keyword", "path"), REFUSED, ids=lambda part: str(part)[:60])
def test_what_cannot_be_promised_is_refused_by_name_and_place(schema: Any, keyword: str, path: str) -> None:
    with pytest.raises(UnsupportedKeywordError) as caught:
        schema_node(schema)
    assert (caught.value.keyword, caught.value.path) == (keyword, path)
    assert re.search("take|remove|give|write|declare|keep|change|merge|simplify|followed", str(caught.value))


# --- what says nothing about values ---

IGNORED: list[tuple[Any, list[str]]] = [
    ({**INT, "nullable": True, "x-order": 3, "title": "t", "_format": "date"}, ["/nullable", "/x-order", "/_format"]),
    ({"$id": "https://example.org/a", "$anchor": "b", "$ref": "#/$defs/a", "$defs": {"a": INT}}, ["/$id", "/$anchor"]),
    ({"$id": "https://example.org/a", "$ref": "https://example.org/a#/$defs/a", "$defs": {"a": INT}}, ["/$id"]),
    ({"properties": {"a/b~c": {"id": "#x", "type": "null"}}}, ["/properties/a~1b~0c/id"]),
    (
        {"anyOf": [{**INT, "readonly": True}, {"type": "null", "self": {"$ref": 3}}]},
        ["/anyOf/0/readonly", "/anyOf/1/self"],
    ),
    (
        {"items": {"$ref": "#/$defs/A"}, "$defs": {"A": {**INT, "unit": "m"}, "B": {**INT, "unit": "s"}}},
        ["/$defs/A/unit"],
    ),
    ({"type": "integer", "minLength": 1, "items": INT}, ["/minLength", "/items"]),
    ({"type": ["string", "null"], "minLength": 1, "maximum": 3}, ["/maximum"]),
    ({"type": "string", "format": "color"}, ["/format"]),
    ({"properties": {"a": {**INT, "minimum": 0}}, "required": ["a"], "additionalProperties": False}, []),
]


@pytest.mark.parametrize(("schema", "ignored"), IGNORED, ids=lambda part: str(part)[:60])
def test_what_says_nothing_about_values_is_listed(schema: Any, ignored: list[str]) -> None:
    conversion = convert(schema)
    assert list(conversion.ignored) == ignored
    validator = Draft202012Validator(schema)
    rng = random.Random(0)
    for text in [sample(conversion.node, rng) for _ in range(30)]:
        validator.validate(json.loads(text))


# --- where any JSON is valid ---


def test_any_json_nests_so_deep() -> None:
    for schema in ({}, True, {"title": "only"}, {"properties": {"a": {}}, "required": ["a"]}):
        for value in (None, True, -1.5, "a", [], [1, "b"], {"c": 1}, {"c": [1]}, [[1], {}]):
            inside = {"a": value} if isinstance(schema, dict) and "properties" in schema else value
            assert accepts(schema, json.dumps(inside)), (schema, inside)
        assert not accepts(schema, json.dumps([[[[1]]]]))
        assert any(SHALLOW in note for note in convert(schema).narrowed)
    for value in ({}, {"a": 1}, {"a": [1, {}][:1]}):
        assert accepts({"type": "object"}, json.dumps(value))
    assert not accepts({"type": "object"}, "[]")
    assert accepts({"type": "array"}, '[1, [2], {"a": 3}]')


# --- bounds of numbers ---

ENDS = [-2.5, -1, -0.125, 0, 0.05, 0.75, 1, 9.9, 123.456]


@pytest.mark.slow
def test_decimals_between_bounds_are_all_there_and_no_others() -> None:
    """Against exact arithmetic, for every decimal with up to three digits behind the point around the bounds."""
    rests = ".0 .05 .050 .049 .051 .125 .126 .124 .456 .457 .5 .50 .501 .499 .75 .749 .751 .9 .89 .91"
    wholes = itertools.product(["", "-"], (0, 1, 2, 9, 10, 123), ["", *rests.split()])
    spelled = {f"{sign}{whole}{rest}" for sign, whole, rest in wholes}
    kinds = itertools.cycle(itertools.product(["minimum", "exclusiveMinimum"], ["maximum", "exclusiveMaximum"]))
    for (low, high), (lower, upper) in zip(itertools.combinations(ENDS, 2), kinds, strict=False):
        schema = {"type": "number", lower: low, upper: high}
        automaton = compile_node(schema_node(schema))
        validator = Draft202012Validator(schema)
        for text in spelled:
            valid = validator.is_valid(json.loads(text)) and not re.fullmatch("-0(.0*)?", text)
            assert automaton.matches(text) == valid, (schema, text)


@pytest.mark.parametrize("bound", [0, -1, -0.125, 99.99])
def test_decimals_with_one_bound(bound: float) -> None:
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        schema = {"type": "number", keyword: bound}
        automaton = compile_node(schema_node(schema))
        validator = Draft202012Validator(schema)
        for text in texts(schema, 40):
            assert validator.is_valid(json.loads(text)), (schema, text)
        for step in (0, 1, -1, 0.25, -0.25, 1000, -1000):
            number = bound + step
            if abs(number) < 1e9 and not (number == 0 and keyword.endswith("aximum") and bound < 0):
                assert automaton.matches(json.dumps(number)) == validator.is_valid(number), (schema, number)


# --- schemas of older drafts ---

OLD: list[tuple[type[Any], dict[str, Any], str, str]] = [
    (Draft4Validator, {"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "4 5", "3 2"),
    (Draft4Validator, {"type": "number", "maximum": 1, "exclusiveMaximum": False}, "1 0.5", "1.5"),
    (
        Draft7Validator,
        {"items": [INT, {"type": "null"}], "additionalItems": {"type": "boolean"}},
        "[1,null] [1,null,true]",
        "[1,2] [1,null,3]",
    ),
    (Draft7Validator, {"items": [INT], "additionalItems": False}, "[1]", "[1,2]"),
    (
        Draft7Validator,
        {"properties": {"a": INT, "b": INT}, "dependencies": {"a": ["b"]}},
        '{} {"b":1} {"a":1,"b":2}',
        '{"a":1}',
    ),
    (
        Draft7Validator,
        {"properties": {"a": INT, "b": {}}, "dependencies": {"a": {"properties": {"b": INT}}}},
        '{} {"b":"x"} {"a":1,"b":2}',
        '{"a":1,"b":"x"}',
    ),
]


@pytest.mark.parametrize(("kind", "schema", "good", "bad"), OLD)
def test_keywords_of_older_drafts(kind: type[Any], schema: dict[str, Any], good: str, bad: str) -> None:
    validator = kind(schema)
    for text in texts(schema, 60):
        assert validator.is_valid(json.loads(text)), text
    assert all(accepts(schema, text, "compact") and validator.is_valid(json.loads(text)) for text in good.split())
    assert not any(accepts(schema, text, "compact") or validator.is_valid(json.loads(text)) for text in bad.split())


# --- what stands beside, and together ---

TOGETHER: list[tuple[dict[str, Any], str, str]] = [
    ({"allOf": [INT, {"minimum": 3}, {"maximum": 4}]}, "3 4", "2 5"),
    ({"type": ["integer", "string"], "anyOf": [{"type": "number"}, {"type": "null"}]}, "3", '"a" null 3.5'),
    ({"enum": [1, 2, 3, "a"], "const": 2}, "2", "1"),
    ({"enum": [1, 5, "a", "abc"], "minimum": 2, "maxLength": 1}, '5 "a"', '1 "abc"'),
    ({"enum": ["ab", "b1", "é"], "pattern": "^[a-z]+$"}, '"ab"', '"b1"'),
    ({"enum": ["2024-02-28", "x"], "format": "date"}, '"2024-02-28"', '"x"'),
    ({"$ref": "#/$defs/A", "minimum": 0, "maximum": 5, "$defs": {"A": INT}}, "0 5", "-1 6"),
    (
        {"allOf": [{"properties": {"a": INT}, "additionalProperties": False}, {"properties": {"b": INT}}]},
        '{} {"a":1}',
        '{"b":1} {"a":1,"b":1}',
    ),
    (
        {"allOf": [{"properties": {"a": {"minimum": 3}}}, {"properties": {"a": INT}, "required": ["a"]}]},
        '{"a":3}',
        '{} {"a":2} {"a":"x"}',
    ),
    (
        {"properties": {"a": INT, "b": INT}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        '{"a":1} {"b":1}',
        '{} {"a":1,"b":1}',
    ),
    ({"properties": {"a": INT, "b": INT}, "not": {"required": ["b"]}}, '{} {"a":1}', '{"b":1}'),
    (
        {"properties": {"a": INT}, "required": ["b"], "additionalProperties": {"type": "null"}},
        '{"b":null} {"a":1,"b":null}',
        '{"a":1} {"b":1}',
    ),
    ({"type": "object", "additionalProperties": False}, "{}", '{"a":1}'),
    ({"properties": {"a": False, "b": INT}}, '{} {"b":1}', '{"a":1}'),
    ({"properties": {"a": INT, "b": INT}, "minProperties": 1}, '{"a":1} {"a":1,"b":1}', "{}"),
    ({"properties": {"a": INT, "b": INT}, "minProperties": 2}, '{"a":1,"b":1}', '{} {"a":1}'),
    ({"patternProperties": {"^x": INT}, "minProperties": 1}, '{"x":1} {"xy":1,"xz":2}', '{} {"x":"a"}'),
    ({"properties": {"xa": {"minimum": 3}}, "patternProperties": {"^x": INT}}, '{"xa":3}', '{"xa":2} {"xa":"a"}'),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INT}, '{"a":1}', '{"c":1}'),
    ({"prefixItems": [INT, INT], "maxItems": 1}, "[1]", "[1,2]"),
    ({"prefixItems": [INT, False]}, "[1]", "[1,2]"),
    ({"pattern": "^[a-c]*$", "minLength": 1, "maxLength": 2}, '"a" "bc"', '"" "abc" "d"'),
    ({"format": "date", "maxLength": 10}, '"2024-02-28"', '"a"'),
    ({"minLength": 2, "minimum": 3}, '"ab" 3', '"a" 2'),
    ({"type": "number", "multipleOf": 1, "minimum": 2.5}, "3", "2 3.5"),
]


STRING = {"type": "string"}
DENIED: list[tuple[dict[str, Any], str, str]] = [
    ({"not": {"type": ["object", "string", "null"]}}, "3 true [1]", '{} "a" null'),
    ({"type": ["integer", "string"], "not": STRING}, "3", '"a"'),
    ({"not": INT}, 'null "a" 2.5', "3"),
    ({"type": ["number", "null"], "not": INT}, "null 0.5 -2.25", "3 -0.0 1e2 0"),
    ({"oneOf": [INT, {"type": "number"}]}, "0.5", "3 null"),
    ({"properties": {"a": INT, "b": INT}, "oneOf": [{"required": ["a"]}, {}]}, "{}", '{"a":1}'),
    ({"not": {"minimum": 3}}, "2 2.5 -1", '3 "a"'),
    ({**INT, "not": {"exclusiveMaximum": 3}}, "3 4", "2"),
    ({"not": {"maximum": 3, "minLength": 2}}, '4 "a" ""', '3 "ab" null'),
    ({"not": {"maxLength": 1}}, '"ab"', '"a" 3'),
    ({"not": {"minItems": 1}}, "[]", "[1] {}"),
    ({"not": {"minProperties": 1, "maxItems": 0}}, "{} [1]", '{"a":1} []'),
    ({"properties": {"a": INT, "b": INT}, "not": {"required": ["a", "b"]}}, '{} {"a":1} {"b":1}', '{"a":1,"b":1}'),
    ({"properties": {"a": INT}, "not": {"properties": {"a": {"minimum": 3}}}}, '{"a":2}', '{} {"a":3}'),
    ({**STRING, "not": {"enum": ["ab", "b", ""]}}, '"a" "abc" "ba"', '"ab" "b" "" 1'),
    ({**STRING, "maxLength": 2, "not": {"const": 'q"'}}, r'"q" "" "q\\"', r'"q\"" "abc"'),
    ({**INT, "not": {"enum": [3, 5.0, "a"]}}, "2 4 6", "3 5"),
    ({"not": {"enum": [True, None, "x", 1.5]}}, 'false "y" 1.25 2 []', 'true null "x" 1.5'),
    ({"type": ["array", "string"], "not": {"const": [1]}}, '"a"', "[1]"),
    ({"enum": ["a", "b", 3], "not": {"enum": ["a", 3]}}, '"b"', '"a" 3'),
    ({**INT, "not": {"not": {"minimum": 3}}}, "3", "2"),
    ({**INT, "not": {"allOf": [{"minimum": 3}, {"maximum": 5}]}}, "2 6", "3 5"),
    ({**INT, "not": {"anyOf": [{"minimum": 5}, {"maximum": 3}]}}, "4", "3 5"),
    ({**INT, "not": {"oneOf": [{"minimum": 3}, {"maximum": 5}]}}, "3 5", "2 6"),
    ({**INT, "not": {"$ref": "#/$defs/A"}, "$defs": {"A": {"minimum": 3}}}, "2", "3"),
    ({"properties": {"a": {"not": {}}, "b": INT}}, '{} {"b":1}', '{"a":1}'),
    ({"type": "object", "propertyNames": {"not": {"const": "a"}}, "additionalProperties": INT}, '{"b":1}', '{"a":1}'),
    ({**INT, "if": {"minimum": 3}, "then": {"maximum": 5}, "else": {"minimum": 1}}, "1 2 3 5", "0 6"),
    ({**INT, "if": {"minimum": 3}, "then": {"maximum": 5}}, "-9 5", "6"),
    ({**INT, "if": {"minimum": 3}, "else": False}, "3", "2"),
    ({**INT, "if": {"minimum": 3}}, "2 3", "null"),
    ({**INT, "then": False}, "3", "null"),
    (
        {
            "properties": {"kind": {"enum": ["a", "b"]}, "n": INT},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["n"]},
            "else": {"properties": {"n": False}},
        },
        '{"kind":"a","n":1} {"kind":"b"}',
        '{"kind":"a"} {"kind":"b","n":1}',
    ),
    (
        {"properties": {"a": INT, "b": INT}, "dependentSchemas": {"a": {"required": ["b"]}}},
        '{} {"b":1} {"a":1,"b":1}',
        '{"a":1}',
    ),
]


A, B = ({"properties": {name: INT}} for name in "ab")
NO_MORE = {"unevaluatedProperties": False}
UNEVALUATED: list[tuple[dict[str, Any], str, str]] = [
    ({**A, **NO_MORE}, '{} {"a":1}', '{"b":1} {"a":1,"b":1} {"a":"x"}'),
    ({"type": "object", "unevaluatedProperties": INT}, '{} {"a":1}', '{"b":"x"}'),
    ({**A, "allOf": [B], **NO_MORE}, '{} {"a":1} {"a":1,"b":1}', '{"c":1} {"b":"x"}'),
    ({"allOf": [{**A, "required": ["a"]}, NO_MORE], "type": ["object", "null"]}, "null", '{} {"a":1}'),
    ({**A, "$ref": "#/$defs/b", **NO_MORE, "$defs": {"b": B}}, '{"a":1,"b":1}', '{"c":1}'),
    ({**A, "anyOf": [{**B, "required": ["b"]}, True], **NO_MORE}, '{"a":1} {"b":1}', '{"b":"x"}'),
    ({**A, "not": {"not": {**B, "required": ["b"]}}, **NO_MORE, "type": ["object", "null"]}, "null", '{"a":1} {"b":1}'),
    (
        {"if": {**A, "required": ["a"]}, "else": {**B, "required": ["b"]}, **NO_MORE},
        '{"a":1} {"b":1}',
        '{"a":1,"b":1} {}',
    ),
    ({**A, "allOf": [{"additionalProperties": True}], **NO_MORE, "required": ["b"]}, '{"b":1} {"a":1,"b":1}', "{}"),
    ({**A, **B, "patternProperties": {"^x": INT}, **NO_MORE}, '{} {"b":1}', '{"c":1}'),
    ({"patternProperties": {"^x": INT}, **NO_MORE}, '{} {"xa":1}', '{"c":1}'),
    ({"unevaluatedItems": INT}, "[] [1]", '["a"]'),
    ({"prefixItems": [INT], "unevaluatedItems": False}, "[1]", "[1,1]"),
    ({"items": INT, "unevaluatedItems": False}, "[] [1,1]", '["a"]'),
    ({"allOf": [{"items": INT}], "unevaluatedItems": {"type": "string"}}, "[] [1,1]", '["a"]'),
]


@pytest.mark.parametrize(("schema", "good", "bad"), TOGETHER + DENIED + UNEVALUATED)
def test_what_is_said_together_holds_together(schema: dict[str, Any], good: str, bad: str) -> None:
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for text in texts(schema, 60):
        assert validator.is_valid(json.loads(text)), text
    for text in good.split():
        assert accepts(schema, text, "compact"), text
        assert validator.is_valid(json.loads(text))
    for text in bad.split():
        assert not accepts(schema, text, "compact"), text


# --- schemas that are wrong ---

MISTAKES: list[tuple[Any, str]] = [
    (False, "nothing is valid: the schema is false"),
    ({"type": "float"}, "type is 'float'; choose out of null, boolean"),
    ({"type": ["null", 3]}, "type is 3"),
    ({"minLength": -1}, "minLength is -1"),
    ({"maxLength": 1.5}, "maxLength is 1.5"),
    ({"minLength": 3, "maxLength": 2}, "nothing is valid: minLength 3 is more than maxLength 2"),
    (
        {"properties": {"a/b": {"items": INT, "minItems": 2, "maxItems": 1}}, "required": ["a/b"]},
        "at /properties/a~1b: nothing is valid",
    ),
    ({"properties": {"a": False}, "required": ["a"]}, "at /properties/a: nothing is valid"),
    ({"prefixItems": [INT], "minItems": 2}, "nothing is valid"),
    ({"allOf": [{"type": "string"}, INT]}, "nothing is valid"),
    (
        {"properties": {"a": INT}, "additionalProperties": False, "minProperties": 2},
        "nothing is valid: minProperties is 2",
    ),
    ({"type": "number", "minimum": 0.5, "exclusiveMaximum": 0.5}, "nothing is valid: no number"),
    ({"format": ["date"]}, "format is"),
    ({"type": "string", "required": True}, "required is boolean True"),
    ({**INT, "minimum": 3, "maximum": 2}, "nothing is valid: no integer is at least 3 and at most 2"),
    ({**INT, "exclusiveMinimum": 2, "exclusiveMaximum": 3}, "nothing is valid"),
    ({**INT, "minimum": True}, "minimum is True"),
    ({**INT, "maximum": float("nan")}, "maximum is nan"),
    ({**INT, "maximum": 10**5000}, "maximum has more than 64 digits"),
    ({"pattern": "("}, "at /: .*pattern|at /: .*regular expression"),
    ({"pattern": "(?=a)"}, "at /: .*look"),
    ({"pattern": 3}, "pattern is 3"),
    *(
        ({"pattern": each}, "JavaScript reads otherwise")
        for each in (r"\Aa", r"a\Z", r"[\a]", "a{,3}", "[]a]", "[^]a]", "(?P<n>a)")
    ),
    ({"pattern": r"(?u:\w)"}, "JavaScript reads otherwise|more than ASCII"),
    ({"pattern": "(" * 3000 + ")" * 3000}, "cannot be read|nests too deep"),
    ({"enum": []}, "enum is array"),
    ({"type": "string", "not": {"const": "a" * 5000}}, "more than 100 characters cannot be excluded"),
    ({"enum": [True, "1"], "type": "integer"}, "nothing is valid: no value"),
    ({"const": float("nan")}, "not a JSON value|nothing is valid"),
    ({"const": {1: 2}}, "names are strings"),
    ({"const": "\ud800"}, "not a JSON value"),
    ({"const": 10**5000}, "not a JSON value"),
    ({"properties": [INT]}, "properties is"),
    ({"properties": {"a": 3}}, "at /properties/a: a schema is an object, this one of type integer"),
    ({"properties": {"a": INT}, "required": [3]}, "write a list of strings"),
    ({"prefixItems": []}, "prefixItems is array"),
    ({"anyOf": []}, "anyOf is array"),
    ({"oneOf": {"a": INT}}, "oneOf is object"),
    ({"$ref": "#/$defs/A"}, "the schema has no '\\$defs'"),
]


@pytest.mark.parametrize(("schema", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_schema_that_is_wrong_or_empty_says_so(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        schema_node(schema)


def nested(depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = {"properties": {"a": inner}, "required": ["a"]}
    return inner


def test_deep_schemas_are_refused_and_deep_ones_within_the_limit_are_not_too_deep_for_python() -> None:
    constant: Any = 1
    for _ in range(MAX_DEPTH - 1):
        constant = [constant]
    text = language(nested(MAX_DEPTH, {"const": constant})).fullmatch(
        '{"a": ' * 32 + "[" * 31 + "1" + "]" * 31 + "}" * 32
    )
    assert text is not None
    compile_node(schema_node(nested(MAX_DEPTH, {"const": constant})))
    for depth in (MAX_DEPTH + 1, 5000):
        with pytest.raises(GrammarError, match="nests deeper than 32 levels"):
            schema_node(nested(depth, INT))
    with pytest.raises(GrammarError, match="nests deeper"):
        schema_node({"const": [constant]})
    chain = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(100)}
    with pytest.raises(GrammarError, match="nests deeper"):
        schema_node({"$ref": "#/$defs/0", "$defs": chain})


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "prefixItems"])
def test_references_that_multiply_are_refused(keyword: str) -> None:
    laughs: dict[str, Any] = {str(i): {keyword: [{"$ref": f"#/$defs/{i + 1}"}] * 10} for i in range(9)}
    with pytest.raises(GrammarError):
        schema_node({"$ref": "#/$defs/0", "$defs": laughs | {"9": INT}})


def test_references_to_many_subschemas_are_refused() -> None:
    laughs: dict[str, Any] = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(13)} | {"13": INT}
    with pytest.raises(GrammarError, match=f"more than {MAX_VISITS} subschemas"):
        schema_node({"oneOf": [{"$ref": "#/$defs/0"}, {"type": "null"}, {"$ref": "#/$defs/0"}], "$defs": laughs})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1, column 2"),
        ('{"a": 1,\n "b" 2}', "line 2, column 6"),
        ("[]", "of type array"),
        ('{"type": "integer", "minimum": 1, "type": "null"}', "two members 'type'"),
        ('{"const": NaN}', "NaN, which is not JSON"),
        ('{"minimum": ' + "1" * 5000 + "}", "digits"),
        ("[" * 100_000, "nests too deep"),
    ],
)
def test_text_that_is_no_schema(text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        parse_schema(text)


# --- as people write them ---


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    """Where somebody lives."""

    street: str
    zip_code: str = Field(pattern=r"^\d{5}$")
    country: str | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog", "wolf"]
    good: bool = True


class Customer(BaseModel):
    name: str = Field(min_length=1, max_length=10, description="as on the letter", examples=["Ada"])
    age: Annotated[int, Field(gt=0, lt=150)]
    score: float
    color: Color = Color.RED
    addresses: list[Address] = Field(default_factory=list, max_length=2)
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    pets: list[Cat | Dog]
    pair: tuple[int, bool]
    counts: dict[str, int]
    born: date
    at: datetime
    either: int | str | None


class AllOptional(BaseModel):
    a: int | None = None
    b: Literal["x", 1, None, True] = "x"
    c: list[str] | None = None


@pytest.mark.parametrize("model", [Customer, AllOptional])
@pytest.mark.parametrize("whitespace", WHITESPACES)
def test_pydantic_models(model: type[BaseModel], whitespace: Any) -> None:
    """What is generated is read by pydantic, and what pydantic writes of it is in the language."""
    schema = model.model_json_schema()
    pattern = language(schema)
    for text in texts(schema, 40, whitespace):
        read = model.model_validate_json(text)
        assert pattern.fullmatch(json.dumps(read.model_dump(mode="json"), ensure_ascii=False)), text
