"""``run`` and ``watch``: a student's tasks against their checks."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from smoke.bank.alike import Alike, error_of
from smoke.commands.exits import Exit, stop
from smoke.commands.options import BaseOption, EngineOption, FactorOption, PatternOption, TargetArgument
from smoke.course import report
from smoke.course.guide import command, next_lines, next_task_line
from smoke.course.session import Trial, try_checks
from smoke.course.work import Base, Work
from smoke.framework.catalogue import ListedCheck, catalogue, listed
from smoke.framework.check import DEFAULT_SEED, ProbeError, Result, load_check
from smoke.framework.manifest import Lesson, Task, load_manifest
from smoke.runner.runner import Runner

MAX_EXPLAINED = 3
WRONG = ("fail", "timeout", "crashed", "skipped")
LOG_LINES = 15
POLL_SECONDS = 0.3


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("run")(run_command)
    app.command("watch")(watch_command)


def run_command(
    what: TargetArgument = "",
    pattern: PatternOption = "",
    engine: EngineOption = Path("work"),
    base: BaseOption = "reference",
    upto: Annotated[bool, typer.Option("--upto", help="Run all earlier lessons as well.")] = False,
    seed: Annotated[int, typer.Option(help="Draws the inputs; another seed is another set of inputs.")] = DEFAULT_SEED,
    time_factor: FactorOption = 1.0,
) -> None:
    """Run the checks of a task or of a lesson on your modules, and say what to look at first."""
    below = as_base(base)
    with Runner(time_factor=time_factor) as runner:
        alike = Alike(runner)
        if not (what or pattern or upto or seed != DEFAULT_SEED):
            trials = go_on(alike, engine, below)
            if not trials and Work(engine).place():
                stop(Exit.USAGE)  # there is a task, and no file to check
        else:
            parts = chosen(what, pattern, engine, upto)
            trials = [try_and_show(alike, lesson, checks, Work(engine), below, seed) for lesson, checks in parts]
            if all(trial.passed for trial in trials):
                typer.echo("\n".join(["", *next_lines(Work(engine))]))
    if any(trial.import_fault for trial in trials):
        stop(Exit.CANNOT_IMPORT)
    stop(Exit.PASSED if all(trial.passed for trial in trials) else Exit.CHECK_FAILED)


def as_base(text: str) -> Base:
    """Read ``--base``. Raises ``ValueError`` for another word."""
    if text == "own":
        return "own"
    if text == "reference":
        return "reference"
    raise ValueError(f"--base is {text!r}; choose reference or own")


def chosen(what: str, pattern: str, engine: Path, upto: bool) -> list[tuple[Lesson, list[ListedCheck]]]:
    """Return the checks that ``what`` and ``pattern`` choose, by lesson. Raises ``ValueError`` for a wrong id."""
    what = what or (Work(engine).place() or load_manifest().tasks[-1]).lesson_id
    last = load_manifest().lesson(what.partition(".")[0])
    lessons = load_manifest().upto(last.id) if upto else (last,)
    if "." in what:
        if upto:
            raise ValueError(f"--upto is for a lesson; say run {last.id} --upto, or run {what} alone")
        task = load_manifest().task(".".join(what.split(".")[:2]))
        own = [check for check in catalogue().values() if check.task_id == task.id]
        checks = [check for check in own if what.lower() in (task.id.lower(), check.id.lower())]
        if not checks:
            raise ValueError(f"there is no check {what!r}; {task.id} has {', '.join(check.id for check in own)}")
    else:
        checks = listed(lessons)
    found = [(each, [c for c in checks if c in listed([each], pattern)]) for each in lessons]
    for lesson, fitting in found:
        if not fitting:
            names = ", ".join(task.id for task in lesson.tasks)
            raise ValueError(f"no check of {lesson.id} has {pattern!r} in its id; its tasks are {names}")
    return found


def go_on(alike: Alike, engine: Path, base: Base) -> list[Trial]:
    """Run the task where the student is, and those after it as long as they are written and pass."""
    trials: list[Trial] = []
    seen: set[str] = set()
    while True:
        work = Work(engine)
        task = work.place()
        if task is None or task.id in seen or (seen and work.state_of(task).is_untouched):
            break
        lesson = load_manifest().lesson(task.lesson_id)
        if not work.has(lesson):
            break
        seen.add(task.id)
        checks = [check for check in listed([lesson]) if check.task_id == task.id]
        trials.append(try_and_show(alike, lesson, checks, work, base, DEFAULT_SEED))
        if not trials[-1].passed:
            break
    if not trials or trials[-1].passed:
        typer.echo("\n".join(["", *next_lines(Work(engine))] if trials else next_lines(Work(engine))))
    return trials


def try_and_show(
    alike: Alike, lesson: Lesson, checks: Sequence[ListedCheck], work: Work, base: Base, seed: int
) -> Trial:
    """Run checks of one lesson, print the results and remember them. Raises ``ValueError`` if files are missing."""
    with tqdm(total=len(checks), desc=f"{lesson.id}, checks", unit="", leave=False, disable=None) as bar:
        trial = try_checks(alike.runner, lesson, work, base, checks, seed, lambda _: bar.update())
    work.begin(lesson)
    typer.echo(f"{lesson.id} {lesson.title}: {work.folder}, {base} base")
    typer.echo("\n".join(summary(trial, explanations(alike, trial, seed), work)))
    return trial


def explanations(alike: Alike, trial: Trial, seed: int) -> list[str]:
    """Return what helps with the first results that are wrong. Mutates ``alike``."""
    passed = {result.check_id for result in trial.results if result.passed}
    texts = []
    errors = set[tuple[str, str, str]]()  # one error stops many checks, and the pitfalls of one of them are enough
    wrong = [] if trial.import_fault else [result for result in trial.results if result.status in WRONG]
    for result in wrong[:MAX_EXPLAINED]:
        check = load_check(result.check_id)
        answer = trial.answers.get(check.id)
        is_known = isinstance(answer, ProbeError) and error_of(answer) in errors
        pitfalls = [] if answer is None or is_known else alike.pitfalls(check, seed, answer, passed)
        if isinstance(answer, ProbeError):
            errors.add(error_of(answer))
        texts.append(report.explain(result, check, pitfalls))
    return texts


def summary(trial: Trial, explained: list[str], work: Work) -> list[str]:
    """Return everything that is printed about one lesson."""
    if trial.import_fault is not None:
        return ["", f"cannot be imported: {trial.import_fault}"]
    lines = [report.timed_line(result) for result in trial.results]
    for text in explained:
        lines += ["", text]
    wrong = [result for result in trial.results if result.status in WRONG]
    if len(wrong) > MAX_EXPLAINED:
        lines += ["", f"{len(wrong) - MAX_EXPLAINED} more do not pass; begin with these."]
    printed = trial.log.strip().splitlines()
    if printed:
        lines += ["", "your code printed:", *(f"  {text}" for text in printed[-LOG_LINES:])]
    if trial.filled:
        lines += ["", f"not written yet, so the reference's own: {', '.join(trial.filled)}"]
    lines += ["", report.count(trial.results)]
    if trial.passed:
        lines.append(passed_line(trial))
    elif not wrong:
        task = next_task(trial.results)
        left = {catalogue()[result.check_id].task_id for result in trial.results if not result.passed}
        is_rest_optional = all(load_manifest().task(task_id).is_optional for task_id in left)
        if is_rest_optional:
            return [*lines, "The core passes. What is left is optional.", "", *next_lines(work)]
        lines.append("Red is right: nothing here is wrong, some of it is not written.")
        lines += [next_task_line(work, task), f"run it at every save: {command(f'watch {task.id}', work.folder)}"]
    return lines


def passed_line(trial: Trial) -> str:
    """Return what passed: a lesson, tasks, or single checks."""
    if len(trial.results) == len(listed([trial.lesson])):
        return report.banner(trial.lesson, len(trial.results))
    ids = {result.check_id for result in trial.results}
    tasks = [catalogue()[name].task_id for name in ids]
    whole = [task for task in sorted(set(tasks)) if all(c.id in ids for c in catalogue().values() if c.task_id == task)]
    return f"{', '.join(whole)} PASS" if len(whole) == len(set(tasks)) else "all that were run pass"


def next_task(results: Sequence[Result]) -> Task:
    """Return the first task that waits for code: one of these checks' own, or else one that blocks them."""
    own = [catalogue()[result.check_id].task_id for result in results if result.status == "not-implemented"]
    return load_manifest().task((own or sorted(result.blocked_by for result in results if result.blocked_by))[0])


