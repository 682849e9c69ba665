"""Whether Triton's interpreter, which L8's checks run kernels in, works on this machine.

Owns: asking a process of its own, once, and what a failed check says where it does not. Must not know: how a check
compares.
"""

import importlib.util
import os
import subprocess
import sys
import warnings
from functools import cache

from smoke.framework.check import Check, Result
from smoke.framework.manifest import ROOT

LESSON_ID = "L8"
CANARY_SECONDS = 120.0


def allow_infinities() -> None:
    """Let the interpreter compute infinity without a warning: it is what SiLU and the noise of a draw want."""
    for words in ("overflow", "divide by zero"):
        warnings.filterwarnings("ignore", f"{words} encountered", RuntimeWarning, "triton.runtime.interpreter")


@cache
def triton_fault() -> str | None:
    """Run a kernel of a few lines in Triton's interpreter; return why that is impossible, or ``None``.

    Only L8 needs it. The interpreter has to be chosen before the first import, so this takes a process of its own.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; L8 will need it, nothing before"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "smoke.runner.canary"]
    try:
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=CANARY_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"Triton has not run a kernel of a few lines in {CANARY_SECONDS:.0f} s"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def excused(check: Check, result: Result) -> Result:
    """Return ``result``, or that its check was skipped if it failed where Triton itself cannot run a kernel.

    Nothing is known of a kernel then, so a skipped check is no pass either. Where Triton is not there at all the check
    says so itself, and one that needs no kernel may fail for a reason of its own.
    """
    if result.status != "fail" or check.lesson_id != LESSON_ID or importlib.util.find_spec("triton") is None:
        return result
    fault = triton_fault()
    return result if fault is None else Result(check.id, "skipped", detail=fault, seconds=result.seconds)
