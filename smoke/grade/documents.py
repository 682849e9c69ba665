"""What a grading run writes: a table, a report per student, and the same for machines.

Owns: formats. Must not know: how anything was run or scored. Text that comes from a submission is quoted where it
stands, so that it cannot pass for a part of the report.
"""

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from smoke.course.report import explain, line
from smoke.framework.check import Result, all_checks
from smoke.framework.manifest import Task
from smoke.grade.likeness import Pair
from smoke.grade.scoring import NOT_THERE, LessonScore, StudentScore, TaskScore

COLUMNS = ("student", "lesson", "points", "isolated", "cumulative", "optional", "status", "reason", "notes")
MAX_TEXT = 20_000


def write_all(out: Path, students: Sequence[StudentScore], found: Sequence[Pair], conditions: Sequence[str]) -> None:
    """Write every document but the matrix. ``conditions`` are sentences about the run: seed, limits, isolation."""
    write_csv(out / "grades.csv", students)
    write_junit(out / "junit.xml", students)
    write_pairs(out / "pairs.csv", found)
    for student in students:
        folder = out / "students" / student.submission.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.md").write_text(report(student, conditions), encoding="utf-8")
        (folder / "results.json").write_text(json.dumps(gradescope(student, conditions), indent=1), encoding="utf-8")


def write_csv(file: Path, students: Sequence[StudentScore]) -> None:
    """Write one row per student and lesson and one, with the lesson "all", per student."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(COLUMNS)
        for student in students:
            name = student.submission.name
            for alone, whole in zip(student.of_mode("isolated"), student.of_mode("cumulative"), strict=True):
                notes = "; ".join(dict.fromkeys((*alone.notes, *whole.notes, *alone.remarks)))
                reason = alone.reason or whole.reason
                if not student.submission.files:  # then what is wrong with all of it is the reason
                    reason = "; ".join(student.submission.faults) or reason
                row = (alone.points, alone.earned, whole.earned, alone.extra, status(alone), reason, notes)
                table.writerow([name, alone.lesson.id, *map(one_line, row)])
            isolated, points = student.total("isolated")
            faults = "; ".join(student.submission.faults)
            missing = [score.lesson.id for score in student.of_mode("isolated") if not score.handed_in]
            whole_status = "complete" if isolated == points else "incomplete"
            if missing:
                faults = "; ".join(filter(None, (faults, f"{NOT_THERE}: {', '.join(missing)}")))
            cumulative, extra = student.total("cumulative")[0], sum(s.extra for s in student.of_mode("isolated"))
            table.writerow([name, "all", points, isolated, cumulative, extra, whole_status, faults, ""])


def write_pairs(file: Path, found: Sequence[Pair]) -> None:
    """Write one row per pair of students who share longer functions, the weightiest first."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(("student", "other", "weight", "functions"))
        for pair in found:
            table.writerow(map(one_line, (pair.first, pair.second, round(pair.weight), "; ".join(pair.functions))))


def status(score: LessonScore) -> str:
    """Return "pass", or the status of the first core task that did not, or that there is nothing to have one."""
    if not score.handed_in:
        return NOT_THERE
    return next((task.status for task in score.core if task.status != "pass"), "pass")


def one_line(value: object) -> str:
    """Return a value as one line without control characters; a formula of a spreadsheet is defused."""
    text = " ".join(printable(str(value)).split())
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def report(student: StudentScore, conditions: Sequence[str]) -> str:
    """Return a student's report in Markdown."""
    earned, points = student.total("isolated")
    parts = [f"# {student.submission.name}: {earned} of {points} points", ""]
    parts += [
        "*Isolated* counts each lesson's files over the reference of everything else, *cumulative* over your own",
        "earlier lessons. A task's points are earned when all of its checks pass. Those of optional tasks are extra.",
        "",
        "| lesson | isolated | cumulative | of | optional |",
        "|---|---:|---:|---:|---:|",
    ]
    for alone, whole in zip(student.of_mode("isolated"), student.of_mode("cumulative"), strict=True):
        earned_in = f"{alone.earned} | {whole.earned}" if alone.handed_in else f"{NOT_THERE} |"
        parts.append(f"| {alone.lesson.id} {alone.lesson.title} | {earned_in} | {alone.points} | {alone.extra} |")
    parts.append("")
    parts += [f"- Problem with the submission: {quoted(fault)}" for fault in student.submission.faults]
    if student.submission.ignored:
        shown = ", ".join(map(quoted, student.submission.ignored[:20]))
        more = f" and {len(student.submission.ignored) - 20} more" if len(student.submission.ignored) > 20 else ""
        parts.append(f"- Not read, because they are no files of the course or there is a likelier one: {shown}{more}")
    for alone, whole in zip(student.of_mode("isolated"), student.of_mode("cumulative"), strict=True):
        parts += ["", *lesson_part(alone, whole)]
    parts += ["", "## How it was graded", "", *(f"- {condition}" for condition in conditions)]
    return "\n".join(parts).rstrip() + "\n"


