"""A student's folder: the lesson files in it, what is written of them, and what is remembered next to them.

Owns: ``work/.smoke.json`` and the rules about missing files. Must not know: how checks are run, or their code.
"""

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from mini_engine.overlay import functions_of, open_task
from smoke.course.digest import Digest
from smoke.framework.catalogue import ListedCheck, listed
from smoke.framework.check import Result, tasks_needed
from smoke.framework.manifest import FunctionName, Lesson, Task, load_manifest

STATE_FILE = ".smoke.json"
Base = Literal["reference", "own"]


@dataclass(frozen=True)
class TaskState:
    """Where a task stands: how many checks it has, were run and pass, what is not written, whether a pass is stale."""

    task: Task
    checks: int
    known: int
    passed: int
    open: tuple[FunctionName, ...]
    is_stale: bool

    @property
    def is_done(self) -> bool:
        """Whether every check passes with the functions as they are now."""
        return self.passed == self.checks

    @property
    def is_untouched(self) -> bool:
        """Whether no function of the task is written."""
        return len(self.open) == len(self.task.functions)


class Work:
    """The folder that holds a student's modules, named as in ``mini_engine``. Files are read once, the state anew."""

    def __init__(self, folder: Path) -> None:
        """Look at ``folder``, which need not exist."""
        self.folder = folder
        self.digest = cache(lambda files: Digest(folder, files))  # of the files as they are: make another Work later
        self.fingerprint = cache(lambda files: fingerprint(folder, files))

    def has(self, lesson: Lesson) -> bool:
        """Whether any file of the lesson is there."""
        return any((self.folder / file).is_file() for file in lesson.files)

    def files(self, lesson: Lesson, base: Base) -> tuple[str, ...]:
        """Return the files that stand for the engine's when ``lesson`` is run over ``base``."""
        lessons = load_manifest().upto(lesson.id) if base == "own" else (lesson,)
        return tuple(file for each in lessons for file in each.files if (self.folder / file).is_file())

    def require(self, lesson: Lesson) -> None:
        """Raise ``ValueError`` naming a file of the lesson that is missing: the reference's would be tested instead."""
        missing = [file for file in lesson.files if not (self.folder / file).is_file()]
        if missing:
            path = self.folder / missing[0]
            raise ValueError(f"{path} does not exist; `python -m smoke start {lesson.id}` writes it")

    def open_functions(self, files: Iterable[str]) -> dict[str, list[FunctionName]]:
        """Return the functions that are not written yet, by task; of a file that is not Python, none."""
        found: dict[str, list[FunctionName]] = {}
        for file in files:
            with suppress(OSError, SyntaxError, ValueError):
                tree = ast.parse((self.folder / file).read_bytes())
                module = file.removesuffix(".py").replace("/", ".")
                for name, node in functions_of(tree).items():
                    task = open_task(node)
                    if task is not None:
                        found.setdefault(task, []).append(FunctionName(module, name))
        return found

    def load(self) -> dict[str, Any]:
        """Read what is remembered; a missing or broken file means nothing is."""
        try:
            state = json.loads((self.folder / STATE_FILE).read_text())
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def save(self, state: dict[str, Any]) -> None:
        """Write what is to be remembered."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / (STATE_FILE + ".partial")
        partial.write_text(json.dumps(state, indent=1) + "\n")
        partial.rename(self.folder / STATE_FILE)

    def begin(self, lesson: Lesson) -> None:
        """Remember that the student is at ``lesson``. Mutates the state file."""
        state = self.load()
        state["at"] = lesson.id
        self.save(state)

    def marks(self, lesson: Lesson, base: Base, checks: Iterable[ListedCheck]) -> dict[str, dict[str, str]]:
        """Return what checks rest on as it is now, by id, for ``remember``. Ask before they are run."""
        files = self.files(lesson, base)
        return {
            check.id: {"base": base, "files": self.fingerprint(files), "rests_on": self.rests_on(check, files)}
            for check in checks
        }

    def remember(self, lesson: Lesson, results: Iterable[Result], marks: Mapping[str, Mapping[str, str]]) -> None:
        """Remember results, and what they rest on. Mutates the state file."""
        state = self.load()
        known = state.setdefault("checks", {}).setdefault(lesson.id, {})
        for result in results:
            known[result.check_id] = {"status": result.status, **marks[result.check_id]}
        self.save(state)

    def rests_on(self, check: ListedCheck, files: tuple[str, ...]) -> str:
        """Return the fingerprint of all that a check can reach in ``files``."""
        return str(self.digest(files).of(tasks_of(check)))

    def passed(self, lesson: Lesson) -> set[str]:
        """Return the checks that passed with the functions that they rest on as these are now."""
        known = self.load().get("checks", {}).get(lesson.id, {})
        return {check.id for check in listed([lesson]) if self.holds(check, lesson, known.get(check.id))}

    def holds(self, check: ListedCheck, lesson: Lesson, entry: object) -> bool:
        """Whether what is remembered of a check is a pass that still counts."""
        if not isinstance(entry, dict) or entry.get("status") != "pass":
            return False
        files = self.files(lesson, "own" if entry.get("base") == "own" else "reference")
        return entry.get("files") == self.fingerprint(files) or entry.get("rests_on") == self.rests_on(check, files)

    def is_green(self, lesson: Lesson) -> bool:
        """Whether every check of the lesson's core tasks passed with the files as they are now."""
        return self.passed(lesson) >= checks_in(lesson, lesson.core)

    def tasks(self, lesson: Lesson) -> list[TaskState]:
        """Return where each task of a lesson stands."""
        known = self.load().get("checks", {}).get(lesson.id, {})
        passed = self.passed(lesson)
        still_open = self.open_functions(lesson.files)
        states = []
        for task in lesson.tasks:
            ids = [check.id for check in listed([lesson]) if check.task_id == task.id]
            stale = any(name not in passed and known.get(name, {}).get("status") == "pass" for name in ids)
            missing = tuple(still_open.get(task.id, ()))
            counts = len(ids), sum(name in known for name in ids), len(passed.intersection(ids))
            states.append(TaskState(task, *counts, missing, stale))
        return states

    def state_of(self, task: Task) -> TaskState:
        """Return where a task stands."""
        (state,) = (each for each in self.tasks(load_manifest().lesson(task.lesson_id)) if each.task == task)
        return state

    def place(self) -> Task | None:
        """Return the task to go on with: the first of the lesson begun last, or of those after it, that is not done.

        Optional tasks come after all others.
        """
        lessons = load_manifest().written
        first = lessons.index(self.begun())
        order = [*lessons[first:], *lessons[:first]]
        kinds = (False, True)  # the files of a lesson are looked at only if the lessons before it leave nothing to do
        places = (task for kind in kinds for each in order for task in self.waiting(each) if task.is_optional is kind)
        return next(places, None)

    def begun(self) -> Lesson:
        """Return the lesson begun last; if that is not remembered, the first that has a file, or else the first."""
        lessons = load_manifest().written
        at = [lesson for lesson in lessons if lesson.id == self.load().get("at")]
        return (at or [lesson for lesson in lessons if self.has(lesson)] or [*lessons])[0]

    def waiting(self, lesson: Lesson) -> list[Task]:
        """Return the tasks of a lesson that are not done."""
        passed = self.passed(lesson)
        missing = {check.task_id for check in listed([lesson]) if check.id not in passed}
        return [task for task in lesson.tasks if task.id in missing]

    def hint_level(self, task: Task) -> int:
        """Return how many hints of a task were taken."""
        return int(self.load().get("hints", {}).get(task.id, 0))

    def take_hint(self, task: Task, level: int) -> None:
        """Remember that hints up to ``level`` were taken. Mutates the state file."""
        state = self.load()
        taken = state.setdefault("hints", {})
        taken[task.id] = max(level, taken.get(task.id, 0))
        self.save(state)


def checks_in(lesson: Lesson, tasks: Iterable[Task]) -> set[str]:
    """Return the ids of the checks of some of a lesson's tasks."""
    ids = {task.id for task in tasks}
    return {check.id for check in listed([lesson]) if check.task_id in ids}


def tasks_of(check: ListedCheck) -> frozenset[str]:
    """Return the task of a check and those that it builds on."""
    return tasks_needed(check, load_manifest()) | {check.task_id}


def fingerprint(folder: Path, files: Sequence[str]) -> str:
    """Return a fingerprint of files, byte for byte."""
    sha = hashlib.sha256()
    for file in files:
        sha.update(f"{file}\n".encode() + (folder / file).read_bytes())
    return sha.hexdigest()[:16]
