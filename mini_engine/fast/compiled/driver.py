"""The parts of a driver over compiled loops: model and attention."""

from functools import partial

import torch

from mini_engine.attention.metadata import SequenceChunk, pack_batch
from mini_engine.attention.pool import KVPool
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.driver import AttentionFactory
from mini_engine.fast.compiled.attention import CompiledAttention
from mini_engine.fast.compiled.model import CompiledQwen3
from mini_engine.fast.compiled.products import LoopProjections
from mini_engine.fast.compiled.quantized import MOST_ROWS, make_loop_parts
from mini_engine.fast.products import make_projections
from mini_engine.weights import Weights


def choose_attention(engine: EngineConfig, model: CompiledQwen3) -> AttentionFactory:
    """Return what makes the loops' attention."""
    heads = model.config.num_attention_heads
    return partial(CompiledAttention, num_attention_heads=heads, batch_invariant=engine.batch_invariant)


def build_model(config: ModelConfig, weights: Weights, engine: EngineConfig) -> CompiledQwen3:
    """Build the model with the projections that ``engine`` asks for, and compile its loops. Empties ``weights``."""
    if engine.quantize == "off":
        model = CompiledQwen3(config, weights, LoopProjections(make_projections(engine)))
    else:
        model = CompiledQwen3(config, *make_loop_parts(weights, engine))
    compile_loops(model)
    return model


@torch.inference_mode()
def compile_loops(model: CompiledQwen3) -> None:
    """Run small steps, so that no request waits until the loops are compiled or read from where they are kept.

    Arrays of a single row are another type to the compiler than those of several, products of many rows may have
    another dtype than those of few, and attention has two loops.
    """
    page_size = MOST_ROWS + 1
    pool = KVPool(model.config, 2, page_size, model.embedding.dtype)
    for lengths, batch_invariant in (([1], False), ([1, 2], False), ([page_size], False), ([1, 2], True)):
        batch = pack_batch([SequenceChunk([0] * count, 0, [page]) for page, count in enumerate(lengths)], page_size)
        attention = CompiledAttention(pool, batch.metadata, model.config.num_attention_heads, batch_invariant)
        model(batch.input_ids, batch.positions, attention, batch.logit_rows)
