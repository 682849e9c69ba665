"""The entry point of ``mini-engine`` and ``python -m mini_engine``.

It lays the folder of ``--engine`` over the engine before any module of the engine is imported.
"""

import argparse
import os
import sys
from pathlib import Path

from mini_engine.overlay import install_overlay, overlay_files


def main() -> None:
    """Run the command line, after laying the folder of ``--engine`` over the engine."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--engine", type=Path)
    folder = parser.parse_known_args()[0].engine  # the command line reads it again, and shows it in its help
    if folder is not None:
        try:
            install_overlay(folder.resolve(), overlay_files(folder.resolve()), fill=True)
        except ValueError as error:
            sys.exit(f"error: {error}")
    check_streams()
    from mini_engine.cli.app import app

    app()


def check_streams() -> None:
    """Read nothing where standard input is closed, and end with one line where the other streams are. Mutates sys."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  it is for the whole process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        print("error: standard output is closed; give it a terminal, a file or a pipe", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
