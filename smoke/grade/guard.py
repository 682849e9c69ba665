"""An audit hook that refuses what no lesson needs: the solution's source, files elsewhere, programs, sockets.

Owns: which events are refused and how an attempt is told. Must not know: checks, scores.

It sees what goes through Python, says so in the log and raises ``PermissionError``. It stops accidents and casual
tricks and makes them visible; code that calls the system directly does not come by here, and meets ``confinement.py``.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MARK = "[guard] "
MAX_LINES = 20
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {
    "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.link": 2, "os.symlink": 2, "os.truncate": 1,
    "os.chmod": 1, "os.chown": 1, "os.utime": 1,
}  # fmt: skip
REFUSED = {
    "subprocess.Popen": "starting a program", "os.system": "starting a program", "os.exec": "starting a program",
    "os.posix_spawn": "starting a program", "os.kill": "a signal", "os.killpg": "a signal",
    "socket.connect": "the network", "socket.bind": "the network", "socket.sendto": "the network",
    "socket.getaddrinfo": "the network",
}  # fmt: skip
NOTED = {"os.fork": "a process was started", "os.forkpty": "a process was started"}


def install(folder: Path, hidden: Sequence[str], solutions: Sequence[str], own: Path) -> None:
    """Install the hook, for good: writing is allowed in ``folder`` alone.

    ``hidden`` are folders and files that may not be read; ``solutions`` are names beneath ``mini_engine`` that may be
    read in the folder ``own`` only, because the candidate's files stand in for them.
    """
    tell = teller(os.dup(2))
    home = os.path.realpath(folder)

    def refuse(what: str) -> None:
        tell(f"refused: {what}")
        raise PermissionError(f"a submission may not do this: {what}")

    def opened(path: Any, writing: bool) -> None:
        where = real(path)
        if where is None:
            return
        if writing and not within(where, home) and where != os.devnull:
            refuse(f"writing {where}")
        elif any(within(where, item) for item in hidden) or is_solution(where, solutions, str(own)):
            refuse(f"reading {where}")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writing = any(letter in (mode or "") for letter in "wax+") or bool((flags or 0) & WRITING)
            opened(path, writing)
        elif event in CHANGES:
            for path in args[: CHANGES[event]]:
                where = real(path)
                if where is not None and not within(where, home):
                    refuse(f"changing {where} ({event})")
        elif event in REFUSED:
            refuse(f"{REFUSED[event]} ({event})")
        elif event in NOTED:
            tell(f"{NOTED[event]} ({event})")

    sys.addaudithook(hook)


def teller(descriptor: int) -> Callable[[str], None]:
    """Return a function that writes to the log, which a candidate may have closed or replaced under its usual name."""
    lines = 0

    def tell(text: str) -> None:
        nonlocal lines
        lines += 1
        if lines <= MAX_LINES:
            os.write(descriptor, f"{MARK}{text}\n".encode(errors="replace"))

    return tell


def real(path: Any) -> str | None:
    """Return where a path leads, ``None`` for an open descriptor or for what is no path."""
    try:
        return None if isinstance(path, int) else os.path.realpath(os.fsdecode(path))
    except (TypeError, ValueError):
        return None


def within(path: str, folder: str) -> bool:
    """Whether ``path`` is ``folder`` or lies beneath it."""
    return path == folder or path.startswith(folder + os.sep)


def is_solution(path: str, solutions: Sequence[str], own: str) -> bool:
    """Whether ``path`` is the reference's source of a file that the candidate replaces, or its compiled form."""
    if within(path, own):
        return False
    _, separator, name = path.rpartition(f"{os.sep}mini_engine{os.sep}")
    if not separator:
        return False
    folder, _, base = name.rpartition(os.sep)
    if os.path.basename(folder) == "__pycache__":
        name = os.path.join(os.path.dirname(folder), base.partition(".")[0] + ".py")
    return name in solutions


def told(log: str) -> list[str]:
    """Return what a hook told, from the log of its process; a line of it may be the candidate's own invention."""
    return list(dict.fromkeys(line.removeprefix(MARK) for line in log.splitlines() if line.startswith(MARK)))