def watch_command(
    what: TargetArgument = "",
    pattern: PatternOption = "",
    engine: EngineOption = Path("work"),
    base: BaseOption = "reference",
    time_factor: FactorOption = 1.0,
) -> None:
    """Run a task's checks whenever you save a file, and go on to the next task when they pass. Ctrl-C ends it."""
    below = as_base(base)
    if what or pattern:
        chosen(what, pattern, engine, upto=False)  # a wrong id ends the command, a file that is being saved does not
    with Runner(time_factor=time_factor) as runner:
        alike = Alike(runner)

        def once() -> None:
            if not what and not pattern:
                go_on(alike, engine, below)
                return
            for lesson, checks in chosen(what, pattern, engine, upto=False):
                try_and_show(alike, lesson, checks, Work(engine), below, DEFAULT_SEED)

        try:
            repeat(once, engine)
        except KeyboardInterrupt:
            stop(Exit.PASSED)


def repeat(once: Callable[[], None], folder: Path) -> None:
    """Call ``once`` now and after every change of a Python file in ``folder``. Never returns."""
    seen: list[tuple[Path, float]] = [(folder, -1.0)]
    while True:
        files = saved(folder)
        if files != seen:
            seen = files
            typer.echo("\n" + "─" * 80)
            try:
                once()
            except ValueError as error:
                typer.echo(f"error: {error}", err=True)
            typer.echo("\nwaiting for a change …")
        time.sleep(POLL_SECONDS)


def saved(folder: Path) -> list[tuple[Path, float]]:
    """Return every Python file in a folder with the time of its last change."""
    found = []
    for file in folder.rglob("*.py"):
        with suppress(OSError):  # an editor is about to put a new one in its place
            found.append((file, file.stat().st_mtime))
    return sorted(found)
