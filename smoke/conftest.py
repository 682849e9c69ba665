"""pytest's view of the suite: ``--engine FOLDER`` and the banner of a lesson that passed.

Owns: hooks. Must not know: checks.
"""

from collections import defaultdict
from pathlib import Path

import pytest

from mini_engine import overlay
from smoke.framework.manifest import load_manifest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--engine``."""
    parser.addoption(
        "--engine", metavar="FOLDER", default=None, help="lay the lesson files of FOLDER over the reference"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Install the overlay before anything imports the engine."""
    folder = config.getoption("--engine", default=None)
    if folder is not None:
        files = [file for lesson in load_manifest().written for file in lesson.files if (Path(folder) / file).is_file()]
        if not files:
            raise pytest.UsageError(f"--engine {folder} holds no lesson file; `python -m smoke start L1` makes one")
        overlay.install_overlay(Path(folder).resolve(), files)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line per lesson whose checks all ran and passed; the words come from the manifest."""
    passed: dict[str, int] = defaultdict(int)
    spoiled: set[str] = set()
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            name = getattr(report, "nodeid", "")
            if "test_lesson[" not in name:
                continue
            lesson_id = name.partition("[")[2].partition(".")[0]
            if outcome == "passed":
                passed[lesson_id] += 1
            elif outcome not in {"", "deselected"}:
                spoiled.add(lesson_id)
    from smoke.course.report import banner
    from smoke.framework.check import checks_of

    for lesson in load_manifest().written:
        if lesson.id not in spoiled and passed[lesson.id] == len(checks_of([lesson])):
            terminalreporter.write_line(banner(lesson, passed[lesson.id]))
