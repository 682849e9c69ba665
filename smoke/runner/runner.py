"""Running a candidate: the reference with an overlay of files, in a process of its own, judged from here.

Owns: the server processes, time limits, and what a dead or silent child means. Must not know: how a check compares.

One mechanism serves a student's files, starters, mutants and wheats. Every check ends in one of the statuses of
``check.Status``; a child that ends early or hangs costs the check that was running and no other: the rest is run in a
new child, at most ``MAX_RESTARTS`` times. In grading it costs the whole task, whose points are lost by then, and there
is a new child for every other one.
"""

import json
import linecache
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from smoke.framework.check import DEFAULT_SEED, Check, ProbeError, Result, Status, Values, judge, result_of_error
from smoke.framework.manifest import ROOT
from smoke.runner.interpreter import excused
from smoke.runner.transport import STACK, read_answer, read_json, read_regular
from smoke.runner.usage import Deadline, Use, parent_of

MAX_RESTARTS = 3
PATIENCE = 4.0  # seconds on the clock for each second of processor time: the machine may be busy
IMPORT_SECONDS = 30.0
START_SECONDS = 120.0
END_SECONDS = 60.0  # ending a thousand processes takes half of that
POLL_SECONDS = 0.005
MAX_LOG_BYTES = 64 * 2**20
MAX_STACK_BYTES = 2**20
STACK_SECONDS = 1.0  # for a process that hangs to write where it does
MAX_THREADS = 3  # that are named
# What holds libraries to an older CPU: candidates compute the bits that their verdicts compare, in another process.
CAPS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "OPENBLAS_CORETYPE")
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from smoke.runner.child import serve; serve(ids=sys.argv[2:])"

MAX_FAULT_BYTES = 2**20

Answer = Values | ProbeError
Report = Callable[[Result], object]
Judge = Callable[[Check, int, Path, int], tuple[Result, Answer | None]]


@dataclass(frozen=True)
class Candidate:
    """The reference with ``files`` of the folder ``overlay`` in place of its own; no overlay is the reference itself.

    ``files`` are relative both to the folder and to ``mini_engine``. Nothing else in the folder is ever imported.
    ``fill``: what is not written yet is the reference's, except for the tasks ``judged``. ``imported``: the files that
    have to be importable, all of them without it.
    """

    name: str
    overlay: Path | None = None
    files: tuple[str, ...] = ()
    fill: bool = False
    judged: tuple[str, ...] = ()
    imported: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a candidate: one result per check, and why it could not be imported, if it could not.

    ``answers``: what the probes of the failed checks returned, by check id.
    """

    candidate: Candidate
    results: tuple[Result, ...]
    import_fault: str | None = None
    log: str = ""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class Run:
    """One candidate's checks while they are being run. ``results`` fills up."""

    candidate: Candidate
    checks: Sequence[Check]
    seed: int
    report: Report
    results: dict[int, Result] = field(default_factory=dict)
    import_fault: str | None = None
    log: str = ""
    answers: dict[str, Answer] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def settle(self, index: int, result: Result) -> None:
        """Keep one result and tell about it. Mutates."""
        self.results[index] = result
        self.report(result)

    @property
    def waiting(self) -> list[tuple[int, str]]:
        """The checks that have no result yet, with their numbers."""
        return [(index, check.id) for index, check in enumerate(self.checks) if index not in self.results]

    def give_up_tasks(self) -> None:
        """Settle the waiting checks of tasks that ended a process: they would only end the next one too. Mutates."""
        ended = {self.checks[i].task_id: r for i, r in self.results.items() if r.status in ("timeout", "crashed")}
        for index, check_id in self.waiting:
            cause = ended.get(self.checks[index].task_id)
            if cause is not None:
                detail = f"not run, because {cause.check_id} of the same task ended so: {cause.detail}"
                self.settle(index, Result(check_id, cause.status, detail=detail))


