"""L2: how a ragged batch lies in memory: from "these tokens of these sequences" to packed tensors.

Two sequences, the first in the middle of its prompt (3 new tokens after 2 cached), the second decoding (1 after 4):

    input_ids     [a2 a3 a4 | b4]        T = 4
    positions     [ 2  3  4 |  4]        where each token stands in its own sequence
    cu_seqlens_q  [0, 3, 4]              sequence n owns rows cu[n] … cu[n + 1] - 1
    seq_lens_kv   [5, 5]                 cached plus new
    logit_rows    [2, 3]                 the last row of each: cu_seqlens_q[1:] - 1

There is no prefill and no decode here: a decode is a sequence with one new token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

PAD_PAGE = -1  # fills block_table rows; no page has it, and ``index_select`` refuses the slots that it would give


@dataclass(frozen=True)
class SequenceChunk:
    """What one sequence contributes to a step.

    ``token_ids``: the new tokens. ``num_computed_tokens``: how many before them are in the cache. ``pages``: the
    sequence's pages in order, enough for all of them.
    """

    token_ids: Sequence[int]
    num_computed_tokens: int
    pages: Sequence[int]

    @property
    def kv_len(self) -> int:
        """Tokens that the step's last query sees: the cached ones and the new ones."""
        return self.num_computed_tokens + len(self.token_ids)


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the queries, keys and values of a packed batch are.

    ``cu_seqlens_q`` [N + 1] int32: bounds of the sequences in the packed rows, exclusive ends.
    ``seq_lens_kv`` [N] int32: keys of each sequence, the new ones included.
    ``block_table`` [N, max_pages] int32: pages of each sequence in order, padded with -1.
    ``slot_mapping`` [T] int64: the slot that each packed row's key and value go to.
    """

    cu_seqlens_q: Tensor
    seq_lens_kv: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    page_size: int

    @cached_property
    def query_ranges(self) -> list[tuple[int, int]]:
        """First and last-plus-one packed row of every sequence, as Python numbers (read once, used by every layer)."""
        return list(pairwise(self.cu_seqlens_q.tolist()))

    @cached_property
    def kv_slots(self) -> list[Tensor]:
        """The slots of every sequence's keys, position 0 first: N tensors [kv_len] int64, on the metadata's device."""
        offsets = torch.arange(self.page_size, device=self.block_table.device)
        slots = self.block_table.long()[:, :, None] * self.page_size + offsets  # [N, max_pages, page_size]
        lengths = self.seq_lens_kv.tolist()
        return [row[:length] for row, length in zip(slots.flatten(1), lengths, strict=True)]


@dataclass(frozen=True)
class BatchInputs:
    """Everything a forward pass needs: packed rows and where they belong.

    ``input_ids`` and ``positions`` [T] int64, ``logit_rows`` [N] int64: the last row of each sequence.
    """

    input_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    metadata: AttentionMetadata


def slots_of(pages: Sequence[int], start: int, stop: int, page_size: int) -> list[int]:
    """Return the slots of positions ``start`` … ``stop - 1`` of a sequence that lies in ``pages``."""
    return [pages[p // page_size] * page_size + p % page_size for p in range(start, stop)]


def pack_batch(chunks: Sequence[SequenceChunk], page_size: int, device: str = "cpu") -> BatchInputs:
    """Lay ``chunks`` side by side in one step of T = sum of new tokens rows. Chunks may share pages.

    Raises ``ValueError`` for an empty batch, a chunk without tokens or one whose pages do not hold its tokens.
    """
    check_chunks(chunks, page_size)
    lengths = [len(chunk.token_ids) for chunk in chunks]
    bounds = list(accumulate(lengths, initial=0))
    max_pages = max(len(chunk.pages) for chunk in chunks)
    table = [[*chunk.pages, *[PAD_PAGE] * (max_pages - len(chunk.pages))] for chunk in chunks]

    def tensor(values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    metadata = AttentionMetadata(
        cu_seqlens_q=tensor(bounds, torch.int32),
        seq_lens_kv=tensor([chunk.kv_len for chunk in chunks], torch.int32),
        block_table=tensor(table, torch.int32),
        slot_mapping=tensor(
            [s for c in chunks for s in slots_of(c.pages, c.num_computed_tokens, c.kv_len, page_size)], torch.int64
        ),
        page_size=page_size,
    )
    return BatchInputs(
        input_ids=tensor([token for chunk in chunks for token in chunk.token_ids], torch.int64),
        positions=tensor([p for c in chunks for p in range(c.num_computed_tokens, c.kv_len)], torch.int64),
        logit_rows=tensor([bound - 1 for bound in bounds[1:]], torch.int64),
        metadata=metadata,
    )


def check_chunks(chunks: Sequence[SequenceChunk], page_size: int) -> None:
    """Raise ``ValueError`` unless every chunk has tokens and pages for them."""
    if not chunks:
        raise ValueError("a batch of 0 sequences has nothing to compute; pack at least 1")
    for index, chunk in enumerate(chunks):
        if not chunk.token_ids:
            raise ValueError(f"sequence {index} of the batch has 0 new tokens; leave it out of this step")
        room = len(chunk.pages) * page_size
        if chunk.kv_len > room:
            raise ValueError(
                f"sequence {index} has {chunk.kv_len} tokens and its {len(chunk.pages)} pages hold {room}; "
                "allocate pages before packing"
            )
