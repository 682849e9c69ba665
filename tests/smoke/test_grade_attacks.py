"""Hostile submissions, one trick each: none of them earns a point by what it finds or does.

Every attack stands in a starter of L1, and what it finds takes the place of the functions that are to be written. A
lesson is run as ``grade`` runs it. Some attacks do find their way through Python; then the kernel refuses, which the
second half of the file tries without the audit hook.
"""

import errno
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from smoke.framework.check import Check, checks_of
from smoke.framework.manifest import ENGINE, ROOT, Lesson, load_manifest
from smoke.grade.landlock import LANDLOCK_CREATE, libc
from smoke.grade.submissions import Submission
from smoke.grade.syscalls import CALLS, CLONE, CLONE_3, MACHINES, ON_ITSELF, SIGNAL_THREAD, filter_program
from smoke.grade.trial import FIRST_UID, try_isolation
from smoke.grade.worker import ModeRun, Worker
from tests.smoke.submissions import reference, starters

L1 = load_manifest().lesson("L1")
MODEL = ENGINE / "model.py"
SEED = 3
USE = """
def _use(text):
    exec(compile(text, "found", "exec"), globals())
"""

# Attacks that read the solution ---------------------------------------------------------------------------------------

READ_BY_CTYPES = f"""
import ctypes
_buffer = ctypes.create_string_buffer(1 << 20)
_libc = ctypes.CDLL(None)
_fd = _libc.open({str(MODEL)!r}.encode(), 0)
_length = _libc.read(_fd, _buffer, 1 << 20)
_use(_buffer.raw[:_length].decode())
"""

READ_BY_TORCH = f"""
_use(bytes(torch.from_file({str(MODEL)!r}, size={MODEL.stat().st_size}, dtype=torch.uint8).tolist()).decode())
"""

READ_BY_STORAGE = f"""
_storage = torch.UntypedStorage.from_file({str(MODEL)!r}, False, {MODEL.stat().st_size})
_use(bytes(_storage.tolist()).decode())
"""

READ_BY_FOLDER = f"""
import os
_folder = os.open({str(ENGINE)!r}, os.O_RDONLY)
_use(os.fdopen(os.open("model.py", os.O_RDONLY, dir_fd=_folder)).read())
"""

READ_BY_DOTS = f"""
import os, sys
_folder = os.open(sys.prefix, os.O_RDONLY)
_path = os.path.relpath({str(MODEL)!r}, sys.prefix)
_use(os.fdopen(os.open(_path, os.O_RDONLY, dir_fd=_folder)).read())
"""

READ_BY_LINK = f"""
import os
os.symlink({str(ENGINE)!r}, "engine", target_is_directory=True)
_use(open("engine/model.py").read())
"""

THREE_LINES = f"""
import sys
sys.modules["smoke.grade.guard"].real = lambda path: None
_use(open({str(MODEL)!r}).read())
"""

NAMES_OF_THE_HOOK = f"""
import builtins, os, posixpath, sys
for _module in (sys.modules.get("smoke.grade.guard"), sys.modules.get("smoke.grade.rules"), os, posixpath):
    for _name in ("real", "resolver", "decider", "places", "within", "refuse", "realpath", "lstat", "readlink"):
        if hasattr(_module, _name):
            setattr(_module, _name, lambda *arguments, **options: None)
_open = open
builtins.any = builtins.isinstance = lambda *arguments: False
builtins.next = builtins.zip = lambda *arguments, **options: iter(())
try:
    _text = _open({str(MODEL)!r}).read()
finally:
    del builtins.any
_use(_text)
"""

EMPTIED_FINDER = """
import importlib, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "OverlayFinder"]
_own = sys.modules.pop(__name__)
try:
    for _name, _value in vars(importlib.import_module(__name__)).items():
        if not _name.startswith("__"):
            globals()[_name] = _value
finally:
    sys.modules[__name__] = _own
"""

