"""The adapters of xgrammar, llguidance and outlines-core: whatever the library does, the engine's rules hold.

Oracles: trying every token on a copy, ``re.fullmatch``, ``jsonschema``, ``json.dumps``.
"""

import datetime
import importlib
import itertools
import json
import random
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
import torch
from pydantic import Field, create_model
from tokenizers import AddedToken, Tokenizer

import mini_engine.tiny
from mini_engine.bench.grammar.coverage import is_utf8, random_text
from mini_engine.grammar.backends import make_backend
from mini_engine.grammar.base import (
    SHALLOW,
    GrammarError,
    GrammarObject,
    GrammarOptions,
    TokenRefusedError,
    UnsupportedKeywordError,
)
from mini_engine.grammar.masks import unpack_allowed
from mini_engine.grammar.tokens import TokenTable
from tests.support.schemas import NUM_SCHEMAS, drawn, is_valid_text, mutate
from tests.support.schemas import texts as tree_texts

TOKENIZER = Tokenizer.from_file(str(Path(mini_engine.tiny.__file__).parent / "model" / "tokenizer.json"))
STOP, OTHER_STOP, V = 1021, 1019, 1030  # <|im_end|>, <|endoftext|>; a head that is padded from 1024 to 1030 columns
TABLE = TokenTable.from_tokenizer(TOKENIZER, V, frozenset({STOP, OTHER_STOP}))
SPECIAL = [token for token, spelling in enumerate(TABLE.token_bytes) if not spelling and token not in TABLE.stop_ids]
BYTE = {spelling[0]: token for token, spelling in enumerate(TABLE.token_bytes) if len(spelling) == 1}
CLASSES = {
    "xgrammar": ("libraries.xgrammar", "XGrammarBackend"),
    "llguidance": ("libraries.llguidance", "LLGuidanceBackend"),
    "outlines": ("libraries.outlines", "OutlinesBackend"),
}
BACKENDS = list(CLASSES)
BOTH = ["xgrammar", "llguidance"]  # those with grammars beyond regular ones

REGEXES = [
    r"[0-9]+(\.[0-9]+)?",
    r"foo(bar)?",
    r"[a-zé-ÿ一-龥😀-🙏]{2,6}",
    r"(the|they|there) [A-Z][a-z]*!?",
    r"\d{1,3}(,\d{3}){0,2}",
    r"[^\d\s]{1,4}",
    r"(?i)once upon",
    r"^(a|ab)(c|bcd)(d*)$",
]
SCHEMAS = [
    {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]},
    {"type": "array", "items": {"enum": [1, "two", None, True]}, "minItems": 1, "maxItems": 3},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "integer", "minimum": -7, "maximum": 120},
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}}]},
    {
        "$ref": "#/$defs/p",
        "$defs": {"p": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    },
]
RECURSIVE_SCHEMAS = [
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}},
    {"type": "object"},
    {},
]
EBNF = [
    'root ::= "(" root ")" root | ""',
    'root ::= sum\nsum ::= term ("+" term)*\nterm ::= [0-9]+ | "(" sum ")"',
    'root ::= item | item ", " root\nitem ::= "é" | "\\u4e00" [x-z]{1,3}',
]
TAG = {
    "structures": [
        {"begin": "<f=add>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=not>", "schema": {"type": "array", "items": {"type": "boolean"}}, "end": "</f>"},
    ],
    "triggers": ["<f"],
}
GRAMMARS = [
    *((name, ("regex", text)) for name in BACKENDS for text in REGEXES),
    *((name, ("json_schema", json.dumps(schema))) for name in BACKENDS for schema in SCHEMAS),
    *((name, ("json_schema", json.dumps(schema))) for name in BOTH for schema in RECURSIVE_SCHEMAS),
    *((name, ("ebnf", text)) for name in BOTH for text in EBNF),
    *((name, ("structural_tag", json.dumps(TAG))) for name in BOTH),
]
made = {}


def backend_of(name, table=TABLE, whitespace="spaced"):
    """A backend, made once: handing a vocabulary over takes a while."""
    pytest.importorskip({"outlines": "outlines_core"}.get(name, name))
    key = name, table, whitespace
    if key not in made:
        module, class_name = CLASSES[name]
        backend = getattr(importlib.import_module(f"mini_engine.grammar.{module}"), class_name)
        made[key] = backend(table, GrammarOptions(whitespace=whitespace))
    return made[key]


def compiled(name, kind, text, **options):
    return backend_of(name, **options).compile((kind, text if isinstance(text, str) else json.dumps(text)))


def masked(grammar):
    """The tokens that the mask allows, read off logits: whatever form the mask has."""
    size = getattr(grammar, "table", TABLE).vocab_size
    mask = grammar.allocate_vocab_mask(size, 3)
    logits = torch.zeros(3, size)
    grammar.fill_vocab_mask(mask, 1)
    grammar.apply_vocab_mask(logits, grammar.move_vocab_mask(mask, "cpu"))
    assert (logits[[0, 2]] == 0).all(), "rows of other requests are left alone"
    return (logits[1] == 0).nonzero()[:, 0].tolist()


def accepts(grammar, token):
    try:
        grammar.copy().accept_token(token)
    except TokenRefusedError:
        return False
    return True


