"""``mini-engine batch``: each answer is what it would be alone, errors keep their places, and nothing is lost.

What Ctrl-C, a full disk and a closed pipe do is seen in processes of their own.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.cli import batch as cli_batch
from mini_engine.cli.app import app
from mini_engine.cli.batch_lines import PARAMETERS, PROMPT_KEYS, AnswerWriter, Line, answered
from mini_engine.config import EngineConfig
from mini_engine.llm import load_driver
from mini_engine.outputs import RequestOutput
from mini_engine.sampler.params import SamplingParams

TOKENIZER = load_tokenizer(TINY_MODEL)


def run(tmp_path, lines, *arguments):
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    result = CliRunner().invoke(app, ["batch", str(file), "--ordered", *arguments])
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    has_failed = any("error" in answer for report in reports for answer in report["answers"])
    assert result.exit_code == has_failed, result.output
    return reports, result.stderr


@pytest.mark.parametrize("cache", [[], ["--prefix-cache", "--page-size", "4"]])
def test_answers_are_those_of_a_run_alone_in_the_order_of_the_lines(tmp_path, cache):
    asked = [
        "Once upon a time",
        "",
        {"prompt": "Once upon a time there was", "temperature": 0.9, "seed": 4, "max_new_tokens": 9},
        {"token_ids": [352, 289, 256], "stop_token_ids": [13]},
        {"messages": [{"role": "user", "content": "Who is Ida?"}], "n": 2, "temperature": 1.0, "seed": 1},
    ]
    reports, said = run(tmp_path, asked, "--batch-invariant", "--max-new-tokens", "12", *cache)
    driver = load_driver(engine=None)
    alone = load_driver(engine=type(driver.config)(batch_invariant=True, compute="packed"))
    ids = TOKENIZER.encode("Once upon a time", add_special_tokens=False)
    expected = alone.complete(ids, SamplingParams(max_new_tokens=12))[0]
    assert reports[0]["answers"][0]["token_ids"] == expected.token_ids
    params = SamplingParams(temperature=0.9, seed=4, max_new_tokens=9)
    ids = TOKENIZER.encode("Once upon a time there was", add_special_tokens=False)
    assert reports[1]["answers"][0]["token_ids"] == alone.complete(ids, params)[0].token_ids
    third = reports[2]["answers"][0]
    assert (third["finish_reason"], third["matched"]) in [("stop", 13), ("length", None)]
    assert [len(report["answers"]) for report in reports] == [1, 1, 1, 2]
    assert [report["line"] for report in reports] == [0, 2, 3, 4]  # the empty line counts
    assert "4 requests" in said
    assert ("prefix cache" in said) == bool(cache)


FAULTY = [  # a line, and a part of its error
    ({"prompt": "x", "tempature": 1}, "'tempature'"),
    ('{"prompt": "x"', "not a JSON object"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": 3}, "prompt is 3"),
    ({"prompt": "x", "token_ids": [1]}, "exactly one"),
    ({"token_ids": [99_999]}, "99999"),
    ({"token_ids": []}, "0 tokens"),
    ({"prompt": "x", "stop": [""]}, "stop"),
    ({"prompt": "x", "max_new_tokens": "many"}, "max_new_tokens"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias has the key 'a'; keys are token ids"),
    ({"prompt": "x", "logit_bias": {"5" * 5_000: 1}}, "555; keys are token ids"),
    ({"prompt": "x", "logit_bias": {"5": 1, "05": 1}}, "logit_bias names token id 5 twice"),
    ('{"prompt": "x", "logit_bias": {"5": 1, "5": 1}}', "'5' is given twice"),
    ('{"prompt": "x", "seed": 1, "seed": 2}', "'seed' is given twice"),
    ('{"prompt": "x", "seed": ' + "1" * 5_000 + "}", "the number 111111111… has 5000 digits; give at most 300"),
    ({"prompt": "a\ud800"}, "half of a surrogate pair"),
    ({"prompt": "x", "stop": ["a\ud800"]}, "the line has '\\ud800'"),
]


def test_a_faulty_line_has_its_error_in_its_place(tmp_path):
    reports, said = run(tmp_path, [*(line for line, _ in FAULTY), "Once"], "--max-new-tokens", "3")
    errors = [report["answers"][0].get("error") for report in reports]
    for error, (_, part) in zip(errors[:-1], FAULTY, strict=True):
        assert error is not None
        assert part in error
    assert errors[-1] is None
    assert said.splitlines()[-1] == (
        f"{len(FAULTY)} of {len(FAULTY) + 1} requests failed; their errors are in standard output"
    )


JARGON = re.compile(
    r"Traceback|invalid literal|codec can't|has no attribute|not subscriptable|unhashable|NoneType|Exceeds the limit|"
    r"\w+(?<!The )Error\b|Errno|<class|object at 0x|positional argument|unexpected keyword"
)
ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 5, 1023, 1024, 2**63, -(10**30), 10**30, 0.5, 1e308, float("nan"), float("inf")])
    | st.sampled_from(["", "5", "05", "\ud800", "(", "[", "a|b", "null", "{}", "9" * 400])
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["5", "05", "1024", "-1", "", "role", "content", "type", "x"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from((*PROMPT_KEYS, *PARAMETERS, "zzz")), ODD), min_size=20, max_size=60))
def test_odd_values_are_their_own_lines_errors_in_plain_words(tmp_path_factory, odd):
    """Every field with any value: no other line is changed, and no error speaks of the inside of a library."""
    lines = []
    for field, value in odd:
        lines += [{"max_new_tokens": 2} | ({} if field in PROMPT_KEYS else {"prompt": "Once"}) | {field: value}]
    lines[10:10] = ["Once upon a time"]
    reports, _ = run(tmp_path_factory.mktemp("odd"), lines, "--batch-invariant", "--max-new-tokens", "5")
    assert [report["line"] for report in reports] == list(range(len(lines)))
    ids = TOKENIZER.encode("Once upon a time", add_special_tokens=False)
    alone = load_driver(engine=EngineConfig(batch_invariant=True, compute="packed"))
    assert reports[10]["answers"][0]["token_ids"] == alone.complete(ids, SamplingParams(max_new_tokens=5))[0].token_ids
    for line, report in zip(lines, reports, strict=True):
        for answer in report["answers"]:
            found = JARGON.search(answer.get("error", ""))
            assert found is None, (line, answer["error"])


@pytest.mark.parametrize("ebnf", ["\x80", "root ::= \u00e9", "\U0001f600"])
def test_a_character_that_a_library_cuts_in_two_is_no_jargon(tmp_path, ebnf):
    (report,), _ = run(tmp_path, [{"prompt": "Once", "ebnf": ebnf, "max_new_tokens": 2}])
    error = report["answers"][0]["error"]
    assert "ebnf" in error
    assert JARGON.search(error) is None, error


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


def command(*arguments, **options):
    """Start the command in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "mini_engine", "batch", *map(str, arguments)]
    return subprocess.Popen(line, env=environment, text=True, stderr=subprocess.PIPE, **options)