ANOTHER_CHECKOUT = f"""
import importlib.util
_spec = importlib.util.spec_from_file_location("found", {str(MODEL)!r})
_found = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_found)
globals().update({{name: value for name, value in vars(_found).items() if not name.startswith("__")}})
"""

CLASSMATE = """
import ctypes, glob, os
_own = os.path.dirname(__file__)
_places = [*glob.glob(os.path.join(_own, "..", "files-*")), *glob.glob("/tmp/smoke-*/files-*")]
for _path in [os.path.join(place, "model.py") for place in _places if not os.path.samefile(place, _own)]:
    _use(open(_path).read())
assert "_places" not in globals() or _places, "nothing was listed"
"""

# Attacks that find an oracle in the process ---------------------------------------------------------------------------

LIBRARY = """
import sys
_library = sys.modules["transfor" + "mers.models.qwen3.modeling_qwen3"]

def rms_norm(x, weight, eps):
    module = _library.Qwen3RMSNorm(weight.shape[0], eps=eps).to(weight.dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
        return module(x)
"""

IMPORTED_LIBRARY = (
    LIBRARY.replace("import sys\n", "import importlib, sys\n")
    .replace("sys.modules[", "importlib.import_module(")
    .replace('modeling_qwen3"]', 'modeling_qwen3")')
)

PEER = """
import sys

def rms_norm(x, weight, eps):
    return sys.modules["smo" + "ke.framework.peer"].rms_norm(x, weight, eps)
"""

FRAMES = """
import sys

def rms_norm(x, weight, eps):
    return sys._getframe(1).f_globals["peer"].rms_norm(x, weight, eps)
"""

SPEC = """
import sys

def rms_norm(x, weight, eps):
    rows = sys.modules["smo" + "ke.framework.rows"]
    return rows.rms_norm(x, weight, eps).to(x.dtype)
"""

VERDICT = """
import sys
_checks = sys.modules["smo" + "ke.framework.check"].all_checks()

def rms_norm(x, weight, eps):
    for check in _checks.values():
        if check.id.startswith("L1.A"):
            wanted = check.verdict.__closure__[0].cell_contents(0)
            return next(iter(wanted.values()))
    return x
"""

# Attacks that change the process or leave something behind ------------------------------------------------------------

PATCHES = """
import numpy, smoke.framework.compare, smoke.framework.check

def _same(*arguments, **options):
    return True

for module in (torch, numpy):
    for name in ("equal", "allclose", "array_equal", "isclose"):
        setattr(module, name, _same)
torch.Tensor.__eq__ = torch.Tensor.equal = torch.Tensor.allclose = _same
smoke.framework.compare.differences = smoke.framework.compare.tensor_difference = lambda *arguments, **options: []
smoke.framework.check.judge = lambda check, seed, values, seconds=0.0: smoke.framework.check.Result(check.id, "pass")

def rms_norm(x, weight, eps):
    return x
"""

COLLECTED = """
import gc

def rms_norm(x, weight, eps):
    for other in gc.get_objects():
        if isinstance(other, torch.Tensor) and other.shape == x.shape and other is not x:
            return other
    return x
"""

AT_EXIT = """
import atexit, json, pathlib, threading, time
def _rewrite():
    for file in pathlib.Path(".").glob("*.json"):
        try:
            file.write_text(json.dumps({"status": "pass", "score": 100, "values": {}, "seconds": 0}))
        except OSError:
            pass
def _again():
    for _ in range(200):
        _rewrite()
        time.sleep(0.01)
atexit.register(_rewrite)
threading.Thread(target=_again, daemon=True).start()
"""

MEMORY = """
def rms_norm(x, weight, eps):
    return torch.ones(5 * 2**30, dtype=torch.float32)[: x.shape[-1]] * x
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

DEPTH = """
import os
_deepest = os.open(".", os.O_RDONLY)
for _ in range(1500):
    os.mkdir("x", dir_fd=_deepest)
    _deeper = os.open("x", os.O_RDONLY, dir_fd=_deepest)
    os.close(_deepest)
    _deepest = _deeper
