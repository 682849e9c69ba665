"""The pitfall bank and the wheats: faults that must be caught, and correct alternatives that must not be.

Owns: the files ``l*/pitfalls.toml`` and ``l*/wheats.toml`` and the overlays that they stand for. Must not know: how
candidates are run.

A fault is an exact replacement in one file of the reference. Its text must occur there exactly once: when the reference
changes under a pitfall, the bank says so instead of testing nothing.
"""

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from smoke.framework.manifest import ENGINE, Lesson, load_manifest, refuse_unknown, require

FOLDER = Path(__file__).resolve().parent
PITFALL_KEYS = {"id", "task", "title", "symptom", "file", "find", "replace", "killed_by", "source"}
WHEAT_KEYS = {"id", "lesson", "title", "why", "file", "find", "replace", "module"}


@dataclass(frozen=True)
class Edit:
    """A replacement in one engine file, or with ``find`` empty a whole file in its place."""

    file: str
    find: str
    replace: str

    def apply(self) -> str:
        """Return the file's new text. Raises ``ValueError`` unless ``find`` occurs exactly once."""
        if not self.find:
            return self.replace
        text = (ENGINE / self.file).read_text()
        if text.count(self.find) != 1:
            raise ValueError(f"{self.file} holds {self.find.strip()!r} {text.count(self.find)} times, not once")
        return text.replace(self.find, self.replace)


@dataclass(frozen=True)
class Pitfall:
    """A mistake that people make. ``killed_by`` are the checks that must catch it; others may."""

    id: str
    task_id: str
    title: str
    symptom: str
    edit: Edit
    killed_by: tuple[str, ...]
    source: str

    @property
    def lesson_id(self) -> str:
        """The lesson of its task."""
        return self.task_id.split(".")[0]


@dataclass(frozen=True)
class Wheat:
    """A correct alternative. Every check of its lesson and of later ones must pass on it."""

    id: str
    lesson_id: str
    title: str
    why: str
    edit: Edit


@cache
def load_pitfalls() -> tuple[Pitfall, ...]:
    """Read the bank and try every edit. Raises ``ValueError`` naming the entry that is wrong."""
    for pitfall in known_pitfalls():
        try_edit(f"pitfall {pitfall.id}", pitfall.edit)
    return known_pitfalls()


@cache
def known_pitfalls() -> tuple[Pitfall, ...]:
    """Read the bank as words: a student is told of a pitfall also where the engine beside the work was changed."""
    pitfalls = [parse_pitfall(entry) for lesson in load_manifest().written for entry in read_entries(lesson, "pitfall")]
    refuse_doubles([pitfall.id for pitfall in pitfalls])
    return tuple(pitfalls)


@cache
def load_wheats() -> tuple[Wheat, ...]:
    """Read the wheats. Raises ``ValueError`` naming the entry that is wrong."""
    wheats = [parse_wheat(entry) for lesson in load_manifest().written for entry in read_entries(lesson, "wheat")]
    refuse_doubles([wheat.id for wheat in wheats])
    return tuple(wheats)


def read_entries(lesson: Lesson, key: str) -> list[Mapping[str, Any]]:
    """Read a lesson's list ``[[key]]``, "pitfall" or "wheat"; none if its file was left out of the course."""
    file = FOLDER / lesson.folder / f"{key}s.toml"
    raw = tomllib.loads(file.read_text()) if file.is_file() else {}
    refuse_unknown(file.name, raw, {key})
    return list(raw.get(key, []))


def refuse_doubles(ids: list[str]) -> None:
    """Raise ``ValueError`` for an id that is used twice."""
    for index, entry_id in enumerate(ids):
        if entry_id in ids[:index]:
            raise ValueError(f"{entry_id} is defined twice")


def try_edit(name: str, edit: Edit) -> None:
    """Raise ``ValueError``, beginning with ``name``, unless the edited file is Python."""
    try:
        compile(edit.apply(), edit.file, "exec")
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{name}: {error}") from error


def parse_pitfall(raw: Mapping[str, Any]) -> Pitfall:
    """Read one ``[[pitfall]]``."""
    name = f"pitfall {raw.get('id', '(without id)')}"
    refuse_unknown(name, raw, PITFALL_KEYS)
    require(name, raw, PITFALL_KEYS)
    task = load_manifest().task(raw["task"])
    if raw["file"] not in load_manifest().lesson(task.lesson_id).files:
        raise ValueError(f"{name}: {raw['file']} is no file of {task.lesson_id}")
    if not raw["killed_by"] or any(not check_id.startswith(task.lesson_id) for check_id in raw["killed_by"]):
        raise ValueError(f"{name}: killed_by must name checks of {task.lesson_id}")
    edit = Edit(raw["file"], raw["find"], raw["replace"])
    return Pitfall(raw["id"], task.id, raw["title"], raw["symptom"], edit, tuple(raw["killed_by"]), raw["source"])


def parse_wheat(raw: Mapping[str, Any]) -> Wheat:
    """Read one ``[[wheat]]``: a replacement, or a whole module that lies beside it."""
    name = f"wheat {raw.get('id', '(without id)')}"
    refuse_unknown(name, raw, WHEAT_KEYS)
    require(name, raw, {"id", "lesson", "title", "why", "file"})
    if "module" in raw:
        edit = Edit(raw["file"], "", (FOLDER / str(raw["lesson"]).lower() / raw["module"]).read_text())
    else:
        require(name, raw, {"find", "replace"})
        edit = Edit(raw["file"], raw["find"], raw["replace"])
    if raw["file"] not in load_manifest().lesson(raw["lesson"]).files:
        raise ValueError(f"{name}: {raw['file']} is no file of {raw['lesson']}")
    try_edit(name, edit)
    return Wheat(raw["id"], raw["lesson"], raw["title"], raw["why"], edit)


def fitting_pitfalls(check_id: str, passed: Collection[str] = ()) -> list[Pitfall]:
    """Return the pitfalls that this check is known to catch, those of its own task first.

    One that another check, which ``passed``, would have caught is not it. Of the others those come first that explain
    the most failures; without knowing which passed, the most specific.
    """
    task_id = check_id.rpartition(".")[0]
    named = [pitfall for pitfall in known_pitfalls() if check_id in pitfall.killed_by]
    fitting = [pitfall for pitfall in named if not set(passed).intersection(pitfall.killed_by)]
    sign = -1 if passed else 1
    return sorted(fitting, key=lambda pitfall: (pitfall.task_id != task_id, sign * len(pitfall.killed_by)))
