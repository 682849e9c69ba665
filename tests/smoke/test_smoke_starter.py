"""Starters are cut out of the reference by line ranges; whatever is odd about the reference must stop the cut."""

import ast
import re
import shutil

import pytest

from smoke.course.starter import empty, functions_of, starter_files, task_starter
from smoke.framework.manifest import ENGINE, SUITE, FunctionName, Task, load_manifest

LESSONS = load_manifest().written
TASKS = load_manifest().tasks


def task(*functions, task_id="L2.C"):
    return Task(task_id, "Packing", 1, 5, tuple(FunctionName.parse(f) for f in functions), ())


@pytest.fixture
def engine(tmp_path):
    """Return a copy of the engine whose metadata module a test may change."""
    folder = tmp_path / "mini_engine"
    shutil.copytree(ENGINE, folder, ignore=shutil.ignore_patterns("tiny", "__pycache__"))
    return folder


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.id)
def test_a_starter_compiles_and_keeps_every_signature_and_docstring(lesson):
    emptied = {str(function) for task in lesson.tasks for function in task.functions}
    for file, text in starter_files(lesson).items():
        before = functions_of(ast.parse((ENGINE / file).read_text()))
        after = functions_of(ast.parse(text))
        for name, node in after.items():
            assert ast.unparse(node.args) == ast.unparse(before[name].args)
            assert ast.get_docstring(node) == ast.get_docstring(before[name])
            is_emptied = f"{file[:-3].replace('/', '.')}:{name}" in emptied
            assert ("raise NotImplementedError" in ast.unparse(node)) == is_emptied


@pytest.mark.parametrize("one", TASKS[::3], ids=lambda task: task.id)
def test_a_task_starter_leaves_all_other_functions_alone(one):
    for file, text in task_starter(one).items():
        names = {function.qualname for function in one.functions if function.file == file}
        before = functions_of(ast.parse((ENGINE / file).read_text()))
        after = functions_of(ast.parse(text))
        same = {name for name, node in after.items() if ast.unparse(node) == ast.unparse(before[name])}
        assert set(after) - same == names


def test_comments_outside_an_emptied_body_stay_and_those_inside_go():
    text = task_starter(load_manifest().task("L3.B"))["driver.py"]
    assert "The last token is never fed back" not in text  # a comment inside the solution
    text = task_starter(load_manifest().task("L2.A"))["attention/allocator.py"]
    assert "only asked" in text  # a comment of the constructor
    assert "check_chunks" in (ENGINE / "attention/metadata.py").read_text()
    assert "check_chunks" not in starter_files(load_manifest().lesson("L2"))["attention/metadata.py"], (
        "a helper goes too"
    )


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.id)
def test_nothing_that_a_student_reads_names_a_helper_that_is_dropped(lesson):
    """Neither page nor hints nor what is left of the files: who calls it from there meets a ``NameError``."""
    files = starter_files(lesson)
    kept = {name for text in files.values() for name in functions_of(ast.parse(text))}
    dropped = {name for file in files for name in functions_of(ast.parse((ENGINE / file).read_text()))} - kept
    hints = (SUITE / "bank" / lesson.folder / "hints.toml").read_text()
    for text in (*(page.read_text() for page in lesson.pages()), hints, *files.values()):
        assert not dropped & set(re.findall(r"(?<![\w.])\w+", text))


def test_a_helper_that_others_use_stays(engine):
    file = engine / "attention/metadata.py"
    file.write_text(file.read_text() + "\n\ndef room(pages: int) -> None:\n    check_chunks([], pages)\n")
    text = empty("attention/metadata.py", [task("attention.metadata:pack_batch")], engine)
    assert "def check_chunks" in text


def test_an_unknown_function_is_refused():
    with pytest.raises(ValueError, match="pack_bunch"):
        empty("attention/metadata.py", [task("attention.metadata:pack_bunch")])


@pytest.mark.parametrize("text", ["def odd(x: int) -> int: return x + 1", 'def odd(x: int) -> int:\n    """Say."""'])
def test_a_body_on_the_line_of_its_signature_or_of_nothing_but_a_docstring_is_refused(engine, text):
    file = engine / "attention/metadata.py"
    file.write_text(f"{file.read_text()}\n\n{text}\n")
    with pytest.raises(ValueError, match="odd"):
        empty("attention/metadata.py", [task("attention.metadata:odd")], engine)


def test_a_leaked_helper_is_refused(monkeypatch):
    """A helper that is dropped although somebody uses it would leave a starter that cannot run."""
    monkeypatch.setattr("smoke.course.starter.private_helpers", lambda *_: ["slots_of"])
    with pytest.raises(ValueError, match="slots_of"):
        empty("attention/metadata.py", [task("attention.metadata:AttentionMetadata.kv_slots")])


def test_a_changed_surface_is_refused(monkeypatch):
    from smoke.course import starter

    cut = starter.apply_cuts

    def careless(text, cuts):
        return cut(text, cuts).replace("PAD_PAGE = -1", "PAD_PAGE = 0")

    monkeypatch.setattr(starter, "apply_cuts", careless)
    with pytest.raises(ValueError, match="surface"):
        empty("attention/metadata.py", [task("attention.metadata:pack_batch")])
