"""The parts of grading, without running any submission: reading, authorship, scores, records, documents."""

import ast
import csv
import ctypes
import gzip
import io
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from smoke.course.forms import normal_form
from smoke.course.starter import functions_of
from smoke.framework import prepared
from smoke.framework.bank import load_wheats
from smoke.framework.check import Failure, ProbeError, Result, checks_of
from smoke.framework.manifest import ENGINE, ROOT, Lesson, load_manifest
from smoke.grade import confinement, judge
from smoke.grade.authorship import Authorship, examine
from smoke.grade.command import choose_lessons, parse_size
from smoke.grade.confinement import PROCESSES
from smoke.grade.documents import fenced, gradescope, one_line, report, write_csv, write_junit
from smoke.grade.gradebook import run_safely
from smoke.grade.guard import Notes
from smoke.grade.landlock import LANDLOCK_CREATE, libc
from smoke.grade.likeness import pairs
from smoke.grade.matrix import page, write_matrix
from smoke.grade.probes import names_used
from smoke.grade.records import Records
from smoke.grade.rules import Decider
from smoke.grade.scoring import NOT_HANDED_IN, Mode, StudentScore, score_student
from smoke.grade.submissions import MAX_ENTRIES, Submission, free_name, read_submissions
from smoke.grade.trial import FIRST_UID, start_trial
from smoke.grade.worker import ModeRun, end_strays
from smoke.runner.runner import remove
from smoke.runner.transport import write_answer
from tests.smoke.submissions import coded, reference, starters, zipped

LESSONS = load_manifest().written
TOTAL = 100 * len(LESSONS)  # points
MODES: tuple[Mode, Mode] = ("isolated", "cumulative")


def passed(lesson_id: str) -> list[Result]:
    """Return a pass of every check of a lesson."""
    return [Result(check.id, "pass") for check in checks_of([load_manifest().lesson(lesson_id)])]


def scored(changes: dict[str, Result], authorships: dict[str, Authorship] | None = None):
    """Score a student whose checks pass but for ``changes``, the same in both modes."""
    results = {
        (lesson.id, mode): [changes.get(r.check_id, r) for r in passed(lesson.id)]
        for lesson in LESSONS
        for mode in MODES
    }
    return score_student(Submission("ada", {}), LESSONS, results, {}, authorships or {})


def points(student, mode: Mode) -> list[int]:
    return [score.earned for score in student.of_mode(mode)]


# Reading ------------------------------------------------------------------------------------------------------------


LAYOUTS = ["", "work/", "mini_engine/", "work/mini_engine/", "hw1/", "hw1/work/", "hw1/ada/work/mini_engine/"]


