"""``next``, ``status``, ``hint`` and ``pitfalls``: where a student stands, a word of help, what others got wrong."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from smoke.commands.options import EngineOption, LessonArgument, TaskArgument
from smoke.course.guide import HINTS, command, describe, next_lines, next_task_line
from smoke.course.work import Work, checks_in
from smoke.framework.bank import pitfalls_of
from smoke.framework.manifest import SUITE, Lesson, Task, load_manifest, refuse_unknown, require

BAR_WIDTH = 20


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("next")(next_command)
    app.command("status")(status_command)
    app.command("hint")(hint_command)
    app.command("pitfalls")(pitfalls_command)


def next_command(engine: EngineOption = Path("work")) -> None:
    """Say where you are and what to do now: the page to read, the functions to write, the command to run."""
    typer.echo("\n".join(next_lines(Work(engine))))


def status_command(
    lesson: Annotated[str, typer.Argument(metavar="[LESSON]", help="Whose tasks to list; else where you are.")] = "",
    engine: EngineOption = Path("work"),
    everything: Annotated[bool, typer.Option("--all", help="List the tasks of every lesson.")] = False,
) -> None:
    """Show how far each lesson is, and each task of yours. A pass counts until something that it uses is changed."""
    work = Work(engine)
    task = work.place()
    shown = load_manifest().lesson(lesson).id if lesson else task.lesson_id if task else ""
    for each in load_manifest().written:
        typer.echo(lesson_line(work, each))
        if everything or (each.id == shown and (lesson or work.has(each))):
            typer.echo("\n".join(task_lines(work, each)))
    typer.echo("")
    typer.echo(next_task_line(work, task) if task else next_lines(work)[0])
    taken = sum(work.load().get("hints", {}).values())
    if taken:
        typer.echo(f"hints taken: {taken}")


def lesson_line(work: Work, lesson: Lesson) -> str:
    """Return a bar and a count for the core of one lesson, and a count of its optional tasks."""
    core = checks_in(lesson, lesson.core)
    passed = len(work.passed(lesson) & core)
    full = BAR_WIDTH * passed // len(core)
    note = "" if work.has(lesson) else "  (not started)"
    if work.has(lesson) and lesson.optional:
        done = len(set(lesson.optional) - set(work.waiting(lesson)))
        note = f"  ({done} of {len(lesson.optional)} optional tasks)"
    return f"{lesson.id:<3}  {'█' * full}{'░' * (BAR_WIDTH - full)} {passed:>3}/{len(core):<3} {lesson.title}{note}"


def task_lines(work: Work, lesson: Lesson) -> list[str]:
    """Return a line for each task of a lesson."""
    width = max(len(task.title) for task in lesson.tasks)
    return [f"    {each.task.id}  {each.task.title:<{width}}  {describe(each)}" for each in work.tasks(lesson)]


def hint_command(
    task: TaskArgument = "",
    level: Annotated[int | None, typer.Option(min=1, max=HINTS, help="Show this one.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all three.")] = False,
    engine: EngineOption = Path("work"),
) -> None:
    """Show the next hint of a task, or of yours: a question, then an invariant, then the whole task in pseudocode."""
    work = Work(engine)
    chosen = load_manifest().task(task) if task else work.place()
    if chosen is None:
        raise ValueError("every task passes; name the one whose hints you want, like L2.B")
    hints = load_hints(chosen.lesson_id)[chosen.id]
    last = HINTS if everything else level or min(work.hint_level(chosen) + 1, HINTS)
    for number in range(1 if everything else last, last + 1):
        typer.echo(f"{chosen.id} hint {number} of {HINTS}: {hints[number - 1].strip()}\n")
    if engine.is_dir():
        work.take_hint(chosen, last)
    if last < HINTS:
        which = "" if engine.is_dir() else f" --level {last + 1}"  # where no folder keeps what was taken
        typer.echo(f"One more: {command(f'hint {chosen.id}{which}', engine)}")


def pitfalls_command(
    lesson: LessonArgument,
    engine: EngineOption = Path("work"),
    everything: Annotated[bool, typer.Option("--all", help="Also those of tasks that are not green yet.")] = False,
) -> None:
    """List the known mistakes of the tasks that are green: what they look like, and which checks catch them."""
    chosen = load_manifest().lesson(lesson)
    hidden = 0
    for state in Work(engine).tasks(chosen):
        pitfalls = [pitfall for pitfall in pitfalls_of(chosen) if pitfall.task_id == state.task.id]
        if not everything and not state.is_done:
            hidden += len(pitfalls)
            continue
        typer.echo(f"{state.task.id} {state.task.title}")
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
        if len(hints.get(task.id, ())) != HINTS:
            raise ValueError(f"{file.name}: {task.id} has {len(hints.get(task.id, ()))} hints, {HINTS} are needed")
    if len(hints) != len(tasks):
        raise ValueError(f"{file.name} has hints for a task that {lesson_id} does not have")
    return hints
