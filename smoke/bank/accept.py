"""The suite's proof of itself: what must pass passes, what must fail fails, and for the right reason.

Owns: the four rules and the matrix. Must not know: how a candidate is run.

1. The reference passes every check, with several seeds. Its core passes with every optional task not written.
2. The starter of a task fails exactly the task's own checks, with ``NotImplementedError`` naming the task. Every other
   check of the lesson passes, or is blocked by the task if it builds on it.
3. A pitfall is caught by every check that it names. Others may catch it too.
4. A wheat passes every check of its lesson and, in a full run, of all later ones. It runs confined, as grading runs it,
   and nothing that it does is noted. Wheats of different tasks are one candidate; unless it passes, each runs alone.

Only a full run tries a pitfall on the checks that it does not name: nothing is proved by them, and the matrix shows
which lesson's checks overlap.
"""

import queue
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from smoke.course.starter import starter_files, task_starter
from smoke.framework.bank import Edit, Pitfall, load_pitfalls, load_wheats
from smoke.framework.check import DEFAULT_SEED, Check, all_checks, checks_of, tasks_needed
from smoke.framework.manifest import Task, load_manifest
from smoke.grade.trial import try_isolation
from smoke.grade.worker import Worker, with_optional
from smoke.runner.runner import PATIENCE, Candidate, Outcome, Runner

Kind = Literal["reference", "starter", "lesson starter", "pitfall", "wheat"]
MEMORY, SECONDS = 2 << 30, 180  # of a lesson of a wheat, as `grade` has them without options
SEEDS = (DEFAULT_SEED, 1, 2)  # of the reference; everything else runs with the first


@dataclass(frozen=True)
class Job:
    """One candidate to run: its files, the checks, and the rule that says what is wrong with the outcome.

    ``edit``: what a wheat changes.
    """

    kind: Kind
    id: str
    files: Callable[[], dict[str, str]]
    checks: list[Check]
    rule: Callable[[Outcome], list[str]]
    seed: int = DEFAULT_SEED
    edit: Edit | None = None


@dataclass(frozen=True)
class Verdict:
    """A job that was run. ``faults`` is empty if the suite kept its promise."""

    job: Job
    outcome: Outcome
    faults: list[str]


def jobs(pattern: str = "", full: bool = False) -> list[Job]:
    """Return every job whose id contains ``pattern``; case does not matter.

    The id of a lesson or a task, ``L5`` or ``L5.J``, means its starters, its pitfalls and its wheats.
    """
    wanted = re.escape(pattern)
    if named := re.fullmatch(r"L(\d+)\.?([A-Z]?)", pattern, re.IGNORECASE):
        lesson, task = named.groups()
        wanted = rf"^(starter L{lesson}(?!\d)\.?{task}|[PW]{lesson}-{task})"
    found = [*reference_jobs(), *starter_jobs(), *pitfall_jobs(full), *wheat_jobs(full)]
    return [job for job in found if re.search(wanted, job.id, re.IGNORECASE)]


def reference_jobs() -> Iterator[Job]:
    """Yield the reference with every seed, and its core."""
    for seed in SEEDS:
        yield Job("reference", f"reference, seed {seed}", dict, list(all_checks().values()), must_pass, seed)
    core = [check for check in all_checks().values() if not load_manifest().task(check.task_id).is_optional]
    yield Job("reference", "core alone", core_alone, core, must_pass)


def core_alone() -> dict[str, str]:
    """Return the files of a student who wrote the core: what is open in them is filled as grading fills it."""
    return with_optional(task_starter(*(task for task in load_manifest().tasks if task.is_optional)))[0]


def starter_jobs() -> Iterator[Job]:
    """Yield the starter of every task, and of every lesson as students get it."""
    for lesson in load_manifest().written:
        checks = checks_of([lesson])
        yield Job("lesson starter", f"starter {lesson.id}", partial(starter_files, lesson), checks, must_be_all_to_do)
        for task in lesson.tasks:
            yield Job("starter", f"starter {task.id}", partial(task_starter, task), checks, must_miss(task))


