"""Verdicts in a process of their own, with limits: an answer may be made to use up the time or memory of who reads it.

Owns: the process and what is said to it. Must not know: how a check compares. The process keeps what the oracles
computed; one that passed a limit is ended, and the next answer gets a new one.

Protocol: one JSON order per line on stdin, one result per line on stdout.
"""

import json
import os
import resource
import select
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from smoke.framework import peer
from smoke.framework.check import Check, Result, all_checks
from smoke.framework.manifest import ROOT
from smoke.runner.runner import PATIENCE, START_SECONDS, Answer, judge_answer
from smoke.runner.usage import Use

BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from smoke.grade.judge import serve; serve()"
WAIT_SECONDS = 0.1


class Judge:
    """Has answers compared with ``seconds`` and ``memory`` bytes for each."""

    def __init__(self, seconds: int, memory: int) -> None:
        """Prepare; the process starts with the first answer."""
        self.seconds = seconds
        self.memory = memory
        self.spent = 0.0  # seconds in all
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, check: Check, seed: int, folder: Path, index: int) -> tuple[Result, Answer | None]:
        """Have the answer number ``index`` in ``folder`` compared -> the result, and never the answer."""
        process = self.started()
        assert process.stdin is not None, "it was started with a pipe"
        use = Use(process.pid, process.pid, folder, self.seconds, PATIENCE)
        order = {"check": check.id, "seed": seed, "folder": str(folder), "index": index}
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        line = self.hear(use)
        self.spent += use.spent()
        if line:
            return Result.parse(json.loads(line)), None
        why = f"no verdict after {self.seconds} s" if use.spent() > self.seconds else "the process ended"
        self.close()
        return Result(check.id, "crashed", detail=f"the result cannot be judged: {why}"), None

    def hear(self, use: Use) -> str:
        """Return the process's next line; the empty text if its time is over or it is gone."""
        assert self.process is not None, "it was started"
        assert self.process.stdout is not None, "it was started with a pipe"
        while not select.select([self.process.stdout], [], [], WAIT_SECONDS)[0]:
            if use.excess() is not None:
                return ""
        return self.process.stdout.readline()

    def started(self) -> subprocess.Popen[str]:
        """Return the process, after starting it if needed. Raises ``RuntimeError`` if it does not come up."""
        if self.process is None or self.process.poll() is not None:
            self.close()
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", BOOT, str(ROOT), str(self.memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            pid = self.process.pid
            if not self.hear(Use(pid, pid, ROOT, START_SECONDS, PATIENCE)):
                self.close()
                raise RuntimeError("the process that judges answers did not start")
        return self.process

    def close(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            self.process.kill()
            with suppress(BrokenPipeError):
                self.process.communicate()
            self.process = None


def serve() -> None:
    """Judge what stdin names until it closes. Beyond what is loaded by then, memory is limited."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    checks = all_checks()
    peer.qwen3()  # not on the clock of the first answer
    with suppress(OSError):
        mapped = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (mapped + int(sys.argv[2]),) * 2)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        result, _ = judge_answer(checks[order["check"]], order["seed"], Path(order["folder"]), order["index"])
        print(json.dumps(asdict(result)), file=answers, flush=True)
