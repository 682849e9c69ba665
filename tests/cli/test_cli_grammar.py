"""``mini-engine generate`` with a grammar: what it prints is valid, and what it refuses it says in one line."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner, Result

from mini_engine.cli.app import app

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "animal": {"enum": ["fox", "horse"]}},
    "required": ["name", "animal"],
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["generate", *arguments])


@pytest.fixture
def schema_file(tmp_path: Path) -> str:
    file = tmp_path / "person.json"
    file.write_text(json.dumps(SCHEMA))
    return str(file)


@pytest.mark.parametrize("backend", ["fsm", "xgrammar", "llguidance"])
@pytest.mark.parametrize("jump", [(), ("--jump-forward",)])
def test_a_schema_from_a_file_makes_valid_json(backend: str, jump: tuple[str, ...], schema_file: str) -> None:
    result = run(
        "Tell me about Mila.", "--chat", "--no-think", "--json-schema", schema_file, "--grammar-backend", backend, *jump
    )
    assert result.exit_code == 0, result.stderr
    Draft202012Validator(SCHEMA).validate(json.loads(result.stdout))


def test_with_thinking_only_what_follows_the_thought_is_constrained(schema_file: str) -> None:
    result = run("Tell me about Mila.", "--chat", "--json-schema", schema_file, "--max-new-tokens", "400")
    thought, answer = result.stdout.split("</think>")
    assert "<think>" in thought
    Draft202012Validator(SCHEMA).validate(json.loads(answer))


def test_choices_are_taken_as_they_are_written() -> None:
    """A choice may look like a regular expression; it is none."""
    result = run("The answer is", "--choices", "a+b, (c)", "--n", "4", "--temperature", "1.5", "--seed", "1")
    assert set(result.stdout.splitlines()) <= {"a+b", "(c)"}
    assert len(result.stdout.splitlines()) == 4


def test_the_trace_shows_the_mask_as_its_last_stage() -> None:
    result = run("Once upon", "--regex", " a time", "--trace", "--temperature", "1", "--top-k", "5")
    assert "grammar" in result.output
    assert result.output.index("grammar") < result.output.index("top-k")


def test_an_answer_that_was_cut_off_is_reported() -> None:
    result = run("Once upon", "--regex", "[a-z ]{100}", "--max-new-tokens", "3")
    assert result.exit_code == 0
    assert "not complete" in result.stderr
    assert "length" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--regex", "a", "--choices", "b,c"], "--regex and --choices are given"),
        (["--regex", "["], "unterminated character set at position 0"),
        (["--choices", "yes,,no"], "one of them is empty"),
        (["--json-schema", "/nowhere/at-all.json"], "cannot be read"),
        (["--grammar-backend", "fsm"], "changes nothing without"),
        (["--regex", "[", "--n", "2", "--temperature", "1"], "unterminated character set"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(arguments: list[str], says: str) -> None:
    result = run("Once", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
