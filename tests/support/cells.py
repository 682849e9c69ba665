"""Cells of notebooks in one Python process, without a kernel and without pictures.

``elsewhere()`` gives processes that compute as on the least CPU, with sums that are rounded otherwise. They are forked
from a server that has imported once what notebooks import.
"""

import io
import os
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from unittest import mock

from tests.support.rounding import LEAST, OTHERWISE

PRELOADED = ["tests.support.cells", "IPython", "transformers.models.qwen3.modeling_qwen3", "mini_engine.llm"]
PRELOADED += [f"mini_engine.viz.{part}" for part in ("figure", "sliders", "peer", "tokens")]


@cache
def elsewhere(**environment: str) -> ForkServerContext:
    """Return what starts such processes, with more variables of the environment."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, environment | LEAST | OTHERWISE):
        forkserver.ensure_running()
    return context


def outputs(sources: dict[str, str]) -> dict[str, str]:
    """Run cells, given by name -> what each prints, and the words of what its last line shows."""
    computed = import_module("torch").backends.cpu.get_cpu_capability()
    assert computed == "DEFAULT", f"this process computes as on a CPU with {computed}: another server was running"
    shell = import_module("IPython.core.interactiveshell").InteractiveShell.instance()
    shell.display_formatter.active_types = ["text/plain"]  # nothing is drawn

    def show(value: object) -> None:
        if value is not None:
            print(shell.display_formatter.format(value)[0]["text/plain"])

    shell.display_trap.hook = show
    texts = {}
    for name, source in sources.items():
        with redirect_stdout(io.StringIO()) as printed:
            result = shell.run_cell(source)
        result.raise_error()
        texts[name] = printed.getvalue()
    return texts
