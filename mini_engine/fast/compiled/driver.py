"""The driver of L4 over compiled loops.

Owns: putting model and attention together. Must not know: prompts, checkpoints.
"""

from typing import Any

import torch

from mini_engine.attention.dense import sdpa_attention
from mini_engine.attention.metadata import AttentionMetadata, SequenceChunk, pack_batch
from mini_engine.attention.pool import KVPool
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.fast.compiled.attention import CompiledAttention
from mini_engine.fast.compiled.model import CompiledQwen3
from mini_engine.fast.products import make_projections
from mini_engine.model import Attention
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.weights import Weights


def make_kernel_driver(
    model: CompiledQwen3, config: EngineConfig, eos_token_ids: frozenset[int] = frozenset(), **parts: Any
) -> SamplingDriver:
    """Return L4's driver with the loops' attention; with ``batch_invariant`` it is all theirs."""
    kernel = None if config.batch_invariant else sdpa_attention

    def attention(pool: KVPool, metadata: AttentionMetadata) -> Attention:
        return CompiledAttention(pool, metadata, model.config.num_attention_heads, kernel)

    return SamplingDriver(model, config, eos_token_ids, attention=attention, **parts)


def build_kernel_model(config: ModelConfig, weights: Weights, engine: EngineConfig) -> CompiledQwen3:
    """Build the model with the projections that ``engine`` asks for, and compile its loops. Empties ``weights``."""
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
