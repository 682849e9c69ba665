"""Students against checks: a page that filters, and one of Markdown with the commonest failures.

Owns: symbols, colours, layout. Must not know: how points are counted.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smoke.framework.check import all_checks
from smoke.grade.documents import quoted
from smoke.grade.likeness import Pair
from smoke.grade.scoring import NOT_THERE, LessonScore, StudentScore

# Symbol, background, colour of the symbol. Light and dark alternate, so the page also reads without colours.
LOOKS: dict[str, tuple[str, str, str]] = {
    "pass": ("✓", "#d7e8f4", "#1b4f72"),
    "fail": ("×", "#b4431f", "#ffffff"),
    "blocked": ("○", "#f3e3b3", "#5c4400"),
    "timeout": ("T", "#5b2a86", "#ffffff"),
    "crashed": ("!", "#222222", "#ffffff"),
    "not-implemented": ("·", "#ffffff", "#5a5a5a"),
    "skipped": ("–", "#d9d9d9", "#333333"),
    NOT_THERE: ("", "#f4f4f4", "#5a5a5a"),
}
COMMONEST = 12
MOST_PAIRS = 30  # on the page; pairs.csv has all
TEMPLATE = Path(__file__).with_name("matrix.html")


def write_matrix(out: Path, students: Sequence[StudentScore], found: Sequence[Pair], conditions: Sequence[str]) -> None:
    """Write ``matrix.html`` and ``matrix.md``."""
    (out / "matrix.md").write_text(page(students, found, conditions), encoding="utf-8")
    data = {"looks": LOOKS, "summary": summary(students), "students": [row_of(student) for student in students]}
    text = json.dumps(data).replace("<", "\\u003c")  # so that no name can end the element that holds it
    (out / "matrix.html").write_text(TEMPLATE.read_text(encoding="utf-8").replace("{DATA}", text), encoding="utf-8")


def row_of(student: StudentScore) -> dict[str, Any]:
    """Return what the page shows of one student: points, and per lesson the tasks and checks with their statuses."""
    lessons = []
    for score in student.of_mode("isolated"):
        tasks = {task.task.id: status_of(score, task.status) for task in score.tasks}
        checks = {result.check_id: status_of(score, result.status) for result in score.results}
        lessons.append({"id": score.lesson.id, "earned": score.earned, "tasks": tasks, "checks": checks})
    earned, points = student.total("isolated")
    withheld = any(score.withheld for score in student.scores)
    return {
        "name": student.submission.name,
        "isolated": earned,
        "cumulative": student.total("cumulative")[0],
        "points": points,
        "withheld": withheld,
        "lessons": lessons,
    }


def status_of(score: LessonScore, status: str) -> str:
    """Return a status, or that the lesson was not handed in."""
    return status if score.handed_in else NOT_THERE


def summary(students: Sequence[StudentScore]) -> str:
    """Say in words what the picture shows."""
    full = sum(earned == points for earned, points in (student.total("isolated") for student in students))
    counts = failures(students)
    worst = f" The check most often not passed is {counts[0][0]}, by {len(counts[0][1])}." if counts else ""
    checks = len([result for score in students[0].of_mode("isolated") for result in score.results])
    return f"{len(students)} students against {checks} checks; {full} with all points.{worst}"


def failures(students: Sequence[StudentScore]) -> list[tuple[str, list[str]]]:
    """Return the checks that were run and not passed with the students' names, the commonest first."""
    names: dict[str, list[str]] = defaultdict(list)
    for student in students:
        for score in student.of_mode("isolated"):
            for result in score.results:
                if result.status in ("fail", "timeout", "crashed"):
                    names[result.check_id].append(student.submission.name)
    return sorted(names.items(), key=lambda item: -len(item[1]))


def page(students: Sequence[StudentScore], found: Sequence[Pair], conditions: Sequence[str]) -> str:
    """Return ``matrix.md``: the table by task, the commonest failures, who is alike, and what was noticed."""
    tasks = [task.task.id for score in students[0].of_mode("isolated") for task in score.tasks]
    lines = ["# Students and tasks", "", "[matrix.html](matrix.html) has every check, and filters.", ""]
    lines += [summary(students), ""]
    lines += ["Each lesson's files over the reference; the last two columns are points, isolated and cumulative.", ""]
    lines += [f"| student | {' | '.join(tasks)} | isolated | cumulative |", "|---" * (len(tasks) + 1) + "|---:|---:|"]
    for student in students:
        scores = student.of_mode("isolated")
        marks = [LOOKS[status_of(score, task.status)][0] for score in scores for task in score.tasks]
        totals = f"{student.total('isolated')[0]} | {student.total('cumulative')[0]}"
        link = f"[{student.submission.name}](students/{student.submission.name}/report.md)"
        lines.append(f"| {link} | {' | '.join(marks)} | {totals} |")
    lines += ["", "Signs: " + ", ".join(f"{symbol} {name}" for name, (symbol, _, _) in LOOKS.items() if symbol)]
    lines[-1] += "; an empty cell was not handed in."
    lines.append("")
    lines += ["## The commonest failures", "", "| check | students | proves |", "|---|---:|---|"]
    for check_id, names in failures(students)[:COMMONEST]:
        lines.append(f"| {check_id} | {len(names)} | {all_checks()[check_id].proves} |".replace("\n", " "))
    lines += ["", "## Alike", "", *alike(found)]
    lines += ["", "## Noticed", "", *noticed(students), "", "## How it was graded", ""]
    return "\n".join([*lines, *(f"- {condition}" for condition in conditions)]) + "\n"


def alike(found: Sequence[Pair]) -> list[str]:
    """Return one line per pair of students who share longer functions."""
    lines = [f"- {pair.words()}" for pair in found[:MOST_PAIRS]]
    more = len(found) - MOST_PAIRS
    return [*lines, *([f"- {more} more pairs in pairs.csv"] if more > 0 else [])] or ["No pair."]


def noticed(students: Sequence[StudentScore]) -> list[str]:
    """Return one line per student and remark; the same remark about several lessons is one line."""
    lines = []
    for student in students:
        lessons: dict[str, list[str]] = defaultdict(list)
        for score in student.scores:
            for note in (*score.notes, *score.remarks):
                if score.lesson.id not in lessons[note]:
                    lessons[note].append(score.lesson.id)
        name = student.submission.name
        lines += [f"- {name}: {quoted(fault)}" for fault in student.submission.faults]
        words = [f"{quoted(note)} ({', '.join(where)})" for note, where in lessons.items()]
        lines += [f"- {name}: {'; '.join(words)}"] if words else []
    return lines or ["Nothing."]
