"""A pitfall is named only where it gives what the candidate gave."""

import pytest
import torch

from smoke.bank.alike import Alike, is_alike
from smoke.framework.bank import load_pitfalls
from smoke.framework.check import ProbeError, all_checks
from smoke.framework.manifest import ENGINE
from smoke.runner.runner import Candidate, Runner


@pytest.fixture(scope="module")
def alike():
    with Runner() as runner:
        runner.prepare({"L1.A.values", "L1.A.bits", "L1.B.half", "L1.B.frequencies"})
        yield Alike(runner)


def named(alike, tmp_path, check_id, text):
    """The ids of the pitfalls that are named for a model.py with this text, and the check's status."""
    (tmp_path / "model.py").write_text(text)
    check = all_checks()[check_id]
    outcome = alike.runner.run(Candidate("work", tmp_path, ("model.py",)), [check], 0)
    found = alike.pitfalls(check, 0, outcome.answers[check_id]) if outcome.answers else []
    return [pitfall.id for pitfall in found], outcome.results[0].status


@pytest.mark.parametrize("pitfall_id", ["P1-A1", "P1-B4"])
def test_a_mistake_of_the_bank_is_recognised(alike, tmp_path, pitfall_id):
    (pitfall,) = (each for each in load_pitfalls() if each.id == pitfall_id)
    ids, status = named(alike, tmp_path, pitfall.killed_by[0], pitfall.edit.apply())
    assert status == "fail"
    assert pitfall_id in ids


def test_a_nearly_right_answer_is_not_taken_for_a_pitfall_that_merely_rounds(alike, tmp_path):
    """Frequencies by way of float64 round otherwise, and so does "theta to a negative power"."""
    text = (ENGINE / "model.py").read_text()
    head = "def rotary_frequencies(head_dim: int, theta: float) -> Tensor:\n"
    own = head + "    return (theta ** (torch.arange(0, head_dim, 2).double() / -head_dim)).float()\n\n\n"
    assert text.count(head) == 1
    assert named(alike, tmp_path, "L1.B.frequencies", text.replace(head, own + head.replace("def ", "def _"))) == (
        [],
        "fail",
    )


@pytest.mark.parametrize("result", ["2 * right_norm(x, weight, eps)", "INFINITY"])
def test_another_mistake_is_not_taken_for_one_of_the_bank(alike, tmp_path, result):
    """Twice the right result fails the same check as the bank's mistakes do, and has other values; so does an error."""
    text = (ENGINE / "model.py").read_text()
    text = text.replace("def rms_norm(", f"def rms_norm(x, weight, eps):\n    return {result}\n\n\ndef right_norm(")
    assert named(alike, tmp_path, "L1.A.values", text) == ([], "fail")


def test_answers_are_alike_by_value_and_errors_by_type_text_and_line_of_code():
    one, near, far = (torch.tensor([1.0, x]) for x in (2.0, 2.0 + 1e-6, 2.1))
    assert is_alike({"x": one}, {"x": one.clone()})
    assert is_alike({"x": one}, {"x": near}, {"x": far})
    assert not is_alike({"x": one}, {"x": near}, {"x": near})
    assert not is_alike({"x": one}, {"x": near}, ProbeError("NotImplementedError", "L1.A"))
    assert not is_alike({"x": one}, {"x": near})
    assert not is_alike({"x": one}, {"x": far}, {"x": near})
    assert not is_alike(None, {"x": one})
    error = ProbeError("IndexError", "out of range", "model.py:3 in rotate: return x[9]")
    assert is_alike(error, ProbeError("IndexError", "out of range", "model.py:7 in rotate: return x[9]"))
    assert not is_alike(error, ProbeError("IndexError", "out of range", "model.py:3 in rotate: y = x[9]"))
    assert not is_alike(error, ProbeError("IndexError", "out of range", "model.py:3 in norm: return x[9]"))
    assert not is_alike(error, ProbeError("IndexError", "another", "model.py:3 in rotate: return x[9]"))
    assert not is_alike(error, {"x": one})
