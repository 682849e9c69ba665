"""What to do now: the lines of ``next``, which ``start``, ``run`` and ``watch`` end with, too.

Owns: text. Must not know: how checks are run.
"""

from pathlib import Path

from smoke.course.measure import LOADS
from smoke.course.work import TaskState, Work
from smoke.framework.manifest import Lesson, Task, load_manifest

HINTS = 3


def command(words: str, engine: Path) -> str:
    """Return a command as the student types it."""
    return f"python -m smoke {words}" + ("" if engine == Path("work") else f" --engine {engine}")


def next_lines(work: Work) -> list[str]:
    """Return where the student is, what to read and to write, and the command to run."""
    task = work.place()
    if task is None:
        return all_done(work)
    lesson = load_manifest().lesson(task.lesson_id)
    again = to_run_again(work, lesson)
    if not work.has(lesson):
        return [*again, *done_before(work, lesson), *to_start(work, lesson)]
    state = work.state_of(task)
    return [
        *again,
        *(["Every core task of every lesson passes. What is left is optional."] if task.is_optional else []),
        f"{task.id} {task.title}: {place_in(lesson, task)} in {lesson.id} {lesson.title}",
        f"  state  {describe(state)}",
        f"  read   {lesson.page(task)}",
        *(f"  write  {text}" for text in to_write(work, state)),
        f"  run    {command('watch', work.folder)}",
        f"  stuck? {command(f'hint {task.id}', work.folder)}  ({work.hint_level(task)} of {HINTS} taken)",
    ]


def to_run_again(work: Work, lesson: Lesson) -> list[str]:
    """Return a line for each lesson before this one of which something has changed since it passed."""
    changed = [
        each for each in load_manifest().upto(lesson.id)[:-1] if any(state.is_stale for state in work.tasks(each))
    ]
    return [
        f"{each.id} {each.title} has changed since it passed: {command(f'run {each.id}', work.folder)}"
        for each in changed
    ]


def place_in(lesson: Lesson, task: Task) -> str:
    """Return which of the lesson's tasks this one is."""
    if task.is_optional:
        return "an optional task"
    return f"task {lesson.core.index(task) + 1} of {len(lesson.core)}"


def to_start(work: Work, lesson: Lesson) -> list[str]:
    """Return what to do about a lesson that was not started."""
    into = "" if work.folder == Path("work") else f" --into {work.folder}"
    return [
        f"{lesson.id} {lesson.title}: not started. {lesson.goal}",
        f"  read   {lesson.page()}",
        f"  start  python -m smoke start {lesson.id}{into}",
    ]


def done_before(work: Work, lesson: Lesson) -> list[str]:
    """Return what there is to do about the lesson begun last, if it is done and not this one."""
    done = work.begun()
    if done == lesson or not work.is_green(done):
        return []
    left = [task for task in work.waiting(done) if task.is_optional]
    return [
        f"{done.id} {done.title} is done. Compare: {command(f'diff {done.id}', work.folder)}",
        *([f"  measure   {command(f'measure {done.id}', work.folder)}"] if done.id in LOADS else []),
        *(f"  optional  {task.id} {task.title}: {command(f'watch {task.id}', work.folder)}" for task in left),
    ]


def all_done(work: Work) -> list[str]:
    """Return what there is after the last task."""
    lessons = load_manifest().written
    last = lessons[-1]
    return [
        f"All {len(load_manifest().tasks)} tasks of {lessons[0].id} to {last.id} pass: the engine is yours.",
        f'  try     mini-engine generate "Once upon a time" --engine {work.folder}',
        f"  compare {command(f'diff {last.id}', work.folder)}",
        *([f"  measure {command(f'measure {last.id}', work.folder)}"] if last.id in LOADS else []),
        f"  break   python -m smoke mutants {last.id} --mine my_tests.py",
    ]


def to_write(work: Work, state: TaskState) -> list[str]:
    """Return the functions of a task by file: those that are not written, or all of them."""
    functions = state.open or state.task.functions
    files = dict.fromkeys(function.file for function in functions)
    return [f"{work.folder / f}: {', '.join(each.qualname for each in functions if each.file == f)}" for f in files]


def describe(state: TaskState) -> str:
    """Return in a few words where a task stands."""
    if state.is_done:
        return "passes"
    if state.is_untouched:
        return "to do"
    count = f"{state.passed} of {state.checks} checks pass"
    if state.open:
        return f"{count}, {len(state.open)} of {len(state.task.functions)} functions to write"
    if state.is_stale:
        return f"{count}: what they use has changed, run it again"
    return count if state.known else "written, not run yet"


def next_task_line(work: Work, task: Task) -> str:
    """Return one line that names a task and its page, or a lesson that was not started and its first page."""
    lesson = load_manifest().lesson(task.lesson_id)
    if not work.has(lesson):
        return f"Next: {lesson.id} {lesson.title}, {lesson.page()}"
    again = ", to run again as what it uses has changed" if work.state_of(task).is_stale else ""
    return f"Next: {task.id} {task.title}{again}, {lesson.page(task)}"
