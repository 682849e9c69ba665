"""``python -m smoke export``: the copy can be worked in, and later solutions are not in it."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from markdown_it import MarkdownIt

from smoke.course.export import export, prove_absent
from smoke.course.starter import functions_of
from smoke.framework.manifest import ENGINE, ROOT, load_manifest


def run(folder: Path, *arguments: str, module: str = "smoke") -> subprocess.CompletedProcess[str]:
    """Run a command of the exported repository, with nothing of this one on the path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-m", module, *arguments]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "course"
    export(folder, "L1", sealed=False)
    return folder


@pytest.fixture(scope="module")
def classroom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "classroom"
    export(folder, "L2", sealed=False, classroom=True, git=True)
    return folder


def bodies(folder: Path, lesson_id: str) -> dict[str, str]:
    """Return the last statement of every function of a lesson in an exported engine."""
    found = {}
    for task in load_manifest().lesson(lesson_id).tasks:
        for function in task.functions:
            tree = ast.parse((folder / "mini_engine" / function.file).read_text())
            found[str(function)] = ast.unparse(functions_of(tree)[function.qualname].body[-1])
    return found


@pytest.mark.slow
def test_lesson_one_can_be_worked_on(first: Path) -> None:
    """Red for the right reason, and green with a solution: all by the exported folder's own commands."""
    assert run(first, "run", "L2").returncode == 2, "a lesson that is not there is a wrong question"
    started = run(first, "start", "L1")
    assert started.returncode == 0, started.stderr
    red = run(first, "run", "L1.A")
    assert red.returncode == 1, red.stdout + red.stderr
    assert "to do" in red.stdout
    for file in load_manifest().lesson("L1").files:
        (first / "work" / file).write_text((ENGINE / file).read_text())
    green = run(first, "run", "L1.G")  # which builds on all other tasks
    assert green.returncode == 0, green.stdout + green.stderr


def test_later_lessons_are_gone(first: Path) -> None:
    for lesson_id in ("L2", "L3"):
        assert all(body.startswith("raise NotImplementedError") for body in bodies(first, lesson_id).values())
        assert not (first / load_manifest().lesson(lesson_id).text_file).exists()
        left = [path for path in first.rglob(f"{lesson_id}*") if path.is_file()]
        left += list((first / "smoke").rglob(lesson_id.lower()))
        assert left == []
    specs = {path.name for path in (ROOT / "smoke" / "checks").glob("l[2-9]/spec_*.py")}
    assert len(specs) > 4
    assert not [path for path in first.rglob("spec_*.py") if path.name in specs], "nor is what their checks expect"
    assert not any("raise NotImplementedError" in body for body in bodies(first, "L1").values())


def test_no_line_of_a_later_solution_is_left(first: Path) -> None:
    """Besides the function forms that the command itself compares: a telling line of each later lesson, as text."""
    marks = {}
    for lesson in load_manifest().written[1:]:
        for task in lesson.tasks:
            for function in task.functions:
                text = (ENGINE / function.file).read_text()
                node = functions_of(ast.parse(text))[function.qualname]
                lines = [line.strip() for line in text.splitlines()[node.body[-1].lineno - 1 : node.end_lineno]]
                longest = max(lines, key=len)
                if len(longest) > 60:
                    marks[longest] = str(function)
    assert len(marks) >= 4, "the test must look for something"
    texts = {path: path.read_text() for path in first.rglob("*") if path.suffix in (".py", ".toml", ".md", ".ipynb")}
    leaks = [(str(path), marks[mark]) for path, text in texts.items() for mark in marks if mark in text]
    assert leaks == []


def test_the_readme_says_how_to_work(first: Path) -> None:
    """``generate`` needs later lessons; what stands there instead is run by ``test_lesson_one_can_be_worked_on``."""
    section = (first / "README.md").read_text().partition("## How to work\n")[2].partition("\n## ")[0]
    commands = [line.removeprefix("$ ") for line in section.splitlines() if line.startswith("$ ")]
    assert commands == ['pip install -e ".[dev]" && python -m smoke start L1', "python -m smoke watch"]
    assert "L2, L3, L4, L5, L6, L7, L8, L9, L10, L11, L12 are empty here" in section
    assert "[the lesson](lessons/L1_model/README.md)" in section
    assert "that folder is what you hand in" in section
    assert "/work/" not in (first / ".gitignore").read_text(), "what is handed in can be committed"
    assert "GitHub" not in section


@pytest.mark.slow
def test_the_generated_tables_are_current(first: Path) -> None:
    done = run(first, "sync", "--check")
    assert done.returncode == 0, done.stdout


def broken_links(folder: Path) -> list[str]:
    """Return the links and pictures of pages and notebooks whose file is not there, read by a Markdown parser."""
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    found = []
    for file in (*folder.rglob("*.md"), *folder.rglob("*.ipynb")):
        text = file.read_text()
        if file.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        for token in parser.parse(text):
            for each in token.children or ():
                target = str(each.attrs.get("href") or each.attrs.get("src") or "").partition("#")[0]
                if target and ":" not in target and not (file.parent / unquote(target)).exists():
                    found.append(f"{file.relative_to(folder)}: {target}")
            found += [
                f"{file.name}: {m}"
                for m in re.findall(r'src="(?![a-z]+:)([^"]+)"', token.content)
                if token.type == "html_block" and not (file.parent / m).exists()
            ]
    return found


