"""The command line: ``mini-engine generate | chat | batch | cache | serve | route | play | bench``.

Generated text goes to standard output, everything else to standard error. Exit codes: 0 done, 1 a task of ``--engine``
is not written yet, or requests of ``batch`` have failed, 2 the input is at fault, or the output cannot be written, 130
Ctrl-C, 141 the reader has closed the output.

A command is imported when it runs: importing torch takes seconds, and help and version do not need it.
"""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from mini_engine import __version__

COMMANDS = {  # each is defined in the file of its name
    "generate": "Continue PROMPT and stream the text: greedily, or as the sampling options say.",
    "chat": "Talk with the model. /new forgets the conversation, /exit (or Ctrl-D) ends it.",
    "batch": "Answer every request of FILE, many at a time, one JSON line for each as it ends. Ctrl-C loses nothing.",
    "replay": "Run the requests of FILE's receipts again, alone, and compare to the bit. Exit code 1: one differs.",
    "cache": "Run PROMPTS with the radix cache and draw the tree: text, pages, uses and last use of every edge.",
    "serve": "Serve a model over HTTP, for every client of OpenAI's interface.",
    "route": "Serve a model from several processes: each request goes where its beginning was computed before.",
    "play": "Open a page in the browser on which one sees the engine think. Only this machine can reach it.",
    "families": "List the families of models that run, or say whether the checkpoint in FOLDER does, and why not.",
    "quantize": "Round the weights of a model once and write them into FOLDER, which loads as any checkpoint does.",
    "random-model": "Write a model with random weights in a real shape, to measure speed with.",
    "bench": "Measure the engine beside a peer, in the same process.",
}


class LazyCommands(TyperGroup):
    """Knows names and help of the commands, and imports the one that runs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name of the command that ``args`` begin with, the command, and the other arguments."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name in COMMANDS else command, rest


def load_command(name: str) -> Any:
    """Import a command and return it in the form that typer runs."""
    command = getattr(import_module(f"mini_engine.cli.{name.replace('-', '_')}"), name.replace("-", "_"))
    if not isinstance(command, typer.Typer):
        function = command
        command = typer.Typer(add_completion=False)
        command.command(name)(function)
    return get_command(command)


def show_version(asked: bool) -> None:
    """Print the version and end, if it was asked for."""
    if asked:
        typer.echo(f"mini-engine {__version__}")
        raise typer.Exit


app = typer.Typer(cls=LazyCommands, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Run a model with the engine of this course."""


def not_loaded() -> None:
    """Stand in the list of commands until the command itself is imported."""


for command_name, summary in COMMANDS.items():
    app.command(command_name, help=summary)(not_loaded)


if __name__ == "__main__":
    app()
