"""The clean process that graded candidates are forked from: the course's own, with children that are confined.

Owns: what happens before a candidate's first line and after its end. Must not know: verdicts, scores.

Whatever a candidate leaves behind becomes a child of this process, even if it fled to a session of its own, and is
ended before the next candidate starts.
"""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from smoke.grade.confinement import Confinement, confine, libc
from smoke.grade.guard import install
from smoke.runner import child

SETTINGS = "SMOKE_CONFINEMENT"
LEFT_BEHIND = "left_behind.txt"  # in the server's folder, which candidates cannot write
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from smoke.grade.server import serve; serve()"
PR_SET_CHILD_SUBREAPER = 36
MAX_ROUNDS = 1000


def serve() -> None:
    """Read orders until stdin closes; the settings come as JSON in the environment and are taken out of it."""
    settings = Confinement.parse(json.loads(os.environ.pop(SETTINGS)))
    with suppress(AttributeError, OSError):
        libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    home = Path.cwd()

    def before(order: dict[str, Any]) -> None:
        folder = Path(order["out"])
        confine(settings, folder)
        own = Path(order["overlay"] or folder)
        install(folder, settings.hidden, order["files"], own)

    def after() -> None:
        count = end_orphans()
        if count:
            with (home / LEFT_BEHIND).open("a") as stream:
                stream.write(f"{count}\n")

    child.serve(before, after)


def end_orphans() -> int:
    """End every child of this process, and theirs as they come up, and return how many there were."""
    ended, source = 0, Path(f"/proc/self/task/{os.getpid()}/children")
    for _ in range(MAX_ROUNDS if source.exists() else 0):
        children = [int(pid) for pid in source.read_text().split()]
        if not children:
            break
        for pid in children:  # all at once: what has the time to go on can start others
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        ended += len(children)
    return ended
