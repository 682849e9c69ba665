"""What a candidate's process gives up before it runs a line of the candidate: rights, memory, time, network.

Owns: the system calls. Must not know: checks, scores. Everything here is done by the child to itself and cannot be
undone. What the system does not offer is left out without an error; ``trial.py`` finds out what that is.

Linux only: user ids, ``unshare`` and Landlock (https://docs.kernel.org/userspace-api/landlock.html). Elsewhere the
resource limits remain.
"""

import ctypes
import os
import platform
import re
import resource
import struct
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 8, 38
CAPABILITY_VERSION, CAP_DAC_READ_SEARCH = 0x20080522, 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same numbers on every architecture
LANDLOCK_FILE_RIGHTS = 1 << 1 | 1 << 14  # write, truncate: all that a rule about a single file may name
FILE_BYTES = 256 * 2**20
PROCESSES = 64
COUNTS_PER_NAMESPACE = (5, 14)  # the kernel from which on processes are counted per user and namespace


@dataclass(frozen=True)
class Confinement:
    """How a child is confined. ``uid`` is the user it becomes, if it is root before.

    ``memory`` counts beyond what the process maps when it starts, which is mostly torch. ``read_all`` keeps the right
    to read every file, for an interpreter that lies where the new user could not reach it.
    """

    uid: int | None
    read_all: bool
    memory: int
    seconds: int
    hidden: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return what ``parse`` reads."""
        return asdict(self)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> "Confinement":
        """Read the form of ``as_dict``."""
        return cls(raw["uid"], raw["read_all"], raw["memory"], raw["seconds"], tuple(raw["hidden"]))


def confine(settings: Confinement, folder: Path) -> None:
    """Confine this process to writing in ``folder``. Cannot be undone."""
    if settings.uid is not None:
        for path in (folder, *folder.iterdir()):
            os.chown(path, settings.uid, settings.uid, follow_symlinks=False)
    has_own_users = leave_network()
    limit(settings, counts_anew=settings.uid is not None or (has_own_users and kernel() >= COUNTS_PER_NAMESPACE))
    if sys.platform == "linux":
        libc().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        restrict_files(folder)
    if settings.uid is not None:
        become(settings.uid, settings.read_all)
    for name in ("HOME", "TMPDIR"):
        os.environ[name] = str(folder)
    tempfile.tempdir = None


def libc() -> ctypes.CDLL:
    """Return the C library."""
    return ctypes.CDLL(None, use_errno=True)


def leave_network() -> bool:
    """Move to a network of its own that has no device that is up, if the system allows it.

    Returns whether it took a namespace of users of its own for that, as who is not root must.
    """
    if sys.platform != "linux" or libc().unshare(CLONE_NEWNET) == 0:
        return False
    uid, gid = os.getuid(), os.getgid()
    if libc().unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0:
        with suppress(OSError):  # without a map the process would not even know its own user
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        return True
    return False


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


def restrict_files(folder: Path) -> bool:
    """Refuse, by Landlock: writing outside ``folder``, starting programs, signals and TCP to the outside.

    Returns whether the kernel knows Landlock. Reading stays as the user's rights have it.
    """
    version = libc().syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = 1 << 0 | 1 << 1 | sum(1 << bit for bit in range(4, 13))  # execute, write, remove and make anything
    rights |= (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)  # move across folders, truncate
    parts = [rights, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0]  # files, TCP, signals and sockets
    attributes = struct.pack("=3Q", *parts)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = libc().syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    for path, allowed in ((folder, rights & ~1), (Path(os.devnull), rights & LANDLOCK_FILE_RIGHTS)):
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
        libc().syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, target), 0)
        os.close(target)
    failed = libc().syscall(LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)
    return bool(failed == 0)


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
