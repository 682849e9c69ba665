"""A lesson's examples on a student's modules, in a process of its own.

``python -m smoke.course.example FOLDER PAGE PAGE …`` runs the blocks of the pages in order, in one namespace. It
imports nothing of the engine before the student's modules are laid over it.
"""

import contextlib
import io
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_engine.overlay import install_overlay, overlay_files
from smoke.framework.manifest import Lesson, Task


@dataclass(frozen=True)
class Fence:
    """A fenced block: the words after the fence, its text, and the line of the opening fence, from 1."""

    info: str
    text: str
    line: int


def fences(text: str) -> Iterator[Fence]:
    """Yield the fenced blocks of a page, top to bottom."""
    opened = None
    body = list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith("```"):
            body.append(line)
        elif opened is None:
            opened = (line[3:].strip(), number)
            body = []
        else:
            assert line == "```", f"line {number}: a fence is opened inside the one of line {opened[1]}"
            yield Fence(opened[0], "".join(f"{row}\n" for row in body), opened[1])
            opened = None
    assert opened is None, f"the fence of line {opened and opened[1]} is never closed"


def execute(fence: Fence, namespace: dict[str, Any], page: Path) -> None:
    """Execute one block. Line numbers of a traceback are those of the page.

    That is also how Triton finds a kernel's source: it reads the page at those lines, as it would a student's file.
    """
    exec(compile("\n" * fence.line + fence.text, str(page), "exec"), namespace)


def pages_until(lesson: Lesson, task: Task) -> list[Path]:
    """Return the pages of ``lesson`` up to that of ``task``."""
    pages = lesson.pages()
    return pages[: [page.name for page in pages].index(task.page_name) + 1]


def run_pages(pages: Sequence[Path]) -> bool:
    """Run the Python blocks of ``pages`` in one namespace; return whether those of the last page hold.

    A block before them that fails is named, and the rest goes on: an earlier task may not be written yet. Only what the
    last page prints is shown.
    """
    namespace = {"__name__": "lesson"}
    for page in pages:
        is_last = page == pages[-1]
        for fence in [fence for fence in fences(page.read_text()) if fence.info == "python"]:
            try:
                with contextlib.redirect_stdout(sys.stdout if is_last else io.StringIO()):
                    execute(fence, namespace, page)
            except Exception as error:
                if is_last:
                    traceback.print_exc()
                    return False
                print(f"{page.name}:{fence.line}: this block ended with {error!r}")
    return True


def main(folder: str, *pages: str) -> None:
    """Run the blocks of ``pages`` and exit with 0 if those of the last one hold."""
    install_overlay(Path(folder).resolve(), overlay_files(Path(folder).resolve()))
    sys.exit(0 if run_pages([Path(page) for page in pages]) else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
