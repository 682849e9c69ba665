"""Whose code a lesson file is: which share of its functions is the reference's own, and imports that no lesson needs.

Owns: what can be said from the source of one submission alone (``likeness.py`` compares several). Must not know:
results. Nothing is executed.

A short function has few honest forms, so equal ones are reported and never punished. Importing an oracle is another
matter: a file that asks transformers for the answer has not computed it. Nor has one that reaches into the interpreter
that runs it: no lesson needs ``ctypes``, other frames or the table of modules.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from smoke.course.fingerprints import Prints, fingerprints, reference_marks
from smoke.course.forms import parse_any
from smoke.framework.manifest import ENGINE, Lesson
from smoke.grade.submissions import Submission

ORACLES = ("transformers", "smoke")
ORACLE_NAME = re.compile(rf"({'|'.join(ORACLES)})(\.\w+)*")
REMARKABLE = set(
    """
    gc importlib inspect multiprocessing os pickle runpy shutil signal site socket subprocess sys tempfile threading
    types urllib atexit builtins pathlib linecache traceback operator xgrammar llguidance outlines_core
    """.split()
)
# What only a file needs that looks for answers instead of computing them.
INSIDES = set("ctypes _ctypes cffi marshal _imp".split())
INSIDE_NAMES = set(
    """
    modules meta_path path_hooks path_importer_cache _getframe _current_frames get_objects get_referrers get_referents
    f_back f_globals f_builtins tb_frame gi_frame cr_frame __globals__ __closure__ cell_contents __subclasses__
    __builtins__ __loader__ __array_interface__ addaudithook settrace setprofile from_file
    """.split()
)
OWNERS = {"modules": "sys"}  # names that mean something only as an attribute of a module
COPIED = 0.6  # the share from which on a function is named
REMARKABLE_CALLS = {"eval", "exec", "compile", "open", "__import__", "globals", "setattr"}


@dataclass(frozen=True)
class Authorship:
    """What one lesson's files say. ``oracles`` and ``insides`` cost the points; the rest is for a reader."""

    oracles: tuple[str, ...] = ()
    insides: tuple[str, ...] = ()
    remarkable: tuple[str, ...] = ()
    copied: tuple[tuple[str, float], ...] = ()  # functions of which more than ``COPIED`` is the reference's, with it
    compared: int = 0
    share: float = 0.0  # of all compared functions

    @property
    def withheld(self) -> str:
        """Why this lesson earns no points, or nothing."""
        return f"points withheld: {'; '.join(self.reasons)}" if self.reasons else ""

    @property
    def reasons(self) -> tuple[str, ...]:
        """The findings that cost the points."""
        return (*self.oracles, *self.insides)

    def notes(self) -> list[str]:
        """Return one sentence per finding."""
        notes = [*self.reasons, *self.remarkable]
        if self.copied:
            shown = ", ".join(f"{name} {share:.0%}" for name, share in self.copied)
            notes.append(f"{self.share:.0%} of {self.compared} longer functions is the reference's own: {shown}")
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
    insides: list[str] = []
    remarkable: list[str] = []
    for file in lesson.files:
        tree = parse_any(submission.files.get(file, ""))
        for name in imported(tree):
            if ORACLE_NAME.fullmatch(name):
                oracles.append(f"{file} imports {name}")
            elif name.partition(".")[0] in INSIDES:
                insides.append(f"{file} imports {name}")
            elif name.partition(".")[0] in REMARKABLE:
                remarkable.append(f"{file} imports {name}")
        oracles += [f"{file} holds the name {name!r} as a text" for name in oracle_texts(tree)]
        insides += [f"{file} uses {name}" for name in inside_names(tree)]
        calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        remarkable += [f"{file} calls {name}" for name in sorted(calls & REMARKABLE_CALLS)]
    own = {name: each for file in lesson.files for name, each in own_functions(submission, lesson, file).items()}
    inside = {name: each.nodes_in(reference_marks()) for name, each in own.items()}
    copied = tuple(
        (name, nodes / own[name].nodes) for name, nodes in inside.items() if nodes > COPIED * own[name].nodes
    )
    share = sum(inside.values()) / max(sum(each.nodes for each in own.values()), 1)
    return Authorship(distinct(oracles), distinct(insides), distinct(remarkable), copied, len(own), share)


def distinct(found: list[str]) -> tuple[str, ...]:
    """Return the findings once each, in their order."""
    return tuple(dict.fromkeys(found))


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


def inside_names(tree: ast.Module) -> Iterator[str]:
    """Yield every name of the interpreter's insides, as an attribute, imported, or as a text and nothing besides."""
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    called = {alias.asname or alias.name: alias.name for alias in aliases}  # modules by the names they have here
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            owner = OWNERS.get(node.attr)
            if owner is None or (isinstance(node.value, ast.Name) and called.get(node.value.id) == owner):
                names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names if OWNERS.get(alias.name, node.module) == node.module]
        elif isinstance(node, ast.Name):
            names = [node.id] if node.id.startswith("__") else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if OWNERS.get(node.value) in (None, *called.values()) else []
        yield from (name for name in names if name in INSIDE_NAMES)


def own_functions(submission: Submission, lesson: Lesson, file: str) -> dict[str, Prints]:
    """Return the longer functions that are to be written in a file, and any more that its student wrote."""
    found = fingerprints(submission.files.get(file, ""))
    given = set(fingerprints((ENGINE / file).read_text()))
    tasks = {f.qualname for task in lesson.tasks for f in task.functions if f.file == file}
    return {name: each for name, each in found.items() if name in tasks or name not in given}