def text_tokens(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def takes(grammar, text):
    """Whether the grammar allows ``text``, ended by a stop token."""
    grammar = grammar.copy()
    try:
        for token in [*text_tokens(text), STOP]:
            grammar.accept_token(token)
    except TokenRefusedError:
        return False
    return True


def walk(grammar, seed, steps):
    """Accept random tokens; yield before each step. Ends early behind a stop token."""
    draw = random.Random(seed)
    for _ in range(steps):
        yield
        allowed = masked(grammar)
        short = [token for token in allowed if len(TABLE.token_bytes[token]) == 1]
        grammar.accept_token(draw.choice(short if short and draw.random() < 0.5 else allowed))
        if grammar.is_terminated():
            return


@pytest.mark.parametrize(("name", "key"), GRAMMARS)
def test_mask_is_what_a_copy_accepts(name, key):
    """Every token, tried one by one. It is what found that outlines-core drops tokens, and xgrammar some of its own."""
    grammar = backend_of(name).compile(key)
    for _ in walk(grammar, seed=len(key[1]), steps=5):
        assert masked(grammar) == [token for token in range(-2, V + 3) if accepts(grammar, token)]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("pattern", [*REGEXES, r"a.b", r"\w\W\s", r"[\]\\^-]+", r"x{0,2}y?", r"é|ü", "", "^$"])
def test_a_stop_token_may_come_exactly_where_the_text_matches(name, pattern):
    """Also: one dialect. xgrammar alone reads ``.`` as any character, ignores ``^`` in the middle, has no ``(?i)``."""
    for seed in range(4):
        grammar = compiled(name, "regex", pattern)
        text = b""
        draw = random.Random(seed)
        for _ in range(12):
            try:
                complete = re.fullmatch(pattern, text.decode(), re.ASCII) is not None
            except UnicodeDecodeError:
                complete = False
            allowed = masked(grammar)
            assert (STOP in allowed, OTHER_STOP in allowed, grammar.is_complete()) == (complete,) * 3, text
            tokens = [token for token in allowed if token not in TABLE.stop_ids]
            if not tokens:
                break
            token = draw.choice(tokens)
            grammar.accept_token(token)
            text += TABLE.token_bytes[token]
            assert is_utf8(text), "xgrammar reads a negated set as any bytes of the right number"


@pytest.mark.parametrize("name", BACKENDS)
def test_special_and_padded_ids_are_never_allowed(name):
    """Seen with xgrammar's own reading of a tokenizer: ``<think>`` was seven characters of text."""
    grammar = compiled(name, "regex", r"[\s\S]*")
    assert len(SPECIAL) == 9
    assert not {*masked(grammar)} & {*SPECIAL}
    assert not any(accepts(grammar, token) for token in SPECIAL)


@pytest.mark.parametrize(("name", "key"), GRAMMARS[::3])
def test_rollback_is_replay_across_the_end_too(name, key):
    draw = random.Random(1)
    grammar = backend_of(name).compile(key)
    history = []
    for _ in range(25):
        if history and (grammar.is_terminated() or draw.random() < 0.4):
            count = draw.randint(0, len(history))
            grammar.rollback(count)
            history = history[: len(history) - count]
        else:
            allowed = masked(grammar)
            token = draw.choice([STOP] if STOP in allowed and draw.random() < 0.3 else allowed)
            grammar.accept_token(token)
            history.append(token)
        fresh = backend_of(name).compile(key)
        for token in history:
            fresh.accept_token(token)
        assert (masked(grammar), grammar.is_terminated(), grammar.is_complete(), grammar.try_jump_forward()) == (
            masked(fresh),
            fresh.is_terminated(),
            fresh.is_complete(),
            fresh.try_jump_forward(),
        )
    for count in (-1, len(history) + 1):
        with pytest.raises(ValueError, match="rollback of"):
            grammar.rollback(count)


@pytest.mark.parametrize("name", BACKENDS)
def test_copies_stand_at_the_same_place_and_go_their_own_ways(name):
    grammar = compiled(name, "regex", r"foo(bar)?baz")
    for token in text_tokens("foo"):
        grammar.accept_token(token)
    twin = grammar.copy()
    before = masked(grammar)
    twin.accept_token(BYTE[ord("b")])
    twin.accept_token(BYTE[ord("a")])
    assert masked(grammar) == before
    twin.rollback(2)
    assert masked(twin) == before
    ended = compiled(name, "regex", "a?")
    ended.accept_token(STOP)
    assert ended.copy().is_terminated()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_refused_token_changes_nothing(name, capfd):
    """llguidance's own ``consume_token`` would leave the matcher broken for good; xgrammar warns on stderr."""
    grammar = compiled(name, "regex", r"[ab]{2}c*")
    grammar.accept_token(BYTE[ord("a")])
    before = masked(grammar)
    for token in [BYTE[ord("z")], BYTE[ord("c")], STOP, OTHER_STOP, *SPECIAL, -1, V, 10**6]:
        with pytest.raises(TokenRefusedError, match=f"token {token} after 1 tokens"):
            grammar.accept_token(token)
        assert masked(grammar) == before
    grammar.accept_token(BYTE[ord("b")])
    grammar.accept_token(STOP)
    for token in [STOP, BYTE[ord("c")], V]:
        with pytest.raises(TokenRefusedError):
            grammar.accept_token(token)
    assert grammar.is_terminated()
    grammar.rollback(1)
    assert not grammar.is_terminated()
    assert takes(grammar, "cc")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", BACKENDS)
def test_behind_the_end_nothing_is_in_the_mask(name):
    """The engine asks no more; the libraries raise, or give a mask that bans all, and a row of -inf is NaN."""
    grammar = compiled(name, "regex", "foo(bar)?")
    for token in [*text_tokens("foo"), OTHER_STOP]:
        grammar.accept_token(token)
    assert masked(grammar) == []
    assert grammar.try_jump_forward() == b""


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("keywords", [{"minLength": 1}, {"pattern": "^[^a]$"}], ids=str)
def test_strings_hold_characters_and_no_other_bytes(name, keywords):
    """xgrammar by itself lets overlong forms and surrogates pass: E0 80, ED A0, F0 80 begin no character."""
    for lead, low, high in ((0xC3, 0x80, 0xBF), (0xE0, 0xA0, 0xBF), (0xED, 0x80, 0x9F), (0xF0, 0x90, 0xBF)):
        grammar = compiled(name, "json_schema", {"type": "string", **keywords})
        for token in [*text_tokens('"'), BYTE[lead]]:
            grammar.accept_token(token)
        assert {TABLE.token_bytes[token][0] for token in masked(grammar)} == {*range(low, high + 1)}


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("kind", "text", "prefix", "least"),
    [
        ("json_schema", SCHEMAS[0], "", b'{"name": "'),
        ("regex", "(霍格|霍比)x", "", b""),  # the second characters share their first bytes or not
        ("regex", "ab(格|桼)c", "a", b""),
        ("regex", "a😀b", "a", b""),
        ("regex", "foo(bar)?", "", b"foo"),
        ("regex", "(ab){2}c", "ab", b"abc"),
    ],
)
def test_forced_text_is_what_must_come(name, kind, text, prefix, least):
    """Byte for byte: at each of them no other may come, and no end. xgrammar cannot say bytes inside a character."""
    grammar = compiled(name, kind, text)
    for token in text_tokens(prefix):
        grammar.accept_token(token)
    for _ in range(3):
        forced = grammar.try_jump_forward()
        assert forced.startswith(least)
        ahead = grammar.copy()
        for byte in forced:
            assert {TABLE.token_bytes[token][:1] for token in masked(ahead)} == {bytes([byte])}
            ahead.accept_token(BYTE[byte])
        grammar.accept_token(masked(grammar)[0])
        least = b""


def test_forced_bytes_inside_a_character():
    """xgrammar 0.2.9 says nothing where the forced bytes begin inside one, 0.2.8 raised; llguidance says them."""
    for name, forced in (("xgrammar", b""), ("llguidance", "😀b".encode()[2:])):
        grammar = compiled(name, "regex", "a😀b")
        for byte in "a😀".encode()[:3]:
            grammar.accept_token(BYTE[byte])
        assert grammar.try_jump_forward() == forced


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("schema", SCHEMAS)
def test_generated_json_is_valid(name, schema):
    draw = random.Random(5)
    grammar = compiled(name, "json_schema", schema, whitespace="any")
    texts = [text for text in (random_text(grammar.copy(), TABLE, draw) for _ in range(6)) if text is not None]
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


def test_any_json_of_xgrammar_keeps_the_layout():
    grammar = compiled("xgrammar", "json_schema", {}, whitespace="compact")
    assert takes(grammar, '{"a":[1,{"b":2,"c":[]}]}')
    assert not takes(grammar, '{"a":1, "b":2}')