def write_submission(place: Path, name: str, files: dict[str, bytes], form: str) -> None:
    """Hand ``files`` in as a folder, a zip or a tar."""
    if form == "zip":
        (place / f"{name}.zip").write_bytes(zipped(files))
    elif form == "folder":
        for file, data in files.items():
            (place / name / file).parent.mkdir(parents=True, exist_ok=True)
            (place / name / file).write_bytes(data)
    else:
        with tarfile.open(place / f"{name}.{form}", "w:gz" if "gz" in form else "w") as archive:
            for file, data in files.items():
                info = tarfile.TarInfo(f"./{file}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("prefix", LAYOUTS)
@pytest.mark.parametrize("form", ["folder", "zip", "tar", "tgz"])
def test_files_are_found_wherever_students_put_them(tmp_path: Path, prefix: str, form: str) -> None:
    write_submission(tmp_path, "ada", coded({"attention/pool.py": "POOL", "driver.py": "DRIVER"}, prefix), form)
    (submission,) = read_submissions(tmp_path)
    assert submission == Submission("ada", {"attention/pool.py": "POOL", "driver.py": "DRIVER"})


@pytest.mark.parametrize("prefix", ["", "hw2/", "some where/else/"])
def test_a_name_that_the_course_has_once_is_found_without_its_folder(tmp_path: Path, prefix: str) -> None:
    flat = {"allocator.py": "ALLOCATOR", "params.py": "PARAMS", "radix_cache.py": "RADIX", "driver.py": "DRIVER"}
    write_submission(tmp_path, "ada", coded(flat, prefix), "zip")
    (submission,) = read_submissions(tmp_path)
    assert submission.files == {
        "attention/allocator.py": "ALLOCATOR",
        "sampler/params.py": "PARAMS",
        "radix_cache.py": "RADIX",
        "driver.py": "DRIVER",
    }
    assert submission.ignored == submission.faults == ()


def test_a_file_in_its_folder_goes_before_one_of_its_name(tmp_path: Path) -> None:
    files = {"work/attention/allocator.py": b"OWN", "allocator.py": b"OLD", "penalties.py": b"WHICH"}
    write_submission(tmp_path, "ada", files, "folder")
    (submission,) = read_submissions(tmp_path)
    assert submission.files == {"attention/allocator.py": "OWN"}
    twice, which = submission.faults
    assert "handed in 2 times; work/attention/allocator.py counts" in twice
    assert "penalties.py may be sampler/penalties.py or kernels/penalties.py" in which


@pytest.mark.parametrize("prefix", ["", "course-main/"])
@pytest.mark.parametrize("form", ["folder", "zip", "tgz"])
def test_of_a_clone_only_work_is_the_students(tmp_path: Path, prefix: str, form: str) -> None:
    """The clone has the course's own files, which are the solution."""
    course = {"lessons/manifest.toml": b"", "mini_engine/model.py": b"OURS", "mini_engine/driver.py": b"OURS"}
    course = {prefix + file: data for file, data in course.items()}
    write_submission(tmp_path, "ada", course | {f"{prefix}work/model.py": b"OWN", f"{prefix}.venv/x.py": b""}, form)
    write_submission(tmp_path, "bob", course, form)
    ada, bob = read_submissions(tmp_path)
    assert ada == Submission("ada", {"model.py": "OWN"})
    assert bob.files == {}
    assert bob.faults == ("it is a clone of the course with no file of its own in work/",)


def test_the_table_says_why_a_submission_earns_nothing(tmp_path: Path) -> None:
    deep = "d/" * 60
    place = tmp_path / "in"
    place.mkdir()
    write_submission(place, "ada", {f"{deep}driver.py": b"x = 1"}, "folder")
    write_submission(place, "bob", {"solution.ipynb": b"{}"}, "zip")
    (place / "cid.py").write_text("x = 1")
    (place / "dan.ipynb").write_text("{}")
    (place / "eve").mkdir()
    found = read_submissions(place)
    write_csv(tmp_path / "grades.csv", [score_student(each, LESSONS[:1], {}, {}, {}) for each in found])
    rows = list(csv.DictReader((tmp_path / "grades.csv").open(newline="")))
    words = {
        "ada": "lies more than 40 folders deep and was not looked into",
        "bob": "solution.ipynb is a notebook, and notebooks are not run: hand in the .py files",
        "cid": "cid.py cannot be read: it is neither a folder nor a zip nor a tar; put the lesson's .py files into",
        "dan": "dan.ipynb cannot be read: it is a notebook",
        "eve": "it has no file",
    }
    assert [row["student"] for row in rows] == [name for name in words for _ in range(2)]
    for row in rows:
        assert words[row["student"]] in row["reason"], row


def test_what_lies_beside_the_folder_hides_nothing(tmp_path: Path) -> None:
    others = {"README.md": b"", "essay.pdf": b"%PDF", ".vscode/settings.json": b"{}", "Thumbs.db": b"\0"}
    write_submission(tmp_path, "ada", {"hw1/driver.py": b"DRIVER", **others}, "zip")
    (submission,) = read_submissions(tmp_path)
    assert submission.files == {"driver.py": "DRIVER"}
    assert set(submission.ignored) == {"README.md", "essay.pdf"}
    assert submission.faults == ()


def test_a_folder_per_lesson_tells_files_of_one_name_apart(tmp_path: Path) -> None:
    files = {
        "L1_model/model.py": b"MODEL",
        "L3/driver.py": b"GREEDY",
        "l4-sampler/driver.py": b"SAMPLING",
        "L4 again/sampler/draw.py": b"DRAW",
        "L2/pool.py": b"POOL",
    }
    write_submission(tmp_path, "ada", files, "zip")
    (submission,) = read_submissions(tmp_path)
    assert submission.files == {
        "model.py": "MODEL",
        "driver.py": "GREEDY",
        "sampler/driver.py": "SAMPLING",
        "sampler/draw.py": "DRAW",
        "attention/pool.py": "POOL",
    }
    assert submission.faults == ()


def test_what_cannot_be_a_submission_is_one_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / "notes.txt").touch()
    (tmp_path / "bob.py").write_text("x = 1")
    (tmp_path / "cid.rar").write_bytes(b"Rar!")
    (tmp_path / "dan.tar.gz").write_bytes(b"no gzip")
    (tmp_path / "eve.zip").write_bytes(b"no zip")
    (tmp_path / "fay.tgz").write_bytes(gzip.compress(b"no tar"))
    os.mkfifo(tmp_path / "gus.zip")
    write_submission(tmp_path, "hal", {"driver.py": b"\xff\xfe"}, "folder")
    found = {submission.name: submission for submission in read_submissions(tmp_path)}
    assert list(found) == ["ada", "bob", "cid", "dan", "eve", "fay", "gus", "hal"]
    assert all(not submission.files and len(submission.faults) == 1 for submission in found.values())
    assert "none of its 1 files is a file of the course" in found["ada"].faults[0]
    assert "put the lesson's .py files into a folder" in found["bob"].faults[0]
    assert "UTF-8" in found["hal"].faults[0]


