"""L8: top-k and top-p together in one launch, one after the other or side by side.

Both keep a prefix of the same falling order, so what both keep is the shorter prefix, and a cut after a cut is a cut.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.threshold import BLOCK, WARPS, check_rows, find_peak, whole_row, write_prefix
from mini_engine.kernels.top_k import find_top_k
from mini_engine.kernels.top_p import find_top_p
from mini_engine.sampler import filters


@triton.jit
def find_top_k_top_p(logits, width, peak, k, p, JOINT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the cut and how many equal to it stay. Top-p judges what top-k left, or the whole row if ``JOINT``."""
    cut, equals = find_top_k(logits, width, peak, k, BLOCK)
    if JOINT:
        edge, few = whole_row(width)
        edge, few = find_top_p(logits, width, peak, edge, few, p, BLOCK)
        if (edge > cut) | ((edge == cut) & (few < equals)):
            cut, equals = edge, few
    else:
        cut, equals = find_top_p(logits, width, peak, cut, equals, p, BLOCK)
    return cut, equals


@triton.jit
def top_k_top_p_kernel(logits, out, top_k, top_p, width, stride, out_stride, JOINT: tl.constexpr, BLOCK: tl.constexpr):
    """Cut one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    cut, equals = find_top_k_top_p(logits, width, find_peak(logits, width, BLOCK), k, p, JOINT, BLOCK)
    write_prefix(logits, out + row * out_stride, width, cut, equals, BLOCK)


def apply_top_k_top_p(logits: Tensor, k: Tensor, p: Tensor, joint: bool = False) -> Tensor:
    """Keep what top-k leaves and top-p keeps of that, or what both keep of the whole row if ``joint``.

    ``logits`` [R, V] float32, ``k`` [R] int64, ``p`` [R] float64, as in the single filters -> a new tensor [R, V].
    """
    check_rows(logits, k=k, p=p)
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    rows, width = logits.shape
    if rows:
        top_k_top_p_kernel[(rows,)](
            logits, out, k, p, width, logits.stride(0), out.stride(0), JOINT=joint, BLOCK=BLOCK, num_warps=WARPS
        )
    return out


def apply_top_k_top_p_reference(logits: Tensor, k: Tensor, p: Tensor, joint: bool = False) -> Tensor:
    """Do what ``apply_top_k_top_p`` does, in torch."""
    return filters.apply_joint(logits, k, p) if joint else filters.apply_top_p(filters.apply_top_k(logits, k), p)
