"""Ranks as processes: the same answers, and an end that is loud, quick and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import psutil
import pytest
import torch

from mini_engine import LLM, EngineConfig, SamplingParams
from mini_engine.attention.dense import DenseAttention
from mini_engine.cli.replay import compute_again
from mini_engine.llm import load_driver
from mini_engine.ranks import processes
from mini_engine.ranks.processes import FOLLOWER
from mini_engine.sampler.driver import WorkerLostError
from tests.conftest import random_checkpoint
from tests.server.conftest import serving
from tests.support.engines import _one_thread  # noqa: F401

OFF = EngineConfig(batch_invariant=True, max_running_requests=4)
SPLIT = EngineConfig(batch_invariant=True, max_running_requests=4, tensor_parallel=2)
PROMPTS = ["Once upon a time", list(range(5, 405))]  # orders in one piece, and in two
PARAMS = SamplingParams(max_new_tokens=30, temperature=1.0, seed=3, n=2, logprobs=1, prompt_logprobs=0, receipt=True)
COMMAND = [sys.executable, "-m", "mini_engine", "generate", "Once upon a time", "--batch-invariant"]
SIGNALS = [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGKILL))]


def followers(process: int | None = None) -> list[psutil.Process]:
    """The ranks that a process, this one by default, has started and that have not ended."""
    own = [child for child in psutil.Process(process).children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in own if "become_follower" in " ".join(child.cmdline())]


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    yield
    assert not followers()


def test_two_processes_answer_as_one_does() -> None:
    one = LLM(config=OFF)
    with LLM(config=SPLIT) as split:
        expected, got = (llm.generate(PROMPTS, PARAMS) for llm in (one, split))
        for name in ("token_ids", "text", "logprobs", "prompt_logprobs", "finish_reason"):
            assert [getattr(own, name) for own in got] == [getattr(own, name) for own in expected]
        receipts = [own.receipt for own in (got[0], expected[0]) if own.receipt is not None]
        assert [own["engine"]["tensor_parallel"] for own in receipts] == [2, 1]
        assert receipts[0]["engine"]["tensor_parallel_mode"] == "gather"
        assert receipts[0]["answer"] == receipts[1]["answer"]
        for driver in (one.engine.driver, split.engine.driver):  # one at a time: a worker of the newest leads
            again = compute_again(receipts[0], None, lambda *_, own=driver: (own, one.tokenizer))  # type: ignore[misc]
            assert again["answer"] == receipts[0]["answer"]
        assert split.engine.driver.generate([5, 6, 7], 10) == one.engine.driver.generate([5, 6, 7], 10)
        with pytest.raises(RuntimeError, match="nothing outside of its worker's steps"):
            split.engine.driver.model.hidden_states(torch.tensor([5]), torch.tensor([0]), DenseAttention())


def test_an_idle_server_that_loses_a_rank_says_so() -> None:
    with serving(SPLIT) as running, running.http() as http:
        assert http.get("/health").status_code == 200
        body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 30, "temperature": 0}
        (expected,) = LLM(config=OFF).generate("Once upon a time", SamplingParams(max_new_tokens=30))
        assert running.client().completions.create(**body).choices[0].text == expected.text
        assert len(http.get("/get_server_info").json()["weight_bytes"]) == 2
        attention = http.post("/v1/attention", json={"prompt": "The cat", "layer": 0})
        assert (attention.status_code, attention.json()["error"]["message"][:20]) == (400, "tensor_parallel is 2")
        followers()[0].kill()
        end = time.monotonic() + 10
        while (health := http.get("/health")).status_code == 200:
            assert time.monotonic() < end
            time.sleep(0.05)
        for answer in (health, http.post("/v1/completions", json=body)):
            assert answer.status_code == 503
            assert "rank 1 of 2 was ended by SIGKILL" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("how", "reason"), [(signal.SIGKILL, "was ended by SIGKILL"), (signal.SIGSTOP, "gave no sign for 2 s")]
)
def test_a_rank_that_is_lost_in_a_step_ends_all_requests(
    monkeypatch: pytest.MonkeyPatch, how: signal.Signals, reason: str
) -> None:
    monkeypatch.setattr(processes, "LIMIT_S", 2.0)
    answers = []

    def ask() -> None:
        with running.http() as http:
            body = {"model": "tiny", "prompt": "The", "max_tokens": 1900, "ignore_eos": True}
            answers.append(http.post("/v1/completions", json=body))

    with serving(SPLIT) as running:
        (own,) = followers()
        asking = [Thread(target=ask) for _ in range(6)]  # four run, two wait
        for thread in asking:
            thread.start()
        while len(running.engine.entries) < 6:
            time.sleep(0.01)
        began = time.monotonic()
        own.send_signal(how)
        for thread in asking:
            thread.join(30)
        assert time.monotonic() - began < 10
        assert [answer.status_code for answer in answers] == [503] * 6
        assert all(f"rank 1 of 2 {reason}" in answer.json()["error"]["message"] for answer in answers)
        assert not psutil.wait_procs([own], 10)[1]


def test_ranks_end_when_rank_0_leaves_a_step_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with Ctrl-C in a notebook. A test must not send the signal: a job in the background of a shell ignores it."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with LLM(config=SPLIT) as llm:
        hidden_states = llm.engine.driver.model.hidden_states
        monkeypatch.setattr(llm.engine.driver.model, "hidden_states", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6, 7]])
        assert not followers()
        monkeypatch.setattr(llm.engine.driver.model, "hidden_states", hidden_states)
        with pytest.raises(WorkerLostError, match="rank 0 of 2 has left a step before its end: KeyboardInterrupt"):
            llm.generate([[5, 6, 7]])


def doctored(code: str) -> str:
    """What a rank runs that has been tampered with."""
    start = "from mini_engine.llm import"
    return FOLLOWER.replace(start, f"from mini_engine.ranks import worker\n{code}\n{start}")


@pytest.mark.slow
def test_a_rank_that_disagrees_fails_or_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    other = "own = worker.step_of\nworker.step_of = lambda order: own({**order, 'input_ids': order['input_ids'] + 1})"
    for code, reason in [(other, "was given other inputs"), ("worker.step_of = None", "has failed: TypeError")]:
        monkeypatch.setattr(processes, "FOLLOWER", doctored(code))
        with LLM(config=SPLIT) as llm:
            for _ in range(2):
                with pytest.raises(WorkerLostError, match=f"rank 1 of 2 {reason}"):
                    llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=9))
    monkeypatch.setattr(processes, "CONNECT_S", 2.0)
    threads = doctored("import torch\ntorch.set_num_threads(3)")
    connects = doctored("from mini_engine.ranks import processes\nprocesses.Gloo.create_device = lambda **_: exit(8)")
    for follower, reason in [
        ("exit(7)", "has ended with status 7"),
        (connects, "has ended with status 8"),
        (threads, "has threads 3 and rank 0 1"),
    ]:
        monkeypatch.setattr(processes, "FOLLOWER", follower)
        with pytest.raises(ValueError, match=f"rank 1 of 2 {reason}"):
            LLM(config=SPLIT)


@pytest.mark.parametrize("how", SIGNALS)
def test_no_rank_outlives_the_command(how: signal.Signals) -> None:
    command = [*COMMAND, "--tensor-parallel", "2", "--max-new-tokens", "1900"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        assert running.stdout is not None
        running.stdout.read(30)  # it is in the middle of its answer
        own = followers(running.pid)
        assert len(own) == 1
        os.killpg(running.pid, how) if how is signal.SIGINT else running.send_signal(how)
        running.wait(20)
        assert not psutil.wait_procs(own, 10)[1]
    finally:
        running.kill()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_of_four_ranks_the_lost_one_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: signal.Signals
) -> None:
    monkeypatch.setattr(processes, "LIMIT_S", 3.0)
    quicker = "from mini_engine.ranks import processes\nprocesses.LIMIT_S = 3.0\nbecome_follower"
    monkeypatch.setattr(processes, "FOLLOWER", FOLLOWER.replace("become_follower(int", f"{quicker}(int"))
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    folder = random_checkpoint(tmp_path / "model", **shape)
    one, four = (load_driver(folder, replace(OFF, tensor_parallel=size)) for size in (1, 4))
    pairs = zip(one.steps(range(3, 20), 12), four.steps(range(3, 20), 12), strict=True)
    assert all(torch.equal(own.logits, other.logits) for own, other in pairs)
    lost = next(each for each in followers() if each.environ()["RANK"] == "2")
    steps = four.steps(range(3, 20), 5)
    next(steps)
    lost.send_signal(how)
    began = time.monotonic()
    with pytest.raises(WorkerLostError, match=r"^rank 2 of 4 (was ended by SIGKILL|gave no sign for 3 s)"):
        list(steps)
    assert time.monotonic() - began < 10
    four.close()


def test_a_rank_that_hangs_while_it_makes_a_pool_is_named() -> None:
    with LLM(config=SPLIT) as llm:
        followers()[0].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(ValueError, match="rank 1 of 2 gave no sign for 6 s"):
            llm.engine.driver.make_worker(9)
        assert time.monotonic() - began < 10


def test_a_model_that_cannot_be_split_starts_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "start", None)
    with pytest.raises(ValueError, match=r"tensor_parallel is 3, which does not divide .*; choose one of 1, 2$"):
        LLM(config=replace(SPLIT, tensor_parallel=3))


@pytest.mark.parametrize("size", ["2", "4"])
def test_what_torchrun_has_not_started_is_refused(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ValueError, match=f"WORLD_SIZE {size}, RANK None, .*; let it start 2 processes, or unset WORLD"):
        LLM(config=SPLIT)


@pytest.mark.slow
def test_torchrun_starts_the_ranks_as_well() -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *COMMAND[1:]]
    options = ["--max-new-tokens", "20", "--json"]
    answers = []
    for command in ([*run, *options, "--tensor-parallel", "2"], [*COMMAND, *options]):
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=200)
        answers.append(json.loads(ended.stdout)["token_ids"])
    assert answers[0] == answers[1]
