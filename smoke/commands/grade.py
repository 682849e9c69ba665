"""``grade``: a folder of submissions in, grades and reports out."""

import typer

from smoke.grade.command import grade_command


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("grade")(grade_command)