WRONG = [
    (BACKENDS, "regex", "(", "paren|unterminated|group"),
    (BACKENDS, "regex", "(?<=a)b", "look"),
    (BACKENDS, "regex", r"a^b", "anchor|\\^"),
    (BACKENDS, "regex", "a\0", "NUL"),
    (BACKENDS, "json_schema", "{", "JSON"),
    (BACKENDS, "json_schema", "false", ""),
    (BACKENDS, "json_schema", '{"type": "foo"}', "foo"),
    (BACKENDS, "json_schema", '{"$ref": "#/$defs/missing"}', "missing|defs"),
    (BACKENDS, "json_schema", '{"type": "array", "items": ' * 99 + "{}" + "}" * 99, "deep"),
    (BACKENDS, "json_schema", "[" * 10**5, "deep|JSON"),
    (BACKENDS, "json_schema", '{"$ref": "#"}', "itself|no text|NoExtension|circular"),
    (BACKENDS, "regex", r"[^\s\S]", ""),
    (BACKENDS, "regex", "(" * 5000 + "a" + ")" * 5000, ""),
    (BOTH, "ebnf", "root ::= missing", "missing"),
    (BOTH, "ebnf", "", "root"),
    (BOTH, "ebnf", 'root ::= "\ud800"', "outside of ASCII"),
    (BACKENDS, "json_schema", '{"const": "\\ud800"}', "JSON"),
    (BOTH, "structural_tag", "no JSON", "JSON"),
    (BOTH, "structural_tag", '{"structures": [], "triggers": ["<"]}', "at least one"),
    (BOTH, "structural_tag", '{"structures": [{"begin": "<f", "end": ""}], "triggers": ["x"]}', "none of the triggers"),
    (BOTH, "structural_tag", '{"structures": [{"begin": "<f", "ende": ""}], "triggers": ["<f"]}', "structure is"),
    (BOTH, "structural_tag", json.dumps(TAG | {"type": "tag"}), "left out"),
    (["outlines"], "ebnf", 'root ::= "a"', "has no ebnf"),
    (["xgrammar"], "structural_tag", '{"type": "structural_tag", "format": {"type": "token", "token": 5}}', "text"),
    (["llguidance"], "structural_tag", '{"type": "structural_tag", "format": {"type": "any_text"}}', "any_text"),
    (
        ["llguidance"],
        "structural_tag",
        '{"format": {"type": "tag", "begin": 1, "content": {}, "end": ""}}',
        "a text belongs",
    ),
    (["llguidance"], "structural_tag", '{"format": {"type": "or", "elements": []}}', "at least one"),
    (BOTH, "structural_tag", '{"type": "tag", "format": {"type": "tag"}}', "alone"),
]


@pytest.mark.parametrize(("name", "kind", "text", "words"), [(name, *rest) for names, *rest in WRONG for name in names])
def test_errors_are_typed_and_say_nothing_of_the_library_s_files(name, kind, text, words, capfd):
    with pytest.raises(GrammarError, match=f"(?i){words}") as caught:
        backend_of(name).compile((kind, text))
    assert not re.search(r"\.cc|/project|\d\d:\d\d:\d\d|Check failed|%llguidance|x-guidance|<state>", str(caught.value))
    assert capfd.readouterr() == ("", "")


UNSOUND = [
    ("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, BACKENDS),
    ("contains", {"type": "array", "contains": {"type": "integer"}}, BACKENDS),
    ("not", {"type": "integer", "not": {"const": 1}}, ["xgrammar", "llguidance"]),
    ("if", {"if": {"type": "integer"}, "then": {"type": "integer"}}, ["xgrammar", "llguidance"]),
    ("minLenght", {"type": "string", "minLenght": 3}, BACKENDS),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}, ["xgrammar", "llguidance"]),
    ("propertyNames", {"type": "object", "propertyNames": {"type": "string"}}, ["xgrammar", "llguidance"]),
    ("$ref", {"$ref": "http://example.org/schema"}, ["xgrammar", "llguidance"]),
    ("allOf", {"allOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}, ["xgrammar"]),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["xgrammar"]),
    ("multipleOf", {"type": "number", "multipleOf": 0.5}, ["xgrammar", "outlines"]),
    ("minimum", {"minimum": 3}, ["xgrammar"]),
    ("minimum", {"type": "string", "minimum": 3}, ["xgrammar"]),
    ("minimum", {"enum": [1, 2, 3], "minimum": 2}, ["xgrammar"]),
    ("minimum", {"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, ["xgrammar"]),
    ("type", {"anyOf": [{"type": "integer"}, {"type": "string"}], "type": "string"}, ["xgrammar"]),
    ("enum", {"type": "string", "enum": [1, "a"]}, ["xgrammar"]),
    (
        "required",
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["z"]},
        ["xgrammar"],
    ),
    (
        "additionalProperties",
        {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
        ["xgrammar"],
    ),
    ("minProperties", {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2}, ["xgrammar"]),
    ("minLength", {"type": "string", "pattern": "^(ab)+$", "minLength": 3}, ["xgrammar", "outlines"]),
]


@pytest.mark.parametrize(
    ("name", "keyword", "schema"), [(name, keyword, schema) for keyword, schema, names in UNSOUND for name in names]
)
def test_a_keyword_that_would_be_ignored_is_refused(name, keyword, schema):
    """Each was seen to let an invalid text pass, or to be ignored without a word, in one of the libraries."""
    nested = {"type": "object", "properties": {"in/ner": schema}, "required": ["in/ner"]}
    if "$defs" in schema:
        nested["$defs"] = schema["$defs"]
    for tried, path in ((schema, ""), (nested, "/properties/in~1ner")):
        with pytest.raises(UnsupportedKeywordError) as caught:
            compiled(name, "json_schema", tried)
        assert (caught.value.keyword, caught.value.path) == (keyword, path)


@pytest.mark.parametrize("name", [*BACKENDS, "fsm"])
def test_words_of_no_vocabulary_are_listed_and_change_nothing(name):
    """``x-guidance`` would have told llguidance to be lenient."""
    word = {"type": "string", "maxLength": 2, "x-guidance": {"lenient": True}, "nullable": True, "format": "color"}
    schema = {
        "$id": "https://example.org/a",
        "type": "object",
        "properties": {"a/b": word},
        "required": ["a/b"],
        "additionalProperties": False,
        "readonly": True,
    }
    grammar = compiled(name, "json_schema", schema)
    inside = "/properties/a~1b"
    assert {*grammar.stats.ignored} == {
        "/$id",
        "/readonly",
        f"{inside}/x-guidance",
        f"{inside}/nullable",
        f"{inside}/format",
    }
    for text, is_valid in (('{"a/b": "xy"}', True), ('{"a/b": "xyz"}', False), ('{"a/b": null}', False)):
        assert takes(grammar, text) == is_valid


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "string", "pattern": 'b"'}, ['"ab\\"c"', '"b\\""'], ['"ab"', '"ab"c"']),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"é😀x"'], ['"a"', '"abcd"', '"a\x01"']),
        ({"type": "string", "format": "date"}, ['"2024-02-28"'], ['"2023-11-31"', '"2023-1-1"']),
        ({"const": 'a"b\n'}, ['"a\\"b\\n"'], ['"a"b\n"']),
        (
            {"type": "object", "properties": {'a"': {"type": "null"}}, "required": ['a"']},
            ['{"a\\"": null}'],
            ['{"a"": null}'],
        ),
    ],
)
def test_strings_keep_their_escapes(name, schema, valid, invalid):
    """xgrammar puts a pattern between the quotes as it stands; outlines' own converter writes a quote in a key bare."""
    grammar = compiled(name, "json_schema", schema)
    assert [text for text in (*valid, *invalid) if takes(grammar, text)] == valid


