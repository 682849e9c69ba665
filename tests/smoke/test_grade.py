"""``python -m smoke grade`` over a whole class: honest, half-done, broken, mistaken and hostile submissions.

One run of the command, in a process of its own, is shared by all tests here; each looks at another part of its outcome.
"""

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from smoke.framework.check import all_checks, checks_of
from smoke.framework.manifest import ROOT, load_manifest
from smoke.grade.trial import FIRST_UID, try_isolation
from smoke.grade.worker import Worker
from tests.smoke.submissions import FULL, NOTHING, Example, examples, write_examples

pytestmark = pytest.mark.slow

LESSONS = len(load_manifest().written)

SEED = 7
PROCESSOR_SECONDS = 25  # the reference needs 9 to 17 for the longest lesson, by machine
ALARM = Path("/tmp/smoke-attack.txt")


@dataclass(frozen=True)
class Graded:
    """The submissions, the report's folder, what the command said and the file that attacks try to change."""

    students: dict[str, Example]
    folder: Path
    out: Path
    victim: Path
    said: str
    seconds: float

    def row(self, name: str, lesson: str) -> dict[str, str]:
        """Return one row of ``grades.csv``."""
        with (self.out / "grades.csv").open(newline="") as stream:
            return next(row for row in csv.DictReader(stream) if (row["student"], row["lesson"]) == (name, lesson))

    def report(self, name: str) -> str:
        """Return a student's report."""
        return (self.out / "students" / name / "report.md").read_text()

    def task(self, name: str, task_id: str) -> list[str]:
        """Return a task's row in the report: its statuses, isolated and cumulative, and its points."""
        line = next(line for line in self.report(name).splitlines() if line.startswith(f"| {task_id} "))
        return [cell.strip() for cell in line.strip("|").split("|")][1:]


def command(folder: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    arguments = [sys.executable, "-m", "smoke", "grade", str(folder), "--out", str(out), "--jobs", "2", *more]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=2400, check=False)


@pytest.fixture(scope="session")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graded]:
    """Grade the whole class once."""
    base = tmp_path_factory.mktemp("grade")
    folder, out, victim = base / "submissions", base / "report", base / "victim.txt"
    folder.mkdir()
    base.chmod(0o777)
    victim.write_text("untouched")
    victim.chmod(0o666)  # only confinement keeps it from being written
    students = examples(victim)
    write_examples(folder, students)
    started = time.monotonic()
    done = command(folder, out, "--timeout", str(PROCESSOR_SECONDS), "--mem", "2G", "--seed", str(SEED))
    assert done.returncode == 0, done.stderr[-4000:]
    yield Graded(
        {e.name: e for e in students}, folder, out, victim, done.stdout + done.stderr, time.monotonic() - started
    )
    ALARM.unlink(missing_ok=True)


def names(kind: str) -> list[str]:
    """Return the names of one kind of examples."""
    return [example.name for example in examples(Path("victim")) if example.kind == kind]


ALL_NAMES = [example.name for example in examples(Path("victim"))]


@pytest.mark.parametrize("name", ALL_NAMES)
def test_points_and_statuses(graded: Graded, name: str) -> None:
    """Every submission gets exactly the points that it has worked for, and a crash is not called a wrong answer."""
    example = graded.students[name]
    for lesson in load_manifest().written:
        row = graded.row(name, lesson.id)
        got = (int(row["isolated"]), int(row["cumulative"]))
        for column, wanted in (("isolated", example.isolated), ("cumulative", example.cumulative)):
            if wanted.get(lesson.id) is not None:
                assert int(row[column]) == wanted[lesson.id], (name, lesson.id, column, row["reason"], row["notes"])
        assert got[1] <= got[0] or got[0] == got[1], "own modules cannot be worth more than the reference's"
        assert row["reason"] or got == (100, 100), f"{name}, {lesson.id}: points are missing without a reason"
    for task_id, status in example.status.items():
        assert graded.task(name, task_id)[0] == status, graded.report(name)[:3000]


@pytest.mark.parametrize("name", names("mistaken"))
def test_pitfalls_cost_their_task_and_are_named(graded: Graded, name: str) -> None:
    """A pitfall of the bank costs points in its own lesson, and the report names it as the likely cause."""
    pitfall_id = name.removeprefix("pitfall-")
    lesson_id = f"L{pitfall_id[1]}"
    assert 0 < int(graded.row(name, lesson_id)["isolated"]) < 100
    assert pitfall_id in graded.report(name)
    assert f"L{pitfall_id[1]}_" in graded.report(name), "the section to read is named"


