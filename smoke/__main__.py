"""``python -m smoke``: the course's commands. Every file in ``smoke/commands`` adds its own."""

import importlib
import pkgutil
import sys

import typer

from smoke import commands
from smoke.commands.exits import Exit

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def smoke() -> None:
    """Work through the lessons: start one, run its checks, take a hint, see where you stand."""


def main() -> None:
    """Collect the commands and run one."""
    for module in sorted(info.name for info in pkgutil.iter_modules(commands.__path__)):
        importlib.import_module(f"smoke.commands.{module}").register(app)
    try:
        app()
    except ValueError as error:  # a name or a path that does not exist, said in full
        typer.echo(f"error: {error}", err=True)
        sys.exit(Exit.USAGE)
    except RuntimeError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(Exit.ENVIRONMENT)


if __name__ == "__main__":
    main()
