"""Verdicts decide what students get, so the comparison itself is tested: it finds each kind of difference."""

import functools
import json
import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from smoke.course.report import explain, line
from smoke.course.work import tasks_of
from smoke.framework.bank import load_pitfalls
from smoke.framework.catalogue import catalogue
from smoke.framework.check import (
    Check,
    Failure,
    ProbeError,
    Registry,
    Result,
    all_checks,
    block_dependents,
    judge,
    registries,
    require_plain,
    result_of_error,
    run_probe,
    tasks_needed,
)
from smoke.framework.compare import bitwise, close, differences
from smoke.framework.manifest import Task, load_manifest
from smoke.runner.runner import Candidate
from smoke.runner.transport import MAX_DEPTH, MAX_ELEMENTS, MAX_ITEMS, MAX_JSON_BYTES, read_answer, write_answer

ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (ONES, ONES.double()),
        (ONES, torch.ones(3, 2)),
        (ONES, torch.ones(2, 3).index_fill(1, torch.tensor([2]), 1 + 1e-7)),
        (ONES, torch.full((2, 3), float("nan"))),
        (ONES, None),
        ([1, 2], [1]),
        ([1, 2], [2, 1]),
        (1, True),
        ("a", "b"),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1}, {}),
        ({"a": [ONES]}, {"a": [ONES + 1]}),
    ],
)
def test_every_kind_of_difference_is_found(expected, got):
    assert differences({"x": expected}, {"x": expected}, None) == []
    assert differences({"x": expected}, {"x": got}, None)


def test_the_first_differing_row_and_column_are_named():
    got = ONES.clone()
    got[1, 2] = 1.5
    (failure,) = differences({"logits": ONES}, {"logits": got}, None)
    assert failure == Failure("logits", "row 1, column 2", "1", "1.5", "1 of 6 elements differ, by at most 0.5")


def test_tolerance_accepts_rounding_and_nothing_more():
    assert differences(ONES.double(), ONES + 1e-6, 1e-5) == []
    assert differences(ONES.double(), ONES + 1e-4, 1e-5)
    assert differences(ONES, torch.full((2, 3), float("nan")), 1e-5)
    assert differences(torch.tensor([1]), torch.tensor([2]), 10.0), "whole numbers are compared exactly"
    nan = torch.tensor([float("nan")])
    assert differences(nan, nan.clone(), None) == [], "equal NaNs are equal bits"


def test_an_infinite_expectation_is_not_an_infinite_tolerance():
    """A bound times infinity accepted any number where minus infinity was expected, and refused the right one."""
    banned = torch.tensor([-torch.inf, 1.0])
    logits = torch.tensor([5.0, 1.0])
    (failure,) = differences(banned, logits, 1e-5)
    assert (failure.expected, failure.got) == ("-inf", "5")
    assert differences(logits, banned, 1e-5)
    assert differences(banned, banned.clone(), 1e-5) == []
    assert differences(-torch.inf, 5.0, 1e-5)
    assert differences(-float("inf"), -float("inf"), 1e-5) == []


def make(verdict, probe=lambda seed: {}):
    return Check("L2.D.x", "proves", probe, verdict)


def test_values_that_break_the_comparison_are_a_failure():
    check = make(lambda seed, got: got["missing"])
    assert judge(check, 0, {}).status == "fail"


def test_an_exception_that_names_a_task_is_to_do_or_blocked():
    check = all_checks()["L2.D.values"]
    assert (
        result_of_error(check, ProbeError("NotImplementedError", "L2.D: Paged attention")).status == "not-implemented"
    )
    blocked = result_of_error(check, ProbeError("NotImplementedError", "L2.B: The KV pool"))
    assert (blocked.status, blocked.blocked_by) == ("blocked", "L2.B")
    assert result_of_error(check, ProbeError("NotImplementedError", "some day")).status == "fail"
    assert result_of_error(check, ProbeError("TypeError", "L2.D: no")).status == "fail"


def test_a_failure_above_a_broken_task_is_blocked_and_a_pass_stays():
    results = [
        Result("L2.B.memory", "fail"),
        Result("L2.D.values", "fail"),
        Result("L2.D.alone", "pass"),
        Result("L2.A.ownership", "fail"),
    ]
    assert [r.status for r in block_dependents(results)] == ["fail", "blocked", "pass", "fail"]


