"""Inputs and measures that the tests of kernels share."""

import torch
from torch import Tensor

from mini_engine.kernels.launch import INTERPRETED
from tests.kernels.conftest import DEVICE

# bfloat16 is proven on a GPU: the interpreter holds it as raw 16-bit integers.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Draw normal numbers: no two alike and no symmetry, so that a wrong index shows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def strided(tensor: Tensor) -> Tensor:
    """Return the same numbers in rows that lie further apart, with NaN between them."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), torch.nan, dtype=tensor.dtype, device=tensor.device)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def ulps(got: Tensor, exact: Tensor) -> int:
    """Return the largest distance of ``got`` from the rounded ``exact`` (float64), counted in representable numbers."""
    integer = torch.int32 if got.dtype == torch.float32 else torch.int16

    def rank(x: Tensor) -> Tensor:
        bits = x.contiguous().view(integer).long()
        return torch.where(bits < 0, torch.iinfo(integer).min - bits, bits)

    assert bool(got.isfinite().all()), "a value is not finite"
    return int((rank(got) - rank(exact.to(got.dtype))).abs().max())


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Return the largest error over the largest exact number of its row, both [..., H]."""
    assert bool(got.isfinite().all()), "a value is not finite"
    return float(((got.double() - exact).abs().amax(-1) / exact.abs().amax(-1).clamp(min=1e-30)).max())


def random_bits(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Draw any bits: infinities, subnormals and NaN of every payload among them."""
    integers = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    limits = torch.iinfo(integers)
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(limits.min, limits.max + 1, shape, generator=generator, dtype=torch.int64)
    return bits.to(integers).view(dtype).to(DEVICE)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({4: torch.int32, 2: torch.int16}[x.dtype.itemsize])
