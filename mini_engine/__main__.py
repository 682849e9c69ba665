"""The entry point of ``mini-engine`` and ``python -m mini_engine``.

It lays the folder of ``--engine`` over the engine before any module of the engine is imported.
"""

import argparse
import os
import sys
from pathlib import Path

from mini_engine.overlay import install_overlay, overlay_files
from mini_engine.streams import check_streams


def main() -> None:
    """Run the command line, after laying the folder of ``--engine`` over the engine."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch asks for huge pages, from which weights are read faster
    with check_streams():
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--engine", type=Path)
        folder = parser.parse_known_args()[0].engine  # the command line reads it again, and shows it in its help
        if folder is not None:
            try:
                install_overlay(folder.resolve(), overlay_files(folder.resolve()), fill=True)
            except ValueError as error:
                sys.exit(f"error: {error}")
        from mini_engine.cli.app import app

        app()


if __name__ == "__main__":
    main()
