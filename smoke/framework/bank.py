"""The pitfall bank and the wheats: faults that must be caught, and correct alternatives that must not be.

Owns: the files ``l*/pitfalls.toml`` and ``l*/wheats.toml`` and the overlays that they stand for. Must not know: how
candidates are run.

A fault is a replacement in one function of the reference, named ``file.py:function`` or ``file.py:Class.method``. Its
text must occur there exactly once, whatever the layout of its lines. When the reference changes under a pitfall, the
bank says so instead of testing nothing.
"""

import ast
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from smoke.framework.manifest import ENGINE, Lesson, load_manifest, refuse_unknown, require
from smoke.framework.parsing import parse

FOLDER = Path(__file__).resolve().parents[1] / "bank"
PITFALL_KEYS = {"id", "task", "title", "symptom", "at", "find", "replace", "killed_by", "source"}
WHEAT_KEYS = {"id", "lesson", "title", "why", "at", "find", "replace", "module"}
DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Edit:
    """A replacement in one engine file, or with ``find`` empty a whole file in its place.

    ``name``: the function, method or class that holds ``find``; empty for the whole file.
    """

    file: str
    name: str
    find: str
    replace: str

    @classmethod
    def at(cls, place: str, find: str, replace: str) -> "Edit":
        """Return the edit at ``place``: ``file.py``, or ``file.py:name`` with the dotted name of a definition."""
        file, _, name = place.partition(":")
        return cls(file, name, find, replace)

    def apply(self, text: str | None = None) -> str:
        """Return the file's new text: the reference's, or ``text``, with the edit.

        Raises ``ValueError`` unless ``find`` occurs exactly once in ``name``.
        """
        if not self.find:
            return self.replace
        place = f"{self.file}:{self.name}" if self.name else self.file
        text = (ENGINE / self.file).read_text() if text is None else text
        found = find_definition(text, self.name) if self.name else (0, len(text))
        if found is None:
            raise ValueError(f"there is no {place}")
        start, end = found
        shared = shared_margin(self.find, self.replace)
        matches = list(re.finditer(any_layout(self.find[shared:]), text[start:end]))
        if len(matches) != 1:
            raise ValueError(f"{place} holds {self.find.strip()!r} {len(matches)} times, not once")
        first, last = (start + edge for edge in matches[0].span())
        return text[:first] + self.replace[shared:] + text[last:]


def find_definition(text: str, name: str) -> tuple[int, int] | None:
    """Return where the definition ``name`` begins, decorators included, and ends in ``text``; ``None`` if nowhere."""
    body: Sequence[ast.stmt] = parsed(text).body
    for part in name.split("."):
        node = next((each for each in body if isinstance(each, DEFINITION) and each.name == part), None)
        if node is None:
            return None
        body = node.body
    first = min(each.lineno for each in (node, *node.decorator_list))  # type: ignore[union-attr]
    lines = text.splitlines(keepends=True)
    start = len("".join(lines[: first - 1]))
    return start, start + len("".join(lines[first - 1 : node.end_lineno]))  # type: ignore[union-attr]


@lru_cache(maxsize=64)
def parsed(text: str) -> ast.Module:
    """Parse a file of the engine; hundreds of entries ask for the same few."""
    return parse(text)


def shared_margin(find: str, replace: str) -> int:
    """Return how many characters of white space both texts begin with."""
    pairs = zip(find, replace, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b or not a.isspace()), 0)


def any_layout(find: str) -> str:
    """Return the pattern of ``find`` however its lines are broken: white space may differ, also a bracket's last comma.

    White space before the first and after the last word must be as it is: an edit may move a line.
    """
    margin, words, end = re.match(r"(\s*)(.*?)(\s*)$", find, re.DOTALL).groups()  # type: ignore[union-attr]
    parts = [re.escape(margin)]
    words = re.sub(r",(\s*[)\]}])", r"\1", words)
    for gap, word in re.findall(r"(\s*)(\w+|[^\w\s])", words):
        if word in ")]}":
            parts.append(r"(?:\s*,)?")
        is_gap_needed = bool(gap) and parts[-1][-1:].isalnum() and word[0].isalnum()
        parts += [r"\s+" if is_gap_needed else r"\s*" if len(parts) > 1 else "", re.escape(word)]
    return "".join(parts) + re.escape(end)


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
    pitfalls = [pitfall for lesson in load_manifest().written for pitfall in pitfalls_of(lesson)]
    refuse_doubles([pitfall.id for pitfall in pitfalls])
    return tuple(pitfalls)


@cache
def pitfalls_of(lesson: Lesson) -> tuple[Pitfall, ...]:
    """Read the bank of one lesson as words."""
    return tuple(parse_pitfall(entry) for entry in read_entries(lesson, "pitfall"))


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
    edit = Edit.at(raw["at"], raw["find"], raw["replace"])
    if edit.file not in load_manifest().lesson(task.lesson_id).files:
        raise ValueError(f"{name}: {edit.file} is not a file of {task.lesson_id}")
    if not raw["killed_by"] or any(not check_id.startswith(f"{task.lesson_id}.") for check_id in raw["killed_by"]):
        raise ValueError(f"{name}: killed_by must name checks of {task.lesson_id}")
    return Pitfall(raw["id"], task.id, raw["title"], raw["symptom"], edit, tuple(raw["killed_by"]), raw["source"])


def parse_wheat(raw: Mapping[str, Any]) -> Wheat:
    """Read one ``[[wheat]]``: a replacement, or a whole module that lies beside it."""
    name = f"wheat {raw.get('id', '(without id)')}"
    refuse_unknown(name, raw, WHEAT_KEYS)
    require(name, raw, {"id", "lesson", "title", "why", "at"})
    if "module" in raw:
        edit = Edit.at(raw["at"], "", (FOLDER / str(raw["lesson"]).lower() / raw["module"]).read_text())
    else:
        require(name, raw, {"find", "replace"})
        edit = Edit.at(raw["at"], raw["find"], raw["replace"])
    if edit.file not in load_manifest().lesson(raw["lesson"]).files:
        raise ValueError(f"{name}: {edit.file} is not a file of {raw['lesson']}")
    try_edit(name, edit)
    return Wheat(raw["id"], raw["lesson"], raw["title"], raw["why"], edit)


def fitting_pitfalls(check_id: str, passed: Collection[str] = ()) -> list[Pitfall]:
    """Return the pitfalls that this check is known to catch, those of its own task first.

    One that another check, which ``passed``, would have caught is not it. Of the others those come first that explain
    the most failures; without knowing which passed, the most specific.
    """
    task_id = check_id.rpartition(".")[0]
    lesson = load_manifest().lesson(check_id.partition(".")[0])
    named = [pitfall for pitfall in pitfalls_of(lesson) if check_id in pitfall.killed_by]
    fitting = [pitfall for pitfall in named if not set(passed).intersection(pitfall.killed_by)]
    sign = -1 if passed else 1
    return sorted(fitting, key=lambda pitfall: (pitfall.task_id != task_id, sign * len(pitfall.killed_by)))