def test_needs_of_a_check_reach_across_lessons():
    needed = tasks_needed(all_checks()["L2.C.invariant"], load_manifest())
    assert {"L2.B", "L1.D"} <= needed
    assert "L2.C" not in needed
    assert "L1.D" in tasks_needed(all_checks()["L1.G.random_sdpa"], load_manifest())
    assert tasks_of(catalogue()["L2.C.invariant"]) >= {"L2.B", "L2.C", "L1.A"}, "the catalogue knows them without torch"


def test_every_task_has_a_check_and_ids_begin_with_it():
    assert {check.task_id for check in all_checks().values()} == {task.id for task in load_manifest().tasks}
    assert all(check.proves.endswith((".", ").")) for check in all_checks().values())


def test_one_id_cannot_be_registered_twice():
    registry = Registry()
    registry.add("L1.A.x", "", lambda seed: {}, lambda seed, got: [])
    with pytest.raises(ValueError, match=r"L1\.A\.x"):
        registry.add("L1.A.x", "", lambda seed: {}, lambda seed, got: [])


@pytest.mark.parametrize(
    "value", [object(), torch.float32, {1: 2}, [torch.nn.Parameter(ONES)], {"a": {1}}, Candidate("x")]
)
def test_only_plain_values_leave_a_probe(value):
    with pytest.raises(TypeError):
        require_plain({"x": value})


def test_one_verdict_at_a_time_and_each_with_one_thread() -> None:
    """Two at once changed each other's number of threads, and loaded one model of transformers twice: garbage."""
    inside = 0
    most = 0
    threads = set()

    def verdict(seed: int, got: object) -> list[Failure]:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.02)
        threads.add(torch.get_num_threads())
        torch.set_num_threads(2)
        inside -= 1
        return []

    check = Check("L1.A.x", "", lambda seed: {}, verdict)
    before = torch.get_num_threads()
    with ThreadPoolExecutor(4) as pool:
        assert all(result.passed for result in pool.map(lambda _: judge(check, 0, {}), range(8)))
    assert torch.get_num_threads() == before
    assert (most, threads) == (1, {1})


def test_close_and_bitwise_compute_their_spec_once_per_seed():
    for kind in (bitwise, lambda spec: close(spec, 1e-5)):
        calls = []
        verdict = kind(lambda seed, calls=calls: calls.append(seed) or {"x": float(seed)})
        assert verdict(1, {"x": 1.0}) == verdict(1, {"x": 1.0}) == []
        assert verdict(2, {"x": 1.0})
        assert calls == [1, 2]


def test_answers_survive_the_journey(tmp_path):
    values = {
        "f": ONES.T,
        "b": ONES.bfloat16()[:, 1],
        "l": [1, "a", None, True, [torch.tensor(3)]],
        "d": {"nan": float("inf")},
        "empty": torch.zeros(0, 4),
    }
    write_answer(tmp_path, 3, values, 0.5)
    back, seconds = read_answer(tmp_path, 3)
    assert seconds == 0.5
    assert differences(values, back, None) == []
    write_answer(tmp_path, 4, ProbeError("E", "m", "p"), 0.1)
    assert read_answer(tmp_path, 4)[0] == ProbeError("E", "m", "p")


class Bomb:
    """Unpickling this would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_files_that_are_no_answers_are_refused(tmp_path):
    trap = tmp_path / "trap"
    good = json.dumps({"seconds": 1, "values": {"x": {"$tensor": "t0"}}})
    (tmp_path / "0.json").write_text(good)
    (tmp_path / "0.safetensors").write_bytes(pickle.dumps(Bomb(str(trap))))
    (tmp_path / "1.json").write_text("[" * 100_000)
    (tmp_path / "2.json").write_text("{}")
    (tmp_path / "3.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "4.json")
    (tmp_path / "5.json").write_text(good)  # and no tensors
    (tmp_path / "6.json").write_bytes(b"\xff\xfe")
    (tmp_path / "7.json").write_text(good)
    os.mkfifo(tmp_path / "7.safetensors")  # opening it must not wait for a writer
    (tmp_path / "8.json").mkdir()
    with (tmp_path / "9.json").open("wb") as stream:
        stream.truncate(MAX_JSON_BYTES + 1)
    for index in range(11):
        with pytest.raises(ValueError, match=r"."):
            read_answer(tmp_path, index)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("values", "size", "words"),
    [
        ({"a": [{"$tensor": "t0"}] * 2}, 4, "named twice"),
        ({"a": {"$tensor": "t1"}}, 4, "not there"),
        ({"a": {"$tensor": "t0"}}, MAX_ELEMENTS + 1, f"{MAX_ELEMENTS} is the most"),
        ({"a": [[0] * 1000] * (MAX_ITEMS // 1000)}, 4, f"{MAX_ITEMS} items"),
        ({"a": functools.reduce(lambda inner, _: [inner], range(MAX_DEPTH), 0)}, 4, f"{MAX_DEPTH} deep"),
    ],
    ids=["named twice", "not there", "elements", "items", "depth"],
)
def test_an_answer_that_is_larger_than_it_looks_is_refused(tmp_path, values, size, words):
    """Each file is small; comparing what it stands for would take the grader's memory or time."""
    (tmp_path / "0.json").write_text(json.dumps({"seconds": 0, "values": values}))
    save_file({"t0": torch.zeros(size, dtype=torch.uint8)}, tmp_path / "0.safetensors")
    with pytest.raises(ValueError, match=words):
        read_answer(tmp_path, 0)


