"""What a check is, and the registry of all of them.

Owns: ``Check``, ``Failure``, ``Result`` and how a probe's answer becomes a result. Must not know: single lessons, child
processes, files of students.

A check has two halves. The *probe* runs where the candidate lives: it imports ``mini_engine`` inside the function,
calls it and returns plain values (tensors, numbers, strings, None, lists and dicts of them). The *verdict* compares
those values with a spec and runs where the candidate is not, so that nothing that a candidate does to its own process
can change the comparison. Both get the same seed and draw the same inputs from it.

Importing torch takes two seconds, and the checks of pure Python need none: nothing here imports it.
"""

import reprlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from smoke.framework.catalogue import ListedCheck, Named, catalogue
from smoke.framework.manifest import SUITE, Lesson, Manifest, load_manifest

if TYPE_CHECKING:
    from torch import Tensor

Plain = Any  # tensors, numbers, strings, None, lists and dicts of them; ``require_plain`` holds probes to it
Values = dict[str, Plain]
Probe = Callable[[int], Values]
Verdict = Callable[[int, Values], "list[Failure]"]
Status = Literal["pass", "fail", "blocked", "timeout", "crashed", "not-implemented", "skipped"]

DEFAULT_SEED = 0
VERDICTS = threading.Lock()
PLAIN_TYPES = (int, float, str, bool, type(None))
LATEST = 12  # operations that are shown before the one that raised an exception


@dataclass(frozen=True)
class Failure:
    """One difference: which case, where in it, what the spec says and what the candidate gave."""

    case: str
    place: str = ""
    expected: str = ""
    got: str = ""
    note: str = ""


@dataclass(frozen=True)
class Check(Named):
    """One thing that is proved about a lesson. ``id`` is ``TASK.name``; ``proves`` is one sentence.

    ``needs`` names tasks that the probe uses beyond what its own task depends on. ``seconds`` is its time limit.
    ``asks_peer``: whether the probe has inputs from transformers' models.
    """

    proves: str
    probe: Probe
    verdict: Verdict
    needs: tuple[str, ...] = ()
    seconds: float = 20.0
    asks_peer: bool = False


@dataclass(frozen=True)
class ProbeError:
    """An exception that a probe raised: its type's name, its text and the last line of the candidate's own code.

    ``note`` says what the probe had done until then, where it noted that (``noting``). ``calls`` are the candidate's
    functions that were running, the innermost last: ``sampler/filters.py:largest``, with spaces between them.
    """

    kind: str
    message: str
    place: str = ""
    note: str = ""
    calls: str = ""


@dataclass(frozen=True)
class Result:
    """What became of one check of one candidate."""

    check_id: str
    status: Status
    failures: tuple[Failure, ...] = ()
    detail: str = ""
    seconds: float = 0.0
    blocked_by: str = ""

    @property
    def passed(self) -> bool:
        """Whether the check was run and found nothing: every other status counts as not passed."""
        return self.status == "pass"

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "Result":
        """Read the form of ``asdict``."""
        return cls(**{**raw, "failures": tuple(Failure(**failure) for failure in raw["failures"])})


@dataclass
class Registry:
    """Checks by id, in the order of their registration."""

    checks: dict[str, Check] = field(default_factory=dict)

    def add(
        self,
        check_id: str,
        proves: str,
        probe: Probe,
        verdict: Verdict,
        *,
        needs: tuple[str, ...] = (),
        seconds: float = 20.0,
        asks_peer: bool = False,
    ) -> None:
        """Register a check. Mutates. Raises ``ValueError`` for a second one of the same id."""
        if check_id in self.checks:
            raise ValueError(f"check {check_id} is registered twice")
        self.checks[check_id] = Check(check_id, proves, probe, verdict, needs, seconds, asks_peer)


def registries() -> dict[str, Registry]:
    """Import every lesson's checks and return their registries by module, such as "l2.pool"."""
    found: dict[str, Registry] = {}
    for lesson in load_manifest().written:
        for file in sorted((SUITE / "checks" / lesson.folder).glob("*.py")):
            if "\nREGISTRY = " in file.read_text():  # the other files may need Triton
                module = import_module(f"smoke.checks.{lesson.folder}.{file.stem}")
                found[f"{lesson.folder}.{file.stem}"] = module.REGISTRY
    return found


