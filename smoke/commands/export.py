"""``export``: a course repository for students."""

import typer

from smoke.course.export import export_command


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("export")(export_command)
