"""The README and the pages of docs/: their Python runs as it stands, and every command that they show exists."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mini_engine.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON = [
    (page.name, block) for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
]
COMMANDS = sorted(
    {
        command
        for page in PAGES
        for command in re.findall(r"^\$ mini-engine ((?:bench )?[a-z-]+)", page.read_text(), re.MULTILINE)
    }
)


def test_the_readme_is_short():
    assert len(PAGES[0].read_text().splitlines()) <= 150
    assert {name for name, _ in PYTHON} >= {"README.md", "USAGE.md"}


@pytest.mark.parametrize(("page", "block"), PYTHON)
def test_python_blocks_run(page, block, capsys):
    exec(compile(block, page, "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.count("\n") >= 2


def test_commands_exist():
    for command in COMMANDS:
        assert CliRunner().invoke(app, [*command.split(), "--help"]).exit_code == 0, command


def test_the_workflow_runs_the_commands_of_the_readme():
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert len(commands) == 3
    assert [command for command in commands if command not in PAGES[0].read_text()] == []


def test_a_development_container_takes_the_steps_of_the_readme():
    folder = ROOT / ".devcontainer"
    (step,) = re.findall(r"^RUN (.*)$", (folder / "Dockerfile").read_text(), re.MULTILINE)
    assert step.replace(" --no-cache-dir", "") in PAGES[0].read_text()
    settings = json.loads((folder / "devcontainer.json").read_text())
    install, *others = settings["postCreateCommand"].split(" && ")
    assert install.replace("'", '"').replace(",notebooks", "") in PAGES[0].read_text()
    assert others == ["python -m smoke start L1", "python -m smoke next"]
    assert (folder / settings["build"]["dockerfile"]).is_file()


def test_the_cpu_build_of_torch_is_one_that_the_project_takes():
    """A newer one would be replaced, by pip, by a build with CUDA."""
    (bound,) = re.findall(r'"torch>=[\d.]+,(<[\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert f'pip install "torch{bound}" --index-url' in PAGES[0].read_text()
