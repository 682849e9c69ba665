"""The commands as a student types them: exit statuses, files written, words printed."""

import json
import shutil
import sys

import pytest

from smoke.__main__ import main
from smoke.bank import bank
from smoke.commands import mutants
from smoke.commands.progress import load_hints
from smoke.course.example import fences
from smoke.framework.check import checks_of, tasks_needed
from smoke.framework.manifest import ENGINE, load_manifest

LESSON_2 = load_manifest().lesson("L2")
POOL = {task.id for task in LESSON_2.tasks if any(f.file == "attention/pool.py" for f in task.functions)}


@pytest.fixture
def smoke(monkeypatch, tmp_path, capsys):
    """Return a function that runs one command in an empty folder -> exit status and everything printed."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["smoke", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out + printed.err

    return call


def solve(folder, *files):
    for file in files:
        shutil.copyfile(ENGINE / file, folder / file)


def test_a_lesson_from_start_to_diff(smoke, tmp_path):
    code, words = smoke("start", "L2")
    assert code == 0
    assert "red" in words
    code, words = smoke("run", "L2")
    assert code == 1
    assert "Red is right" in words
    assert "Next: L2.A" in words
    code, words = smoke("diff", "L2")
    assert code == 2
    assert "not green" in words

    work = tmp_path / "work"
    solve(work, *load_manifest().lesson("L2").files)
    code, words = smoke("run", "L2")
    assert code == 0
    assert "L2 PASS  Packed varlen attention: 13 checks" in words
    assert "13/13" in smoke("status")[1]
    assert "next: L1.A" in smoke("status")[1]
    assert smoke("diff", "L2") == (0, "".join(f"{f}: no difference\n" for f in load_manifest().lesson("L2").files))

    (work / "attention/pool.py").write_text((work / "attention/pool.py").read_text() + "\n")
    left = [
        check for check in checks_of([LESSON_2]) if not POOL & {check.task_id, *tasks_needed(check, load_manifest())}
    ]
    assert 0 < len(left) < 13
    assert f" {len(left)}/13" in smoke("status")[1], "what builds on a changed file has not passed yet, the rest has"
    for file in LESSON_2.files:
        (work / file).write_text((work / file).read_text() + "\n")
    assert " 0/13" in smoke("status")[1]
    assert "next: L2.A" in smoke("status")[1], "a lesson that was begun comes before one that was not"
    assert smoke("reset", "L2", "--yes")[0] == 0
    assert "NotImplementedError" in (work / "attention/pool.py").read_text()
    assert "index_copy_" in (work / "attention/pool.py.bak").read_text()


@pytest.mark.slow
def test_a_failure_is_explained(smoke, tmp_path):
    smoke("start", "L2")
    work = tmp_path / "work"
    solve(work, *load_manifest().lesson("L2").files)
    file = work / "attention/pool.py"
    file.write_text(file.read_text().replace("self.values[layer].index_select", "self.keys[layer].index_select"))
    code, words = smoke("run", "L2", "-k", "L2.B")
    assert code == 1
    for part in ("L2.B.memory", "expected", "got", "P2-B2", "smoke hint L2.B", "lessons/L2_attention/B_the_kv_pool.md"):
        assert part in words


@pytest.mark.slow
def test_own_base_uses_earlier_lessons_and_reference_base_does_not(smoke, tmp_path):
    smoke("start", "L1")
    smoke("start", "L2")
    solve(tmp_path / "work", *load_manifest().lesson("L2").files)
    assert smoke("run", "L2", "-k", "L2.D.alone")[0] == 0
    code, words = smoke("run", "L2", "-k", "L2.D.alone", "--base", "own")
    assert code == 1
    assert "waits for L1" in words


@pytest.mark.slow
def test_a_candidate_that_cannot_be_imported_has_its_own_status(smoke, tmp_path):
    smoke("start", "L3")
    (tmp_path / "work/driver.py").write_text("def broken(:")
    code, words = smoke("run", "L3")
    assert code == 4
    assert "driver.py:1" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "L9"), "L1, L2, L3"),
        (("run", "L0"), "L1, L2, L3"),
        (("run", "L1"), "start L1"),
        (("run", "L1", "--base", "mine"), "reference or own"),
        (("start",), "LESSON"),
        (("start", "L9"), "L1, L2, L3"),
        (("hint", "L2.Q"), "L2.Q"),
        (("accept", "-k", "nothing-like-it"), "nothing-like-it"),
        (("mutants", "L1", "--mine", "nowhere.py"), "nowhere.py"),
        (("no-such-command",), "no-such-command"),
    ],
)
def test_a_wrong_question_is_a_usage_error(smoke, arguments, words):
    code, printed = smoke(*arguments)
    assert code == 2
    assert words in printed


def test_start_never_overwrites(smoke, tmp_path):
    smoke("start", "L3")
    file = tmp_path / "work/driver.py"
    file.write_text("mine")
    code, words = smoke("start", "L3")
    assert code == 2
    assert "reset L3" in words
    assert file.read_text() == "mine"


def test_hints_come_one_by_one_and_are_remembered(smoke, tmp_path):
    smoke("start", "L2")
    texts = load_hints("L2")["L2.B"]
    for level in (1, 2, 3, 3):
        words = smoke("hint", "L2.B")[1]
        assert [text.strip() in words for text in texts] == [n < level for n in range(3)]
    assert json.loads((tmp_path / "work/.smoke.json").read_text())["hints"] == {"L2.B": 3}
    assert "hints taken: 3" in smoke("status")[1]


def test_pitfalls_are_listed_when_their_task_is_green(smoke, tmp_path):
    pitfalls = [pitfall for pitfall in bank.load_pitfalls() if pitfall.lesson_id == "L2"]
    smoke("start", "L2")
    code, words = smoke("pitfalls", "L2")
    assert (code, words) == (
        0,
        f"{len(pitfalls)} more belong to tasks that are not green yet; --all lists them\n",
    )
    solve(tmp_path / "work", "attention/allocator.py")
    smoke("run", "L2", "-k", "L2.A")
    words = smoke("pitfalls", "l2")[1]
    assert {p.id for p in pitfalls if p.id in words} == {p.id for p in pitfalls if p.task_id == "L2.A"}
    assert pitfalls[0].symptom in words
    assert all(pitfall.id in smoke("pitfalls", "L2", "--all")[1] for pitfall in pitfalls)


def test_every_task_has_three_hints():
    for lesson in load_manifest().written:
        assert set(load_hints(lesson.id)) == {task.id for task in lesson.tasks}


@pytest.mark.slow
def test_accept_reports_for_machines_and_notices_a_pitfall_that_survives(smoke, monkeypatch):
    code, words = smoke("accept", "-k", "P2-A1", "--json")
    assert code == 0
    report = json.loads(next(text for text in words.splitlines() if text.startswith("{")))
    assert report["accepted"]
    assert report["candidates"][0]["results"]["L2.A.pages_needed"] == "fail"

    (kept,) = (pitfall for pitfall in bank.load_pitfalls() if pitfall.id == "P2-A1")
    wrong = bank.Pitfall(**{**vars(kept), "killed_by": ("L2.A.ownership",)})
    monkeypatch.setattr("smoke.bank.accept.load_pitfalls", lambda: (wrong,))
    code, words = smoke("accept", "-k", "P2-A1")
    assert code == 1
    assert "L2.A.ownership is pass and should have caught it" in words
    assert "NOT ACCEPTED" in words


@pytest.mark.slow
def test_accept_notices_a_wheat_that_is_failed_and_a_starter_that_is_not(smoke, monkeypatch):
    (kept,) = (wheat for wheat in bank.load_wheats() if wheat.id == "W3-D1")
    chaff = bank.Edit.at("driver.py", "            token_ids.append(token_id)", "            token_ids.append(0)")
    monkeypatch.setattr("smoke.bank.accept.load_wheats", lambda: (bank.Wheat(**{**vars(kept), "edit": chaff}),))
    assert smoke("accept", "-k", "W3-D1")[0] == 1
    whole = {"driver.py": (ENGINE / "driver.py").read_text()}
    monkeypatch.setattr("smoke.bank.accept.task_starter", lambda task: whole)
    code, words = smoke("accept", "-k", "starter L3.A")
    assert code == 1
    assert "not-implemented" in words


@pytest.mark.slow
def test_mutants_says_which_pitfalls_a_students_test_catches(smoke, tmp_path, monkeypatch):
    chosen = [p for p in bank.load_pitfalls() if p.id in ("P2-A1", "P2-B2")]
    monkeypatch.setattr(mutants, "load_pitfalls", lambda: chosen)
    test = tmp_path / "my_tests.py"
    test.write_text(
        "from mini_engine.attention.allocator import pages_needed\n\n\n"
        "def test_full():\n    assert pages_needed(16, 16) == 1\n"
    )
    code, words = smoke("mutants", "L2", "--mine", str(test))
    assert code == 1
    assert "caught  P2-A1" in words
    assert "MISSED  P2-B2" in words
    assert "catches 1 of 2" in words
    code, words = smoke("mutants", "L2", "--mine", str(test), "-k", "p2-a")
    assert code == 0
    assert "catches 1 of 1 pitfalls of L2 with p2-a" in words
    code, words = smoke("mutants", "L2", "--mine", str(test), "-k", "P9")
    assert code not in (0, 1)
    assert "no pitfall of L2" in words
    test.write_text("def test_wrong():\n    assert False\n")
    code, words = smoke("mutants", "L2", "--mine", str(test))
    assert code == 1
    assert "fails on the reference" in words


@pytest.mark.slow
def test_doctor_says_that_the_machine_is_ready(smoke):
    num_checks = len(checks_of([load_manifest().lesson("L1")]))
    code, words = smoke("doctor")
    assert code == 0
    assert f"reference L1: {num_checks} checks pass" in words


@pytest.mark.slow
def test_an_example_runs_on_the_students_modules(smoke, tmp_path):
    smoke("start", "L2")
    task = next(task.id for task in LESSON_2.tasks if task.id in POOL)
    code, words = smoke("example", task)
    assert code == 1
    assert f"{task} is not written yet" in words
    assert f"the example of {task} does not hold on work/" in words
    solve(tmp_path / "work", "attention/pool.py")
    code, words = smoke("example", task.lower())
    assert code == 0
    assert words.endswith(f"the example of {task} holds on work/\n")
    code, words = smoke("example", LESSON_2.tasks[-1].id)
    assert f"{LESSON_2.tasks[-1].id} is not written yet" in words
    file = tmp_path / "work/attention/pool.py"
    right = "index_copy_(1, slot_mapping, k"
    assert right in file.read_text()
    file.write_text(file.read_text().replace(right, "index_copy_(1, slot_mapping, 2 * k"))
    code, words = smoke("example", task)
    assert code == 1
    assert f"{load_manifest().task(task).page_name}:" in words
    assert "the page shows for this block" in words


def test_an_example_needs_modules_and_a_task_that_exists(smoke):
    assert "holds no module of the engine" in smoke("example", "L2.B")[1]
    code, words = smoke("example", "L2.Z")
    assert code == 2
    assert "there is no task 'L2.Z'" in words


def test_blocks_of_a_page_have_their_kind_and_line():
    page = "# L2.B\n```python\nb = a\nc\n```\nwords\n```output\nno\n```\n"
    blocks = [(fence.info, fence.line, fence.text) for fence in fences(page)]
    assert blocks == [("python", 2, "b = a\nc\n"), ("output", 7, "no\n")]