"""

ATTACKS = {
    "ctypes": READ_BY_CTYPES,
    "torch.from_file": READ_BY_TORCH,
    "storage from_file": READ_BY_STORAGE,
    "dir_fd": READ_BY_FOLDER,
    "dir_fd and dots": READ_BY_DOTS,
    "link": READ_BY_LINK,
    "three lines": THREE_LINES,
    "names of the hook": NAMES_OF_THE_HOOK,
    "emptied finder": EMPTIED_FINDER,
    "another loader": ANOTHER_CHECKOUT,
    "classmate": CLASSMATE,
    "library": LIBRARY,
    "imported library": IMPORTED_LIBRARY,
    "peer": PEER,
    "frames": FRAMES,
    "spec": SPEC,
    "verdict": VERDICT,
    "patches": PATCHES,
    "collected": COLLECTED,
    "at exit": AT_EXIT,
    "memory": MEMORY,
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(try_isolation().confinement(30, 2 << 30, 120)) as own:
        yield own


def run(worker: Worker, code: str, files: dict[str, str] | None = None) -> ModeRun:
    """Run L1 with ``code`` at the end of its model."""
    files = files or starters("L1")
    return worker.run(Submission("mallory", files | {"model.py": files["model.py"] + code}), [L1], SEED)


def passed(mode: ModeRun) -> list[str]:
    """Return the checks that passed."""
    return [result.check_id for result in mode.results if result.passed]


def test_the_right_answer_passes_and_is_not_noted(worker: Worker) -> None:
    """Otherwise the attacks below would fail for another reason."""
    mode = run(worker, "", reference("L1"))
    assert len(passed(mode)) == len(checks_of([L1])), [result for result in mode.results if not result.passed]
    assert mode.notes == ()


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_earn_nothing(worker: Worker, name: str) -> None:
    place = worker.lay_out(reference("L1"))  # a classmate's files, as they lie while another worker runs
    try:
        mode = run(worker, USE + ATTACKS[name])
    finally:
        subprocess.run(["rm", "-rf", str(place)], check=True)
    assert passed(mode) == []
    assert {result.status for result in mode.results} <= {"fail", "blocked", "crashed", "not-implemented"}


def test_only_the_probes_of_the_lesson_are_there(worker: Worker) -> None:
    """What the process holds of the course: no verdict, no expectation, no library that computes the answer.

    Nor does it hold what an oracle was asked before, in a cache or a file, or a variable that tells of the grader.
    """
    code = """
import json, os, pathlib, sys
_found = [f"{name}.{own}" for name, module in sorted(sys.modules.items()) for own in vars(module)
          if name.startswith(("smo" + "ke.checks.", "smo" + "ke.framework.rows", "smo" + "ke.framework.compare"))]
_found = [name for name in _found if ".__" not in name]
_found += [name for name in sys.modules if "modeling_qwen3" in name or name.startswith("mini_engine.kernels")]
_held = [value for module in list(sys.modules.values()) for value in vars(module).values()]
_caches = [f"{own.__module__}.{own.__qualname__}" for own in _held if type(own).__name__ == "_lru_cache_wrapper"
           and (own.__module__ or "").startswith("smo" + "ke") and own.cache_info().currsize]
_folders = {os.getcwd(), os.environ.get("HOME", "."), os.environ.get("TMPDIR", ".")}
_files = [path.name for folder in _folders for path in pathlib.Path(folder).rglob("*") if path.is_file()]
print("found: " + json.dumps([_found, _caches, _files, list(os.environ)]))
"""
    found, caches, files, variables = json.loads(run(worker, code).log.partition("found: ")[2].splitlines()[0])
    assert [name for name in found if not name.startswith("smoke.checks.l1.")] == []
    assert [name for name in found if name.endswith(("_peer", "_spec", "_verdict", ".bitwise", ".REGISTRY"))] == []
    assert [name for name in found if name.endswith(".norm_inputs")], "what the probes need is there"
    assert set(caches) <= {"smoke.framework.manifest.load_manifest", "smoke.framework.check.all_checks"}
    assert set(files) <= {"log.txt", "stack.txt"}
    assert "SMOKE_CONFINEMENT" not in variables


def test_no_source_and_no_graded_function_lies_in_the_view(worker: Worker) -> None:
    code = """
