"""``python -m smoke export``: a course repository for students, without the solutions of later lessons.

Owns: what is copied, what is taken out, and the proof that it is gone. Must not know: how checks run.

The decision. Later lessons (after ``--upto``) lose everything that solves or tests them: their functions in
``mini_engine`` are emptied like a starter's, so that the engine still imports and says ``NotImplementedError: L3.B: …``
where it ends; texts, notebooks, checks, hints, pitfalls and wheats are absent; the manifest keeps their titles. A file
that earlier lessons call (``needed_earlier`` in the manifest) stays as it is.

The lessons up to ``--upto`` stay complete, reference included: the checks of a lesson run over the reference of all
other modules, and ``doctor``, ``diff``, ``mutants``, ``accept`` and the notebooks need it. ``--sealed`` is for a lesson
that is graded while students have the export: it empties lesson N too, keeps the earlier ones as its base, and gives up
those commands for it. Hiding a solution by compiling it would only look like hiding.

The README begins with how to work in the export, and its generated tables are made anew there. A link to what is not in
the export becomes plain words, and a picture that is not in it goes. ``work/`` is no longer ignored: it is what
students hand in, by a commit where they work in a clone.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from smoke.course.classroom import write_classroom
from smoke.course.forms import TELLING_NODES, normal_form
from smoke.course.forms import forms as forms_of
from smoke.course.starter import functions_of, starter_files
from smoke.framework.manifest import COURSE, ENGINE, ROOT, Lesson, load_manifest, parse_manifest

PARTS = ("README.md", "LICENSE", "pyproject.toml", ".gitignore", "docs", "lessons", "mini_engine", "smoke", "notebooks")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*_checkpoints", ".DS_Store", "*.egg-info", ".*_cache")
KEPT_KEYS = ("id", "slug", "title", "goal")
GENERATE = ("generate", "Once upon a time", "--max-new-tokens", "2")  # what the README begins with
COMMANDS = ('pip install -e ".[dev]" && python -m smoke start {lesson}', "python -m smoke watch")
FENCED = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([\w./-]+)(?:#[\w-]*)?\)")  # to a file; addresses have a colon
HOW_TO_WORK = """## How to work

You need Python 3.11 or newer. You do not need a GPU. This is the course up to {last}.

```console
$ {start}
$ {watch}
```

The first command installs the project and writes the files of {first} to `work/`. The second runs the checks of the
task where you are whenever you save one of them. On Linux torch comes with its CUDA libraries, about 2.5 GB. Without
a GPU take its CPU build first, 0.2 GB:
`pip install "torch<2.14" --index-url https://download.pytorch.org/whl/cpu`.

Read [the lesson]({page}). Write the functions that it names in `work/`: that folder is what you hand in.
`python -m smoke next` says where you are, and `python -m smoke hint` helps. `python -m smoke start` with the name of a
lesson begins it. All commands: [`lessons/README.md`](lessons/README.md).

"""
EMPTY = """`mini-engine generate` and the lines of Python below end with `NotImplementedError`, which names the lesson
that is missing: the functions of {lessons} are empty here.

"""
PUSHED = """Commit `work/` and push it. Each push runs the checks of every task, and GitHub shows the points.

"""


def export_command(
    folder: Annotated[Path, typer.Argument(help="Where to write the repository; must not exist, or be empty.")],
    upto: Annotated[str, typer.Option(help="The last lesson that students get.")],
    sealed: Annotated[
        bool, typer.Option("--sealed", help="Take out the solution of that lesson too; diff and mutants need it.")
    ] = False,
    classroom: Annotated[
        bool, typer.Option("--classroom", help="Add what GitHub Classroom runs: a test for each task, with its points.")
    ] = False,
    git: Annotated[bool, typer.Option("--git", help="Make it a git repository with one commit.")] = False,
) -> None:
    """Write a course repository without the solutions of later lessons."""
    emptied = export(folder, upto, sealed, classroom, git)
    names = ", ".join(lesson.id for lesson in emptied) or "none, all lessons are in it"
    typer.echo(f"written to {folder}; without the solutions of: {names}")
    typer.echo(f"try it:  cd {folder} && python -m smoke start L1 && python -m smoke watch")


def export(folder: Path, upto: str, sealed: bool, classroom: bool = False, git: bool = False) -> list[Lesson]:
    """Write the repository to ``folder`` and return the lessons whose solution is not in it.

    Raises ``ValueError`` for a folder that is not empty or an unknown lesson, and, leaving nothing behind, if a
    solution is still there.
    """
    if COURSE != ROOT:
        raise ValueError(f"export copies a checkout and {ROOT} is not one; run it in a clone of the repository")
    last = load_manifest().lesson(upto)
    later = [lesson for lesson in load_manifest().written if lesson.number > last.number]
    emptied = [last, *later] if sealed else later
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty; give a new folder")
    if folder.resolve().is_relative_to(ROOT) and folder.resolve().relative_to(ROOT).parts[0] in PARTS:
        raise ValueError(f"{folder} lies in what is copied; give a folder outside of it")
    try:
        copy_parts(folder)
        needed = [entry for lesson in later for entry in lesson.needed_earlier]
        kept = {file for file, user in needed if load_manifest().lesson(user).number <= last.number}
        for lesson in emptied:
            empty_lesson(folder, lesson, kept)
        for lesson in later:
            remove_lesson(folder, lesson)
        prove_absent(folder, emptied, kept)
        missing = emptied if emptied and not run(folder, "mini_engine", *GENERATE) else []
        tell_how_to_work(folder, last, missing, classroom)
        unlink_absent(folder)
        if not run(folder, "smoke", "sync"):
            raise ValueError("the tables of the exported lessons cannot be generated; try `python -m smoke sync` here")
        if classroom:
            write_classroom(folder, load_manifest().upto(last.id))
        if git:
            commit(folder, last)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return emptied


def copy_parts(folder: Path) -> None:
    """Copy what a student needs; tests of the course's own tools stay behind."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=LEFT_OUT)
        elif (ROOT / part).is_file():
            shutil.copyfile(ROOT / part, folder / part)
    ignored = folder / ".gitignore"
    ignored.write_text("".join(line for line in ignored.read_text().splitlines(True) if line.strip() != "/work/"))