def pitfall_jobs(full: bool) -> Iterator[Job]:
    """Yield every pitfall with the checks that it names, in a full run with all of its lesson's."""
    for pitfall in load_pitfalls():
        checks = checks_of([load_manifest().lesson(pitfall.lesson_id)])
        if not full:
            checks = [check for check in checks if check.id in pitfall.killed_by] or checks
        yield Job("pitfall", pitfall.id, partial(edited, pitfall.edit), checks, must_be_killed(pitfall))


def wheat_jobs(full: bool) -> Iterator[Job]:
    """Yield every wheat with the checks of its lesson, in a full run of the later ones, too."""
    for wheat in load_wheats():
        own = load_manifest().lesson(wheat.lesson_id)
        later = [lesson for lesson in load_manifest().written if lesson.number > own.number]
        checks = checks_of([own, *later] if full else [own])
        yield Job("wheat", wheat.id, partial(edited, wheat.edit), checks, must_pass, edit=wheat.edit)


def edited(*edits: Edit) -> dict[str, str]:
    """Return the overlay with these edits. Raises ``ValueError`` if one does not fit where another was made."""
    files: dict[str, str] = {}
    for edit in edits:
        if not edit.find and edit.file in files:
            raise ValueError(f"{edit.file} is replaced, and edited besides")
        files[edit.file] = edit.apply(files.get(edit.file))
    return files


def must_pass(outcome: Outcome) -> list[str]:
    """Name every check that did not pass, and what a grader would be told of."""
    faults = [f"{r.check_id} is {r.status}: {r.failures[:1] or r.detail}" for r in outcome.results if not r.passed]
    return [*faults, *outcome.notes]


def must_be_all_to_do(outcome: Outcome) -> list[str]:
    """Name every check of a lesson's starter that is not waiting for code."""
    return [f"{r.check_id} is {r.status}" for r in outcome.results if r.status not in ("not-implemented", "blocked")]


def must_miss(task: Task) -> Callable[[Outcome], list[str]]:
    """Return the rule of one task's starter."""
    words = f"{task.id}: {task.title}"

    def rule(outcome: Outcome) -> list[str]:
        faults = []
        for result in outcome.results:
            check = all_checks()[result.check_id]
            if check.task_id == task.id:
                if result.status != "not-implemented" or result.detail != words:
                    faults.append(f"{check.id} is {result.status}, not-implemented with {words!r} was expected")
            elif result.status == "blocked":
                if result.blocked_by != task.id or task.id not in tasks_needed(check, load_manifest()):
                    faults.append(f"{check.id} is blocked by {result.blocked_by}, which it does not build on")
            elif not result.passed:
                faults.append(f"{check.id} is {result.status}, and it is not of this task: {result.failures[:1]}")
        return faults

    return rule


def must_be_killed(pitfall: Pitfall) -> Callable[[Outcome], list[str]]:
    """Return the rule of one pitfall."""

    def rule(outcome: Outcome) -> list[str]:
        if outcome.import_fault:
            return [f"the mutant cannot be imported: {outcome.import_fault}"]
        status = {result.check_id: result.status for result in outcome.results}
        unknown = [f"there is no check {check_id}" for check_id in pitfall.killed_by if check_id not in status]
        return unknown + [
            f"{check_id} is {status[check_id]} and should have caught it"
            for check_id in pitfall.killed_by
            if status.get(check_id) in ("pass", "skipped", "blocked")
        ]

    return rule