@pytest.mark.parametrize("name", BOTH)
def test_grammars_that_are_not_regular(name):
    balanced = compiled(name, "ebnf", 'root ::= "a" root "b" | ""')
    assert [text for text in ("", "ab", "aaabbb", "aab", "abb", "ba", "abab") if takes(balanced, text)] == [
        "",
        "ab",
        "aaabbb",
    ]
    escapes = compiled(name, "ebnf", 'root ::= "\\u0041\\u00e9" [\\u0042-\\u0043] "\\\\u0041" "\\U0001f600"')
    assert takes(escapes, "AéC\\u0041😀")
    assert not takes(escapes, "AéCA😀")


def test_lexemes_of_llguidance_are_the_longest():
    """Known: its grammars are lexed, so the first ``a`` takes every x. Narrower than the grammar, never wider."""
    text = 'root ::= a a\na ::= "x"+'
    assert takes(compiled("xgrammar", "ebnf", text), "xx")
    assert not takes(compiled("llguidance", "ebnf", text), "xx")


@pytest.mark.parametrize("name", BACKENDS)
def test_schemas_of_pydantic(name):
    """Nested models, bounds, optional and literal fields, maps: what ``model_json_schema`` writes is kept."""
    person = create_model("Person", name=(str, Field(max_length=5)), age=(int, Field(ge=0, le=120)))
    team = create_model(
        "Team",
        people=(list[person], Field(max_length=2)),
        kind=(Literal["a", "b"], "a"),
        since=(datetime.date | None, None),
        points=(dict[str, int], {}),
        pair=(tuple[int, str], ...),
    )
    draw = random.Random(4)
    grammar = compiled(name, "json_schema", team.model_json_schema())
    texts = [text for text in (random_text(grammar.copy(), TABLE, draw, 50) for _ in range(5)) if text is not None]
    assert texts
    for text in texts:
        team.model_validate_json(text)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("whitespace", ["spaced", "compact"])
def test_structural_tag(name, whitespace):
    """Free text until a trigger; from there one of the structures, its JSON in the layout of the options."""
    grammar = compiled(name, "structural_tag", TAG, whitespace=whitespace)
    comma = ", " if whitespace == "spaced" else ","
    good = ["", "hi", "a < b", "<f=add>12</f>", "so <f=add>-3</f> and " + f"<f=not>[true{comma}false]</f>."]
    bad = ["<f", "<f=foo>1</f>", "a <f b", "<f=add>true</f>", "<f=add>1</g>", "<f=add>1", "<f=not>[true,  false]</f>"]
    assert [text for text in good + bad if takes(grammar, text)] == good


@pytest.mark.parametrize("name", BOTH)
def test_the_schemas_of_a_structural_tag_say_what_is_narrowed_and_ignored(name):
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}, "x-order": 1}
    schema = {"type": "object", "properties": {"a": inner}}
    tags = {"structures": [{"begin": f"<{n}>", "schema": schema, "end": "<"} for n in "fg"], "triggers": ["<"]}
    stats = compiled(name, "structural_tag", tags).stats
    alone = compiled(name, "json_schema", schema).stats
    for number in (0, 1):
        at = f"/tags/{number}/content/json_schema"
        moved = [at + note for note in alone.narrowed if note.startswith("/properties")]
        assert len(moved) >= 1
        assert {*moved} <= {*stats.narrowed}
        assert stats.ignored[number] == f"{at}{alone.ignored[0]}" == f"{at}/properties/a/x-order"


def test_newer_structural_tags_of_xgrammar():
    wish = {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "n="},
                {"type": "json_schema", "json_schema": {"type": "array", "items": {"type": "integer"}}},
                {"type": "regex", "pattern": r"^.\d$"},
            ],
        },
    }
    grammar = compiled("xgrammar", "structural_tag", wish)
    assert [text for text in ("n=[1, 2]x3", "n=[1,2]x3", "n=[]\n3", "n=[]x", "[1]x3") if takes(grammar, text)] == [
        "n=[1, 2]x3"
    ]
    wish["format"]["elements"][1]["json_schema"] = {"type": "array", "uniqueItems": True}
    with pytest.raises(UnsupportedKeywordError):
        compiled("xgrammar", "structural_tag", wish)


def call_of(name, arguments):
    return f'<call>{{"{name}": {arguments}}}</call>'


CALLS = [
    {"begin": f'<call>{{"{name}": ', "content": {"type": "json_schema", "json_schema": schema}, "end": "}</call>"}
    for name, schema in {
        "f": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}},
        "g": {"type": "boolean"},
    }.items()
]
F, G = call_of("f", "1"), call_of("g", "true")
TRIGGERED = {"type": "triggered_tags", "triggers": ["<call>"], "tags": CALLS}
SEPARATED = {"type": "tags_with_separator", "separator": "\n", "tags": CALLS}
FIRST, SOME = {"stop_after_first": True}, {"at_least_one": True}
CALL_TEXTS = ("", F, G, f"{F}\n{G}", F + G, f"so {F}", f"{F} so", f"a{F}b{G}", "<calls> é")
FORMATS = [  # with those of the texts that each takes
    (TRIGGERED, CALL_TEXTS),
    (TRIGGERED | FIRST, ("", F, G, f"so {F}", "<calls> é")),
    (SEPARATED, ("", F, G, f"{F}\n{G}")),
    (SEPARATED | SOME, (F, G, f"{F}\n{G}")),
    (SEPARATED | SOME | FIRST, (F, G)),
    (CALLS[0] | {"type": "tag"}, (F,)),
    (
        {"type": "or", "elements": [{"type": "const_string", "value": "<calls> é"}, SEPARATED | SOME]},
        (F, G, f"{F}\n{G}", "<calls> é"),
    ),
    ({"type": "sequence", "elements": [{"type": "const_string", "value": "so "}, CALLS[0]]}, (f"so {F}",)),
]


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(("wish", "good"), FORMATS, ids=range(len(FORMATS)))
def test_calls_in_the_newer_structural_tags(name, wish, good):
    grammar = compiled(name, "structural_tag", {"type": "structural_tag", "format": wish})
    bad = [call_of("f", "true"), call_of("h", "1"), "<call>", F[:-1]]
    assert tuple(text for text in (*CALL_TEXTS, *bad) if takes(grammar, text)) == good


def test_marks_of_a_call_are_text_where_each_is_one_token():
    """Qwen's tokenizers have both as added tokens that are not special. A special one is in no text."""
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=True)])
    table = TokenTable.from_tokenizer(tokenizer, V, frozenset({STOP, OTHER_STOP}))
    assert [table.token_bytes[token] for token in (1024, 1025)] == [b"<tool_call>", b""]
    for name in BOTH:
        tag = {"begin": "<tool_call>", "schema": {"type": "boolean"}, "end": "."}
        grammar = compiled(name, "structural_tag", {"structures": [tag], "triggers": ["<tool_call>"]}, table=table)
        assert {1024, text_tokens("<")[0]} <= set(masked(grammar))
        grammar.accept_token(1024)
        assert set(masked(grammar)) <= {token for token in range(V) if table.token_bytes[token][:1] in (b"t", b"f")}