import json, os
import mini_engine
_folder = mini_engine.__path__[0]
print("found: " + json.dumps([os.path.join(place, name) for place, _, names in os.walk(_folder) for name in names]))
"""
    mode = run(worker, code)
    found = json.loads(mode.log.partition("found: ")[2].splitlines()[0])
    names = {path.partition("mini_engine/")[2] for path in found}
    assert "config.pyc" in names
    assert not [name for name in names if name.endswith(".py")]
    assert names.isdisjoint({"model.pyc", "attention/dense.pyc", "driver.pyc", "kernels/rms_norm.pyc"})


# What stays of files ``spec_*.py`` and of other lessons in a candidate's process: inputs, and what stands in for the
# parts around the candidate's own: a driver, a shelf of prefixes for the scheduler, a grammar of a few sentences.
ENGINES = """
    l3.driver.build_driver l4.k_driver.build_driver l4.k_driver.make_params l5.j_engine.Plan
    l5.j_engine.answer l5.j_engine.build_engine l5.j_engine.entries_of l5.j_engine.stacked l5.j_engine.table_of
    l5.spec_text.tokenizer
"""
SENTENCES = " ".join(f"l7.spec_sentences.{name}" for name in "agreement allowed forced rests token_bytes".split())
EXPECTED = {
    "L1": "",
    "L2": """
        l1.runs.build_model l2.spec_paging.Chunk l2.spec_paging.Schedule
        l2.spec_paging.Step l2.spec_paging.allocator_script l2.spec_paging.make_schedule
    """,
    "L3": "",
    "L4": "l3.driver.build_driver l3.driver.end_requests l3.driver.run l4.spec_histories.Past",
    "L5": """
        l3.driver.build_driver l4.k_driver.build_driver l4.k_driver.make_params l5.spec_scheduling.Person
        l5.spec_scheduling.Rules l5.spec_scheduling.World
        l5.spec_scheduling.token l5.spec_shelf l5.spec_text.byte_tokens
        l5.spec_text.encoded l5.spec_text.in_bytes l5.spec_text.token l5.spec_text.tokenizer
    """,
    "L6": ENGINES + "l5.j_engine.alone l5.j_engine.poison_freed_pages l6.spec_prefixes",
    "L7": ENGINES
    + SENTENCES
    + """
        l7.spec_sentences.byte_of_character l7.spec_grammar_queue.orders l7.spec_regular.Language
        l7.spec_regular.chars l7.spec_regular.draw_tree l7.spec_regular.either
        l7.spec_regular.has_text l7.spec_regular.run l7.spec_regular.seq l7.spec_regular.text l7.spec_regular.times
        l7.spec_regular.write l7.spec_trees.plain l7.spec_trees.size_of
    """,
    "L8": ENGINES
    + SENTENCES
    + """
        l4.d_draw.triples l7.h_engine.Guest
        l7.h_engine.drive l7.h_engine.plain_answer l7.h_engine.raise_missing l7.h_engine.register_backend
        l7.k_jump.allowed_after l7.k_jump.build_sentences l7.k_jump.write_row l7.spec_sentences.byte_of_character
        l8.spec_kernels
    """,
    "L9": "",
    "L10": ENGINES
    + SENTENCES
    + """
        l5.a_request.build_request l5.a_request.output_of l5.a_request.prompt_of l5.d_share.ByRule
        l5.d_share.build_scheduler l5.d_share.chunk_list l5.g_step.build_all l5.g_step.make_scheduler
        l5.g_step.tokens_of l5.j_engine.alone l5.j_engine.drive l5.j_engine.few_pages l5.j_engine.load_options
        l5.j_engine.model_case l5.j_engine.poison_freed_pages l5.j_engine.run_out l5.spec_scheduling.Person
        l5.spec_scheduling.Rules l5.spec_scheduling.World l5.spec_scheduling.token l5.spec_shelf l5.spec_text.decoded
        l6.h_engine.Visit l6.h_engine.drive l6.h_engine.enter l6.h_engine.reference_runs l6.h_engine.statistics
        l7.h_engine.Guest l7.h_engine.drive l7.h_engine.plain_answer l7.h_engine.raise_missing
        l7.h_engine.register_backend l7.k_jump.allowed_after l7.k_jump.build_sentences l7.k_jump.write_row
        l7.spec_sentences.byte_of_character
    """,
    "L11": "",
    "L12": "",
}
LOOK_AROUND = """
import json as _json, sys as _s, types as _types
_own = "smo" + "ke."
def _below(kind):
    for own in type.__subclasses__(kind):
        yield own
        yield from _below(own)
