"""L8: where top-k and top-p cut a row of logits, found without sorting it.

Both keep a prefix of the row in falling order: all logits above a number, the cut, and the first few of those equal to
it. The cut is searched for. A probe asks how much of the row lies at or above it, three probes share one pass over the
row, and every pass leaves a quarter of the candidates. After the first pass the row is read from the L2 cache.

All sums are sums of integers, counts or fixed-point masses. These have no order, so the cut is exact and the same
whatever the block size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.launch import check_last_contiguous, check_shape

BLOCK = 4096  # logits that a program holds at a time
WARPS = 16
MAX_WIDTH = 1 << 22  # so many masses sum to less than 2**63
MASS_ONE = tl.constexpr(2.0**40)  # the likeliest token's mass
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
INFINITY = tl.constexpr(float("inf"))
FLIP = tl.constexpr(0x7FFFFFFF)  # all bits but the sign
DTYPES = {"k": torch.int64, "p": torch.float64, "min_p": torch.float32, "uniform": torch.float64}


@triton.jit
def order_key(x):
    """Map float32 numbers to int32 keys that compare as the numbers do; -0.0 and 0.0 are equal and have one key.

    The bits of a positive float32 rise with the number. Those of a negative one fall, so they are flipped.
    """
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ FLIP, bits)


@triton.jit
def number_of(key):
    """Return the float32 number of a key, an integer. A key less 1 is the next smaller number; -1 is a minus zero."""
    return tl.where(key < 0, key ^ FLIP, key).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(x, peak):
    """Return exp(x - peak), taken in float32, cut off to an int64 in units of 2**-40: 0 below about peak - 27.7."""
    return (tl.exp(x - peak) * MASS_ONE).to(tl.int64)


@triton.jit
def find_peak(logits, width, BLOCK: tl.constexpr):
    """Return the largest logit of a row; at least the least finite number, so that -inf minus it is not NaN."""
    peak = tl.full([BLOCK], -FLOAT32_MAX, tl.float32)
    for start in tl.range(0, width, BLOCK, num_stages=3):
        column = start + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.load(logits + column, mask=column < width, other=-INFINITY))
    return tl.max(peak, axis=0)


@triton.jit
def mass_above(logits, width, peak, cut, limit, BLOCK: tl.constexpr):
    """Add up the masses of the logits x above ``cut`` with x - peak >= limit, int64."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, width, BLOCK, num_stages=3):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < width, other=-INFINITY)
        total += tl.where((x > cut) & (x - peak >= limit), mass_of(x, peak), 0)
    return tl.sum(total, axis=0)


@triton.jit
def find_cut(logits, width, peak, low, target, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Find the largest number at or above which the row weighs at least ``target``.

    A logit weighs its mass if ``MASS``, otherwise 1. ``target`` int64, from 1 to the weight of the row; the cut is
    known to lie between ``low``, which may be -inf, and ``peak``. Returns the cut, a number of the row, and the weight
    of what lies above it, int64. Keys of two numbers can be more than 2**31 apart. How it searches is free.
    """
    high, above = peak, tl.full([], 0, tl.int64)  # nothing lies above the peak
    while low < high:
        bottom = order_key(low).to(tl.int64)
        gap = order_key(high) - bottom
        first, middle, last = bottom + (gap + 3) // 4, bottom + (gap + 1) // 2, bottom + (3 * gap + 3) // 4
        probe_first, probe_middle, probe_last = number_of(first), number_of(middle), number_of(last)
        from_first = tl.zeros([BLOCK], tl.int64 if MASS else tl.int32)
        from_middle = tl.zeros([BLOCK], tl.int64 if MASS else tl.int32)
        from_last = tl.zeros([BLOCK], tl.int64 if MASS else tl.int32)
        least = tl.full([BLOCK], INFINITY, tl.float32)  # of the logits from low to high
        largest = tl.full([BLOCK], -INFINITY, tl.float32)
        for start in tl.range(0, width, BLOCK, num_stages=3):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + column, mask=column < width, other=-INFINITY)  # below every probe
            weight = mass_of(x, peak) if MASS else 1
            from_first += tl.where(x >= probe_first, weight, 0)
            from_middle += tl.where(x >= probe_middle, weight, 0)
            from_last += tl.where(x >= probe_last, weight, 0)
            least = tl.minimum(least, tl.where(x >= low, x, INFINITY))
            largest = tl.maximum(largest, tl.where(x <= high, x, -INFINITY))
        weight_first = tl.sum(from_first, axis=0).to(tl.int64)
        weight_middle = tl.sum(from_middle, axis=0).to(tl.int64)
        weight_last = tl.sum(from_last, axis=0).to(tl.int64)
        # Only numbers of the row are candidates. When one is left the bounds meet, long before all bits are settled.
        low, high = tl.maximum(low, tl.min(least, axis=0)), tl.minimum(high, tl.max(largest, axis=0))
        if weight_last >= target:
            low = tl.maximum(low, probe_last)
        elif weight_middle >= target:
            low = tl.maximum(low, probe_middle)
            high = tl.minimum(high, number_of(last - 1))
            above = weight_last
        elif weight_first >= target:
            low = tl.maximum(low, probe_first)
            high = tl.minimum(high, number_of(middle - 1))
            above = weight_middle
        else:
            high = tl.minimum(high, number_of(first - 1))
            above = weight_first
    return high, above


@triton.jit
def whole_row(width):
    """Return the cut and the number of equals (int64) of the prefix that is the whole row."""
    return tl.full([], -INFINITY, tl.float32), tl.full([], width, tl.int64)


@triton.jit
def write_prefix(logits, out, width, cut, equals, BLOCK: tl.constexpr):
    """Write a row to ``out``: what lies above ``cut``, the first ``equals`` of what equals it, the rest as -inf."""
    seen = tl.full([], 0, tl.int64)  # equals in the blocks before
    for start in tl.range(0, width, BLOCK, num_stages=3):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        x = tl.load(logits + column, mask=mask, other=-INFINITY)
        equal = ((x == cut) & mask).to(tl.int32)
        rank = seen + tl.cumsum(equal, axis=0) - equal
        tl.store(out + column, tl.where((x > cut) | ((x == cut) & (rank < equals)), x, -INFINITY), mask=mask)
        seen += tl.sum(equal, axis=0)


def check_rows(logits: Tensor, **parameters: Tensor) -> None:
    """Raise ``ValueError`` unless ``logits`` is [R, V] float32 and each of the named parameters is [R] of its dtype.

    What is not checked: no NaN must come here, and only rows with a finite largest logit; the sampler takes out others.
    """
    check_shape("logits", logits, None, None)
    check_last_contiguous(logits=logits, **parameters)
    if logits.dtype != torch.float32:
        raise ValueError(f"logits is {logits.dtype}; the filters take torch.float32, call .float() on it first")
    if not 0 < logits.shape[1] <= MAX_WIDTH:
        raise ValueError(f"logits has {logits.shape[1]} columns; the masses are exact for 1 to {MAX_WIDTH}")
    for name, parameter in parameters.items():
        check_shape(name, parameter, len(logits))
        if parameter.dtype != DTYPES[name]:
            raise ValueError(f"{name} is {parameter.dtype}; it must be {DTYPES[name]}")
