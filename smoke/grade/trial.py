"""What confinement is worth on this machine: tried out in a process like a candidate's, and said in the report.

Owns: the trial and its words. Must not know: submissions, scores.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from smoke.framework.manifest import ROOT
from smoke.grade.confinement import PROCESSES, Confinement, confine
from smoke.grade.enclosure import Enclosure
from smoke.grade.landlock import interpreter_paths

FIRST_UID, USERS, GRADERS = 64100, 64, 16  # one user per worker of a grader, none of which should exist
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from smoke.grade.trial import try_here; try_here()"
SECONDS = 120
TAKEN: list[socket.socket] = []  # what keeps the users of this process taken


# Of each fact: its subject, what is said if it holds, what is said if it does not.
BY_HOOK = "NOT refused by the system, only by an audit hook"
SENTENCES = {
    "network_closed": ("network", "closed", "OPEN, this system does not let it be closed"),
    "writes_refused": ("writing outside the candidate's folder", "refused by the system", BY_HOOK),
    "reads_refused": ("reading outside it, Python and its packages", "refused by the system", BY_HOOK),
    "programs_refused": ("starting programs", "refused by the system", BY_HOOK),
    "processes_limited": ("number of processes", "limited", "NOT limited; what is left behind is ended afterwards"),
    "processes_enclosed": (
        "processes",
        "in a namespace of the candidate's own, which ends whole",
        "in NO namespace of their own; what is left behind is searched for and ended",
    ),
}


@dataclass(frozen=True)
class Isolation:
    """What a confined process could not do. ``uid`` is the first worker's user, ``None`` for one's own."""

    uid: int | None
    read_all: bool
    network_closed: bool
    writes_refused: bool
    reads_refused: bool
    programs_refused: bool
    processes_limited: bool
    processes_enclosed: bool

    def confinement(self, worker: int, memory: int, seconds: int, without: Sequence[Path] = ()) -> Confinement:
        """Return the settings of one worker's children, which may read nothing of the course or ``without``."""
        uid = None if self.uid is None else self.uid + worker
        return Confinement(uid, self.read_all, memory, seconds, interpreter_paths(without))

    def lines(self) -> list[str]:
        """Return one sentence per kind of isolation, for the report; the first says what all of them come to."""
        missing = [name for fact, (name, *_) in SENTENCES.items() if not getattr(self, fact)]
        missing = [*(["user"] if self.uid is None else []), *missing]
        user = "a user of its own, without rights" if self.uid is not None else "YOUR user: run as root for another one"
        return [
            "this run is " + (f"NOT sealed, see: {', '.join(missing)}" if missing else "sealed by the system"),
            f"user: candidates run as {user}"
            + (", with the right to read every file, because Python lies in a closed folder" if self.read_all else ""),
            *(f"{name}: {said[not getattr(self, fact)]}" for fact, (name, *said) in SENTENCES.items()),
        ]


def try_isolation() -> Isolation:
    """Start a confined process, let it try what it must not do, and return what it was refused.

    As root, another user is tried first; in a container that does not allow it, one's own remains. Raises
    ``RuntimeError`` if no confined process runs: then nothing should be graded.
    """
    root = sys.platform == "linux" and os.geteuid() == 0
    words = ""
    for uid in (own_users(), None) if root else (None,):
        read_all = uid is not None and not reachable(uid)
        done = start_trial(uid, read_all)
        with suppress(json.JSONDecodeError):
            return Isolation(uid, read_all, **json.loads(done.stdout))
        words = done.stderr[-2000:]
    raise RuntimeError(f"a confined process cannot run here: {words}")


@cache
def own_users() -> int:
    """Return the first of the user ids that this process takes once. Raises what ``free_users`` does."""
    return free_users()


def free_users() -> int:
    """Take the first of ``USERS`` user ids that no other grader of this machine has -> it; they are kept until the end.

    What shows that they are taken is a socket's name, which the system frees when this process ends. Raises
    ``RuntimeError`` if ``GRADERS`` are running.
    """
    for number in range(GRADERS):
        mark = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            mark.bind(f"\0mini_engine smoke grader {number}")
            TAKEN.append(mark)
            return FIRST_UID + number * USERS
        mark.close()
    raise RuntimeError(f"{GRADERS} graders are running on this machine, which is the most; wait for one to end")


def start_trial(uid: int | None, read_all: bool) -> subprocess.CompletedProcess[str]:
    """Run ``try_here`` in a process of its own, next to a file that every user may write."""
    with tempfile.TemporaryDirectory(prefix="smoke-trial-") as name:
        home = Path(name)
        home.chmod(0o711)
        (home / "own").mkdir()
        (home / "victim.txt").touch()
        (home / "victim.txt").chmod(0o666)
        settings = json.dumps({"uid": uid, "read_all": read_all})
        command = [sys.executable, "-I", "-c", BOOT, str(ROOT), name, settings]
        return subprocess.run(
            command, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False
        )


def try_here() -> None:
    """Confine this process and print as JSON what it was refused. It must be a process of its own."""
    home = Path(sys.argv[2])
    raw = json.loads(sys.argv[3])
    settings = Confinement(raw["uid"], raw["read_all"], 2**30, SECONDS, interpreter_paths())
    enclosure = Enclosure(keeps_user=settings.uid is None)
    if enclosure.fork():
        sys.exit(enclosure.wait())
    confine(settings, home / "own", enclosure.spaces)
    facts = {
        "network_closed": not other_devices(),
        "writes_refused": not can_write(home / "victim.txt"),
        "reads_refused": not can_read(home / "victim.txt") and not can_read(Path(__file__)),
        "programs_refused": not can_start("/bin/true"),
        "processes_limited": count_forks(PROCESSES) < PROCESSES,
        "processes_enclosed": enclosure.spaces.processes,
    }
    print(json.dumps(facts))


def can_write(file: Path) -> bool:
    """Whether a file that every user may write can be written."""
    try:
        file.write_text("written")
    except OSError:
        return False
    return True


def can_read(file: Path) -> bool:
    """Whether a file that every user may read can be read."""
    try:
        file.read_bytes()
    except OSError:
        return False
    return True


def can_start(program: str) -> bool:
    """Whether a program can be started."""
    try:
        return subprocess.run([program], check=False, timeout=SECONDS).returncode == 0
    except OSError:
        return False


def count_forks(most: int) -> int:
    """Start up to ``most`` processes that live at the same time, and end them -> how many there were."""
    children: list[int] = []
    reader, writer = os.pipe()
    with suppress(OSError):
        while len(children) < most:
            pid = os.fork()
            if pid == 0:
                os.close(writer)
                os.read(reader, 1)  # until the other end is closed
                os._exit(0)
            children.append(pid)
    os.close(writer)
    for pid in children:
        os.waitpid(pid, 0)
    return len(children)


def other_devices() -> list[str]:
    """Return the network devices besides the loopback that this process can use: none where it gets no socket."""
    try:
        return [name for _, name in socket.if_nameindex() if name != "lo"]
    except PermissionError:
        return []


def reachable(uid: int) -> bool:
    """Whether the user ``uid`` can read the interpreter's library, torch and the course."""
    torch = importlib.util.find_spec("torch")  # not imported here: the trial is to start quickly
    files = [os.__file__, str(torch.origin if torch else ""), __file__, sys.executable]
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os._exit(0 if all(os.access(file, os.R_OK) for file in files) else 1)
        os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
