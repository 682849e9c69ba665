"""Which attention a step gets: the plain one of L2, a faster one for CPUs, or the invariant one."""

from functools import partial

from mini_engine.attention.paged import PagedAttention
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.driver import AttentionFactory
from mini_engine.fast.attention.consecutive import consecutive, grouped
from mini_engine.invariant.attention import InvariantAttention


def select_attention(config: EngineConfig, model: ModelConfig) -> AttentionFactory:
    """Return what makes the attention object of each step, as ``config`` asks. Kernels have their own."""
    if config.batch_invariant:
        return partial(InvariantAttention, num_attention_heads=model.num_attention_heads)
    if config.compute == "fast":
        return grouped
    return consecutive if config.packs_weights else PagedAttention
