"""``python -m smoke grade`` over a class: honest, half-done, broken, mistaken and hostile submissions.

One run of the command, in a process of its own, is shared by all tests here; each looks at another part of its outcome.
It grades L2 and L3. L1 is what their cumulative points stand on.
"""

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from smoke.bank.accept import edited
from smoke.course.starter import empty
from smoke.framework.bank import load_pitfalls, load_wheats
from smoke.framework.check import checks_of
from smoke.framework.manifest import ROOT, load_manifest
from smoke.grade.command import grade_command
from smoke.grade.trial import try_isolation
from smoke.grade.worker import Worker
from tests.smoke.submissions import coded, reference, starters

pytestmark = pytest.mark.slow

SEED = 7
PROCESSOR_SECONDS = 25  # the reference needs 9 to 17 for the longer lesson, by machine
ALARM = Path("/tmp/smoke-attack.txt")

# Isolated and cumulative points of L2 and L3, by student.
POINTS = {
    "broken": (100, 0, 0, 0),
    "half": (80, 20, 0, 0),
    "hostile": (0, 0, 0, 0),
    "mistaken": (40, 40, 0, 0),
    "nothing": (0, 0, 0, 0),
    "starter": (0, 0, 0, 0),
    "top": (100, 100, 100, 100),
    "variant": (100, 100, 0, 0),
}
STATUSES = {  # of tasks, isolated
    "broken": {"L3.A": "crashed", "L3.C": "crashed"},
    "half": {"L2.A": "not-implemented", "L2.B": "pass"},
    "hostile": {"L2.A": "not-implemented", "L3.A": "crashed"},
    "mistaken": {"L2.B": "pass", "L2.C": "fail", "L2.D": "blocked"},
    "starter": {"L2.A": "not-implemented", "L3.A": "not-implemented"},
    "top": {"L3.B": "pass", "L3.C": "not-implemented"},
}


def submissions(victim: Path) -> dict[str, dict[str, bytes]]:
    """Return what each student hands in. The hostile one tries to write ``victim``."""
    wheats = [next(wheat for wheat in load_wheats() if wheat.lesson_id == lesson) for lesson in ("L1", "L2")]
    correct = reference("L1", "L2") | edited(*(wheat.edit for wheat in wheats))
    pitfall = next(pitfall for pitfall in load_pitfalls() if pitfall.id == "P2-C1")
    half = reference("L2")
    del half["attention/allocator.py"]
    driver = reference("L3")["driver.py"]
    attack = starters("L2")["attention/allocator.py"] + writing(victim)
    core = reference("L1", "L2") | {"driver.py": empty("driver.py", [load_manifest().task("L3.C")])}  # C is optional
    oracle = "from transformers.models import qwen3\n" + driver
    return {
        "broken": coded(reference("L2") | {"model.py": "1 / 0\n", "driver.py": driver + "\ndef f(:\n"}),
        "half": coded(half),
        "hostile": coded({"attention/allocator.py": attack, "driver.py": oracle, "conftest.py": "", "torch.py": ""}),
        "mistaken": coded(reference("L2") | edited(pitfall.edit)),
        "nothing": {},
        "starter": coded(starters("L2", "L3"), "work/"),
        "top": coded(core, "work/"),
        "variant": {file: b"\xef\xbb\xbf" + text for file, text in coded(correct, "my homework/work/").items()},
    }


def writing(victim: Path) -> str:
    """Return code that tries to write ``victim`` and other places, through Python and past it."""
    return f"""
import ctypes, os
for _path in ({str(victim)!r}, {str(ALARM)!r}, os.path.abspath("../smoke-attack.txt"),
              os.path.join(os.path.dirname(__file__), "smoke-attack.py"), __file__):
    try:
        with open(_path, "a") as _stream:
            _stream.write("attacked")
    except OSError:
        pass
    try:
        _fd = ctypes.CDLL(None).open(_path.encode(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.write(_fd, b"attacked")
    except OSError:
        pass
try:
    os.system("touch {ALARM}")
except OSError:
    pass
"""


@dataclass(frozen=True)
class Graded:
    """The submissions' folder, the report's, and the file that an attack tries to change."""

    folder: Path
    out: Path
    victim: Path

    def rows(self) -> dict[tuple[str, str], dict[str, str]]:
        """Return the rows of ``grades.csv`` by student and lesson."""
        with (self.out / "grades.csv").open(newline="") as stream:
            return {(row["student"], row["lesson"]): row for row in csv.DictReader(stream)}

    def report(self, name: str) -> str:
        """Return a student's report."""
        return (self.out / "students" / name / "report.md").read_text()

    def status(self, name: str, task_id: str) -> str:
        """Return the isolated status of a task in the report."""
        line = next(line for line in self.report(name).splitlines() if line.startswith(f"| {task_id} "))
        return line.split("|")[2].strip()


