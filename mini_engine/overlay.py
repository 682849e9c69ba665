"""Run the engine with modules of another folder in place of its own: a student's, over the reference.

Owns: the import rule "``work/attention/dense.py`` stands in for ``mini_engine.attention.dense``". Must not know:
lessons, checks, commands. Imports nothing of the engine: the rule comes before any other module is imported.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = "mini_engine"
ENTRY = "mini_engine.__main__"  # installs the rule, so it is imported before


class OverlayFinder(MetaPathFinder):
    """Finds ``mini_engine.attention.pool`` in ``FOLDER/attention/pool.py`` if that is one of ``files``."""

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        """Serve ``files``, relative to ``folder``; every other module comes from the engine."""
        self.folder = folder
        self.modules = {module_name(file): folder / file for file in files}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the overlay's spec of a module, or ``None`` to let the engine's own be found."""
        file = self.modules.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)


def module_name(file: str) -> str:
    """``attention/pool.py`` is ``mini_engine.attention.pool``."""
    return ".".join([PACKAGE, *Path(file).with_suffix("").parts])


def loaded_modules() -> list[str]:
    """Return the modules of the engine that are imported, apart from this one and the entry point."""
    return [name for name in sys.modules if name.startswith(PACKAGE + ".") and name not in (__name__, ENTRY)]


def install_overlay(folder: Path, files: Sequence[str]) -> None:
    """Put the finder first. Mutates ``sys.meta_path``.

    Raises ``ValueError`` if a module of the engine was imported before: it would go on using the engine's own ones.
    """
    loaded = loaded_modules()
    if loaded:
        raise ValueError(f"{loaded[0]} is imported already; an overlay has to come first, in a fresh process")
    sys.meta_path.insert(0, OverlayFinder(folder, files))


def installed_folder() -> Path | None:
    """Return the folder of the overlay in force, ``None`` without one."""
    return next((finder.folder for finder in sys.meta_path if isinstance(finder, OverlayFinder)), None)


def overlay_files(folder: Path) -> list[str]:
    """Return the files of ``folder`` that stand for a module of the engine. Raises ``ValueError`` if there is none."""
    engine = Path(__file__).parent
    found = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.py")) if folder.is_dir() else []
    files = [file for file in found if (engine / file).is_file()]
    if not files:
        raise ValueError(f"{folder} holds no module of the engine; `python -m smoke start L1` writes the first ones")
    return files
