"""A pitfall that no longer fits the reference tests nothing, so the bank refuses it by name."""

import pytest

from smoke.bank.accept import candidates, edited, jobs
from smoke.bank.alike import MOST_RUN
from smoke.framework import bank
from smoke.framework.bank import (
    Edit,
    fitting_pitfalls,
    load_pitfalls,
    load_wheats,
    parse_pitfall,
    parse_wheat,
    try_edit,
)
from smoke.framework.check import all_checks
from smoke.framework.manifest import load_manifest

GOOD = {
    "id": "P9",
    "task": "L2.A",
    "title": "t",
    "symptom": "s",
    "at": "attention/allocator.py:pages_needed",
    "find": "return -(-num_tokens // page_size)",
    "replace": "return num_tokens // page_size",
    "killed_by": ["L2.A.pages_needed"],
    "source": "s",
}


def test_the_bank_is_large_enough_and_names_existing_checks():
    assert len(load_pitfalls()) >= 25
    assert len(load_wheats()) >= 8
    for pitfall in load_pitfalls():
        assert set(pitfall.killed_by) <= set(all_checks()), pitfall.id


def test_every_task_has_a_pitfall():
    assert {pitfall.task_id for pitfall in load_pitfalls()} == {task.id for task in load_manifest().tasks}


def test_the_name_of_a_lesson_or_of_a_task_means_all_of_its_candidates():
    entries = [*load_pitfalls(), *load_wheats()]
    starters = ["starter L1", *(f"starter {task.id}" for task in load_manifest().lesson("L1").tasks)]
    assert {job.id for job in jobs("L1")} == {*starters, *(entry.id for entry in entries if entry.lesson_id == "L1")}
    of_task = {entry.id for entry in entries if entry.id.startswith(("P8-L", "W8-L"))}
    assert {job.id for job in jobs("l8.l")} == {"starter L8.L", *of_task}


def test_wheats_of_different_tasks_are_one_candidate_and_everything_else_runs_alone():
    todo = jobs("5-")
    found = candidates(todo)
    assert sorted(job.id for together in found for job in together) == sorted(job.id for job in todo)
    for together in found:
        tasks = [job.id[:4] for job in together]
        assert len(set(tasks)) == len(tasks)
        assert len(together) == 1 or all(job.kind == "wheat" for job in together)
        if together[0].edit:
            files = edited(*(job.edit for job in together))
            assert all(job.edit.replace.strip() in files[job.edit.file] for job in together)
    wheats = [together for together in found if together[0].kind == "wheat"]
    assert len(wheats) < sum(map(len, wheats)) / 3


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"find": "no such text"}, "0 times"),
        ({"at": "attention/allocator.py", "find": "self._free"}, "times, not once"),
        ({"at": "attention/allocator.py:PageAllocator"}, "PageAllocator holds .* 0 times"),
        ({"at": "attention/allocator.py:gone"}, "there is no attention/allocator.py:gone"),
        ({"replace": "return ("}, "P9"),
        ({"at": "model.py"}, r"model\.py is not a file of L2"),
        ({"killed_by": []}, "killed_by"),
        ({"killed_by": ["L1.A.bits"]}, "killed_by"),
        ({"task": "L2.Z"}, r"L2\.Z"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_stale_or_careless_pitfall_is_refused(change, names):
    try_edit("pitfall P9", parse_pitfall(GOOD).edit)
    with pytest.raises(ValueError, match=names):
        try_edit("pitfall P9", parse_pitfall(GOOD | change).edit)
    with pytest.raises(ValueError, match="source"):
        parse_pitfall({key: value for key, value in GOOD.items() if key != "source"})


def test_a_changed_engine_makes_the_bank_wrong_and_leaves_students_their_suggestions(tmp_path, monkeypatch):
    """Somebody who tries something in ``mini_engine`` itself still hears what a failing check may mean."""
    suggested = [pitfall.id for pitfall in fitting_pitfalls("L1.A.bits")]
    monkeypatch.setattr(bank, "ENGINE", tmp_path)
    (tmp_path / "model.py").write_text("# nothing is where it was\n")
    bank.load_pitfalls.cache_clear()
    bank.known_pitfalls.cache_clear()
    assert [pitfall.id for pitfall in fitting_pitfalls("L1.A.bits")] == suggested != []
    with pytest.raises(ValueError, match=r"P1-A1: there is no model\.py:rms_norm"):
        load_pitfalls()


def test_a_wheat_with_a_stale_edit_or_an_id_that_is_taken_is_refused():
    wheat = {"id": "W9", "lesson": "L2", "title": "t", "why": "w", "at": "attention/allocator.py:pages_needed"}
    parse_wheat(wheat | {"find": GOOD["find"], "replace": GOOD["find"]})
    with pytest.raises(ValueError, match="0 times"):
        parse_wheat(wheat | {"find": "gone", "replace": ""})
    with pytest.raises(ValueError, match="replace"):
        parse_wheat(wheat | {"find": GOOD["find"]})
    with pytest.raises(ValueError, match="P9"):
        bank.refuse_doubles(["P8", "P9", "P9"])


@pytest.mark.parametrize(
    ("reference", "find", "replace", "edited"),
    [
        (
            "def f():\n    return g(\n        a,\n        b,\n    )\n",
            "g(a, b)",
            "g(b, a)",
            "def f():\n    return g(b, a)\n",
        ),
        ("def f():\n    return g(a,b)\n", "g(\n    a,\n    b,\n)", "g(b)", "def f():\n    return g(b)\n"),
        ("x = 1\n\n\ndef f():\n    x = 1\n", "    x = 1", "    x = 2", "x = 1\n\n\ndef f():\n    x = 2\n"),
        ("@cache\ndef f():\n    pass\n", "@cache\n", "", "def f():\n    pass\n"),
    ],
)
def test_an_edit_finds_its_text_however_the_lines_are_laid_out(tmp_path, monkeypatch, reference, find, replace, edited):
    monkeypatch.setattr(bank, "ENGINE", tmp_path)
    (tmp_path / "file.py").write_text(reference)
    assert Edit.at("file.py:f", find, replace).apply() == edited


@pytest.mark.parametrize("text", ["return not a", "g(a, c)", "g(a b)"])
def test_an_edit_does_not_find_other_words(tmp_path, monkeypatch, text):
    monkeypatch.setattr(bank, "ENGINE", tmp_path)
    (tmp_path / "file.py").write_text("def f():\n    return nota, g(a, b)\n")
    with pytest.raises(ValueError, match="0 times, not once"):
        Edit.at("file.py:f", text, "").apply()


def test_what_passed_rules_pitfalls_out():
    """Two students were led astray by suggestions whose other checks had passed."""
    for pitfall in load_pitfalls()[::4]:
        lesson = {check_id for check_id in all_checks() if check_id.startswith(pitfall.lesson_id + ".")}
        passed = lesson - set(pitfall.killed_by)
        suggested = [bank.fitting_pitfalls(check_id, passed) for check_id in pitfall.killed_by]
        assert all(passed.isdisjoint(other.killed_by) for others in suggested for other in others)
        assert any(pitfall in others[:MOST_RUN] for others in suggested)  # values decide which of these is named
    assert bank.fitting_pitfalls(pitfall.killed_by[0], lesson) == []
