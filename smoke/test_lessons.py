"""Every check of every lesson on the installed engine, probe and verdict in one process: ``pytest smoke``."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from types import FunctionType
from typing import Any

import pytest

from smoke.course.report import explain
from smoke.framework.check import Check, all_checks, run_here, tasks_needed
from smoke.framework.manifest import FunctionName, Task, load_manifest
from smoke.runner.interpreter import LESSON_ID, excused


@pytest.mark.parametrize("check", [pytest.param(check, id=check.id) for check in all_checks().values()])
def test_lesson(check: Check) -> None:
    """Run one check without the tasks of its lesson that it does not build on.

    Its failure text is the one of ``python -m smoke run``.
    """
    if check.lesson_id == LESSON_ID:
        pytest.importorskip("triton", reason="Triton is not installed (it is built for Linux alone)")
    manifest = load_manifest()
    task = manifest.task(check.task_id)
    needed = {task.id, *tasks_needed(check, manifest)}
    with unwritten([other for other in manifest.lesson(task.lesson_id).tasks if other.id not in needed]):
        result = excused(check, run_here(check))
    if result.status == "skipped":
        pytest.skip(result.detail)
    if not result.passed:
        pytest.fail(explain(result, check), pytrace=False)


@contextmanager
def unwritten(tasks: list[Task]) -> Iterator[None]:
    """Let the functions of ``tasks`` raise what a starter raises. Kernels stay as they are."""
    before = []
    for task in tasks:
        for function in filter(None, map(find_function, task.functions)):
            before.append((function, function.__code__))
            words: dict[str, FunctionType] = {}
            exec(f"def unwritten(*_, **__): raise NotImplementedError({f'{task.id}: {task.title}'!r})", words)
            function.__code__ = words["unwritten"].__code__.replace(co_freevars=function.__code__.co_freevars)
    try:
        yield
    finally:
        for function, code in before:
            function.__code__ = code


def find_function(name: FunctionName) -> FunctionType | None:
    """Return the function behind decorators, or ``None`` if it is a kernel."""
    found: Any = import_module(f"mini_engine.{name.module}")
    for part in name.qualname.split("."):
        found = vars(found)[part]
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, cached_property):
        found = found.func
    found = getattr(found, "__wrapped__", found)
    return found if isinstance(found, FunctionType) else None
