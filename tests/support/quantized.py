"""What a quantized matrix stands for, in float64, and how large the numbers are that its products are made of."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.fast.quantized import quantize_int4, quantize_int8

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # the largest relative error of one rounding


def padded(weight: Tensor) -> Tensor:
    return F.pad(weight, (0, -weight.shape[1] % 32))


def values_of(weight: Tensor, kind: str) -> Tensor:
    """What a matrix is once it is quantized, [N, K] in float64."""
    if kind == "int8":
        ids, scales = quantize_int8(padded(weight))
        return (ids.double() * scales.double()[:, None])[:, : weight.shape[1]]
    ids, scales, zeros = quantize_int4(padded(weight))
    groups = (ids.double().unflatten(-1, (-1, 32)) - 8) * scales.double()[..., None] + zeros.double()[..., None]
    return groups.flatten(-2)[:, : weight.shape[1]]


def magnitudes(weight: Tensor) -> Tensor:
    """Magnitudes [N, K] of what the values of ``weight`` are made of, of a group's scale and zero before they cancel.

    A group's values lie between -m and m, its largest magnitude. So 15 steps are up to 2 m, and its least value m.
    """
    largest = padded(weight).double().unflatten(-1, (-1, 32)).abs().amax(-1)
    return 3 * largest.repeat_interleave(32, -1)[:, : weight.shape[1]]
