"""The README: its Python runs as it stands, and every command that it shows exists."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mini_engine.cli.app import app

README = Path(__file__).resolve().parent.parent / "README.md"
PYTHON = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
COMMANDS = sorted(set(re.findall(r"^\$ mini-engine ((?:bench )?[a-z]+)", README.read_text(), re.MULTILINE)))


def test_the_readme_shows_python():
    assert len(PYTHON) >= 1


@pytest.mark.parametrize("block", PYTHON)
def test_python_blocks_run(block, capsys):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.count("\n") == 3


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command):
    assert CliRunner().invoke(app, [*command.split(), "--help"]).exit_code == 0
