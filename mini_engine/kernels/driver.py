"""L8: the parts of a driver over kernels: model, attention and sampler share a ``KernelSet``."""

from functools import partial

import torch

from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.driver import AttentionFactory
from mini_engine.kernels.attention import KernelAttention
from mini_engine.kernels.model import KernelQwen3
from mini_engine.kernels.registry import choose_kernels
from mini_engine.kernels.sampler import KernelOps
from mini_engine.sampler.sampler import Sampler
from mini_engine.weights import Weights


def choose_attention(engine: EngineConfig, model: KernelQwen3) -> AttentionFactory:
    """Return what makes the attention of each step over the model's kernels."""
    return partial(
        KernelAttention,
        kernels=model.kernels,
        num_attention_heads=model.config.num_attention_heads,
        invariant=engine.batch_invariant,
    )


def make_sampler(model: KernelQwen3) -> Sampler:
    """Return L4's sampler over the model's kernels."""
    return Sampler(ops=KernelOps(model.kernels))


def build_model(config: ModelConfig, weights: Weights, engine: EngineConfig) -> KernelQwen3:
    """Build the model over the kernels of ``engine``'s device and dtype. Empties ``weights``.

    Raises ``ValueError`` if ``batch_invariant`` cannot be kept there; warns of operations that have no kernel there.
    """
    device = torch.device(engine.device)
    dtype = getattr(torch, engine.dtype)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton starts kernels on the current device, wherever the tensors are
    return KernelQwen3(config, weights, choose_kernels(device, dtype, engine.batch_invariant), engine.batch_invariant)
