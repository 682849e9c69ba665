"""The audit hook of a candidate's process, and the notes that it leaves.

Owns: how the hook is installed and how its notes come back. Must not know: what is refused (``rules.py``).

The hook sees what goes through Python, notes it in a pipe of its own and raises ``PermissionError``. It makes casual
tricks visible and stops them where the kernel does not; code that calls the system directly does not come by here, and
meets ``confinement.py``.
"""

import builtins
import fcntl
import json
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from smoke.grade import rules

MAX_ALIKE = 5  # notes of one kind; more are only counted
# Functions of libraries that open a file without Python: what the hook cannot see. Where Landlock is, it refuses them.
OPENERS = {
    "torch": ("from_file", "load"),
    "torch.UntypedStorage": ("from_file",),
    "torch.TypedStorage": ("from_file",),
    "torch.jit": ("load",),
    "torch.ops": ("load_library",),
    "torch.classes": ("load_library",),
    "torch._C": ("PyTorchFileReader", "PyTorchFileWriter", "import_ir_module", "_import_ir_module_from_package"),
    "torch._C._VariableFunctions": ("from_file",),
}
RULES = Path(rules.__file__).read_bytes()


class Notes:
    """A pipe for notes, which is not where a candidate prints.

    Each line begins with a key that only the hook has. What else is found in the pipe was put there by the candidate.
    """

    def __init__(self) -> None:
        """Open the pipe; to be done before the process is forked."""
        self.reader, self.writer = os.pipe()
        self.key = secrets.token_hex(8)
        for end in (self.reader, self.writer):
            fcntl.fcntl(end, fcntl.F_SETFL, os.O_NONBLOCK)

    def read(self) -> list[str]:
        """Return the notes, each kind at most ``MAX_ALIKE`` times, and close the pipe."""
        os.close(self.writer)
        data = b""
        try:
            while len(data) < 2 * rules.MAX_BYTES and (more := os.read(self.reader, 65536)):
                data += more
        except BlockingIOError:
            pass  # a process that was started still holds the other end
        os.close(self.reader)
        return read_notes(data, self.key)


def read_notes(data: bytes, key: str) -> list[str]:
    """Return the notes that stand in ``data`` under ``key``, and whether anything else does."""
    lines = data.decode(errors="replace").splitlines()
    found = list(dict.fromkeys(json.loads(line.removeprefix(key)) for line in lines if line.startswith(key + '"')))
    if any(not line.startswith(key + '"') for line in lines):
        found.append("wrote into the pipe of the grader's notes")
    kinds: dict[str, list[str]] = {}
    for note in found:
        kinds.setdefault(" ".join(note.split()[:2]), []).append(note)
    shown = [note for alike in kinds.values() for note in alike[:MAX_ALIKE]]
    more = [f"{kind} …, {len(alike) - MAX_ALIKE} more" for kind, alike in kinds.items() if len(alike) > MAX_ALIKE]
    return shown + more


def install(folder: Path, trees: Sequence[str], listed: Sequence[str], notes: Notes) -> None:
    """Install the hook, for good: writing is allowed in ``folder`` alone, reading there and in ``trees``.

    In ``listed``, names may be read. What libraries would open files with unseen is seen too.
    """
    home = os.path.realpath(folder)
    readable = tuple(os.path.realpath(path) for path in (home, *trees))
    names = (*readable, *(os.path.realpath(path) for path in listed))
    namespace: dict[str, Any] = {"__name__": "rules", "__builtins__": dict(vars(builtins))}
    exec(RULES, namespace)
    decide = namespace["Decider"](notes.writer, notes.key, home, readable, names).decide
    for owner, openers in OPENERS.items():
        announce_openers(owner, openers)
    sys.addaudithook(partial(refuse, decide))


def refuse(decide: Callable[[str, Any], str | None], event: str, args: Any) -> None:
    """Raise ``PermissionError`` for what is refused. The exception's frames hold nothing that could be changed."""
    try:
        words = decide(event, args)
    except BaseException:  # such as too deep a recursion
        words = "a submission may not do this here"
    del decide, args
    if words is not None:
        raise PermissionError(words)


def announce_openers(owner: str, names: Sequence[str]) -> None:
    """Let functions that open files unseen say so first. Mutates a module; what is built in C stays as it is."""
    first, *rest = owner.split(".")
    place: Any = sys.modules.get(first)
    for part in rest:
        place = getattr(place, part, None)
    for name in names:
        if hasattr(place, name):
            with suppress(AttributeError, TypeError):
                setattr(place, name, announced(getattr(place, name)))


def announced(opener: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``opener`` with an audit event ahead of it, as for ``open``."""
    audit, fspath = sys.audit, os.fspath

    def announce(*args: Any, **options: Any) -> Any:
        path = next((item for item in (*args, *options.values()) if isinstance(item, str | bytes | os.PathLike)), None)
        if path is not None:
            audit("open", fspath(path), "r+" if options.get("shared") or args[1:2] == (True,) else "r", 0)
        return opener(*args, **options)

    return announce