@pytest.mark.parametrize("name", BACKENDS)
def test_compiling_in_many_threads_gives_the_same_masks(name):
    backend = backend_of(name)
    keys = [("regex", text) for text in REGEXES] + [("json_schema", json.dumps(schema)) for schema in SCHEMAS]
    alone = [masked(backend.compile(key)) for key in keys]
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(lambda key: masked(backend.compile(key)), keys * 3)] == alone * 3


@pytest.mark.parametrize("name", BOTH)
def test_bits_past_the_vocabulary_are_zero(name):
    """xgrammar leaves them as they were: a row of ones would allow six tokens that do not exist."""
    grammar = compiled(name, "regex", r"[\s\S]*")
    for start in (0, -1):
        mask = torch.full((2, 33), start, dtype=torch.int32)
        grammar.fill_vocab_mask(mask, 1)
        assert (mask[0] == start).all()
        assert not unpack_allowed(mask[1], 33 * 32)[V:].any()
        assert unpack_allowed(mask[1], V)[STOP]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_missing_library_is_an_error_that_says_how_to_install_it(name, monkeypatch):
    module, class_name = CLASSES[name]
    library = {"outlines": "outlines_core"}.get(name, name)
    for loaded in [key for key in sys.modules if key.partition(".")[0] == library]:
        monkeypatch.setitem(sys.modules, loaded, None)
    monkeypatch.setitem(sys.modules, library, None)
    adapter = importlib.import_module(f"mini_engine.grammar.{module}")
    with pytest.raises(ValueError, match=rf"{library}: pip install 'mini-engine\[grammars\]'"):
        getattr(adapter, class_name)(TABLE)


def test_a_table_that_llguidance_cannot_use():
    from mini_engine.grammar.libraries.llguidance import LLGuidanceBackend

    with pytest.raises(ValueError, match="needs a stop id"):
        LLGuidanceBackend(TokenTable((b"a",), frozenset()))


def test_a_matcher_that_gave_up_is_an_error_and_no_mask():
    """At a limit of the library its matcher stops without an exception, and its mask is the stop tokens."""
    grammar = compiled("llguidance", "regex", "ab")
    grammar.matcher.consume_token(BYTE[ord("z")])
    with pytest.raises(GrammarError, match="gave up"):
        masked(grammar)


@pytest.mark.xfail(strict=True, reason="xgrammar 0.2.9 leaves tokens out of the mask that it accepts")
def test_palindromes_of_xgrammar():
    """If this passes, the bug is mended: take the sentence out of the adapter's docstring."""
    table = TokenTable((b"x", b"y", b"z", b"xx", b"yy", b"xy", b"yx", b"zy", b""), frozenset({8}))
    grammar = compiled("xgrammar", "ebnf", 'root ::= "x" root "x" | "y" root "y" | "z"', table=table)
    for token in (1, 1, 2):
        grammar.accept_token(token)
    assert accepts(grammar, 4)
    assert 4 in masked(grammar)


def test_outlines_core_still_drops_tokens_behind_an_accepting_state():
    """If this fails, the bug is mended: the sentinel of the adapter is not needed any more."""
    core = pytest.importorskip("outlines_core")
    index = core.Index("a(bc)?", core.Vocabulary(3, {b"a": [0], b"b": [1], b"c": [2]}))
    after_a = index.get_next_state(index.get_initial_state(), 0)
    assert index.get_allowed_tokens(after_a) == [3]


def test_what_the_sentinel_of_outlines_costs():
    """Code points from U+100000 on share its first byte. No byte of it may come, or the text could not go on."""
    grammar = compiled("outlines", "regex", "[😀-\U0010ffff]x?")
    first = {TABLE.token_bytes[token][0] for token in masked(grammar)}
    assert first == {0xF0, 0xF1, 0xF2, 0xF3}
    assert not takes(compiled("outlines", "regex", r"[\s\S]*"), "\U0010ffff")


EDGES = [0, 9, 10, 0x1F, 0x20, 0x22, 0x5C, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x1F600, 0x10FFFF]