@cache
def all_checks() -> dict[str, Check]:
    """Return every lesson's checks (``checks/l2/*.py``) by id, in the manifest's order.

    Raises ``ValueError`` if a check belongs to no task of the manifest, or a task has no check.
    """
    manifest = load_manifest()
    found = [check for registry in registries().values() for check in registry.checks.values()]
    for check in found:
        for task_id in (check.task_id, *check.needs):
            manifest.task(task_id)
    order = [task.id for task in manifest.tasks]
    found.sort(key=lambda check: order.index(check.task_id))
    checks = {check.id: check for check in found}
    if len(checks) != len(found):
        raise ValueError("a check id is registered in two modules")
    bare = {task.id for task in manifest.tasks} - {check.task_id for check in checks.values()}
    if bare:
        raise ValueError(f"task {min(bare)} has no check")
    return checks


def checks_of(lessons: Iterable[Lesson], pattern: str = "") -> list[Check]:
    """Return the checks of ``lessons`` whose id contains ``pattern`` (case does not matter)."""
    ids = {lesson.id for lesson in lessons}
    return [check for check in all_checks().values() if check.lesson_id in ids and pattern.lower() in check.id.lower()]


def load_check(check_id: str) -> Check:
    """Import the one module that holds a check and return it. Raises ``ValueError`` if the catalogue is out of date."""
    module = import_module(f"smoke.checks.{catalogue()[check_id].module}")
    found: Check | None = module.REGISTRY.checks.get(check_id)
    if found is None:
        raise ValueError(f"{module.__name__} has no check {check_id}; `python -m smoke sync` lists the checks anew")
    return found


def tasks_needed(check: Check | ListedCheck, manifest: Manifest) -> frozenset[str]:
    """Return every task that the check builds on, its own excluded."""
    needed = set(manifest.needs(check.task_id)) | set(check.needs)
    for task_id in check.needs:
        needed |= manifest.needs(task_id)
    return frozenset(needed - {check.task_id})


def is_tensor(value: object) -> "TypeGuard[Tensor]":
    """Whether ``value`` is a tensor; while torch is not imported nothing is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def use_one_thread() -> int:
    """Let torch compute in one thread, as bits depend on their number; return how many it used, 1 without torch."""
    torch = sys.modules.get("torch")
    threads = 1 if torch is None else int(torch.get_num_threads())
    if torch is not None:
        torch.set_num_threads(1)
    return threads


def require_plain(value: object, path: str = "result") -> None:
    """Raise ``TypeError`` unless ``value`` is made of plain types; a subclass could carry code, so it is refused."""
    if type(value) in PLAIN_TYPES or (is_tensor(value) and type(value).__name__ == "Tensor"):
        return
    if type(value) in (list, tuple):
        for index, item in enumerate(value):  # type: ignore[arg-type, var-annotated]
            require_plain(item, f"{path}[{index}]")
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"{path} has a key of type {type(key).__name__}, not str")
            require_plain(item, f"{path}[{key!r}]")
    else:
        raise TypeError(f"{path} is of type {type(value).__name__}; tensors, numbers, strings and lists are expected")


def judge(check: Check, seed: int, values: Values, seconds: float = 0.0) -> Result:
    """Compare a probe's values with the spec. A value that cannot even be compared is a failure, never an error.

    One verdict at a time, whatever threads ask: the number of threads that torch uses is the process's, and so is what
    transformers sets while it loads a model. Two at once made the peer's logits garbage, now and then.
    """
    with VERDICTS:
        use_one_thread()
        try:
            failures = tuple(check.verdict(seed, values))
        except Exception as error:  # malformed values may trip a comparison anywhere
            failures = (Failure("the result has an unexpected form", got=f"{type(error).__name__}: {error}"),)
    return Result(check.id, "fail" if failures else "pass", failures, seconds=seconds)


def result_of_error(check: Check, error: ProbeError, seconds: float = 0.0) -> Result:
    """Turn an exception into a result. ``NotImplementedError`` of a starter names the task that is missing.

    Where Triton is not built for the platform, the checks of its kernels are skipped, which is no pass.
    """
    if error.kind == "ModuleNotFoundError" and "'triton'" in error.message and find_spec("triton") is None:
        return Result(check.id, "skipped", detail="Triton is not installed, and kernels need it", seconds=seconds)
    if error.kind == "NotImplementedError":
        missing = error.message.split(":")[0].strip()
        if missing == check.task_id:
            return Result(check.id, "not-implemented", detail=error.message, seconds=seconds)
        if any(task.id == missing for task in load_manifest().tasks):
            return Result(check.id, "blocked", detail=error.message, seconds=seconds, blocked_by=missing)
    note = "; ".join(filter(None, (whose(error.calls, check.task_id), error.note)))
    failure = Failure("the code raised an exception", error.place, "", f"{error.kind}: {error.message}", note)
    return Result(check.id, "fail", (failure,), seconds=seconds)


def whose(calls: str, task_id: str) -> str:
    """Say that the innermost function of ``calls`` is another task's than ``task_id``; nothing if it is not."""
    tasks = {f"{f.file}:{f.qualname}": task.id for task in load_manifest().tasks for f in task.functions}
    innermost = next((call for call in reversed(calls.split()) if call in tasks), "")
    owner = tasks.get(innermost, task_id)
    if owner == task_id:
        return ""
    name = innermost.partition(":")[2]
    return f"it was raised in `{name}`, which you wrote in {owner}: see first whether {owner} passes"


