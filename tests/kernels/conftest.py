"""How kernels are tested: interpreted on tiny shapes without a GPU, compiled on real ones with it (``-m gpu``)."""

import os

import pytest
import torch

import smoke.runner.canary
from mini_engine.kernels.launch import INTERPRETED
from smoke.framework.pretend_gpu import PretendGpu

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


@pytest.fixture(scope="session", autouse=True)
def canary() -> None:
    """Skip every kernel test by name where Triton itself cannot do this much."""
    try:
        smoke.runner.canary.main(DEVICE)
    except RuntimeError as error:
        pytest.skip(str(error))
