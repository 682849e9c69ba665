"""A lesson's examples on a student's modules, in a process of its own: ``python -m smoke.example PAGE TASK FOLDER``.

Owns: which blocks of a page belong to a task, and running them in order. Must not know: checks, results, the manifest.
Imports nothing of the engine before the student's modules are laid over it.
"""

import contextlib
import io
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from mini_engine.overlay import install_overlay, overlay_files

HEADING = re.compile(r"### (L\d\.[A-Z]) |##+ ")


def python_blocks(text: str) -> Iterator[tuple[str | None, int, str]]:
    """Yield the task whose section a block stands in (``None``: of no task), the line of its fence, and its code."""
    task, opened, body = None, 0, list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        if opened and line == "```":
            yield task, opened, "\n".join(body) + "\n"
            opened = 0
        elif opened:
            body.append(line)
        elif line == "```python":
            opened, body = number, []
        elif heading := HEADING.match(line):
            task = heading[1]


def run_until(page: Path, wanted: str) -> bool:
    """Run the blocks of ``page`` up to those of the task ``wanted``, in one namespace; return whether its own hold.

    A block before them that fails is named, and the rest goes on: an earlier task may not be written yet.
    """
    blocks = list(python_blocks(page.read_text()))
    last = max((place for place, (task, _, _) in enumerate(blocks) if task == wanted), default=-1)
    namespace = {"__name__": "lesson"}
    for task, line, code in blocks[: last + 1]:
        shown = sys.stdout if task == wanted else io.StringIO()  # what other blocks print is no news
        try:  # with the page's own line numbers: tracebacks show them, and Triton reads the source of a kernel there
            with contextlib.redirect_stdout(shown):
                exec(compile("\n" * line + code, str(page), "exec"), namespace)
        except Exception as error:
            if task == wanted:
                traceback.print_exc()
                return False
            print(f"{page.name}:{line}: {f'the block of {task}' if task else 'a block'} ended with {error!r}")
    return last >= 0


def main(page: str, task: str, folder: str) -> None:
    """Run the examples of one task and exit with 0 if they hold."""
    install_overlay(Path(folder).resolve(), overlay_files(Path(folder).resolve()))
    sys.exit(0 if run_until(Path(page), task) else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
