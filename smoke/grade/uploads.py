"""Tables that learning platforms import: a row per student, a column per lesson, isolated points.

Owns: the platforms' columns, and the roster that says whose a submission is. Must not know: how points are counted.

Canvas reads a header that begins with its own five columns, and a row "Points Possible". Moodle asks which column names
the student; one unknown student ends its whole import, and so does a grade above 100. So a table has the students of
the roster alone, and no column with the sum. A lesson that was not handed in has no grade.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smoke.grade.documents import gradescope, one_line
from smoke.grade.scoring import StudentScore
from smoke.grade.submissions import Submission, free_name

FORMATS = ("canvas", "moodle", "gradescope")
CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
MOODLE = ("Username", "ID number", "Email address")
NO_GRADE = {"canvas": "", "moodle": "-"}
# What a roster's columns may be called. Canvas's own export has an "ID" besides, which is no student's number.
COLUMNS = {
    "submission": ("submission",),
    "name": ("name", "student", "full name"),
    "first": ("first name", "firstname"),
    "last": ("last name", "lastname", "surname"),
    "id": ("sis user id", "id number", "student id", "sid", "id"),
    "login": ("sis login id", "login id", "username", "login"),
    "email": ("email address", "email", "e-mail"),
    "section": ("section", "sections"),
}
IDENTIFYING = ("id", "login", "email")


@dataclass(frozen=True)
class Student:
    """Who handed a submission in, as the platforms call them; what is not known is empty."""

    name: str = ""
    id: str = ""
    login: str = ""
    email: str = ""
    section: str = ""
    canvas: str = ""
    submission: str = ""

    def answers_to(self, submission: str) -> bool:
        """Whether a submission of this name is theirs: what the roster's column says, or any name of theirs."""
        names = (self.submission,) if self.submission else (self.name, self.id, self.login, self.email)
        whole = {free_name(name, set()).lower() for name in (*names, self.email.partition("@")[0]) if name}
        return submission.lower() in whole


def chosen_formats(text: str) -> tuple[str, ...]:
    """Return the formats that ``canvas,moodle`` names. Raises ``ValueError`` for another."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in FORMATS:
            raise ValueError(f"--format {name} is unknown; choose among {', '.join(FORMATS)}")
    return names


def read_roster(file: Path) -> list[Student]:
    """Read a CSV with a row per student, such as Canvas's or Moodle's own export. Raises ``ValueError`` for another."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--roster {file} cannot be read: {error}; give a CSV file in UTF-8") from None
    first = text.partition("\n")[0]
    table = csv.DictReader(text.splitlines(), delimiter=max(",;\t", key=first.count), restval="")
    headers = {header.strip().lower(): header for header in table.fieldnames or ()}
    if not any(column in headers for field in IDENTIFYING for column in COLUMNS[field]):
        wanted = ", ".join(COLUMNS[field][0] for field in IDENTIFYING)
        raise ValueError(f"--roster {file} has the columns {first.strip()!r}; one of {wanted} is needed")
    students = [student_of({name: (row[column] or "").strip() for name, column in headers.items()}) for row in table]
    return [each for each in students if "points possible" not in each.name.lower()]  # a row of Canvas's export


def student_of(row: Mapping[str, str]) -> Student:
    """Return the student of a row, whose columns have names in lower case."""
    canvas = row.get("id", "") if "sis user id" in row or "sis login id" in row else ""
    known = {name: value for name, value in row.items() if not (canvas and name == "id")}
    found = {field: next((known[c] for c in names if known.get(c)), "") for field, names in COLUMNS.items()}
    name = found["name"] or f"{found.pop('first')} {found.pop('last')}".strip()
    fields = ("id", "login", "email", "section", "submission")
    return Student(name, canvas=canvas, **{field: found[field] for field in fields})


def match(submissions: Sequence[Submission], roster: Sequence[Student] | None) -> dict[str, Student]:
    """Return the student of each submission that has one; without a roster its name is the student's id.

    Raises ``ValueError`` if two students answer to one name.
    """
    if roster is None:
        return {each.name: Student(each.name, each.name, each.name) for each in submissions}
    found: dict[str, Student] = {}
    for submission in submissions:
        fitting = [student for student in roster if student.answers_to(submission.name)]
        if len(fitting) > 1:
            raise ValueError(
                f"{len(fitting)} students of the roster may be {submission.name}: "
                f"{', '.join(each.name or each.id or each.email for each in fitting)}; add a column submission to it"
            )
        if fitting:
            found[submission.name] = fitting[0]
    return found


def write_uploads(
    out: Path, formats: Sequence[str], scores: Sequence[StudentScore], who: Mapping[str, Student], words: Sequence[str]
) -> None:
    """Write a file for each of ``formats``. ``words`` are sentences about the run, for Gradescope's page."""
    for name in formats:
        if name == "gradescope":
            (out / "results.json").write_text(json.dumps(gradescope(scores[0], words), indent=1), encoding="utf-8")
        else:
            with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as stream:
                csv.writer(stream).writerows(table_of(name, scores, who))


def table_of(name: str, scores: Sequence[StudentScore], who: Mapping[str, Student]) -> list[list[str]]:
    """Return the rows of a platform's table, the header first."""
    lessons = scores[0].of_mode("isolated")
    titles = [f"{score.lesson.id} {score.lesson.title}" for score in lessons]
    if name == "canvas":
        points = ["    Points Possible", *[""] * (len(CANVAS) - 1), *(str(score.points) for score in lessons)]
        rows = [[*CANVAS, *titles], points]
    else:
        rows = [[*MOODLE, *titles]]
    for student in scores:
        person = who.get(student.submission.name)
        if person is not None:
            login = person.login or person.email
            canvas = (person.name or login or person.id, person.canvas, person.id, login, person.section)
            own = canvas if name == "canvas" else (person.login, person.id, person.email)
            grades = [score.earned if score.handed_in else NO_GRADE[name] for score in student.of_mode("isolated")]
            rows.append([*map(one_line, own), *map(str, grades)])
    return rows
