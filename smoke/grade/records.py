"""Results on disk, one file per student and lesson, so that an interrupted run goes on where it stopped.

Owns: the files beneath ``records/`` and ``proofs/``, and ``run.json``. Must not know: scores, reports.
"""

import hashlib
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from mini_engine.invariant.findings import machine
from smoke.framework.check import Result
from smoke.framework.manifest import COURSE, ENGINE, ROOT, Lesson, load_manifest
from smoke.grade.scoring import Mode
from smoke.grade.submissions import Submission
from smoke.grade.worker import ModeRun

SEED_RANGE = 1_000_000
# Folders and files that no result depends on: what they say may be improved in the middle of a run.
BESIDE = {
    "viz",
    "bench",
    "commands",
    "bank",
    "documents.py",
    "uploads.py",
    "export.py",
    "classroom.py",
    "matrix.py",
    "likeness.py",
    "sync.py",
}


class Records:
    """The records of one grading run in the folder of its report."""

    def __init__(self, out: Path, seed: str, limits: Mapping[str, Any]) -> None:
        """Open the folder and settle the seed.

        ``auto`` keeps the seed of the run that the folder holds, so that one changed submission meets the inputs of all
        others, and draws one for a new folder. Raises ``ValueError`` for a seed that is neither ``auto`` nor a number.
        """
        self.folder = out / "records"
        self.proofs = out / "proofs"
        self.folder.mkdir(parents=True, exist_ok=True)
        before = read(out / "run.json")
        self.resumed = bool(before)
        if seed == "auto":
            self.seed = int(before["seed"]) if self.resumed else secrets.randbelow(SEED_RANGE)
        elif seed.isdigit() and int(seed) < SEED_RANGE:
            self.seed = int(seed)
        else:
            raise ValueError(f"--seed {seed} is neither auto nor a whole number below {SEED_RANGE}")
        self.conditions = {"seed": self.seed, "course": course_digest(), "limits": dict(limits)}
        write(out / "run.json", self.conditions)

    def is_proved(self, lesson: Lesson) -> bool:
        """Whether the reference passed a lesson under these conditions, on this machine and with these libraries."""
        return read(self.proofs / f"{lesson.id}.json") == {**self.conditions, **surroundings()}

    def save_proof(self, lesson: Lesson) -> None:
        """Note that the reference passed all checks of a lesson."""
        write(self.proofs / f"{lesson.id}.json", {**self.conditions, **surroundings()})

    def key(self, submission: Submission, lesson: Lesson) -> dict[str, Any]:
        """Return everything that a record depends on."""
        files = tuple(file for other in load_manifest().upto(lesson.id) for file in other.files)
        return {**self.conditions, "files": submission.digest(files)}

    def file(self, submission: Submission, lesson: Lesson) -> Path:
        """Return the record's file."""
        return self.folder / submission.name / f"{lesson.id}.json"

    def load(self, submission: Submission, lesson: Lesson) -> dict[Mode, ModeRun] | None:
        """Return a record that still holds, or ``None``."""
        raw = read(self.file(submission, lesson))
        if raw.get("key") != self.key(submission, lesson):
            return None
        return {mode: restore(raw["modes"][mode]) for mode in raw["modes"]}

    def save(self, submission: Submission, lesson: Lesson, modes: Mapping[Mode, ModeRun]) -> None:
        """Write a record, whole or not at all."""
        key = self.key(submission, lesson)
        write(
            self.file(submission, lesson), {"key": key, "modes": {name: asdict(mode) for name, mode in modes.items()}}
        )


def restore(raw: Mapping[str, Any]) -> ModeRun:
    """Rebuild a run from its record."""
    return ModeRun(tuple(map(Result.parse, raw["results"])), raw["import_fault"], tuple(raw["notes"]), raw["log"])


def read(file: Path) -> dict[str, Any]:
    """Read a JSON object; a file that is missing or broken is an empty one, and is written anew."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write(file: Path, value: Mapping[str, Any]) -> None:
    """Write JSON so that a reader never sees half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".partial", delete=False) as stream:
        json.dump(value, stream, indent=1)
    os.replace(stream.name, file)


@cache
def surroundings() -> dict[str, Any]:
    """Return what decides whether the reference passes besides the course: the machine and every package's version."""
    return {
        "machine": machine(),
        "python": sys.version,
        "user": os.geteuid() if hasattr(os, "geteuid") else None,  # root confines in another way
        "packages": sorted({f"{each.name} {each.version}" for each in metadata.distributions()}),
    }


def course_digest() -> str:
    """Return a hash of what decides a result: results of other checks, or of another model, are no results of these."""
    whole = hashlib.sha256()
    for folder in (ROOT / "smoke", ENGINE, COURSE / "lessons"):
        for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.toml"), *folder.rglob("*.safetensors")]):
            if BESIDE.isdisjoint(file.relative_to(ROOT).parts):
                whole.update(file.relative_to(ROOT).as_posix().encode())
                whole.update(file.read_bytes())
    return whole.hexdigest()
