"""``status``, ``hint`` and ``pitfalls``: where a student stands, a word of help, and what others got wrong."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from smoke.bank.bank import known_pitfalls
from smoke.commands.run import EngineOption, LessonArgument
from smoke.course.work import Work
from smoke.framework.check import checks_of
from smoke.framework.manifest import SUITE, Lesson, Task, load_manifest, refuse_unknown, require

LEVELS = 3
BAR_WIDTH = 20
TaskArgument = Annotated[str, typer.Argument(metavar="TASK", help="L2.B, …")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("status")(status_command)
    app.command("hint")(hint_command)
    app.command("pitfalls")(pitfalls_command)


def status_command(engine: EngineOption = Path("work")) -> None:
    """Show how far each lesson is. What was changed since its last run counts as not passed."""
    work = Work(engine)
    unfinished: list[tuple[Lesson, Task]] = []
    for lesson in load_manifest().written:
        checks = checks_of([lesson])
        passed = work.passed(lesson)
        full = BAR_WIDTH * len(passed) // len(checks)
        bar = "█" * full + "░" * (BAR_WIDTH - full)
        note = "" if work.has(lesson) else f"  python -m smoke start {lesson.id}"
        typer.echo(f"{lesson.id}  {bar} {len(passed):>3}/{len(checks):<3} {lesson.title}{note}")
        open_tasks = [task for task in lesson.tasks if any(c.task_id == task.id and c.id not in passed for c in checks)]
        unfinished += [(lesson, task) for task in open_tasks[:1]]
    taken = sum(work.load().get("hints", {}).values())
    if unfinished:
        lesson, task = min(unfinished, key=lambda pair: not work.has(pair[0]))  # one that was begun comes first
        typer.echo(f"next: {task.id} {task.title}, {lesson.page(task)}")
    else:
        typer.echo("everything that is written passes")
    if taken:
        typer.echo(f"hints taken: {taken}")


def hint_command(
    task: TaskArgument,
    level: Annotated[int | None, typer.Option(min=1, max=LEVELS, help="Show the hints up to this one.")] = None,
    engine: EngineOption = Path("work"),
) -> None:
    """Show the next hint of a task: first a question, then an invariant, then the whole task in pseudocode."""
    chosen = load_manifest().task(task)
    work = Work(engine)
    hints = load_hints(chosen.lesson_id)[chosen.id]
    shown = level or min(work.hint_level(chosen) + 1, LEVELS)
    for number, text in enumerate(hints[:shown], start=1):
        typer.echo(f"{chosen.id} hint {number} of {LEVELS}: {text.strip()}\n")
    if engine.is_dir():
        work.take_hint(chosen, shown)
    if shown < LEVELS:
        typer.echo("Ask again for the next one.")


def pitfalls_command(
    lesson: LessonArgument,
    engine: EngineOption = Path("work"),
    everything: Annotated[bool, typer.Option("--all", help="Also those of tasks that are not green yet.")] = False,
) -> None:
    """List the known mistakes of the tasks that are green: what they look like, and which checks catch them."""
    chosen, work = load_manifest().lesson(lesson), Work(engine)
    passed = work.passed(chosen)
    hidden = 0
    for task in chosen.tasks:
        pitfalls = [pitfall for pitfall in known_pitfalls() if pitfall.task_id == task.id]
        if not everything and not {check.id for check in checks_of([chosen]) if check.task_id == task.id} <= passed:
            hidden += len(pitfalls)
            continue
        typer.echo(f"{task.id} {task.title}")
        for pitfall in pitfalls:
            typer.echo(f"  {pitfall.id:<7} {pitfall.title}: {pitfall.symptom}")
            typer.echo(f"          caught by {', '.join(pitfall.killed_by)}")
    if hidden:
        typer.echo(f"{hidden} more belong to tasks that are not green yet; --all lists them")


@cache
def load_hints(lesson_id: str) -> dict[str, tuple[str, ...]]:
    """Read a lesson's hints by task. Raises ``ValueError`` unless every task has three."""
    file = SUITE / "bank" / lesson_id.lower() / "hints.toml"
    with file.open("rb") as stream:
        raw = tomllib.load(stream)
    refuse_unknown(file.name, raw, {"hint"})
    hints: dict[str, tuple[str, ...]] = {}
    for entry in raw.get("hint", []):
        refuse_unknown(f"a hint in {file.name}", entry, {"task", "levels"})
        require(f"a hint in {file.name}", entry, {"task", "levels"})
        hints[entry["task"]] = tuple(entry["levels"])
    tasks: tuple[Task, ...] = load_manifest().lesson(lesson_id).tasks
    for task in tasks:
        if len(hints.get(task.id, ())) != LEVELS:
            raise ValueError(f"{file.name}: {task.id} has {len(hints.get(task.id, ()))} hints, {LEVELS} are needed")
    if len(hints) != len(tasks):
        raise ValueError(f"{file.name} has hints for a task that {lesson_id} does not have")
    return hints
