"""One worker: a confined server of candidates, and how a submission's lesson is run in it.

Owns: the folder that a candidate's files are laid in, the two modes, the time of a lesson. Must not know: scores.
"""

import ast
import json
import os
import signal
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import psutil

from mini_engine.overlay import fill
from smoke.course.starter import starter_files
from smoke.framework.check import Check, Result, checks_of
from smoke.framework.manifest import ENGINE, Lesson, load_manifest
from smoke.framework.parsing import parse
from smoke.grade.confinement import Confinement
from smoke.grade.enclosure import end_user
from smoke.grade.judge import Judge
from smoke.grade.probes import prepare_inputs
from smoke.grade.server import BOOT, SETTINGS
from smoke.grade.submissions import Submission
from smoke.grade.view import DATA, write_view
from smoke.runner.runner import IMPORT_SECONDS, PATIENCE, Candidate, Outcome, Report, Runner, remove

PUBLIC_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
MAX_LOG = 4000  # characters of what a candidate printed that are kept
DISK_BYTES = 512 * 2**20  # that a candidate may keep in files at a time
MAX_SWEEPS = 100  # for what starts others while it is ended
FILES = sorted(file for lesson in load_manifest().written for file in lesson.files)
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

    The checks of a lesson in one mode and their verdicts have the processor time of ``confinement.seconds``, and
    ``PATIENCE`` times that on the clock, without the time in which they waited for the processor. A check has a limit
    of its own as well; when that ends it, its time does not count, so a loop takes nothing from later tasks.
    """

    def __init__(self, confinement: Confinement) -> None:
        """Prepare; the server starts with the first submission."""
        self.confinement = confinement
        self.judge = Judge(confinement.seconds, confinement.memory)
        self.strays = 0  # processes that outlived a server and were ended
        self.runner = Runner(
            time_factor=min(1.0, confinement.seconds / IMPORT_SECONDS),
            boot=BOOT,
            environment={SETTINGS: json.dumps(confinement.as_dict())},
            patience=PATIENCE,
            gives_up_tasks=True,
            disk=DISK_BYTES,
            judge=self.judge,
            sweep=self.sweep,
        )
        self.runner.home.chmod(0o711)  # candidates of another user pass through it to their own folder
        self.answers: dict[tuple[str, int], Path] = {}  # inputs made for probes, by lesson and seed

    def __enter__(self) -> Self:
        """Return the worker."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server and whatever still runs, and remove its files."""
        self.runner.close()
        self.judge.close()

    @property
    def spent(self) -> str:
        """What is said when the time is used up."""
        limit = self.confinement.seconds
        return f"the time of this lesson, {limit} s of the processor and {PATIENCE * limit:g} s in all, was used up"

    def used(self) -> float:
        """Return the seconds that all candidates have used, their verdicts included."""
        return self.runner.spent + self.judge.spent

    def sweep(self) -> None:
        """End what a server left behind. Mutates."""
        self.strays += end_strays(self.runner.home, self.confinement.uid)

    def run(self, submission: Submission, lessons: Sequence[Lesson], seed: int) -> ModeRun:
        """Run the checks of the last of ``lessons`` with the files of all of them over the reference.

        A file that was not handed in is an empty starter, so what depends on it is blocked and not given away. An
        optional task that is not written is the reference's for the others, and its own checks are not run.
        """
        files = {file: text for lesson in lessons for file, text in cached_starters(lesson).items()}
        files |= {file: text for file, text in submission.files.items() if file in files}
        files, unwritten = with_optional(files)
        folder = self.lay_out(files)
        try:
            mode = self.run_files(Candidate(submission.name, folder, tuple(files)), lessons[-1], seed, unwritten)
            return replace(mode, notes=(*mode.notes, *self.traces(folder, files)))
        finally:
            remove(folder)

    def run_reference(
        self,
        lesson: Lesson,
        seed: int,
        changed: Mapping[str, str] = MappingProxyType({}),
        report: Report = lambda _: None,
    ) -> Outcome:
        """Run a lesson's checks on the reference, confined like a candidate, with ``changed`` files in place of its.

        ``report`` hears every result as it comes.
        """
        files = {file: (ENGINE / file).read_text() for file in lesson.files} | dict(changed)
        folder = self.lay_out(files)
        try:
            candidate = Candidate("reference", folder, tuple(files))
            checks = self.limited(checks_of([lesson]))
            work = self.order(candidate, lesson, seed)
            return self.runner.run(candidate, checks, seed, report, work)
        finally:
            remove(folder)

    def order(self, candidate: Candidate, lesson: Lesson, seed: int) -> dict[str, Any]:
        """Return what the process is given besides its checks. What is the same for many is made once."""
        own = sum(1 << FILES.index(file) for file in candidate.files)
        view = self.runner.home / f"view-{lesson.id}-{own:x}"
        if not view.exists():
            write_view(view, lesson, candidate.files)
        if (lesson.id, seed) not in self.answers:
            folder = self.runner.home / f"answers-{lesson.id}-{seed}"
            folder.mkdir()
            prepare_inputs(checks_of([lesson]), seed, folder)
            self.answers[lesson.id, seed] = folder
        return {
            "lesson": lesson.id,
            "view": str(view / ENGINE.name),
            "answers": str(self.answers[lesson.id, seed]),
            "readable": [str(ENGINE / DATA)],
        }

    def lay_out(self, files: dict[str, str]) -> Path:
        """Write ``files`` into a new folder that its candidate may read and the grader alone may change."""
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

    def limited(self, checks: Sequence[Check]) -> list[Check]:
        """Return the checks with limits of the processor that are no longer than the lesson's."""
        most = self.confinement.seconds / self.runner.time_factor
        return [replace(check, seconds=min(check.seconds / self.runner.time_factor, most)) for check in checks]

    def run_files(self, candidate: Candidate, lesson: Lesson, seed: int, unwritten: Collection[str] = ()) -> ModeRun:
        """Run the checks, but for those of the tasks ``unwritten``, until they are done or the time is used up."""
        checks = checks_of([lesson])
        left, before = float(self.confinement.seconds), self.used()
        results = {
            check.id: Result(check.id, "not-implemented", detail=f"{check.task_id} is optional and not written")
            for check in checks
            if check.task_id in unwritten
        }

        def keep(result: Result) -> None:
            nonlocal left, before
            spent = result.status == "crashed" and CPU_SIGNAL in result.detail
            if spent:
                result = replace(result, status="timeout", detail=self.spent)
            results[result.check_id] = result
            now = self.used()
            left -= now - before if result.status != "timeout" else 0.0
            before = now
            if left < 0 or spent:
                raise OutOfTimeError

        fault = None
        log = ""
        notes = []
        trouble = ""
        try:
            work = self.order(candidate, lesson, seed)
            written = [check for check in checks if check.task_id not in unwritten]
            outcome = self.runner.run(candidate, self.limited(written), seed, keep, work)
            fault = outcome.import_fault
            log = outcome.log
            notes = list(outcome.notes)
        except OutOfTimeError:
            trouble = self.spent
        except RuntimeError as error:  # the server is gone; the next submission gets a new one
            self.runner.stop_server()
            trouble = f"the process that runs candidates failed: {error}"
        complete = [results.get(check.id) or Result(check.id, "timeout", detail=trouble) for check in checks]
        return ModeRun(tuple(complete), fault, (*([trouble] if trouble else []), *notes), log[-MAX_LOG:])

    def traces(self, folder: Path, files: dict[str, str]) -> list[str]:
        """Return what a run left behind where it should not have, and remove it."""
        notes = [f"left {self.strays} processes behind, which were ended"] if self.strays else []
        self.strays = 0
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


