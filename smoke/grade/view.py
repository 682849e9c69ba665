"""The engine as a candidate's process finds it: what its lesson needs, compiled, and nothing that it is graded on.

Owns: which modules those are, and the folder that holds them. Must not know: how a process is confined to it.

A view has no file that the candidate hands in and no lesson after its own, except modules that earlier ones call. Its
modules are compiled ahead, so no source lies there. Data of the embedded model is linked.
"""

import ast
import importlib.util
import marshal
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from mini_engine import overlay
from smoke.framework.manifest import ENGINE, SUITE, Lesson, load_manifest
from smoke.framework.parsing import parse

DATA = "tiny/model"
HEADER_BYTES = 12  # of a compiled file, after the magic number: no flags, no time, no size


def write_view(folder: Path, lesson: Lesson, replaced: Iterable[str]) -> Path:
    """Write the view of one lesson, without the files ``replaced``, and return its package's folder."""
    package = folder / overlay.PACKAGE
    for module in sorted(modules_needed(lesson)):
        file = module_file(module)
        name = file.relative_to(ENGINE)
        if name.as_posix() in set(replaced):
            continue
        target = package / name.with_suffix(".pyc")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(compiled(file))
    (package / DATA).parent.mkdir(parents=True, exist_ok=True)
    (package / DATA).symlink_to(ENGINE / DATA)
    return package


@cache
def compiled(file: Path) -> bytes:
    """Compile a file under its short name, without the folder that it lies in."""
    code = compile(file.read_text(), file.relative_to(ENGINE.parent).as_posix(), "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + bytes(HEADER_BYTES) + marshal.dumps(code)


@cache
def modules_needed(lesson: Lesson) -> frozenset[str]:
    """Return every module of the engine that files or checks of lessons up to ``lesson`` import, on whatever way.

    A module that code names as a text counts if a lesson up to this one has files in the same folder.
    """
    lessons = load_manifest().upto(lesson.id)
    files = [ENGINE / file for earlier in lessons for file in earlier.files]
    folders = {file.parent for file in files}
    waiting = [overlay.PACKAGE, *(overlay.module_name(file) for earlier in lessons for file in earlier.files)]
    for earlier in lessons:
        waiting += [name for file in (SUITE / "checks" / earlier.folder).glob("*.py") for name in imports(file)]
    found: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module not in found:
            found |= set(with_packages(module))
            for file in map(module_file, with_packages(module)):
                waiting += [*imports(file), *(name for name in named(file) if module_file(name).parent in folders)]
    return frozenset(found)


def with_packages(module: str) -> Iterator[str]:
    """Yield a module and every package around it."""
    parts = module.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


@cache
def imports(file: Path) -> Sequence[str]:
    """Return the engine's modules that a file imports anywhere, in functions too."""
    names: list[str] = []
    for node in walk_code(parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
            names.append(node.value.partition(":")[0])  # such as "mini_engine.grammar.fsm:FsmBackend"
    return modules_among(names)


@cache
def named(file: Path) -> Sequence[str]:
    """Return the engine's modules that a file names as a text."""
    nodes = walk_code(parse(file.read_text()))
    return modules_among(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))


def modules_among(names: Iterable[str]) -> Sequence[str]:
    """Return those of ``names`` that are modules of the engine."""
    own = [name for name in names if re.fullmatch(rf"{overlay.PACKAGE}(\.\w+)+", name)]
    return tuple(dict.fromkeys(name for name in own if module_file(name).is_file()))


def walk_code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a file, without what is there for a type checker alone."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from walk_code(child)


def module_file(module: str) -> Path:
    """Return the file of a module of the engine; it need not exist."""
    path = ENGINE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
