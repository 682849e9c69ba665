"""Receipts and ``mini-engine replay``: what is equal is said to be equal, and whatever was changed is found.

That a replay gives the bits of a busy server, in another process, is in ``tests/server/test_receipts.py``.
"""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from mini_engine import LLM, EngineConfig, SamplingParams
from mini_engine.checkpoint import TINY_MODEL
from mini_engine.cli.app import app
from mini_engine.llm import load_driver, make_engine
from mini_engine.receipt import file_digest
from mini_engine.scheduler.request import RequestOptions

PROMPT = "Once upon a time there was a fox"
EQUAL = "12 of 12 tokens and log-probabilities equal, to the bit\n"


def invoke(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def generated(folder, *options):
    """Write the receipt of an answer; return its file and what it holds."""
    file = folder / "receipt.json"
    result = invoke("generate", PROMPT, "--max-new-tokens", 12, "--batch-invariant", "--receipt", file, *options)
    assert result.exit_code == 0, result.output
    return file, json.loads(file.read_text())


def forged(receipt):
    """Give a changed receipt the digest of what it holds now. The form is written here anew, from the docs."""
    canonical = json.dumps({**receipt, "digest": None}, sort_keys=True)
    return {**receipt, "digest": sha256(canonical.encode()).hexdigest()}


def replayed(folder, receipt, *options):
    file = folder / "changed.json"
    file.write_text(json.dumps(receipt))
    return invoke("replay", file, *options)


def test_a_receipt_replays_and_its_log_probabilities_are_those_of_transformers(tmp_path):
    file, receipt = generated(tmp_path)
    result = invoke("replay", file)
    assert (result.exit_code, result.stdout) == (0, EQUAL)
    assert receipt["cannot_promise"] == []
    prompt, ids = receipt["request"]["prompt_ids"], receipt["answer"]["token_ids"]
    rows = AutoModelForCausalLM.from_pretrained(TINY_MODEL)(torch.tensor([prompt + ids])).logits[0].double()
    expected = rows.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(ids)[:, None])[:, 0]
    found = torch.tensor([float.fromhex(bits) for bits in receipt["answer"]["logprobs"]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for part, names in receipt["checkpoint"].items():
        for name, digest in (names or {}).items():
            assert sha256((TINY_MODEL / name).read_bytes()).hexdigest() == digest, part


def test_a_receipt_changes_nothing_of_the_answer_and_is_there_only_if_asked_for():
    llm = LLM(config=EngineConfig(batch_invariant=True, max_running_requests=4))
    params = SamplingParams(max_new_tokens=8, temperature=0.9, seed=3, n=2)
    without = llm.generate(PROMPT, params)
    assert llm.engine.log.listeners == []
    with_receipt = llm.generate(PROMPT, replace(params, receipt=True))
    assert [answer.token_ids for answer in with_receipt] == [answer.token_ids for answer in without]
    assert all(answer.logprobs == [] for answer in (*with_receipt, *without))
    assert [answer.receipt["request"]["params"]["seed"] for answer in with_receipt] == [3, 4]
    both = [SamplingParams(max_new_tokens=8, logprobs=2, receipt=True), replace(params, n=1)]
    reported, plain = llm.generate([PROMPT, PROMPT], both)
    assert [table[0].logprob.hex() for table in reported.logprobs] == reported.receipt["answer"]["logprobs"]
    assert all(answer.receipt is None for answer in (*without, plain))


def test_the_files_of_a_checkpoint_are_read_when_a_receipt_is_asked_for_and_once(monkeypatch):
    read = []
    whole = hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda stream, kind: read.append(Path(stream.name)) or whole(stream, kind)
    )
    file_digest.cache_clear()
    llm = LLM()
    llm.generate(PROMPT, SamplingParams(max_new_tokens=2))
    assert read == []
    llm.generate([PROMPT] * 3, SamplingParams(max_new_tokens=2, receipt=True))
    LLM().generate(PROMPT, SamplingParams(max_new_tokens=2, receipt=True))
    assert len(read) == len(set(read)) > 3
    assert TINY_MODEL / "model.safetensors" in read


def test_an_answer_that_failed_has_no_receipt_and_the_others_have_theirs():
    params = SamplingParams(max_new_tokens=2, receipt=True)
    answers = LLM().generate([PROMPT, [10**9], "\udcff", PROMPT], params)
    assert [answer.receipt is not None for answer in answers] == [True, False, False, True]


def test_what_cannot_write_a_receipt_refuses_to():
    params = SamplingParams(max_new_tokens=2, receipt=True)
    driver = load_driver()
    with pytest.raises(ValueError, match="receipt"):
        driver.complete([1], params)
    with pytest.raises(ValueError, match="receipt"):
        make_engine(driver).stream([1], params)
    with pytest.raises(ValueError, match="receipt"):
        make_engine(driver).add_request([1], params, options=RequestOptions(score_only=True))
    driver.folder = None  # as ``make_driver`` returns it
    with pytest.raises(ValueError, match="receipt"):
        make_engine(driver).add_request([1], params)
    with pytest.raises(ValueError, match="receipt is 'yes'"):
        SamplingParams(receipt="yes")


def flip_last_bit(bits):
    (number,) = struct.unpack("<q", struct.pack("<d", float.fromhex(bits)))
    return struct.unpack("<d", struct.pack("<q", number ^ 1))[0].hex()


def change_id(receipt):
    receipt["answer"]["token_ids"][4] ^= 1


def change_bit(receipt):
    receipt["answer"]["logprobs"][4] = flip_last_bit(receipt["answer"]["logprobs"][4])


def drop_last(receipt):
    receipt["answer"]["token_ids"].pop()
    receipt["answer"]["logprobs"].pop()


def change_parameter(receipt):
    receipt["request"]["params"]["seed"] += 1


def change_prompt(receipt):
    receipt["request"]["prompt_ids"].pop()


def change_text(receipt):
    receipt["answer"]["text"] += "."


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (change_id, "token 5 is id"),
        (change_bit, "token 5 is id"),
        (drop_last, "token 12 is None in the receipt"),
        (change_parameter, "token "),
        (change_prompt, "token "),
        (change_text, "text is"),
    ],
)
def test_a_change_is_found_by_the_digest_and_without_it_by_the_replay(tmp_path, change, found):
    _, receipt = generated(tmp_path, "--temperature", 1.5, "--seed", 5)
    change(receipt)
    result = replayed(tmp_path, receipt)
    assert result.exit_code == 1
    assert "the receipt was changed after it was written" in result.stdout
    result = replayed(tmp_path, forged(receipt))
    assert result.exit_code == 1
    assert "was changed" not in result.stdout
    assert result.stdout.startswith(found), result.stdout
    assert "the first fact that differs: none" in result.stdout