def test_folders_nested_deeper_than_python_can_follow(tmp_path: Path) -> None:
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / "driver.py").write_text("DRIVER")
    deepest = os.open(tmp_path / "ada", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("x", dir_fd=deepest)
        deeper = os.open("x", os.O_RDONLY, dir_fd=deepest)
        os.close(deepest)
        deepest = deeper
    os.close(deepest)
    (submission,) = read_submissions(tmp_path)
    assert submission.files == {"driver.py": "DRIVER"}
    assert "more than 40 folders deep" in submission.faults[0]
    remove(tmp_path / "ada")
    assert not (tmp_path / "ada").exists()


def test_a_tar_can_neither_climb_out_nor_link_nor_swell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(tmp_path / "ada.tar", "w") as archive:
        for name in ("../driver.py", "/model.py"):
            info = tarfile.TarInfo(name)
            info.size = 3
            archive.addfile(info, io.BytesIO(b"BAD"))
        link = tarfile.TarInfo("attention/pool.py")
        link.type = tarfile.SYMTYPE
        link.linkname = "/etc/passwd"
        archive.addfile(link)
    (submission,) = read_submissions(tmp_path)
    assert submission.files == {}
    assert len(submission.faults) == 1
    monkeypatch.setattr("smoke.grade.submissions.MAX_ARCHIVE_BYTES", 5)
    (submission,) = read_submissions(tmp_path)
    assert "unpacks to more than" in submission.faults[0]


def test_a_file_that_was_handed_in_twice_is_told(tmp_path: Path) -> None:
    (tmp_path / "ada.zip").write_bytes(zipped({"driver.py": b"TOP", "work/driver.py": b"WORK", "notes.txt": b""}))
    (submission,) = read_submissions(tmp_path)
    assert submission.files == {"driver.py": "TOP"}
    assert "handed in 2 times" in submission.faults[0]
    assert set(submission.ignored) == {"work/driver.py", "notes.txt"}


def test_a_zip_cannot_climb_out_link_or_lie_about_its_size(tmp_path: Path) -> None:
    """Nothing is unpacked, so a path is only a name; a link and a bomb are refused with a reason."""
    place = tmp_path / "in" / "deep"
    place.mkdir(parents=True)
    link = zipfile.ZipInfo("model.py")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(place / "ada.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../escaped.py", "raise SystemExit")
        archive.writestr("../driver.py", "raise SystemExit")
        archive.writestr(link, "/etc/passwd")
        archive.writestr("driver.py", "#" * 10_000_000)
    data = (place / "ada.zip").read_bytes().replace((10_000_000).to_bytes(4, "little"), (100).to_bytes(4, "little"))
    (place / "bob.zip").write_bytes(data)
    ada, bob = read_submissions(place)
    assert ada.files == bob.files == {}
    assert any("model.py" in fault and "no regular file" in fault for fault in ada.faults)
    assert any("driver.py" in fault and "512 KiB" in fault for fault in ada.faults)
    assert any("driver.py" in fault for fault in bob.faults), "a stated size that is a lie is not believed"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["ada.zip", "bob.zip", "deep", "in"]


def test_many_entries_and_broken_names(tmp_path: Path) -> None:
    (tmp_path / "a b;$(x).zip").write_bytes(zipped({f"x{i}.txt": b"" for i in range(MAX_ENTRIES + 10)}))
    (tmp_path / "=1+1").mkdir()
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "again").symlink_to(tmp_path / "loop")
    (tmp_path / "elsewhere").symlink_to(ENGINE)
    found = read_submissions(tmp_path)
    assert [submission.name for submission in found] == ["_1+1", "a_b_x_", "elsewhere", "loop"]
    assert len(found[1].ignored) == MAX_ENTRIES
    assert "links are not followed" in found[2].faults[0]
    assert free_name("Ada", {"ada"}) == "Ada-2"


def test_no_submission_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").touch()
    with pytest.raises(ValueError, match="one folder or archive per student"):
        read_submissions(tmp_path)