def test_no_link_and_no_picture_is_broken(first: Path) -> None:
    assert "](tests/unit/" in (ROOT / "README.md").read_text()
    assert "](lessons/L5_scheduler/picture.png)" in (ROOT / "README.md").read_text()
    assert broken_links(first) == []
    assert "`test_engine.py` for" in (first / "README.md").read_text(), "the words stay"
    assert "L1_model/README.md" in (first / "lessons" / "README.md").read_text()


def test_github_classroom_has_a_test_for_each_task_with_its_points(classroom: Path) -> None:
    """The workflow and the older file say the same, and the reporter is told of every step."""
    tasks = [task for lesson in load_manifest().upto("L2") for task in lesson.core]
    tests = json.loads((classroom / ".github/classroom/autograding.json").read_text())["tests"]
    wanted = [(f"{task.id} {task.title}", f"python -m smoke run {task.id}", task.points) for task in tasks]
    assert [(test["name"], test["run"], test["points"]) for test in tests] == wanted
    workflow = yaml.safe_load((classroom / ".github/workflows/classroom.yml").read_text())
    (job,) = workflow["jobs"].values()
    steps = {step["id"]: step["with"] for step in job["steps"] if "id" in step}
    assert [(step["test-name"], step["command"], step["max-score"]) for step in steps.values()] == wanted
    reporter = job["steps"][-1]
    assert reporter["with"]["runners"].split(",") == list(steps)
    assert reporter["env"] == {f"{name.upper()}_RESULTS": f"${{{{steps.{name}.outputs.result}}}}" for name in steps}


def test_git_has_one_commit_of_everything(classroom: Path) -> None:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=classroom, capture_output=True, text=True, check=True).stdout

    assert git("log", "--format=%s").splitlines() == ["The course up to L2"]
    assert git("status", "--porcelain") == ""
    files = set(git("ls-files").splitlines())
    assert {"README.md", ".github/workflows/classroom.yml", "mini_engine/tiny/model/model.safetensors"} <= files
    (classroom / "work").mkdir()
    (classroom / "work" / "model.py").touch()
    assert "work/" in git("status", "--porcelain"), "a student can commit it"


@pytest.mark.slow
def test_classrooms_commands_earn_the_points(classroom: Path) -> None:
    """By hand, as its runner does: each command in a shell, and its points if it succeeds."""
    assert run(classroom, "start", "L2").returncode == 0
    for file in load_manifest().lesson("L2").files[:1]:
        (classroom / "work" / file).write_text((ENGINE / file).read_text())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    earned = {}
    for test in json.loads((classroom / ".github/classroom/autograding.json").read_text())["tests"]:
        if "L2." in test["run"]:
            done = subprocess.run(
                test["run"], shell=True, cwd=classroom, env=environment, timeout=60 * test["timeout"], check=False
            )
            earned[test["run"].split()[-1]] = test["points"] if done.returncode == 0 else 0
    assert earned["L2.A"] == load_manifest().task("L2.A").points
    assert [points for name, points in earned.items() if name != "L2.A"] == [0] * (len(earned) - 1)


@pytest.mark.slow
def test_sealed_takes_out_the_last_lesson_too(tmp_path: Path) -> None:
    names = [lesson.id for lesson in export(tmp_path / "course", "L2", sealed=True)]
    written = [lesson.id for lesson in load_manifest().written]
    assert names == written[1:]
    assert all(body.startswith("raise NotImplementedError") for body in bodies(tmp_path / "course", "L2").values())
    assert not any("raise NotImplementedError" in body for body in bodies(tmp_path / "course", "L1").values())
    assert (tmp_path / "course" / "lessons" / "L2_attention" / "README.md").exists()
    assert not (tmp_path / "course" / "smoke" / "bank" / "l2" / "heap_allocator.py").exists(), "a wheat is a solution"


@pytest.mark.slow
def test_what_an_earlier_lesson_calls_stays(tmp_path: Path) -> None:
    """L5's scheduler calls a file of L6: without it an export up to L5 could not run a single request."""
    names = [lesson.id for lesson in export(tmp_path / "course", "L5", sealed=False)]
    assert "L6" in names
    sharing = "scheduler/sharing.py"
    assert (tmp_path / "course" / "mini_engine" / sharing).read_text() == (ENGINE / sharing).read_text()
    assert "NotImplementedError" in (tmp_path / "course" / "mini_engine" / "radix_cache.py").read_text()
    file = tmp_path / "requests.txt"
    file.write_text("Once upon a time")
    done = run(tmp_path / "course", "batch", str(file), "--max-new-tokens", "3", module="mini_engine")
    assert done.returncode == 0, done.stderr
    assert '"finish_reason": "length"' in done.stdout


def test_a_leak_is_noticed(first: Path) -> None:
    """The proof must be able to fail: a renamed copy of a solution, in a file that no reader would look into."""
    text = (ENGINE / "driver.py").read_text().replace("prompt_ids", "words").replace("page", "sheet")
    leak = first / "smoke" / "other.py"
    leak.write_text(text)
    try:
        with pytest.raises(ValueError, match=r"smoke/other.py still holds the solution of driver:"):
            prove_absent(first, [load_manifest().lesson("L3")], set())
    finally:
        leak.unlink()


def test_refuses_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        export(tmp_path, "L1", sealed=False)
    assert (tmp_path / "own.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="L1, L2, L3"):
        export(tmp_path / "new", "L99", sealed=False)
