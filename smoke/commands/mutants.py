"""``mutants``: which pitfalls of a lesson a student's own test catches."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from smoke.bank.accept import edited, write_overlay
from smoke.commands.exits import Exit, stop
from smoke.commands.options import LessonArgument
from smoke.framework.bank import load_pitfalls
from smoke.framework.catalogue import listed
from smoke.framework.manifest import load_manifest
from smoke.runner.runner import Candidate, Runner

SECONDS = 60.0  # for the student's tests on one engine


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("mutants")(mutants_command)


def mutants_command(
    lesson: LessonArgument,
    mine: Annotated[Path, typer.Option("--mine", help="A pytest file that tests mini_engine.")],
    pattern: Annotated[str, typer.Option("-k", help="Only pitfalls whose id contains this: P5-F, P5-F2.")] = "",
) -> None:
    """Run your test on the reference, which it must pass, and on every pitfall of a lesson."""
    chosen = load_manifest().lesson(lesson)
    if not mine.is_file():
        raise ValueError(f"{mine} is no file")
    pitfalls = [p for p in load_pitfalls() if p.lesson_id == chosen.id and pattern.lower() in p.id.lower()]
    if not pitfalls:
        stop(
            Exit.USAGE, f"no pitfall of {chosen.id} has {pattern!r} in its id; `smoke pitfalls {chosen.id}` lists them"
        )
    with Runner() as runner, tempfile.TemporaryDirectory(prefix="smoke-mutants-") as folder:
        runner.prepare({check.id for check in listed([chosen])})
        code, words = runner.run_tests(Candidate("reference"), mine, SECONDS)
        if code != 0:
            stop(Exit.CHECK_FAILED, f"your test fails on the reference, so it can prove nothing yet:\n{words}")
        caught = 0
        for pitfall in tqdm(pitfalls, desc="pitfalls", leave=False):
            files = edited(pitfall.edit)
            write_overlay(Path(folder), files)
            code, _ = runner.run_tests(Candidate(pitfall.id, Path(folder), tuple(files)), mine, SECONDS)
            caught += code != 0
            tqdm.write(f"{'caught ' if code else 'MISSED '} {pitfall.id:<7} {pitfall.title}")
    among = f" with {pattern} in their id" if pattern else ""
    typer.echo(f"your test catches {caught} of {len(pitfalls)} pitfalls of {chosen.id}{among}")
    stop(Exit.PASSED if caught == len(pitfalls) else Exit.CHECK_FAILED)
