"""``mutate``: every small change of what students write, and whether a check sees it."""

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from smoke.bank.mutation.equivalent import load_equivalents
from smoke.bank.mutation.mutants import Mutant, mutants_of
from smoke.bank.mutation.trial import Fate, fates
from smoke.commands.exits import Exit, stop
from smoke.framework.manifest import Lesson, load_manifest

GOAL = 98.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("mutate")(mutate_command)


def mutate_command(
    lesson: Annotated[str, typer.Argument(metavar="[LESSON]", help="L1, L2, …; all of them if it is left out.")] = "",
    task: Annotated[str, typer.Option("--task", help="Only the functions of this task: L4.B.")] = "",
    pattern: Annotated[str, typer.Option("-k", help="Only mutants whose id contains this: top_p, /slice/.")] = "",
    sample: Annotated[int, typer.Option(min=0, help="Only so many, drawn at random; 0 is all.")] = 0,
    seed: Annotated[int, typer.Option(help="Draws the sample.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Mutants that run at the same time.")] = 2,
    equivalent: Annotated[
        bool, typer.Option("--equivalent", help="Run those that are listed as equivalent instead: none may be killed.")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option("--json", help="Append a line of JSON per mutant; what was killed there is not run again."),
    ] = None,
    goal: Annotated[float, typer.Option(help="Percent that must be killed in every lesson.")] = GOAL,
) -> None:
    """Change the reference a little, in every way that the rules know, and show what no check of the lesson sees."""
    started = time.perf_counter()
    lessons = (load_manifest().lesson(lesson),) if lesson else load_manifest().written
    mutants = [m for each in lessons for m in mutants_of(each) if not task or m.task_id == task.upper()]
    listed = {entry.id for entry in load_equivalents()}
    chosen = draw([m for m in mutants if pattern in m.id and (m.id in listed) == equivalent], sample, seed)
    if not chosen:
        stop(Exit.USAGE, "no mutant fits; an id is like model:rotary_table/unary/0ba558")
    done = run_all(chosen, workers, file)
    typer.echo("\n".join(summary(done)))
    typer.echo(f"{len(done)} mutants in {time.perf_counter() - started:.0f} s")
    if equivalent:
        wrong = [fate.mutant.id for fate in done if fate.killed]
        stop(Exit.CHECK_FAILED if wrong else Exit.PASSED, "\n".join(f"{name} is not equivalent" for name in wrong))
    low = [each.id for each in lessons if score([f for f in done if f.mutant.lesson_id == each.id]) < goal]
    stop(Exit.CHECK_FAILED if low else Exit.PASSED, f"below {goal:g} %: {', '.join(low)}" if low else "")


def draw(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return ``count`` of the mutants in their order, all of them for 0. A new mutant moves at most one other."""
    lots = {mutant.id: random.Random(f"{seed} {mutant.id}").random() for mutant in mutants}
    drawn = set(sorted(lots, key=lots.__getitem__)[: count or None])
    return [mutant for mutant in mutants if mutant.id in drawn]


def sample_of_each(lessons: Sequence[Lesson], count: int, seed: int = 0) -> list[Mutant]:
    """Return ``count`` mutants of each lesson, without those that are listed as equivalent."""
    listed = {entry.id for entry in load_equivalents()}
    unlisted = {each.id: [m for m in mutants_of(each) if m.id not in listed] for each in lessons}
    return [mutant for mutants in unlisted.values() for mutant in draw(mutants, count, seed)]


def run_all(mutants: Sequence[Mutant], workers: int, file: Path | None) -> list[Fate]:
    """Run mutants, show survivors as they come, and keep every fate in ``file``."""
    known = killed_before(file)
    done = [Fate(mutant, *known[mutant.id]) for mutant in mutants if mutant.id in known]
    todo = [mutant for mutant in mutants if mutant.id not in known]
    with tqdm(total=len(todo), desc="mutants", unit="", leave=False) as bar:
        for fate in fates(todo, workers) if todo else ():
            bar.update()
            done.append(fate)
            if not fate.killed:
                bar.write(f"SURVIVED {fate.mutant.id}\n{fate.mutant.diff}\n")
            if file is not None:
                with file.open("a") as stream:
                    stream.write(json.dumps(as_dict(fate)) + "\n")
    return done


def as_dict(fate: Fate) -> dict[str, object]:
    """Return one mutant's fate for machines."""
    mutant = fate.mutant
    return {
        "id": mutant.id,
        "task": mutant.task_id,
        "removed": mutant.removed,
        "added": mutant.added,
        "killed_by": fate.check_id,
        "status": fate.status,
    }


def killed_before(file: Path | None) -> dict[str, tuple[str, str]]:
    """Return the check and the status for each mutant that ``file`` calls killed."""
    if file is None or not file.is_file():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {line["id"]: (line["killed_by"], line["status"]) for line in lines if line["killed_by"]}


def score(done: Sequence[Fate]) -> float:
    """Return the percentage that was killed; of nothing, all."""
    return 100 * sum(fate.killed for fate in done) / len(done) if done else 100.0


def summary(done: Sequence[Fate], with_tasks: bool = True) -> list[str]:
    """Return one line per task and per lesson, and how many of the killed ones only ran out of time."""
    lines = []
    for lesson in load_manifest().written:
        parts = [(task.id, task.title) for task in lesson.tasks if with_tasks] + [(lesson.id, lesson.title)]
        for name, title in parts:
            mine = [f for f in done if name in (f.mutant.task_id, f.mutant.lesson_id)]
            if mine:
                late = sum(fate.status == "timeout" for fate in mine)
                lines.append(
                    f"{name:<6} {sum(f.killed for f in mine):>5} of {len(mine):>5} killed"
                    f"{score(mine):>7.1f} %  {late:>3} by time  {title}"
                )
    return lines
