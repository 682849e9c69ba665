"""From the name of a model to a driver that is ready to run.

Owns: the order of loading. Must not know: prompts, commands.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from torch import Tensor

from mini_engine.checkpoint import load_config, load_eos_ids, load_weights, resolve_folder
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.fast.fused import FusedQwen3
from mini_engine.fast.products import make_projections
from mini_engine.invariant.attention import query_rows
from mini_engine.model import Qwen3
from mini_engine.sampler.driver import SamplingDriver


def load_model(folder: Path, engine: EngineConfig, progress: bool = False) -> Qwen3:
    """Read the checkpoint in ``folder`` and build the model. Raises ``ValueError`` naming the file at fault."""
    config = load_config(folder)
    return build_model(config, load_weights(folder, config, engine, progress), engine)


def build_model(config: ModelConfig, weights: dict[str, Tensor], engine: EngineConfig) -> Qwen3:
    """Build the model that ``engine`` asks for: over kernels, fused if its weights are packed, else the plain one.

    Consumes the dictionary. Raises ``ValueError`` if kernels are asked for and their library is not installed.
    """
    if engine.kernels != "torch":
        model: Qwen3 = kernels_module(engine.kernels).build_kernel_model(config, weights, engine)
        return model
    kind = FusedQwen3 if engine.linear == "packed" else Qwen3
    return kind(config, weights, make_projections(engine))


def make_driver(model: Qwen3, engine: EngineConfig, eos_token_ids: frozenset[int] = frozenset()) -> SamplingDriver:
    """Return the driver of a model that ``build_model`` made for the same ``engine``.

    Raises ``ValueError`` if ``batch_invariant`` is asked for and this machine cannot keep it.
    """
    kind: type[SamplingDriver] = SamplingDriver
    if engine.batch_invariant and engine.kernels == "torch":
        cfg = model.config
        query_rows(cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim, model.embedding.dtype)
    if engine.kernels != "torch":
        kind = kernels_module(engine.kernels).KernelDriver
    return kind(model, engine, eos_token_ids)


# kernels -> the module with their driver, the library's name, and the extra of ours that installs it
KERNEL_MODULES = {
    "triton": ("mini_engine.kernels.driver", "Triton, which is not installed (it is built for Linux alone)", "kernels"),
    "numba": ("mini_engine.fast.compiled.driver", "Numba, which is not installed", "compiled"),
}


def kernels_module(kernels: str) -> ModuleType:
    """Import the driver of ``kernels``, and with it their library, which an engine without them does without.

    Raises ``ValueError`` if the library is not installed.
    """
    module, library, extra = KERNEL_MODULES[kernels]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != kernels:
            raise
        raise ValueError(
            f"kernels={kernels!r} needs {library}; pip install 'mini-engine[{extra}]', or leave kernels='torch'"
        ) from None


def load_driver(model: str | Path | None = None, engine: EngineConfig | None = None) -> SamplingDriver:
    """Load ``model`` (``None``: the embedded one; a folder; a hub id) and return a driver.

    Its ``steps`` and ``generate`` are the greedy driver's, ``stream`` and ``complete`` take sampling parameters.

    Shows a progress bar on a terminal. Raises ``ValueError`` for a faulty checkpoint, and where ``batch_invariant`` is
    asked for and this machine cannot keep it.
    """
    engine = engine or EngineConfig()
    folder = resolve_folder(model)
    return make_driver(load_model(folder, engine, progress=sys.stderr.isatty()), engine, load_eos_ids(folder))
