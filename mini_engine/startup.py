"""From the name of a model to a driver that is ready to run.

Owns: the order of loading and the start-up warnings. Must not know: prompts, commands.
"""

import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType

from torch import Tensor

from mini_engine.attention.probe import invariance_fault
from mini_engine.checkpoint import load_config, load_eos_ids, load_weights, resolve_folder
from mini_engine.config import EngineConfig, ModelConfig, is_cpu
from mini_engine.fused import FusedQwen3
from mini_engine.linear import make_projections
from mini_engine.model import Qwen3
from mini_engine.sampler.driver import SamplingDriver


def load_model(folder: Path, engine: EngineConfig, progress: bool = False) -> Qwen3:
    """Read the checkpoint in ``folder`` and build the model. Raises ``ValueError`` naming the file at fault."""
    config = load_config(folder)
    return build_model(config, load_weights(folder, config, engine, progress), engine)


def build_model(config: ModelConfig, weights: dict[str, Tensor], engine: EngineConfig) -> Qwen3:
    """Build the model that ``engine`` asks for: over kernels, fused if its weights are packed, else the plain one.

    Consumes the dictionary. Raises ``ValueError`` if kernels are asked for and Triton is not installed.
    """
    if engine.kernels == "triton":
        model: Qwen3 = kernels_module().build_kernel_model(config, weights, engine)
        return model
    kind = FusedQwen3 if engine.linear == "packed" else Qwen3
    return kind(config, weights, make_projections(engine))


def make_driver(model: Qwen3, engine: EngineConfig, eos_token_ids: frozenset[int] = frozenset()) -> SamplingDriver:
    """Return the driver of a model that ``build_model`` made for the same ``engine``."""
    kind: type[SamplingDriver] = kernels_module().KernelDriver if engine.kernels == "triton" else SamplingDriver
    return kind(model, engine, eos_token_ids)


def kernels_module() -> ModuleType:
    """Import ``kernels.driver``, and Triton with it, which an engine without kernels does without.

    Raises ``ValueError`` if Triton is not installed.
    """
    try:
        return import_module("mini_engine.kernels.driver")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError(
            "kernels='triton' needs Triton, which is not installed (it is built for Linux alone); "
            "pip install 'mini-engine[kernels]', or leave kernels='torch'"
        ) from None


def load_driver(model: str | Path | None = None, engine: EngineConfig | None = None) -> SamplingDriver:
    """Load ``model`` (``None``: the embedded one; a folder; a hub id) and return a driver.

    Its ``steps`` and ``generate`` are the greedy driver's, ``stream`` and ``complete`` take sampling parameters.

    Shows a progress bar on a terminal. Raises ``ValueError`` for a faulty checkpoint. Warns in one line when
    ``batch_invariant`` is asked for and this machine does not keep it; kernels in the interpreter are not tried.
    """
    engine = engine or EngineConfig()
    folder = resolve_folder(model)
    driver = make_driver(load_model(folder, engine, progress=sys.stderr.isatty()), engine, load_eos_ids(folder))
    is_interpreted = engine.kernels == "triton" and is_cpu(engine.device)  # the probe would take minutes
    if engine.batch_invariant and not is_interpreted:
        fault = invariance_fault(driver.forward, driver.model.config, engine)
        if fault is not None:
            warnings.warn(fault, stacklevel=2)
    return driver
