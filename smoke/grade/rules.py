"""What a candidate may not do, as the audit hook decides it.

Owns: which events are refused, where a path leads, and how an attempt is noted. Must not know: checks, scores.

``guard.py`` runs this file in a namespace of its own, with builtins of its own, which no name leads to: so nothing that
a candidate changes in ``os``, ``builtins`` or here changes a decision.
"""

import json
import os
from collections.abc import Callable, Sequence
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
NOTED = {"os.fork": "a process was started", "os.forkpty": "a process was started"}
MODELS = ("transformers.generation", "transformers.integrations")
NULL = os.devnull


def decider(
    writer: int, key: str, home: str, readable: Sequence[str], names: Sequence[str]
) -> Callable[[str, Any], str | None]:
    """Return the function that says of an event why it is refused, or ``None``.

    Writing is allowed in ``home`` alone, reading in ``readable``; in ``names``, names may be read. Notes go to the
    descriptor ``writer`` under ``key``.
    """
    tell, places, stat = teller(writer, key), resolver(), os.lstat

    def is_there(path: str) -> bool:
        try:
            stat(path)
        except (OSError, ValueError):
            return False
        return True

    def outside(path: str, folders: Sequence[str]) -> bool:
        return not any(path == folder or path.startswith(folder + "/") for folder in folders)

    def of_open(path: Any, mode: Any, flags: Any) -> str | None:
        writes = any(letter in (mode or "") for letter in "wax+") or bool((flags or 0) & WRITING)
        for where in places(path, () if mode is not None else (None,)):
            if writes and where != NULL and outside(where, (home,)):
                return f"writing {where}"
            if not writes and outside(where, readable) and is_there(where):
                return f"reading {where}"
        return None

    def of_change(event: str, args: Any) -> str | None:
        count, bases = CHANGES[event]
        for path, base in zip(args[:count], [*(args[number] for number in bases), -1, -1], strict=False):
            for where in places(path, () if base == -1 else (base,)):
                if outside(where, (home,)):
                    return f"changing {where} ({event})"
        return None

    def of_listing(path: Any) -> str | None:
        found = places("." if path is None else path, ())
        return next((f"listing {where}" for where in found if outside(where, names) and is_there(where)), None)

    def words_about(event: str, args: Any) -> str | None:
        if event == "open":
            return of_open(*args[:3])
        if event in CHANGES:
            return of_change(event, args)
        if event in LISTING:
            return of_listing(args[0])
        if event in REFUSED:
            return f"{REFUSED[event]} ({event})"
        if event == "import" and holds_models(args[0]):
            return f"importing {args[0]}"
        if event in CHANGED_CODE and args[1] == "__code__":
            return f"changing a function's code ({event})"
        return f"the C library ({event})" if event.startswith("ctypes.") else None

    def decide(event: str, args: Any) -> str | None:
        if event in NOTED:
            tell(f"{NOTED[event]} ({event})")
        words = words_about(event, args)
        if words is None:
            return None
        tell(f"refused: {words}")
        return f"a submission may not do this: {words}"

    return decide


def holds_models(module: str) -> bool:
    """Whether a module of transformers is one of its models or of what generates with them."""
    if module.startswith(MODELS):
        return True
    return module.startswith("transformers.models.") and any(word in module for word in ("modeling_", "modular_"))


def teller(descriptor: int, key: str) -> Callable[[str], None]:
    """Return a function that writes one note, until ``MAX_BYTES`` are written; the same note is written once."""
    written, left = set[str](), MAX_BYTES
    write, quote = os.write, json.encoder.encode_basestring_ascii

    def tell(text: str) -> None:
        nonlocal left
        line = f"{key}{quote(text[:400])}\n".encode()
        if text in written or left < len(line):
            return
        written.add(text)
        left -= len(line)
        try:
            write(descriptor, line)
        except OSError:
            return

    return tell


def resolver() -> Callable[[Any, Sequence[Any]], list[str]]:
    """Return a function that says where a path leads; nowhere for an open descriptor or what is not a path.

    A relative path is taken from each of the folders given as descriptors; ``None`` among them stands for every folder
    that is open, because ``os.open`` does not say which one it was given.
    """
    lstat, readlink, getcwd, decode = os.lstat, os.readlink, os.getcwd, os.fsdecode

    def link_at(path: str) -> str | None:
        try:
            return readlink(path) if lstat(path).st_mode & KIND == IS_LINK else None
        except (OSError, ValueError):
            return None

    def follow(path: str) -> str:
        done, waiting, links = "", path.split("/")[::-1], 0
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

    def folder_of(descriptor: int) -> str | None:
        try:
            path = readlink(f"/proc/self/fd/{descriptor}")
            return path if path[:1] == "/" and lstat(path).st_mode & KIND == IS_FOLDER else None
        except (OSError, ValueError):
            return None

    def places(path: Any, bases: Sequence[Any]) -> list[str]:
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

    return places
