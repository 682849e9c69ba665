"""Kernels that the interpreter runs are compiled for a GPU too, on a machine that has none."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from smoke.course.starter import starter_files
from smoke.framework.manifest import load_manifest

SHARED_MEMORY = 227 * 1024  # bytes that one block of an H200 may use
# Bytes of a thread that may not fit into registers: Triton 3.6 spills 8 and 12 of two kernels, 3.9 none.
SPILLED = 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 16
KERNELS = Path(__file__).parents[2] / "mini_engine" / "kernels"
SCRIPT = Path(__file__).with_name("compile_for_gpu.py")


@pytest.mark.slow
def test_every_kernel_compiles_for_an_h200_and_next_to_nothing_spills():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    entries = [json.loads(line) for line in done.stdout.splitlines()]
    assert {entry["dtype"] for entry in entries} == {"bfloat16", "float32"}
    wrong = [entry for entry in entries if entry["spilled"] > SPILLED or entry["shared"] > SHARED_MEMORY]
    assert not wrong, wrong

    # Every kernel, so none that was added later is forgotten. Other functions under the decorator are parts of kernels.
    sources = [file.read_text() for file in KERNELS.glob("*.py")]
    written = {
        name for source in sources for name in re.findall(r"^@triton.jit.*\ndef (\w+_kernel)\(", source, re.MULTILINE)
    }
    assert {entry["kernel"] for entry in entries} == written


@pytest.mark.slow
def test_where_a_student_has_written_nothing_the_references_kernel_is_compiled(tmp_path):
    starter = starter_files(load_manifest().lesson("L8"))["kernels/kv_store.py"]
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "kv_store.py").write_text(starter)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPT, "--engine", tmp_path, "kv_store"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {json.loads(line)["kernel"] for line in done.stdout.splitlines()} == {"store_kv_kernel"}
    assert "the reference's own: L8.D" in done.stderr
