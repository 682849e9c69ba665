"""L8: the driver of L4 over kernels: attention and sampler of its steps come from a ``KernelSet``.

Owns: putting model, attention and sampler together. Must not know: prompts, checkpoints.
"""

import torch
from torch import Tensor

from mini_engine.attention.metadata import BatchInputs
from mini_engine.attention.pool import KVPool
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.kernels.attention import KernelAttention
from mini_engine.kernels.model import KernelQwen3
from mini_engine.kernels.registry import choose_kernels
from mini_engine.kernels.sampler import KernelSampler
from mini_engine.model import Attention
from mini_engine.sampler.driver import SamplingDriver


class KernelDriver(SamplingDriver):
    """``SamplingDriver`` whose steps are computed by kernels; everything that is decided is decided as there."""

    model: KernelQwen3

    def __init__(self, model: KernelQwen3, config: EngineConfig, eos_token_ids: frozenset[int] = frozenset()) -> None:
        """Drive ``model`` with its own kernels."""
        super().__init__(model, config, eos_token_ids, sampler=KernelSampler(model.kernels))

    def attention(self, batch: BatchInputs, pool: KVPool) -> Attention:
        """Return the kernels' attention for one step."""
        heads, invariant = self.model.config.num_attention_heads, self.config.batch_invariant
        return KernelAttention(pool, batch.metadata, self.model.kernels, heads, invariant)


def build_kernel_model(config: ModelConfig, weights: dict[str, Tensor], engine: EngineConfig) -> KernelQwen3:
    """Build the model over the kernels of ``engine``'s device and dtype. Consumes the dictionary.

    Raises ``ValueError`` if ``batch_invariant`` cannot be kept there; warns of operations that have no kernel there.
    """
    device, dtype = torch.device(engine.device), getattr(torch, engine.dtype)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton starts kernels on the current device, wherever the tensors are
    return KernelQwen3(config, weights, choose_kernels(device, dtype, engine.batch_invariant), engine.batch_invariant)
