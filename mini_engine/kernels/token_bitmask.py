"""L8: a grammar's bitmask onto the logits: minus infinity where the bit is 0.

The logits are never read: banned ones are overwritten and allowed ones left alone. What goes through memory is the mask
(a bit per token) and the banned logits; torch first makes a boolean per token, then reads and writes every logit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.grammar import masks
from mini_engine.kernels.launch import check_last_contiguous, check_shape

WORDS = 64  # per program, 2048 tokens: one row of a large vocabulary is then 75 programs, enough for most of a GPU


@triton.jit
def token_bitmask_kernel(
    logits,
    mask,
    rows,
    num_rows,
    vocab_size,
    num_words,
    logits_stride,
    mask_stride,
    HAS_ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Ban tokens of ``WORDS`` words of one mask."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index) if HAS_ROWS else index  # int64: rows * V passes 2**31
    if (row >= 0) & (row < num_rows):  # what is not a row is other memory
        word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)[:, None]  # [WORDS, 1]
        bit = tl.arange(0, 32)[None, :]  # [1, 32]
        token = word * 32 + bit  # [WORDS, 32]
        inside = token < vocab_size
        allowed = tl.load(mask + index * mask_stride + word, mask=word < num_words, other=-1)  # [WORDS, 1] int32
        place = logits + row * logits_stride + token
        minus_infinity = tl.full((WORDS, 32), float("-inf"), tl.float32)
        # Most words of most grammars' masks ban all of their tokens. Those are stored apart: 32 neighbours with one
        # condition become a few wide writes, which a condition per token would not.
        tl.store(place, minus_infinity, mask=inside & (allowed == 0))
        # The shift drags copies of the sign in from the left; & 1 looks at one bit and drops them.
        banned = ((allowed >> bit) & 1) == 0
        tl.store(place, minus_infinity, mask=inside & (allowed != 0) & banned)


def apply_token_bitmask(logits: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
    """Write minus infinity where the bit is 0. ``logits`` [R, V], ``mask`` int32 [N, ceil(V / 32)]. Mutates logits.

    ``rows`` [N] int64 says which row of the logits each mask belongs to; ``None``: N is R and mask i belongs to row i.
    A row in no mask stays as it is; one in two is banned what either bans; a number that is not a row is skipped, since
    checking it would mean waiting for the device. Allowed logits keep their bits, whatever they are.

    The mask must cover the columns of the logits, those of a padded head too (``masks.apply_bitmask``). Raises
    ``ValueError`` for another shape or dtype, and for gaps within a row.
    """
    check_shape("logits", logits, None, None)
    num_rows, vocab_size = logits.shape
    num_words = masks.num_words(vocab_size)
    check_shape("mask", mask, num_rows if rows is None else None, num_words)
    check_last_contiguous(logits=logits, mask=mask)
    if mask.dtype != torch.int32 or not logits.is_floating_point():
        raise ValueError(
            f"mask is {mask.dtype} and logits {logits.dtype}; a bitmask is int32, logits are floating point"
        )
    if rows is not None:
        check_shape("rows", rows, len(mask))
        check_last_contiguous(rows=rows)
        if rows.dtype != torch.int64:
            raise ValueError(f"rows is {rows.dtype}; it must be int64, call .long() on it")
    if mask.numel():
        token_bitmask_kernel[(len(mask), triton.cdiv(num_words, WORDS))](
            logits,
            mask,
            mask if rows is None else rows,
            num_rows,
            vocab_size,
            num_words,
            logits.stride(0),
            mask.stride(0),
            HAS_ROWS=rows is not None,
            WORDS=WORDS,
        )


def apply_token_bitmask_reference(logits: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
    """Do what ``apply_token_bitmask`` does, in torch. Mutates ``logits``."""
    if rows is None:
        masks.apply_bitmask(logits, mask)
        return
    index, token = masks.banned_of(mask, logits.shape[1]).nonzero(as_tuple=True)  # [banned] each
    row = rows[index]
    real = (row >= 0) & (row < len(logits))
    logits[row[real], token[real]] = -torch.inf