def wait_for_lines(process, output, count):
    """Wait until so many answers are in the file."""
    while not (output.exists() and output.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)


COUNT = 1_200  # of requests: more than are answered before a signal comes


def write_requests(file, count, longest=1):
    requests = ({"token_ids": [i % 900 + 1], "max_new_tokens": i % longest + 1} for i in range(count))
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [[], ["--ordered"]])
def test_an_interrupted_run_keeps_its_answers_and_goes_on(tmp_path, ordered):
    file = write_requests(tmp_path / "requests.jsonl", COUNT, longest=4)
    output = tmp_path / "answers.jsonl"
    process = command(file, "--output", output, *ordered)
    wait_for_lines(process, output, 50)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=120)[1]
    first = output.read_bytes()
    assert process.returncode == 130
    assert int(re.search(r"interrupted: (\d+) lines that have begun", said)[1]) <= 32  # of a window of 128
    assert f"mini-engine batch {file} --output {output} --resume" in said
    assert first.endswith(b"\n")
    indices = [json.loads(line)["line"] for line in first.splitlines()]
    assert 50 <= len(indices) < COUNT
    assert len(set(indices)) == len(indices)
    if ordered:
        assert indices == list(range(len(indices)))
    assert all(json.loads(line)["answers"][0]["finish_reason"] in ("length", "stop") for line in first.splitlines())
    output.write_bytes(first[:-9])  # torn, as by a second Ctrl-C
    assert CliRunner().invoke(app, ["batch", str(file), "--output", str(output), "--resume", *ordered]).exit_code == 0
    after = output.read_bytes()
    kept = first[: first[:-9].rfind(b"\n") + 1]
    assert after.startswith(kept)
    indices = [json.loads(line)["line"] for line in after.splitlines()]
    assert sorted(indices) == list(range(COUNT))
    assert not ordered or indices == sorted(indices)


