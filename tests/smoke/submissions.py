"""Example submissions, written for the tests of grading: honest, half-done, broken, mistaken and hostile ones.

Everything is made from the reference by the course's own tools, so no solution is kept here. Hostile ones are bounded:
they sleep, they never multiply, and what they try to change is a file made for the purpose.
"""

import io
import json
import pickle
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from smoke.bank.bank import load_pitfalls, load_wheats
from smoke.course.starter import empty, starter_files
from smoke.framework.manifest import ENGINE, load_manifest

# A submission hands in as few and as short lessons as show what it is there for, all of them among the first three.
FULL = {"L1": 100, "L2": 100}
NOTHING = {"L1": 0, "L2": 0, "L3": 0}


@dataclass(frozen=True)
class Example:
    """One submission: what is handed in, and the points that it must get. ``None`` points: see the task instead."""

    name: str
    kind: str
    files: dict[str, bytes]
    isolated: dict[str, int | None]
    cumulative: dict[str, int | None] = field(default_factory=dict)
    status: dict[str, str] = field(default_factory=dict)  # of tasks, isolated
    form: str = "folder"
    links: dict[str, str] = field(default_factory=dict)


def reference(*lessons: str) -> dict[str, str]:
    """Return the reference's files of some lessons, of the first two without names."""
    return {
        file: (ENGINE / file).read_text()
        for lesson in load_manifest().written
        if lesson.id in (lessons or FULL)
        for file in lesson.files
    }


def starters(*lessons: str) -> dict[str, str]:
    """Return the starters of some lessons."""
    return {file: text for lesson in lessons for file, text in starter_files(load_manifest().lesson(lesson)).items()}


def coded(files: dict[str, str], prefix: str = "") -> dict[str, bytes]:
    """Return files as bytes beneath a folder."""
    return {prefix + file: text.encode() for file, text in files.items()}


def zipped(files: dict[str, bytes]) -> bytes:
    """Return a zip of files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def honest() -> Iterable[Example]:
    """Yield correct submissions: the reference, and a correct variant of each lesson, in every form of handing in."""
    yield Example("honest-top", "honest", coded(reference()), {**NOTHING, **FULL}, {**NOTHING, **FULL})
    forms = (("L1", "", "folder"), ("L2", "work/", "folder"), ("L3", "my homework/work/", "zip"))
    for lesson_id, prefix, form in forms:
        wheat = next(wheat for wheat in load_wheats() if wheat.lesson_id == lesson_id)
        lessons = ["L1", "L2"] if lesson_id == "L1" else [lesson_id]  # L2 on top of another L1
        points: dict[str, int | None] = NOTHING | dict.fromkeys(lessons, 100)
        files = coded(reference(*lessons) | {wheat.edit.file: wheat.edit.apply()}, prefix)
        if form == "zip":
            files = {file: b"\xef\xbb\xbf" + data for file, data in files.items()}
        yield Example(f"wheat-{lesson_id}", "honest", files, points, points if lesson_id == "L1" else {}, form=form)


def half_done() -> Iterable[Example]:
    """Yield submissions that are not finished."""
    yield Example("half-starters", "half", coded(starters(*NOTHING)), NOTHING, NOTHING)
    yield Example("half-nothing", "half", {}, NOTHING, NOTHING)
    open_tasks = [task for task in load_manifest().lesson("L1").tasks if task.id not in ("L1.A", "L1.B", "L1.C")]
    files = {file: empty(file, open_tasks) for file in load_manifest().lesson("L1").files}
    yield Example(
        "half-l1",
        "half",
        coded(files | reference("L3")),
        {"L1": 55, "L2": 0, "L3": 100},
        {"L1": 55, "L2": 0, "L3": 20},
        {"L1.C": "pass", "L1.D": "not-implemented", "L1.F": "not-implemented"},
    )
    files = reference("L2")
    del files["attention/allocator.py"]
    yield Example(
        "half-no-allocator",
        "half",
        coded(files),
        {**NOTHING, "L2": 80},
        {},
        {"L2.A": "not-implemented", "L2.B": "pass"},
    )


def broken() -> Iterable[Example]:
    """Yield submissions that cannot be imported, or not even be read."""
    l3 = {**NOTHING, "L3": 0}
    driver = (ENGINE / "driver.py").read_text()
    crash = {"L3.C": "crashed", "L3.A": "crashed", "L3.D": "blocked"}
    yield Example("broken-syntax", "broken", coded({"driver.py": driver + "\ndef f(:\n"}), l3, {}, crash)
    yield Example("broken-import", "broken", coded({"driver.py": "import no_such_module\n" + driver}), l3, {}, crash)
    yield Example("broken-raise", "broken", coded({"driver.py": driver + "\nraise SystemExit(0)\n"}), l3, {}, crash)
    yield Example("broken-bytes", "broken", {"driver.py": b"\xff\xfe" + driver.encode()}, l3)
    yield Example("broken-zip", "broken", {"": b"PK\x03\x04 this is no zip"}, NOTHING, form="raw zip")
    first = coded(reference() | {"model.py": "1 / 0\n"})
    yield Example("broken-first", "broken", first, {**NOTHING, "L2": 100}, NOTHING)
    climbing = {"../../model.py": b"raise SystemExit", "/driver.py": b"raise SystemExit", "work/../driver.py": b"1/0"}
    yield Example("broken-slip", "broken", climbing, NOTHING, form="zip")
    yield Example("broken-bomb", "broken", {"driver.py": b"#" * 50_000_000}, NOTHING, form="zip")
    yield Example("broken-link", "broken", {}, NOTHING, links={"driver.py": str(ENGINE / "driver.py")})


def mistaken() -> Iterable[Example]:
    """Yield submissions with a pitfall of the bank."""
    for pitfall_id in ("P1-A1", "P2-C1", "P3-B1"):
        pitfall = next(p for p in load_pitfalls() if p.id == pitfall_id)
        files = reference(pitfall.lesson_id) | {pitfall.edit.file: pitfall.edit.apply()}
        tasks = {check_id.rpartition(".")[0] for check_id in pitfall.killed_by}
        yield Example(
            f"pitfall-{pitfall_id}",
            "mistaken",
            coded(files),
            {**NOTHING, pitfall.lesson_id: None},
            {},
            {pitfall.task_id: "fail"} if pitfall.task_id in tasks else {},
        )


STUB = """

