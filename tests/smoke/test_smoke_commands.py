"""The commands as a student types them: exit statuses, files written, words printed."""

import ast
import importlib
import json
import os
import pkgutil
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from mini_engine.overlay import functions_of
from smoke import commands
from smoke.__main__ import main
from smoke.commands import COMMANDS, mutants
from smoke.commands.plain import plain_arguments
from smoke.commands.progress import load_hints
from smoke.commands.run import repeat, run_command
from smoke.course.starter import empty
from smoke.course.work import Work
from smoke.framework import bank
from smoke.framework.catalogue import listed
from smoke.framework.check import Result, checks_of
from smoke.framework.manifest import ENGINE, ROOT, load_manifest

LESSON_2 = load_manifest().lesson("L2")
POOL = {task.id for task in LESSON_2.tasks if any(f.file == "attention/pool.py" for f in task.functions)}
WITHOUT_TORCH = """
import sys
from smoke.__main__ import main
try:
    main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


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


def test_a_reader_that_has_seen_enough_is_no_error():
    code = "from smoke.__main__ import main; import sys; sys.argv = ['smoke', 'status']; main()"
    child = subprocess.Popen(
        [sys.executable, "-u", "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    child.stdout.close()
    assert child.stderr.read() == b""


def test_ctrl_c_ends_a_command_in_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    ended = []
    monkeypatch.setattr("smoke.__main__.run", interrupted)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "argv", ["smoke", "next"])
    with pytest.raises(SystemExit):
        main()
    assert (ended, capsys.readouterr().err) == ([130], "interrupted\n")


def solve(folder, *files):
    for file in files:
        shutil.copyfile(ENGINE / file, folder / file)


def write(folder, file, *names):
    """Put the reference's functions into a student's file."""
    path = folder / file
    for name in names:
        lines = path.read_text().splitlines()
        old = functions_of(ast.parse("\n".join(lines)))[name]
        new = functions_of(ast.parse((ENGINE / file).read_text()))[name]
        lines[old.lineno - 1 : old.end_lineno] = (
            (ENGINE / file).read_text().splitlines()[new.lineno - 1 : new.end_lineno]
        )
        path.write_text("\n".join(lines) + "\n")


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
    (work / "attention/pool.py").write_text("def broken(:")
    code, words = smoke("run", "l2.b")
    assert code == 4, "what cannot be imported has a status of its own"
    assert "pool.py:1" in words
    solve(work, *load_manifest().lesson("L2").files)
    code, words = smoke("run", "L2")
    assert code == 0
    assert "L2 PASS  Packed varlen attention: 14 checks" in words
    assert "14/14" in smoke("status")[1]
    assert "Next: L3 Greedy driver" in smoke("status")[1], "on with the lesson after the one that was begun"
    assert smoke("diff", "L2") == (0, "".join(f"{f}: no difference\n" for f in load_manifest().lesson("L2").files))

    assert smoke("reset", "L2", "--yes")[0] == 0
    assert "NotImplementedError" in (work / "attention/pool.py").read_text()
    assert "index_copy_" in (work / "attention/pool.py.bak").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "L99"), "L1, L2, L3"),
        (("run", "L1"), "start L1"),
        (("run", "L1", "--base", "mine"), "reference or own"),
        (("run", "L1.A", "--upto"), "run L1 --upto"),
        (("run", "L1.Q"), "L1 has L1.A, L1.B"),
        (("run", "L1.A.bit"), "L1.A.values, L1.A.bits"),
        (("run", "L1", "-k", "L2.A"), "its tasks are L1.A"),
        (("start",), "LESSON"),
        (("hint", "L2.Q"), "L2.Q"),
        (("example", "L2.Z"), "there is no task 'L2.Z'"),
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


def test_what_is_not_written_hides_no_mistake_in_what_is(smoke, tmp_path):
    """Every check of L4.A builds parameters, whose constructor ends with the one function that stays open here."""
    smoke("start", "L4")
    file = tmp_path / "work/sampler/params.py"
    starter = file.read_text()
    solve(tmp_path / "work", "sampler/params.py")
    written, still_open = (text.index("def check_combinations") for text in (file.read_text(), starter))
    file.write_text(file.read_text()[:written] + starter[still_open:])
    assert "4 to do" in smoke("run", "L4.A")[1], "nothing is wrong, and nothing is done"
    right = file.read_text()
    wrong = right.replace("tuple(sorted(token_ids(", "tuple((token_ids(")
    assert wrong != right
    file.write_text(wrong)
    code, words = smoke("run", "L4.A")
    assert (code, "Red is right" in words) == (1, False)
    assert "the reference stands in for check_combinations, not written yet" in words


def test_hints_come_one_by_one_and_are_remembered(smoke, tmp_path):
    smoke("start", "L2")
    texts = load_hints("L2")["L2.B"]
    assert [text.strip() in smoke("hint", "L2.B", "--level", "2")[1] for text in texts] == [False, True, False]
    (tmp_path / "work/.smoke.json").unlink()
    for level in (1, 2, 3, 3):
        words = smoke("hint", "L2.B")[1]
        assert [text.strip() in words for text in texts] == [n == level - 1 for n in range(3)]
    assert all(text.strip() in smoke("hint", "L2.B", "--all")[1] for text in texts)
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
def test_accept_reports_for_machines_and_notices_what_breaks_its_rules(smoke, monkeypatch):
    """A pitfall that survives, a correct variant that fails, and a starter that is not one."""
    code, words = smoke("accept", "-k", "P2-A1", "--json")
    assert code == 0
    report = json.loads(next(text for text in words.splitlines() if text.startswith("{")))
    assert report["accepted"]
    assert report["candidates"][0]["results"]["L2.A.pages_needed"] == "fail"

    pitfall = next(each for each in bank.load_pitfalls() if each.id == "P2-A1")
    pitfall = replace(pitfall, killed_by=("L2.A.ownership",))
    wheat = next(each for each in bank.load_wheats() if each.id == "W2-A1")
    wheat = replace(wheat, edit=pitfall.edit)
    whole = {"attention/allocator.py": (ENGINE / "attention/allocator.py").read_text()}
    monkeypatch.setattr("smoke.bank.accept.load_pitfalls", lambda: (pitfall,))
    monkeypatch.setattr("smoke.bank.accept.load_wheats", lambda: (wheat,))
    monkeypatch.setattr("smoke.bank.accept.task_starter", lambda task: whole)
    code, words = smoke("accept", "-k", "L2.A")
    assert code == 1
    assert "NOT ACCEPTED" in words
    assert "L2.A.ownership is pass and should have caught it" in words
    assert "L2.A.pages_needed is fail" in words
    assert "L2.A.lists is pass, not-implemented with" in words

    right = next(each for each in bank.load_wheats() if each.id == "W2-B1")
    monkeypatch.setattr("smoke.bank.accept.load_wheats", lambda: (wheat, right))
    code, words = smoke("accept", "-k", "W2-")  # one candidate, and it fails
    assert code == 1
    assert "W2-A1:" in words
    assert "W2-B1:" not in words
    assert "1 of   2 as they must be" in words


@pytest.mark.slow
def test_mutants_says_which_pitfalls_a_students_test_catches(smoke, tmp_path, monkeypatch):
    chosen = [p for p in bank.load_pitfalls() if p.id in ("P2-A1", "P2-B2")]
    monkeypatch.setattr(mutants, "load_pitfalls", lambda: chosen)
    test = tmp_path / "my_tests.py"
    test.write_text(
        "from mini_engine.attention.allocator import pages_needed\n\n\n"
        "def test_full(pytestconfig):\n    assert pages_needed(16, 16) == 1\n"
        "    assert not pytestconfig.pluginmanager.list_plugin_distinfo()  # they are slow to load, for every pitfall\n"
    )
    code, words = smoke("mutants", "L2", "--mine", str(test))
    assert code == 1
    assert "caught  P2-A1" in words
    assert "MISSED  P2-B2" in words
    assert "catches 1 of 2" in words
    code, words = smoke("mutants", "L2", "--mine", str(test), "-k", "P9")
    assert code not in (0, 1)
    assert "no pitfall of L2" in words
    test.write_text("def test_wrong():\n    assert False\n")
    code, words = smoke("mutants", "L2", "--mine", str(test))
    assert code == 1
    assert "fails on the reference" in words


@pytest.mark.slow
def test_doctor_says_that_the_machine_is_ready(smoke, monkeypatch):
    some = checks_of([load_manifest().lesson("L1")])[:3]
    monkeypatch.setattr("smoke.commands.doctor.checks_of", lambda lessons: some)
    code, words = smoke("doctor")
    assert code == 0
    assert "reference L1: 3 checks pass" in words


@pytest.mark.slow
def test_an_example_runs_on_the_students_modules(smoke, tmp_path):
    smoke("start", "L2")
    task = next(task.id for task in LESSON_2.tasks if task.id in POOL)
    code, words = smoke("example", task)
    assert code == 1
    assert f"{task} is not written yet" in words
    assert words.endswith(f"write {task}, then run this again\n")
    solve(tmp_path / "work", "attention/pool.py")
    code, words = smoke("example", task.lower())
    assert code == 0
    assert words.endswith(f"the example of {task} holds on work/\n")
    file = tmp_path / "work/attention/pool.py"
    right = "index_copy_(1, slot_mapping, k"
    assert right in file.read_text()
    file.write_text(file.read_text().replace(right, "index_copy_(1, slot_mapping, 2 * k"))
    code, words = smoke("example", task)
    assert code == 1
    assert f"{load_manifest().task(task).page_name}:" in words
    assert "the page shows for this block" in words


def typed(folder, *words):
    """Run a program of these words in ``folder``, as a student's shell does."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "command", ["--help", "status --all", "next", "hint L2.B", "pitfalls L2", "start L1", "run L2"]
)
def test_a_command_that_runs_nothing_needs_no_torch(command, tmp_path):
    if command != "start L1":
        typed(tmp_path, "-m", "smoke", "start", "L2")
    run = typed(tmp_path, "-c", WITHOUT_TORCH, *command.split())
    assert run.stderr == "False\n"
    assert run.returncode == (1 if command == "run L2" else 0)
    assert run.stdout