class Stumbling:
    """A worker whose second submission makes it fail."""

    def __init__(self) -> None:
        self.runner = self
        self.stopped = 0

    def stop_server(self) -> None:
        self.stopped += 1

    def run(self, submission: Submission, lessons: object, seed: int) -> ModeRun:
        if submission.name == "bob":
            raise RecursionError("too deep")
        return ModeRun(tuple(passed("L3")))


def test_what_the_grader_stumbles_over_stays_with_its_submission() -> None:
    worker = Stumbling()
    lesson = load_manifest().lesson("L3")
    files = {"driver.py": "x = 1"}
    runs = {name: run_safely(worker, Submission(name, files), lesson, 0) for name in ("ada", "bob", "cid")}  # type: ignore[arg-type]
    assert runs["ada"] == runs["cid"]
    assert all(result.passed for result in runs["ada"]["isolated"].results)
    for mode in MODES:
        assert {result.status for result in runs["bob"][mode].results} == {"crashed"}
        assert [result.check_id for result in runs["bob"][mode].results] == [r.check_id for r in passed("L3")]
        assert "RecursionError: too deep" in runs["bob"][mode].notes[0]
    assert worker.stopped == 1


# Authorship ---------------------------------------------------------------------------------------------------------


def test_a_copy_is_recognised_under_other_names() -> None:
    form = "def f(a, m):\n    s = {}\n    for k in range(m):\n        s += a[k]\n    return s"
    ours = "def f(x, n):\n    'Say.'\n    total: int = 0  # why\n    for i in range(n): total += x[i]\n    return total"
    same, copied, other = (functions_of(ast.parse(text))["f"] for text in (ours, form.format(0), form.format(1)))
    assert normal_form(same) == normal_form(copied)
    assert normal_form(same) != normal_form(other)


DISGUISES = {
    "pass": "pass",
    "unused local": "unused = previous = 1",
    "unused function": "def unused(x):\n    return x",
    "branch never taken": "if False:\n    print(1)",
    "mere annotation": "unused: int",
    "text": "'other words'",
}


def disguised(text: str, statement: str) -> str:
    """Put a statement that computes nothing into every function and change every docstring."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            has_docstring = ast.get_docstring(node) is not None
            node.body[: int(has_docstring)] = ast.parse("'Other words.'").body if has_docstring else []
            node.body[int(has_docstring) : int(has_docstring)] = ast.parse(statement).body
    return ast.unparse(tree)


@pytest.mark.parametrize("name", DISGUISES)
def test_a_copy_is_recognised_with_statements_that_compute_nothing(name: str) -> None:
    files = {file: disguised(text, DISGUISES[name]) for file, text in reference("L1", "L2").items()}
    for lesson in LESSONS[:2]:
        found = examine(Submission("ada", files), lesson)
        assert len(found.copied) == found.compared > 0
        assert found.share == 1.0


def test_a_copy_with_calls_in_it_is_told_with_its_share() -> None:
    files = {file: disguised(text, "print()") for file, text in reference("L2").items()}
    found = examine(Submission("ada", files), LESSONS[1])
    assert 0.8 < found.share < 1.0
    assert f"{found.share:.0%} of {found.compared} longer functions is the reference's own" in found.notes()[-1]


def test_another_solution_is_no_copy() -> None:
    """It was written anew, under the names that the course gives."""
    (other,) = (wheat.edit for wheat in load_wheats() if wheat.id == "W6-X1")
    found = examine(Submission("ada", {other.file: other.apply()}), load_manifest().lesson("L6"))
    assert found.compared > 10
    assert found.share < 0.35


@pytest.mark.parametrize("lesson", LESSONS[:3], ids=lambda lesson: lesson.id)
def test_the_reference_is_a_copy_and_a_starter_is_none(lesson: Lesson) -> None:
    copied = examine(Submission("ada", reference(lesson.id)), lesson)
    assert len(copied.copied) == copied.compared > 0
    assert copied.withheld == "", "copying is reported, not punished"
    assert not examine(Submission("bob", starters(lesson.id)), lesson).copied


@pytest.mark.parametrize(
    "line",
    [
        "import transformers",
        "from transformers.models import qwen3",
        "import smoke.framework.peer as p",
        "x = __import__('transformers')",
        "import sys; sys.modules['a' + 'b'].norm_peer(0)",
        "from sys import modules as m",
        "import sys as s; s.modules",
        "import sys; getattr(sys, 'modules')",
        "import ctypes",
        "g = rms_norm.__globals__",
        "x = getattr(f, '__closure__')",
        "e.__traceback__.tb_frame.f_back",
        "x = torch.from_file(name)",
    ],
)
def test_an_oracle_costs_the_points(line: str) -> None:
    found = examine(Submission("ada", {"driver.py": line}), load_manifest().lesson("L3"))
    assert "points withheld: driver.py" in found.withheld


def test_words_about_an_oracle_cost_nothing() -> None:
    """The reference's own docstrings speak of transformers."""
    text = '"""As transformers does."""\nimport gc\nNAME = "the smoke test"\nself.modules = [model.modules()]\n'
    found = examine(Submission("ada", {"driver.py": text}), load_manifest().lesson("L3"))
    assert found.withheld == ""
    assert found.remarkable == ("driver.py imports gc",)


