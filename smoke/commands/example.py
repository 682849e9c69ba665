"""``example``: the worked example of a task, computed with a student's modules."""

import subprocess
import sys
from pathlib import Path

import typer

from mini_engine.overlay import overlay_files
from smoke.commands.exits import Exit, stop
from smoke.commands.options import EngineOption, TaskArgument
from smoke.course.example import NOT_WRITTEN, pages_until
from smoke.framework.manifest import ROOT, load_manifest


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("example")(example_command)


def example_command(task: TaskArgument, engine: EngineOption = Path("work")) -> None:
    """Run a lesson's code blocks, up to those of a task's page, on your modules over the reference."""
    chosen = load_manifest().task(task)
    lesson = load_manifest().lesson(chosen.lesson_id)
    pages = pages_until(lesson, chosen)
    overlay_files(engine)  # refuses a folder without modules before a process is started
    arguments = [sys.executable, "-m", "smoke.course.example", str(engine.resolve()), chosen.id]
    run = subprocess.run([*arguments, *map(str, pages)], cwd=ROOT, check=False, capture_output=True, text=True)
    typer.echo(run.stdout + run.stderr, nl=False)
    if run.returncode == NOT_WRITTEN:
        stop(Exit.CHECK_FAILED, f"write {chosen.id}, then run this again")
    if run.returncode != 0:
        stop(Exit.CHECK_FAILED, f"the example of {chosen.id} does not hold on {engine}/")
    typer.echo(f"the example of {chosen.id} holds on {engine}/")
