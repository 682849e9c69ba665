"""A student's checks, run: what is judged is the student's own, what is not written yet is the reference's.

Owns: which checks share a process, and what is remembered. Must not know: words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from smoke.course.work import Base, Work, tasks_of
from smoke.framework.catalogue import ListedCheck
from smoke.framework.check import DEFAULT_SEED, Result, block_dependents, load_check
from smoke.framework.manifest import ENGINE, Lesson, Task, load_manifest
from smoke.runner.runner import Answer, Candidate, Outcome, Report, Runner


@dataclass(frozen=True)
class Trial:
    """What became of some checks of a lesson. ``filled``: tasks whose open functions were the reference's."""

    lesson: Lesson
    results: list[Result]
    import_fault: str | None
    log: str
    answers: dict[str, Answer]
    filled: list[str]

    @property
    def passed(self) -> bool:
        """Whether all checks pass."""
        return all(result.passed for result in self.results)


def try_checks(
    runner: Runner,
    lesson: Lesson,
    work: Work,
    base: Base,
    checks: Sequence[ListedCheck],
    seed: int = DEFAULT_SEED,
    report: Report = lambda _: None,
) -> Trial:
    """Run ``checks`` of a lesson and remember the results of the default seed. ``report`` hears results as they come.

    Raises ``ValueError`` if files lack.
    """
    work.require(lesson)
    files = work.files(lesson, base)
    still_open = {task: set(map(str, functions)) for task, functions in work.open_functions(files).items()}
    marks = work.marks(lesson, base, checks)
    untouched, groups = split(checks, still_open)
    running = [check for group in groups.values() for check in group]
    if running:
        runner.prepare([check.id for check in running])
    outcomes = [
        runner.run(candidate(work, base, files, judged, group), [load_check(check.id) for check in group], seed, report)
        for judged, group in groups.items()
    ]
    found = {result.check_id: result for outcome in outcomes for result in outcome.results}
    for (task,) in filter(None, groups):
        hidden = [check for check in groups[(task,)] if found[check.id].status == "not-implemented"]
        outcomes.append(runner.run(candidate(work, base, files, (), hidden), [load_check(c.id) for c in hidden], seed))
        found |= {result.check_id: result for result in mistakes(outcomes[-1], still_open[task])}
    found |= {check.id: Result(check.id, "not-implemented", detail=words(check)) for check in untouched}
    results = block_dependents([found[check.id] for check in checks], fill=True)
    needed = {task for check in running for task in tasks_of(check) - {check.task_id}} & still_open.keys()
    filled = needed - Work(ENGINE).open_functions(files if needed else ()).keys()  # a sealed course lacks some itself
    if seed == DEFAULT_SEED and not any(outcome.import_fault for outcome in outcomes):
        work.remember(lesson, results, marks)
    return Trial(
        lesson,
        results,
        next((outcome.import_fault for outcome in outcomes if outcome.import_fault), None),
        "".join(outcome.log for outcome in outcomes),
        {name: answer for outcome in outcomes for name, answer in outcome.answers.items()},
        sorted(filled),
    )


def mistakes(outcome: Outcome, missing: set[str]) -> list[Result]:
    """Return what fails although the reference stands in for ``missing``: the open functions hid these mistakes."""
    names = ", ".join(sorted(name.rpartition(":")[2] for name in missing))
    words = f"the reference stands in for {names}, not written yet"
    return [replace(result, detail=words) for result in outcome.results if result.status == "fail"]


def split(
    checks: Sequence[ListedCheck], still_open: dict[str, set[str]]
) -> tuple[list[ListedCheck], dict[tuple[str, ...], list[ListedCheck]]]:
    """Return the checks of tasks of which nothing is written, and the others by the task whose functions stay open.

    A process imports a module once, with what is open in it or with what fills it: so a task that is written in part
    has a process of its own, and all complete ones share one.
    """
    untouched: list[ListedCheck] = []
    groups: dict[tuple[str, ...], list[ListedCheck]] = {}
    for check in checks:
        missing = still_open.get(check.task_id, set())
        if missing >= set(map(str, load_manifest().task(check.task_id).functions)):
            untouched.append(check)
        else:
            groups.setdefault((check.task_id,) if missing else (), []).append(check)
    return untouched, groups


def candidate(
    work: Work, base: Base, files: tuple[str, ...], judged: tuple[str, ...], checks: Sequence[ListedCheck]
) -> Candidate:
    """Return the engine to test. A file that no task of ``checks`` lies in need not be importable."""
    tasks = {task for check in checks for task in tasks_of(check)}
    used = {f.file for task in load_manifest().tasks if task.id in tasks for f in task.functions}
    imported = tuple(file for file in files if file in used)
    return Candidate(f"{work.folder}, {base} base", work.folder, files, fill=True, judged=judged, imported=imported)


def words(check: ListedCheck) -> str:
    """Return what the open functions of a check's task say."""
    task: Task = load_manifest().task(check.task_id)
    return f"{task.id}: {task.title}"