@pytest.mark.parametrize("name", names("hostile"))
def test_attacks_earn_nothing(graded: Graded, name: str) -> None:
    assert [int(graded.row(name, lesson)["isolated"]) for lesson in ("L1", "L2", "L3", "all")] == [0, 0, 0, 0]
    assert [int(graded.row(name, lesson)["cumulative"]) for lesson in ("L1", "L2", "L3", "all")] == [0, 0, 0, 0]
    assert json.loads((graded.out / "students" / name / "results.json").read_text())["score"] == 0


def test_attacks_leave_the_machine_as_it_was(graded: Graded) -> None:
    """Nothing outside a candidate's folder was written: not by Python, not past it, not by a pickle."""
    assert graded.victim.read_text() == "untouched"
    assert not ALARM.exists()
    assert not list(Path("/tmp").glob("smoke-*/smoke-attack*"))
    assert not [path for part in ("smoke", "mini_engine") for path in (ROOT / part).rglob("smoke-attack*")]


def test_nothing_is_left_running(graded: Graded) -> None:
    """Children that fled to sessions of their own are gone. Their user alone shows whose they were."""
    if os.geteuid() == 0:
        users = {FIRST_UID, FIRST_UID + 1}
        assert not [pid for pid in Path("/proc").glob("[0-9]*") if owner(pid) in users]
    assert "left 20 processes behind" in graded.row("hostile-forks", "L1")["notes"]


def owner(process: Path) -> int | None:
    """Return a process's user, ``None`` if it has just ended."""
    try:
        return process.stat().st_uid
    except OSError:
        return None


def test_attempts_are_reported(graded: Graded) -> None:
    wanted = {
        "hostile-theft": "refused: reading",
        "hostile-writing": "refused: writing",
        "hostile-oracle": "model.py imports transformers.models.qwen3",
        "hostile-patch": "model.py imports smoke.framework.compare",
        "honest-top": "13 of 13 longer functions are the reference's own",
    }
    for name, words in wanted.items():
        assert words in graded.row(name, "L1")["notes"], name
        assert words in (graded.out / "matrix.md").read_text(), name
    assert "refused: starting a program" in graded.row("hostile-writing", "L1")["notes"]
    assert "refused: the C library" in graded.row("hostile-writing", "L1")["notes"]


def test_the_child_holds_no_expected_values(graded: Graded) -> None:
    """The hunter looked through caches, files and variables of its process, and printed what it found."""
    record = json.loads((graded.out / "records" / "hostile-hunt" / "L1.json").read_text())
    hunted = record["modes"]["isolated"]["log"].partition("hunted: ")[2].splitlines()[0].split("; ")
    assert hunted, "the hunter must have been heard"
    caches = {item for item in hunted if item.startswith("cache ")}
    allowed = {"cache smoke.framework.manifest.load_manifest", "cache smoke.framework.check.all_checks"}
    assert caches <= allowed, "no oracle may have been asked before the candidate runs"
    files = {item for item in hunted if item.startswith("file ")}
    assert files <= {"file log.txt", "file stack.txt"}
    secrets = {item for item in hunted if item.startswith("variable ")}
    assert secrets.isdisjoint({"variable SMOKE_CONFINEMENT"})


def test_files_outside_the_manifest_are_listed_and_not_run(graded: Graded) -> None:
    report = graded.report("hostile-conftest")
    for file in ("conftest.py", "sitecustomize.py", "torch.py"):
        assert f"`{file}`" in report
    assert "is no regular file" in graded.report("broken-link")
    assert "512 KiB" in graded.report("broken-bomb")
    assert "cannot be read" in graded.report("broken-zip")
    assert "UTF-8" in graded.report("broken-bytes")


def test_a_wrong_early_lesson_blocks_the_later_ones(graded: Graded) -> None:
    """Cumulative, L2 stands on the student's L1; the report says so instead of calling L2 wrong."""
    assert graded.row("broken-first", "L2")["isolated"] == "100"
    assert graded.task("half-l1", "L3.B")[:2] == ["pass", "blocked"]


def test_the_report_speaks_like_the_student_command(graded: Graded) -> None:
    report = graded.report("pitfall-P1-A1")
    for words in ("expected", "got", "checked", "lessons/L1_model/A_rmsnorm.md", "seed: 7", "network: "):
        assert words in report


