"""L8: the attention seam, served by kernels."""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.attention.pool import KVPool
from mini_engine.kernels.paged_attention import paged_queries
from mini_engine.kernels.query_blocks import QueryBlocks, cut_queries, whole_sequences
from mini_engine.kernels.split_attention import INVARIANT_SPLIT, choose_split_size, split_queries

PROCESSORS_WITHOUT_GPU = 1  # the interpreter runs one program after the other


class AttentionKernels(Protocol):
    """The operations that attention needs, each as a kernel or as its reference."""

    @property
    def store_kv(self) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
        """``(k, v, keys, values, slot_mapping)``: write the new keys and values into the pool."""

    @property
    def paged_attention(self) -> Callable[[Tensor, Tensor, Tensor, AttentionMetadata, QueryBlocks, Tensor], None]:
        """``(q, keys, values, metadata, blocks, out)``: see ``paged_attention.paged_attention``."""

    @property
    def split_attention(self) -> Callable[[Tensor, Tensor, Tensor, AttentionMetadata, QueryBlocks, Tensor, int], None]:
        """``(q, keys, values, metadata, blocks, out, split_size)``: see ``split_attention.split_attention``."""


class KernelAttention:
    """``PagedAttention`` by kernels: same signature, same values to rounding."""

    def __init__(
        self,
        pool: KVPool,
        metadata: AttentionMetadata,
        kernels: AttentionKernels,
        num_attention_heads: int,
        invariant: bool,
    ) -> None:
        """Plan the step once, for all layers; with ``invariant`` its bits will not depend on the batch.

        Sequences whose queries fit into one block of ``split_attention`` go there: decoding, and the last few tokens of
        a prompt that was cached. With ``invariant`` all of them do. The others go to ``paged_attention``.
        """
        self.pool = pool
        self.metadata = metadata
        self.kernels = kernels
        num_kv_heads, _, head_dim = pool.keys[0].shape
        group = num_attention_heads // num_kv_heads
        dtype = pool.keys[0].dtype
        device = metadata.block_table.device
        most = split_queries(group, head_dim, dtype)
        sequences = whole_sequences(metadata)
        limit = math.inf if invariant else most
        short = [block for block in sequences if block.end - block.start <= limit]
        long = [block for block in sequences if block.end - block.start > limit]
        # Room for results is taken by the block: in a step that only decodes, blocks of one query leave none unused.
        self.short = cut_queries(short, max((min(block.end - block.start, most) for block in short), default=1), device)
        self.long = cut_queries(long, paged_queries(group, head_dim, dtype), device)
        self.split_size = INVARIANT_SPLIT
        if not invariant and self.short.blocks:
            longest = self.short.blocks[0].visible
            count = len(self.short.blocks)
            self.split_size = choose_split_size(longest, count, num_kv_heads, num_processors(device))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D] -> [T, Hq, D]. Writes the step's slots of the pool."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        self.kernels.store_kv(k, v, keys, values, self.metadata.slot_mapping)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if self.short.blocks:
            self.kernels.split_attention(q, keys, values, self.metadata, self.short, out, self.split_size)
        if self.long.blocks:
            self.kernels.paged_attention(q, keys, values, self.metadata, self.long, out)
        return out


def num_processors(device: torch.device) -> int:
    """Return how many programs ``device`` can run at once, at least: its streaming multiprocessors."""
    if device.type != "cuda":
        return PROCESSORS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count
