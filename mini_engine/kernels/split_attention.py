"""L8: causal attention with the keys of a sequence split among programs (FlashDecoding, Dao et al., 2023).

A decoding sequence has one query: with a program for each there are fewer programs than processors, and each reads a
long cache alone. So the keys are cut into splits; a program attends to one split and leaves its result with its
log-sum-exp, and a second kernel merges the results of each row, the weight of a split being exp(its log-sum-exp).

With a fixed split size this is also the form whose bits do not depend on the batch. Splits and tiles begin at position
0 whatever the chunk, every program has the same tile, runs the same instructions for hidden and for visible keys, and a
row's splits are merged in order, so that a row meets the same additions alone, in a batch, in a prompt and in decoding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.kernels.launch import LOG2_E
from mini_engine.kernels.paged_attention import (
    HIDDEN,
    TileShape,
    attend_tiles,
    check_attention,
    load_queries,
    padded_dim,
    paged_attention_reference,
)
from mini_engine.kernels.query_blocks import QueryBlocks

INVARIANT_SPLIT = 256  # keys of a split when bits must not depend on the batch
LEAST_SPLIT = 128  # below it the merge reads more than a twentieth of what the splits do
PROGRAMS_PER_PROCESSOR = 8  # several waves, so that the last, partly filled one weighs little
MERGED_AT_ONCE = 16  # splits that the merge loads before it waits
SCRATCH_BYTES = 128 << 20  # for the splits' results; longer prompts are served in pieces


# What changes from step to step is not specialised: compiling takes seconds, and another binary may be other bits.
@triton.jit(do_not_specialize=["queries", "split_size", "table_stride"])
def split_attention_kernel(
    q,
    keys,
    values,
    partial,
    lse,
    blocks,
    block_table,
    scale,
    queries,
    split_size,
    q_row_stride,
    q_head_stride,
    kv_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
):
    """Attend for one block of queries and one key-value head to the keys of one split.

    ``partial`` [B * queries, Hq, splits, HEAD_DIM] float32 takes the results, ``lse`` [B * queries, Hq, splits] the
    logarithms to base 2 of the sums of weights. Query i of block b has row b * queries + i.
    """
    block = blocks + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first = split * split_size
    visible = tl.load(block + 3)
    if first >= visible:
        return  # a shorter sequence than the longest: no row has this split, and none will read it
    tile, query, head, sees, used = load_queries(
        q, block, kv_head, q_row_stride, q_head_stride, GROUP, ROWS, HEAD_DIM, DIM
    )
    keys += kv_head.to(tl.int64) * kv_head_stride
    values += kv_head.to(tl.int64) * kv_head_stride
    pages = block_table + tl.load(block) * table_stride
    top = tl.full([ROWS], HIDDEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, DIM], tl.float32)
    # One call, masked throughout. Where the mask ends depends on the block's other rows, and compiled without a mask
    # the same formula may round differently.
    stop = tl.minimum(visible, first + split_size)
    top, total, weighted = attend_tiles(
        tile, sees, keys, values, pages, first, stop, scale, top, total, weighted, True, TILE, PAGE_SIZE, HEAD_DIM, DIM
    )
    # [B * queries, Hq, splits]: where this row's result for this split lies
    row = tl.program_id(0) * queries + (query - tl.load(block + 1))
    place = (row.to(tl.int64) * (tl.num_programs(1) * GROUP) + head) * tl.num_programs(2) + split
    stored = used & (sees > first)
    tl.store(lse + place, top + tl.log2(total), mask=stored)
    dim = tl.arange(0, DIM)[None, :]
    mask = stored[:, None] & (dim < HEAD_DIM)
    tl.store(partial + place[:, None] * HEAD_DIM + dim, weighted / total[:, None], mask=mask)


@triton.jit(do_not_specialize=["queries", "split_size", "num_splits"])
def merge_splits_kernel(
    partial,
    lse,
    out,
    blocks,
    queries,
    split_size,
    num_splits,
    out_row_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Merge the splits that one query of one head sees, ``SPLITS`` at a time: a softmax over log-sum-exps.

    ``partial`` and ``lse`` as ``split_attention_kernel`` leaves them; a split that the row does not see has no result.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    block = blocks + row // queries * 4
    query = tl.load(block + 1) + row % queries
    end = tl.load(block + 2)
    if query >= end:
        return  # the block is shorter
    sees = tl.load(block + 3) - (end - 1 - query)
    count = tl.cdiv(sees, split_size)  # of this row alone: what other rows see is not read
    base = (row.to(tl.int64) * tl.num_programs(1) + head) * num_splits
    dim = tl.arange(0, DIM)[None, :]
    top = tl.full([1], HIDDEN, tl.float32)
    total = tl.zeros([1], tl.float32)
    merged = tl.zeros([1, DIM], tl.float32)
    for first in range(0, count, SPLITS):
        split = first + tl.arange(0, SPLITS)
        seen = split < count
        mask = seen[:, None] & (dim < HEAD_DIM)
        values = tl.load(partial + (base + split)[:, None] * HEAD_DIM + dim, mask=mask, other=0.0)  # [SPLITS, DIM]
        score = tl.load(lse + base + split, mask=seen, other=HIDDEN)  # [SPLITS]
        new_top = tl.maximum(top, tl.max(score, axis=0, keep_dims=True))
        keep = tl.exp2(top - new_top)
        weight = tl.exp2(score - new_top)  # exactly 0 where there is no split
        total = total * keep + tl.sum(weight, axis=0, keep_dims=True)
        merged = merged * keep[:, None] + tl.sum(weight[:, None] * values, axis=0, keep_dims=True)
        top = new_top
    place = out + query.to(tl.int64) * out_row_stride + head * out_head_stride + dim
    tl.store(place, (merged / total[:, None]).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def split_tile_shape(group: int, head_dim: int, dtype: torch.dtype) -> TileShape:
    """Return the tiles of ``split_attention``: the fewest rows that tensor cores take, deep loading instead."""
    rows = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32 or head_dim > 128:
        return TileShape(rows, tile=32, num_warps=8, num_stages=3)
    return TileShape(rows, tile=64, num_warps=4 if rows <= 32 else 8, num_stages=5)


def split_queries(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return how many queries one block of ``split_attention`` holds."""
    return split_tile_shape(group, head_dim, dtype).rows // group