def test_a_changed_parameter_that_changes_no_token_is_found_by_the_digest(tmp_path):
    _, receipt = generated(tmp_path)
    receipt["request"]["params"]["top_k"] = 5
    result = replayed(tmp_path, receipt)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1] + "\n" == EQUAL


def test_a_checkpoint_may_move_and_a_changed_weight_of_it_is_found(tmp_path):
    moved = shutil.copytree(TINY_MODEL, tmp_path / "moved")
    file, receipt = generated(tmp_path, "--model", moved)
    assert receipt["checkpoint"]["folder"] == str(moved)
    moved = moved.rename(tmp_path / "elsewhere")
    gone = invoke("replay", file)
    assert gone.exit_code == 2
    assert gone.stderr.startswith("error: it cannot be replayed")
    assert invoke("replay", file, "--model", moved).stdout == EQUAL
    weights = moved / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-4] ^= 1  # the last bit of one weight
    weights.write_bytes(data)
    result = invoke("replay", file, "--model", moved)
    assert result.exit_code == 1
    assert "the first fact that differs: weights model.safetensors is" in result.stdout


def test_a_place_that_cannot_be_written_to_is_refused_before_the_model_is_loaded(tmp_path):
    result = invoke("generate", PROMPT, "--receipt", tmp_path / "no" / "such", "--model", tmp_path / "no model")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "give another --receipt" in result.stderr


def test_what_cannot_be_promised_is_said_beforehand(tmp_path):
    file, receipt = generated(tmp_path, "--temperature", 1, "--no-batch-invariant")
    assert [reason.split(":")[0] for reason in receipt["cannot_promise"]] == ["batch_invariant is off", "no seed"]
    file, receipt = generated(tmp_path, "--temperature", 1)
    result = invoke("replay", file)
    assert result.exit_code == 0
    assert result.stdout.startswith("12 of 12 log-probabilities of the given tokens equal, to the bit\n")
    assert "the receipt said beforehand: no seed" in result.stdout
    change_id(receipt)
    assert replayed(tmp_path, forged(receipt)).stdout.startswith("token 5 is id")


def test_a_fact_of_the_environment_that_differs_is_named_and_decides_nothing(tmp_path):
    _, receipt = generated(tmp_path)
    receipt["environment"]["versions"]["torch"] = "1.0"
    result = replayed(tmp_path, forged(receipt))
    assert result.exit_code == 0
    assert (
        result.stdout
        == f"{EQUAL}the first fact that differs: versions torch is 1.0 in the receipt, {torch.__version__} here\n"
    )


