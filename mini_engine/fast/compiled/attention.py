"""The attention seam with loops that follow each sequence's pages.

The loops do not care where pages lie, and a row's bits depend on its own sequence alone. One loop takes rows one by
one. It serves all rows under ``batch_invariant``. Without, rows of sequences with several queries are taken in blocks.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.attention.pool import KVPool
from mini_engine.fast.compiled import attention_loops as loops
from mini_engine.fast.compiled.loops import Ints
from mini_engine.fast.compiled.products import halves, in_shares, most_threads

FEW_PRODUCTS = 1 << 22  # multiplications that one thread does before another would have begun


class CompiledAttention:
    """``PagedAttention`` by compiled loops: same signature, same values to rounding."""

    def __init__(
        self, pool: KVPool, metadata: AttentionMetadata, num_attention_heads: int, batch_invariant: bool
    ) -> None:
        """Find the rows for either loop."""
        self.pool = pool
        self.written = metadata.slot_mapping.numpy()
        self.bounds, self.lengths = metadata.cu_seqlens_q.numpy(), metadata.seq_lens_kv.numpy()
        most = int(self.bounds[-1]) if batch_invariant else 1
        self.slots = loops.find_slots(metadata.block_table.numpy(), pool.page_size, self.lengths)
        found = loops.rows_of_short(self.bounds, self.lengths, most)
        dim = pool.keys[0].shape[-1]
        self.head = (False,) * dim
        products = int(found[-1].sum()) * num_attention_heads * dim
        threads = torch.get_num_threads() if products > FEW_PRODUCTS else 1
        # In turn, as later rows see more keys.
        self.shares = [tuple(column[n::threads].copy() for column in found) for n in range(threads)]
        self.long = np.flatnonzero(np.diff(self.bounds) > most)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D] -> [T, Hq, D]. Writes the step's slots of the pool.

        ``v`` is float32 or bfloat16, the others are float32.
        """
        keys, values = halves(self.pool.keys[layer]), halves(self.pool.values[layer])
        loops.store(k.numpy(), halves(v), keys, values, self.written)
        out = torch.empty_like(q)
        queries, found = q.numpy(), out.numpy()

        def attend(share: tuple[Ints, ...]) -> None:
            loops.attend(queries, keys, values, *share, *self.slots, self.head, found)

        others = [workers().submit(attend, share) for share in self.shares[1:]]
        attend(self.shares[0])
        for other in others:
            other.result()
        if len(self.long):
            layout = self.long, self.bounds, self.lengths, *self.slots
            ways = loops.attend_blocks, loops.attend_blocks_shared
            in_shares(*ways, most_threads(), queries, keys, values, *layout, found)
        return out


@cache
def workers() -> ThreadPoolExecutor:
    """Return the threads that share large work; a loop lets go of Python's lock."""
    return ThreadPoolExecutor(thread_name_prefix="attention")