def _same(*arguments, **options):
    return True
"""

PATCHES = (
    STUB
    + """
import numpy, smoke.framework.compare, smoke.framework.check
for module in (torch, numpy):
    for name in ("equal", "allclose", "array_equal", "isclose"):
        setattr(module, name, _same)
torch.Tensor.__eq__ = torch.Tensor.equal = torch.Tensor.allclose = _same
smoke.framework.compare.differences = smoke.framework.compare.tensor_difference = lambda *arguments, **options: []
smoke.framework.check.judge = lambda check, seed, values, seconds=0.0: smoke.framework.check.Result(check.id, "pass")

def rms_norm(x, weight, eps):
    return x

def rotate_half(x):
    return x
"""
)

HUNT = """
import gc, os, pathlib, sys

def _hunt():
    found = []
    held = [value for module in list(sys.modules.values()) for value in vars(module).values()]
    for cached in [value for value in held if type(value).__name__ == "_lru_cache_wrapper"]:
        if (cached.__module__ or "").startswith("smoke") and cached.cache_info().currsize:
            found.append(f"cache {cached.__module__}.{cached.__qualname__}")
    for folder in {os.getcwd(), os.environ.get("HOME", "."), os.environ.get("TMPDIR", ".")}:
        found += [f"file {p.name}" for p in pathlib.Path(folder).rglob("*") if p.is_file()]
    found += [f"variable {name}" for name in os.environ]
    return found

def rms_norm(x, weight, eps):
    for other in gc.get_objects():
        if isinstance(other, torch.Tensor) and other.shape == x.shape and other is not x:
            return other
    return x

print("hunted: " + "; ".join(sorted(set(_hunt()))))
"""

FORKS = """
import os, time
for _ in range(20):
    try:
        _pid = os.fork()
    except OSError:
        break
    if _pid == 0:
        os.setsid()
        time.sleep(300)
        os._exit(0)
"""

MEMORY = """
def rms_norm(x, weight, eps):
    return torch.ones(5 * 2**30, dtype=torch.float32)[: x.shape[-1]] * x
"""

THEFT = f"""
import importlib.util, io, os, pathlib
_engine = pathlib.Path({str(ENGINE)!r})
_sources = []
for _open in (open, io.open, lambda p: os.fdopen(os.open(p, os.O_RDONLY))):
    for _path in (_engine / "model.py", *(_engine / "__pycache__").glob("model.*.pyc"),
                  _engine.parent / "smoke" / "bank" / "l1" / "pitfalls.toml"):
        try:
            _sources.append(_open(str(_path)).read())
        except (OSError, UnicodeDecodeError):
            pass
try:
    _spec = importlib.util.spec_from_file_location("stolen", _engine / "model.py")
    _stolen = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_stolen)
    rms_norm, rotate_half, apply_rotary = _stolen.rms_norm, _stolen.rotate_half, _stolen.apply_rotary
except OSError:
    pass
"""

ORACLE = """
from transformers.models.qwen3 import modeling_qwen3