@pytest.mark.parametrize("text", ["def f(:", "\0", "(" * 100_000, *("x = " + "-" * n + "1" for n in (3000, 50_000))])
def test_source_that_cannot_be_parsed_or_walked_is_no_error(text: str) -> None:
    found = examine(Submission("ada", {"driver.py": text}), load_manifest().lesson("L3"))
    assert found.copied == found.oracles == ()


def test_pairs_of_submissions_that_share_functions() -> None:
    """Under other names; not what is the reference's own, not what is unwritten, and many sharers weigh little."""
    own = "def {0}({1}, n):\n    {2} = []\n    for i in range(n):\n        if i % 3 == 1 or {1}[i] > n:\n"
    own += "            {2}.append({1}[i] * 2 + i)\n        else:\n            {2}.insert(0, i)\n    return {2}\n"
    common = own.replace("% 3", "% 7")
    loop = own.format("turn", "x", "out")
    files = {
        "ada": {"driver.py": loop, "model.py": common.format("a", "b", "c")},
        "bob": {
            "driver.py": disguised(own.format("turned", "values", "kept"), "unused = 1"),
            "model.py": disguised(common.format("d", "e", "f"), "pass"),
        },
        "cid": reference("L1") | {"driver.py": loop.replace("% 3", "% 4")},
        "dan": reference("L1") | {"attention/dense.py": common.format("g", "h", "k")},
        "eve": starters("L1", "L3") | {"attention/dense.py": common.format("g", "h", "k")},
        "fay": starters("L1", "L3"),
    }
    found = pairs([Submission(name, own_files) for name, own_files in files.items()], LESSONS[:3])
    assert (found[0].first, found[0].second) == ("ada", "bob")
    assert found[0].shares == {"driver.py:turn": 1.0, "model.py:a": 1.0}
    assert {(pair.first, pair.second) for pair in found[1:]} == {
        ("ada", "dan"),
        ("ada", "eve"),
        ("bob", "dan"),
        ("bob", "eve"),
        ("dan", "eve"),
    }
    assert found[1].weight < found[0].weight / 3
    assert "ada and bob: 2 longer functions are alike" in found[0].words()


# Scores -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["fail", "blocked", "timeout", "crashed", "not-implemented", "skipped"])
def test_only_a_pass_earns_points(status: str) -> None:
    """One check of a task with another status costs the whole task, and the reason says so."""
    check = checks_of([load_manifest().lesson("L1")], "L1.A")[0]
    student = scored({check.id: Result(check.id, status, detail="because")})  # type: ignore[arg-type]
    assert points(student, "isolated") == [89, *[100] * (len(LESSONS) - 1)]
    assert student.scores[0].reason == f"L1.A {status}: because"


def test_a_missing_result_is_a_zero_with_a_reason() -> None:
    student = score_student(Submission("ada", {}), LESSONS, {}, {}, {})
    assert student.total("isolated") == (0, TOTAL)
    assert student.scores[0].tasks[0].status == "skipped"
    assert "it was not run" in student.scores[0].reason


def test_cumulative_failures_are_blocked_by_the_earlier_lesson() -> None:
    """The same wrong L1.A and wrong L3.B: alone, L3 is judged for itself; over the own L1 it says nothing yet."""
    wrong = {
        check.id: Result(check.id, "fail", (Failure("case"),))
        for name in ("L1.A", "L3.B")
        for check in checks_of(LESSONS, name)
    }
    student = scored(wrong)
    by_mode = {mode: student.of_mode(mode)[2].tasks[1] for mode in MODES}
    assert by_mode["isolated"].status == "fail"
    assert by_mode["cumulative"].status == "blocked"
    assert {result.blocked_by for result in by_mode["cumulative"].results} == {"L1.A"}


def test_an_oracle_in_l1_costs_every_later_cumulative_score() -> None:
    student = scored({}, {"L1": Authorship(oracles=("model.py imports transformers",))})
    assert points(student, "isolated") == [0, *[100] * (len(LESSONS) - 1)]
    assert points(student, "cumulative") == [0] * len(LESSONS)
    assert "withheld" in student.of_mode("cumulative")[2].reason


# Records ------------------------------------------------------------------------------------------------------------


