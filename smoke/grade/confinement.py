"""What a candidate's process gives up before it runs a line of the candidate: rights, files, memory, time, network.

Owns: the limits and the order in which they are set. Must not know: checks, scores. The process does all of this to
itself, and nothing can be undone. What the system does not offer is left out without an error; ``trial.py`` finds out
what that is.

Linux only: user ids, namespaces (``enclosure.py``), Landlock (``landlock.py``) and seccomp (``syscalls.py``). Elsewhere
the resource limits remain.
"""

import os
import platform
import re
import resource
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from smoke.grade.enclosure import Spaces
from smoke.grade.landlock import Readable, libc, restrict_files
from smoke.grade.syscalls import refuse_calls

PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 8, 38
CAPABILITY_VERSION, CAP_DAC_READ_SEARCH = 0x20080522, 2
FILE_BYTES = 256 * 2**20  # of one file; the largest honest answer has 15 MiB
OPEN_FILES = 256
PROCESSES = 64
COUNTS_PER_NAMESPACE = (5, 14)  # the kernel from which on processes are counted per user and namespace


@dataclass(frozen=True)
class Confinement:
    """How a child is confined. ``uid`` is the user it becomes, if it is root before.

    ``memory`` counts beyond what the process maps when it starts, which is mostly torch. ``read_all`` keeps the right
    to read every file, for an interpreter that lies where the new user could not reach it. ``readable`` is what every
    candidate may read; its own files come with each order.
    """

    uid: int | None
    read_all: bool
    memory: int
    seconds: int
    readable: Readable = field(default_factory=Readable)

    def as_dict(self) -> dict[str, Any]:
        """Return what ``parse`` reads."""
        return asdict(self)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> "Confinement":
        """Read the form of ``as_dict``."""
        readable = Readable(tuple(raw["readable"]["trees"]), tuple(raw["readable"]["listed"]))
        return cls(raw["uid"], raw["read_all"], raw["memory"], raw["seconds"], readable)


def confine(settings: Confinement, folder: Path, spaces: Spaces, own: Sequence[str] = ()) -> None:
    """Confine this process: writing in ``folder`` alone, reading there, in ``own`` and in ``settings.readable``.

    ``spaces`` are the namespaces that it has moved to.
    """
    if settings.uid is not None:
        for path in (folder, *folder.iterdir()):
            os.chown(path, settings.uid, settings.uid, follow_symlinks=False)
    limit(settings, counts_anew=settings.uid is not None or (spaces.users and kernel() >= COUNTS_PER_NAMESPACE))
    if sys.platform == "linux":
        libc().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        restrict_files(folder, settings.readable.plus(*own))
    if settings.uid is not None:
        become(settings.uid, settings.read_all)
    refuse_calls()
    for name in ("HOME", "TMPDIR"):
        os.environ[name] = str(folder)
    tempfile.tempdir = None


def kernel() -> tuple[int, ...]:
    """Return the first two numbers of the kernel's version."""
    return tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])


def limit(settings: Confinement, counts_anew: bool) -> None:
    """Set the limits that the kernel keeps.

    ``counts_anew``: whether this process is the first that counts towards a limit of processes. Counted for the user
    who runs the grader, which has hundreds, such a limit would end candidates that start none.
    """
    limits = {
        resource.RLIMIT_CPU: settings.seconds + 1,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    with suppress(OSError):  # systems without /proc do not keep this limit either
        mapped = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
        limits[resource.RLIMIT_AS] = mapped + settings.memory
    if counts_anew:
        limits[resource.RLIMIT_NPROC] = PROCESSES
    for name, value in limits.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)  # noqa: PLW2901
        # The soft limit's signal says that time was used up; at the hard one, a second later, the process is killed.
        soft = value - 1 if name == resource.RLIMIT_CPU and value > 1 else value
        resource.setrlimit(name, (soft, value))


def become(uid: int, read_all: bool) -> None:
    """Become another user for good. Raises ``RuntimeError`` if that did not happen: nothing may run as root then."""
    if read_all:
        libc().prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if read_all:
        header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
        kept = 1 << CAP_DAC_READ_SEARCH
        libc().capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0))
    if os.getresuid() != (uid, uid, uid):
        raise RuntimeError(f"this process could not become the user {uid}")
