"""``python -m smoke grade``: the command line of grading.

Owns: options, and what is printed. Must not know: how anything is done.
"""

import re
from pathlib import Path
from typing import Annotated

import typer

from smoke.framework.manifest import Lesson, load_manifest
from smoke.grade.documents import write_all
from smoke.grade.gradebook import Limits, grade
from smoke.grade.likeness import pairs
from smoke.grade.matrix import write_matrix
from smoke.grade.records import Records
from smoke.grade.scoring import StudentScore
from smoke.grade.submissions import Submission, read_submissions
from smoke.grade.trial import Isolation, try_isolation
from smoke.grade.uploads import chosen_formats, match, read_roster, write_uploads
from smoke.grade.worker import DISK_BYTES
from smoke.runner.runner import PATIENCE

UNITS = {"K": 10, "M": 20, "G": 30}


def grade_command(
    submissions: Annotated[Path, typer.Argument(help="A folder that holds a folder or zip per student.")],
    out: Annotated[Path, typer.Option(help="Where the reports go; a rerun goes on where it stopped.")] = Path("report"),
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Submissions that run at the same time.")] = 2,
    timeout: Annotated[
        int, typer.Option(min=1, help="Seconds of the processor for one lesson's checks; four times that on the clock.")
    ] = 180,
    mem: Annotated[str, typer.Option(help="Memory of one submission beyond torch itself, like 512M or 2G.")] = "2G",
    seed: Annotated[str, typer.Option(help="Draws the inputs of every check: auto, or a number.")] = "auto",
    lessons: Annotated[str, typer.Option(help="Grade these alone, like L1,L4; all of them without it.")] = "",
    formats: Annotated[
        str, typer.Option("--format", help="Write what these import, too: canvas, moodle, gradescope, or several.")
    ] = "",
    roster: Annotated[Path | None, typer.Option(help="A CSV with the students' ids or e-mail addresses.")] = None,
) -> None:
    """Grade a folder of submissions."""
    limits = Limits(timeout, parse_size(mem))
    chosen = choose_lessons(lessons)
    found = read_submissions(submissions)
    uploads = chosen_formats(formats)
    if "gradescope" in uploads and len(found) != 1:
        raise ValueError(f"--format gradescope is for one submission, and {submissions} has {len(found)}")
    who = match(found, read_roster(roster) if roster else None)
    records = Records(out, seed, {"timeout": timeout, "memory": limits.memory})
    isolation = try_isolation()
    conditions = describe(records, isolation, limits)
    typer.echo("\n".join(conditions), err=True)
    hidden = (submissions.resolve(), out.resolve())
    try:
        scores = grade(found, chosen, records, isolation, limits, jobs, hidden)
    except KeyboardInterrupt:
        typer.echo(f"to go on, give the same command with --out {out}: what is finished is kept there", err=True)
        raise
    alike = pairs(found, chosen) if len(found) > 1 else []
    write_all(out, scores, alike, conditions)
    write_matrix(out, scores, alike, conditions)
    write_uploads(out, uploads, scores, who, conditions)
    typer.echo(closing(scores, found, out))
    typer.echo(
        "".join(f"{out}/{'results.json' if name == 'gradescope' else f'{name}.csv'}\n" for name in uploads), nl=False
    )
    unknown = [submission.name for submission in found if submission.name not in who]
    if unknown:
        typer.echo(f"not in the roster, and in no table for a platform: {', '.join(unknown)}")


def choose_lessons(text: str) -> tuple[Lesson, ...]:
    """Return the lessons that ``L1,L4`` names, in the course's order, or all. Raises ``ValueError`` for another."""
    names = {load_manifest().lesson(name.strip()).id for name in text.split(",") if name.strip()}
    return tuple(lesson for lesson in load_manifest().written if not names or lesson.id in names)


def describe(records: Records, isolation: Isolation, limits: Limits) -> list[str]:
    """Return sentences about the run."""
    again = " (that of this report's first run)" if records.resumed else ""
    return [
        f"seed: {records.seed}{again}",
        f"limits per lesson: {limits.seconds} s of the processor, {PATIENCE * limits.seconds:g} s on the clock, "
        "without the checks that ran into a limit of their own; "
        f"{limits.memory >> 20} MiB of memory beyond what torch maps, {DISK_BYTES >> 20} MiB in files",
        *isolation.lines(),
    ]


def closing(scores: list[StudentScore], submissions: list[Submission], out: Path) -> str:
    """Return the last lines: how many, what needs a look, where it is written."""
    points = scores[0].total("isolated")[1]
    full = sum(score.total("isolated")[0] == points for score in scores)
    looks = sum(bool(s.submission.faults or any(x.notes or x.remarks for x in s.scores)) for s in scores)
    return (
        f"{len(submissions)} submissions, {full} with all {points} points, {looks} with remarks\n"
        f"{out}/matrix.md, matrix.html, pairs.csv, grades.csv, junit.xml, students/NAME/report.md and results.json"
    )


def parse_size(text: str) -> int:
    """Read ``2G`` as bytes. Raises ``ValueError`` for anything else."""
    match = re.fullmatch(r"(\d+)([KMG])(i?B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"--mem {text} is no size; write it like 512M or 2G")
    return int(match[1]) << UNITS[match[2].upper()]
