"""What neither results nor the interpreter show: reads and writes out of bounds, and races in shared memory.

    SANITIZER=1 python -m pytest -m gpu tests/kernels/test_sanitizer.py

It is asked for by name, because every kernel test runs twice more, many times slower.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
LONG = {"test_engine.py", "test_compile.py", "test_sanitizer.py"}  # whole answers, or no kernel is run


@pytest.mark.compiled
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_kernels_own_tests_run_clean_under_the_sanitizer(tool):
    if os.environ.get("SANITIZER") != "1":
        pytest.skip("takes up to an hour and is asked for with SANITIZER=1")
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer, of the CUDA toolkit, is not installed")
    files = [str(file) for file in sorted(FOLDER.glob("test_*.py")) if file.name not in LONG]
    sanitizer = [program, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", *files]
    # Without the cache every tensor is an allocation of its own, so what lies beside it is nobody's.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [*sanitizer, *tests], env=environment, capture_output=True, text=True, timeout=3000, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
