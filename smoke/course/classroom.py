"""GitHub Classroom's files for an exported course: a test for each task, with its points.

Owns: the workflow and the autograding file. Must not know: what is exported, how checks run.

Both have the same tests. Classroom takes its scores from the workflow; its older grader and other tools read
``autograding.json``, and the commands in it can be run by hand.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from smoke.framework.manifest import Lesson, Task

MINUTES = 15  # of one task's checks, the time to load torch included; the checks have limits of their own
HEAD = """name: Autograding Tests
on:
  - push
  - workflow_dispatch
permissions:
  checks: write
  actions: read
  contents: read
jobs:
  run-autograding-tests:
    runs-on: ubuntu-latest
    if: github.actor != 'github-classroom[bot]'
    steps:
      - name: Checkout code
        uses: actions/checkout@v4
      - name: Python
        uses: actions/setup-python@v5
        with:
          python-version: "3.12"
          cache: pip
          cache-dependency-path: pyproject.toml
      - name: Install the course
        run: pip install "torch<2.14" --index-url https://download.pytorch.org/whl/cpu && pip install -e ".[dev]"
"""
TEST = """      - name: "{name}"
        id: {id}
        uses: classroom-resources/autograding-command-grader@v1
        with:
          test-name: "{name}"
          command: {run}
          timeout: {minutes}
          max-score: {points}
"""
REPORTER = """      - name: Autograding Reporter
        uses: classroom-resources/autograding-grading-reporter@v1
        env:
{results}
        with:
          runners: {runners}
"""


def write_classroom(folder: Path, lessons: Sequence[Lesson]) -> None:
    """Write ``.github/workflows/classroom.yml`` and ``.github/classroom/autograding.json`` into a course's folder."""
    tasks = [task for lesson in lessons for task in lesson.core]
    files = {"workflows/classroom.yml": workflow(tasks), "classroom/autograding.json": autograding(tasks)}
    for name, text in files.items():
        file = folder / ".github" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def command(task: Task) -> str:
    """Return the command that a task's test runs: it succeeds if all of the task's checks pass."""
    return f"python -m smoke run {task.id}"


def runner(task: Task) -> str:
    """Return the name of a task's step in the workflow."""
    return task.id.lower().replace(".", "-")


def workflow(tasks: Sequence[Task]) -> str:
    """Return the workflow: a step for each task, and one that reports their points."""
    steps = [
        TEST.format(
            name=f"{task.id} {task.title}".replace('"', "'"),
            id=runner(task),
            run=command(task),
            minutes=MINUTES,
            points=task.points,
        )
        for task in tasks
    ]
    names = [runner(task) for task in tasks]
    results = [f'          {name.upper()}_RESULTS: "${{{{steps.{name}.outputs.result}}}}"' for name in names]
    return HEAD + "".join(steps) + REPORTER.format(results="\n".join(results), runners=",".join(names))


def autograding(tasks: Sequence[Task]) -> str:
    """Return the autograding file: a test for each task, which counts if its command succeeds."""
    tests = [
        {
            "name": f"{task.id} {task.title}",
            "setup": "",
            "run": command(task),
            "input": "",
            "output": "",
            "comparison": "included",
            "timeout": MINUTES,
            "points": task.points,
        }
        for task in tasks
    ]
    return json.dumps({"tests": tests}, indent=2, ensure_ascii=False) + "\n"
