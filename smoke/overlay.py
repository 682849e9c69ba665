"""The import finder that lays a candidate's files over ``mini_engine``.

Owns: which file a module comes from. Must not know: checks. It has to stand before ``mini_engine`` is imported.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = "mini_engine"


class OverlayFinder(MetaPathFinder):
    """Finds ``mini_engine.attention.pool`` in ``FOLDER/attention/pool.py`` if that is one of ``files``."""

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        """Serve ``files``, relative to ``folder``; every other module comes from the reference."""
        self.modules = {module_name(file): folder / file for file in files}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the overlay's spec of a module, or ``None`` to let the reference's be found."""
        file = self.modules.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)


def module_name(file: str) -> str:
    """``attention/pool.py`` is ``mini_engine.attention.pool``."""
    return ".".join([PACKAGE, *Path(file).with_suffix("").parts])


def install(folder: Path, files: Sequence[str]) -> None:
    """Put the finder first. Raises ``RuntimeError`` if ``mini_engine`` was imported before: then it would be mixed."""
    loaded = [name for name in sys.modules if name == PACKAGE or name.startswith(PACKAGE + ".")]
    if loaded:
        raise RuntimeError(f"{loaded[0]} is imported already; an overlay has to come first")
    sys.meta_path.insert(0, OverlayFinder(folder, files))