def choose_split_size(max_kv_len: int, num_blocks: int, num_kv_heads: int, num_processors: int) -> int:
    """Return the split size that gives every processor programs to run, in whole ``LEAST_SPLIT``s.

    It depends on how many blocks there are, so the bits of a row depend on the batch: not for the invariant mode.
    """
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * num_processors, max(1, num_blocks * num_kv_heads))  # splits
    count: int = triton.cdiv(max_kv_len, wanted * LEAST_SPLIT)
    return max(1, count) * LEAST_SPLIT


def split_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: AttentionMetadata,
    blocks: QueryBlocks,
    out: Tensor,
    split_size: int,
) -> None:
    """Attend for the rows of ``blocks`` and write them to ``out``; its other rows stay as they are. Mutates ``out``.

    ``q``, ``out`` [T, Hq, D], rows and heads any distance apart; ``keys``, ``values`` [Hkv, slots, D], a layer of the
    pool. Raises ``ValueError`` for shapes, strides or dtypes it cannot read and for a split that is not whole tiles.
    """
    group = q.shape[1] // max(1, keys.shape[0])
    head_dim = q.shape[-1]
    shape = split_tile_shape(group, head_dim, q.dtype)
    check_attention(q, keys, values, metadata, blocks, out, shape.rows // max(1, group))
    if split_size < 1 or split_size % shape.tile:
        raise ValueError(f"split_size is {split_size}; it must be a multiple of {shape.tile}, the keys of one tile")
    for piece in cut_into_pieces(blocks, split_size, bytes_per_split=4 * q.shape[1] * (head_dim + 1)):
        attend_piece(q, keys, values, metadata, piece, out, split_size)


def cut_into_pieces(blocks: QueryBlocks, split_size: int, bytes_per_split: int) -> list[QueryBlocks]:
    """Cut ``blocks`` so that the scratch of each piece stays below ``SCRATCH_BYTES``, or is that of a single block.

    ``bytes_per_split``: what one query leaves for one split. Blocks do not meet each other, so no bit changes.
    """
    pieces = []
    first = 0
    while first < len(blocks.blocks):
        longest = blocks.blocks[first].visible  # the blocks are sorted by it
        per_block = triton.cdiv(longest, split_size) * blocks.queries * bytes_per_split
        end = first + max(1, SCRATCH_BYTES // per_block)
        pieces.append(QueryBlocks(blocks.blocks[first:end], blocks.table[first:end], blocks.queries))
        first = end
    return pieces


def attend_piece(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: AttentionMetadata,
    blocks: QueryBlocks,
    out: Tensor,
    split_size: int,
) -> None:
    """Launch both kernels for a piece whose scratch fits. Mutates ``out``."""
    num_kv_heads, _, head_dim = keys.shape
    num_heads = q.shape[1]
    count = len(blocks.blocks)
    shape = split_tile_shape(num_heads // num_kv_heads, head_dim, q.dtype)
    widths = {"HEAD_DIM": head_dim, "DIM": padded_dim(head_dim)}
    num_splits = triton.cdiv(blocks.blocks[0].visible, split_size)  # of the longest
    partial = q.new_empty(count * blocks.queries, num_heads, num_splits, head_dim, dtype=torch.float32)
    lse = q.new_empty(count * blocks.queries, num_heads, num_splits, dtype=torch.float32)
    split_attention_kernel[(count, num_kv_heads, num_splits)](
        q,
        keys,
        values,
        partial,
        lse,
        blocks.table,
        metadata.block_table,
        head_dim**-0.5 * LOG2_E,
        blocks.queries,
        split_size,
        *q.stride()[:2],
        keys.stride(0),
        metadata.block_table.stride(0),
        GROUP=num_heads // num_kv_heads,
        PAGE_SIZE=metadata.page_size,
        **widths,
        **shape.options(),
    )
    merge_splits_kernel[(count * blocks.queries, num_heads)](
        partial,
        lse,
        out,
        blocks.table,
        blocks.queries,
        split_size,
        num_splits,
        *out.stride()[:2],
        SPLITS=MERGED_AT_ONCE,
        **widths,
        num_warps=4,
    )


def split_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: AttentionMetadata,
    blocks: QueryBlocks,
    out: Tensor,
    split_size: int,
) -> None:
    """Do what ``split_attention`` does, in torch, where a split has nothing to save: it is ignored. Mutates ``out``."""
    if split_size < 1:
        raise ValueError(f"split_size is {split_size}; a split has at least 1 key")
    paged_attention_reference(q, keys, values, metadata, blocks, out)
