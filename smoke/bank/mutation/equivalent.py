"""Mutants that compute what the reference computes: the lists ``l*/equivalent.toml``.

Owns: the form of an entry. Must not know: how mutants are run.

An entry holds the mutant's id, its change as a person reads it, and the reason why no check can see it. An id comes
from the changed lines: when the reference changes there, the entry no longer names a mutant and has to be judged anew.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from smoke.bank.bank import FOLDER, refuse_doubles
from smoke.framework.manifest import Lesson, load_manifest, refuse_unknown, require

KEYS = {"id", "change", "reason"}


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
    return [parse_equivalent(entry) for entry in raw.get("equivalent", [])]


def parse_equivalent(raw: Mapping[str, Any]) -> Equivalent:
    """Read one ``[[equivalent]]``."""
    name = f"equivalent {raw.get('id', '(without id)')}"
    refuse_unknown(name, raw, KEYS)
    require(name, raw, KEYS)
    return Equivalent(raw["id"], raw["change"].strip(), raw["reason"].strip())