def test_run_starts_its_server_before_torch_and_asks_it_for_the_checks_of_the_run_alone(tmp_path):
    """L4.A needs no torch at all; for L4.B both processes import it, at the same time."""
    script = tmp_path / "script.py"
    spy = "print('launched', 'torch' in sys.modules, sorted(self.ids), file=sys.stderr)"
    script.write_text(
        "import sys\nfrom smoke.runner.runner import Runner\nlaunch = Runner.launch\n"
        f"def spy(self):\n    {spy}\n    launch(self)\n"
        f"Runner.launch = spy\n{WITHOUT_TORCH}"
    )
    solved = tmp_path / "work"
    for file in load_manifest().lesson("L4").files:
        (solved / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ENGINE / file, solved / file)
    for what, needs_torch in (("L4.A.ranges", False), ("L4.B.temperature", True)):
        run = typed(tmp_path, str(script), "run", what)
        assert run.stderr == f"launched False {[what]}\n{needs_torch}\n"
        assert run.returncode == 0


def test_the_overview_lists_what_the_modules_register():
    listed = {name: module for section in COMMANDS.values() for name, (module, _) in section.items()}
    found = {}
    for info in pkgutil.iter_modules(commands.__path__):
        app = typer.Typer()
        module = importlib.import_module(f"smoke.commands.{info.name}")
        if hasattr(module, "register"):  # options, exits and the like hold no command
            module.register(app)
        found |= {command.name: info.name for command in app.registered_commands}
    assert listed == found


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("", {}),
        ("L4 --engine mine -k L4.B --upto", {"what": "L4", "engine": Path("mine"), "pattern": "L4.B", "upto": True}),
        ("--upto L4", {"upto": True, "what": "L4"}),
        ("--seed 3", None),
        ("--engine=mine", None),
        ("--engine", None),
        ("--engine --upto", None),
        ("--help", None),
        ("L4 L5", None),
    ],
)
def test_plain_arguments_are_read_and_all_others_left_to_typer(words, arguments):
    assert plain_arguments(run_command, words.split()) == arguments


