"""The attention seam with a loop over rows that each follow their sequence's pages.

The loop does not care where pages lie, and a row's bits depend on its own sequence alone. So it serves all rows under
``batch_invariant``. Without, rows of sequences with several queries go to torch's kernel, which multiplies matrices.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from mini_engine.attention.dense import AttentionKernel
from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.attention.pool import KVPool
from mini_engine.fast.attention.ragged import StepCache, attend_alone
from mini_engine.fast.compiled import loops
from mini_engine.fast.compiled.loops import Halves, Ints

FEW_PRODUCTS = 1 << 22  # multiplications that one thread does before another would have begun


class CompiledAttention:
    """``PagedAttention`` by compiled loops: same signature, same values to rounding."""

    def __init__(
        self, pool: KVPool, metadata: AttentionMetadata, num_attention_heads: int, kernel: AttentionKernel | None
    ) -> None:
        """Find the rows for the loop; ``kernel`` is for sequences with several queries, ``None``: they have none."""
        self.pool = pool
        self.written = metadata.slot_mapping.numpy()
        self.kernel = kernel
        most = 1 if kernel else int(metadata.cu_seqlens_q[-1])
        lengths = metadata.seq_lens_kv.numpy()
        self.slots = loops.find_slots(metadata.block_table.numpy(), pool.page_size, lengths)
        found = loops.rows_of_short(metadata.cu_seqlens_q.numpy(), lengths, most)
        dim = pool.keys[0].shape[-1]
        self.head = (False,) * dim
        products = int(found[-1].sum()) * num_attention_heads * dim
        threads = torch.get_num_threads() if products > FEW_PRODUCTS else 1
        # In turn, as later rows see more keys.
        self.shares = [tuple(column[n::threads].copy() for column in found) for n in range(threads)]
        self.long = [n for n, (start, end) in enumerate(metadata.query_ranges) if end - start > most]
        self.cache = StepCache(pool, metadata) if self.long else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D] -> [T, Hq, D]. Writes the step's slots of the pool."""
        keys, values = halves(self.pool.keys[layer]), halves(self.pool.values[layer])
        loops.store(k.numpy(), v.numpy(), keys, values, self.written)
        out = torch.empty_like(q)
        queries, found = q.numpy(), out.numpy()

        def attend(share: tuple[Ints, ...]) -> None:
            loops.attend(queries, keys, values, *share, *self.slots, self.head, found)

        others = [workers().submit(attend, share) for share in self.shares[1:]]
        attend(self.shares[0])
        for other in others:
            other.result()
        if self.cache is not None and self.kernel is not None:
            attend_alone(layer, q, out, self.cache, self.long, self.kernel)
        return out


def halves(tensor: Tensor) -> Halves:
    """Return the memory of ``tensor``, float32 or bfloat16, as the loops read it."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@cache
def workers() -> ThreadPoolExecutor:
    """Return the threads that share large work; a loop lets go of Python's lock."""
    return ThreadPoolExecutor(thread_name_prefix="attention")
