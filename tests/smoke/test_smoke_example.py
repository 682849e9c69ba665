"""The worked examples of the tasks' pages: each holds as soon as its own task is written, and needs no later one.

A student writes the tasks of a lesson in order and computes each example before going on. So every example is run here
as ``python -m smoke example`` runs it, on an engine in which the lesson's later tasks are as empty as in ``work/``.
The last task of a lesson has none; ``test_lessons_text.py`` runs its example with all others.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mini_engine.overlay import PACKAGE, install_overlay
from smoke.course.example import pages_until, run_pages
from smoke.course.starter import empty
from smoke.framework.manifest import Task, load_manifest
from tests.support.interpreter import needs_interpreter


def tasks_before_the_last() -> list[str]:
    """Return every task that others follow."""
    return [task.id for lesson in load_manifest().written for task in lesson.tasks[:-1]]


def write_emptied(tasks: Sequence[Task], folder: Path) -> list[str]:
    """Write the files of ``tasks`` with their functions taken out; return the files' names."""
    files = sorted({function.file for task in tasks for function in task.functions})
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(empty(file, tasks))
    return files


@contextlib.contextmanager
def overlaid(folder: Path, files: Sequence[str]) -> Iterator[None]:
    """Lay ``files`` over the engine, whose modules are all imported anew; the ones that were there come back."""

    def take_out() -> dict[str, object]:
        names = [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]
        return {name: sys.modules.pop(name) for name in names}

    modules, finders = take_out(), list(sys.meta_path)
    try:
        install_overlay(folder, files)
        yield
    finally:
        take_out()
        sys.modules.update(modules)
        sys.meta_path[:] = finders


@pytest.mark.slow
@pytest.mark.parametrize("task_id", tasks_before_the_last())
def test_an_example_needs_no_later_task(task_id, tmp_path):
    task = load_manifest().task(task_id)
    lesson = load_manifest().lesson(task.lesson_id)
    pages = pages_until(lesson, task)
    needs_interpreter(pages)
    later = lesson.tasks[lesson.tasks.index(task) + 1 :]
    with overlaid(tmp_path, write_emptied(later, tmp_path)):
        assert run_pages(pages), f"while {[t.id for t in later]} are still to be written"


def test_an_example_that_needs_a_later_task_is_noticed(tmp_path, capsys):
    """L3.A's example once asked the driver for its steps, which L3.C writes."""
    page = tmp_path / "page.md"
    block = "from mini_engine.driver import GreedyDriver\nGreedyDriver._steps(None, [], 1)\n"
    page.write_text(f"# L3.A · Refuse\n```python\n{block}```\n")
    with overlaid(tmp_path, write_emptied([load_manifest().task("L3.C")], tmp_path)):
        assert not run_pages([page])
    assert "NotImplementedError: L3.C" in capsys.readouterr().err
