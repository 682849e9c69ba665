"""The attention seam with loops that follow each sequence's pages.

The loops do not care where pages lie, and a row's bits depend on its own sequence alone. One loop takes rows one by
one. It serves all rows under ``batch_invariant``. Without, rows of sequences with several queries are taken in blocks.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.attention.pool import KVPool
from mini_engine.fast.compiled import attention_loops as loops
from mini_engine.fast.compiled.product_loops import TILE
from mini_engine.fast.compiled.products import can_share, halves, most_threads, on_threads

FEW_PRODUCTS = 1 << 18  # multiplications that one thread does before another would have begun


class CompiledAttention:
    """``PagedAttention`` by compiled loops: same signature, same values to rounding."""

    def __init__(
        self, pool: KVPool, metadata: AttentionMetadata, num_attention_heads: int, batch_invariant: bool
    ) -> None:
        """Find what each loop is for: ``short`` and ``long``, as ``attend`` and ``attend_blocks`` take them."""
        self.pool = pool
        self.written = metadata.slot_mapping.numpy()
        bounds, lengths = metadata.cu_seqlens_q.numpy(), metadata.seq_lens_kv.numpy()
        num_kv_heads, _, dim = pool.keys[0].shape
        one_by_one = batch_invariant or num_attention_heads > TILE * num_kv_heads  # a block has room for a position
        most = int(bounds[-1]) if one_by_one else 1
        self.slots = loops.find_slots(metadata.block_table.numpy(), pool.page_size, lengths)
        self.short = loops.rows_of_short(bounds, lengths, most)
        products = int(self.short[-1].sum()) * num_attention_heads * dim
        self.threads = most_threads() if products > FEW_PRODUCTS else 1
        self.long = np.flatnonzero(np.diff(bounds) > most), bounds, lengths

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D] -> [T, Hq, D]. Writes the step's slots of the pool.

        ``v`` is float32 or bfloat16, the others are float32.
        """
        keys, values = halves(self.pool.keys[layer]), halves(self.pool.values[layer])
        loops.store(k.numpy(), halves(v), keys, values, self.written)
        out = torch.empty_like(q)
        numbers = q.numpy(), keys, values
        if len(self.short[0]):
            ways = loops.attend, loops.attend_shared
            in_one_way(*ways, self.threads, *numbers, self.short, self.slots, out.numpy())
        if len(self.long[0]):
            ways = loops.attend_blocks, loops.attend_blocks_shared
            in_one_way(*ways, most_threads(), *numbers, self.long, self.slots, out.numpy())
        return out


def in_one_way(alone: Callable[..., None], shared: Callable[..., None], threads: int, *arrays: Any) -> None:
    """Call a loop over ``arrays``: ``shared`` for one thread, too, as sums may be compiled in another order there."""
    if can_share():
        on_threads(shared, threads, *arrays)
    else:
        alone(*arrays, 1, 0)
