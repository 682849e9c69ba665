"""What is remembered of a student's checks, and what a change of a function makes of it."""

import shutil

import pytest

from smoke.course.digest import Digest
from smoke.course.guide import next_lines
from smoke.course.work import Work, tasks_of
from smoke.framework.bank import load_pitfalls
from smoke.framework.catalogue import catalogue, listed
from smoke.framework.check import Result
from smoke.framework.manifest import ENGINE, load_manifest

LESSON_1, LESSON_2, LESSON_4 = (load_manifest().lesson(name) for name in ("L1", "L2", "L4"))
BUILD_ON_A = {"L1.A", "L1.E", "L1.F", "L1.G"}


@pytest.fixture
def work(tmp_path):
    """Return the folder of a student who has written L1, L2 and L4."""
    write(tmp_path, LESSON_1, LESSON_2, LESSON_4)
    return tmp_path


def write(folder, *lessons):
    for file in (file for lesson in lessons for file in lesson.files):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ENGINE / file, folder / file)


def passed_all(folder, lesson, base="reference"):
    work = Work(folder)
    checks = listed([lesson])
    work.remember(lesson, [Result(check.id, "pass") for check in checks], work.marks(lesson, base, checks))


def lost(folder, lesson):
    """Return the tasks with a check that no longer counts as passed."""
    passed = Work(folder).passed(lesson)
    return {check.task_id for check in listed([lesson]) if check.id not in passed}


def change(folder, file, old, new):
    text = (folder / file).read_text()
    assert text.count(old) == 1
    (folder / file).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "is_changed"),
    [
        ("+ eps)", "- eps)", True),
        ("weight: Tensor, eps: float)", "weight: Tensor, eps: float = 1e-6)", True),
        ("+ eps)  #", "+ eps)  # inside the root: ", False),
        ("stands inside the square root", "stands inside", False),
        ("import torch\n", "import torch\nimport math\n", False),
    ],
)
def test_a_pass_counts_until_what_it_uses_is_changed(work, old, new, is_changed):
    passed_all(work, LESSON_1)
    assert lost(work, LESSON_1) == set()
    change(work, "model.py", old, new)
    assert lost(work, LESSON_1) == (BUILD_ON_A if is_changed else set())


def test_a_helper_of_ones_own_counts_for_those_who_call_it(work):
    """Also a constant, and a helper that only another one calls."""
    change(work, "model.py", "wide = x.float()", "wide = doubled(x.float())")
    helpers = "TWO = 2\n\n\ndef doubled(x):\n    return half(x) * 4\n\n\ndef half(x):\n    return x / TWO\n"
    with (work / "model.py").open("a") as stream:
        stream.write(f"\n\n{helpers}\n\ndef unused():\n    return 123\n")
    passed_all(work, LESSON_1)
    change(work, "model.py", "return 123", "return 124")
    assert lost(work, LESSON_1) == set()
    change(work, "model.py", "TWO = 2", "TWO = 3")
    assert lost(work, LESSON_1) == BUILD_ON_A
    passed_all(work, LESSON_1)
    change(work, "model.py", "x / TWO", "x / 3")
    assert lost(work, LESSON_1) == BUILD_ON_A


@pytest.mark.parametrize(
    ("helper", "use", "counts"),
    [
        ("def half(x):\n    return x", "    half = [half for half in (2,)]\n", False),
        ("def half(x):\n    return x", "    half = 2\n", False),
        ("def half(x):\n    return x", "    [half for half in (2,)], half(2)\n", True),
        ("def half(x):\n    return x", "    def inner(x):\n        return half(x)\n", True),
        ("class Own:\n    def half(self):\n        return 2", "    half = 2\n", False),
        ("class Own:\n    def half(self):\n        return 2", "    x.half\n", True),
        ("class Own:\n    def half(self):\n        return 2", "    getattr(x, 'half')\n", True),
        ("class Own:\n    def __init__(self):\n        self.x = 2", "    Own()\n", True),
    ],
)
def test_a_variable_of_a_function_is_no_use_of_what_has_its_name(tmp_path, helper, use, counts):
    (tmp_path / "model.py").write_text(f"def user(x):\n{use}\n\n{helper}\n")
    digest = Digest(tmp_path, ["model.py"])
    parts = {part.name: part for part in digest.parts}
    (other,) = (part for name, part in parts.items() if name.startswith(("half", "Own.")))
    assert (other in digest.used_by(parts["user"])) is counts


def test_what_is_imported_under_another_name_is_used(work):
    change(work, "model.py", "wide = x.float()", "wide = other(x.float())")
    with (work / "model.py").open("a") as stream:
        stream.write("\n\nfrom mini_engine.attention.paged import half as other\n")
    with (work / "attention/paged.py").open("a") as stream:
        stream.write("\n\ndef half(x):\n    return x / 2\n")
    passed_all(work, LESSON_2, "own")
    change(work, "attention/paged.py", "return x / 2", "return x / 3")
    assert lost(work, LESSON_2)