@pytest.mark.parametrize(
    ("file", "output", "message"),
    [
        ("nowhere.jsonl", "out.jsonl", "nowhere.jsonl cannot be read"),
        (".", "out.jsonl", "cannot be read"),
        ("requests.jsonl", "full.jsonl", "has something in it; add --resume"),
        ("requests.jsonl", "no/such/folder/out.jsonl", "cannot be written"),
    ],
)
def test_files_are_opened_before_the_model_is_loaded(tmp_path, monkeypatch, file, output, message):
    monkeypatch.setattr(cli_batch, "start", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "requests.jsonl").write_text("Once\n")
    (tmp_path / "full.jsonl").write_text("{}\n")
    result = CliRunner().invoke(app, ["batch", str(tmp_path / file), "--output", str(tmp_path / output)])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.slow
def test_a_full_disk_and_a_closed_pipe_are_one_line(tmp_path):
    file = write_requests(tmp_path / "requests.jsonl", COUNT)
    with open("/dev/full", "wb") as full:
        process = command(file, stdout=full)
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert "No space left" in said
    assert len(said.strip().splitlines()) == 1
    process = command(file, stdout=subprocess.PIPE)
    assert json.loads(process.stdout.readline())["line"] == 0
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(timeout=120) == 2
    assert "Broken pipe" in said
    assert len(said.strip().splitlines()) == 1


def test_a_name_of_another_engine_is_its_own_line_s_error_and_answered_with_ours(tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "Once", "max_tokens": 2}\n{"prompt": "Once", "page_size": 2}\n{"prompt": "Once"}\n')
    result = CliRunner().invoke(
        app, ["batch", str(file), "--ordered", "--max-new-tokens", "2", "--max-model-len", "99"]
    )
    errors = [json.loads(line)["answers"][0].get("error") for line in result.stdout.splitlines()]
    assert "max_tokens is called max_new_tokens here" in errors[0]
    assert "page_size is a field of EngineConfig, not of SamplingParams" in errors[1]
    assert errors[2] is None


def test_only_line_feeds_end_lines_and_a_bad_byte_is_its_own_lines_error(tmp_path):
    file = tmp_path / "requests.jsonl"
    texts = ["a\u2028b", "a\x85b", "a\x0cb", "a\rb"]
    raw = [b"\xef\xbb\xbf" + json.dumps({"prompt": "Once"}).encode()]
    raw += [json.dumps({"prompt": text}, ensure_ascii=False).encode() for text in texts[:2]]
    raw += [text.encode() for text in texts[2:]]
    raw += [b"good \xff bad", b"[" * 50, b'{"prompt": ' + b"[" * 200_000, b'{"messages": [{}]}', b"Twice\r"]
    raw += [
        b'{"messages": [{"role": "user", "content": null}]}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "n": 1000000000}',
    ]
    file.write_bytes(b"\n".join(raw))
    result = CliRunner().invoke(app, ["batch", str(file), "--ordered", "--max-new-tokens", "2"])
    assert result.exit_code == 1, result.output
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert [report["line"] for report in reports] == list(range(len(raw)))
    wrong = {report["line"]: report["answers"][0].get("error") for report in reports}
    assert [index for index, error in wrong.items() if error is not None] == [5, 7, 8, 10, 11, 12]
    assert "0xff" in wrong[5]
    assert "nested" in wrong[7]
    counts = [len(TOKENIZER.encode(text, add_special_tokens=False)) for text in ["Once", *texts]]
    assert [report["prompt_tokens"] for report in reports[:5]] == counts
    assert reports[9]["prompt_tokens"] == len(TOKENIZER.encode("Twice", add_special_tokens=False))