def _is_named(thing):
    return isinstance(thing, (type, _types.FunctionType))
def _is_ours(thing):
    return str(getattr(thing, "__module__", "")).startswith(_own)
def _parts(thing):
    if isinstance(thing, type):
        return [*vars(thing).values(), *thing.__mro__]
    if isinstance(thing, _types.FunctionType):
        return [thing.__globals__, thing.__defaults__, thing.__kwdefaults__, vars(thing), *(thing.__closure__ or ())]
    if isinstance(thing, dict):
        return [*thing.keys(), *thing.values()]
    if isinstance(thing, (list, tuple, set, frozenset)):
        return list(thing)
    names = ("__func__", "__self__", "__wrapped__", "func", "args", "keywords", "fget", "fset", "fn", "cell_contents",
             "__dict__")
    return [getattr(thing, name) for name in names if hasattr(thing, name)]
_waiting = [kind for kind in _below(object) if _is_ours(kind)]
for _name, _module in list(_s.modules.items()):
    _waiting += [value for value in list(vars(_module).values()) if _is_named(value) and _is_ours(value)]
    _waiting += [vars(_module)] if _name.startswith(_own) else []
_seen, _names = {}, set()
while _waiting:
    _thing = _waiting.pop()
    _is_module = isinstance(_thing, _types.ModuleType)
    if id(_thing) in _seen or _is_module or (_is_named(_thing) and not _is_ours(_thing)):
        continue
    _seen[id(_thing)] = _thing
    if _is_named(_thing) and _thing.__module__.startswith((_own + "checks", _own + "framework.peer")):
        _names.add(_thing.__module__.removeprefix(_own + "checks.") + "." + _thing.__qualname__)
    _waiting += _parts(_thing)
_names = [name for name in _names if "__" not in name and (".spec_" in name or not name.startswith(LESSON))]
print("found: " + _json.dumps(sorted(_names)))
"""


@pytest.mark.parametrize("lesson", load_manifest().written, ids=lambda lesson: lesson.id)
def test_no_spec_is_reachable_and_nothing_of_another_lesson(worker: Worker, lesson: Lesson) -> None:
    """Whatever a candidate finds from ``object.__subclasses__()`` and the modules that are loaded."""
    files = starters(lesson.id)
    first = min(files)
    look = LOOK_AROUND.replace("LESSON", repr(f"{lesson.folder}."))
    mode = worker.run(Submission("mallory", files | {first: files[first] + look}), [lesson], SEED)
    found = json.loads(mode.log.partition("found: ")[2].splitlines()[0])
    expected = tuple(f"{name}." for name in EXPECTED[lesson.id].split())
    assert [name for name in found if not f"{name}.".startswith(expected)] == []


# Notes ----------------------------------------------------------------------------------------------------------------


def test_printed_text_is_no_note_and_pushes_none_out(worker: Worker) -> None:
    code = f"""
import os
try:
    open({str(ROOT / "README.md")!r})
except OSError:
    pass
for _number in range(300):
    try:
        open("/tmp/elsewhere" + str(_number), "w")
    except OSError:
        pass
