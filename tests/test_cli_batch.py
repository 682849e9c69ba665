"""``mini-engine batch``: answers in the order of the lines, each what it would be alone, errors in their places."""

import json

import pytest
from typer.testing import CliRunner

from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.cli import app
from mini_engine.sampler.params import SamplingParams
from mini_engine.startup import load_driver

TOKENIZER = load_tokenizer(TINY_MODEL)


def run(tmp_path, lines, *arguments):
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    result = CliRunner().invoke(app, ["batch", str(file), *arguments])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()], result.stderr


@pytest.mark.parametrize("cache", [[], ["--prefix-cache", "--page-size", "4"]])
def test_answers_are_those_of_the_lonely_run_in_the_order_of_the_lines(tmp_path, cache):
    asked = [
        "Once upon a time",
        "",
        {"prompt": "Once upon a time there was", "temperature": 0.9, "seed": 4, "max_new_tokens": 9},
        {"token_ids": [352, 289, 256], "stop_token_ids": [13]},
        {"messages": [{"role": "user", "content": "Who is Ida?"}], "n": 2, "temperature": 1.0, "seed": 1},
    ]
    reports, told = run(tmp_path, asked, "--batch-invariant", "--max-new-tokens", "12", *cache)
    driver = load_driver(engine=None)
    alone = load_driver(engine=type(driver.config)(batch_invariant=True, linear="packed"))
    ids = TOKENIZER.encode("Once upon a time", add_special_tokens=False)
    expected = alone.complete(ids, SamplingParams(max_new_tokens=12))[0]
    assert reports[0]["answers"][0]["token_ids"] == expected.token_ids
    params = SamplingParams(temperature=0.9, seed=4, max_new_tokens=9)
    ids = TOKENIZER.encode("Once upon a time there was", add_special_tokens=False)
    assert reports[1]["answers"][0]["token_ids"] == alone.complete(ids, params)[0].token_ids
    third = reports[2]["answers"][0]
    assert (third["finish_reason"], third["matched"]) in [("stop", 13), ("length", None)]
    assert [len(report["answers"]) for report in reports] == [1, 1, 1, 2]
    assert "4 requests" in told
    assert ("prefix cache" in told) == bool(cache)


def test_a_faulty_line_has_its_error_in_its_place(tmp_path):
    asked = [
        {"prompt": "x", "tempature": 1},
        '{"prompt": "x"',
        {"prompt": "x", "temperature": -1},
        {"prompt": 3},
        {"prompt": "x", "token_ids": [1]},
        {"token_ids": [99_999]},
        {"token_ids": []},
        {"prompt": "x", "stop": [""]},
        {"prompt": "x", "max_new_tokens": "many"},
        {"prompt": "x", "logit_bias": {"a": 1}},
        "Once",
    ]
    reports, told = run(tmp_path, asked, "--max-new-tokens", "3")
    errors = [report["answers"][0].get("error") for report in reports]
    for error, part in zip(
        errors[:-1],
        ["'tempature'", "no JSON object", "temperature", "prompt is 3", "exactly one", "99999", "0 tokens", "stop",
         "max_new_tokens", "'a'"],
        strict=True,
    ):  # fmt: skip
        assert error is not None
        assert part in error
    assert errors[-1] is None
    assert "10 ended with an error" in told


def test_stop_strings_end_answers_and_are_not_shown(tmp_path):
    (report,), _ = run(tmp_path, [{"prompt": "Record: name Mila, age 7"}], "--stop", "p", "--max-new-tokens", "30")
    (answer,) = report["answers"]
    assert (answer["finish_reason"], answer["matched"]) == ("stop", "p")
    assert "p" not in answer["text"]


def test_a_bias_is_given_by_the_text_of_an_id(tmp_path):
    (report,), _ = run(tmp_path, [{"prompt": "Once", "logit_bias": {"7": 100}, "max_new_tokens": 3}])
    assert report["answers"][0]["token_ids"] == [7, 7, 7]


def test_requests_come_from_standard_input():
    result = CliRunner().invoke(app, ["batch", "-", "--max-new-tokens", "2"], input="Once\n")
    assert len(json.loads(result.stdout.splitlines()[0])["answers"][0]["token_ids"]) == 2


def test_what_cannot_work_is_one_line_and_exit_code_2(tmp_path):
    for arguments in (["nowhere.txt"], ["-", "--policy", "fifo"], ["-", "--seed", "3"], ["-", "--eviction", "lfu"]):
        result = CliRunner().invoke(app, ["batch", *arguments], input="Once")
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
