"""L8: which query rows one launch of an attention kernel serves, cut into blocks that one program each can hold.

Everything here is the same for every layer of a step, so it is computed once, on the host, and goes to the device in
one copy.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mini_engine.attention.metadata import AttentionMetadata


class QueryBlock(NamedTuple):
    """Packed rows ``start`` … ``end - 1`` of one ``sequence``.

    The last row sees ``visible`` keys and every row before it one fewer: that is all a causal mask needs to know.
    """

    sequence: int
    start: int
    end: int
    visible: int


@dataclass(frozen=True)
class QueryBlocks:
    """The blocks of one launch, none longer than ``queries`` rows: as Python numbers and as ``table`` [B, 4] int32.

    Those that see the most keys come first. Blocks start in this order, and a long one that starts last would leave the
    device waiting for it.
    """

    blocks: list[QueryBlock]
    table: Tensor
    queries: int


def whole_sequences(metadata: AttentionMetadata) -> list[QueryBlock]:
    """Return one block for each sequence of a step. On a device this waits for it, once.

    Raises ``ValueError`` for a sequence with fewer keys than queries: its first query would see none.
    """
    count = len(metadata.seq_lens_kv)
    numbers = torch.cat([metadata.cu_seqlens_q, metadata.seq_lens_kv]).tolist()
    bounds, kv_lens = numbers[: count + 1], numbers[count + 1 :]
    blocks = [QueryBlock(i, bounds[i], bounds[i + 1], kv_lens[i]) for i in range(count)]
    for sequence, start, end, visible in blocks:
        if visible < end - start:
            raise ValueError(
                f"sequence {sequence} has {end - start} queries and {visible} keys; "
                "a query sees its own key, so count the new tokens in seq_lens_kv"
            )
    return blocks


def cut_queries(sequences: Iterable[QueryBlock], queries: int, device: torch.device | str) -> QueryBlocks:
    """Cut blocks of any length into blocks of at most ``queries`` rows; those that see the most keys come first.

    Of equal ones the order stays. The table of no blocks is [0, 4]. Raises ``ValueError`` for ``queries`` < 1.
    """
    if queries < 1:
        raise ValueError(f"a block of {queries} queries holds nothing; cut into blocks of at least 1")
    blocks = []
    for sequence, start, end, visible in sequences:
        for first in range(start, end, queries):
            last = min(first + queries, end)
            blocks.append(QueryBlock(sequence, first, last, visible - (end - last)))
    blocks.sort(key=lambda block: -block.visible)
    table = torch.tensor(blocks, dtype=torch.int32, device=device).view(-1, 4)
    return QueryBlocks(blocks, table, queries)