def lesson_part(alone: LessonScore, whole: LessonScore) -> list[str]:
    """Return the part of a report about one lesson."""
    if not alone.handed_in:
        return [f"## {alone.lesson.id} {alone.lesson.title}", "", f"No points: {alone.reason}."]
    parts = [f"## {alone.lesson.id} {alone.lesson.title}", "", "| task | isolated | cumulative | points |"]
    parts.append("|---|---|---|---:|")
    for one, other in zip(alone.tasks, whole.tasks, strict=True):
        parts.append(f"| {name_of(one.task)} | {one.status} | {other.status} | {one.earned} of {one.task.points} |")
    parts.append("")
    parts += [f"- Noticed: {quoted(note)}" for note in dict.fromkeys((*alone.notes, *whole.notes))]
    if alone.withheld:
        parts.append(f"- {quoted(alone.withheld)}")
    for title, score in (("isolated", alone), ("cumulative", whole)):
        broken = [result for result in score.results if not result.passed]
        if title == "cumulative" and signature(broken) == signature(alone.results):
            continue
        if broken:
            parts += ["", f"### What did not pass, {title}", "", fenced(explain_all(broken))]
    return parts


def name_of(task: Task) -> str:
    """Return the id and the title of a task, and whether it is optional."""
    return f"{task.id} {task.title}" + (" (optional)" if task.is_optional else "")


def signature(results: Sequence[Result]) -> set[tuple[str, str, str]]:
    """Return what distinguishes the failures of two modes."""
    return {(result.check_id, result.status, result.detail) for result in results if not result.passed}


def explain_all(results: Sequence[Result]) -> str:
    """Return the words of the student command: in full where something was wrong, one line where nothing was tried."""
    texts = []
    said: set[str] = set()
    for result in results:
        in_full = result.status in ("fail", "timeout", "crashed") and result.detail not in said - {""}
        said.add(result.detail)
        texts.append(explain(result, all_checks()[result.check_id]) + "\n" if in_full else line(result))
    return "\n".join(texts)


def printable(text: str) -> str:
    """Return a text without control characters: a terminal would obey them and XML forbids them."""
    found = {letter for letter in set(text) if not letter.isprintable()} - {"\n", "\t"}
    return text.translate(dict.fromkeys(map(ord, found), "?"))


def quoted(text: str) -> str:
    """Return a text of unknown origin as inline code."""
    return "`" + one_line(text)[:500].replace("`", "'") + "`"


def fenced(text: str) -> str:
    """Return a text of unknown origin as a block of code that it cannot end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{printable(text)[:MAX_TEXT]}\n{fence}"


def gradescope(student: StudentScore, conditions: Sequence[str]) -> dict[str, Any]:
    """Return Gradescope's ``results.json``: a test per task, in isolated mode. The score is that of the core tasks."""
    tests = [
        {
            "name": name_of(task.task),
            "number": task.task.id,
            "score": task.earned,
            "max_score": task.task.points,
            **({"status": "passed" if task.earned else "failed"} if score.handed_in else {}),
            "output": task_output(task) if score.handed_in else score.reason,
            "output_format": "text",
            "visibility": "visible",
        }
        for score in student.of_mode("isolated")
        for task in score.tasks
    ]
    return {
        "score": student.total("isolated")[0],
        "output": "\n".join([*student.submission.faults, *conditions]),
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
        "extra_data": {
            "cumulative": {score.lesson.id: score.earned for score in student.of_mode("cumulative")},
            "optional": {score.lesson.id: score.extra for score in student.of_mode("isolated")},
            "notes": sorted({note for score in student.scores for note in (*score.notes, *score.remarks)}),
            "ignored_files": list(student.submission.ignored),
        },
    }


def task_output(task: TaskScore) -> str:
    """Return what a student reads under one task."""
    broken = [result for result in task.results if not result.passed]
    passed = [line(result) for result in task.results if result.passed]
    text = "\n".join([task.withheld, *passed] if task.withheld else passed)
    return f"{text}\n{explain_all(broken)}".strip()[:MAX_TEXT]


def write_junit(file: Path, students: Sequence[StudentScore]) -> None:
    """Write one suite per student, one case per check and mode."""
    root = ElementTree.Element("testsuites", name="mini_engine")
    for student in students:
        cases = [(score, result) for score in student.scores for result in score.results]
        kinds = [kind_of(result) if score.handed_in else "skipped" for score, result in cases]
        words = {"failures": "failure", "errors": "error", "skipped": "skipped"}
        counts = {word: str(kinds.count(kind)) for word, kind in words.items()}
        name = student.submission.name
        suite = ElementTree.SubElement(root, "testsuite", {"name": name, "tests": str(len(cases)), **counts})
        for (score, result), kind in zip(cases, kinds, strict=True):
            about = {"classname": f"{name}.{score.mode}", "time": f"{result.seconds:.3f}"}
            case = ElementTree.SubElement(suite, "testcase", {"name": result.check_id, **about})
            if kind:
                problem = ElementTree.SubElement(case, kind, type=result.status, message=one_line(line(result)))
                problem.text = printable(explain(result, all_checks()[result.check_id]))[:MAX_TEXT]
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(file, encoding="utf-8", xml_declaration=True)


def kind_of(result: Result) -> str:
    """Return JUnit's word for a status, nothing for a pass. What was not run is skipped, never passed."""
    if result.passed:
        return ""
    if result.status in ("timeout", "crashed"):
        return "error"
    return "skipped" if result.status in ("skipped", "blocked") else "failure"
