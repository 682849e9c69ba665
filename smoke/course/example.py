"""A lesson's examples on a student's modules, in a process of its own.

``python -m smoke.course.example FOLDER TASK PAGE PAGE …`` runs the blocks of the pages in order, in one namespace. It
imports nothing of the engine before the student's modules are laid over it.
"""

import contextlib
import io
import symtable
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_engine.overlay import install_overlay, overlay_files
from smoke.framework.check import use_one_thread
from smoke.framework.manifest import Lesson, Task
from smoke.runner.interpreter import allow_infinities

NOT_WRITTEN = 3  # the exit status for a task of which nothing is written


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


def blocks(page: Path) -> Iterator[tuple[Fence, str]]:
    """Yield each Python block of a page with what the page says that it prints."""
    found = [fence for fence in fences(page.read_text()) if fence.info in {"python", "output"}]
    for number, fence in enumerate(found):
        if fence.info == "python":
            below = found[number + 1 : number + 2]
            yield fence, below[0].text if below and below[0].info == "output" else ""


def execute(fence: Fence, namespace: dict[str, Any], page: Path) -> None:
    """Execute one block. Line numbers of a traceback are those of the page.

    That is also how Triton finds a kernel's source: it reads the page at those lines, as it would a student's file.
    """
    exec(compile("\n" * fence.line + fence.text, str(page), "exec"), namespace)


def pages_until(lesson: Lesson, task: Task) -> list[Path]:
    """Return the pages of ``lesson`` up to that of ``task``."""
    pages = lesson.pages()
    return pages[: [page.name for page in pages].index(task.page_name) + 1]


def begin(needs_torch: bool = True) -> dict[str, Any]:
    """Return the namespace in which a lesson's pages run, and seed torch: the pages' numbers come from seed 0."""
    if needs_torch:
        import torch  # here, because it takes longer than most examples

        torch.manual_seed(0)
        use_one_thread()
    return {"__name__": "lesson"}


@dataclass(frozen=True)
class Shown:
    """A Python block of a page, and what the page says that it prints."""

    page: Path
    fence: Fence
    printed: str = ""


def run_pages(pages: Sequence[Path]) -> bool:
    """Run the Python blocks of ``pages`` in one namespace; return whether those of the last page print what it shows.

    What the last page prints is shown. Of the earlier blocks only those run whose names a later one needs: they take a
    third of the time. Where that does not print what the page shows, all blocks run.
    """
    last = [Shown(pages[-1], fence, printed) for fence, printed in blocks(pages[-1])]
    earlier = [Shown(page, fence) for page in pages[:-1] for fence, _ in blocks(page)]
    needed = needed_by(last, earlier) if last else earlier
    needs_torch = needed == earlier or any("torch" in block.fence.text for block in (*needed, *last))
    words = io.StringIO()
    with contextlib.redirect_stdout(words):
        is_right = run_blocks(needed, last, needs_torch)
    if not is_right and needed != earlier:
        return run_blocks(earlier, last)
    print(words.getvalue(), end="")
    return is_right


def needed_by(last: Sequence[Shown], earlier: Sequence[Shown]) -> list[Shown]:
    """Return those of the ``earlier`` blocks that bind a name which ``last`` or a needed block uses."""
    wanted = {name for block in last for name in names(block.fence.text)[1]}
    needed = []
    for block in reversed(earlier):
        bound, used = names(block.fence.text)
        if bound & wanted:
            wanted |= used
            needed.append(block)
    return needed[::-1]


def names(text: str) -> tuple[set[str], set[str]]:
    """Return the global names that a block binds, and those that it uses, also inside of its functions."""
    bound, used = set[str](), set[str]()
    tables = [symtable.symtable(text, "block", "exec")]
    for table in tables:  # grows while it is read
        tables += table.get_children()
        outer = table.get_type() == "module"
        for symbol in table.get_symbols():
            if outer and (symbol.is_assigned() or symbol.is_imported()):
                bound.add(symbol.get_name())
            if symbol.is_referenced() and (outer or symbol.is_global()):
                used.add(symbol.get_name())
    return bound, used


def run_blocks(earlier: Sequence[Shown], last: Sequence[Shown], needs_torch: bool = True) -> bool:
    """Run blocks in one namespace; return whether the ``last`` print what their page shows. Those are shown.

    A block of an ``earlier`` page that fails is named, and the rest goes on.
    """
    namespace = begin(needs_torch)
    for block in earlier:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                execute(block.fence, namespace, block.page)
        except Exception as error:
            print(f"{block.page.name}:{block.fence.line}: this block ended with {error!r}")
    return all(holds(block.fence, block.printed, namespace, block.page) for block in last)


def holds(fence: Fence, expected: str, namespace: dict[str, Any], page: Path) -> bool:
    """Run one block, show what it prints, and return whether that is what the page shows."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            execute(fence, namespace, page)
    except Exception:
        print(printed.getvalue() + traceback.format_exc())
        return False
    print(printed.getvalue(), end="")
    if printed.getvalue() == expected:
        return True
    print(f"{page.name}:{fence.line}: the page shows for this block\n{textwrap.indent(expected, '    ')}")
    return False


def main(folder: str, task: str, *pages: str) -> None:
    """Run ``pages`` on the modules of ``folder``; exit with 0 if the last page's blocks hold.

    Where nothing of ``task`` is written, it exits with ``NOT_WRITTEN``. Tasks that are not written yet are the
    reference's: an example may use what a later task writes.
    """
    overlay = install_overlay(Path(folder).resolve(), overlay_files(Path(folder).resolve()), fill=True)
    allow_infinities()
    is_right = run_pages([Path(page) for page in pages])
    if task in overlay.filled:
        print(f"{task} is not written yet: what you see above is the reference's")
        sys.exit(NOT_WRITTEN)
    if overlay.filled:
        print(f"not written yet, so from the reference: {', '.join(sorted(overlay.filled))}")
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
