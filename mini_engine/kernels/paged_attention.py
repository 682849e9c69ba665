"""L8: causal attention of packed query rows over the paged pool, in one launch, without copying a key.

A program holds a block of queries and walks over the keys that they see, tile by tile, with a softmax that is
corrected as it goes (online softmax; FlashAttention, Dao et al., 2022). It needs no more memory than one tile of
scores, and finds every key through the page table. The query heads that share a key-value head are rows of one tile,
so keys and values are read once for all of them.

Much work per key and little reading: this is the kernel for prompts. ``split_attention`` is the one for decoding.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.attention.dense import causal_mask
from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.kernels.launch import LOG2_E, check_last_contiguous, check_shape
from mini_engine.kernels.query_blocks import QueryBlocks

# A finite mask: -inf minus -inf is NaN. Next to any visible score the weight is exp2(-1e30 - score), exactly 0.
HIDDEN: tl.constexpr = tl.constexpr(-1e30)
MOST_DIM = 256  # of a head: beyond it tiles outgrow registers and shared memory


@triton.jit
def load_queries(
    q,
    block,
    kv_head,
    q_row_stride,
    q_head_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Load a block's queries, row r being query r // GROUP and head r % GROUP of the ``GROUP`` that share ``kv_head``.

    ``block`` points at its sequence, start, end and visible. Returns the tile [ROWS, DIM]; of each row its packed row,
    its head, how many keys it sees, and whether the block has it at all, [ROWS] each.
    """
    row = tl.arange(0, ROWS)
    start, end, visible = tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    query = start + row // GROUP
    head = kv_head * GROUP + row % GROUP
    used = query < end
    sees = visible - (end - 1 - query)
    dim = tl.arange(0, DIM)[None, :]
    place = q + query.to(tl.int64)[:, None] * q_row_stride + head[:, None] * q_head_stride + dim
    tile = tl.load(place, mask=used[:, None] & (dim < HEAD_DIM), other=0.0)
    return tile, query, head, sees, used


