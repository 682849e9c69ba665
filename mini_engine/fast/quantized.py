"""Weights in fewer bytes: a matrix as small whole numbers, its ids, and the steps that they count.

A decode step reads every weight once, so half the bytes take half the time. Only weights are rounded: what they are
multiplied by and the sums stay as they are.

Shapes: a matrix is [N, K], N output features of K columns. A group is ``GROUP`` columns of one row, and K a multiple.

The products here are for many rows: they unpack a piece of the matrix. For few rows torch has kernels that read the ids
as they are stored (``quantized_products.py``).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
MIDDLE = 8  # the id of 0 .. 15 that stands for a group's zero point


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round ``weight`` [N, K] -> ids [N, K] int8 from -127 to 127, scales [N] in the weight's dtype.

    The largest magnitude of a row becomes 127 or -127. Raises ``ValueError`` for a weight that is not finite.
    """
    wide = weight.float()
    scales = checked_scales(wide.abs().amax(-1) / 127).to(weight.dtype)
    steps = scales.where(scales > 0, 1)  # a row of zeros has ids 0
    return (wide / steps[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def dequantize_int8(ids: Tensor, scales: Tensor) -> Tensor:
    """Return the values id * scale of ``ids`` [..., K] int8 and ``scales`` [...] -> [..., K] in the scales' dtype."""
    return ids * scales[..., None]


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round ``weight`` [N, K] -> ids [N, K] uint8 from 0 to 15, scales and zeros [N, K / 32] in the weight's dtype.

    A group's 16 values reach from its least to its greatest number. Scale and zero point are rounded first, so that
    ids are counted in the steps that they will be multiplied by. Raises ``ValueError`` for a weight that is not finite.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP))  # [N, K / 32, 32]
    least = groups.amin(-1)
    scales = checked_scales((groups.amax(-1) - least) / 15).to(weight.dtype)
    zeros = (least + MIDDLE * scales).to(weight.dtype)
    steps = scales.where(scales > 0, 1)  # numbers that are all the same have the id of the zero point
    ids = ((groups - zeros[..., None]) / steps[..., None]).round() + MIDDLE
    return ids.clamp(0, 15).to(torch.uint8).flatten(-2), scales, zeros


def dequantize_int4(ids: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Return the values (id - 8) * scale + zero. ``ids`` [N, K], ``scales`` and ``zeros`` [N, K / 32] -> [N, K]."""
    groups: Tensor = ids.unflatten(-1, (-1, GROUP)).to(scales.dtype) - MIDDLE
    return groups.mul_(scales[..., None]).add_(zeros[..., None]).flatten(-2)


def unpack_int4(packed: Tensor, is_halved: bool) -> Tensor:
    """Return the ids [T * S, K] uint8 of ``packed`` [T, K, S / 2] uint8: T tiles of S rows, by columns.

    A byte has the ids of two rows, the first in its 4 low bits. They are neighbours, or with ``is_halved`` byte j of a
    column has row j of the tile's first half and row j of its second.
    """
    pairs = packed.transpose(1, 2).contiguous()  # [T, S / 2, K]
    halves = pairs & 15, pairs >> 4
    ids = torch.cat(halves, dim=1) if is_halved else torch.stack(halves, dim=2)
    return ids.view(-1, packed.shape[1])


def linear_int8(x: Tensor, ids: Tensor, scales: Tensor) -> Tensor:
    """Multiply ``x`` [M, K] by the matrix of ``ids`` [N, K] int8 and ``scales`` [N] -> [M, N] in ``x``'s dtype.

    A sum is scaled when it is complete: ids are exact in any dtype, weights would be rounded once more.
    """
    return F.linear(x, ids.to(x.dtype)) * scales


def linear_int4(x: Tensor, ids: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Multiply ``x`` [M, K] by the matrix of ``ids`` [N, K], ``scales`` and ``zeros`` [N, K / 32] -> [M, N]."""
    return F.linear(x, dequantize_int4(ids, scales, zeros))


def checked_scales(scales: Tensor) -> Tensor:
    """Return ``scales``. Raises ``ValueError`` if one is infinite or not a number."""
    if not scales.isfinite().all():
        raise ValueError("a weight is infinite or not a number and cannot be quantized; set quantize='off'")
    return scales