def test_records_hold_until_something_changes(tmp_path: Path) -> None:
    records = Records(tmp_path, "5", {"timeout": 60})
    lesson, later = load_manifest().lesson("L1"), load_manifest().lesson("L2")
    ada = Submission("ada", {"model.py": "MODEL", "driver.py": "DRIVER"})
    run = ModeRun((Result("L1.A.bits", "fail", (Failure("case", got="x"),), "why", 0.5),), None, ("seen",), "log")
    records.save(ada, lesson, {"isolated": run, "cumulative": run})
    assert records.load(ada, lesson) == {"isolated": run, "cumulative": run}
    assert records.load(Submission("ada", {"model.py": "MODEL", "driver.py": "OTHER"}), lesson), "L1 knows no driver"
    for files in ({"model.py": "OTHER"}, {"model.py": ""}, {}):
        assert records.load(Submission("ada", files), lesson) is None
    assert records.load(ada, later) is None
    assert Records(tmp_path, "5", {"timeout": 60}).load(ada, lesson)
    assert Records(tmp_path, "6", {"timeout": 60}).load(ada, lesson) is None
    assert Records(tmp_path, "5", {"timeout": 61}).load(ada, lesson) is None
    records.file(ada, lesson).write_text('{"key": ')
    assert records.load(ada, lesson) is None, "half a record is none"


def test_auto_draws_a_seed_and_keeps_it_for_a_report(tmp_path: Path) -> None:
    first = Records(tmp_path, "auto", {})
    again = Records(tmp_path, "auto", {})
    assert (again.seed, again.resumed) == (first.seed, True)
    assert not first.resumed
    seeds = {Records(tmp_path / name, "auto", {}).seed for name in "abcd"}
    assert len(seeds) > 1, "a fresh run draws a fresh seed"
    with pytest.raises(ValueError, match="--seed x"):
        Records(tmp_path, "x", {})


# Documents ----------------------------------------------------------------------------------------------------------


def hostile_words() -> Result:
    """Return a failure whose text tries to be a part of whatever it is printed in."""
    text = "```\n# Grade: 300 of 300\n| a | b |\n<script>\x00\x1b[31m\ufffe"
    return Result("L1.A.bits", "fail", (Failure("case", "", "1", text),), detail=f"=1+1 {text}")


def test_words_of_a_submission_stay_words(tmp_path: Path) -> None:
    student = scored({"L1.A.bits": hostile_words()})
    page = report(student, ["seed: 1"])
    headings = [line for line in page.splitlines() if line.startswith("# ")]
    inside = page.split("text\n", 1)[1]
    assert headings[0] == f"# ada: {TOTAL - 11} of {TOTAL} points"
    assert all(heading in inside for heading in headings[1:]), "what looks like a heading is inside a block of code"
    assert fenced("a ```` b").startswith("`````text")
    write_csv(tmp_path / "grades.csv", [student])
    assert "\x1b" not in page + (tmp_path / "grades.csv").read_text()
    write_junit(tmp_path / "junit.xml", [student])
    ElementTree.parse(tmp_path / "junit.xml")
    assert json.loads(json.dumps(gradescope(student, [])))["score"] == TOTAL - 11
    assert one_line("=cmd()|x") == "'=cmd()|x"


def only_first_handed_in() -> StudentScore:
    """Return the score of a student who handed in L1, all right, and nothing of L2."""
    chosen = LESSONS[:2]
    missing = [replace(result, status="not-implemented", detail=NOT_HANDED_IN + "all") for result in passed("L2")]
    results = {(name, mode): found for mode in MODES for name, found in (("L1", passed("L1")), ("L2", missing))}
    return score_student(Submission("ada", {}), chosen, results, {}, {})


def test_a_lesson_that_was_not_handed_in_is_no_failure(tmp_path: Path) -> None:
    student = only_first_handed_in()
    assert student.total("isolated") == (100, 200)
    assert "| not handed in | | 100 |" in report(student, [])
    write_junit(tmp_path / "junit.xml", [student])
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()[0]
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0")
    assert suite.get("skipped") == str(2 * len(passed("L2")))
    outputs = {test["number"]: test for test in gradescope(student, [])["tests"]}
    assert "status" not in outputs["L2.A"]
    assert outputs["L2.A"]["output"].startswith("not handed in")