def block_dependents(results: Sequence[Result], *, fill: bool = False) -> list[Result]:
    """Relabel a failed check as blocked when a task that it builds on has a failed check of its own.

    What a check says is worth nothing while the code beneath it is wrong. A check that passes stays passed. ``fill``:
    the reference stood in for what is not written, which blocks nothing then.
    """
    manifest = load_manifest()
    checks = catalogue()
    harmless = {"pass", "skipped", *(["not-implemented"] if fill else [])}
    broken = {checks[r.check_id].task_id for r in results if r.status not in harmless}
    relabelled = []
    for result in results:
        causes = sorted(broken & tasks_needed(checks[result.check_id], manifest))
        if causes and result.status in ("fail", "timeout", "crashed"):
            result = replace(result, status="blocked", blocked_by=causes[0])  # noqa: PLW2901
        relabelled.append(result)
    return relabelled


def describe_error(error: BaseException, engine_folders: Sequence[str] = ("mini_engine",)) -> ProbeError:
    """Reduce an exception to text, with the innermost line that belongs to the engine or the candidate.

    The last of ``engine_folders`` is the candidate's. If the line is not of it, the candidate's innermost line follows.
    Triton's interpreter wraps what a kernel raises; the wrapped exception is reported.
    """
    place, own = "", ""
    calls = list[str]()
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    stack = (frame.f_code.co_qualname for frame, _ in traceback.walk_tb(error.__traceback__))
    for frame, name in zip(traceback.extract_tb(error.__traceback__), stack, strict=True):
        if any(folder in frame.filename for folder in engine_folders):
            place = f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
            if engine_folders[-1] in frame.filename:
                own = place
                calls.append(f"{frame.filename.rpartition(engine_folders[-1] + '/')[2]}:{name}")
    if own and own != place:
        place += f", called from {own}"
    note = "; ".join(map(str, getattr(error, "__notes__", [])))
    return ProbeError(type(error).__name__, str(error)[:2000], place, note[:2000], " ".join(calls)[-2000:])


@contextmanager
def noting() -> Iterator[list[object]]:
    """Give a list for what is done, each entry just before; an exception carries it as a note. The last is in full."""
    done: list[object] = []
    try:
        yield done
    except Exception as error:
        if done:
            *before, last = done
            shown = [each if isinstance(each, str) else reprlib.repr(each) for each in before[-LATEST:]]
            story = "; ".join(["…"] * (len(before) > LATEST) + shown)
            error.add_note(f"in operation {len(before)}: {last}" + (f"; before it: {story}" if story else ""))
        raise


def run_probe(check: Check, seed: int, engine_folders: Sequence[str] = ("mini_engine",)) -> Values | ProbeError:
    """Run a probe in this process with one thread, as the other half is run."""
    use_one_thread()
    try:
        values = check.probe(seed)
        require_plain(values)
    except Exception as error:
        return describe_error(error, engine_folders)
    return values


def run_here(check: Check, seed: int = DEFAULT_SEED) -> Result:
    """Run both halves in this process, on the ``mini_engine`` that it imports: the way of pytest."""
    threads = use_one_thread()
    started = time.perf_counter()
    try:
        answer = run_probe(check, seed)
        seconds = time.perf_counter() - started
        if isinstance(answer, ProbeError):
            return result_of_error(check, answer, seconds)
        return judge(check, seed, answer, seconds)
    finally:
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads)