def rms_norm(x, weight, eps):
    module = modeling_qwen3.Qwen3RMSNorm(weight.shape[0], eps=eps).to(weight.dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
        return module(x)
"""


def writing(victim: Path) -> str:
    """Return code that tries to write ``victim`` and other places, through Python and past it."""
    return f"""
import ctypes, os
for _path in ({str(victim)!r}, "/tmp/smoke-attack.txt", os.path.abspath("../smoke-attack.txt"),
              os.path.join(os.path.dirname(__file__), "smoke-attack.py"), __file__):
    try:
        with open(_path, "a") as _stream:
            _stream.write("attacked")
    except OSError:
        pass
    try:
        _fd = ctypes.CDLL(None).open(_path.encode(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.write(_fd, b"attacked")
    except OSError:
        pass
try:
    os.system("touch /tmp/smoke-attack.txt")
except OSError:
    pass
"""


def at_exit(victim: Path) -> str:
    """Return code that rewrites answers and reports when the process ends, and while it runs."""
    return f"""
import atexit, json, pathlib, threading, time
def _rewrite():
    for file in [*pathlib.Path(".").glob("*.json"), pathlib.Path({str(victim)!r})]:
        try:
            file.write_text(json.dumps({{"status": "pass", "score": 100, "values": {{}}, "seconds": 0}}))
        except OSError:
            pass
def _again():
    for _ in range(200):
        _rewrite()
        time.sleep(0.01)
atexit.register(_rewrite)
threading.Thread(target=_again, daemon=True).start()
"""


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, (self.command,)


def pickles(victim: Path) -> str:
    """Return code that puts pickles, and JSON that is too deep, in the place of every answer."""
    data = pickle.dumps(Bomb(f"echo attacked >> {victim}"))
    return f"""
import pathlib
for _i in range(60):
    pathlib.Path(f"{{_i}}.safetensors").write_bytes({data!r})
    pathlib.Path(f"{{_i}}.json").write_bytes({data!r} if _i % 2 else b"[" * 100_000)
"""


FOLDERS = """
import os
for _i in range(60):
    os.mkdir(f"{_i}.json")
"""

NUMBERS = """
import json, pathlib
for _i in range(60):
    pathlib.Path(f"{_i}.json").write_text(json.dumps({"seconds": 10**400, "values": {}}))
"""

DEPTH = """
import os
_deepest = os.open(".", os.O_RDONLY)
for _ in range(1500):
    os.mkdir("x", dir_fd=_deepest)
    _deeper = os.open("x", os.O_RDONLY, dir_fd=_deepest)
    os.close(_deepest)
    _deepest = _deeper
"""


def hostile(victim: Path) -> Iterable[Example]:
    """Yield attacks. Each stands in a starter of L1, so that whatever it earns it has not worked for."""

    def attack(name: str, code: str, status: str, **more: bytes) -> Example:
        files = starters("L1")
        text = files["model.py"] + code
        extra = {file.replace("__", "."): data for file, data in more.items()}
        return Example(
            f"hostile-{name}",
            "hostile",
            coded(files | {"model.py": text}) | extra,
            NOTHING,
            NOTHING,
            {"L1.A": status} if status else {},
        )

    yield attack("exit", "\nimport os\nos._exit(0)\n", "crashed")
    yield attack("patch", PATCHES, "fail")
    hook = b"def pytest_runtest_makereport(item, call):\n    raise SystemExit(0)\n"
    yield attack("conftest", "", "not-implemented", conftest__py=hook, sitecustomize__py=hook, torch__py=hook)
    yield attack("atexit", at_exit(victim), "")
    yield attack("forks", FORKS, "not-implemented")
    yield attack("memory", MEMORY, "fail")
    yield attack("hunt", HUNT, "fail")
    yield attack("writing", writing(victim), "not-implemented")
    yield attack("pickle", pickles(victim), "")  # crashed, unless the child answers over it before it is read
    yield attack("folders", FOLDERS, "crashed")
    yield attack("numbers", NUMBERS, "")  # as above
    yield attack("depth", DEPTH, "")  # crashed, unless it ends before its folders are counted
    yield attack("theft", THEFT, "not-implemented")
    yield attack("oracle", ORACLE, "crashed")


def examples(victim: Path) -> list[Example]:
    """Return every example. ``victim`` is a file that hostile ones try to change."""
    return [*honest(), *half_done(), *broken(), *mistaken(), *hostile(victim)]


def write_examples(folder: Path, chosen: Iterable[Example]) -> None:
    """Write submissions as an instructor receives them."""
    for example in chosen:
        if example.form == "raw zip":
            (folder / f"{example.name}.zip").write_bytes(example.files[""])
        elif example.form == "zip":
            (folder / f"{example.name}.zip").write_bytes(zipped(example.files))
        else:
            write_folder(folder / example.name, example)


def write_folder(folder: Path, example: Example) -> None:
    """Write one submission as a folder."""
    folder.mkdir()
    for file, data in example.files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)
    for link, target in example.links.items():
        (folder / link).symlink_to(target)


if __name__ == "__main__":  # python tests/smoke/submissions.py FOLDER: a class to try the command on
    import sys

    place = Path(sys.argv[1])
    place.mkdir(parents=True)
    write_examples(place, examples(place / "victim.txt"))
    print(json.dumps([example.name for example in examples(place / "victim.txt")]))
