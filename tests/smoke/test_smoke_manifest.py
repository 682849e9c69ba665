"""The manifest is the single source of the course, so a slip in it is refused by name."""

import ast
import copy
from dataclasses import replace

import pytest

from mini_engine.overlay import functions_of
from smoke.framework.manifest import COURSE, ENGINE, load_manifest, parse_manifest

LESSON = {
    "id": "L1",
    "slug": "L1_model",
    "title": "Model",
    "goal": "Logits.",
    "files": ["model.py"],
    "task": [
        {"id": "L1.A", "title": "One", "points": 1, "minutes": 5, "functions": ["model:one"], "depends": []},
        {"id": "L1.B", "title": "Two", "points": 1, "minutes": 5, "functions": ["model:K.two"], "depends": ["L1.A"]},
    ],
}


def broken(change):
    raw = {"lesson": [copy.deepcopy(LESSON)]}
    change(raw)
    return raw


def test_the_shipped_manifest_names_existing_files():
    for lesson in load_manifest().written:
        for file in lesson.files:
            assert (ENGINE / file).is_file()


CORE_HOURS, CORE_LINES, CORE_WORDS = 40, 1100, 36_000  # of L1 to L8; a term has no more


def lines_of(function):
    """The lines of a function's body that a student writes: code, without docstrings, comments and blanks."""
    tree = ast.parse((ENGINE / function.file).read_text())
    node = functions_of(tree)[function.qualname]
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    texts = (ENGINE / function.file).read_text().splitlines()[body[0].lineno - 1 : body[-1].end_lineno]
    return sum(bool(text.strip()) and not text.strip().startswith("#") for text in texts)


def test_the_core_fits_a_term():
    lessons = load_manifest().upto("L8")
    assert sum(lesson.minutes(lesson.core) for lesson in lessons) <= CORE_HOURS * 60
    assert (
        sum(lines_of(function) for each in lessons for task in each.core for function in task.functions) <= CORE_LINES
    )
    pages = [COURSE / lesson.text_file for lesson in lessons]
    pages += [COURSE / lesson.text_folder / name for lesson in lessons for name in lesson.further_pages()]
    pages += [COURSE / lesson.text_folder / task.page_name for lesson in lessons for task in lesson.core]
    assert sum(len(page.read_text().split()) for page in pages) <= CORE_WORDS


def test_a_task_has_the_minutes_that_its_words_and_lines_take():
    """The rule of lessons/README.md."""
    for lesson in load_manifest().written:
        for task in lesson.tasks:
            words = len((COURSE / lesson.text_folder / task.page_name).read_text().split())
            lines = sum(lines_of(function) for function in task.functions)
            assert task.minutes >= 10 + words / 120 + 1.5 * lines, task.id


def test_the_core_of_every_lesson_is_worth_a_hundred_points():
    for lesson in load_manifest().written:
        assert sum(task.points for task in lesson.core) == 100, lesson.id


def test_needs_is_transitive_and_contains_all_earlier_lessons():
    manifest = load_manifest()
    assert {"L1.A", "L1.B", "L1.C", "L1.E", "L1.F"} == manifest.needs("L1.G")
    assert {task.id for task in manifest.lesson("L1").tasks} <= manifest.needs("L2.A")
    assert "L2.B" not in manifest.needs("L2.C")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda raw: raw.update(extra=1), "extra"),
        (lambda raw: raw["lesson"][0]["task"][0].update(colour=1), "colour"),
        (lambda raw: raw["lesson"][0]["task"][0].pop("points"), "points"),
        (lambda raw: raw["lesson"].append(raw["lesson"][0]), "L1 is defined twice"),
        (lambda raw: raw["lesson"][0]["task"][1].update(id="L1.A", depends=[]), "L1.A is defined twice"),
        (lambda raw: raw["lesson"][0]["task"][1].update(functions=["model:one"]), "model:one is defined twice"),
        (lambda raw: raw["lesson"][0]["task"][0].update(depends=["L1.Z"]), "L1.Z"),
        (lambda raw: raw["lesson"][0]["task"][0].update(depends=["L1.B"]), "L1.B"),
        (lambda raw: raw["lesson"][0]["task"][0].update(id="L2.A"), "L2.A stands in lesson L1"),
        (lambda raw: raw["lesson"][0]["task"][0].update(functions=["driver:run"]), "driver.py"),
        (lambda raw: raw["lesson"][0]["task"][0].update(functions=["model.one"]), "model.one"),
        (lambda raw: raw["lesson"][0]["task"][0].update(points=0), "L1.A"),
        (lambda raw: raw["lesson"][0]["task"][0].update(minutes="5"), "minutes '5'"),
        (lambda raw: raw["lesson"][0].update(id="one"), "one"),
    ],
)
def test_a_slip_is_refused_by_name(change, names):
    parse_manifest({"lesson": [copy.deepcopy(LESSON)]})
    with pytest.raises(ValueError, match=names):
        parse_manifest(broken(change))


def test_an_unknown_lesson_or_task_names_the_choices():
    with pytest.raises(ValueError, match="L1, L2, L3"):
        load_manifest().lesson("L99")
    *others, last = load_manifest().lessons
    announced = replace(load_manifest(), lessons=(*others, replace(last, files=(), tasks=())))  # and not written
    with pytest.raises(ValueError, match=f"choose one of .*{others[-1].id}$"):
        announced.lesson(last.id)
    with pytest.raises(ValueError, match=r"L1\.Q"):
        load_manifest().task("L1.Q")