def empty_lesson(folder: Path, lesson: Lesson, kept: set[str]) -> None:
    """Put starters in the place of a lesson's files but for those ``kept``, and drop what quotes the solution."""
    for file, text in starter_files(lesson).items():
        if file not in kept:
            (folder / "mini_engine" / file).write_text(text)
    for path in (folder / "smoke" / "bank" / lesson.folder).iterdir():
        if path.name != "hints.toml":
            path.unlink()


def remove_lesson(folder: Path, lesson: Lesson) -> None:
    """Remove a lesson's text, notebook, checks and hints, and leave its announcement in the manifest."""
    shutil.rmtree(folder / lesson.text_folder)
    for path in (folder / "notebooks").glob(f"{lesson.id}_*"):
        path.unlink()
    for part in ("checks", "bank"):
        shutil.rmtree(folder / "smoke" / part / lesson.folder)
    manifest = folder / "lessons" / "manifest.toml"
    manifest.write_text("".join(announced(block, lesson) for block in blocks(manifest.read_text())))
    parse_manifest(tomllib.loads(manifest.read_text()))


def blocks(text: str) -> Iterator[str]:
    """Yield the manifest in pieces that begin with ``[[lesson]]``, after what stands before the first."""
    yield from re.split(r"^(?=\[\[lesson\]\])", text, flags=re.MULTILINE)


def announced(block: str, lesson: Lesson) -> str:
    """Return a lesson's piece of the manifest without files and tasks; other pieces are returned as they are."""
    if f'\nid = "{lesson.id}"\n' not in block:
        return block
    kept = [line for line in block.partition("[[lesson.task]]")[0].splitlines() if line.split(" = ")[0] in KEPT_KEYS]
    return "\n".join(["[[lesson]]", *kept, "", ""])


def unlink_absent(folder: Path) -> None:
    """Turn links to files that are not in the export into plain words, and take out pictures that are not."""
    for file in folder.rglob("*.md"):

        def plain(link: re.Match[str], here: Path = file.parent) -> str:
            is_picture, words, target = link.groups()
            return link[0] if (here / target).exists() else "" if is_picture else words

        parts = FENCED.split(file.read_text())  # every other part is a block of code
        file.write_text("".join(part if number % 2 else LINK.sub(plain, part) for number, part in enumerate(parts)))


def commit(folder: Path, last: Lesson) -> None:
    """Make the folder a git repository with one commit. Raises ``ValueError`` if git does not."""
    author = ("-c", "user.name=The course", "-c", "user.email=course@localhost")
    words = ("commit", "--quiet", "--no-gpg-sign", "--no-verify", "-m", f"The course up to {last.id}")
    for arguments in (("init", "--quiet", "--initial-branch=main"), ("add", "--all"), (*author, *words)):
        try:
            done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ValueError(f"--git needs git, which cannot be started: {error}") from None
        if done.returncode:
            raise ValueError(f"git {arguments[0]} failed in the export: {done.stderr.strip()[-300:]}; leave out --git")


def run(folder: Path, *command: str) -> bool:
    """Run a module of the exported repository, with nothing of this one on the path; whether it succeeded."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    words = [sys.executable, "-m", *command]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, check=False).returncode == 0


def tell_how_to_work(folder: Path, last: Lesson, missing: list[Lesson], classroom: bool) -> None:
    """Put how students work in the export in the place of the README's first commands.

    ``missing`` are the lessons without which the engine generates nothing.
    """
    readme = folder / "README.md"
    first = load_manifest().written[0]
    start, watch = (command.format(lesson=first.id) for command in COMMANDS)
    text = HOW_TO_WORK.format(last=last.id, first=first.id, start=start, watch=watch, page=first.page())
    if missing:
        text += EMPTY.format(lessons=", ".join(lesson.id for lesson in missing))
    if classroom:
        text += PUSHED
    section = re.compile(r"^## Two commands\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
    changed, count = section.subn(lambda _: text, readme.read_text())
    if count != 1:
        raise ValueError(f"README.md has {count} sections named Two commands, not one")
    readme.write_text(changed)


def prove_absent(folder: Path, lessons: list[Lesson], kept: set[str]) -> None:
    """Raise ``ValueError`` if a function of ``lessons`` is still written out anywhere; those in ``kept`` files may."""
    forms: dict[str, str] = {}
    for lesson in lessons:
        for task in lesson.tasks:
            for function in (function for function in task.functions if function.file not in kept):
                node = functions_of(ast.parse((ENGINE / function.file).read_text()))[function.qualname]
                if sum(1 for _ in ast.walk(node)) >= TELLING_NODES:
                    forms[normal_form(node)] = str(function)
    for file in folder.rglob("*.py"):
        for form in forms_of(file.read_text()):
            if form in forms:
                raise ValueError(f"{file.relative_to(folder)} still holds the solution of {forms[form]}")