@pytest.mark.parametrize(
    "pattern", [r'[^"\\]', r"[\s\S]", r"\S", r"[^\x00-\x1f]", "[^\u4e00-\u9fff]", "[😀-😎]", "[^U0]"]
)
def test_a_set_of_characters_is_the_same_set_of_bytes_in_every_backend(pattern):
    r"""xgrammar took ``\U0010ffff`` in a class for the letters U, 0, 1, f: what lies beyond U+FFFF was lost."""
    table = TokenTable((*(bytes([byte]) for byte in range(256)), b""), frozenset({256}))
    texts = [chr(code).encode() for code in [*EDGES, ord("U"), ord("f")]]
    texts += [b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xff", b"\x80"]  # no UTF-8
    allowed = re.compile(pattern, re.ASCII)
    for name in ("fsm", "xgrammar", "llguidance"):
        grammar = make_backend(name, table, GrammarOptions()).compile(("regex", pattern))
        for text in texts:
            copy = grammar.copy()
            expected = is_text(text) and bool(allowed.fullmatch(text.decode()))
            assert takes_bytes(copy, text) == expected, (name, text)


def is_text(data):
    """Whether the bytes are UTF-8."""
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


def takes_bytes(grammar, data):
    """Whether a grammar over single bytes takes all of them, and the text is complete."""
    try:
        for byte in data:
            grammar.accept_token(byte)
    except TokenRefusedError:
        return False
    return grammar.is_complete()


MISREAD = ["^a(x[0-9]+)?Z$", "^[a-z]{3}(-[0-9]{1,2})?$", "^(x{1,3}|b|x)$", "^([0-9]*[0-9][0-9])?$", "^(b{2,3})?a$"]


@pytest.mark.parametrize("pattern", MISREAD)
def test_a_pattern_that_xgrammar_reads_as_more_is_refused_and_auto_keeps_it(pattern: str) -> None:
    """The library takes "a5Z" for the first one; the drawn patterns below say which others it reads right."""
    schema = json.dumps({"type": "string", "pattern": pattern})
    xgrammar = make_backend("xgrammar", TABLE, GrammarOptions())
    with pytest.raises(GrammarError, match="'pattern' at / has a choice or an optional part with a repeat"):
        xgrammar.compile(("json_schema", schema))
    grammar = make_backend("auto", TABLE, GrammarOptions()).compile(("json_schema", schema))
    assert grammar.stats.backend == "fsm"


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
def test_drawn_patterns_mean_to_a_library_what_they_mean_to_re(name: str) -> None:
    """Patterns of repeats, choices and optional parts; those that a library would misread are refused."""
    backend = make_backend(name, TABLE, GrammarOptions())
    dice = random.Random(0)
    kept = 0
    for _ in range(150):
        pattern = drawn_pattern(dice, 3)
        try:
            grammar = backend.compile(("json_schema", json.dumps({"type": "string", "pattern": f"^({pattern})$"})))
        except GrammarError:
            continue
        kept += 1
        for _ in range(25):
            text = "".join(dice.choice("ab0") for _ in range(dice.randint(0, 5)))
            assert takes(grammar, json.dumps(text)) == bool(re.fullmatch(pattern, text)), (pattern, text)
    assert kept > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsm", *BOTH])
def test_what_a_backend_takes_of_drawn_schemas_is_valid(name: str) -> None:
    """Texts written by walking the masks, texts of the tree, and mutants of both: nothing invalid is ever taken."""
    backend = make_backend(name, TABLE, GrammarOptions(max_states=2000))
    kept = 0
    written = 0
    taken = 0
    for seed in range(0, NUM_SCHEMAS, 2):
        schema, validator = drawn(seed)
        try:
            grammar = backend.compile(("json_schema", json.dumps(schema)))
        except GrammarError:
            continue
        kept += 1
        dice = random.Random(seed)
        found = [random_text(grammar.copy(), TABLE, dice, 12) for _ in range(2)]
        walked = [text.decode() for text in found if text and is_text(text)]
        written += len(walked)
        for text in walked:
            assert is_valid_text(text, validator), (schema, text)
        for text in [*walked, *tree_texts(schema, 3, seed=seed)]:
            for mutant in [text, *(mutate(text, dice) for _ in range(8))]:
                if takes(grammar, mutant):
                    taken += 1
                    assert is_valid_text(mutant, validator), (schema, mutant)
    assert min(kept, written, taken / 5) > 30, (kept, written, taken)


def drawn_pattern(dice: random.Random, depth: int) -> str:
    kind = dice.random() if depth else 0.0
    if kind < 0.3:
        return dice.choice(["a", "b", "[0-9]", "[ab]"])
    inner = [drawn_pattern(dice, depth - 1) for _ in range(dice.randint(1, 3))]
    if kind < 0.6:
        return "".join(f"({part})" if "|" in part else part for part in inner)
    return (
        f"({'|'.join(inner)})"
        if kind < 0.75
        else f"({inner[0]}){dice.choice(['?', '*', '+', '{0,2}', '{2}', '{1,3}'])}"
    )


@pytest.mark.parametrize("bounds", [{"minimum": 3}, {"exclusiveMaximum": 17}], ids=str)
def test_a_multiple_beside_a_bound_on_one_side_is_refused_by_xgrammar(bounds: dict[str, int]) -> None:
    schema = json.dumps({"type": "integer", "multipleOf": 7, **bounds})
    with pytest.raises(GrammarError, match="'multipleOf' at / is ignored beside a bound on one side"):
        make_backend("xgrammar", TABLE, GrammarOptions()).compile(("json_schema", schema))


def test_a_multiple_of_a_fraction_is_refused_by_xgrammar_and_auto() -> None:
    """The library takes every integer then, and 17 is no multiple of 2.5."""
    schema = {"type": "integer", "multipleOf": 2.5}
    assert not jsonschema.Draft202012Validator(schema).is_valid(17)
    with pytest.raises(GrammarError, match="'multipleOf' at / of a fraction"):
        make_backend("xgrammar", TABLE, GrammarOptions()).compile(("json_schema", json.dumps(schema)))
    exact = make_backend("auto", TABLE, GrammarOptions()).compile(("json_schema", json.dumps(schema)))
    assert takes(exact, "15")
    assert not takes(exact, "17")


WIDE = [{"enum": [1, 2**60]}, {"type": "integer", "minimum": 2**53 + 1}, {"const": [{"a": 2**70}]}]


@pytest.mark.parametrize("schema", WIDE, ids=str)
def test_integers_that_llguidance_rounds_are_refused(schema: dict[str, object]) -> None:
    with pytest.raises(GrammarError, match="which llguidance rounds"):
        make_backend("llguidance", TABLE, GrammarOptions()).compile(("json_schema", json.dumps(schema)))


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
COUNTED = [
    {"type": "object", "patternProperties": {"^[ab]$": DIGIT}, "additionalProperties": False, "minProperties": 2},
    {"type": "object", "additionalProperties": DIGIT, "minProperties": 3},
    {"type": "object", "properties": {"a": DIGIT}, "required": ["a"], "minProperties": 2},
]


@pytest.mark.parametrize("schema", COUNTED, ids=str)
def test_a_number_of_free_names_is_refused_as_llguidance_counts_members(schema: dict[str, Any]) -> None:
    """``{"b": 1, "b": 6}`` ended as complete, and has one member to every reader."""
    for name in ("llguidance", "auto"):
        with pytest.raises(GrammarError, match=r"'minProperties' at /"):
            make_backend(name, TABLE, GrammarOptions()).compile(("json_schema", json.dumps(schema)))
    for counted in (schema | {"minProperties": 1}, schema | {"required": ["a", "b"], "minProperties": 2}):
        grammar = make_backend("llguidance", TABLE, GrammarOptions()).compile(("json_schema", json.dumps(counted)))
        assert takes(grammar, '{"a": 1, "b": 2}')


def spellings(dice: random.Random, name: str) -> str:
    """A member's name, with some of its characters escaped one time out of three, though they need not be."""
    if dice.random() < 0.67:
        return name
    return "".join(f"\\u{ord(letter):04x}" if dice.random() < 0.4 else letter for letter in name)


NODE = {"type": "object", "properties": {"value": DIGIT, "next": {"$ref": "#/$defs/Node"}}, "required": ["value"]}
OPEN = [
    {"type": "object", "properties": {"value": DIGIT}},
    {"type": "object", "properties": {"value": DIGIT, "next": {"type": "null"}}, "additionalProperties": DIGIT},
    {"$ref": "#/$defs/Node", "$defs": {"Node": NODE}},
    {"allOf": [{"type": "object", "properties": {"value": DIGIT}}, {"properties": {"next": {"type": "object"}}}]},
    {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"value": DIGIT}}]}},
    {"type": "object", "patternProperties": {"^v": DIGIT}, "additionalProperties": False},
]


@pytest.mark.parametrize("name", ["fsm", *BOTH, "auto"])
@pytest.mark.parametrize("schema", OPEN, ids=str)
def test_an_escaped_name_does_not_escape_its_schema(schema: dict[str, Any], name: str) -> None:
    try:
        grammar = make_backend(name, TABLE, GrammarOptions()).compile(("json_schema", json.dumps(schema)))
    except GrammarError:
        assert name in ("fsm", "xgrammar")
        return
    judge = jsonschema.Draft202012Validator(schema)
    dice = random.Random(3)
    taken = 0
    for number in range(300):
        names = [dice.choice(["value", "next", "v", "other"]) for _ in range(1 + number % 3)]
        values = [dice.choice(["1", '"x"', "null", '{"value": 3}', '{"val\\u0075e": "x"}']) for _ in names]
        text = ", ".join(f'"{spellings(dice, key)}": {value}' for key, value in zip(names, values, strict=True))
        for written in (f"{{{text}}}", f"[{{{text}}}]"):
            if takes(grammar, written):
                taken += 1
                assert judge.is_valid(json.loads(written)), written
    assert taken >= 3 or name != "llguidance"


BESIDE_PATTERNS = [
    {"type": "object", "patternProperties": {"^[ab]$": DIGIT}},
    {
        "type": "object",
        "properties": {"value": DIGIT},
        "patternProperties": {"^v": DIGIT},
        "additionalProperties": DIGIT,
    },
]


