"""Tests that need Triton's interpreter."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "lessons"


def page_text(page):
    return (FOLDER / page).read_text()


def needs_interpreter(page):
    """Skip, by name, a page of kernels where Triton is missing or compiles them for a GPU: it runs on CPU tensors."""
    if "import triton\n" in page_text(page):
        triton = pytest.importorskip("triton", reason="Triton is not installed (it is built for Linux alone)")
        if not triton.knobs.runtime.interpret:
            pytest.skip("this page runs in Triton's interpreter; set TRITON_INTERPRET=1")