def test_a_failure_says_what_where_and_what_next():
    check = all_checks()["L2.B.memory"]
    result = Result(check.id, "fail", (Failure("case", "row 1, column 2", "3", "4", "note"),))
    text = explain(result, check, [pitfall for pitfall in load_pitfalls() if pitfall.id == "P2-B1"])
    known = ["L2.B.memory", "FAIL", check.proves, "row 1, column 2", "expected  3", "got       4"]
    for words in (*known, "lessons/L2_attention/B_the_kv_pool.md", "same as   P2-B1: ", "python -m smoke hint L2.B"):
        assert words in text
    assert line(Result(check.id, "blocked", blocked_by="L2.A")).endswith("waits for L2.A")


def test_bits_are_shown_as_the_numbers_they_are():
    expected, got = (torch.tensor([1.0, x]).view(torch.int32) for x in (-0.0, -torch.inf))
    (failure,) = differences({"bits of x": expected}, {"bits of x": got}, None)
    assert (failure.expected, failure.got) == ("-0 (bits 80000000)", "-inf (bits ff800000)")
    assert failure.note == "1 of 2 elements differ"


def test_infinities_and_nan_are_counted_and_not_measured():
    expected = torch.tensor([1.0, 2.0, 3.0])
    (failure,) = differences(expected, torch.tensor([1.0, torch.nan, -torch.inf]), 1e-6)
    assert failure.note == "2 of 3 elements differ; 2 of them are infinite or NaN"
    (failure,) = differences(expected, torch.tensor([1.0, 2.5, 3.0]), 1e-6)
    assert failure.note == "1 of 3 elements differ, by at most 0.5"


def test_true_and_false_have_no_distance():
    (failure,) = differences(torch.tensor([True, False]), torch.tensor([True, True]), None)
    assert failure.note == "1 of 2 elements differ"


def test_what_a_failure_of_an_argument_names_is_the_argument():
    for name in ("L1.B.turn", "L1.C.bits", "L1.F.bits", "L2.B.memory"):
        check = all_checks()[name]
        answer = check.probe(0)
        for case, value in answer.items():
            if case.startswith("after the call") or case.endswith("afterwards"):
                next(iter(value.values())).zero_()
        places = [f"{failure.case}, {failure.place}" for failure in check.verdict(0, answer)]
        assert places
        assert not [place for place in places if "item" in place]


def test_a_mask_of_the_obvious_kind_imports_no_compiler():
    """In a forked child the import takes seconds, at every save. In a process of its own: others have imported it."""
    code = """
import sys
import torch
from mini_engine.attention import dense
from smoke.framework.check import load_check
dense.causal_mask = lambda q, k, device="cpu": torch.ones(q, k, dtype=torch.bool, device=device).tril(k - q)
for name in ("L1.C.mask", "L1.D.calls"):
    load_check(name).probe(0)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_checks_load_where_triton_is_not_built(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("smoke.checks.l8.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it raises
    assert {name for name in registries() if name.startswith("l8.")} == {
        check.module for check in catalogue().values() if check.module.startswith("l8.")
    }


@pytest.mark.slow
@pytest.mark.parametrize("task", load_manifest().tasks, ids=lambda task: task.id)
def test_the_answers_to_another_seed_earn_no_task(task: Task) -> None:
    """Who knows what the reference answers to one seed has written nothing: a check of each task draws its input."""
    own = [check for check in all_checks().values() if check.task_id == task.id]
    for check in sorted(own, key=lambda check: check.seconds):
        values = run_probe(check, 7)
        assert not isinstance(values, ProbeError), "the reference runs"
        if not judge(check, 8, values).passed:
            return
    pytest.fail(f"{task.id} passes with the answers to another seed")
