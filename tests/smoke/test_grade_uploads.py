"""What learning platforms import: their columns, the roster, and Gradescope's program for one submission."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from smoke.framework.check import Result, checks_of
from smoke.framework.manifest import ENGINE, ROOT, load_manifest
from smoke.grade.scoring import MODES, NOT_HANDED_IN, StudentScore, score_student
from smoke.grade.submissions import Submission
from smoke.grade.uploads import chosen_formats, match, read_roster, write_uploads

LESSONS = load_manifest().written[:3]
CANVAS_EXPORT = """Student,ID,SIS User ID,SIS Login ID,Section,Essay (77)
    Points Possible,,,,,10
"Lovelace, Ada",5001,S-1,ada,Monday,9
"Noyce, Bob",5002,S-2,bob@uni.test,Tuesday,8
"""
MOODLE_EXPORT = """First name;Last name;ID number;Email address
Ada;Lovelace;1001;Ada.L@uni.test
Bob;Noyce;1002;bob@uni.test
"""


def score(name: str) -> StudentScore:
    """Return a student who passes L1, fails a check of L2.A and did not hand in L3."""
    results = {
        (lesson.id, mode): [Result(c.id, "pass") for c in checks_of([lesson])] for lesson in LESSONS for mode in MODES
    }
    wrong = checks_of([LESSONS[1]], "L2.A")[0].id
    for mode in MODES:
        results["L2", mode] = [r if r.check_id != wrong else Result(wrong, "fail") for r in results["L2", mode]]
        results["L3", mode] = [
            Result(r.check_id, "not-implemented", detail=f"{NOT_HANDED_IN}driver.py") for r in results["L3", mode]
        ]
    return score_student(Submission(name, {"model.py": ""}), LESSONS, results, {}, {})


def written(out: Path, name: str, students: list[str], roster: str | None) -> list[list[str]]:
    """Return the rows of a platform's table for ``students``."""
    file = out / "roster.csv"
    file.write_text(roster or "", encoding="utf-8-sig")
    scores = [score(student) for student in students]
    who = match([each.submission for each in scores], read_roster(file) if roster else None)
    write_uploads(out, chosen_formats(name), scores, who, ["seed: 1"])
    with (out / f"{name}.csv").open(newline="", encoding="utf-8") as stream:
        return list(csv.reader(stream))


def points() -> list[int]:
    """Return what the student earns in L1 and L2."""
    return [each.earned for each in score("x").of_mode("isolated")[:2]]


def test_canvas_reads_its_own_five_columns_and_the_possible_points(tmp_path: Path) -> None:
    """As its importer does: it looks at these places of the header, and a number in brackets is an old column's."""
    header, possible, ada, bob = written(tmp_path, "canvas", ["ada", "Noyce_Bob"], CANVAS_EXPORT)
    assert "Student" in header[0]
    assert "ID" in header[1]
    assert re.search(r"SIS\s+User\s+ID", header[2])
    assert re.search(r"SIS\s+Login\s+ID", header[3])
    assert "Section" in header[4]
    assert header[5:] == [f"{lesson.id} {lesson.title}" for lesson in LESSONS]
    assert not any(re.search(r"\(\d+\)$|(Current|Final|Override) (Score|Points|Grade)", title) for title in header[5:])
    assert "Points Possible" in possible[0]
    assert possible[5:] == ["100"] * 3
    assert ada == ["Lovelace, Ada", "5001", "S-1", "ada", "Monday", *map(str, points()), ""]
    assert bob[:5] == ["Noyce, Bob", "5002", "S-2", "bob@uni.test", "Tuesday"]
    assert points()[0] == 100 > points()[1]


def test_the_id_of_a_plain_roster_is_no_number_of_canvas(tmp_path: Path) -> None:
    """Its own numbers are others: 1001 may be another student's there."""
    *_, ada = written(tmp_path, "canvas", ["1001"], MOODLE_EXPORT)
    assert ada[:5] == ["Ada Lovelace", "", "1001", "Ada.L@uni.test", ""]


def test_moodle_is_given_nobody_and_nothing_that_ends_its_import(tmp_path: Path) -> None:
    """It ends at an unknown student and at a grade above 100; a dash is no grade."""
    rows = written(tmp_path, "moodle", ["ada.l", "1002", "stranger"], MOODLE_EXPORT)
    assert rows[0] == ["Username", "ID number", "Email address", *(f"{lesson.id} {lesson.title}" for lesson in LESSONS)]
    assert rows[1] == ["", "1001", "Ada.L@uni.test", *map(str, points()), "-"]
    assert [row[1] for row in rows[1:]] == ["1001", "1002"]
    assert all(grade == "-" or float(grade) <= 100 for row in rows[1:] for grade in row[3:])


def test_without_a_roster_the_name_of_a_submission_is_the_id(tmp_path: Path) -> None:
    assert written(tmp_path, "moodle", ["1001"], None)[1][:3] == ["1001", "1001", ""]


def test_a_roster_that_helps_nobody_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "roster.csv"
    file.write_text("name,shoe size\nAda,38\n")
    with pytest.raises(ValueError, match="has the columns 'name,shoe size'; one of sis user id"):
        read_roster(file)
    with pytest.raises(ValueError, match="cannot be read"):
        read_roster(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="--format excel"):
        chosen_formats("canvas, excel")
    file.write_text("name,id\nAda,1\nAda,2\nEve,3\n")
    with pytest.raises(ValueError, match="2 students of the roster may be Ada"):
        match([Submission("Ada", {})], read_roster(file))
    file.write_text("name,id,submission\nAda,1,hw_ada\nAda,2,other\n")
    assert match([Submission("hw_ada", {}), Submission("Ada", {})], read_roster(file))["hw_ada"].id == "1"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Gradescope's containers run Linux")
def test_gradescopes_program_grades_one_submission(tmp_path: Path) -> None:
    """Laid out as in its container, with a file without its folder; nothing of it uses the network."""
    (tmp_path / "submission").mkdir()
    (tmp_path / "submission" / "driver.py").write_text((ENGINE / "driver.py").read_text())
    own = {"AUTOGRADER": str(tmp_path), "COURSE": str(ROOT), "PYTHON": sys.executable, "LESSONS": "L3"}
    done = subprocess.run(
        [str(ROOT / "smoke/grade/gradescope/run_autograder")],
        env={**os.environ, **own, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert results["score"] == sum(t["score"] for t in results["tests"] if "(optional)" not in t["name"]) == 100
    assert {test["number"] for test in results["tests"]} == {task.id for task in load_manifest().lesson("L3").tasks}