try:
    os.system("true")
except OSError:
    pass
print("[guard] refused: reading what was never there")
print('"refused: nothing"')
print("x" * 2_000_000)
os.ftruncate(1, 0)
"""
    notes = run(worker, code).notes
    assert f"refused: reading {ROOT / 'README.md'}" in notes
    assert "refused: starting a program (os.system)" in notes
    assert len([note for note in notes if note.startswith("refused: writing /tmp/elsewhere")]) == 5
    assert "refused: writing …, 295 more" in notes
    assert not [note for note in notes if "never there" in note or "nothing" in note]


def test_what_is_written_into_the_pipe_of_the_notes_is_noted_as_such(worker: Worker) -> None:
    code = """
import os
for _fd in range(3, 64):
    try:
        os.write(_fd, b'"refused: nothing"\\n')
    except OSError:
        pass
"""
    assert run(worker, code).notes == ("wrote into the pipe of the grader's notes",)


# Time, disk and processes ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_loop_costs_its_own_task_alone(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks after it earn what they earn where the same function raises an exception."""

    def shortened(checks: list[Check]) -> list[Check]:
        right = ("L1.C.", "L1.D.")
        return [check if check.id.startswith(right) else replace(check, seconds=2.0) for check in checks]

    monkeypatch.setattr(worker, "limited", shortened)
    names = ("rms_norm", "rotary_frequencies", "rotary_table", "apply_rotary")
    loops = "".join(f"\ndef {name}(*arguments):\n    while True: pass\n" for name in names)
    mode = run(worker, loops, reference("L1"))
    earned = {task.id for task in L1.tasks} - {r.check_id.rpartition(".")[0] for r in mode.results if not r.passed}
    assert earned == {"L1.C", "L1.D"}
    statuses = [r for r in mode.results if r.check_id.startswith(("L1.A.", "L1.B."))]
    assert {result.status for result in statuses} == {"timeout"}
    assert "no answer after 2 s of the processor; it was in model.py:" in statuses[0].detail
    assert statuses[0].detail.endswith(" in rms_norm: while True: pass")
    assert "of the same task" in statuses[1].detail


FILES = "for _i in range(8):\n    open(str(_i), 'wb').write(bytes(4 << 20))\n"
DELETED_FILES = """
import os
_streams = []
for _i in range(8):
    _streams.append(open(str(_i), 'wb'))
    _streams[-1].write(bytes(4 << 20))
    _streams[-1].flush()
    os.remove(str(_i))
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [(FILES, "more than 16 MiB in files"), (DELETED_FILES, "more than 16 MiB in files"), (DEPTH, "folders 60 deep")],
    ids=["files", "deleted files", "depth"],
)
def test_disk_is_limited_in_all(worker: Worker, monkeypatch: pytest.MonkeyPatch, code: str, words: str) -> None:
    monkeypatch.setattr(worker.runner, "disk", 16 << 20)
    mode = run(worker, f"{code}\nimport time\ntime.sleep(20)\n")
    written = [result for result in mode.results if not result.check_id.startswith("L1.D.")]  # it is optional
    assert {result.status for result in written} == {"crashed"}
    assert words in mode.results[0].detail


def test_processes_that_fled_to_sessions_of_their_own_are_ended(worker: Worker) -> None:
    """Their user alone shows whose they were."""
    assert "left 20 processes behind" in " ".join(run(worker, FORKS).notes)
    if (uid := worker.confinement.uid) is not None:
        assert not [process for process in psutil.process_iter(["uids"]) if process.info["uids"].real == uid]


def test_memory_in_the_form_of_a_file_is_refused(worker: Worker) -> None:
    mode = run(worker, "\nimport os\ntry:\n    os.memfd_create('x')\nexcept OSError as error:\n    print(error)\n")
    assert "Operation not permitted" in mode.log


# The kernel alone -----------------------------------------------------------------------------------------------------

CONFINED = """
import ctypes, os, resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
from smoke.grade.confinement import Confinement, confine
from smoke.grade.enclosure import Spaces
from smoke.grade.landlock import interpreter_paths
folder, target = Path(sys.argv[2]), sys.argv[3]
uid = int(sys.argv[4]) or None
confine(Confinement(uid, True, 2**31, 60, interpreter_paths()), folder, Spaces())
libc = ctypes.CDLL(None, use_errno=True)
def tried(function):
    try:
        return bool(function())
    except (OSError, RuntimeError):
        return False
