"""L8: min-p. One program per row; it is read twice and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.threshold import BLOCK, INFINITY, WARPS, check_rows, find_peak, number_of, order_key
from mini_engine.sampler import filters


@triton.jit
def find_min_p(min_p):
    """Return the least x - peak (float64) of a token that min-p keeps, minus infinity for 0.

    The rule is exp(x - peak) >= min-p in float32, and a token exactly at the limit stays. ``exp`` on a GPU may be wrong
    in the last place, so logarithms are compared: what rounds to min-p begins half way to the float32 below it.
    """
    on = min_p > 0
    below = number_of(order_key(min_p) - 1)
    half_way = (min_p.to(tl.float64) + below.to(tl.float64)) / 2
    return tl.where(on, tl.log(tl.where(on, half_way, 1.0)), -INFINITY)


@triton.jit
def min_p_kernel(logits, out, min_p, width, stride, out_stride, BLOCK: tl.constexpr):
    """Cut one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    peak = find_peak(logits, width, BLOCK)
    limit = find_min_p(tl.load(min_p + row))
    for start in tl.range(0, width, BLOCK, num_stages=3):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < width, other=-INFINITY)
        tl.store(out + row * out_stride + column, tl.where(x - peak >= limit, x, -INFINITY), mask=column < width)


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drop every token less likely than ``min_p`` times the likeliest; one exactly at the limit stays.

    ``logits`` [R, V] float32, ``min_p`` [R] float32, 0 is off -> a new tensor [R, V], what is removed as -inf.
    """
    check_rows(logits, min_p=min_p)
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    rows, width = logits.shape
    if rows:
        min_p_kernel[(rows,)](logits, out, min_p, width, logits.stride(0), out.stride(0), BLOCK=BLOCK, num_warps=WARPS)
    return out


def apply_min_p_reference(logits: Tensor, min_p: Tensor) -> Tensor:
    """Do what ``apply_min_p`` does, in torch."""
    return filters.apply_min_p(logits, min_p)
