"""What runs inside a candidate's process, and the clean process that it is forked from.

Owns: the fork server's loop and the probes' loop. Must not know: verdicts. The server imports the checks once, with
torch and transformers where they need them, and never ``mini_engine``, so each candidate starts within milliseconds in
a process that nothing has touched.

Protocol: one JSON order per line on stdin; per order, on stdout, ``{"pid": …}`` at once and at the end
``{"exit": …, "notes": […]}``. Answers are files in the order's folder: ``imported.json`` first, then ``N.json`` for
each probe. At the signal SIGUSR1 every thread's stack is written to ``stack.txt`` there.
"""

import faulthandler
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mini_engine import overlay
from smoke.framework.check import Check, all_checks, describe_error, load_check, run_probe, use_one_thread
from smoke.runner.interpreter import allow_infinities
from smoke.runner.transport import STACK, write_answer


class Surroundings:
    """What is done around each candidate's process: nothing here; grading confines it."""

    def begin(self, checks: Mapping[str, Check]) -> None:
        """Be called in the server once: what probes use is imported here, so that no process has to wait for it."""
        if any(check.asks_peer for check in checks.values()):
            from smoke.framework import peer

            peer.qwen3()

    def prepare(self, order: dict[str, Any]) -> None:
        """Be called in the server before the process is forked."""

    def fork(self) -> int:
        """Fork the candidate's process -> 0 in it; in the server its process id."""
        pid = os.fork()
        if pid:
            with suppress(OSError):
                os.setpgid(pid, pid)  # here and in the child, in whatever order they run
        return pid

    def wait(self, pid: int) -> int:
        """Wait for the end of the process that ``fork`` gave -> its exit status; below 0 the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def enter(self, order: dict[str, Any]) -> None:
        """Be called in the forked process, ahead of anything of the candidate."""

    def leave(self) -> list[str]:
        """Be called in the server when the process has ended -> notes about it."""
        return []


def serve(around: Surroundings | None = None, ids: Sequence[str] = ()) -> None:
    """Read orders until stdin closes; run each in a forked child. ``ids``: the checks to import, all without it."""
    around = around or Surroundings()
    allow_infinities()
    checks = {check_id: load_check(check_id) for check_id in ids} or all_checks()
    around.begin(checks)
    use_one_thread()
    assert not overlay.loaded_modules(), "the server must not import the engine"
    gc.freeze()  # a collection in a child would copy every page that it shares with the server
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "tests" in order:
            import pytest  # noqa: F401 (once, for all processes that are forked from here)
        around.prepare(order)
        pid = around.fork()
        if pid == 0:
            become_candidate(order, around, checks)
        print(json.dumps({"pid": pid}), flush=True)
        code = around.wait(pid)
        print(json.dumps({"exit": code, "notes": around.leave()}), flush=True)


def become_candidate(order: dict[str, Any], around: Surroundings, checks: Mapping[str, Check]) -> None:
    """Run the order in this fresh process and end it; never returns."""
    try:
        with suppress(OSError):
            os.setpgid(0, 0)  # a group of its own, so that whatever it starts can be ended with it
        out = Path(order["out"])
        log = os.open(out / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for name, limit in order.get("limits", {}).items():
            resource.setrlimit(getattr(resource, name), (limit, limit))
        os.chdir(out)
        around.enter(order)
        faulthandler.register(signal.SIGUSR1, (out / STACK).open("w"))
        code = run_order(order, out, checks)
        sys.stdout.flush()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(code)


def run_order(order: dict[str, Any], out: Path, checks: Mapping[str, Check]) -> int:
    """Import the candidate's files, then run its probes one by one, or a test file -> the exit status."""
    sys.dont_write_bytecode = True
    folders = [overlay.PACKAGE]
    if order["overlay"] is not None:
        folders.append(order["overlay"])
        fill = order.get("fill", False)
        judged = order.get("judged", ())
        overlay.install_overlay(Path(order["overlay"]), order["files"], fill, judged)
    if "tests" in order:
        return run_tests(order["tests"], out)
    fault = import_fault(order.get("imported", order["files"]), folders)
    (out / "imported.partial").write_text(json.dumps({"fault": fault}))
    (out / "imported.partial").rename(out / "imported.json")
    if fault is not None:
        return 0
    for index, check_id in order["checks"]:
        started = time.perf_counter()
        answer = run_probe(checks[check_id], order["seed"], folders)
        seconds = time.perf_counter() - started
        sys.stdout.flush()  # what the candidate printed reaches the log even if the next probe ends the process
        write_answer(out, index, answer, seconds)
    return 0


def run_tests(file: str, out: Path) -> int:
    """Run one pytest file, without any configuration or plugin of other packages -> pytest's exit status."""
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # loading those that are installed can take ten seconds
    sys.path.insert(0, str(Path(file).parent))
    options = ["-q", "-x", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(out)]
    return int(pytest.main([*options, file]))


def import_fault(files: list[str], folders: list[str]) -> str | None:
    """Import every file of the overlay; return what went wrong with the first that cannot be, or ``None``."""
    for file in files:
        try:
            importlib.import_module(overlay.module_name(file))
        except (Exception, SystemExit) as error:
            described = describe_error(error, folders)
            where = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else described.place
            return f"{file}: {described.kind}: {described.message}" + (f"\n  at {where}" if where else "")
    return None
