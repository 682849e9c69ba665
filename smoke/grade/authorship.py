"""Whose code a lesson file is: functions that are the reference's own, and imports that no lesson needs.

Owns: what can be said from the source alone. Must not know: results. Nothing is executed.

A short function has few honest forms, so equal ones are reported and never punished. Importing an oracle is another
matter: a file that asks transformers for the answer has not computed it.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from smoke.course.starter import Function, functions_of
from smoke.framework.manifest import ENGINE, Lesson, load_manifest
from smoke.grade.submissions import Submission

ORACLES = ("transformers", "smoke")
ORACLE_NAME = re.compile(rf"({'|'.join(ORACLES)})(\.\w+)*")
REMARKABLE = {
    "ctypes", "gc", "importlib", "inspect", "multiprocessing", "os", "pickle", "runpy", "shutil", "signal", "site",
    "socket", "subprocess", "sys", "tempfile", "threading", "types", "urllib", "atexit", "builtins", "pathlib",
}  # fmt: skip
REMARKABLE_CALLS = {"eval", "exec", "compile", "open", "__import__", "globals", "setattr"}
TELLING_NODES = 40  # a function with fewer nodes than that says nothing about its author


@dataclass(frozen=True)
class Authorship:
    """What one lesson's files say. ``oracles`` are imports that cost the points; the rest is for a reader."""

    oracles: tuple[str, ...] = ()
    remarkable: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    compared: int = 0

    @property
    def withheld(self) -> str:
        """Why this lesson earns no points, or nothing."""
        return f"points withheld: {'; '.join(self.oracles)}" if self.oracles else ""

    def notes(self) -> list[str]:
        """Return one sentence per finding."""
        notes = list(self.oracles) + list(self.remarkable)
        if self.copied:
            shown = ", ".join(self.copied)
            notes.append(f"{len(self.copied)} of {self.compared} longer functions are the reference's own: {shown}")
        return notes


def examine(submission: Submission, lesson: Lesson) -> Authorship:
    """Look at the lesson's files of a submission. Source that cannot be looked at is remarked and costs nothing."""
    try:
        return look_at(submission, lesson)
    except Exception as error:  # such as an expression nested too deeply to be walked
        return Authorship(remarkable=(f"the source could not be compared: {type(error).__name__}",))


def look_at(submission: Submission, lesson: Lesson) -> Authorship:
    """Collect what the files say. A file that cannot be parsed says nothing."""
    oracles: list[str] = []
    remarkable: list[str] = []
    copied: list[str] = []
    compared = 0
    for file in lesson.files:
        tree = parse(submission.files.get(file, ""))
        for name in imported(tree):
            if ORACLE_NAME.fullmatch(name):
                oracles.append(f"{file} imports {name}")
            elif name.partition(".")[0] in REMARKABLE:
                remarkable.append(f"{file} imports {name}")
        oracles += [f"{file} holds the name {name!r} as a text" for name in oracle_texts(tree)]
        calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        remarkable += [f"{file} calls {name}" for name in sorted(calls & REMARKABLE_CALLS)]
        own = functions_of(tree)
        for qualname, form in telling_forms(lesson.id, file).items():
            if qualname in own:
                compared += 1
                if normal_form(own[qualname]) == form:
                    copied.append(qualname)
    return Authorship(distinct(oracles), distinct(remarkable), tuple(copied), compared)


def distinct(found: list[str]) -> tuple[str, ...]:
    """Return the findings once each, in their order."""
    return tuple(dict.fromkeys(found))


def parse(text: str) -> ast.Module:
    """Parse a file; what cannot be parsed is an empty one, since it cannot be imported either."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield every module that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def oracle_texts(tree: ast.Module) -> Iterator[str]:
    """Yield every text that is the name of an oracle and nothing else: what ``import_module`` would be given."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ORACLE_NAME.fullmatch(node.value):
            yield node.value


@cache
def telling_forms(lesson_id: str, file: str) -> dict[str, str]:
    """Return the normal forms of the reference's functions that a task empties and that are long enough."""
    own = functions_of(ast.parse((ENGINE / file).read_text()))
    names = [f.qualname for task in load_manifest().lesson(lesson_id).tasks for f in task.functions if f.file == file]
    return {name: normal_form(own[name]) for name in names if sum(1 for _ in ast.walk(own[name])) >= TELLING_NODES}


def normal_form(function: Function) -> str:
    """Return the body without docstring, annotations, comments and layout, its own names numbered as they appear."""
    copy = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(copy, Function), "a function stays one"
    if ast.get_docstring(copy) is not None:
        copy.body = copy.body[1:]
    bound = {arg.arg for arg in ast.walk(copy) if isinstance(arg, ast.arg)}
    bound |= {n.id for n in ast.walk(copy) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    numbers: dict[str, str] = {}
    for node in ast.walk(copy):
        if isinstance(node, ast.arg):
            node.annotation = None
            node.arg = numbers.setdefault(node.arg, f"v{len(numbers)}")
        elif isinstance(node, ast.Name) and node.id in bound:
            node.id = numbers.setdefault(node.id, f"v{len(numbers)}")
    plain = [ast.Assign([s.target], s.value) if is_annotated_value(s) else s for s in copy.body]  # type: ignore[attr-defined]
    return "\n".join(ast.dump(statement) for statement in plain)


def is_annotated_value(statement: ast.stmt) -> bool:
    """Whether a statement is ``name: type = value``."""
    return isinstance(statement, ast.AnnAssign) and statement.value is not None
