"""A receipt of a busy server is replayed to the bit, alone, in another process."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Event

import pytest

from mini_engine.async_engine import Command
from mini_engine.config import EngineConfig
from mini_engine.scheduler.budget import LEAST_RATIO

from .conftest import serving

BUSY = EngineConfig(
    batch_invariant=True,
    max_running_requests=8,
    max_tokens_per_step=48,
    preemption=True,
    num_pages=16,
    prefix_cache="radix",
    grammar_backend="auto",
    jump_forward=True,
)
SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"enum": ["Mila", "Ida"]}, "age": {"type": "integer", "maximum": 9}},
    "required": ["first_name", "age"],
    "additionalProperties": False,
}
STORY = "Once upon a time there was a fox named Mila, and "
KINDS = [
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "seed": 7, "n": 2},
    {"temperature": 0.8, "seed": 8, "json_schema": json.dumps(SCHEMA), "stop": ["}"]},
    {"temperature": 0, "repetition_penalty": 1.2, "logit_bias": {"13": -4.0}, "logprobs": 1, "min_p": 0.1},
]


def body_of(number, **changes):
    """A request like the others of its kind, with a prompt that shares its beginning with all."""
    asked = {
        "prompt": STORY + "abcdefghijklmnop "[: number % 17] + "she",
        "max_tokens": 12 + number,
        "ignore_eos": True,
    }
    return {"receipt": True, **asked, **KINDS[number % len(KINDS)], **changes}


@contextmanager
def held(engine, count):
    """Let ``engine`` take no step until ``count`` requests have come."""
    gate = Event()
    engine.commands.put(Command(gate.wait))
    try:
        yield
        end = time.monotonic() + 60
        while len(engine.handles) < count and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        gate.set()


def replayed(file, **variables):
    command = [sys.executable, "-m", "mini_engine", "replay", str(file)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, check=False)


def check_busy(tmp_path, config, count):
    """Ask for ``count`` answers at once, and replay all of them."""
    with serving(config) as running:
        steps = []
        running.engine.log.listeners.append(lambda step: steps.append((step.preempted, step.forced, step.num_running)))
        with running.http() as http, ThreadPoolExecutor(count) as threads:
            http.post("/v1/completions", json=body_of(0))  # the engine's thread begins
            running.engine.scheduler.growth.ratio = LEAST_RATIO  # as after many steps: it admits more than has room
            with held(running.service.engine, count):
                asked = [threads.submit(http.post, "/v1/completions", json=body_of(n)) for n in range(count)]
            answers = [each.result().json() for each in asked]
        running.wait_until_idle()
        assert any(preempted for preempted, _, _ in steps)
        assert any(forced for _, forced, _ in steps)
        assert max(running for _, _, running in steps) > 3
        assert any(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    receipts = [choice["receipt"] for answer in answers for choice in answer["choices"]]
    assert len(receipts) == count + count // 4
    assert all(receipt["cannot_promise"] == [] for receipt in receipts)
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(map(json.dumps, answers)))
    result = replayed(file, OMP_NUM_THREADS="2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("tokens and log-probabilities equal, to the bit") == len(receipts)
    return receipts


def test_32_requests_at_once_replay_to_the_bit_in_another_process(tmp_path):
    receipts = check_busy(tmp_path, BUSY, 32)
    assert {(receipt["grammar"] or {}).get("backend") for receipt in receipts} == {None, "fsm"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compute", "dtype", "backend"),
    [("fast", "float32", "auto"), ("fast", "bfloat16", "xgrammar"), ("compiled", "float32", "llguidance")],
)
def test_so_do_those_of_other_ways_to_compute_and_other_grammars(tmp_path, compute, dtype, backend):
    check_busy(tmp_path, replace(BUSY, compute=compute, dtype=dtype, grammar_backend=backend), 32)


def test_the_answer_is_the_same_with_a_receipt_whole_or_as_a_stream(server):
    plain = server.http().post("/v1/completions", json=body_of(1, receipt=False)).json()
    asked = server.http().post("/v1/completions", json=body_of(1)).json()
    assert [choice["text"] for choice in plain["choices"]] == [choice["text"] for choice in asked["choices"]]
    assert "receipt" not in plain["choices"][0]
    assert all(choice["logprobs"] is None for choice in asked["choices"])
    for path, more in (
        ("completions", {}),
        ("chat/completions", {"prompt": None, "messages": [{"role": "user", "content": "Who is Ida?"}]}),
    ):
        body = {name: value for name, value in body_of(0, **more).items() if value is not None}
        whole = server.http().post(f"/v1/{path}", json=body).json()
        lines = server.http().post(f"/v1/{path}", json={**body, "stream": True}).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        found = [chunk["choices"][0]["receipt"] for chunk in chunks if "receipt" in chunk["choices"][0]]
        assert [receipt["answer"] for receipt in found] == [whole["choices"][0]["receipt"]["answer"]]
        assert chunks[-1]["choices"][0]["receipt"] == found[0]


def test_a_receipt_of_no_tokens_is_refused(server):
    response = server.http().post("/v1/completions", json=body_of(0, max_tokens=0))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "receipt"


def test_no_receipt_asked_no_listener():
    with serving() as running:
        assert running.http().post("/v1/completions", json=body_of(0, receipt=False)).status_code == 200
        assert running.engine.log.listeners == []
