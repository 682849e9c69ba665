"""What experiments found on this machine, kept on disk so that each of them runs once.

A finding holds for one CPU, for the versions of the libraries, for the variables that cap what they use, and for the
number of threads. The file is named after these, so another machine has another file. Where the file cannot be used,
the experiments run again.
"""

import contextlib
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

RECIPE = 6  # counts up when an experiment changes, so that older findings are not used
CAPS = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "OPENBLAS_CORETYPE",
    "NUMBA_CPU_NAME",
    "NUMBA_CPU_FEATURES",
)


def remembered(name: str, experiment: Callable[[], Any]) -> Any:
    """Return what was found under ``name``; if nothing was, run ``experiment``, whose result must be JSON."""
    file = path()
    found = findings(file)
    if name not in found:
        began = time.perf_counter()
        result = experiment()
        found[name] = {"result": result, "seconds": round(time.perf_counter() - began, 3)}
        save(file, {**read(file), **found})
    return found[name]["result"]


@cache
def findings(file: Path) -> dict[str, Any]:
    """Return the findings that this process uses, by name: those in ``file``, and its own.

    Each has the ``result`` of an experiment and the ``seconds`` that it took.
    """
    return read(file)


def read(file: Path) -> dict[str, Any]:
    """Return the findings in ``file``, none if there is no file or it is not one of ours."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["found"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def save(file: Path, found: dict[str, Any]) -> None:
    """Write ``found`` whole or, where that cannot be done, not at all."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as new:
            json.dump({"machine": machine(), "found": found}, new, indent=1)
        os.replace(new.name, file)


def path() -> Path:
    """Return the file of this machine and number of threads, in ``$MINI_ENGINE_CACHE`` or the user's cache folder.

    Where a user has no home, as in some containers, it is a file that can be neither read nor written.
    """
    home = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mini_engine")
    folder = os.path.expanduser(os.environ.get("MINI_ENGINE_CACHE") or home)
    if folder.startswith("~"):
        folder = os.path.join(os.devnull, "no home")
    name = hashlib.sha256(json.dumps(machine()).encode()).hexdigest()[:16]
    return Path(folder) / f"machine-{name}.json"


def machine() -> dict[str, Any]:
    """Return what the findings depend on: the CPU, the libraries, their caps and the number of threads."""
    return {
        "recipe": RECIPE,
        "cpu": cpu(),
        "libraries": torch.__config__.show(),  # torch's version, MKL's, oneDNN's, and the CPU code that is in use
        "caps": {name: os.environ[name] for name in CAPS if name in os.environ},
        "threads": torch.get_num_threads(),
    }


@cache
def cpu() -> dict[str, str]:
    """Return the CPU's name and its instruction sets as the system names them."""
    found = dict[str, str]()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "flags", "Features"):
                found[name.strip()] = value.strip()
    if "model name" not in found:  # asking ``platform`` starts a process
        found["model name"] = f"{platform.processor()} {platform.machine()}".strip()
    return found
