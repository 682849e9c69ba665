"""``start``, ``reset`` and ``diff``: the files of a lesson."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from smoke.commands.exits import Exit, stop
from smoke.commands.options import EngineOption, LessonArgument
from smoke.course.guide import command
from smoke.course.starter import empty, starter_files
from smoke.course.work import Work
from smoke.framework.catalogue import listed
from smoke.framework.manifest import COURSE, Lesson, load_manifest

COMPANION = COURSE / "lessons" / "AGENTS.md"  # how an AI assistant may help; it lies next to the code it is about


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("start")(start_command)
    app.command("reset")(reset_command)
    app.command("diff")(diff_command)


def start_command(
    lesson: LessonArgument,
    into: Annotated[Path, typer.Option("--into", help="The folder to write to.")] = Path("work"),
) -> None:
    """Write the starter of a lesson: the engine's files with the parts to write taken out."""
    chosen = load_manifest().lesson(lesson)
    present = [into / file for file in chosen.files if (into / file).exists()]
    if present:
        raise ValueError(f"{present[0]} exists; `python -m smoke reset {chosen.id}` starts anew and keeps a copy")
    write_starter(chosen, into)
    Work(into).begin(chosen)
    typer.echo(f"{chosen.id} {chosen.title}. {chosen.goal}\n")
    width = max(len(task.title) for task in chosen.tasks)
    for task in chosen.tasks:
        typer.echo(f"  {task.id}  {task.title:<{width}} {task.points:>3} points{' (optional)' * task.is_optional}")
    typer.echo(f"\nwritten  {', '.join(str(into / file) for file in chosen.files)}")
    typer.echo(f"read     {chosen.page()}")
    typer.echo(f"watch    {command('watch', into)}   runs the task's checks whenever you save")
    typer.echo(f"\nAll {len(listed([chosen]))} checks are red now: that is right, nothing is written yet.")


def write_starter(lesson: Lesson, folder: Path) -> None:
    """Write the lesson's starter files, and the note for assistants if it is not there."""
    for file, text in starter_files(lesson).items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if COMPANION.is_file() and not (folder / COMPANION.name).exists():
        shutil.copyfile(COMPANION, folder / COMPANION.name)


def reset_command(
    lesson: LessonArgument,
    engine: EngineOption = Path("work"),
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Start a lesson anew. Your files stay next to the new ones, with .bak in their names."""
    chosen = load_manifest().lesson(lesson)
    present = [engine / file for file in chosen.files if (engine / file).is_file()]
    if present and not yes and not typer.confirm(f"replace {', '.join(map(str, present))}?"):
        stop(Exit.USAGE, "nothing was changed")
    for path in present:
        backup = free_name(path)
        path.rename(backup)
        typer.echo(f"kept     {backup}")
    write_starter(chosen, engine)
    typer.echo(f"written  {', '.join(str(engine / file) for file in chosen.files)}")


def free_name(path: Path) -> Path:
    """Return ``path.bak``, or with a number if that is taken."""
    candidate = path.with_name(path.name + ".bak")
    number = 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.bak{number}")
    return candidate


def diff_command(
    lesson: LessonArgument,
    engine: EngineOption = Path("work"),
    force: Annotated[bool, typer.Option("--force", help="Show it although the lesson is not green.")] = False,
) -> None:
    """Compare your files with the reference, once all checks of the lesson pass."""
    import difflib

    chosen = load_manifest().lesson(lesson)
    work = Work(engine)
    work.require(chosen)
    if not force and not work.is_green(chosen):
        stop(Exit.USAGE, f"{chosen.id} is not green yet: `python -m smoke run {chosen.id}` first, or --force")
    is_open = work.open_functions(chosen.files)
    unwritten = [] if force else [task for task in chosen.tasks if task.id in is_open]
    if unwritten:
        typer.echo(f"not written, so not shown: {', '.join(task.id for task in unwritten)}")
    for file in chosen.files:
        texts = ((engine / file).read_text().splitlines(), empty(file, unwritten).splitlines())
        lines = difflib.unified_diff(*texts, f"your {file}", f"reference {file}", lineterm="")
        typer.echo("\n".join(lines) or f"{file}: no difference")
