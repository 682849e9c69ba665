"""L8: the seeded draw: hash (seed, position, token id), make Gumbel noise of the hash, take the largest logit + noise.

Everything happens in registers: lesson 4 writes and reads a dozen tensors of the size of the row. A row is cut into
blocks as in ``argmax``. The hash is that of lesson 4 to the bit. The noise is float64; its logarithm may differ between
a CPU and a GPU in the last place, 2**-52 of the noise, so a token differs once in about 10**14 draws.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.launch import check_last_contiguous, check_shape
from mini_engine.sampler import draw

BLOCK = 2048
WORD = tl.constexpr(0xFFFFFFFF)
FLOAT64_MIN = tl.constexpr(-1.7976931348623157e308)
LAST = tl.constexpr(-(2.0**-32))  # stands for the logarithm of 1, which is 0


@triton.jit
def rotate_left(x, BITS: tl.constexpr):
    """Rotate uint32 words to the left."""
    return (x << BITS) | (x >> (32 - BITS))


@triton.jit
def mix(state, word):
    """Stir one word into the hash state; uint32, whose products wrap."""
    word = rotate_left(word * 0xCC9E2D51, 15) * 0x1B873593
    return rotate_left(state ^ word, 13) * 5 + 0xE6546B64


@triton.jit
def murmur3(seed, position, token):
    """Hash int64 (seed, position, token id) to uint32: MurmurHash3_x86_32 of their 8, 4 and 4 bytes.

    ``token`` is a block, ``seed`` and ``position`` are numbers or blocks as well.
    """
    state = (token * 0).to(tl.uint32)
    state = mix(state, (seed & WORD).to(tl.uint32))
    state = mix(state, ((seed >> 32) & WORD).to(tl.uint32))
    state = mix(state, (position & WORD).to(tl.uint32))
    state = mix(state, (token & WORD).to(tl.uint32)) ^ 16  # the number of bytes
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    return state ^ (state >> 16)


@triton.jit
def gumbel(hashes):
    """Turn hashes into float64 noise, always finite. The clamps are those of lesson 4."""
    logarithm = tl.log(hashes.to(tl.float64) / 4294967295.0)
    return -tl.log(-tl.minimum(tl.maximum(logarithm, FLOAT64_MIN), LAST))


@triton.jit
def hash_kernel(seeds, positions, token_ids, hashes, count, BLOCK: tl.constexpr):
    """Hash ``BLOCK`` triples."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    seed, position = tl.load(seeds + place, mask=mask, other=0), tl.load(positions + place, mask=mask, other=0)
    token = tl.load(token_ids + place, mask=mask, other=0)
    tl.store(hashes + place, murmur3(seed, position, token).to(tl.int64), mask=mask)


@triton.jit
def block_draw_kernel(logits, seeds, positions, scores, ids, width, stride, blocks, BLOCK: tl.constexpr):
    """Find the best score of one block of one row, and the lowest id that has it.

    They go to ``scores`` float64 and ``ids`` int32, both [rows, blocks], at [row, block].
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < width, other=-float("inf")).to(tl.float64)
    score = x
    if tl.max(x, axis=0) > -float("inf"):  # as a rule a filtered block is empty and needs no noise
        noise = gumbel(murmur3(tl.load(seeds + row), tl.load(positions + row), column.to(tl.int64)))
        score = tl.where(x > -float("inf"), x + noise, x)
    best = tl.max(score, axis=0)
    tl.store(scores + row * blocks + block, best)
    tl.store(ids + row * blocks + block, tl.min(tl.where(score == best, column, width), axis=0))


@triton.jit
def row_draw_kernel(scores, ids, drawn, width, blocks, BLOCKS: tl.constexpr):
    """Take the best of a row's blocks, of equal ones the lowest id, and store the id at ``drawn[row]``."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    score = tl.load(scores + row * blocks + block, mask=block < blocks, other=-float("inf"))
    token = tl.load(ids + row * blocks + block, mask=block < blocks, other=width)
    tl.store(drawn + row, tl.min(tl.where(score == tl.max(score, axis=0), token, width), axis=0).to(tl.int64))


def hash_tokens(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Hash triples as ``draw.murmur3`` does. All [K] int64 -> [K] int64 in [0, 2**32)."""
    check_int64(len(token_ids), seeds=seeds, positions=positions, token_ids=token_ids)
    hashes = torch.empty_like(token_ids)
    if len(token_ids):
        grid = (triton.cdiv(len(token_ids), BLOCK),)
        hash_kernel[grid](seeds, positions, token_ids, hashes, len(token_ids), BLOCK=BLOCK)
    return hashes


def draw_seeded(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one id per row as ``draw.draw_seeded`` does. ``logits`` [R, V], ``seeds``, ``positions`` [R] int64 -> [R].

    A token of minus infinity is never drawn, unless there is no other: such a row gives id 0. No NaN must come here.
    """
    check_shape("logits", logits, None, None)
    check_last_contiguous(logits=logits)
    check_int64(len(logits), seeds=seeds, positions=positions)
    rows, width = logits.shape
    if not 0 < width < 1 << 31:
        raise ValueError(f"logits has {width} columns; a token is drawn from 1 to {(1 << 31) - 1}")
    blocks = triton.cdiv(width, BLOCK)
    scores = torch.empty((rows, blocks), dtype=torch.float64, device=logits.device)
    ids = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        block_draw_kernel[(rows, blocks)](
            logits, seeds, positions, scores, ids, width, logits.stride(0), blocks, BLOCK=BLOCK
        )
        row_draw_kernel[(rows,)](scores, ids, drawn, width, blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=1)
    return drawn


def check_int64(size: int, **tensors: Tensor) -> None:
    """Raise ``ValueError`` unless every tensor is [size] int64 without gaps."""
    check_last_contiguous(**tensors)
    for name, tensor in tensors.items():
        check_shape(name, tensor, size)
        if tensor.dtype != torch.int64:
            raise ValueError(f"{name} is {tensor.dtype}; it must be torch.int64")


def draw_seeded_reference(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Do what ``draw_seeded`` does, in torch."""
    return draw.draw_seeded(logits, seeds, positions)
