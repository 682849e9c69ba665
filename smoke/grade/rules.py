"""What a candidate may not do, as the audit hook decides it.

Owns: which events are refused, where a path leads, and how an attempt is noted. Must not know: checks, scores.

``guard.py`` runs this file in a namespace of its own, with builtins of its own, which no name leads to: so nothing that
a candidate changes in ``os``, ``builtins`` or here changes a decision.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

MAX_BYTES = 32_000  # of notes; a pipe holds 64 KiB
MAX_FDS = 256  # what a candidate may have open
MAX_LINKS = 40
KIND, IS_LINK, IS_FOLDER = 0o170000, 0o120000, 0o040000
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# What changes files: how many paths come first, and where the folders stand that these are relative to.
CHANGES: dict[str, tuple[int, tuple[int, ...]]] = {
    "os.rename": (2, (2, 3)),
    "os.remove": (1, (1,)),
    "os.rmdir": (1, (1,)),
    "os.mkdir": (1, (2,)),
    "os.link": (2, (2, 3)),
    "os.symlink": (2, (2, 2)),
    "os.truncate": (1, ()),
    "os.chmod": (1, (2,)),
    "os.chown": (1, (3,)),
    "os.utime": (1, (3,)),
}
LISTING = ("os.listdir", "os.scandir")
REFUSED = {
    "subprocess.Popen": "starting a program",
    "os.system": "starting a program",
    "os.exec": "starting a program",
    "os.posix_spawn": "starting a program",
    "os.kill": "a signal",
    "os.killpg": "a signal",
    "socket.connect": "the network",
    "socket.bind": "the network",
    "socket.sendto": "the network",
    "socket.getaddrinfo": "the network",
    "gc.get_objects": "looking through memory",
    "gc.get_referrers": "looking through memory",
    "gc.get_referents": "looking through memory",
    "sys._current_frames": "looking into other frames",
    "sys._current_exceptions": "looking into other frames",
    "sys.settrace": "tracing",
    "sys.setprofile": "tracing",
    "sys.monitoring.register_callback": "tracing",
    "sqlite3.connect": "a database",
}
CHANGED_CODE = ("object.__setattr__", "object.__delattr__")
STARTED = "a process was started"
NOTED = {"os.fork": STARTED, "os.forkpty": STARTED}
FORKED = f"{STARTED} (os.fork)"
MODELS = ("transformers.generation", "transformers.integrations")
NULL = os.devnull
# Bound here, where no later change of ``os`` reaches.
lstat = os.lstat
readlink = os.readlink
getcwd = os.getcwd
write = os.write
decode = os.fsdecode
quote = json.encoder.encode_basestring_ascii


class Decider:
    """Says of an event why it is refused, and notes it."""

    def __init__(self, writer: int, key: str, home: str, readable: Sequence[str], names: Sequence[str]) -> None:
        """Allow writing in ``home`` alone and reading in ``readable``; in ``names``, names may be read.

        Notes go to the descriptor ``writer`` under ``key``.
        """
        self.writer = writer
        self.key = key
        self.home = (home,)
        self.readable = tuple(readable)
        self.names = tuple(names)
        self.written = set[str]()
        self.left = MAX_BYTES

    def decide(self, event: str, args: Any) -> str | None:
        """Return the words of the refusal, or ``None``."""
        if event in NOTED:
            self.tell(f"{NOTED[event]} ({event})")
        words = self.words_about(event, args)
        if words is None:
            return None
        self.tell(f"refused: {words}")
        return f"a submission may not do this: {words}"

    def words_about(self, event: str, args: Any) -> str | None:
        """Return what is tried, if it is refused."""
        if event == "open":
            return self.of_open(*args[:3])
        if event in CHANGES:
            return self.of_change(event, args)
        if event in LISTING:
            return self.of_listing(args[0])
        if event in REFUSED:
            return f"{REFUSED[event]} ({event})"
        if event == "import" and holds_models(args[0]):
            return f"importing {args[0]}"
        if event in CHANGED_CODE and args[1] == "__code__":
            return f"changing a function's code ({event})"
        return f"the C library ({event})" if event.startswith("ctypes.") else None

    def of_open(self, path: Any, mode: Any, flags: Any) -> str | None:
        """Return what is tried by opening a file; ``os.open`` gives no mode."""
        writes = any(letter in (mode or "") for letter in "wax+") or bool((flags or 0) & WRITING)
        for where in places(path, () if mode is not None else (None,)):
            if writes and where != NULL and outside(where, self.home):
                return f"writing {where}"
            if not writes and outside(where, self.readable) and is_there(where):
                return f"reading {where}"
        return None

    def of_change(self, event: str, args: Any) -> str | None:
        """Return what is tried by renaming, removing, making or the like."""
        count, bases = CHANGES[event]
        for path, base in zip(args[:count], [*(args[number] for number in bases), -1, -1], strict=False):
            for where in places(path, () if base == -1 else (base,)):
                if outside(where, self.home):
                    return f"changing {where} ({event})"
        return None

    def of_listing(self, path: Any) -> str | None:
        """Return what is tried by listing a folder."""
        found = places("." if path is None else path, ())
        return next((f"listing {where}" for where in found if outside(where, self.names) and is_there(where)), None)

    def tell(self, text: str) -> None:
        """Write one note, until ``MAX_BYTES`` are written; the same note is written once. Mutates."""
        line = f"{self.key}{quote(text[:400])}\n".encode()
        if text in self.written or self.left < len(line):
            return
        self.written.add(text)
        self.left -= len(line)
        try:
            write(self.writer, line)
        except OSError:
            return


def holds_models(module: str) -> bool:
    """Whether a module of transformers is one of its models or of what generates with them."""
    if module.startswith(MODELS):
        return True
    return module.startswith("transformers.models.") and any(word in module for word in ("modeling_", "modular_"))


def outside(path: str, folders: Sequence[str]) -> bool:
    """Whether a path lies in none of the folders and is none of them."""
    return not any(path == folder or path.startswith(folder + "/") for folder in folders)


def is_there(path: str) -> bool:
    """Whether there is anything: a library may ask for a file that is not."""
    try:
        lstat(path)
    except (OSError, ValueError):
        return False
    return True


def places(path: Any, bases: Sequence[Any]) -> list[str]:
    """Return where a path leads; nowhere for an open descriptor or what is not a path.

    A relative path is taken from each of the folders given as descriptors; ``None`` among them stands for every folder
    that is open, because ``os.open`` does not say which one it was given.
    """
    if not isinstance(path, (str, bytes)):
        return []
    text = str.__getitem__(decode(path), slice(None))  # a plain copy: a subclass could run code here
    if text[:1] == "/":
        return [follow(text)]
    folders = [getcwd()] if None in bases or not bases else []
    for base in bases:
        numbers = range(MAX_FDS) if base is None else (base,)
        folders += [folder for number in numbers if (folder := folder_of(number))]
    return [follow(f"{folder}/{text}") for folder in folders]


def folder_of(descriptor: int) -> str | None:
    """Return the folder that a descriptor has open, if it has one."""
    try:
        path = readlink(f"/proc/self/fd/{descriptor}")
        return path if path[:1] == "/" and lstat(path).st_mode & KIND == IS_FOLDER else None
    except (OSError, ValueError):
        return None


def follow(path: str) -> str:
    """Return an absolute path without links and dots."""
    done = ""
    waiting = path.split("/")[::-1]
    links = 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            done = done.rpartition("/")[0]
        if part in ("", ".", ".."):
            continue
        link = link_at(f"{done}/{part}") if links < MAX_LINKS else None
        links += link is not None
        if link is None:
            done = f"{done}/{part}"
        else:
            done = "" if link[:1] == "/" else done
            waiting += link.split("/")[::-1]
    return done or "/"


def link_at(path: str) -> str | None:
    """Return where a link leads, ``None`` for anything else."""
    try:
        return readlink(path) if lstat(path).st_mode & KIND == IS_LINK else None
    except (OSError, ValueError):
        return None