def test_the_matrix_filters_and_holds_no_code_of_a_name(tmp_path: Path) -> None:
    student = only_first_handed_in()
    student = replace(student, submission=Submission("</script><b>", {}))
    write_matrix(tmp_path, [student, only_first_handed_in()], [], [])
    text = (tmp_path / "matrix.html").read_text()
    data = text.partition('type="application/json">')[2].partition("</script>")[0]
    rows = json.loads(data)["students"]
    assert [row["name"] for row in rows] == ["</script><b>", "ada"]
    assert rows[1]["lessons"][1]["tasks"]["L2.A"] == "not handed in"
    assert rows[1]["lessons"][0]["checks"] == {result.check_id: "pass" for result in passed("L1")}
    assert page([student], [], []).count("not-implemented") == 1, "in the legend alone"


def test_lessons_are_chosen_by_name() -> None:
    assert [lesson.id for lesson in choose_lessons("L4, L1")] == ["L1", "L4"]
    assert choose_lessons("") == LESSONS
    with pytest.raises(ValueError, match="L1, L2"):
        choose_lessons("L1,L99")


def test_sizes() -> None:
    assert (parse_size("512M"), parse_size("2g"), parse_size("1GiB")) == (2**29, 2**31, 2**30)
    for wrong in ("2", "G", "0G", "-1G", "2T"):
        with pytest.raises(ValueError, match="--mem"):
            parse_size(wrong)


# The guard ----------------------------------------------------------------------------------------------------------


def rules(tmp_path: Path, *trees: Path) -> Callable[..., str | None]:
    """Return the decision about an event of a candidate that may write to ``tmp_path/own``."""
    notes = Notes()
    own = tmp_path / "own"
    own.mkdir()
    readable = [str(path) for path in (own, *trees)]
    decide = Decider(notes.writer, notes.key, str(own), readable, readable).decide
    return lambda event, *args: decide(event, args)


def test_the_hook_knows_where_a_path_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "secret.txt").touch()
    (tmp_path / "tree" / "fair.txt").touch()
    (tmp_path / "tree" / "link.txt").symlink_to("../secret.txt")
    decide = rules(tmp_path, tmp_path / "tree")
    monkeypatch.chdir(tmp_path / "own")
    for path in ("../tree/fair.txt", str(tmp_path / "tree" / "fair.txt"), "new.txt", b"../tree", "../not there"):
        assert decide("open", path, "r", 0) is None, path
    for path in ("../secret.txt", "../tree/../secret.txt", "../tree/link.txt", str(tmp_path), b"../secret.txt"):
        assert "reading" in (decide("open", path, "r", 0) or ""), path
    assert decide("open", 5, "r", 0) is None, "an open descriptor was decided about when it was opened"
    assert "writing" in (decide("open", "../tree/fair.txt", "a", 0) or "")
    assert decide("open", "new.txt", "w", 0) is None
    assert "listing" in (decide("os.listdir", "..") or "")


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are looked up in /proc")
def test_the_hook_resolves_a_path_from_every_open_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``os.open`` does not tell its hook which folder a relative path starts from."""
    (tmp_path / "deep" / "tree").mkdir(parents=True)
    (tmp_path / "secret.txt").touch()
    decide = rules(tmp_path, tmp_path / "deep" / "tree")
    monkeypatch.chdir(tmp_path / "own")
    assert decide("open", "../../secret.txt", None, os.O_RDONLY) is None, "there is no such file from here"
    folder = os.open(tmp_path / "deep" / "tree", os.O_RDONLY)
    try:
        assert "reading" in (decide("open", "../../secret.txt", None, os.O_RDONLY) or "")
        assert "changing" in (decide("os.remove", "../../secret.txt", folder) or "")
        assert decide("os.remove", "own.txt", -1) is None
    finally:
        os.close(folder)


# Confinement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uid", [None, FIRST_UID])
def test_a_confined_process_is_confined(uid: int | None) -> None:
    """Also without another user: what this system offers is at least closed to a file that every user may write.

    The trial itself is tried here; what it says of this machine is printed in every report.
    """
    if uid is not None and os.geteuid() != 0:
        uid = None
    done = start_trial(uid, read_all=uid is not None)
    facts = json.loads(done.stdout)
    kernel_has_landlock = libc().syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1) >= 1
    assert facts["writes_refused"] is kernel_has_landlock
    assert facts["reads_refused"] is kernel_has_landlock
    assert facts["programs_refused"] or not kernel_has_landlock
    if os.geteuid() == 0:
        assert facts["network_closed"] is True
        assert facts["processes_limited"] is (uid is not None)


AS_NOBODY = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from smoke.grade import confinement, enclosure, trial
from smoke.grade.landlock import interpreter_paths
uid = int(sys.argv[2])
folder, readable = Path(sys.argv[4]), interpreter_paths()
if os.geteuid() == 0:
    os.chown(folder, uid, uid)
    confinement.become(uid, read_all=True)
if sys.argv[3] == "old":
    confinement.kernel = lambda: (5, 13)
own = enclosure.Enclosure(keeps_user=True)
if own.fork():
    sys.exit(own.wait())
fits = trial.count_forks(confinement.PROCESSES)
confinement.confine(confinement.Confinement(None, False, 2**30, 60, readable), folder, own.spaces)
limited = trial.count_forks(confinement.PROCESSES)
print(fits, limited, own.spaces.users)
"""


