"""Compile every kernel for an NVIDIA H200 on a machine without a GPU: ``python tests/kernels/compile_for_gpu.py``.

Each launcher is called as the engine calls it, on CPU tensors of real shapes, and Triton is told that a GPU is there
and not to start anything. What the interpreter accepts and the compiler refuses shows here (types, shapes that are no
powers of 2, too much shared memory). Prints one JSON line per compiled kernel: registers, bytes of
them that spilled, bytes of shared memory.

Run it without ``TRITON_INTERPRET``. With ``--engine``, what is not written yet is the reference's.
"""

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)


class NoDevice:
    """Answers Triton's questions about the device as an H200 would."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(compiled: list[dict[str, Any]]) -> None:
    """Make every launch compile its kernel, note it in ``compiled`` and return. Mutates Triton."""
    driver.set_active(NoDevice())
    run = JITFunction.run

    def warm_up(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append({"kernel": self.__name__, "shared": kernel.metadata.shared, **usage(kernel.asm["ptx"])})
        return kernel

    JITFunction.run = warm_up


def usage(ptx: str) -> dict[str, int]:
    """Ask the assembler how many registers and how many bytes of spilled registers a kernel needs."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        tool = get_ptxas(90) if inspect.signature(get_ptxas).parameters else get_ptxas()  # Triton 3.4 has one for all
        arguments = [tool.path, "-v", "--gpu-name=sm_90a", str(file), "-o", f"{folder}/kernel.cubin"]
        report = subprocess.run(arguments, capture_output=True, text=True, check=True).stderr
    spilled, registers = re.search(r"(\d+) bytes spill stores", report), re.search(r"Used (\d+) registers", report)
    return {"spilled": int(spilled[1]) if spilled else 0, "registers": int(registers[1]) if registers else 0}


def main(names: list[str]) -> None:
    """Compile what ``compile_cases`` launches; ``names`` chooses some. Exits with a line for a name that it has not."""
    from tests.kernels.compile_cases import CASES

    unknown = sorted(set(names) - CASES.keys())
    if unknown:
        sys.exit(f"there is no case {unknown[0]!r}; there are {', '.join(CASES)}")
    compiled: list[dict[str, Any]] = []
    compile_only(compiled)
    for name in names or CASES:
        for dtype in (torch.bfloat16, torch.float32):
            before = len(compiled)
            CASES[name](dtype)
            assert len(compiled) > before, f"{name} launched nothing"
            for entry in compiled[before:]:
                print(json.dumps({"case": name, "dtype": str(dtype).removeprefix("torch."), **entry}), flush=True)
                if entry["spilled"]:
                    print(f"SPILLED: {name} needs fewer numbers per thread: a smaller tile, or more warps", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    parser = argparse.ArgumentParser(description="Compile kernels for an NVIDIA H200 on a machine without a GPU.")
    parser.add_argument("names", nargs="*", help="cases of compile_cases.py; all without")
    parser.add_argument(
        "--engine", type=Path, help="a folder whose modules stand in for the engine's own, such as work/"
    )
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("TRITON_INTERPRET is set, which leaves nothing to compile; unset it")
    if arguments.engine is not None:
        from mini_engine import overlay

        folder = arguments.engine.resolve()
        own = overlay.install_overlay(folder, overlay.overlay_files(folder), fill=True)
    main(arguments.names)
    if arguments.engine is not None and own.filled:
        print("not written yet, so the reference's own:", ", ".join(sorted(own.filled)), file=sys.stderr)