def test_next_goes_through_a_lesson(smoke, tmp_path):
    assert "start L1" in smoke("next")[1]
    assert smoke("run")[1] == smoke("next")[1]
    smoke("start", "L6")
    words = smoke("next")[1]
    first, second = load_manifest().lesson("L6").tasks[:2]
    for part in (first.id, "task 1 of 6", first.page_name, "radix_cache.py: ", "smoke watch", "hint L6.A", "0 of 3"):
        assert part in words
    for function in first.functions:
        assert function.qualname in words
        write(tmp_path / "work", function.file, function.qualname)
    assert "written, not run yet" in smoke("next")[1]
    code, words = smoke("run")
    assert code == 0
    assert f"{first.id} PASS" in words
    assert f"{second.id} {second.title}: task 2 of 6" in words
    assert smoke("next")[1] in words
    assert "L6.A  Pages that agree            passes" in smoke("status")[1]


def pass_all(folder, of_task=lambda task: True):
    """Copy the reference's files, and remember that the checks of some tasks pass."""
    for lesson in load_manifest().written:
        for file in lesson.files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ENGINE / file, folder / file)
    work = Work(folder)
    for lesson in load_manifest().written:
        checks = [check for check in listed([lesson]) if of_task(load_manifest().task(check.task_id))]
        work.remember(lesson, [Result(check.id, "pass") for check in checks], work.marks(lesson, "reference", checks))