def accept(todo: Sequence[Job], workers: int, report: Callable[[Verdict], None]) -> list[Verdict]:
    """Run all jobs with ``workers`` fork servers; ``report`` hears each verdict as it comes. Order as in ``todo``."""
    waiting: queue.SimpleQueue[list[Job]] = queue.SimpleQueue()
    for together in candidates(todo):
        waiting.put(together)
    verdicts: dict[str, Verdict] = {}
    errors: list[BaseException] = []
    lock = threading.Lock()
    isolation = try_isolation() if any(job.kind == "wheat" for job in todo) else None

    def work(number: int) -> None:
        try:
            with ExitStack() as stack:
                runner = stack.enter_context(Runner(patience=PATIENCE))
                confinement = isolation and isolation.confinement(number, MEMORY, SECONDS)
                grader = confinement and stack.enter_context(Worker(confinement))
                while True:
                    together = waiting.get_nowait()
                    if together[0].edit and grader:
                        found = run_together(grader, together)
                    else:
                        runner.prepare({check.id for each in todo for check in each.checks})
                        found = [run_job(runner, together[0])]
                    with lock:
                        for verdict in found:
                            verdicts[verdict.job.id] = verdict
                            report(verdict)
        except queue.Empty:
            return
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(min(workers, len(todo)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [verdicts[job.id] for job in todo]


def candidates(todo: Sequence[Job]) -> list[list[Job]]:
    """Return the jobs by the candidate that they run in: some wheats have one for all of them."""
    found: list[list[Job]] = []
    for job in todo:
        together = next((others for others in found if job.edit and may_join(job, others)), None)
        if together is None:
            found.append([job])
        else:
            together.append(job)
    return found


def may_join(wheat: Job, others: Sequence[Job]) -> bool:
    """Whether ``others`` are wheats of the same lesson, none is of the same task, and all can be made in one text."""
    tasks = {job.id.rstrip("0123456789") for job in others}
    if wheat.id.rstrip("0123456789") in tasks or wheat.checks != others[0].checks:
        return False
    edits = [job.edit for job in (*others, wheat) if job.edit]
    try:
        return len(edits) > len(others) and bool(edited(*edits))
    except ValueError:
        return False


def run_job(runner: Runner, job: Job) -> Verdict:
    """Write the job's overlay, run it and apply its rule."""
    files = job.files()
    with tempfile.TemporaryDirectory(prefix="smoke-overlay-") as folder:
        write_overlay(Path(folder), files)
        candidate = Candidate(job.id, Path(folder) if files else None, tuple(files))
        outcome = runner.run(candidate, job.checks, job.seed)
    return Verdict(job, outcome, job.rule(outcome))


def run_together(worker: Worker, wheats: Sequence[Job]) -> list[Verdict]:
    """Run wheats as one candidate; unless it passes, each alone."""
    if len(wheats) > 1:
        files = partial(edited, *(job.edit for job in wheats if job.edit))
        verdict = run_confined(worker, replace(wheats[0], files=files))
        if not verdict.faults:
            return [replace(verdict, job=job) for job in wheats]
    return [run_confined(worker, job) for job in wheats]


def run_confined(worker: Worker, job: Job) -> Verdict:
    """Run the job's checks lesson by lesson in the process that grading uses, and apply its rule."""
    lessons = [lesson for lesson in load_manifest().written if lesson.id in {check.lesson_id for check in job.checks}]
    outcomes = [worker.run_reference(lesson, job.seed, job.files()) for lesson in lessons]
    results = tuple(result for outcome in outcomes for result in outcome.results)
    outcome = replace(outcomes[0], results=results, notes=tuple(note for each in outcomes for note in each.notes))
    return Verdict(job, outcome, job.rule(outcome))


def write_overlay(folder: Path, files: dict[str, str]) -> None:
    """Write files, by name relative to ``folder``."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def matrix(verdicts: Sequence[Verdict]) -> str:
    """Draw pitfall × check, one table per lesson: # caught as promised, + caught besides, ! missed, . passed.

    A check that was not run leaves a gap.
    """
    named = {pitfall.id: set(pitfall.killed_by) for pitfall in load_pitfalls()}
    lines: list[str] = []
    for lesson in load_manifest().written:
        rows = [v for v in verdicts if v.job.kind == "pitfall" and v.job.checks[0].lesson_id == lesson.id]
        if not rows:
            continue
        checks = [check.id for check in checks_of([lesson])]
        lines.append(f"\n{lesson.id} {lesson.title}: pitfall × check")
        lines += [f"{' ' * 10}{'│' * index}┌ {check_id}" for index, check_id in enumerate(checks)]
        for verdict in rows:
            passed = {result.check_id: result.passed for result in verdict.outcome.results}
            promised = {True: "!", False: "#", None: " "}
            others = {True: ".", False: "+", None: " "}
            marks = [(promised if name in named[verdict.job.id] else others)[passed.get(name)] for name in checks]
            lines.append(f"{verdict.job.id:<10}{''.join(marks)}".rstrip())
    return "\n".join(lines)