def test_earlier_lessons_count_where_they_were_run(work):
    passed_all(work, LESSON_2)
    change(work, "model.py", "+ eps)", "- eps)")
    assert lost(work, LESSON_2) == set(), "the reference lay beneath"
    passed_all(work, LESSON_2, "own")
    assert lost(work, LESSON_2) == set()
    change(work, "model.py", "- eps)", "+ eps)")
    assert lost(work, LESSON_2) == {task.id for task in LESSON_2.tasks}


def test_next_names_an_earlier_lesson_that_has_changed_since_it_passed(work):
    for lesson in (LESSON_1, LESSON_2):
        passed_all(work, lesson)
    Work(work).begin(LESSON_4)
    assert next_lines(Work(work))[0].startswith("L4.")
    change(work, "model.py", "+ eps)", "- eps)")
    first, second, *_ = next_lines(Work(work))
    assert first == f"L1 Model forward has changed since it passed: python -m smoke run L1 --engine {work}"
    assert second.startswith("L4.")


def test_a_lesson_that_was_begun_alone_is_named_when_it_is_done(tmp_path):
    """There is nothing after the last lesson, so the first one is offered."""
    last = load_manifest().written[-1]
    write(tmp_path, last)
    Work(tmp_path).begin(last)
    passed_all(tmp_path, last)
    words = next_lines(Work(tmp_path))
    assert words[0].startswith(f"{last.id} {last.title} is done. Compare: python -m smoke diff {last.id}")
    assert words[1] == f"  measure   python -m smoke measure {last.id} --engine {tmp_path}"
    assert words[2].startswith("L1 Model forward: not started.")


def test_every_function_of_a_task_counts_for_its_checks():
    """So does what the course gives of ``__init__``, which nothing names where it is called."""
    for lesson in load_manifest().written:
        digest = Digest(ENGINE, lesson.files)
        given = {each for each in digest.parts if each.name.endswith(".__init__") and digest.owner(each) is None}
        for check in listed([lesson]):
            assert digest.reached(tasks_of(check)) >= given
            reached = {digest.owner(each) for each in digest.reached(tasks_of(check))}
            own = {task.id for task in lesson.tasks}
            assert tasks_of(check) & own <= reached
        first = listed([lesson])[0]
        assert not own <= {digest.owner(each) for each in digest.reached(tasks_of(first))}, "and not all of the lesson"


def test_a_check_rests_on_what_the_pitfalls_that_it_catches_change():
    """The oracle is the bank: a check that fails when a function is changed reaches that function."""
    digests = {lesson.id: Digest(ENGINE, lesson.files) for lesson in load_manifest().written}
    places = {
        check.id: {(part.file, part.name) for part in digests[check.lesson_id].reached(tasks_of(check))}
        for check in catalogue().values()
    }
    for pitfall in load_pitfalls():
        name = ".".join(pitfall.edit.name.split(".")[:2])  # without a function inside the method
        for check in pitfall.killed_by:
            assert (pitfall.edit.file, name) in places[check], (pitfall.id, check)


@pytest.mark.parametrize(
    ("old", "new", "is_named"),
    [
        ("self.drafter.propose(", "self.drafter.propose(", False),
        ("self.drafter.propose(", "NGramDrafts().propose(", True),
        ("self.drafter.propose(", "make_drafting(None, None, 9).make().propose(", True),
        ("request: Request, most", "request: NGramDrafts, most", True),
    ],
)
def test_a_method_counts_where_its_class_is_named(tmp_path, old, new, is_named):
    """L10.B calls ``propose`` of whatever drafter it is given; the checks give one of their own."""
    lesson = load_manifest().lesson("L10")
    (file,) = lesson.files
    write(tmp_path, lesson)
    text = (tmp_path / file).read_text()
    (tmp_path / file).write_text(text.replace(old, new, 1))
    passed_all(tmp_path, lesson)
    change(tmp_path, file, "if n <= place}", "if n < place}")
    assert ("L10.B" in lost(tmp_path, lesson)) is is_named
    whole = {check.id for check in listed([lesson])} - Work(tmp_path).passed(lesson)
    assert "L10.A.search" in whole
    assert "L10.D.whole" in whole
    assert ("L10.D.bits" in whole) is is_named


def test_a_file_that_is_not_python_has_passed_nothing(work):
    passed_all(work, LESSON_1)
    (work / "model.py").write_text("def broken(:")
    assert "L1.A" in lost(work, LESSON_1)
    assert Work(work).open_functions(LESSON_1.files) == {}


@pytest.mark.parametrize(
    "state", ["", "[]", '{"checks": {"L1": {"L1.A.values": {"status": "pass", "files": "of old"}}}}']
)
def test_what_an_older_version_or_an_accident_left_is_no_pass(work, state):
    (work / ".smoke.json").write_text(state)
    assert Work(work).passed(LESSON_1) == set()


def test_the_place_is_the_lesson_begun_last(work):
    assert Work(work).place().id == "L1.A"
    Work(work).begin(LESSON_2)
    assert Work(work).place().id == "L2.A"
    passed_all(work, LESSON_2)
    assert Work(work).place().id == "L3.A", "on with the next one"
