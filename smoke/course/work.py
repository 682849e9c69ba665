"""A student's folder: the lesson files in it and what is remembered next to them.

Owns: ``work/.smoke.json`` and the rules about missing files. Must not know: how checks are run.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from smoke.framework.check import Check, Result, all_checks, checks_of, tasks_needed
from smoke.framework.manifest import Lesson, Task, load_manifest
from smoke.runner.runner import Candidate

STATE_FILE = ".smoke.json"
Base = Literal["reference", "own"]


@dataclass(frozen=True)
class Work:
    """The folder that holds a student's modules, named as in ``mini_engine``."""

    folder: Path

    def has(self, lesson: Lesson) -> bool:
        """Whether any file of the lesson is there."""
        return any((self.folder / file).is_file() for file in lesson.files)

    def candidate(self, lesson: Lesson, base: Base) -> Candidate:
        """Return the engine to test: this lesson's files over the reference, or all own files up to the lesson.

        Raises ``ValueError`` naming a file of the lesson that is missing: the reference's would be tested in its place.
        """
        missing = [file for file in lesson.files if not (self.folder / file).is_file()]
        if missing:
            raise ValueError(
                f"{self.folder / missing[0]} does not exist; `python -m smoke start {lesson.id}` writes it"
            )
        lessons = load_manifest().upto(lesson.id) if base == "own" else (lesson,)
        files = tuple(file for each in lessons for file in each.files if (self.folder / file).is_file())
        return Candidate(f"{self.folder}, {base} base", self.folder, files)

    def digest(self, files: Iterable[str]) -> str:
        """Return a fingerprint of some files."""
        sha = hashlib.sha256()
        for file in files:
            path = self.folder / file
            sha.update(path.read_bytes() if path.is_file() else b"")
        return sha.hexdigest()[:16]

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

    def remember(self, lesson: Lesson, results: Iterable[Result]) -> None:
        """Remember the checks that were run, for the files as they are now. Mutates the state file."""
        state = self.load()
        known = state.setdefault("checks", {}).setdefault(lesson.id, {})
        for result in results:
            files = files_of(all_checks()[result.check_id])
            known[result.check_id] = {"status": result.status, "files": self.digest(files)}
        self.save(state)

    def passed(self, lesson: Lesson) -> set[str]:
        """Return the checks that passed with the files as they are now: those that the check builds on."""
        known = self.load().get("checks", {}).get(lesson.id, {})
        return {
            check.id
            for check in checks_of([lesson])
            if known.get(check.id) == {"status": "pass", "files": self.digest(files_of(check))}
        }

    def is_green(self, lesson: Lesson) -> bool:
        """Whether every check of the lesson passed with the files as they are now."""
        return {check.id for check in checks_of([lesson])} == self.passed(lesson)

    def hint_level(self, task: Task) -> int:
        """Return how many hints of a task were taken."""
        return int(self.load().get("hints", {}).get(task.id, 0))

    def take_hint(self, task: Task, level: int) -> None:
        """Remember that hints up to ``level`` were taken. Mutates the state file."""
        state = self.load()
        taken = state.setdefault("hints", {})
        taken[task.id] = max(level, taken.get(task.id, 0))
        self.save(state)


def files_of(check: Check) -> list[str]:
    """Return the lesson's files that a check can depend on: those of the tasks it builds on, and those of no task."""
    manifest = load_manifest()
    lesson = manifest.lesson(check.lesson_id)
    tasks = {check.task_id, *tasks_needed(check, manifest)}
    owned = {function.file for task in lesson.tasks for function in task.functions}
    used = {function.file for task in lesson.tasks if task.id in tasks for function in task.functions}
    return [file for file in lesson.files if file in used or file not in owned]
