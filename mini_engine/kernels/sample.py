"""L8: filter a row and draw from it in one launch, without a sort and without writing the filtered row.

The drawn token is the one in whose share of [0, total mass) a random number falls, the shares lying side by side in the
order of ids, as in lesson 4. Masses are integers, so the shares are exact and do not depend on the block size. Passes
over the row: one for the peak, at most 16 for each cut, one for the total, one to find the share.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.min_p import find_min_p
from mini_engine.kernels.threshold import BLOCK, INFINITY, WARPS, check_rows, find_peak, mass_above, mass_of
from mini_engine.kernels.top_k_top_p import apply_top_k_top_p_reference, find_top_k_top_p
from mini_engine.sampler.draw import draw_uniform
from mini_engine.sampler.filters import apply_min_p


@triton.jit
def sample_kernel(logits, top_k, top_p, min_p, uniform, drawn, width, stride, JOINT: tl.constexpr, BLOCK: tl.constexpr):
    """Draw the token of one row and store its id at ``drawn[row]``, int64.

    The row's uniform number times the mass of all that is left, in float64, is cut off to an integer below that mass.
    The token is the first, in the order of ids, whose share ends above it.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    peak = find_peak(logits, width, BLOCK)
    cut, equals = find_top_k_top_p(logits, width, peak, tl.load(top_k + row), tl.load(top_p + row), JOINT, BLOCK)
    limit = find_min_p(tl.load(min_p + row))
    each = tl.where(cut - peak >= limit, mass_of(cut, peak), 0)  # of every token at the cut
    total = mass_above(logits, width, peak, cut, limit, BLOCK) + equals * each
    # A total beyond 2**53 is rounded on the way, perhaps up; the last share ends before the total.
    target = tl.minimum((tl.load(uniform + row) * total.to(tl.float64)).to(tl.int64), total - 1)

    # In the blocks before: the mass, and the number of tokens at the cut.
    before = tl.full([], 0, tl.int64)
    seen = tl.full([], 0, tl.int64)
    # The block of the target, and what lies before it.
    found = tl.full([], 0, tl.int32)
    found_before = before
    found_seen = seen
    for start in tl.range(0, width, BLOCK, num_stages=3):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < width, other=-INFINITY)
        alike = tl.sum(((x == cut) & (column < width)).to(tl.int32), axis=0)
        after = before + tl.sum(tl.where((x > cut) & (x - peak >= limit), mass_of(x, peak), 0), axis=0)
        after += tl.maximum(tl.minimum(equals - seen, alike), 0) * each
        if (before <= target) & (target < after):
            found, found_before, found_seen = start, before, seen
        before = after
        seen = seen + alike

    column = found + tl.arange(0, BLOCK)
    x = tl.load(logits + column, mask=column < width, other=-INFINITY)
    equal = ((x == cut) & (column < width)).to(tl.int32)
    rank = found_seen + tl.cumsum(equal, axis=0) - equal
    mass = tl.where((x > cut) & (x - peak >= limit), mass_of(x, peak), 0)
    mass += tl.where((equal == 1) & (rank < equals), each, 0)
    edges = found_before + tl.cumsum(mass, axis=0)  # [BLOCK]: the right edge of each token's share
    token = found + tl.sum((edges <= target).to(tl.int32), axis=0)
    tl.store(drawn + row, tl.minimum(token, width - 1).to(tl.int64))


def sample_top_k_top_p(
    logits: Tensor, k: Tensor, p: Tensor, min_p: Tensor, uniform: Tensor, joint: bool = False
) -> Tensor:
    """Filter each row by top-k, top-p and min-p and draw one id. ``logits`` [R, V] float32 -> ids [R] int64.

    ``k`` [R] int64 (0 off), ``p`` [R] float64 (1 off), ``min_p`` [R] float32 (0 off); ``uniform`` [R] float64 in
    [0, 1) says which token. Top-p judges what top-k left, or the whole row if ``joint``.
    """
    check_rows(logits, k=k, p=p, min_p=min_p, uniform=uniform)
    rows, width = logits.shape
    drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        sample_kernel[(rows,)](
            logits, k, p, min_p, uniform, drawn, width, logits.stride(0), JOINT=joint, BLOCK=BLOCK, num_warps=WARPS
        )
    return drawn


def sample_top_k_top_p_reference(
    logits: Tensor, k: Tensor, p: Tensor, min_p: Tensor, uniform: Tensor, joint: bool = False
) -> Tensor:
    """Do what ``sample_top_k_top_p`` does, in torch; it too stays inside the row where a product rounds up."""
    drawn = draw_uniform(apply_min_p(apply_top_k_top_p_reference(logits, k, p, joint), min_p), uniform)
    return drawn.clamp(max=logits.shape[1] - 1)
