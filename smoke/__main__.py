"""``python -m smoke``: the course's commands. Only the module of the command that is given is imported."""

import importlib
import os
import sys
from typing import NoReturn

import typer

from mini_engine.streams import check_streams
from smoke.commands import COMMANDS
from smoke.commands.exits import Exit
from smoke.commands.plain import plain_arguments

MODULES = {name: module for section in COMMANDS.values() for name, (module, _) in section.items()}


def main() -> None:
    """Run the command that the arguments name, and end."""
    with check_streams():
        words = sys.argv[1:]
        if not words or words[0] == "--help":
            print(overview())
        elif words[0] not in MODULES:
            fail(f"there is no command {words[0]!r}; there are {', '.join(MODULES)}", Exit.USAGE)
        else:
            run_command(words)
        sys.exit(Exit.PASSED)


def run_command(words: list[str]) -> None:
    """Import the command that ``words`` begin with and run it; its errors are one line."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback()(lambda: None)  # so that one command is a group, too
    importlib.import_module(f"smoke.commands.{MODULES[words[0]]}").register(app)
    try:
        run(app, words)
    except KeyboardInterrupt:  # threads that run candidates would not let Python end in order
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    except ValueError as error:  # a name or a path that does not exist, said in full
        fail(str(error), Exit.USAGE)
    except RuntimeError as error:
        fail(str(error), Exit.ENVIRONMENT)


def overview() -> str:
    """Return the list of commands."""
    lines = ["Usage: python -m smoke COMMAND [ARGS]...   (COMMAND --help says more)"]
    for title, section in COMMANDS.items():
        lines += ["", f"{title}:", *(f"  {name:<9} {words}" for name, (_, words) in section.items())]
    return "\n".join(lines)


def fail(message: str, status: Exit) -> NoReturn:
    """Print an error in one line and end."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)


def run(app: typer.Typer, words: list[str]) -> None:
    """Run a command: at once where its arguments are plain, else by Typer, which knows all forms and all errors."""
    (function,) = (info.callback for info in app.registered_commands if info.name == words[0])
    arguments = plain_arguments(function, words[1:]) if function else None
    if function and arguments is not None:
        function(**arguments)
    else:
        app()


if __name__ == "__main__":
    main()
