"""A student's file in which the reference stands in for what is not written yet."""

import inspect
from pathlib import Path

import pytest

from mini_engine.overlay import REFERENCE, OverlayFinder, module_name
from smoke.course.starter import empty
from smoke.framework.manifest import load_manifest

FILE = "attention/metadata.py"


def load(folder: Path, **options: object) -> dict[str, object]:
    """Run the file of ``folder`` as the overlay does, and return its names."""
    finder = OverlayFinder(folder, [FILE], **options)
    spec = finder.find_spec(module_name(FILE), None)
    names: dict[str, object] = {"__name__": module_name(FILE)}
    exec(spec.loader.get_code(spec.name), names)
    return names | {"filled": finder.filled}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_text(empty(FILE, load_manifest().lesson("L2").tasks) + "\n\ndef own():\n    return 1\n")
    return tmp_path


def test_what_is_filled_in_has_the_references_lines(folder):
    """Tracebacks quote them, and Triton compiles a kernel from them."""
    names = load(folder, fill=True)
    assert names["filled"] == {"L2.C"}
    assert inspect.getsource(names["slots_of"]) in (REFERENCE / FILE).read_text()
    assert "NotImplementedError" not in inspect.getsource(names["slots_of"])
    assert "NotImplementedError" not in inspect.getsource(names["AttentionMetadata"].kv_slots.func)
    assert inspect.getsource(names["check_chunks"]) in (REFERENCE / FILE).read_text(), "a helper that starters lack"
    assert names["own"].__code__.co_filename == str(folder / FILE)
    assert inspect.getsource(names["own"]) == "def own():\n    return 1\n"


def test_what_is_judged_stays_open(folder):
    names = load(folder, fill=True, judged=["L2.C"])
    assert names["filled"] == set()
    assert "NotImplementedError" in inspect.getsource(names["slots_of"])
