"""A student's folder: the lesson files in it and what is remembered beside them.

Owns: ``work/.smoke.json`` and the rules about missing files. Must not know: how checks are run.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from smoke.candidate import Candidate
from smoke.check import Result, all_checks, checks_of
from smoke.manifest import Lesson, Task, load_manifest

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

    def digest(self, lesson: Lesson) -> str:
        """Return a fingerprint of the lesson's files."""
        sha = hashlib.sha256()
        for file in lesson.files:
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
        state, digest = self.load(), self.digest(lesson)
        entry = state.setdefault("lessons", {}).get(lesson.id, {})
        known = entry.get("checks", {}) if entry.get("digest") == digest else {}
        known |= {result.check_id: result.status for result in results}
        state["lessons"][lesson.id] = {"digest": digest, "checks": known}
        self.save(state)

    def passed(self, lesson: Lesson) -> set[str]:
        """Return the checks that passed with the files as they are now."""
        entry = self.load().get("lessons", {}).get(lesson.id, {})
        if entry.get("digest") != self.digest(lesson):
            return set()
        return {
            check_id for check_id, status in entry["checks"].items() if status == "pass" and check_id in all_checks()
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