def by_folder():
    return os.open("model.py", os.O_RDONLY, dir_fd=os.open(os.path.dirname(target), os.O_PATH))
print(libc.open(target.encode(), os.O_RDONLY) >= 0, tried(lambda: torch.from_file(target, size=10, dtype=torch.uint8)),
      tried(by_folder), libc.system(b"true") == 0, libc.socket(1, 1, 0) >= 0, libc.memfd_create(b"x", 0) >= 0,
      libc.syscall({"x86_64": 56, "aarch64": 220}[os.uname().machine], 0x10000011, 0, 0, 0, 0) >= 0,
      tried(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU)),
      libc.syscall(319 | 0x40000000, b"x", 0) >= 0, libc.shmget(0, 4096, 0o1600) >= 0,
      tried(lambda: open("/etc/passwd").read()),
      tried(lambda: open(folder / "own.txt", "w").write("own")), tried(lambda: __import__("wave")))
"""


def test_the_kernel_refuses_what_comes_past_the_hook() -> None:
    """No audit hook here: what remains is Landlock, for files and programs, and seccomp."""
    if sys.platform != "linux" or os.uname().machine not in MACHINES or libc().syscall(LANDLOCK_CREATE, None, 0, 1) < 1:
        pytest.skip("this system has no Landlock or no filter of system calls")
    with tempfile.TemporaryDirectory(prefix="smoke-") as name:
        Path(name).chmod(0o777)
        uid = FIRST_UID + 41 if os.geteuid() == 0 else 0
        words = [sys.executable, "-c", CONFINED, str(ROOT), name, str(MODEL), str(uid)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*["False"] * 11, "True", "True"]


def answer_of(program: bytes, machine: int, number: int, first: int) -> int:
    """Run a filter as the kernel does on a call with its first argument -> what the filter returns."""
    shown = {0: number, 4: machine, 16: first}
    place, loaded = 0, 0
    while True:
        kind, held, otherwise, value = struct.unpack_from("=HBBI", program, 8 * place)
        if kind == 0x06:
            return int(value)
        if kind == 0x20:
            loaded = shown[value]
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[kind]
            place += held if holds else otherwise
        place += 1


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_refuses_its_lists_and_allows_the_rest(machine: str) -> None:
    which, code = list(MACHINES).index(machine), MACHINES[machine]
    allowed, refused, unknown = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    ask = partial(answer_of, filter_program(machine, 7), code)
    others = set(range(500)) - {pair[which] for pair in (*CALLS.values(), *ON_ITSELF.values(), CLONE_3)}
    assert {ask(pair[which], 0) for pair in CALLS.values()} == {refused}
    assert {(ask(pair[which], 0), ask(pair[which], 8)) for pair in ON_ITSELF.values()} == {(allowed, refused)}
    assert {ask(number, 7) for number in others} == {allowed}
    assert (ask(SIGNAL_THREAD[which], 7), ask(SIGNAL_THREAD[which], 8)) == (allowed, refused)
    threads, processes = 0x3D0F00, 17  # how the C library starts either
    assert {ask(CLONE[which], flags) for flags in (threads, processes)} == {allowed}
    assert {ask(CLONE[which], 1 << bit | processes) for bit in (17, 25, 26, 27, 28, 29, 30)} == {refused}
    assert ask(CLONE_3[which], 0) == unknown
    assert {answer_of(filter_program(machine, 7), code ^ 1, 1, 0), ask(0x40000001, 0)} == {refused}
