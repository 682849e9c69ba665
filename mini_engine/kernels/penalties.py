"""L8: the repetition, frequency and presence penalties, one thread for each (row, token) that has been seen.

Reads and writes K logits, whatever the vocabulary. Every operation rounds as it does in torch, so the bits are those of
lesson 4: the division is the one that rounds right (Triton's ``/`` is a faster one), and a product and the difference
after it are not fused into one operation, which would round once instead of twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.launch import check_last_contiguous, check_shape
from mini_engine.sampler import penalties

BLOCK = 256


@triton.jit
def penalties_kernel(
    logits, rows, token_ids, counts, repetition, frequency, presence, entries, stride, BLOCK: tl.constexpr
):
    """Change the logits of ``BLOCK`` entries."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < entries
    row = tl.load(rows + entry, mask=mask, other=0)
    place = logits + row * stride + tl.load(token_ids + entry, mask=mask, other=0)
    x = tl.load(place, mask=mask, other=0.0)
    count = tl.load(counts + entry, mask=mask, other=0.0)
    strength = tl.load(repetition + entry, mask=mask, other=1.0)
    x = tl.where(strength != 1.0, tl.where(x > 0, tl.div_rn(x, strength), x * strength), x)
    strength = tl.load(frequency + entry, mask=mask, other=0.0)
    x = tl.where(strength != 0.0, x - strength * count, x)
    strength = tl.load(presence + entry, mask=mask, other=0.0)
    x = tl.where(strength != 0.0, x - strength * (count > 0).to(tl.float32), x)
    tl.store(place, x, mask=mask)


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Penalise K logits: entry i is the token ``token_ids[i]`` of the row ``rows[i]``. Mutates ``logits``.

    ``logits`` [N, V] float32; ``rows`` and ``token_ids`` [K] int64, no pair twice; the others [K] float32: how often
    the token came in the output, and the strengths of its row (1, 0, 0 are off and leave the logit's bits alone).
    The order is that of ``sampler.penalties.PENALTIES``.
    """
    check_shape("logits", logits, None, None)
    numbers = {"counts": counts, "repetition": repetition, "frequency": frequency, "presence": presence}
    indices = {"rows": rows, "token_ids": token_ids}
    check_last_contiguous(logits=logits, **indices, **numbers)
    if logits.dtype != torch.float32:
        raise ValueError(f"logits is {logits.dtype}; penalties are applied to torch.float32, call .float() on it first")
    for name, tensor in (indices | numbers).items():
        check_shape(name, tensor, len(rows))
        wanted = torch.int64 if name in indices else torch.float32
        if tensor.dtype != wanted:
            raise ValueError(f"{name} is {tensor.dtype}; it must be {wanted}")
    if len(rows):
        penalties_kernel[(triton.cdiv(len(rows), BLOCK),)](
            logits,
            rows,
            token_ids,
            counts,
            repetition,
            frequency,
            presence,
            len(rows),
            logits.stride(0),
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )


def apply_penalties_reference(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Do what ``apply_penalties`` does, in torch. Mutates ``logits``."""
    values = logits[rows, token_ids]  # [K]
    for strength, (_, off, penalty) in zip((repetition, frequency, presence), penalties.PENALTIES, strict=True):
        values = torch.where(strength != off, penalty(values, counts, strength), values)
    logits[rows, token_ids] = values
