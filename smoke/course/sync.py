"""Everything that is generated from the manifest and the checks: tables in lessons and README, the list of checks.

Owns: the marked regions ``<!-- generated: KIND … -->`` … ``<!-- end -->`` and their text. Must not know: how a check is
run. A region that differs from what is generated here is a fault; ``python -m smoke sync`` repairs it.
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
from smoke.framework.manifest import ROOT, Lesson, Option, load_manifest

REGION = re.compile(r"(<!-- generated: (?P<kind>[a-z]+)(?: (?P<lesson>L\d+))? -->\n).*?(<!-- end -->)", re.DOTALL)


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
        rows.append((lesson.id, text, lesson.goal, f"{lesson.hours} h", state))
    return table(("", "lesson", "what you can do afterwards", "time", "state"), iter(rows))


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


def generated(kind: str, lesson_id: str | None) -> str:
    """Return the text of one region. Raises ``ValueError`` for an unknown kind."""
    if kind == "lessons":
        return lessons_table()
    if kind == "engine":
        return engine_table()
    if kind != "options" or lesson_id is None:
        raise ValueError(f"nothing generates a region {kind!r}; kinds are lessons, engine and options")
    return options_table(load_manifest().lesson(lesson_id))


def refreshed(text: str) -> str:
    """Return ``text`` with every marked region as it must be."""
    return REGION.sub(lambda m: m[1] + generated(m["kind"], m["lesson"]) + m[4], text)


def stale_files(root: Path = ROOT) -> dict[Path, str]:
    """Return every file whose regions are not up to date, with its right text."""
    files = [root / "README.md", root / "docs/USAGE.md", *sorted((root / "lessons").rglob("*.md"))]
    texts = {file: file.read_text() for file in files}
    stale = {file: refreshed(text) for file, text in texts.items() if refreshed(text) != text}
    found = [(module, check) for module, registry in registries().items() for check in registry.checks.values()]
    checks = [ListedCheck(check.id, module, check.needs) for module, check in found]
    list_of_checks = file_in(root)
    if not list_of_checks.is_file() or list_of_checks.read_text() != catalogue_text(checks):
        stale[list_of_checks] = catalogue_text(checks)
    return stale