@pytest.mark.parametrize("kernel", ["this", "old"])
def test_processes_are_limited_without_root_where_they_are_counted_anew(kernel: str) -> None:
    """A grader with many processes of its own has candidates with a count, and so a limit, of their own."""
    with tempfile.TemporaryDirectory(prefix="smoke-") as name:  # pytest's folders are closed to other users
        words = [str(ROOT), str(FIRST_UID + 40), kernel, name]
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    fits, limited, has_own_users = done.stdout.split()
    assert int(fits) == PROCESSES, "this test's user has too many processes of its own"
    is_counted_anew = has_own_users == "True" and kernel == "this" and confinement.kernel() >= (5, 14)
    assert int(limited) == (PROCESSES - 3 if is_counted_anew else PROCESSES)  # itself and the two that wait for it


HANGS = "import sys, time; print('ready', flush=True); sys.stdin.readline(); time.sleep(100)"
ENDS = "print('ready', flush=True)"


@pytest.mark.slow
def test_a_verdict_has_limits_and_the_next_one_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = next(check for check in checks_of([load_manifest().lesson("L2")]) if check.id == "L2.A.pages_needed")
    right = judge.BOOT
    own = judge.Judge(1, 2 << 30)
    details = []
    for boot in (HANGS, ENDS):
        monkeypatch.setattr(judge, "BOOT", boot)
        details.append(own(check, 0, tmp_path, 0)[0].detail)
    assert [detail.partition("judged: ")[2] for detail in details] == ["no verdict after 1 s", "the process ended"]
    assert own.spent >= 1
    monkeypatch.setattr(judge, "BOOT", right)
    write_answer(tmp_path, 0, ProbeError("ValueError", "m", "p"), 0.1)
    result, answer = own(check, 0, tmp_path, 0)
    own.close()
    assert (result.status, answer) == ("fail", None)
    assert result.failures[0].got == "ValueError: m"


def test_what_outlived_its_server_is_ended(tmp_path: Path) -> None:
    """It is known by the HOME that it was started with, and nothing else is."""
    sleep = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(100)"]

    def started(home: Path) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(sleep, env={"HOME": str(home)}, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout is not None, "the process was started with a pipe"
        assert process.stdout.readline() == b"1\n"
        return process

    strays = [started(tmp_path / "server") for _ in range(2)]
    other = started(tmp_path / "server-2")
    assert end_strays(tmp_path / "server", None) >= 2
    assert [stray.wait(10) for stray in strays] == [-signal.SIGKILL, -signal.SIGKILL]
    assert end_strays(tmp_path / "server", None) == 0
    assert other.poll() is None, "another server's candidate must live"
    other.kill()
    other.wait()


def test_what_a_probe_imports_late_is_loaded_before_its_process_is_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A confined process may not list the folder of the checks, so it could not find them."""
    late = "smoke.checks.l8.probes"
    monkeypatch.delitem(sys.modules, late, raising=False)
    used = names_used([check.probe for check in checks_of([load_manifest().lesson("L8")])])
    assert late in sys.modules
    assert {"noise_kernel", "key_kernel", "cut_kernel"} <= used[late]


def double(values: list[int], times: int) -> Iterator[list[int]]:
    """Yield an input several times."""
    return (values * 2 for _ in range(times))


def test_a_prepared_input_is_recorded_and_handed_in_without_its_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "BOOK", prepared.Book())
    made = prepared.prepared(double)
    with prepared.recording() as answers:
        assert list(made([1], 2)) == [[1, 1], [1, 1]]
    assert names_used([made]) == {}, "what makes it is not used by a probe"
    prepared.hand_in(answers)
    given = list(made([1], 2))
    given[0].append(5)
    assert list(made([1], 2)) == [[1, 1], [1, 1]], "a candidate may write into what it is given"
    with pytest.raises(RuntimeError, match="not made before"):
        made([2], 2)


def test_tensors_are_told_apart_by_all_of_their_elements_and_their_shape() -> None:
    long = torch.zeros(5000)
    other = long.clone()
    other[2500] = 1
    told = [prepared.told([tensor]) for tensor in (long, other, long.half(), torch.zeros(0, 3), torch.zeros(0, 4))]
    assert len(set(told)) == 5