@pytest.mark.parametrize("schema", [*OPEN, *BESIDE_PATTERNS], ids=str)
def test_other_names_of_llguidance_have_their_own_schema_or_are_narrowed(schema: dict[str, Any]) -> None:
    grammar = make_backend("llguidance", TABLE, GrammarOptions()).compile(("json_schema", json.dumps(schema)))
    judge = jsonschema.Draft202012Validator(schema)
    is_narrow = any("names no pattern finds" in note for note in grammar.stats.narrowed)
    assert is_narrow == (schema in BESIDE_PATTERNS)
    values = ["1", '"x"', "null"]
    for names in (["value"], ["value", "other"], ["other"], ["a"], ["v"]):
        for chosen in itertools.product(values, repeat=len(names)):
            text = ", ".join(f'"{name}": {value}' for name, value in zip(names, chosen, strict=True))
            valid = judge.is_valid(json.loads(f"{{{text}}}"))
            assert not takes(grammar, f"{{{text}}}") or valid
            if valid and not is_narrow:
                assert takes(grammar, f"{{{text}}}"), text
    assert takes(grammar, '{"a": 1}') or schema != BESIDE_PATTERNS[0]


DATES = {
    "date": ["2021-02-29", "2020-02-28", "2021-13-01", "2021-1-1"],
    "time": ["22:59:60Z", "24:00:00Z", "23:59:59Z", "12:00:00+24:00", "12:00:00.5Z", "12:00Z"],
    "date-time": ["2021-02-29T00:00:00Z", "2020-02-28T23:59:59.25+01:00", "2020-02-29 23:59:59Z"],
}


@pytest.mark.parametrize("name", ["fsm", "llguidance", "auto"])
@pytest.mark.parametrize("form", DATES)
def test_no_backend_takes_a_date_that_is_none(form: str, name: str) -> None:
    schema = {"type": "string", "format": form}
    grammar = make_backend(name, TABLE, GrammarOptions()).compile(("json_schema", json.dumps(schema)))
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    taken = [text for text in DATES[form] if takes(grammar, json.dumps(text))]
    if form == "date":
        assert taken == [text for text in DATES[form] if judge.is_valid(text)]
    assert {"date": "2020-02-28", "time": "23:59:59Z", "date-time": "2020-02-28T23:59:59.25+01:00"}[form] in taken
    assert not {"2021-02-29", "24:00:00Z", "12:00Z", "22:59:60Z", "2021-02-29T00:00:00Z"} & set(taken)


NUMBERS = {"type": "integer"}
LEFT_OUT_CASES = [  # schema, a valid text that a backend may leave out, where and how it says so
    ({"properties": {"a": NUMBERS}}, '{"a": 1, "b": 2}', "/", "members that no schema declares"),
    ({"items": {"properties": {"a": NUMBERS}}}, '[{"a": 1, "b": 2}]', "/items", "members that no schema declares"),
    ({"type": "object", "properties": {"a": NUMBERS, "b": NUMBERS}}, '{"b": 1, "a": 2}', "/", "in the order of the"),
    ({"properties": {"a": {"minimum": 3}}}, '{"a": "x"}', "/properties/a", "other values are valid too"),
    ({"type": "string"}, r'"\u0076"', "/", "strings are spelled in one way"),
    ({"type": "string", "maxLength": 5}, r'"\/"', "/", "strings are spelled in one way"),
    (NUMBERS, "1.0", "/", "no point and no exponent"),
    (NUMBERS, "12345678901234567890", "/", "no more digits"),
    ({"type": "array", "prefixItems": [NUMBERS, NUMBERS]}, "[1]", "/", "prefixItems"),
    ({"type": "array", "prefixItems": [NUMBERS], "minItems": 1}, "[1, null]", "/", "prefixItems"),
    ({"type": "object", "patternProperties": {"^x": NUMBERS}}, '{"y": 1}', "/", "names no pattern finds"),
    ({"type": "array", "items": {}}, "[[[[[1]]]]]", "/items", "levels deep"),
    ({"items": {"type": "string", "format": "ipv6"}}, '["::1.2.3.4"]', "/items", "format ipv6 is written without"),
    ({"type": "string", "format": "time"}, '"10:00:00.1234567Z"', "/", "format time is written without"),
    ({"type": "string", "format": "hostname"}, '"a.b.c.d.e.f.g"', "/", "format hostname is written without"),
    ({"type": "string", "format": "email"}, '"a/b@c.de"', "/", "format email is written without"),
    ({"type": "string", "format": "uri"}, '"http://[::1]/"', "/", "format uri is written without"),
]


@pytest.mark.parametrize("name", ["fsm", *BACKENDS, "auto"])
@pytest.mark.parametrize(("schema", "text", "place", "words"), LEFT_OUT_CASES, ids=str)
def test_nothing_is_narrowed_in_silence(schema: dict[str, Any], text: str, place: str, words: str, name: str) -> None:
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    assert judge.is_valid(json.loads(text))
    try:
        grammar = make_backend(name, TABLE, GrammarOptions()).compile(("json_schema", json.dumps(schema)))
    except GrammarError:
        assert name in BACKENDS
        return
    notes = [note for note in grammar.stats.narrowed if words in note]
    assert takes(grammar, text) or [note for note in notes if note.startswith(f"{place}: ")]
    if name in ("fsm", "auto"):
        assert bool(notes) != takes(grammar, text)


@pytest.mark.parametrize("name", ["fsm", *BACKENDS])
@pytest.mark.parametrize("schema", [{"type": "object"}, {"type": "object", "additionalProperties": NUMBERS}], ids=str)
def test_a_map_that_may_repeat_a_name_says_so(schema: dict[str, Any], name: str) -> None:
    for place, outer in (("/", schema), ("/items", {"type": "array", "items": schema, "minItems": 1})):
        grammar = make_backend(name, TABLE, GrammarOptions()).compile(("json_schema", json.dumps(outer)))
        notes = [note for note in grammar.stats.narrowed if "a name may come twice" in note]
        assert [note.split(": ")[0] for note in notes] == [place]
        text = '{"": 100, "": 0}'
        assert takes(grammar, text if place == "/" else f"[{text}]")
    closed = make_backend(name, TABLE, GrammarOptions()).compile(("json_schema", json.dumps(COUNTED_BY_NAME)))
    assert not any("a name may come twice" in note for note in closed.stats.narrowed)


COUNTED_BY_NAME = {"type": "object", "properties": {"a": NUMBERS}, "required": ["a"], "additionalProperties": False}
FREE = {"type": "array", "items": {"type": "integer"}}
NESTED = {"type": "array", "items": {"$ref": "#"}}
WANT_TOO_MUCH = [  # each in one way, that fsm refuses, and what no backend takes
    {"not": {"pattern": "a"}},
    FREE | {"uniqueItems": True},
    FREE | {"contains": {"type": "integer"}},
    {"if": {"pattern": "a"}, "then": {"maxLength": 3}},
    {"oneOf": [{"type": "string"}, {"pattern": "a"}]},
    {"type": "object", "minProperties": 2},
    {"type": "string", "format": "regex"},
    {"type": "object", "properties": {"a": {}}, "propertyNames": {"maxLength": 3}},
    {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False, "minProperties": 2},
    {"type": "array", "prefixItems": [NESTED, FREE | {"uniqueItems": True}]},
]


