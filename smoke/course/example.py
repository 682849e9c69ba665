"""A lesson's examples on a student's modules, in a process of its own.

``python -m smoke.course.example FOLDER TASK PAGE PAGE …`` runs the blocks of the pages in order, in one namespace. It
imports nothing of the engine before the student's modules are laid over it. It frees nothing, neither on the way nor at
its end: looking for what is no longer used takes a third of the time where torch is imported.
"""

import contextlib
import gc
import io
import os
import symtable
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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


@dataclass(frozen=True)
class Block:
    """A Python block of a page, and what the page says that it prints."""

    page: Path
    fence: Fence
    printed: str


def blocks(page: Path) -> Iterator[Block]:
    """Yield each Python block of a page."""
    found = [fence for fence in fences(page.read_text()) if fence.info in {"python", "output"}]
    for number, fence in enumerate(found):
        if fence.info == "python":
            below = found[number + 1 : number + 2]
            yield Block(page, fence, below[0].text if below and below[0].info == "output" else "")


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


def run_pages(pages: Sequence[Path]) -> bool:
    """Run the Python blocks of ``pages`` in one namespace; return whether those of the last page print what it shows.

    What the last page prints is shown. Of the earlier blocks only those run whose names a later one needs: they take a
    third of the time. Where that does not print what the page shows, all blocks run.
    """
    last = list(blocks(pages[-1]))
    earlier = [block for page in pages[:-1] for block in blocks(page)]
    needed = needed_by(last, earlier) if last else earlier
    needs_torch = needed == earlier or any("torch" in block.fence.text for block in (*needed, *last))
    words = io.StringIO()
    with contextlib.redirect_stdout(words):
        is_right = run_blocks(needed, last, needs_torch)
    if not is_right and needed != earlier:
        return run_blocks(earlier, last)
    print(words.getvalue(), end="")
    return is_right


def needed_by(last: Sequence[Block], earlier: Sequence[Block]) -> list[Block]:
    """Return those of the ``earlier`` blocks that bind a name which ``last`` or a needed block uses, or use its value.

    A block that uses a value may change it.
    """
    values = {name for block in earlier for name in names(block.fence.text).values}
    wanted = {name for block in last for name in names(block.fence.text).wanted}
    needed = []
    for block in reversed(earlier):
        own = names(block.fence.text)
        if wanted & own.bound or wanted & own.used & values:
            wanted |= own.wanted
            needed.append(block)
    return needed[::-1]


class Names(NamedTuple):
    """The global names that a block binds, those of them that are no modules, classes or functions, and those it uses.

    Names that its functions use are among the last. It imports those ``imported`` itself.
    """

    bound: set[str]
    values: set[str]
    used: set[str]
    imported: set[str]

    @property
    def wanted(self) -> set[str]:
        """The names that an earlier block has to bind."""
        return self.used - self.imported


def names(text: str) -> Names:
    """Return the global names of a block."""
    found = Names(set(), set(), set(), set())
    tables = [symtable.symtable(text, "block", "exec")]
    for table in tables:  # grows while it is read
        tables += table.get_children()
        for symbol in table.get_symbols():
            is_outer = table.get_type() == "module"
            if is_outer and (symbol.is_assigned() or symbol.is_imported()):
                found.bound.add(symbol.get_name())
                if symbol.is_imported():
                    found.imported.add(symbol.get_name())
                if not (symbol.is_imported() or symbol.is_namespace()):
                    found.values.add(symbol.get_name())
            if symbol.is_referenced() and (is_outer or symbol.is_global()):
                found.used.add(symbol.get_name())
    return found


def run_blocks(earlier: Sequence[Block], last: Sequence[Block], needs_torch: bool = True) -> bool:
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
    return all(holds(block, namespace) for block in last)


def holds(block: Block, namespace: dict[str, Any]) -> bool:
    """Run one block, show what it prints, and return whether that is what the page shows."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            execute(block.fence, namespace, block.page)
    except Exception:
        print(printed.getvalue() + traceback.format_exc())
        return False
    print(printed.getvalue(), end="")
    if printed.getvalue() == block.printed:
        return True
    print(
        f"{block.page.name}:{block.fence.line}: the page shows for this block\n{textwrap.indent(block.printed, '    ')}"
    )
    return False


def main(folder: str, task: str, *pages: str) -> int:
    """Run ``pages`` on the modules of ``folder``; return 0 if the last page's blocks hold.

    Where nothing of ``task`` is written, it returns ``NOT_WRITTEN``. Tasks that are not written yet are the
    reference's: an example may use what a later task writes.
    """
    overlay = install_overlay(Path(folder).resolve(), overlay_files(Path(folder).resolve()), fill=True)
    allow_infinities()
    is_right = run_pages([Path(page) for page in pages])
    if task in overlay.filled:
        print(f"{task} is not written yet: what you see above is the reference's")
        return NOT_WRITTEN
    if overlay.filled:
        print(f"not written yet, so from the reference: {', '.join(sorted(overlay.filled))}")
    return 0 if is_right else 1


if __name__ == "__main__":
    gc.disable()
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)
