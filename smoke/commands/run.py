"""``run`` and ``watch``: a student's lesson against its checks."""

import time
from pathlib import Path
from typing import Annotated

import typer

from smoke.bank.alike import Alike
from smoke.commands.exits import Exit, stop
from smoke.course import report
from smoke.course.work import Base, Work
from smoke.framework.check import DEFAULT_SEED, Check, Result, all_checks, block_dependents, checks_of
from smoke.framework.manifest import Lesson, Task, load_manifest
from smoke.runner.runner import Outcome, Runner

MAX_EXPLAINED = 3
WRONG = ("fail", "timeout", "crashed", "skipped")
LOG_LINES = 15

LessonArgument = Annotated[str, typer.Argument(metavar="LESSON", help="L1, L2, …")]
EngineOption = Annotated[Path, typer.Option("--engine", help="The folder with your modules.")]
BaseOption = Annotated[
    str, typer.Option("--base", help="What lies beneath: reference, or own for your earlier lessons.")
]
PatternOption = Annotated[str, typer.Option("-k", help="Only checks whose id contains this, like L2.B.")]
FactorOption = Annotated[float, typer.Option("--time-factor", min=0.1, help="Stretch every time limit.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("run")(run_command)
    app.command("watch")(watch_command)


def run_command(
    lesson: LessonArgument,
    pattern: PatternOption = "",
    engine: EngineOption = Path("work"),
    base: BaseOption = "reference",
    upto: Annotated[bool, typer.Option("--upto", help="Run all earlier lessons as well.")] = False,
    seed: Annotated[int, typer.Option(help="Draws the inputs; another seed is another set of inputs.")] = DEFAULT_SEED,
    time_factor: FactorOption = 1.0,
) -> None:
    """Run the checks of a lesson on your modules, and say what to look at first."""
    last = load_manifest().lesson(lesson)
    lessons = load_manifest().upto(last.id) if upto else (last,)
    with Runner(time_factor=time_factor) as runner:
        alike = Alike(runner)
        outcomes = [run_lesson(alike, each, Work(engine), as_base(base), pattern, seed) for each in lessons]
    if any(outcome.import_fault for outcome in outcomes):
        stop(Exit.CANNOT_IMPORT)
    stop(Exit.PASSED if all(r.passed for outcome in outcomes for r in outcome.results) else Exit.CHECK_FAILED)


def as_base(text: str) -> Base:
    """Read ``--base``. Raises ``ValueError`` for another word."""
    if text == "own":
        return "own"
    if text == "reference":
        return "reference"
    raise ValueError(f"--base is {text!r}; choose reference or own")


def run_lesson(alike: Alike, lesson: Lesson, work: Work, base: Base, pattern: str, seed: int) -> Outcome:
    """Run one lesson, print it and remember it. Raises ``ValueError`` if there is nothing to run."""
    candidate = work.candidate(lesson, base)
    checks = checks_of([lesson], pattern)
    if not checks:
        raise ValueError(f"no check of {lesson.id} has {pattern!r} in its id")
    typer.echo(f"{lesson.id} {lesson.title}: {candidate.name}")
    outcome = alike.runner.run(candidate, checks, seed)
    results = block_dependents(outcome.results)
    if seed == DEFAULT_SEED and base == "reference" and outcome.import_fault is None:
        work.remember(lesson, results)
    explained = explanations(alike, results, outcome, seed)
    typer.echo("\n".join(summary(lesson, results, checks, outcome, explained)))
    return outcome


def explanations(alike: Alike, results: list[Result], outcome: Outcome, seed: int) -> list[str]:
    """Return what helps with the first results that are wrong. Mutates ``alike``."""
    passed = {result.check_id for result in results if result.passed}
    texts = []
    for result in [result for result in results if result.status in WRONG][:MAX_EXPLAINED]:
        check = all_checks()[result.check_id]
        answer = outcome.answers.get(check.id)
        pitfalls = [] if answer is None else alike.pitfalls(check, seed, answer, passed)
        texts.append(report.explain(result, check, pitfalls))
    return texts


def summary(
    lesson: Lesson, results: list[Result], checks: list[Check], outcome: Outcome, explained: list[str]
) -> list[str]:
    """Return everything that is printed about one lesson."""
    if outcome.import_fault is not None:
        return ["", f"cannot be imported: {outcome.import_fault}"]
    lines = [report.line(result) for result in results]
    wrong = [result for result in results if result.status in WRONG]
    for text in explained:
        lines += ["", text]
    if len(wrong) > MAX_EXPLAINED:
        lines += ["", f"{len(wrong) - MAX_EXPLAINED} more do not pass; begin with these."]
    printed = outcome.log.strip().splitlines()
    if printed:
        lines += ["", "your code printed:", *(f"  {text}" for text in printed[-LOG_LINES:])]
    lines += ["", report.count(results)]
    if all(result.passed for result in results):
        whole = len(checks) == len(checks_of([lesson]))
        lines.append(report.banner(lesson, len(checks)) if whole else "all that were run pass")
    elif not wrong:
        task = next_task(results)
        lines.append(f"Red is right: nothing here is wrong, some of it is not written. Next: {task.id} {task.title}")
    return lines


def next_task(results: list[Result]) -> Task:
    """Return the first task that waits for code: one of these checks' own, or else one that blocks them."""
    own = [all_checks()[result.check_id].task_id for result in results if result.status == "not-implemented"]
    return load_manifest().task((own or sorted(result.blocked_by for result in results if result.blocked_by))[0])


def watch_command(
    lesson: LessonArgument,
    pattern: PatternOption = "",
    engine: EngineOption = Path("work"),
    base: BaseOption = "reference",
    time_factor: FactorOption = 1.0,
) -> None:
    """Run the checks again whenever a file of the lesson is saved. Ctrl-C ends it."""
    chosen = load_manifest().lesson(lesson)
    work = Work(engine)
    seen = ""
    with Runner(time_factor=time_factor) as runner:
        alike = Alike(runner)
        try:
            while True:
                digest = work.digest(chosen.files)
                if digest != seen:
                    seen = digest
                    typer.echo("\n" + "─" * 80)
                    run_lesson(alike, chosen, work, as_base(base), pattern, DEFAULT_SEED)
                    typer.echo("\nwaiting for a change …")
                time.sleep(0.3)
        except KeyboardInterrupt:
            stop(Exit.PASSED)