class Runner:
    """Runs candidates one after the other through a fork server of its own. Use it as a context manager.

    ``time_factor`` stretches every time limit. ``limits`` are ``resource`` limits of each child by name, such as
    ``{"RLIMIT_AS": 4 << 30}``. ``environment`` adds to the few variables that children get. ``boot`` is the line of
    Python that runs the server; grading has one whose children are confined.

    ``patience``: above 1, a time limit is one of the processor, and that many times as long on the clock, so a busy
    machine costs no check. ``gives_up_tasks``: a task that ended a process is not run again, and every other task has
    its chance, however many processes that takes. ``disk`` are the bytes that a child may keep in files. ``judge``
    compares an answer: given a check, a seed, the folder and the number of the answer. ``sweep`` is called
    when a server was ended, which may have left something.
    """

    def __init__(
        self,
        *,
        time_factor: float = 1.0,
        limits: Mapping[str, int] | None = None,
        environment: Mapping[str, str] | None = None,
        boot: str = BOOT,
        patience: float = 1.0,
        gives_up_tasks: bool = False,
        disk: int | None = None,
        judge: Judge | None = None,
        sweep: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare; the server starts with the first candidate."""
        self.time_factor = time_factor
        self.limits = dict(limits or {})
        self.patience = patience
        self.gives_up_tasks = gives_up_tasks
        self.disk = disk
        self.judge = judge or judge_answer
        self.sweep = sweep
        self.spent = 0.0  # seconds that its children have used, counted as their limits are
        self.environment = dict(environment or {})
        self.boot = boot
        self.home = Path(tempfile.mkdtemp(prefix="smoke-"))
        self.server: subprocess.Popen[str] | None = None
        self.is_ready = False
        self.ids = set[str]()

    def __enter__(self) -> Self:
        """Return the runner."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server and remove its files."""
        self.close()

    def close(self) -> None:
        """End the server and remove its files."""
        self.stop_server()
        remove(self.home)

    def stop_server(self) -> None:
        """End the server process, if there is one."""
        if self.server is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()
            for stream in (self.server.stdin, self.server.stdout):
                if stream is not None:
                    with suppress(OSError):
                        stream.close()
            self.server = None
            self.sweep()

    def limit(self, pid: int, folder: Path, seconds: float) -> Deadline | Use:
        """Begin to count the time that a child has for one answer."""
        if self.patience == 1:
            return Deadline(seconds)
        return Use(pid, parent_of(pid), folder, seconds, self.patience, self.disk)

    def prepare(self, ids: Collection[str]) -> None:
        """Start a server that imports the checks ``ids`` alone, and do not wait for it. Mutates.

        A server that has imported others goes on if it has these, too, and is ended otherwise.
        """
        if self.server is None or self.server.poll() is not None or not self.ids.issuperset(ids):
            self.stop_server()
            self.ids = set(ids)
            self.launch()

    def start_server(self) -> subprocess.Popen[str]:
        """Return the running server, after starting it if needed. Raises ``RuntimeError`` if it does not come up."""
        if self.server is None or self.server.poll() is not None:
            self.stop_server()
            self.launch()
        assert self.server is not None, "it was launched"
        if not self.is_ready and "ready" not in (self.hear(START_SECONDS) or {}):
            words = (self.home / "server.log").read_text()[-2000:]
            self.stop_server()
            raise RuntimeError(f"the process that runs candidates did not start: {words}")
        self.is_ready = True
        return self.server

    def launch(self) -> None:
        """Start the server's process. Mutates."""
        passed = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", *CAPS) if name in os.environ}
        environment = {
            **passed,
            "HOME": str(self.home),
            "TMPDIR": str(self.home),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "1",  # kernels run on CPU tensors, on every machine alike; read when Triton is imported
            "OMP_WAIT_POLICY": "PASSIVE",  # threads of a busy machine must not spin for each other
            **self.environment,
        }
        errors = (self.home / "server.log").open("w")
        self.server = subprocess.Popen(
            [sys.executable, "-I", "-c", self.boot, str(ROOT), *sorted(self.ids)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            cwd=self.home,
            start_new_session=True,
        )
        errors.close()
        self.is_ready = False

    def stdout(self) -> IO[str]:
        """Return the pipe that the server speaks into."""
        assert self.server is not None, "no server was started"
        assert self.server.stdout is not None, "the server was started with a pipe"
        return self.server.stdout

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """Return the server's next message, or ``None`` if none comes in time or the server is gone."""
        stream = self.stdout()
        ready, _, _ = select.select([stream], [], [], seconds)
        line = stream.readline() if ready else ""
        try:
            message = json.loads(line)
        except json.JSONDecodeError:
            return None
        return message if isinstance(message, dict) else None

    def run(
        self,
        candidate: Candidate,
        checks: Sequence[Check],
        seed: int = DEFAULT_SEED,
        report: Report = lambda _: None,
        work: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """Run ``checks`` on a candidate; ``report`` hears every result as it comes. ``work`` adds to the order."""
        run = Run(candidate, checks, seed, report)
        for _ in range(len(checks) if self.gives_up_tasks else MAX_RESTARTS + 1):
            if not run.waiting or run.import_fault is not None:
                break
            self.run_child(run, work or {})
            if self.gives_up_tasks:
                run.give_up_tasks()
        for index, check_id in run.waiting:
            if run.import_fault is not None:
                run.settle(index, Result(check_id, "crashed", detail=f"cannot be imported: {run.import_fault}"))
            else:
                detail = f"not run: the process had to be started {MAX_RESTARTS + 1} times before this check"
                run.settle(index, Result(check_id, "skipped", detail=detail))
        results = tuple(run.results[index] for index in range(len(checks)))
        return Outcome(candidate, results, run.import_fault, run.log, run.answers, tuple(run.notes))

    def run_child(self, run: Run, work: Mapping[str, Any]) -> None:
        """Run the waiting checks in one child until it ends, hangs or is done. Mutates ``run``."""
        out, pid = self.order(run.candidate, {"checks": run.waiting, "seed": run.seed, **work})
        try:
            Watch(self, run, out, pid).follow()
        finally:
            run.log += read_log(out)
            remove(out)

    def run_tests(self, candidate: Candidate, tests: Path, seconds: float) -> tuple[int, str]:
        """Run a pytest file on a candidate -> its exit status, -1 after ``seconds``, and what was printed."""
        out, pid = self.order(candidate, {"tests": str(tests.resolve())})
        watch = Watch(self, Run(candidate, (), DEFAULT_SEED, lambda _: None), out, pid)
        try:
            watch.wait_for("never", seconds)  # only the end of the process ends this
            return (-1 if watch.exit_code is None else watch.exit_code), read_log(out)
        finally:
            watch.end_child()
            remove(out)

    def order(self, candidate: Candidate, work: Mapping[str, Any]) -> tuple[Path, int]:
        """Have a child forked for ``work`` -> the folder that it writes to, and its process id."""
        server = self.start_server()
        assert server.stdin is not None, "the server was started with a pipe"
        out = Path(tempfile.mkdtemp(dir=self.home))
        overlay = candidate.overlay
        message = {
            "overlay": None if overlay is None else str(overlay.resolve()),
            "files": list(candidate.files),
            "fill": candidate.fill,
            "judged": list(candidate.judged),
            "imported": list(candidate.files if candidate.imported is None else candidate.imported),
            "out": str(out),
            "limits": self.limits,
            **work,
        }
        server.stdin.write(json.dumps(message) + "\n")
        server.stdin.flush()
        pid = int((self.hear(START_SECONDS) or {"pid": 0})["pid"])
        if not pid:
            self.stop_server()
            raise RuntimeError("the process that runs candidates gave no answer")
        return out, pid


def judge_answer(check: Check, seed: int, folder: Path, index: int) -> tuple[Result, Answer | None]:
    """Read the answer number ``index`` and compare it -> the result, and the answer if it could be read.

    Whatever a candidate may have written, this ends in a result.
    """
    try:
        answer, seconds = read_answer(folder, index)
        if isinstance(answer, ProbeError):
            return result_of_error(check, answer, seconds), answer
        return judge(check, seed, answer, seconds), answer
    except ValueError as error:
        return Result(check.id, "crashed", detail=str(error)), None
    except Exception as error:
        detail = f"the result cannot be judged: {type(error).__name__}: {error}"
        return Result(check.id, "crashed", detail=detail), None


SIGNALS: dict[int, str] = {
    signal.SIGSEGV: "it used memory that is not its own",
    signal.SIGKILL: "killed, often for its use of memory",
}


def ending(exit_code: int) -> str:
    """Say how a process ended: below 0 stands the number of the signal that ended it."""
    meaning = SIGNALS.get(-exit_code)
    return f"with exit status {exit_code}" + (f" ({signal.Signals(-exit_code).name}: {meaning})" if meaning else "")


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it, as far as that is possible; links are not followed."""
    with suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:  # a candidate may nest folders deeper than Python can follow
        subprocess.run(["rm", "-rf", "--", str(path)], check=False, capture_output=True)


def read_log(out: Path) -> str:
    """Return the end of what a child printed; nothing if it put a pipe, a link or a huge file in its place."""
    try:
        return read_regular(out / "log.txt", MAX_LOG_BYTES).decode(errors="replace")[-10_000:]
    except (OSError, ValueError):
        return ""


def own_places(stacks: str, candidate: Candidate) -> list[str]:
    """Return the innermost line of each thread that is in a file of the candidate, as ``driver.py:7 in step: …``."""
    if candidate.overlay is None:
        return []
    files = {str((candidate.overlay / file).resolve()): file for file in candidate.files}
    found: list[str] = []
    for thread in re.split(r"^(?:Current thread|Thread) 0x", stacks, flags=re.MULTILINE):
        frames = re.findall(r'^  File "(.+)", line (\d{1,6}) in ([\w<>]{1,80})$', thread, flags=re.MULTILINE)
        path, number, name = next((frame for frame in frames if frame[0] in files), ("", "", ""))
        if path:
            linecache.checkcache(path)
            found.append(f"{files[path]}:{number} in {name}: {linecache.getline(path, int(number)).strip()[:120]}")
    return list(dict.fromkeys(found))[:MAX_THREADS]


class Watch:
    """Follows one child through the files it writes."""

    def __init__(self, runner: Runner, run: Run, out: Path, pid: int) -> None:
        """Follow the child ``pid``, which writes to ``out``."""
        self.runner = runner
        self.run = run
        self.out = out
        self.pid = pid
        self.exit_code: int | None = None
        self.over = ""  # what it used too much of, besides time

    def follow(self) -> None:
        """Collect results until the child is gone; end it when a limit is passed. Mutates the run."""
        try:
            self.await_import()
            if self.run.import_fault is None:
                for index, _ in self.run.waiting:
                    if not self.await_check(index):
                        break
        finally:
            self.end_child()

    def wait_for(self, name: str, seconds: float) -> bool:
        """Wait until the child has written the file ``name``; ``False`` if it ends, or time does, before that."""
        limit = self.runner.limit(self.pid, self.out, seconds * self.runner.time_factor)
        file = self.out / name
        while not file.exists():
            if self.exit_code is None and self.server_spoke():
                continue  # look once more: the file may have come just before the end
            excess = limit.excess() if self.exit_code is None else None
            self.over = excess or ""
            if self.exit_code is not None or excess is not None:
                break
            time.sleep(POLL_SECONDS)
        self.runner.spent += limit.spent()
        return file.exists()

    def server_spoke(self) -> bool:
        """Read the exit message of the child if it is there; a server that is gone counts as one."""
        if not select.select([self.runner.stdout()], [], [], 0)[0]:
            return False
        self.ended(self.runner.hear(0))
        return True

    def ended(self, message: dict[str, Any] | None) -> None:
        """Keep what the server said about the end of the child; without a word, the server is ended too. Mutates."""
        self.exit_code = -1 if message is None else int(message.get("exit", -1))
        if message is None:
            self.runner.stop_server()
        else:
            self.run.notes += [note for note in message.get("notes", []) if note not in self.run.notes]

    def await_import(self) -> None:
        """Wait for the candidate's files to be imported. Mutates the run when they cannot be."""
        fault: Any
        if self.wait_for("imported.json", IMPORT_SECONDS):
            try:
                fault = read_json(self.out / "imported.json", MAX_FAULT_BYTES)["fault"]
            except (ValueError, KeyError, TypeError):
                fault = "its import left no readable answer"
        elif self.exit_code is not None:
            fault = f"the process ended during the import, {ending(self.exit_code)}"
        else:
            fault = self.over or f"the import took longer than {IMPORT_SECONDS * self.runner.time_factor:.0f} s"
        self.run.import_fault = None if fault is None else str(fault)

    def await_check(self, index: int) -> bool:
        """Wait for one check and judge it; ``False`` if the child cannot go on. Mutates the run."""
        check = self.run.checks[index]
        if not self.wait_for(f"{index}.json", check.seconds):
            limit = check.seconds * self.runner.time_factor
            if self.exit_code is None:
                status: Status = "crashed" if self.over else "timeout"
                late = f"no answer after {limit:.0f} s" + (" of the processor" if self.runner.patience > 1 else "")
                self.run.settle(index, Result(check.id, status, detail=self.over or late + self.hanging()))
            else:
                detail = f"the process ended before it answered, {ending(self.exit_code)}"
                self.run.settle(index, Result(check.id, "crashed", detail=detail))
            return False
        self.run.settle(index, excused(check, self.judged(check, index)))
        for suffix in ("json", "safetensors"):
            remove(self.out / f"{index}.{suffix}")
        return True

    def hanging(self) -> str:
        """Say in which lines of its own files the child is, thread by thread; nothing if it does not answer."""
        with suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS
        text = ""
        before = None
        while text != before and time.monotonic() < deadline:  # until nothing more is written
            time.sleep(POLL_SECONDS)
            with suppress(OSError, ValueError):
                now = read_regular(self.out / STACK, MAX_STACK_BYTES).decode(errors="replace")
                text, before = now, text or None
        places = own_places(text, self.run.candidate)
        return f"; it was in {' and in '.join(places)}" if places else ""

    def judged(self, check: Check, index: int) -> Result:
        """Have one answer compared, and keep it if it is wrong."""
        result, answer = self.runner.judge(check, self.run.seed, self.out, index)
        if result.status == "fail" and answer is not None:
            self.run.answers[check.id] = answer
        return result

    def end_child(self) -> None:
        """End the child and everything that it started, and hear the server confirm it."""
        for end in (os.killpg, os.kill):  # it may have left its group
            with suppress(ProcessLookupError, PermissionError):
                end(self.pid, signal.SIGKILL)
        if self.exit_code is None:
            self.ended(self.runner.hear(END_SECONDS))
