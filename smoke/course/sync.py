"""Everything that is generated from the manifest and the checks: tables in lessons and README, the list of checks.

Owns: the marked regions ``<!-- generated: KIND … -->`` … ``<!-- end -->`` and their text, and the numbers at the head
of the lessons' pages. Must not know: how a check is run. What differs from what is generated here is a fault;
``python -m smoke sync`` repairs it.
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smoke.framework.bank import load_pitfalls
from smoke.framework.catalogue import ListedCheck, catalogue_text, file_in
from smoke.framework.check import checks_of, registries
from smoke.framework.manifest import ROOT, Lesson, Option, Task, load_manifest

REGION = re.compile(r"(<!-- generated: (?P<kind>[a-z]+)(?: (?P<lesson>L\d+))? -->\n).*?(<!-- end -->)", re.DOTALL)
FRONT = re.compile(r"^\*(?=[^*\n]*points)[^*]*?(?=you write)", re.MULTILINE)  # what stands before it in a task's page
TIME = re.compile(r"^\| \*\*Time\*\* \|.*$", re.MULTILINE)


def table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def lessons_table() -> str:
    """Return the README's table of lessons, the announced ones included."""
    rows = []
    for lesson in load_manifest().lessons:
        if not lesson.tasks:
            rows.append((lesson.id, lesson.title, lesson.goal, "", "not written yet"))
            continue
        pitfalls = sum(pitfall.lesson_id == lesson.id for pitfall in load_pitfalls())
        state = f"{len(lesson.tasks)} tasks, {len(checks_of([lesson]))} checks, {pitfalls} pitfalls"
        text = f"[{lesson.title}]({lesson.text_file})"
        rows.append((lesson.id, text, lesson.goal, hours_of(lesson), state))
    return table(("", "lesson", "what you can do afterwards", "core of all", "state"), iter(rows))


def hours_of(lesson: Lesson) -> str:
    """Return the hours of a lesson's core and of all of it."""
    return f"{lesson.hours(lesson.core)} of {lesson.hours(lesson.tasks)} h"


def syllabus() -> str:
    """Return the course's table of lessons, with the sum of the lessons that build on each other."""
    written = load_manifest().written
    rows = [
        (
            each.id,
            f"[{each.title}]({each.slug}/README.md)",
            each.goal,
            str(each.hours(each.core)),
            str(each.hours(each.tasks)),
        )
        for each in written
    ]
    return table(("lesson", "title", "goal", "hours, core", "hours, all"), iter(rows))


def front_of(task: Task) -> str:
    """Return how the line below a task page's title begins."""
    kind = "optional" if task.is_optional else "core"
    return f"*{task.points} points · {kind} · about {task.minutes} minutes · "


def with_fronts(file: Path, text: str) -> str:
    """Return a lesson's page with what the manifest says: points and minutes of a task, hours, and what is optional."""
    for lesson in load_manifest().written:
        if file.parent.name != lesson.slug:
            continue
        for task in lesson.tasks:
            if file.name == task.page_name:
                return FRONT.sub(front_of(task), text, count=1)
        if file.name == "README.md":
            text = TIME.sub(time_row(lesson), text, count=1)
            for task in lesson.tasks:
                link = f"| [{task.id.partition('.')[2]}]({task.page_name})"
                text = re.sub(re.escape(link) + r"[^|]*\|", link + " *optional*" * task.is_optional + " |", text)
            return text
    return text


def time_row(lesson: Lesson) -> str:
    """Return the row of a story's table that says how long the lesson takes."""
    core = f"| **Time** | about {lesson.hours(lesson.core)} hours"
    return f"{core} for the core, {lesson.hours(lesson.tasks)} with all tasks |" if lesson.optional else f"{core} |"


def default_of(option: Option) -> str:
    """Return the ``repr`` of an option's default in the code. Raises ``ValueError`` if there is no such option."""
    owner_name, _, name = option.name.qualname.rpartition(".")
    owner: Any = importlib.import_module(f"mini_engine.{option.name.module}")
    for part in owner_name.split("."):
        owner = getattr(owner, part, None)
    if dataclasses.is_dataclass(owner):
        defaults = {field.name: field.default for field in dataclasses.fields(owner)}
    elif callable(owner):
        defaults = {p.name: p.default for p in inspect.signature(owner).parameters.values()}
    else:
        defaults = {}
    if name not in defaults:
        raise ValueError(f"the manifest names the option {option.name}, which the engine does not have")
    return repr(defaults[name])


def options_table(lesson: Lesson) -> str:
    """Return the table of a lesson's options. Raises ``ValueError`` where the manifest's off is not the default."""
    for option in lesson.options:
        if default_of(option) != option.off:
            raise ValueError(
                f"option {option.name} of {lesson.id}: the manifest says off is {option.off}, "
                f"the code's default is {default_of(option)}"
            )
    rows = (
        (
            f"`{option.name.qualname.replace('.__init__', '').replace('.__call__', '')}`",
            f"`{option.off}`",
            option.on if " " in option.on else f"`{option.on}`",
            option.effect,
        )
        for option in lesson.options
    )
    return table(("option", "off", "on", "on means"), rows)


def engine_table() -> str:
    """Return the table of all options of ``EngineConfig``."""
    from mini_engine.config import EngineConfig, options

    rows = (
        (f"`{name}`", f"`{getattr(EngineConfig, name)!r}`", meaning) for name, (_, meaning, *_) in options().items()
    )
    return table(("option", "off", "meaning"), rows)


def families_table() -> str:
    """Return the table of the families of models that run."""
    from mini_engine.families import FAMILIES

    rows = ((f"`{n}`", each.models, each.differs or "—", ", ".join(each.ways)) for n, each in FAMILIES.items())
    return table(("`model_type`", "models", "differs from Qwen3", "ways to compute"), rows)


def generated(kind: str, lesson_id: str | None) -> str:
    """Return the text of one region. Raises ``ValueError`` for an unknown kind."""
    if kind == "lessons":
        return lessons_table()
    if kind == "syllabus":
        return syllabus()
    if kind == "engine":
        return engine_table()
    if kind == "families":
        return families_table()
    if kind != "options" or lesson_id is None:
        raise ValueError(
            f"nothing generates a region {kind!r}; kinds are lessons, syllabus, engine, families and options"
        )
    return options_table(load_manifest().lesson(lesson_id))


def refreshed(text: str) -> str:
    """Return ``text`` with every marked region as it must be."""
    return REGION.sub(lambda m: m[1] + generated(m["kind"], m["lesson"]) + m[4], text)


def stale_files(root: Path = ROOT) -> dict[Path, str]:
    """Return every file whose regions are not up to date, with its right text."""
    files = [root / "README.md", root / "docs/USAGE.md", *sorted((root / "lessons").rglob("*.md"))]
    texts = {file: file.read_text() for file in files}
    right = {file: with_fronts(file, refreshed(text)) for file, text in texts.items()}
    stale = {file: text for file, text in right.items() if text != texts[file]}
    found = [(module, check) for module, registry in registries().items() for check in registry.checks.values()]
    checks = [ListedCheck(check.id, module, check.needs) for module, check in found]
    list_of_checks = file_in(root)
    if not list_of_checks.is_file() or list_of_checks.read_text() != catalogue_text(checks):
        stale[list_of_checks] = catalogue_text(checks)
    return stale
