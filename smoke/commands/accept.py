"""``accept``: the suite proves itself."""

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from tqdm import tqdm

from smoke.bank.accept import Verdict, accept, jobs, matrix
from smoke.bank.mutation.trial import Fate
from smoke.commands.exits import Exit, stop
from smoke.commands.mutate import GOAL, run_all, sample_of_each, score
from smoke.commands.mutate import summary as scores
from smoke.course.sync import stale_files
from smoke.framework.manifest import ROOT, Lesson, load_manifest

MUTANTS = 40  # of each lesson, the same ones in every run


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("accept")(accept_command)


def accept_command(
    pattern: Annotated[
        str,
        typer.Option(
            "-k", help="Only candidates whose id contains this: P2-C, starter; or of a lesson or task: L5, L5.J."
        ),
    ] = "",
    workers: Annotated[int, typer.Option(min=1, help="Candidates that run at the same time.")] = 2,
    full: Annotated[
        bool,
        typer.Option("--full", help="Also the checks that a pitfall does not name, and later lessons' on a wheat."),
    ] = False,
    mutate: Annotated[
        bool,
        typer.Option(
            "--mutate", help=f"Afterwards also {MUTANTS} mutants of each lesson: see `python -m smoke mutate`."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the matrix.")] = False,
) -> None:
    """Prove the suite: the reference passes, starters fail rightly, pitfalls are caught, wheats survive."""
    started = time.perf_counter()
    todo = jobs(pattern, full)
    if not todo:
        stop(Exit.USAGE, f"no candidate's id contains {pattern!r}")
    with tqdm(total=len(todo), desc="candidates", unit="", leave=False) as bar:

        def report(verdict: Verdict) -> None:
            bar.update()
            if verdict.faults and not as_json:
                bar.write("\n".join([f"{verdict.job.id}:", *(f"  {fault}" for fault in verdict.faults)]))

        verdicts = accept(todo, workers, report)
    fates = run_all(sample_of_each(lessons_of(pattern), MUTANTS), workers, None) if mutate else []
    low = [each.id for each in load_manifest().written if score(of_lesson(fates, each.id)) < GOAL]
    seconds = time.perf_counter() - started
    if as_json:
        typer.echo(json.dumps(as_dict(verdicts, fates, seconds)))
    else:
        typer.echo("\n".join([summary(verdicts, seconds), *scores(fates, with_tasks=False)]))
    if low:
        typer.echo(f"below {GOAL:g} % of the mutants: {', '.join(low)}", err=True)
    stale = [str(file.relative_to(ROOT)) for file in stale_files()]
    if stale:
        typer.echo(f"generated tables are out of date in {', '.join(stale)}: run `python -m smoke sync`", err=True)
    stop(Exit.CHECK_FAILED if stale or low or any(verdict.faults for verdict in verdicts) else Exit.PASSED)


def lessons_of(pattern: str) -> list[Lesson]:
    """Return the lessons that ``-k`` names, all of them if it names none."""
    lessons = load_manifest().written
    return [each for each in lessons if each.id.lower() in pattern.lower()] or list(lessons)


def of_lesson(fates: Sequence[Fate], lesson_id: str) -> list[Fate]:
    """Return the fates of one lesson's mutants."""
    return [fate for fate in fates if fate.mutant.lesson_id == lesson_id]


def summary(verdicts: list[Verdict], seconds: float) -> str:
    """Return the matrix and one line per kind of candidate."""
    lines = [matrix(verdicts), "", "# caught as promised   + caught besides   ! missed   . passed", ""]
    for kind in dict.fromkeys(verdict.job.kind for verdict in verdicts):
        mine = [verdict for verdict in verdicts if verdict.job.kind == kind]
        lines.append(f"{kind:<15} {sum(not v.faults for v in mine):>3} of {len(mine):>3} as they must be")
    wrong = sum(bool(verdict.faults) for verdict in verdicts)
    lines.append(f"{'ACCEPTED' if not wrong else 'NOT ACCEPTED'}  {len(verdicts)} candidates in {seconds:.0f} s")
    return "\n".join(lines)


def as_dict(verdicts: list[Verdict], fates: Sequence[Fate], seconds: float) -> dict[str, Any]:
    """Return everything for machines."""
    return {
        "survivors": [fate.mutant.id for fate in fates if not fate.killed],
        "accepted": not any(verdict.faults for verdict in verdicts),
        "seconds": round(seconds, 1),
        "candidates": [
            {
                "kind": verdict.job.kind,
                "id": verdict.job.id,
                "faults": verdict.faults,
                "results": {result.check_id: result.status for result in verdict.outcome.results},
            }
            for verdict in verdicts
        ],
    }
