"""A candidate's process in namespaces of its own: what it starts sees nothing outside and ends with it.

Owns: the namespaces, the process that is the first in them, and what is counted when they end. Must not know: checks,
limits. The rules are those of https://man7.org/linux/man-pages/man7/pid_namespaces.7.html.

Three processes stand in a row. The keeper is in the server's namespace and ends when the server ends. The first process
of the new namespace ends when the keeper ends, and the kernel ends everything else in it then. The candidate is the
second. Where the system allows no such namespace, the keeper is the candidate, and the server ends what it left.
"""

import json
import os
import select
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from smoke.grade.landlock import libc

CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG = 1
EVERYBODY = -1
POLL_MS = 20
KILLED = json.dumps({"status": int(signal.SIGKILL), "left": 0})


@dataclass(frozen=True)
class Spaces:
    """Which namespaces of its own a process has."""

    processes: bool = False
    network: bool = False
    users: bool = False


def leave(*, keeps_user: bool) -> Spaces:
    """Move to namespaces of one's own, as far as the system allows it. What is forked then has its own processes.

    A process that is not root's needs a namespace of users for that. There it can become no other user: so it has one
    only if it ``keeps_user``.
    """
    if sys.platform != "linux":
        return Spaces()
    for spaces in (Spaces(processes=True, network=True), Spaces(network=True)):
        flags = CLONE_NEWNET | (CLONE_NEWPID if spaces.processes else 0)
        if libc().unshare(flags) == 0:
            return spaces
        uid, gid = os.getuid(), os.getgid()
        if keeps_user and libc().unshare(flags | CLONE_NEWUSER) == 0:
            with suppress(OSError):  # without a map the process would not even know its own user
                Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
                Path("/proc/self/setgroups").write_text("deny")
                Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
            return Spaces(spaces.processes, spaces.network, users=True)
    return Spaces()


class Enclosure:
    """One candidate's processes, from ``fork`` to ``wait``: ``spaces`` is set in the candidate, ``left`` at the end."""

    def __init__(self, *, keeps_user: bool) -> None:
        """Prepare; nothing is forked yet. ``keeps_user``: the candidate will not become another user."""
        self.keeps_user = keeps_user
        self.spaces = Spaces()
        self.left = 0  # processes that the candidate left behind, which are ended

    def fork(self) -> int:
        """Fork the candidate -> 0 in it; in the server its process id. Mutates."""
        server = os.getpid()
        self.reader, writer = os.pipe()
        self.keeper = os.fork()
        if self.keeper:
            os.close(writer)
            self.pid = int(read_line(self.reader) or 0)
            return self.pid
        os.close(self.reader)
        self.spaces = leave(keeps_user=self.keeps_user)
        end_with_parent()
        if os.getppid() != server:
            os._exit(1)
        if self.spaces.processes:
            self.enclose(writer)
        with suppress(OSError):
            os.setpgid(0, 0)
        pid = os.readlink("/proc/self") if self.spaces.processes else str(os.getpid())
        os.write(writer, f"{pid}\n".encode())
        os.close(writer)
        return 0

    def enclose(self, writer: int) -> None:
        """Return as the candidate; the two processes before it wait."""
        first = os.fork()
        if first:
            close_all_but()
            os.waitpid(first, 0)
            os._exit(0)
        end_with_parent()
        candidate = os.fork()
        if candidate:
            close_all_but(writer)
            be_the_first(candidate, writer)

    def wait(self) -> int:
        """Wait for the candidate's end -> its exit status; below 0 the signal that ended it. Mutates.

        When the grader is gone, so is this process at once, and with it the candidate.
        """
        grader = select.poll()
        grader.register(sys.stdin, 0)  # whose end is reported even so
        ended = 0
        while not ended:
            if grader.poll(POLL_MS):
                os._exit(1)
            ended, status = os.waitpid(self.keeper, os.WNOHANG)
        if self.pid != self.keeper:
            ending = json.loads(read_line(self.reader) or KILLED)
            status, self.left = ending["status"], ending["left"]
        os.close(self.reader)
        return os.waitstatus_to_exitcode(status)


def be_the_first(candidate: int, writer: int) -> NoReturn:
    """Collect what ends until the candidate has, end what is left, and tell both."""
    ended = -1
    while ended != candidate:
        ended, status = os.wait()
    left = 0
    with suppress(ProcessLookupError):
        os.kill(EVERYBODY, signal.SIGKILL)  # in this namespace, and not this process
    with suppress(ChildProcessError):
        while os.wait():
            left += 1
    os.write(writer, json.dumps({"status": status, "left": left}).encode() + b"\n")
    os._exit(0)


def end_user(uid: int) -> None:
    """End every process of a user, in one call: what starts processes without end has no time for another.

    Only root can do this, and the user is to be a candidate's.
    """
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            os.setresuid(uid, uid, uid)
            os.kill(EVERYBODY, signal.SIGKILL)
        os._exit(0)
    os.waitpid(pid, 0)


def end_with_parent() -> None:
    """Have the kernel end this process when the one that forked it ends."""
    with suppress(AttributeError, OSError):
        libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def close_all_but(kept: int = -1) -> None:
    """Close every descriptor but ``kept``; what waits here has no use for the server's."""
    os.closerange(0, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def read_line(descriptor: int) -> bytes:
    """Return one line from a pipe, byte by byte, or what came before its end."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(descriptor, 1)):
        line += byte
    return line
