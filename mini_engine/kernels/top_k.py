"""L8: top-k without a sort: the cut is the largest number at or above which at least k logits lie.

One program per row. Passes over the row: one for the peak, at most 16 for the cut, one to write.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.threshold import BLOCK, WARPS, check_rows, find_cut, find_peak, whole_row, write_prefix
from mini_engine.sampler import filters


@triton.jit
def find_top_k(logits, width, peak, k, BLOCK: tl.constexpr):
    """Return the cut and how many logits equal to it stay (int64): exactly k are left. All, if k is 0 or ``width``."""
    cut, equals = whole_row(width)
    if (k > 0) & (k < width):
        cut, above = find_cut(logits, width, peak, cut, k, False, BLOCK)
        equals = k - above
    return cut, equals


@triton.jit
def top_k_kernel(logits, out, top_k, width, stride, out_stride, BLOCK: tl.constexpr):
    """Cut one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    cut, equals = find_top_k(logits, width, find_peak(logits, width, BLOCK), tl.load(top_k + row), BLOCK)
    write_prefix(logits, out + row * out_stride, width, cut, equals, BLOCK)


def apply_top_k(logits: Tensor, k: Tensor) -> Tensor:
    """Keep exactly the k largest logits of each row, the lowest ids among equals; the rest becomes -inf.

    ``logits`` [R, V] float32, ``k`` [R] int64, 0 is off, and so is any k from V on -> a new tensor [R, V].
    """
    check_rows(logits, k=k)
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    rows, width = logits.shape
    if rows:
        top_k_kernel[(rows,)](logits, out, k, width, logits.stride(0), out.stride(0), BLOCK=BLOCK, num_warps=WARPS)
    return out


def apply_top_k_reference(logits: Tensor, k: Tensor) -> Tensor:
    """Do what ``apply_top_k`` does, in torch."""
    return filters.apply_top_k(logits, k)
