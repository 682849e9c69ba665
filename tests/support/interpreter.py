"""Tests that need Triton's interpreter."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "lessons"


def needs_interpreter(pages):
    """Skip, by name, pages of kernels where Triton is missing or compiles them for a GPU: they run on CPU tensors."""
    if any("import triton\n" in page.read_text() for page in pages):
        triton = pytest.importorskip("triton", reason="Triton is not installed (it is built for Linux alone)")
        if not triton.knobs.runtime.interpret:
            pytest.skip("these pages run in Triton's interpreter; set TRITON_INTERPRET=1")