def test_batch_gives_receipts_to_all_lines_or_to_those_that_ask(tmp_path):
    file, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    lines = [
        {"prompt": PROMPT, "receipt": True, "n": 2, "temperature": 1, "seed": 1},
        {"prompt": PROMPT, "receipt": False},
        {"prompt": PROMPT},
        {"prompt": PROMPT, "receipt": "yes"},
        {"prompt": PROMPT, "regex": "(yes|no), because", "receipt": True},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    common = ("batch", file, "--output", answers, "--ordered", "--max-new-tokens", 12, "--batch-invariant")
    for options, expected in (((), [2, 0, 0, 0, 1]), (("--receipt", "--jump-forward"), [2, 0, 1, 0, 1])):
        answers.unlink(missing_ok=True)
        assert invoke(*common, *options).exit_code == 1  # of the line that is at fault
        reports = [json.loads(line)["answers"] for line in answers.read_text().splitlines()]
        assert [sum("receipt" in answer for answer in own) for own in reports] == expected
        assert reports[3][0]["error"] == "receipt is 'yes'; it is True or False"
        result = invoke("replay", answers)  # receipts are found where they lie
        assert result.exit_code == 0, result.stdout
        assert result.stdout.count("equal, to the bit") == sum(expected)
    assert "a grammar forced" in result.stdout
    assert reports[4][0]["receipt"]["grammar"]["backend"] == "fsm"  # "auto" is resolved


def test_a_file_without_receipts_is_refused_in_one_line(tmp_path, monkeypatch):
    file = tmp_path / "file"
    monkeypatch.setattr("mini_engine.cli.replay.MOST_BYTES", 1 << 18)
    huge = json.dumps({"receipt": 1}) + " " * (1 << 18)
    for text in ("", "{}", "no JSON", '{"receipt": true', "[1, 2]", '{"receipt": true}', "[" * 10**5, huge, "\0"):
        file.write_text(text)
        result = invoke("replay", file)
        assert (result.exit_code, result.stdout) == (2, ""), text[:40]
        assert result.stderr.startswith(f"error: {file} "), text[:40]
        assert result.stderr.count("\n") == 1, text[:40]
    assert invoke("replay", tmp_path / "no such file").exit_code == 2


def without(receipt, name):
    return {key: value for key, value in receipt.items() if key != name}


def test_a_faulty_receipt_is_one_line_and_loses_no_other(tmp_path):
    _, receipt = generated(tmp_path)
    params, engine = receipt["request"]["params"], receipt["engine"]
    faulty = [
        {"receipt": 1},
        {**receipt, "receipt": 99},
        *(without(receipt, name) for name in receipt if name != "receipt"),
        *({**receipt, name: 7} for name in ("engine", "request", "checkpoint", "grammar", "answer")),
        {**receipt, "engine": {**engine, "x": 1}},
        {**receipt, "engine": {**engine, "page_size": 1 << 80}},
        {**receipt, "request": {"prompt_ids": [10**9], "params": params}},
        {**receipt, "request": {"prompt_ids": "once", "params": params}},
        {**receipt, "request": {"prompt_ids": [1], "params": {**params, "n": 10**9}}},
        {**receipt, "request": {"prompt_ids": [1], "params": {**params, "max_new_tokens": 10**9}}},
        {**receipt, "checkpoint": {**receipt["checkpoint"], "folder": "/no/such/folder"}},
    ]
    result = replayed(tmp_path, [*faulty, receipt])
    assert result.exit_code == 2
    errors, whole = result.stderr.splitlines(), len(faulty) + 1
    for number, line in enumerate(errors, start=1):
        assert line.startswith(f"error: receipt {number} of {whole}: it cannot be replayed"), line
    assert len(errors) == len(faulty)
    assert result.stdout == f"receipt {whole} of {whole}: {EQUAL}"


def test_a_replay_on_another_cpu_names_the_first_fact_that_differs(tmp_path):
    file, _ = generated(tmp_path)
    before = os.environ.get("ONEDNN_MAX_CPU_ISA")
    other = "AVX2" if before == "SSE41" else "SSE41"
    caps = {"ONEDNN_MAX_CPU_ISA": other, "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mini_engine", "replay", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **caps}, check=False)
    assert result.returncode in (0, 1), result.stderr  # the bits of another CPU may be the same
    line = result.stdout.splitlines()[1]
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        assert line == f"the first fact that differs: caps ONEDNN_MAX_CPU_ISA is {before} in the receipt, {other} here"
    else:
        own = torch.backends.cpu.get_cpu_capability()
        assert line == f"the first fact that differs: capability is {own} in the receipt, DEFAULT here"