def end_strays(home: Path, uid: int | None) -> int:
    """End what outlived the server that worked in ``home``, and return how many processes there were.

    Their parent is gone; what they kept is the HOME that the server was started with, and the candidates' user.
    """
    ended: set[int] = set()
    for _ in range(MAX_SWEEPS):
        found = False
        if uid is not None:
            end_user(uid)
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.uids().real == uid or process.environ().get("HOME") == str(home):
                    process.kill()
                    ended.add(process.pid)
                    found = True
        if not found:
            break
    return len(ended)


def with_optional(files: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """Return ``files`` in which open functions of optional tasks have the reference's bodies, and those tasks."""
    core = [task.id for task in load_manifest().tasks if not task.is_optional]
    filled, tasks = dict(files), set[str]()
    for file, text in files.items():
        if "NotImplementedError" not in text:  # nothing is open; most files need not be read
            continue
        with suppress(SyntaxError, ValueError, RecursionError):  # what cannot be read is found out where it is imported
            own = parse(text)
            found = fill(own, parse((ENGINE / file).read_bytes()), core)
            if found:
                filled[file] = ast.unparse(own) + "\n"
                tasks |= {task for task in found.values() if task is not None}
    return filled, tasks


@cache
def cached_starters(lesson: Lesson) -> dict[str, str]:
    """Return a lesson's empty files. Making them reads the whole engine, and every submission needs them."""
    return starter_files(lesson)


def lessons_of_mode(lesson: Lesson, mode: str) -> tuple[Lesson, ...]:
    """Return the lessons whose own files take part: one when isolated, all up to it when cumulative."""
    return (lesson,) if mode == "isolated" else load_manifest().upto(lesson.id)
