"""L8: the driver of L4 over kernels: attention and sampler of its steps come from a ``KernelSet``.

Owns: putting model, attention and sampler together. Must not know: prompts, checkpoints.
"""

import torch
from torch import Tensor

from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.attention.pool import KVPool
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.kernels.attention import KernelAttention
from mini_engine.kernels.model import KernelQwen3
from mini_engine.kernels.registry import choose_kernels
from mini_engine.kernels.sampler import KernelOps
from mini_engine.model import Attention
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.sampler import Sampler


def make_kernel_driver(
    model: KernelQwen3, config: EngineConfig, eos_token_ids: frozenset[int] = frozenset()
) -> SamplingDriver:
    """Return L4's driver with the attention and the sampler of the model's kernels."""

    def attention(pool: KVPool, metadata: AttentionMetadata) -> Attention:
        heads = model.config.num_attention_heads
        return KernelAttention(pool, metadata, model.kernels, heads, config.batch_invariant)

    sampler = Sampler(ops=KernelOps(model.kernels))
    return SamplingDriver(model, config, eos_token_ids, sampler=sampler, attention=attention)


def build_kernel_model(config: ModelConfig, weights: dict[str, Tensor], engine: EngineConfig) -> KernelQwen3:
    """Build the model over the kernels of ``engine``'s device and dtype. Consumes the dictionary.

    Raises ``ValueError`` if ``batch_invariant`` cannot be kept there; warns of operations that have no kernel there.
    """
    device = torch.device(engine.device)
    dtype = getattr(torch, engine.dtype)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton starts kernels on the current device, wherever the tensors are
    return KernelQwen3(config, weights, choose_kernels(device, dtype, engine.batch_invariant), engine.batch_invariant)