@pytest.fixture(scope="session")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graded]:
    """Grade the whole class once."""
    base = tmp_path_factory.mktemp("grade")
    own = Graded(base / "submissions", base / "report", base / "victim.txt")
    base.chmod(0o777)
    own.victim.write_text("untouched")
    own.victim.chmod(0o666)  # only confinement keeps it from being written
    for name, files in submissions(own.victim).items():
        (own.folder / name).mkdir(parents=True)
        for file, data in files.items():
            (own.folder / name / file).parent.mkdir(parents=True, exist_ok=True)
            (own.folder / name / file).write_bytes(data)
    limits = ["--timeout", str(PROCESSOR_SECONDS), "--mem", "2G"]
    words = ["grade", str(own.folder), "--out", str(own.out), "--lessons", "L3,L2", "--seed", str(SEED), *limits]
    done = subprocess.run(
        [sys.executable, "-m", "smoke", *words], cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    yield own
    ALARM.unlink(missing_ok=True)


def test_points_are_those_that_were_worked_for(graded: Graded) -> None:
    rows = graded.rows()
    points = {
        name: tuple(int(rows[name, lesson][mode]) for lesson in ("L2", "L3") for mode in ("isolated", "cumulative"))
        for name, _ in rows
    }
    assert points == POINTS
    assert {row["points"] for (_, lesson), row in rows.items() if lesson == "all"} == {"200"}
    for (_, lesson), row in rows.items():
        assert lesson == "all" or row["reason"] or row["isolated"] == row["cumulative"] == row["points"], row


def test_a_crash_is_not_called_a_wrong_answer_and_nothing_handed_in_no_failure(graded: Graded) -> None:
    for name, statuses in STATUSES.items():
        assert {task_id: graded.status(name, task_id) for task_id in statuses} == statuses, name
    rows = graded.rows()
    assert rows["variant", "L2"]["status"] == "pass"
    assert rows["variant", "L3"]["status"] == rows["nothing", "L2"]["status"] == "not handed in"


def test_the_report_speaks_like_the_student_command(graded: Graded) -> None:
    report = graded.report("mistaken")
    for words in ("expected", "got", "checked", "lessons/L2_attention/C_", f"seed: {SEED}", "network: "):
        assert words in report


def test_an_attack_leaves_the_machine_as_it_was(graded: Graded) -> None:
    """Nothing outside a candidate's folder was written: not by Python, not past it."""
    assert graded.victim.read_text() == "untouched"
    assert not ALARM.exists()
    assert not list(Path("/tmp").glob("smoke-*/smoke-attack*"))
    assert not [path for part in ("smoke", "mini_engine") for path in (ROOT / part).rglob("smoke-attack*")]


def test_attempts_are_reported(graded: Graded) -> None:
    rows = graded.rows()
    page = (graded.out / "matrix.md").read_text()
    wanted = {
        ("hostile", "L2"): ("refused: writing", "refused: starting a program", "refused: the C library"),
        ("hostile", "L3"): ("driver.py imports transformers.models",),
        ("top", "L2"): ("100% of 8 longer functions is the reference's own: PageAllocator.allocate 100%",),
    }
    for key, notes in wanted.items():
        for words in notes:
            assert words in rows[key]["notes"], key
            assert words in page, key
    for file in ("conftest.py", "torch.py"):
        assert f"`{file}`" in graded.report("hostile"), "it is no file of the manifest, so it was not run"


def test_every_student_stands_in_the_pages_and_in_gradescopes_file(graded: Graded) -> None:
    rows = graded.rows()
    page = (graded.out / "matrix.md").read_text()
    assert "## The commonest failures" in page
    for name in POINTS:
        assert f"[{name}](students/{name}/report.md)" in page
        results = json.loads((graded.out / "students" / name / "results.json").read_text())
        assert str(results["score"]) == rows[name, "all"]["isolated"]
        core = [test for test in results["tests"] if "(optional)" not in test["name"]]
        assert results["score"] == sum(test["score"] for test in core)
        assert sum(test["max_score"] for test in core) == 200
        for test in results["tests"]:
            assert {"name", "score", "max_score", "output", "visibility"} <= set(test)


def test_a_rerun_runs_nothing_again(graded: Graded) -> None:
    """The same seed and the same files: no record is written anew, and the reports are the same."""
    times = {path: path.stat().st_mtime_ns for path in (graded.out / "records").rglob("*.json")}
    assert len(times) == 2 * len(POINTS)
    before = (graded.out / "grades.csv").read_text()
    grade_command(graded.folder, graded.out, timeout=PROCESSOR_SECONDS, seed=str(SEED), lessons="L2,L3")
    assert [path for path, written in times.items() if path.stat().st_mtime_ns != written] == []
    assert (graded.out / "grades.csv").read_text() == before


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(try_isolation().confinement(31, 2 << 30, 300)) as own:
        yield own


@pytest.mark.parametrize("lesson_id", ["L4", "L5", "L6", "L7", "L8", "L9", "L10", "L11", "L12"])
def test_the_reference_passes_where_a_lesson_is_graded(
    worker: Worker, lesson_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a task's checks need is there: the first of each is tried, of L8, which is interpreted, that of one task.

    The command itself tries all checks of a lesson before it grades, and L1 is run whole among the attacks.
    """
    lesson = load_manifest().lesson(lesson_id)
    tasks = lesson.tasks[:1] if lesson_id == "L8" else lesson.tasks
    checks = [next(check for check in checks_of([lesson]) if check.task_id == task.id) for task in tasks]
    monkeypatch.setattr("smoke.grade.worker.checks_of", lambda lessons: checks)
    proof = worker.run_reference(lesson, SEED)
    assert [result.status for result in proof.results] == ["pass"] * len(checks), proof.results
    assert proof.notes == (), "the checks themselves do nothing that is noted"
