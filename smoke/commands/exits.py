"""What the exit statuses of ``python -m smoke`` mean."""

from enum import IntEnum
from typing import NoReturn

import typer


class Exit(IntEnum):
    """Exit statuses; a script can tell a wrong answer from a wrong question."""

    PASSED = 0
    CHECK_FAILED = 1
    USAGE = 2
    ENVIRONMENT = 3
    CANNOT_IMPORT = 4


def stop(status: Exit, message: str = "") -> NoReturn:
    """Print ``message`` to stderr, if there is one, and end the command."""
    if message:
        typer.echo(message, err=True)
    raise typer.Exit(int(status))
