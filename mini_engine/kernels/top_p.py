"""L8: top-p without a sort: the cut is the largest number at or above which the mass reaches p of the total.

One program per row. Passes over the row: one for the peak, one for the total, at most 16 for the cut, one to write.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.threshold import (
    BLOCK,
    INFINITY,
    WARPS,
    check_rows,
    find_cut,
    find_peak,
    mass_above,
    mass_of,
    whole_row,
    write_prefix,
)
from mini_engine.sampler import filters


@triton.jit
def find_top_p(logits, width, peak, cut, equals, p, BLOCK: tl.constexpr):
    """Cut the prefix that ``cut`` and ``equals`` give to its nucleus; return the new cut and how many equal to it stay.

    The prefix is what top-k left, or the whole row. The new one is the shortest that weighs at least p times the old
    one, rounded up to a whole unit, and at least a token. It stays as it is if p is off, 1.
    """
    if p < 1.0:
        total = mass_above(logits, width, peak, cut, -INFINITY, BLOCK) + equals * mass_of(cut, peak)
        # A token stays iff the mass before it is below p * total; as that mass is an integer: below that, rounded up.
        target = tl.maximum(tl.ceil(p * total.to(tl.float64)).to(tl.int64), 1)
        cut, above = find_cut(logits, width, peak, cut, target, True, BLOCK)
        each = tl.maximum(mass_of(cut, peak), 1)
        equals = (target - above + each - 1) // each
    return cut, equals


@triton.jit
def top_p_kernel(logits, out, top_p, width, stride, out_stride, BLOCK: tl.constexpr):
    """Cut one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    peak = find_peak(logits, width, BLOCK)
    cut, equals = whole_row(width)
    cut, equals = find_top_p(logits, width, peak, cut, equals, tl.load(top_p + row), BLOCK)
    write_prefix(logits, out + row * out_stride, width, cut, equals, BLOCK)


def apply_top_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keep a token iff the mass before it, in falling order, the lowest id first among equals, is below p of the total.

    ``logits`` [R, V] float32, ``p`` [R] float64, 1 is off -> a new tensor [R, V], what is removed as -inf. One stays.
    """
    check_rows(logits, p=p)
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    rows, width = logits.shape
    if rows:
        top_p_kernel[(rows,)](logits, out, p, width, logits.stride(0), out.stride(0), BLOCK=BLOCK, num_warps=WARPS)
    return out


def apply_top_p_reference(logits: Tensor, p: Tensor) -> Tensor:
    """Do what ``apply_top_p`` does, in torch."""
    return filters.apply_top_p(logits, p)
