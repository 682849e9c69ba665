"""The driver of L4 over compiled loops.

Owns: putting model and attention together. Must not know: prompts, checkpoints.
"""

import torch
from torch import Tensor

from mini_engine.attention.metadata import BatchInputs, SequenceChunk, pack_batch
from mini_engine.attention.pool import KVPool
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.fast.compiled.attention import CompiledAttention
from mini_engine.fast.compiled.model import CompiledQwen3
from mini_engine.fast.products import make_projections
from mini_engine.model import Attention
from mini_engine.sampler.driver import SamplingDriver


class KernelDriver(SamplingDriver):
    """``SamplingDriver`` whose steps are computed by loops; everything that is decided is decided as there."""

    def attention(self, batch: BatchInputs, pool: KVPool) -> Attention:
        """Return the loops' attention for one step; with ``batch_invariant`` it is all theirs."""
        kernel = None if self.config.batch_invariant else self.kernel
        return CompiledAttention(pool, batch.metadata, self.model.config.num_attention_heads, kernel)


def build_kernel_model(config: ModelConfig, weights: dict[str, Tensor], engine: EngineConfig) -> CompiledQwen3:
    """Build the model with the projections that ``engine`` asks for, and compile its loops. Consumes the dictionary."""
    model = CompiledQwen3(config, weights, make_projections(engine))
    compile_loops(model)
    return model


@torch.inference_mode()
def compile_loops(model: CompiledQwen3) -> None:
    """Run two small steps, so that no request waits until the loops are compiled or read from where they are kept.

    Two, because arrays of a single row are another type to the compiler than those of several.
    """
    page_size = 2
    pool = KVPool(model.config, 2, page_size, torch.float32)
    for lengths in ([1], [1, 2]):
        batch = pack_batch([SequenceChunk([0] * count, 0, [page]) for page, count in enumerate(lengths)], page_size)
        attention = CompiledAttention(pool, batch.metadata, model.config.num_attention_heads, None)
        model(batch.input_ids, batch.positions, attention, batch.logit_rows)
