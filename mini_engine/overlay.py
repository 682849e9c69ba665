"""Run the engine with modules of another folder in place of its own: a student's, over the reference.

``work/attention/dense.py`` stands in for ``mini_engine.attention.dense``. The rule has to come before any module of the
engine is imported, so this module imports none.
"""

import ast
import sys
from collections.abc import Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

PACKAGE = "mini_engine"
FIRST = (__name__, "mini_engine.__main__", "mini_engine.streams")  # what installs the rule is imported before
REFERENCE = Path(__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef


class OverlayFinder(MetaPathFinder):
    """Finds ``mini_engine.attention.pool`` in ``FOLDER/attention/pool.py`` if that is one of ``files``."""

    def __init__(self, folder: Path, files: Sequence[str], fill: bool = False, judged: Collection[str] = ()) -> None:
        """Serve ``files``, relative to ``folder``; every other module comes from the engine.

        ``fill`` and ``judged``: see ``install_overlay``.
        """
        self.folder = folder
        self.fill = fill
        self.judged = judged
        self.files = {module_name(file): file for file in files}
        self.filled = set[str]()  # the tasks that are not written yet, in the modules imported so far

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the overlay's spec of a module, or ``None`` to let the engine's own be found."""
        file = self.files.get(fullname)
        if file is None:
            return None
        own = self.folder / file
        loader = FillingLoader(fullname, own, REFERENCE / file, self) if self.fill else None
        return spec_from_file_location(fullname, own, loader=loader)


class FillingLoader(SourceFileLoader):
    """Loads a student's module in which functions that are not written yet have the reference's bodies."""

    def __init__(self, fullname: str, own: Path, reference: Path, finder: OverlayFinder) -> None:
        """Load ``own``; tell ``finder`` which tasks came from ``reference``."""
        super().__init__(fullname, str(own))
        self.own = own
        self.reference = reference
        self.finder = finder

    def get_code(self, fullname: str) -> CodeType:
        """Return the code. It is compiled anew: as bytecode in the cache it would be taken for the student's file."""
        tree = ast.parse(self.own.read_bytes(), str(self.own))
        reference = ast.parse(self.reference.read_bytes())
        missing = functions_of(reference).keys() - functions_of(tree).keys()
        tasks = fill(tree, reference, self.finder.judged)
        self.finder.filled |= set(tasks.values())
        code: CodeType = compile(tree, str(self.own), "exec")
        return attributed(code, {*missing, *tasks}, str(self.reference))


def fill(own: ast.Module, reference: ast.Module, judged: Collection[str] = ()) -> dict[str, str]:
    """Put the functions of ``reference`` in the place of open ones of ``own``; return their tasks. Mutates ``own``."""
    mine, theirs = functions_of(own), functions_of(reference)
    tasks = {name: open_task(node) for name, node in mine.items() if name in theirs and not open_task(theirs[name])}
    still_open = {name: task for name, task in tasks.items() if task is not None and task not in judged}
    for name in still_open:
        vars(mine[name]).update(vars(theirs[name]))
    if still_open:  # what the bodies use
        imports = [node for node in reference.body if isinstance(node, ast.Import | ast.ImportFrom)]
        helpers = [node for name, node in theirs.items() if "." not in name and name not in mine]
        own.body = [*imports, *own.body, *helpers]
    return still_open


def attributed(code: CodeType, names: Collection[str], file: str) -> CodeType:
    """Return ``code`` with the functions ``names`` said to lie in ``file``: tracebacks and Triton read lines there."""
    constants = (attributed(each, names, file) if isinstance(each, CodeType) else each for each in code.co_consts)
    is_taken = code.co_qualname.partition(".<locals>")[0] in names
    return code.replace(co_consts=tuple(constants), co_filename=file if is_taken else code.co_filename)


def functions_of(tree: ast.Module) -> dict[str, Function]:
    """Return the functions of a module and the methods of its classes by their qualified names."""
    found = {node.name: node for node in tree.body if isinstance(node, Function)}
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            found |= {f"{owner.name}.{node.name}": node for node in owner.body if isinstance(node, Function)}
    return found


def open_task(node: Function) -> str | None:
    """Return "L3.A" for a function that a starter left open: ``raise NotImplementedError("L3.A: One step")``."""
    match node.body[1:] if ast.get_docstring(node) is not None else node.body:
        case [ast.Raise(exc=ast.Call(func=ast.Name(id="NotImplementedError"), args=[ast.Constant(value=str(text))]))]:
            return text.partition(":")[0]
    return None


def module_name(file: str) -> str:
    """``attention/pool.py`` is ``mini_engine.attention.pool``."""
    return ".".join([PACKAGE, *Path(file).with_suffix("").parts])


def loaded_modules() -> list[str]:
    """Return the modules of the engine that are imported, apart from those that are imported first."""
    return [name for name in sys.modules if name.startswith(PACKAGE + ".") and name not in FIRST]


def install_overlay(
    folder: Path, files: Sequence[str], fill: bool = False, judged: Collection[str] = ()
) -> OverlayFinder:
    """Put a finder first and return it. Mutates ``sys.meta_path``.

    ``fill``: what is not written yet is the reference's, except for the tasks ``judged``, which stay open.
    Raises ``ValueError`` if a module of the engine was imported before: it would go on using the engine's own ones.
    """
    loaded = loaded_modules()
    if loaded:
        raise ValueError(f"{loaded[0]} is imported already; an overlay has to come first, in a fresh process")
    finder = OverlayFinder(folder, files, fill, judged)
    sys.meta_path.insert(0, finder)
    return finder


def installed() -> OverlayFinder | None:
    """Return the overlay in force, ``None`` without one."""
    return next((finder for finder in sys.meta_path if isinstance(finder, OverlayFinder)), None)


def overlay_files(folder: Path) -> list[str]:
    """Return the files of ``folder`` that stand for a module of the engine. Raises ``ValueError`` if there is none."""
    found = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.py")) if folder.is_dir() else []
    files = [file for file in found if (REFERENCE / file).is_file()]
    if not files:
        raise ValueError(f"{folder} holds no module of the engine; `python -m smoke start L1` writes the first ones")
    return files
