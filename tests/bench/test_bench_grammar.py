"""The benchmark of grammars: its vocabulary, its texts, its arithmetic, and one short run through the command."""

import json

import pytest
from typer.testing import CliRunner

from mini_engine.bench.grammar import coverage, instances
from mini_engine.bench.grammar.loads import (
    large_tokenizer,
    make_merges,
    tiny_tokenizer,
)
from mini_engine.bench.grammar.steps import TimedStep, decode_steps, share_of, spellings, step_row
from mini_engine.cli.app import app
from mini_engine.grammar.base import REGISTRY
from mini_engine.grammar.fsm import FsmBackend
from mini_engine.grammar.tokens import TokenTable
from mini_engine.outputs import RequestOutput, StepOutput

SMALL = 3000  # tokens of a vocabulary made as the large one is


@pytest.fixture(scope="module")
def tokenizer():
    return large_tokenizer(0, SMALL)


def table_of(tokenizer):
    return TokenTable.from_tokenizer(
        tokenizer, tokenizer.get_vocab_size(), frozenset({tokenizer.token_to_id("<|im_end|>")})
    )


def test_the_made_tokenizer_spells_any_text_and_has_broken_characters(tokenizer):
    for text in ('{"größe": "日本語", "😀": 1e-5}\n', "a shy fox", "<think>x</think>"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    spelled = [token for token in table_of(tokenizer).token_bytes if token]
    assert len(spelled) == len(set(spelled)) == SMALL
    broken = [token for token in spelled[256:] if not is_text(token)]
    assert broken
    assert make_merges(300, 1) == make_merges(300, 1) != make_merges(300, 2)


def is_text(token):
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True


def timed(seconds, mask, sizes=(1, 1)):
    output = StepOutput(0, 0.0, {}, [], [(str(n), 0, size) for n, size in enumerate(sizes)], {}, [], 0, 0, 0, 0)
    return TimedStep(output, seconds, {"poll": 0.0, "mask": mask, "accept": 0.0})


def test_shares_and_ratios_of_steps():
    assert decode_steps([timed(9, 9, (32, 32)), timed(1, 0), timed(1, 0, (1,))], 2) == [timed(1, 0)]
    assert share_of([timed(4, 1), timed(4, 2)]) == 3 / 8
    plain = [[timed(1, 0)], [timed(1, 0)], [timed(2, 0)], [timed(10, 0)]]
    own = [[timed(8, 4)], [timed(2, 1)], [timed(8, 1)], [timed(11, 1)]]
    row = step_row("tiny", 2, "fsm", {"no grammar": plain, "fsm": own})
    assert (row.steps, row.cold_share, row.over_plain, row.share) == (1, 0.5, 2, 0.125)  # the median of 2, 4 and 1.1
    assert (row.step_ms, row.parts_ms["mask"]) == (8000, 1000)


def test_a_spelling_is_compared_without_the_stop_token():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode('{"name": "Mila"}').ids
    whole = RequestOutput("0", [], [*ids, 1021], '{"name": "Mila"}', "stop")
    assert spellings(tokenizer, whole) == (ids, ids)
    bytewise = [tokenizer.token_to_id(character) for character in '{"']
    cut = RequestOutput("0", [], bytewise, '{"', "length")
    assert spellings(tokenizer, cut)[0] == bytewise != spellings(tokenizer, cut)[1]


def test_a_short_run_reports_every_part():
    arguments = ["bench", "grammar", "--quick", "--backend", "fsm", "--backend", "outlines"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert result.stdout.splitlines()[0] == report["command"]
    assert {row["grammar"] for row in report["masks"] if row["backend"] == "fsm"} == {"number", "person"}
    steps = {(row["backend"], row["rows"]): row for row in report["steps"]}
    assert {("no grammar", 1), ("fsm", 1), ("no grammar", 2), ("fsm", 2)} <= steps.keys()
    assert steps["no grammar", 2]["parts_ms"]["mask"] == 0 < steps["fsm", 2]["parts_ms"]["mask"]
    (jump,) = report["jumps"]
    without, with_forced = jump["passes"]
    assert with_forced < without / 3
    assert jump["tokens"][0] == without  # a pass brings a token
    assert jump["forced"] == pytest.approx(1 - with_forced / jump["tokens"][1])


def test_what_a_backend_cannot_do_is_reported():
    result = CliRunner().invoke(
        app, ["bench", "grammar", "--model", "tiny", "--parts", "masks", "--backend", "fsm", "--rounds", "1"]
    )
    report = json.loads(result.stdout.splitlines()[-1])
    assert list(report["unavailable"]) == ["fsm, any JSON"]
    assert not report["steps"]
    assert not report["jumps"]
    assert {row["grammar"] for row in report["masks"]} == {"email", "number", "string", "person"}


# ----------------------------------------------------------------------------------------------------------- coverage

TAKEN = {
    "number.json": {"type": "integer", "minimum": 3, "maximum": 40},
    "deep/day.json": {"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 1},
    "deep/draft.json": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "minimum": 3,
        "exclusiveMinimum": True,
        "type": "integer",
        "maximum": 5,
    },
}
LEFT_OUT = {"if.json": {"if": {"pattern": "a"}, "then": {"type": "null"}}, "not JSON.json": None}


@pytest.fixture
def folder(tmp_path):
    for name, schema in (TAKEN | LEFT_OUT).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{" if schema is None else json.dumps(schema))
    return tmp_path


def coverage_of(*options):
    result = CliRunner().invoke(app, ["bench", "grammar", "--parts", "coverage", *map(str, options)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])["coverage"]


def test_coverage_of_a_folder(folder):
    (row,) = coverage_of("--schemas", folder)
    assert (row["backend"], row["schemas"], row["compiled"]) == ("fsm", 5, 3)
    spelled = "the JSON Schema is not JSON: Expecting property name enclosed in double quotes at line …, column …"
    assert row["refusals"] == {"keyword 'pattern'": 1, spelled: 1}
    assert (row["texts"] + row["unfinished"], row["invalid"]) == (3 * coverage.NUM_TEXTS, [])
    assert row["texts"] > 2 * coverage.NUM_TEXTS
    assert 0 < row["cpu_p50_s"] <= row["cpu_p99_s"] <= row["cpu_max_s"]


def test_coverage_of_lines_with_several_backends(tmp_path):
    lines = tmp_path / "schemas.jsonl"
    spelled = [json.dumps(schema) for schema in TAKEN.values()]
    lines.write_text("\n".join([spelled[0], json.dumps({"json_schema": spelled[1]}), "", spelled[2], "{"]))
    rows = coverage_of("--schemas", lines, "--backend", "fsm", "--backend", "llguidance")
    assert [(row["backend"], row["schemas"], row["compiled"], row["invalid"]) for row in rows] == [
        ("fsm", 4, 3, []),
        ("llguidance", 4, 3, []),
    ]


def test_drawn_schemas_are_the_same_for_the_same_seed(folder):
    def names(count, seed):
        return [case.name for case in coverage.read_schemas(folder, count, seed)]

    assert names(0, 0) == sorted(TAKEN | LEFT_OUT)
    assert names(3, 1) == names(3, 1) == names(4, 1)[:3] != names(3, 2)
    assert set(names(4, 1)) < set(names(5, 1)) == set(names(9, 1))


class Careless(FsmBackend):
    """Compiles another schema than it was given."""

    def build(self, kind, text):
        return super().build(kind, '{"type": "integer", "minimum": 30, "maximum": 50}')


def test_an_invalid_text_is_counted_and_named(folder, monkeypatch):
    monkeypatch.setitem(REGISTRY, "fsm", Careless)
    (folder / "not JSON.json").unlink()
    (row,) = coverage_of("--schemas", folder)
    assert (row["compiled"], row["texts"]) == (4, 4 * coverage.NUM_TEXTS)
    invalid = [name for name, _ in row["invalid"]]
    assert {name: invalid.count(name) for name in ("deep/day.json", "deep/draft.json", "if.json")} == {
        "deep/day.json": 8,
        "deep/draft.json": 8,
        "if.json": 8,
    }
    assert all(int(text) > 40 for name, text in row["invalid"] if name == "number.json")


def tests_of(*pairs):
    return [{"data": data, "valid": valid} for data, valid in pairs]


INT = {"type": "integer"}
MEMBERS = {"type": "object", "properties": {"a": INT, "b": {"enum": [1]}}}
GROUPS = [
    {"schema": INT, "tests": tests_of((3, True), (-12, True), (1.5, False), ("3", False), (None, False))},
    {"schema": MEMBERS, "tests": tests_of(({"b": 1, "a": 2}, True), ({"a": 1, "c": "x"}, True), ({"a": "x"}, False))},
    {"schema": {"items": INT}, "tests": tests_of(([1.0], True), ("x", True), ({}, True), ([], True))},
    {"schema": {"type": "string", "format": "time"}, "tests": tests_of(("10:00:00.1234567Z", True), ("10", False))},
    {"schema": {"type": "string"}, "tests": tests_of(("e\u0301 \ud83d\ude00", True), ("\ud800", True))},
    {"schema": {"contains": INT}, "tests": tests_of(([1], True))},
]


def test_instances_are_judged_and_a_false_reject_is_laid_to_a_note(tmp_path):
    """Which are valid says the file, as the suites do; jsonschema agrees."""
    for group in GROUPS:
        for test in group["tests"]:
            judge = coverage.validator_of(group["schema"])
            assert judge.is_valid(test["data"]) == test["valid"]
    (tmp_path / "suite.json").write_text(json.dumps(GROUPS))
    (row,) = coverage_of("--schemas", tmp_path)
    judged = row["instances"]
    assert (row["schemas"], row["compiled"]) == (6, 5)
    assert (judged["valid"], judged["invalid"], judged["right"], judged["false_accepts"]) == (11, 5, 1, [])
    assert judged["stated"] == {
        "members come in the order of the schema": 1,
        "members that no schema declares are not written": 1,
        "integers have no point and no exponent": 1,
        "without a type, other values are valid too, and only this is written:": 2,
        "the format": 1,
    }
    assert judged["silent"] == [["suite.json#4", '"\\u⇥d800"']]


def test_a_false_accept_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(REGISTRY, "fsm", Careless)
    (tmp_path / "one.json").write_text(json.dumps({"schema": INT, "tests": tests_of((40, False), (3, True))}))
    (row,) = coverage_of("--schemas", tmp_path)
    assert row["instances"]["false_accepts"] == [["one.json", "40"]]
    assert row["instances"]["silent"] == [["one.json", "3⇥"]]
    assert row["instances"]["right"] == 0


@pytest.mark.parametrize(
    ("text", "place", "part"),
    [
        ('{"a": 1, "c": 2}', 7, "other name"),
        ('{"a": 1, "b": 2}', 7, "declared name"),
        ('{"c": 1}', 2, "other name"),
        ('{"a": 1}', 7, "declared name"),
        ('{"a": "é,]x"}', 10, "inside a string"),
        ('{"a": [1, 2]}', 8, "items"),
        ('{"a": [1, 2]}', 11, "items"),
        ('{"a": [1.25]}', 9, "inside a fraction"),
        ('{"a": null}', 6, "value"),
        ("12345678901234567890", 15, "inside a long number"),
        ("-2", 2, "inside a number"),
        ("[]", 0, "value"),
    ],
)
def test_what_stands_where_a_text_is_refused(text, place, part):
    assert instances.part_at(text, place, {"items": MEMBERS}) == part


@pytest.mark.parametrize("options", ["--parts coverage", "--schemas .", "--parts coverage --schemas none"])
def test_coverage_needs_schemas_and_schemas_need_coverage(options):
    assert CliRunner().invoke(app, ["bench", "grammar", *options.split()]).exit_code == 2
