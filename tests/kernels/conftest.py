"""How kernels are tested: interpreted on tiny shapes without a GPU, compiled on real ones with it (``-m gpu``)."""

import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from mini_engine.kernels.launch import INTERPRETED
from tests.pretend_gpu import PretendGpu

# PRETEND_GPU=1: interpreted as without it, and every tensor says that it is on a GPU, so that mixed devices show.
PRETENDED = INTERPRETED and os.environ.get("PRETEND_GPU") == "1"
DEVICE = "cuda" if PRETENDED or not INTERPRETED else "cpu"
if PRETENDED:
    PretendGpu().__enter__()  # for the whole run


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test of this folder: ``-m gpu`` chooses them all, and skips them by name without a GPU."""
    chosen = "gpu" in (config.option.markexpr or "") and "not gpu" not in config.option.markexpr
    for item in items:
        if "tests/kernels/" not in item.nodeid:
            continue
        item.add_marker(pytest.mark.gpu)
        needs_gpu = chosen or item.get_closest_marker("compiled") is not None
        if needs_gpu and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and this machine has none"))


@triton.jit
def canary_kernel(x, out, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < n, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(n):
        total += tl.cumsum(value, axis=0)
    tl.store(out + place, total, mask=place < n)


@pytest.fixture(scope="session", autouse=True)
def canary() -> None:
    """Skip every kernel test by name where Triton itself cannot do this much."""
    try:
        x = torch.arange(1.0, 6.0, device=DEVICE)
        out = torch.full((8,), -1.0, device=DEVICE)
        canary_kernel[(1,)](x, out, 5, BLOCK=8)
        fault = None if out.tolist() == [5.0, 15.0, 30.0, 50.0, 75.0, -1.0, -1.0, -1.0] else f"it gave {out.tolist()}"
    except Exception as error:  # whatever a broken installation raises
        fault = repr(error)
    if fault is not None:
        versions = f"Triton {triton.__version__} with NumPy {np.__version__}"
        pytest.skip(f"{versions} cannot run a kernel of a few lines here (Triton before 3.7 needs numpy<2.4): {fault}")
