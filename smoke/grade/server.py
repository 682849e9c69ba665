"""The clean process that graded candidates are forked from: the course's own, with children that are confined.

Owns: what happens before a candidate's first line and after its end. Must not know: verdicts, scores.

Whatever a candidate leaves behind becomes a child of this process, even if it fled to a session of its own, and is
ended before the next candidate starts.
"""

import gc
import json
import linecache
import os
import platform
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import mini_engine
import smoke
from smoke.framework.check import Check, all_checks
from smoke.framework.manifest import load_manifest
from smoke.framework.prepared import hand_in
from smoke.grade import guard, probes, rules
from smoke.grade.confinement import Confinement, confine
from smoke.grade.enclosure import Enclosure, end_user
from smoke.grade.landlock import libc
from smoke.runner import child

SETTINGS = "SMOKE_CONFINEMENT"
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from smoke.grade.server import serve; serve()"
PR_SET_CHILD_SUBREAPER = 36
MAX_ROUNDS = 1000
FIRST_FD = 3  # after input, output and errors


def serve() -> None:
    """Read orders until stdin closes; the settings come as JSON in the environment and are taken out of it."""
    settings = Confinement.parse(json.loads(os.environ.pop(SETTINGS)))
    with suppress(AttributeError, OSError):
        libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child.serve(Children(settings))


class Children(child.Surroundings):
    """What is done around each candidate: it is confined before, and what it left is ended after."""

    def __init__(self, settings: Confinement) -> None:
        """Keep the settings of every child."""
        self.settings = settings
        self.used: dict[str, dict[str, set[str]]] = {}  # names that probes use, by lesson

    def begin(self, checks: Mapping[str, Check]) -> None:
        """Leave transformers out, and start the program that tells the processor: no candidate can."""
        platform.processor()

    def prepare(self, order: dict[str, Any]) -> None:
        """Open the notes and find out what the lesson's probes use, for every later child too."""
        lesson = order["lesson"]
        self.inputs = probes.read_inputs(Path(order["answers"]))
        if lesson not in self.used:
            checks = [check.probe for check in all_checks().values() if check.lesson_id == lesson]
            self.used[lesson] = probes.names_used([*checks, self.inputs])
            gc.freeze()
        self.notes = guard.Notes()
        self.may_fork = load_manifest().lesson(lesson).starts_processes

    def fork(self) -> int:
        """Fork the candidate's process into namespaces of its own -> 0 in it; in the server its process id. Mutates."""
        self.enclosure = Enclosure(keeps_user=self.settings.uid is None)
        return self.enclosure.fork()

    def wait(self, pid: int) -> int:
        """Wait for its end -> its exit status; below 0 the signal that ended it."""
        return self.enclosure.wait()

    def enter(self, order: dict[str, Any]) -> None:
        """Take away from this process what the candidate is not to have."""
        out, view = Path(order["out"]), Path(order["view"])
        hand_in(self.inputs)
        probes.prune([check_id for _, check_id in order["checks"]], self.used[order["lesson"]])
        course = tuple(f"{folder}{os.sep}" for folder in (*mini_engine.__path__, *smoke.__path__))
        mini_engine.__path__ = [str(view)]
        readable = self.settings.readable
        kept = [path for path in sys.path if readable.covers(path)]
        sys.path[:] = [str(view.parent), *kept]
        sys.path_importer_cache.clear()
        for module in list(sys.modules.values()):  # a traceback shows no line of the course, and looks for none
            file = getattr(module, "__file__", None) or ""
            if file.startswith(course):
                linecache.cache[file] = (0, None, [], file)
        close_others(self.notes.writer)
        own = (str(view.parent), *([order["overlay"]] if order["overlay"] else []), *order["readable"])
        confine(self.settings, out, self.enclosure.spaces, own)
        guard.install(out, (*readable.trees, *own), readable.listed, self.notes)
        del self.notes  # its key

    def leave(self) -> list[str]:
        """End what the candidate left behind, and return what was noted."""
        count = self.enclosure.left + end_orphans(self.settings.uid)
        notes = [note for note in self.notes.read() if not (self.may_fork and note == rules.FORKED)]
        return [*notes, *([f"left {count} processes behind, which were ended"] if count else [])]


def close_others(kept: int) -> None:
    """Close every descriptor but the three usual ones and ``kept``: a candidate has no use for the server's."""
    os.closerange(FIRST_FD, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def end_orphans(uid: int | None) -> int:
    """End every child of this process, theirs as they come up, and all that is the user's -> how many there were.

    There are none where the candidate had a namespace of its own.
    """
    ended = 0
    source = Path(f"/proc/self/task/{os.getpid()}/children")
    for _ in range(MAX_ROUNDS if source.exists() else 0):
        children = [int(pid) for pid in source.read_text().split()]
        if not children:
            break
        if uid is not None:
            end_user(uid)
        for pid in children:  # all at once: what has the time to go on can start others
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        ended += len(children)
    return ended