def test_results_json_is_gradescopes(graded: Graded) -> None:
    """Each test has the fields that Gradescope reads, and the scores add up to the total."""
    for name in ("honest-top", "half-l1", "hostile-memory"):
        results = json.loads((graded.out / "students" / name / "results.json").read_text())
        assert results["score"] == sum(test["score"] for test in results["tests"])
        assert sum(test["max_score"] for test in results["tests"]) == 100 * LESSONS
        for test in results["tests"]:
            assert {"name", "score", "max_score", "output", "visibility"} <= set(test)
        assert str(results["score"]) == graded.row(name, "all")["isolated"]


def test_junit_counts(graded: Graded) -> None:
    """Every student has a case per check and mode, and a skipped or blocked one is never without its mark."""
    root = ElementTree.parse(graded.out / "junit.xml").getroot()
    suites = {suite.get("name"): suite for suite in root}
    assert set(suites) == set(ALL_NAMES)
    for name, suite in suites.items():
        assert len(suite) == 2 * len(all_checks()), name
    marked = {str(case.get("name"))[:2] for case in suites["honest-top"] if len(case)}
    assert marked == {lesson.id for lesson in load_manifest().written} - set(FULL), "lessons that it does not hand in"
    assert all(len(case) == 1 for case in suites["half-nothing"])


def test_the_matrix_shows_everybody(graded: Graded) -> None:
    page = (graded.out / "matrix.md").read_text()
    for name in ALL_NAMES:
        assert f"[{name}](students/{name}/report.md)" in page
    assert "## The commonest failures" in page
    assert all(f'"name": "{name}"' in (graded.out / "matrix.html").read_text() for name in ALL_NAMES)


def test_students_with_the_same_functions_are_named(graded: Graded) -> None:
    """Nearly all of this class is the reference's; the mistaken ones share nothing that is not."""
    with (graded.out / "pairs.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert all(row["student"] < row["other"] and row["functions"] for row in rows)
    page = (graded.out / "matrix.md").read_text()
    assert "## Alike" in page
    assert not rows or f"{rows[0]['student']} and {rows[0]['other']}: " in page


def test_single_lessons_are_graded_alone(graded: Graded, tmp_path: Path) -> None:
    """The points are those of the chosen lessons, and what was not handed in is not a failure."""
    folder = tmp_path / "submissions"
    folder.mkdir()
    chosen = [graded.students[name] for name in ("wheat-L2", "half-nothing")]
    write_examples(folder, chosen)
    done = command(folder, tmp_path / "report", "--lessons", "L2,L1", "--jobs", "1", "--seed", str(SEED))
    assert done.returncode == 0, done.stderr[-4000:]
    with (tmp_path / "report" / "grades.csv").open(newline="") as stream:
        rows = {(row["student"], row["lesson"]): row for row in csv.DictReader(stream)}
    assert len(rows) == 2 * 3
    assert (rows["wheat-L2", "all"]["points"], rows["wheat-L2", "all"]["isolated"]) == ("200", "100")
    assert rows["wheat-L2", "L2"]["status"] == "pass"
    assert rows["wheat-L2", "L1"]["status"] == rows["half-nothing", "L2"]["status"] == "not handed in"


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(try_isolation().confinement(31, 2 << 30, 300)) as own:
        yield own


@pytest.mark.parametrize("lesson_id", [lesson.id for lesson in load_manifest().written if lesson.id not in NOTHING])
def test_the_reference_passes_where_a_lesson_is_graded(
    worker: Worker, lesson_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the lessons that nobody hands in here. Those of L8 are interpreted for a minute: its first task is enough."""
    lesson = load_manifest().lesson(lesson_id)
    checks = [check for check in checks_of([lesson]) if lesson_id != "L8" or check.task_id == "L8.A"]
    monkeypatch.setattr("smoke.grade.worker.checks_of", lambda lessons: checks)
    proof = worker.run_reference(lesson, SEED)
    assert [result.status for result in proof.results] == ["pass"] * len(checks), proof.results


def test_a_rerun_runs_nothing_again(graded: Graded) -> None:
    """The same seed and the same files: no record is written anew, and the reports are the same."""
    times = {path: path.stat().st_mtime_ns for path in (graded.out / "records").rglob("*.json")}
    assert len(times) == LESSONS * len(ALL_NAMES)
    before = (graded.out / "grades.csv").read_text()
    again = command(graded.folder, graded.out, "--timeout", str(PROCESSOR_SECONDS), "--mem", "2G", "--seed", str(SEED))
    assert again.returncode == 0, again.stderr[-2000:]
    assert [path for path, written in times.items() if path.stat().st_mtime_ns != written] == []
    assert (graded.out / "grades.csv").read_text() == before