@pytest.mark.parametrize("schema", WANT_TOO_MUCH, ids=str)
def test_auto_says_once_why_no_backend_takes_a_schema(schema: dict[str, Any]) -> None:
    """And sends to no other: each backend, asked by name, refuses it too."""
    for name in ("fsm", *BOTH):
        with pytest.raises(GrammarError):
            make_backend(name, TABLE, GrammarOptions()).compile(("json_schema", json.dumps(schema)))
    with pytest.raises(GrammarError) as caught:
        make_backend("auto", TABLE, GrammarOptions()).compile(("json_schema", json.dumps(schema)))
    message = str(caught.value)
    assert not re.search("take (the backend )?(fsm|llguidance|xgrammar)", message)
    assert message.count(" at /") == 1


ADVISED = [
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "multipleOf": 0.01},
    {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "b$"}]},
    {"type": "string", "pattern": "^1", "format": "date"},
    {"type": "string", "pattern": "^(ab)+$", "minLength": 3},
    {"type": "string", "format": "email", "maxLength": 30},
    {"type": "object", "patternProperties": {"^a": {}, "^b": {}}, "additionalProperties": False},
    {"type": "object", "properties": {"é": {}}, "patternProperties": {"^a": {}}, "additionalProperties": False},
    {"enum": [[1], ["a"]], "items": {"type": "integer"}},
    FREE | {"items": FREE | {"minItems": 200, "maxItems": 200}, "minItems": 200, "maxItems": 200},
    json.loads('{"type": "array", "items": ' * 33 + "{}" + "}" * 33),
]


@pytest.mark.parametrize("schema", [*WANT_TOO_MUCH[:-1], *ADVISED], ids=str)
def test_whom_fsm_names_takes_what_it_refuses(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError) as caught:
        make_backend("fsm", TABLE, GrammarOptions()).compile(("json_schema", json.dumps(schema)))
    named = [name for name in BOTH if name in str(caught.value)]
    assert bool(named) == (schema in ADVISED)
    for name in named:
        make_backend(name, TABLE, GrammarOptions()).compile(("json_schema", json.dumps(schema)))


@pytest.mark.parametrize("pattern", ["(", "a[", "*a", "a{3,1}"])
def test_auto_reports_a_bad_expression_once(pattern: str) -> None:
    for key in (("regex", pattern), ("json_schema", json.dumps({"type": "string", "pattern": pattern}))):
        with pytest.raises(GrammarError) as caught:
            make_backend("auto", TABLE, GrammarOptions()).compile(key)
        assert str(caught.value).count(repr(pattern)) == 1
        assert not re.search("llguidance|xgrammar", str(caught.value))


def test_auto_takes_the_larger_limit_of_fsm_where_no_library_does() -> None:
    """``oneOf`` and a ``not`` of one name are of fsm alone; some 6,000 states here."""
    text = {"type": "string", "maxLength": 600}
    schema = {"properties": {"a": text, "b": text}, "required": ["a", "b"], "not": {"required": ["c"]}}
    auto = make_backend("auto", TABLE, GrammarOptions())
    grammar = auto.compile(("json_schema", json.dumps(schema)))
    assert grammar.stats.backend == "fsm"
    assert takes(grammar, '{"a": "x", "b": "y"}')
    schema["properties"]["a"] = text | {"maxLength": 60_000}
    with pytest.raises(GrammarError, match="'not' at /"):
        auto.compile(("json_schema", json.dumps(schema)))
    with pytest.raises(GrammarError, match="'not' at /"):
        make_backend("auto", TABLE, GrammarOptions(max_states=500)).compile(("json_schema", json.dumps(schema)))


SMALL_EBNF = {  # grammar -> whether every text that llguidance lets begin can end
    'root ::= word "s"\nword ::= [q-s]+': False,
    'root ::= num "\\n"\nnum ::= [0-1\\n]+': False,
    'root ::= a a\na ::= "x"+': False,
    'root ::= item | item ", " root\nitem ::= [x-z]{1,3}': True,
    'root ::= "(" root ")" root | ""': True,
    'root ::= sum\nsum ::= term ("+" term)*\nterm ::= [0-1]+ | "(" sum ")"': True,
    'root ::= [ab]* "b" "a"?': True,
}


@pytest.mark.parametrize("name", [*BOTH, "auto"])
@pytest.mark.parametrize("text", SMALL_EBNF)
def test_from_every_state_of_an_ebnf_the_end_can_be_reached(text: str, name: str) -> None:
    """Or the grammar says that it is narrowed; all texts of up to 3 characters are begun, and 4 more tried."""
    grammar = make_backend(name, TABLE, GrammarOptions()).compile(("ebnf", text))
    assert grammar.stats.backend == ("xgrammar" if name == "auto" else name)
    assert bool(grammar.stats.narrowed) == (name == "llguidance")
    assert ends_everywhere(grammar, 3) == (name != "llguidance" or SMALL_EBNF[text])


@pytest.mark.parametrize("name", ["fsm", *BACKENDS, "auto"])
@pytest.mark.parametrize("pattern", ["[q-s]+s", r"[01\n]+\n", r"\n01", "(x+)(x+)", "[ab]*ba?", "(xyz?,){1,2}"])
def test_from_every_state_of_an_expression_the_end_can_be_reached(pattern: str, name: str) -> None:
    grammar = make_backend(name, TABLE, GrammarOptions()).compile(("regex", pattern))
    assert not grammar.stats.narrowed
    assert ends_everywhere(grammar, 3)


def after_each(grammar: GrammarObject) -> Iterator[GrammarObject]:
    """The grammar after each character of these small languages that may come next."""
    for letter in b"qrs01\nxyz, ()+abu":
        ahead = grammar.copy()
        try:
            ahead.accept_token(BYTE[letter])
        except TokenRefusedError:
            continue
        yield ahead


def can_end(grammar: GrammarObject, depth: int) -> bool:
    return grammar.is_complete() or (depth > 0 and any(can_end(ahead, depth - 1) for ahead in after_each(grammar)))


def ends_everywhere(grammar: GrammarObject, depth: int) -> bool:
    return can_end(grammar, 4) and (
        not depth or all(ends_everywhere(ahead, depth - 1) for ahead in after_each(grammar))
    )


def test_auto_prefers_who_writes_all_of_a_language(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fsm would narrow goes to a library, and comes back to fsm where none takes it or none is installed."""
    any_inside = {"properties": {"a": {}}, "required": ["a"], "additionalProperties": False}
    merged = {"allOf": [any_inside, {"not": {"required": ["b"]}}]}  # beyond both libraries
    auto = make_backend("auto", TABLE, GrammarOptions())
    for schema, name in ((any_inside, "llguidance"), (merged, "fsm"), ({"type": "null"}, "fsm")):
        stats = auto.compile(("json_schema", json.dumps(schema))).stats
        assert stats.backend == name
        assert any(SHALLOW in note for note in stats.narrowed) == (schema is merged)
    monkeypatch.setattr("mini_engine.grammar.backends.find_spec", lambda name: None)
    alone = make_backend("auto", TABLE, GrammarOptions()).compile(("json_schema", json.dumps(any_inside)))
    assert alone.stats.backend == "fsm"
    assert [note.split(":")[0] for note in alone.stats.narrowed if SHALLOW in note] == ["/properties/a"]
    assert takes(alone, '{"a": [1, {}]}')
    assert not takes(alone, '{"a": [[[1]]]}')
