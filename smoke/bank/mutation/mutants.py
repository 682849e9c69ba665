"""Mutants: a lesson's functions with one small change each, as overlays of one file.

Owns: which functions students write, the changed file, a mutant's id, and what is left out because it is the same code.
Must not know: checks.
"""

import ast
import difflib
import hashlib
import textwrap
from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import cache
from types import CodeType

from smoke.bank.mutation.operators import changes
from smoke.course.starter import Function, functions_of, private_helpers
from smoke.framework.manifest import ENGINE, FunctionName, Lesson, Task, load_manifest
from smoke.framework.parsing import parse


@dataclass(frozen=True)
class Mutant:
    """One change. ``removed`` and ``added`` are the lines that differ, a statement a line and without comments."""

    id: str
    task_id: str
    file: str
    removed: tuple[str, ...]
    added: tuple[str, ...]
    text: str  # of the whole file

    @property
    def lesson_id(self) -> str:
        """The lesson of its task."""
        return self.task_id.split(".")[0]

    @property
    def diff(self) -> str:
        """The change as a person reads it."""
        return "\n".join([*(f"- {line}" for line in self.removed), *(f"+ {line}" for line in self.added)])


def mutants_of(lesson: Lesson) -> Iterator[Mutant]:
    """Yield every mutant of a lesson's functions, task by task."""
    seen: set[FunctionName] = set()
    for task in lesson.tasks:
        for function in written_functions(lesson, task):
            if function not in seen:
                seen.add(function)
                yield from mutants_of_function(task, function)


def written_functions(lesson: Lesson, task: Task) -> list[FunctionName]:
    """Return the functions that a task has students write: those it names, and the helpers that these use."""
    found = list(task.functions)
    for function in found:  # grows while it is read
        module = parsed(function.file)
        reached = {node.id for node in ast.walk(functions_of(module)[function.qualname]) if isinstance(node, ast.Name)}
        own = [FunctionName(function.module, name) for name in helpers(lesson, function.file) if name in reached]
        found += [helper for helper in own if helper not in found]
    return found


@cache
def helpers(lesson: Lesson, file: str) -> tuple[str, ...]:
    """Return the functions of a file that no task names and that the lesson's starter leaves out."""
    listed = {f.qualname for task in load_manifest().tasks for f in task.functions if f.file == file}
    own = {f.qualname for task in lesson.tasks for f in task.functions if f.file == file}
    return tuple(private_helpers(file, parsed(file), own, listed, ENGINE))


@cache
def source_of(file: str) -> str:
    """Read a file of the engine."""
    return (ENGINE / file).read_text()


@cache
def parsed(file: str) -> ast.Module:
    """Parse a file of the engine."""
    return parse(source_of(file))


def mutants_of_function(task: Task, name: FunctionName) -> Iterator[Mutant]:
    """Yield the mutants of one function. One that compiles to what another does, or not at all, is left out."""
    function = functions_of(parsed(name.file))[name.qualname]
    before = written(function)
    compiled = {bytecode("\n".join(before))}
    counts: Counter[str] = Counter()
    for operator, place, new in changes(function):
        old = place.node
        place.put(new)
        after = written(function)
        place.put(old)
        code = bytecode("\n".join(after))
        if code is None or code in compiled:
            continue
        compiled.add(code)
        removed, added = difference(before, after)
        digest = hashlib.blake2s("\n".join([*removed, "", *added]).encode()).hexdigest()[:6]
        stem = f"{name}/{operator}/{digest}"
        counts[stem] += 1
        mutant_id = stem if counts[stem] == 1 else f"{stem}-{counts[stem]}"
        text = put_function(source_of(name.file), function, after)
        yield Mutant(mutant_id, task.id, name.file, removed, added, text)


def written(function: Function) -> list[str]:
    """Return a function as Python writes it, from ``def`` on: without comments, a statement a line."""
    bare = copy(function)
    bare.decorator_list = []
    return ast.unparse(bare).splitlines()


def put_function(text: str, function: Function, lines: list[str]) -> str:
    """Return a file's text with other lines in the place of one function; its decorators stay."""
    kept = text.splitlines()
    indented = textwrap.indent("\n".join(lines), " " * function.col_offset)
    return "\n".join([*kept[: function.lineno - 1], indented, *kept[function.end_lineno :]]) + "\n"


def difference(before: list[str], after: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the lines that are gone and those that came, without indentation."""
    lines = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    removed = tuple(line[2:].strip() for line in lines if line[0] == "-")
    return removed, tuple(line[2:].strip() for line in lines if line[0] == "+")


def bytecode(text: str) -> object:
    """Return what Python runs of a text, without line numbers and docstrings; ``None`` if it does not compile."""
    try:
        return normal(compile(text, "mutant", "exec", dont_inherit=True, optimize=2))
    except (SyntaxError, ValueError):
        return None


def normal(code: CodeType) -> object:
    """Return a code object as a value that is equal for equal code: with its constants by type and text."""
    constants = tuple(normal(c) if isinstance(c, CodeType) else (type(c).__name__, repr(c)) for c in code.co_consts)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_name)
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return code.co_code, constants, names, shape, code.co_exceptiontable
