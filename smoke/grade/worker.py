"""One worker: a confined server of candidates, and how a submission's lesson is run in it.

Owns: the folder that a candidate's files are laid in, the two modes, the time of a lesson. Must not know: scores.
"""

import json
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from smoke.course.starter import starter_files
from smoke.framework.check import Check, Result, checks_of
from smoke.framework.manifest import Lesson, load_manifest
from smoke.grade.confinement import Confinement
from smoke.grade.guard import told
from smoke.grade.server import BOOT, LEFT_BEHIND, SETTINGS
from smoke.grade.submissions import Submission
from smoke.runner.runner import IMPORT_SECONDS, Candidate, Runner, remove

PUBLIC_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
MAX_LOG = 4000  # characters of what a candidate printed that are kept
PATIENCE = 4.0  # seconds on the clock for each second of processor time: the machine may be busy
MAX_SWEEPS = 100  # for what starts others while it is ended
CPU_SIGNAL = f"exit status {-signal.SIGXCPU}"


@dataclass(frozen=True)
class ModeRun:
    """The results of one lesson in one mode, one per check, and what was seen besides. ``log`` is what it printed."""

    results: tuple[Result, ...]
    import_fault: str | None = None
    notes: tuple[str, ...] = ()
    log: str = ""


class OutOfTimeError(Exception):
    """The lesson's time is used up."""


class Worker:
    """Runs submissions one after the other. Use it as a context manager.

    A lesson in one mode has the processor time of ``confinement.seconds``, and ``PATIENCE`` times that on the clock.
    """

    def __init__(self, confinement: Confinement) -> None:
        """Prepare; the server starts with the first submission."""
        self.confinement, self.seconds = confinement, PATIENCE * confinement.seconds
        self.factor = min(PATIENCE, self.seconds / IMPORT_SECONDS)  # importing may not take longer than the whole
        self.runner = Runner(
            time_factor=self.factor, boot=BOOT, environment={SETTINGS: json.dumps(confinement.as_dict())}
        )
        self.runner.home.chmod(0o711)  # candidates of another user pass through it to their own folder

    def __enter__(self) -> Self:
        """Return the worker."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server and whatever still runs, and remove its files."""
        self.runner.close()
        end_strays(self.runner.home)

    @property
    def spent(self) -> str:
        """What is said when the time is used up."""
        limit = self.confinement.seconds
        return f"the time of this lesson, {limit} s of the processor and {self.seconds:g} s in all, was used up"

    def run(self, submission: Submission, lessons: Sequence[Lesson], seed: int) -> ModeRun:
        """Run the checks of the last of ``lessons`` with the files of all of them over the reference.

        A file that was not handed in is an empty starter, so what depends on it is blocked and not given away.
        """
        files = {file: text for lesson in lessons for file, text in cached_starters(lesson).items()}
        files |= {file: text for file, text in submission.files.items() if file in files}
        folder = self.lay_out(files)
        try:
            mode = self.run_files(Candidate(submission.name, folder, tuple(files)), checks_of([lessons[-1]]), seed)
            return replace(mode, notes=(*mode.notes, *self.traces(folder, files)))
        finally:
            remove(folder)

    def lay_out(self, files: dict[str, str]) -> Path:
        """Write ``files`` into a new folder that candidates may read and nobody else but the grader may change."""
        folder = Path(tempfile.mkdtemp(prefix="files-", dir=self.runner.home))
        for file, text in files.items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="")
        if self.confinement.uid is not None:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, 0, self.confinement.uid)
                path.chmod(0o750 if path.is_dir() else 0o640)
        return folder

    def run_files(self, candidate: Candidate, checks: Sequence[Check], seed: int) -> ModeRun:
        """Run the checks until they are done or the time is used up."""
        started = time.monotonic()
        allowed = [replace(c, seconds=min(PATIENCE * c.seconds, self.seconds) / self.factor) for c in checks]
        results: dict[str, Result] = {}

        def keep(result: Result) -> None:
            spent = result.status == "crashed" and CPU_SIGNAL in result.detail
            if spent:
                result = replace(result, status="timeout", detail=self.spent)
            results[result.check_id] = result
            if spent or time.monotonic() - started > self.seconds:
                raise OutOfTimeError

        fault, log, trouble = None, "", ""
        try:
            outcome = self.runner.run(candidate, allowed, seed, keep)
            fault, log = outcome.import_fault, outcome.log
        except OutOfTimeError:
            trouble = self.spent
        except RuntimeError as error:  # the server is gone; the next submission gets a new one
            self.runner.stop_server()
            trouble = f"the process that runs candidates failed: {error}"
        complete = [results.get(check.id) or Result(check.id, "timeout", detail=trouble) for check in checks]
        notes = (*([trouble] if trouble else []), *told(log))
        return ModeRun(tuple(complete), fault, notes, log[-MAX_LOG:])

    def traces(self, folder: Path, files: dict[str, str]) -> list[str]:
        """Return what a run left behind where it should not have, and remove it."""
        count, left = 0, self.runner.home / LEFT_BEHIND
        with suppress(OSError):
            count = sum(int(line) for line in left.read_text().split())
            left.unlink()
        if self.runner.server is None:  # it had to be ended, perhaps before it could clean up
            count += end_strays(self.runner.home)
        notes = [f"left {count} processes behind, which were ended"] if count else []
        if was_changed(folder, files):
            notes.append("changed the folder of its own files")
        return notes + self.strangers()

    def strangers(self) -> list[str]:
        """Remove files in public folders that belong to this worker's user, and name them."""
        notes = []
        for folder in PUBLIC_FOLDERS if self.confinement.uid is not None else ():
            for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
                with suppress(OSError):
                    if path.lstat().st_uid == self.confinement.uid:
                        notes.append(f"wrote {path} outside its folder; it was removed")
                        remove(path)
        return notes


def was_changed(folder: Path, files: dict[str, str]) -> bool:
    """Whether ``folder`` holds anything but ``files``, unchanged."""
    expected = {folder / file for file in files}
    folders = {folder, *(parent for file in expected for parent in file.parents if folder in parent.parents)}
    try:
        found = {path for own in folders for path in own.iterdir()}
        return found != (expected | folders) - {folder} or any(
            not (folder / file).is_file() or (folder / file).read_bytes() != text.encode()
            for file, text in files.items()
        )
    except OSError:
        return True


def end_strays(home: Path) -> int:
    """End what outlived the server that worked in ``home``, and return how many processes there were.

    Nobody is their parent any more; what they kept is the HOME that the server was started with.
    """
    ended: set[int] = set()
    for _ in range(MAX_SWEEPS):
        found = False
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get("HOME") == str(home):
                    process.kill()
                    ended.add(process.pid)
                    found = True
        if not found:
            break
    return len(ended)


@cache
def cached_starters(lesson: Lesson) -> dict[str, str]:
    """Return a lesson's empty files. Making them reads the whole engine, and every submission needs them."""
    return starter_files(lesson)


def lessons_of_mode(lesson: Lesson, mode: str) -> tuple[Lesson, ...]:
    """Return the lessons whose own files take part: one when isolated, all up to it when cumulative."""
    return (lesson,) if mode == "isolated" else load_manifest().upto(lesson.id)
