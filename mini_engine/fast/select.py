"""Which attention a step gets: the plain one of L2, a faster one for CPUs, or the invariant one."""

from functools import partial

from mini_engine.attention.dense import grouped_attention, sdpa_attention
from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.attention.paged import PagedAttention
from mini_engine.attention.pool import KVPool
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.driver import AttentionFactory
from mini_engine.fast.attention.cascade import CascadeAttention, find_cascade, find_scattered
from mini_engine.fast.attention.consecutive import ConsecutiveAttention
from mini_engine.fast.attention.ragged import StepCache
from mini_engine.fast.attention.strided import StridedAttention, find_grids
from mini_engine.invariant.attention import InvariantAttention
from mini_engine.model import Attention


def select_attention(config: EngineConfig, model: ModelConfig) -> AttentionFactory:
    """Return what makes the attention object of each step, as ``config`` asks. Kernels have their own."""
    if config.batch_invariant:
        return partial(InvariantAttention, num_attention_heads=model.num_attention_heads)
    if config.compute == "fast":
        return grouped
    return consecutive if config.packs_weights else PagedAttention


def consecutive(pool: KVPool, metadata: AttentionMetadata) -> Attention:
    """Read each sequence where it lies, if its pages follow one another."""
    return ConsecutiveAttention(StepCache(pool, metadata), sdpa_attention)


def grouped(pool: KVPool, metadata: AttentionMetadata) -> Attention:
    """Compute common prefixes once, or decode rows in few calls; otherwise each sequence by itself.

    The first two read across gaps in the pool, where a sequence can catch its neighbour's NaN. So they have a
    ``fallback``, the plain path, which tells whose it is.
    """
    cache = StepCache(pool, metadata)
    kernel = grouped_attention
    if len(cache.lengths) > 1:
        if (cascade := find_cascade(cache) or find_scattered(cache)) is not None:
            return CascadeAttention(cache, cascade, kernel)
        if grids := find_grids(cache):
            return StridedAttention(cache, grids, kernel)
    return ConsecutiveAttention(cache, kernel)
