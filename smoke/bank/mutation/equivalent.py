"""Mutants that compute what the reference computes: the lists ``l*/equivalent.toml``.

Owns: the form of an entry. Must not know: how mutants are run.

An entry holds one reason why no check can see a change, and the mutants that it is true of: the id of each with the
change as a person reads it. An id comes from the changed lines: when the reference changes there, the entry no longer
names a mutant and has to be judged anew.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from smoke.framework.bank import FOLDER, refuse_doubles
from smoke.framework.manifest import Lesson, load_manifest, refuse_unknown, require

KEYS = {"reason", "changes"}


@dataclass(frozen=True)
class Equivalent:
    """A mutant that nothing can tell from the reference, or only what no text of the course states."""

    id: str
    change: str
    reason: str


@cache
def load_equivalents() -> tuple[Equivalent, ...]:
    """Read the lists of all lessons. Raises ``ValueError`` naming the entry that is wrong."""
    entries = [entry for lesson in load_manifest().written for entry in equivalents_of(lesson)]
    refuse_doubles([entry.id for entry in entries])
    return tuple(entries)


def equivalents_of(lesson: Lesson) -> list[Equivalent]:
    """Read one lesson's list; there need not be one."""
    file = FOLDER / lesson.folder / "equivalent.toml"
    raw = tomllib.loads(file.read_text()) if file.is_file() else {}
    refuse_unknown(file.name, raw, {"equivalent"})
    return [each for entry in raw.get("equivalent", []) for each in parse_equivalents(entry)]


def parse_equivalents(raw: Mapping[str, Any]) -> list[Equivalent]:
    """Read one ``[[equivalent]]``: a reason with one mutant or more."""
    name = f"equivalent {next(iter(raw.get('changes', {})), '(without changes)')}"
    refuse_unknown(name, raw, KEYS)
    require(name, raw, KEYS)
    return [Equivalent(each, change.strip(), raw["reason"].strip()) for each, change in raw["changes"].items()]