@triton.jit
def attend_tiles(
    q,
    sees,
    keys,
    values,
    pages,
    start,
    stop,
    scale,
    top,
    total,
    weighted,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Let the rows of ``q`` [ROWS, DIM] attend to the positions ``start`` … ``stop - 1`` of one sequence.

    ``sees`` [ROWS]: how many keys each row sees. ``keys`` and ``values`` point at one head of the pool [slots,
    HEAD_DIM], ``pages`` at the sequence's page table. ``scale`` is the factor of the scores, log2(e) included.
    The state, carried from tile to tile: the largest score so far ``top`` [ROWS], the sum of the weights ``total``
    [ROWS] and the sum of the weighted values ``weighted`` [ROWS, DIM], both relative to ``top``; these three are
    returned. Without ``MASKED`` every row must see every position, and TILE must divide their number.
    """
    dim = tl.arange(0, DIM)[None, :]
    for first in range(start, stop, TILE):
        position = first + tl.arange(0, TILE)  # [TILE]
        mask = dim < HEAD_DIM
        if MASKED:
            inside = position < stop  # beyond it the page table may hold -1, and the pool anything
            mask &= inside[:, None]
            page = tl.load(pages + position // PAGE_SIZE, mask=inside, other=0)
        else:
            page = tl.load(pages + position // PAGE_SIZE)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        place = slot[:, None] * HEAD_DIM + dim  # [TILE, DIM]
        key = tl.load(keys + place, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale  # [ROWS, TILE]
        if MASKED:
            scores = tl.where(position[None, :] < sees[:, None], scores, HIDDEN)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        keep = tl.exp2(top - new_top)  # what the sums so far still weigh
        weight = tl.exp2(scores - new_top[:, None])  # [ROWS, TILE]
        total = total * keep + tl.sum(weight, axis=1)
        value = tl.load(values + place, mask=mask, other=0.0)
        weighted = tl.dot(weight.to(value.dtype), value, weighted * keep[:, None], input_precision="ieee")
        top = new_top
    return top, total, weighted


@triton.jit(do_not_specialize=["table_stride"])  # it grows with the longest sequence, and compiling takes seconds
def paged_attention_kernel(
    q,
    keys,
    values,
    out,
    blocks,
    block_table,
    scale,
    q_row_stride,
    q_head_stride,
    kv_head_stride,
    out_row_stride,
    out_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
):
    """Attend for one block of queries and one key-value head."""
    block = blocks + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    tile, query, head, sees, used = load_queries(
        q, block, kv_head, q_row_stride, q_head_stride, GROUP, ROWS, HEAD_DIM, DIM
    )
    keys += kv_head.to(tl.int64) * kv_head_stride
    values += kv_head.to(tl.int64) * kv_head_stride
    pages = block_table + tl.load(block) * table_stride
    stop = tl.load(block + 3)
    first_sees = stop - (tl.load(block + 2) - tl.load(block + 1)) + 1  # keys of the block's first query
    whole = first_sees // TILE * TILE  # up to here every row sees every key

    top = tl.full([ROWS], HIDDEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, DIM], tl.float32)
    top, total, weighted = attend_tiles(
        tile, sees, keys, values, pages, 0, whole, scale, top, total, weighted, False, TILE, PAGE_SIZE, HEAD_DIM, DIM
    )
    top, total, weighted = attend_tiles(
        tile, sees, keys, values, pages, whole, stop, scale, top, total, weighted, True, TILE, PAGE_SIZE, HEAD_DIM, DIM
    )
    dim = tl.arange(0, DIM)[None, :]
    place = out + query.to(tl.int64)[:, None] * out_row_stride + head[:, None] * out_head_stride + dim
    result = (weighted / total[:, None]).to(out.dtype.element_ty)
    tl.store(place, result, mask=used[:, None] & (dim < HEAD_DIM))


@dataclass(frozen=True)
class TileShape:
    """How a program works: ``rows`` (query, head), ``tile`` keys at a time, by ``num_warps`` times 32 threads.

    ``num_stages`` is how far loading runs ahead. A key takes two loads, its page and then itself, so of 5 stages there
    are 2 tiles of keys on their way.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """Return what a launch is given of it."""
        return {"ROWS": self.rows, "TILE": self.tile, "num_warps": self.num_warps, "num_stages": self.num_stages}


def padded_dim(head_dim: int) -> int:
    """Return the width of a tile that holds a head: a power of 2, and what the tensor cores want at least."""
    power: int = triton.next_power_of_2(head_dim)
    return max(16, power)


def paged_tile_shape(group: int, head_dim: int, dtype: torch.dtype) -> TileShape:
    """Return the tiles of ``paged_attention`` for ``group`` query heads per key-value head."""
    if dtype == torch.float32:  # no tensor cores: operands pass through registers, and among fewer threads they spill
        shape = TileShape(rows=32, tile=32, num_warps=16, num_stages=2)
    elif head_dim <= 128:
        shape = TileShape(rows=128, tile=64, num_warps=8, num_stages=5)
    else:
        shape = TileShape(rows=64, tile=32, num_warps=8, num_stages=3)
    return TileShape(max(shape.rows, triton.next_power_of_2(group)), shape.tile, shape.num_warps, shape.num_stages)


def paged_queries(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return how many queries one block of ``paged_attention`` holds."""
    return paged_tile_shape(group, head_dim, dtype).rows // group


def check_attention(
    q: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, blocks: QueryBlocks, out: Tensor, most: int
) -> None:
    """Raise ``ValueError`` unless an attention kernel can read these; ``most`` queries fit into one of its blocks."""
    check_shape("q", q, None, None, None)
    check_shape("keys", keys, None, None, q.shape[2])
    check_shape("values", values, *keys.shape)
    check_shape("out", out, *q.shape)
    check_last_contiguous(q=q, out=out, block_table=metadata.block_table)
    if q.shape[1] % keys.shape[0]:
        raise ValueError(f"{q.shape[1]} query heads do not share {keys.shape[0]} key-value heads evenly")
    if not keys.dtype == values.dtype == q.dtype:
        raise ValueError(f"q is {q.dtype}, keys {keys.dtype}, values {values.dtype}; give all three the pool's dtype")
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("keys and values must be contiguous [Hkv, slots, D]; pass a layer of the pool as it is")
    if q.shape[2] > MOST_DIM:
        raise ValueError(f"head_dim is {q.shape[2]}, a tile holds {MOST_DIM}; use the torch reference for wider heads")
    if blocks.queries > most:
        raise ValueError(f"blocks of {blocks.queries} queries do not fit; cut_queries(..., queries={most}) at most")


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, blocks: QueryBlocks, out: Tensor
) -> None:
    """Attend for the rows of ``blocks`` and write them to ``out``; its other rows stay as they are. Mutates ``out``.

    ``q``, ``out`` [T, Hq, D], rows and heads any distance apart; ``keys``, ``values`` [Hkv, slots, D], a layer of the
    pool. Raises ``ValueError`` for shapes, strides or dtypes it cannot read.
    """
    group = q.shape[1] // max(1, keys.shape[0])
    head_dim = q.shape[-1]
    shape = paged_tile_shape(group, head_dim, q.dtype)
    check_attention(q, keys, values, metadata, blocks, out, shape.rows // max(1, group))
    if not blocks.blocks:
        return
    paged_attention_kernel[(len(blocks.blocks), keys.shape[0])](
        q,
        keys,
        values,
        out,
        blocks.table,
        metadata.block_table,
        head_dim**-0.5 * LOG2_E,
        *q.stride()[:2],
        keys.stride(0),
        *out.stride()[:2],
        metadata.block_table.stride(0),
        GROUP=group,
        PAGE_SIZE=metadata.page_size,
        HEAD_DIM=head_dim,
        DIM=padded_dim(head_dim),
        **shape.options(),
    )


def paged_attention_reference(
    q: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, blocks: QueryBlocks, out: Tensor
) -> None:
    """Do what ``paged_attention`` does, in torch, one block after the other. Mutates ``out``."""
    group = q.shape[1] // keys.shape[0]
    for sequence, start, end, visible in blocks.blocks:
        slots = metadata.kv_slots[sequence][:visible]
        key = keys[:, slots].float().repeat_interleave(group, dim=0)  # [Hq, visible, D]
        value = values[:, slots].float().repeat_interleave(group, dim=0)
        scores = q[start:end].float().transpose(0, 1) @ key.transpose(1, 2) * q.shape[-1] ** -0.5
        hidden = ~causal_mask(end - start, visible, q.device)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)  # [Hq, q_len, visible]
        out[start:end] = (weights @ value).transpose(0, 1).to(out.dtype)
