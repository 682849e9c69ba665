"""What is done again and what is not: a changed submission, a proof of the reference, an interrupted run."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smoke.framework.check import Result, checks_of
from smoke.framework.manifest import Lesson, load_manifest
from smoke.grade import command, gradebook, records
from smoke.grade.gradebook import Limits, grade
from smoke.grade.records import Records
from smoke.grade.submissions import Submission
from smoke.grade.trial import Isolation
from smoke.grade.worker import ModeRun

LESSONS = load_manifest().written[:2]
HERE = Isolation(None, False, True, True, True, True, True, True)
CLASS = [
    Submission(name, {"model.py": f"# {name}", "attention/pool.py": f"# {name}"}) for name in ("ada", "bob", "cid")
]


def results_of(lesson: Lesson) -> tuple[Result, ...]:
    """Return a pass of every check of a lesson."""
    return tuple(Result(check.id, "pass") for check in checks_of([lesson]))


class Counting:
    """A worker that runs nothing, and notes what it was asked for in ``asked``."""

    asked: list[tuple[str, str]] = []  # noqa: RUF012
    while_running: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, confinement: object) -> None:
        self.runner = SimpleNamespace(stop_server=lambda: None)

    def __enter__(self) -> "Counting":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, submission: Submission, lessons: list[Lesson], seed: int) -> ModeRun:
        self.asked.append((submission.name, lessons[-1].id))
        self.while_running()
        return ModeRun(results_of(lessons[-1]))

    def run_reference(self, lesson: Lesson, seed: int, report: Callable[[Result], None]) -> Any:
        self.asked.append(("reference", lesson.id))
        for result in results_of(lesson):
            report(result)
        return SimpleNamespace(results=results_of(lesson), log="")


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradebook, "Worker", Counting)
    monkeypatch.setattr(Counting, "asked", [])


def graded(out: Path, submissions: list[Submission] = CLASS, seconds: int = 60) -> list[tuple[str, str]]:
    """Grade L1 and L2 and return, each once, what was run: who, and which lesson."""
    Counting.asked.clear()
    settings = {"timeout": seconds, "memory": 1 << 30}
    grade(submissions, LESSONS, Records(out, "auto", settings), HERE, Limits(seconds, 1 << 30), jobs=1)
    return list(dict.fromkeys(Counting.asked))


def test_one_changed_student_is_graded_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a finished run with ``auto``: the same seed, no proof again, and only what the change can reach."""
    names = [("reference", "L1"), ("reference", "L2")]
    names += [(each.name, lesson.id) for each in CLASS for lesson in LESSONS]
    assert graded(tmp_path) == names
    assert "proving the reference: 100%" in capsys.readouterr().err
    assert graded(tmp_path) == []
    bob = replace(CLASS[1], files=CLASS[1].files | {"attention/pool.py": "# changed"})
    assert graded(tmp_path, [CLASS[0], bob, CLASS[2]]) == [("bob", "L2")]
    assert "proving" not in capsys.readouterr().err


@pytest.mark.parametrize("changed", ["limits", "machine", "course", "proof", "report"])
def test_a_proof_holds_where_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    graded(tmp_path)
    eve = [*CLASS, Submission("eve", {"model.py": "# eve"})]
    if changed == "machine":
        monkeypatch.setattr(records, "surroundings", lambda: {"packages": ["torch 99"]})
    if changed == "course":
        monkeypatch.setattr(records, "course_digest", lambda: "another course")
    if changed == "proof":
        (tmp_path / "proofs" / "L1.json").write_text("{")
    out = tmp_path / "another" if changed == "report" else tmp_path
    assert ("reference", "L1") in graded(out, eve, 61 if changed == "limits" else 60)
    assert (
        graded(out, [*eve, Submission("fay", {"model.py": "# fay"})], 61 if changed == "limits" else 60)[0][0] == "fay"
    )


def test_a_lesson_that_nobody_handed_in_is_not_proved(tmp_path: Path) -> None:
    assert graded(tmp_path, [Submission("ada", {"model.py": "# ada"})]) == [("reference", "L1"), ("ada", "L1")]


def test_a_reference_that_fails_has_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = (Result("L1.A.bits", "fail"),)
    monkeypatch.setattr(Counting, "run_reference", lambda *_, **__: SimpleNamespace(results=failing, log=""))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"the reference does not pass L1\.A\.bits"):
            graded(tmp_path)


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Heed SIGINT, which a job in the background of a shell begins by ignoring."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupted_run_keeps_what_it_has_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "in"
    for each in CLASS:
        for file, text in each.files.items():
            (place / each.name / file).parent.mkdir(parents=True, exist_ok=True)
            (place / each.name / file).write_text(text)
    out = tmp_path / "report"
    pressed = threading.Event()

    def press() -> None:
        if not pressed.is_set():
            pressed.set()
            threading.Event().wait(0.3)  # the main thread waits for this one
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(0.5)  # the main thread stops the queue in this time

    monkeypatch.setattr(Counting, "while_running", staticmethod(press))
    monkeypatch.setattr(command, "try_isolation", lambda: HERE)
    with pytest.raises(KeyboardInterrupt):
        command.grade_command(place, out, jobs=1, lessons="L1,L2")
    assert len(list((out / "records").rglob("*.json"))) == 1, "the lesson that was being run is finished and kept"
    words = capsys.readouterr().err
    assert "what is running is finished and kept" in words
    assert f"to go on, give the same command with --out {out}" in words
    first = set(Counting.asked)
    assert ("cid", "L2") not in first
    Counting.asked.clear()
    command.grade_command(place, out, jobs=1, lessons="L1,L2")
    assert first.isdisjoint(Counting.asked), "nothing is run twice"
    assert (out / "grades.csv").exists()
