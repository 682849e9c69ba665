"""L8: the largest logit of each row and its id, the lowest id among equals.

A row is cut into blocks, one program each, because one of 132 processors cannot read 600 kB fast alone. A second kernel
takes the best of the blocks. A maximum does not depend on the order in which it is taken, so this costs no exactness.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.launch import check_last_contiguous, check_shape
from mini_engine.kernels.threshold import order_key

BLOCK = 4096
NAN_KEY = tl.constexpr(0x7FFFFFFF)  # above that of plus infinity
ID_BITS = tl.constexpr(0x7FFFFFFF)
NOTHING = tl.constexpr(-(2**63))


@triton.jit
def block_argmax_kernel(logits, best, width, stride, blocks, BLOCK: tl.constexpr):
    """Find the best of a block of a row; program (row, block) stores it at ``best[row, block]``, int64 [rows, blocks].

    The key lies above the reversed id, ``ID_BITS - id``, in one number, so one maximum does both.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
    is_number = x == x  # noqa: PLR0124 (NaN is not)
    key = tl.where(is_number, order_key(x), NAN_KEY).to(tl.int64)  # NaN wins, as in torch.max
    ranked = tl.where(column < width, (key << 32) | (ID_BITS - column), NOTHING)
    tl.store(best + row * blocks + block, tl.max(ranked, axis=0))


@triton.jit
def row_argmax_kernel(logits, best, values, ids, stride, blocks, BLOCKS: tl.constexpr):
    """Take the best of a row's blocks: its id to ``ids[row]``, its logit, read again, to ``values[row]``."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    ranked = tl.max(tl.load(best + row * blocks + block, mask=block < blocks, other=NOTHING), axis=0)
    token = ID_BITS - (ranked & ID_BITS)
    tl.store(ids + row, token)
    tl.store(values + row, tl.load(logits + row * stride + token).to(tl.float32))


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Find the largest logit of each row. ``logits`` [N, V] -> values [N] float32, ids [N] int64.

    The lowest id among equals; NaN counts as the largest, so a value that is NaN says that the row holds a NaN.
    """
    check_shape("logits", logits, None, None)
    check_last_contiguous(logits=logits)
    rows, width = logits.shape
    if not 0 < width < 1 << 31:
        raise ValueError(f"logits has {width} columns; the argmax is of 1 to {(1 << 31) - 1}")
    blocks = triton.cdiv(width, BLOCK)
    best = torch.empty((rows, blocks), dtype=torch.int64, device=logits.device)
    values = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        block_argmax_kernel[(rows, blocks)](logits, best, width, logits.stride(0), blocks, BLOCK=BLOCK)
        row_argmax_kernel[(rows,)](
            logits, best, values, ids, logits.stride(0), blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=1
        )
    return values, ids


def argmax_reference(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Do what ``argmax`` does, in torch."""
    values, ids = logits.max(-1)
    return values.float(), ids
