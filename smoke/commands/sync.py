"""``sync``: the generated tables in the lessons and in the README."""

from typing import Annotated

import typer

from smoke.commands.exits import Exit, stop
from smoke.course.sync import stale_files
from smoke.framework.manifest import ROOT


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sync")(sync_command)


def sync_command(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if a table is out of date.")] = False,
) -> None:
    """Write the tables that come from the manifest, the pitfall bank and the checks."""
    stale = stale_files()
    for file, text in stale.items():
        if not check:
            file.write_text(text)
        typer.echo(f"{'out of date' if check else 'written'}: {file.relative_to(ROOT)}")
    if not stale:
        typer.echo("every generated table is up to date")
    stop(Exit.CHECK_FAILED if check and stale else Exit.PASSED)
