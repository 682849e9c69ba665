"""A lesson's examples on a student's modules, in a process of its own.

``python -m smoke.course.example PAGE TASK FOLDER``. Owns: which blocks of a page belong to a task, and running them in
order. Must not know: checks, results, the manifest. Imports nothing of the engine before the student's modules are laid
over it.
"""

import contextlib
import io
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_engine.overlay import install_overlay, overlay_files

HEADING = re.compile(r"### (L\d\.[A-Z]) |##+ ")


@dataclass(frozen=True)
class Fence:
    """A fenced block: what stands behind the fence, its text, the line of the opening fence from 1, and whose it is.

    ``task``: the one under whose heading it stands, ``None`` under any other heading.
    """

    info: str
    text: str
    line: int
    task: str | None


def fences(text: str) -> Iterator[Fence]:
    """Yield the fenced blocks of a page, top to bottom."""
    opened = None
    body = list[str]()
    task = None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith("```"):
            heading = HEADING.match(line) if opened is None else None
            task = heading[1] if heading else task
            body.append(line)
        elif opened is None:
            opened = (line[3:].strip(), number)
            body = []
        else:
            assert line == "```", f"line {number}: a fence is opened inside the one of line {opened[1]}"
            yield Fence(opened[0], "".join(f"{row}\n" for row in body), opened[1], task)
            opened = None
    assert opened is None, f"the fence of line {opened and opened[1]} is never closed"


def execute(fence: Fence, namespace: dict[str, Any], page: Path) -> None:
    """Execute one block. Line numbers of a traceback are those of the page.

    That is also how Triton finds a kernel's source: it reads the page at those lines, as it would a student's file.
    """
    exec(compile("\n" * fence.line + fence.text, str(page), "exec"), namespace)


def run_until(page: Path, wanted: str) -> bool:
    """Run the blocks of ``page`` up to the last of the task ``wanted``, in one namespace; return whether its own hold.

    A block before them that fails is named, and the rest goes on: an earlier task may not be written yet.
    """
    blocks = [fence for fence in fences(page.read_text()) if fence.info == "python"]
    last = max(place for place, fence in enumerate(blocks) if fence.task == wanted)
    namespace = {"__name__": "lesson"}
    for fence in blocks[: last + 1]:
        shown = sys.stdout if fence.task == wanted else io.StringIO()  # what other blocks print is no news
        try:
            with contextlib.redirect_stdout(shown):
                execute(fence, namespace, page)
        except Exception as error:
            if fence.task == wanted:
                traceback.print_exc()
                return False
            whose = f"the block of {fence.task}" if fence.task else "a block"
            print(f"{page.name}:{fence.line}: {whose} ended with {error!r}")
    return True


def main(page: str, task: str, folder: str) -> None:
    """Run the examples of one task and exit with 0 if they hold."""
    install_overlay(Path(folder).resolve(), overlay_files(Path(folder).resolve()))
    sys.exit(0 if run_until(Path(page), task) else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