def test_next_follows_the_core_and_offers_the_rest(smoke, tmp_path):
    core = {task.id for lesson in load_manifest().written for task in lesson.core}
    smoke("start", "L1")
    for file in load_manifest().lesson("L1").files:
        shutil.copyfile(ENGINE / file, tmp_path / "work" / file)
    first, work = load_manifest().lesson("L1"), Work(tmp_path / "work")
    checks = [check for check in listed([first]) if check.task_id in core]
    work.remember(first, [Result(check.id, "pass") for check in checks], work.marks(first, "reference", checks))
    words = smoke("next")[1]
    assert "L1 Model forward is done" in words
    assert "optional  L1.D The same in one fused call: python -m smoke watch L1.D" in words
    assert "L2 Packed varlen attention: not started" in words
    assert "(0 of 1 optional tasks)" in smoke("status")[1].splitlines()[0]
    pass_all(tmp_path / "work", lambda task: task.id in core)
    words = smoke("next")[1]
    assert words.startswith("Every core task of every lesson passes. What is left is optional.\nL1.D ")
    assert "an optional task in L1" in words


def test_a_green_core_is_compared_without_the_solutions_of_what_is_optional(smoke, tmp_path):
    core = {task.id for task in load_manifest().lesson("L6").core}
    pass_all(tmp_path / "work", lambda task: task.id in core)
    for file in load_manifest().lesson("L6").files:
        (tmp_path / "work" / file).write_text(empty(file, load_manifest().lesson("L6").optional))
    work, lesson = Work(tmp_path / "work"), load_manifest().lesson("L6")
    checks = [check for check in listed([lesson]) if check.task_id in core]
    work.remember(lesson, [Result(check.id, "pass") for check in checks], work.marks(lesson, "reference", checks))
    code, words = smoke("diff", "L6")
    assert code == 0
    assert "not written, so not shown: L6.G, L6.H, L6.I" in words
    assert words.count("no difference") == len(lesson.files)
    assert "hit_rate" in smoke("diff", "L6", "--force")[1]


def test_next_says_so_when_everything_passes(smoke, tmp_path):
    pass_all(tmp_path / "work")
    assert smoke("next")[1].startswith("All 86 tasks of L1 to L12 pass")
    assert smoke("run") == (0, smoke("next")[1])
    assert "All 86 tasks" in smoke("status")[1]
    assert "name the one" in smoke("hint")[1]


@pytest.mark.slow
def test_what_is_not_written_falls_back_and_what_is_judged_does_not(smoke, tmp_path):
    """L2.D needs L2.B and L2.C, of which the first is half written: its own checks see that half alone.

    The same holds of earlier lessons with ``--base own``.
    """
    smoke("start", "L2")
    work = tmp_path / "work"
    write(work, "attention/paged.py", "PagedAttention.__call__")
    code, words = smoke("run", "L2.D.packed")
    assert code == 0
    assert "not written yet, so the reference's own: L2.B, L2.C" in words
    write(work, "attention/pool.py", "KVPool.write")
    code, words = smoke("run", "L2.B")
    assert code == 1
    assert "L2.B.memory            to do" in words
    text = (work / "attention/pool.py").read_text()
    (work / "attention/pool.py").write_text(text.replace("slot_mapping, k", "slot_mapping, 2 * k"))
    assert smoke("run", "L2.D.packed")[0] == 1, "what is written is the student's, right or wrong"
    smoke("start", "L1")
    solve(work, *LESSON_2.files)
    code, words = smoke("run", "L2.D.packed", "--base", "own")
    assert code == 0
    assert "the reference's own: L1.A" in words
    write(work, "model.py", "rms_norm")
    (work / "model.py").write_text((work / "model.py").read_text().replace("x.float()", "x.float() / 0 * 0"))
    assert smoke("run", "L2.D.packed", "--base", "own")[0] == 1
    assert smoke("run", "L2.D.packed")[0] == 0, "earlier lessons are the reference's unless they are asked for"


def test_watch_runs_at_every_save_and_goes_on(smoke, tmp_path, monkeypatch):
    ran = []

    def once():
        ran.append((tmp_path / "x.py").read_text())
        if len(ran) == 2:
            raise KeyboardInterrupt
        raise ValueError("a file that is being saved is not there for a moment")

    def save():
        while not ran:
            time.sleep(0.01)
        (tmp_path / "x.py").write_text("longer")

    (tmp_path / "x.py").write_text("old")
    os.utime(tmp_path / "x.py", (1, 1))
    threading.Thread(target=save).start()
    with pytest.raises(KeyboardInterrupt):
        repeat(once, tmp_path)
    assert ran == ["old", "longer"]