def test_a_line_with_a_schema_is_answered_and_options_of_generate_hold(tmp_path):
    asked = [{"prompt": "Once", "json_schema": {"type": "boolean"}}, "Once", {"prompt": "Once", "regex": "(a|b)"}]
    reports, _ = run(
        tmp_path, asked, "--grammar-backend", "fsm", "--preset", "creative", "--seed", "1", "--logprobs", "1"
    )
    assert reports[0]["answers"][0]["text"] in ("true", "false")
    assert reports[0]["answers"][0]["is_grammar_complete"] is True
    assert all(len(table) == 2 for table in reports[1]["answers"][0]["logprobs"])
    assert reports[2]["answers"][0]["text"] in "ab"
    banned = {"prompt": "Once", "allowed_token_ids": [300], "logprobs": 2, "logprobs_mode": "processed"}
    (said,), _ = run(tmp_path, [banned], "--max-new-tokens", "1")  # JSON has no minus infinity
    assert [entry["logprob"] for entry in said["answers"][0]["logprobs"][0]] == [0.0, 0.0, None]
    (said,), _ = run(tmp_path, ["Once"], "--choices", "yes,no", "--chat")
    assert said["answers"][0]["text"] in ("yes", "no")
    assert said["prompt_tokens"] > 1


def test_what_is_not_an_answer_is_neither_cut_nor_gone_on_with(tmp_path):
    file = write_requests(tmp_path / "requests.jsonl", 2)
    other = tmp_path / "other.txt"
    for text in ("a treasure without an end of line", '{"line": 0}\n', "[1]\n", '{"lin'):
        other.write_text(text)
        result = CliRunner().invoke(app, ["batch", str(file), "--output", str(other)])
        assert (result.exit_code, other.read_text()) == (2, text)
        with pytest.raises(ValueError, match="is not an answer") if text != '{"lin' else pytest.MonkeyPatch.context():
            answered(other)
    assert other.read_text() == ""  # torn before its first key: an answer


def test_answers_of_another_file_are_refused(tmp_path):
    file = write_requests(tmp_path / "requests.jsonl", 3)
    output = tmp_path / "answers.jsonl"
    assert CliRunner().invoke(app, ["batch", str(file), "--output", str(output)]).exit_code == 0
    before = output.read_bytes()
    file.write_text("Once\n" * 3)
    result = CliRunner().invoke(app, ["batch", str(file), "--output", str(output), "--resume"])
    assert result.exit_code == 2
    assert "line 0" in result.stderr
    assert output.read_bytes() == before


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 30), min_size=1, unique=True), st.randoms(), st.integers(0, 3_000))
def test_a_file_cut_anywhere_goes_on(tmp_path_factory, places, random, cut):
    """Answers in any order of ending: --ordered brings theirs; a file torn at any byte keeps its whole lines."""
    params = SamplingParams()
    lines = [Line(index, f"{index:x}", [1], params) for index in sorted(places)]
    file = tmp_path_factory.mktemp("cut") / "answers.jsonl"
    with file.open("wb") as stream:
        writer = AnswerWriter(stream, "answers", ordered=True)
        for line in lines:
            writer.expect(line)
        for line in random.sample(lines, len(lines)):
            writer.write(line, [RequestOutput("", [], text="a" * line.index, finish_reason="stop")])
    raw = file.read_bytes()
    assert [json.loads(line)["line"] for line in raw.splitlines()] == sorted(places)
    torn = raw[:cut]
    file.write_bytes(torn)
    whole = torn.count(b"\n")
    assert answered(file) == {line.index: line.digest for line in lines[:whole]}
    assert file.read_bytes() == b"".join(raw.splitlines(keepends=True)[:whole])


@pytest.mark.slow
def test_the_benchmark_counts_every_line():
    result = CliRunner().invoke(app, ["bench", "batch", "--lines", "512", "--lines", "600", "--rounds", "1"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [row["lines"] for row in rows] == [512, 600]
    assert rows[1]["ratio"] == pytest.approx(rows[1]["seconds_per_line"] / rows[0]["seconds_per_line"])


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(tmp_path):
    """The long answers that have begun would take many seconds more."""
    file, output = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    long = {"token_ids": [1], "max_new_tokens": 1_000, "ignore_eos": True}
    file.write_text('{"token_ids": [5], "max_new_tokens": 1}\n' + (json.dumps(long) + "\n") * 5_000)
    process = command(file, "--output", output)
    wait_for_lines(process, output, 1)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "\n"
    assert "Ctrl-C again stops at once" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert [json.loads(line)["line"] for line in output.read_bytes().splitlines()] == [0]
