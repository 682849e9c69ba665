"""Every promise of equal bits rests on ``tl.dot``: a row's bits must not depend on where in its tile the row stands."""

import pytest
import torch
import triton
import triton.language as tl

from mini_engine.kernels.launch import INTERPRETED
from tests.kernels.conftest import DEVICE

SIZES = [(16, 64, 32), (32, 32, 64)]


@triton.jit
def multiply(a, b, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    """Store ``a @ b`` [M, N] on top of what is in ``out``."""
    row = tl.arange(0, M)[:, None]
    middle = tl.arange(0, K)
    column = tl.arange(0, N)[None, :]
    left = tl.load(a + row * K + middle[None, :])
    right = tl.load(b + middle[:, None] * N + column)
    place = out + row * N + column
    tl.store(place, tl.dot(left, right, tl.load(place), input_precision="ieee", out_dtype=place.dtype.element_ty))


def product(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b + total`` by one program."""
    out = total.clone()
    multiply[(1,)](a.contiguous(), b, out, M=a.shape[0], K=a.shape[1], N=b.shape[1])
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_a_row_has_the_same_bits_in_every_place_of_a_tile(size, dtype):
    (rows, depth, columns), generator = size, torch.Generator().manual_seed(0)
    a = torch.randn(rows, depth, generator=generator).to(dtype).to(DEVICE)
    b = torch.randn(depth, columns, generator=generator).to(dtype).to(DEVICE)
    total = torch.randn(rows, columns, generator=generator).to(DEVICE)
    whole = product(a, b, total)
    for shift in range(1, rows):
        assert torch.equal(product(a.roll(shift, 0), b, total.roll(shift, 0)), whole.roll(shift, 0))
    exact = a.double() @ b.double() + total.double()
    size_of_terms = a.double().abs() @ b.double().abs() + total.abs()
    per_addition = 2**-24 * size_of_terms  # the most that rounding one sum can cost
    assert ((whole.double() - exact).abs() <= (depth + 1) * per_addition).all()


def test_not_a_number_stays_in_its_row():
    a, b = torch.ones(16, 16, device=DEVICE), torch.ones(16, 16, device=DEVICE)
    a[3, 5] = torch.nan
    a[4, 5] = torch.inf
    out = product(a, b, torch.zeros(16, 16, device=DEVICE))
    assert out[3].isnan().all()
    assert out[4].isposinf().all()
    assert (out[[*range(3), *range(5, 16)]] == 16).all()


def test_bytes_are_multiplied_as_triton_does_it():
    a = torch.randint(-128, 128, (16, 32), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    b = a.T.contiguous()
    out = product(a.to(DEVICE), b.to(DEVICE), torch.full((16, 16), 7, dtype=torch.int32, device=DEVICE))
    assert torch.equal(out.cpu(), a.int() @ b.int() + 7)


@triton.jit
def sum_of(x):
    """Return the sum of a block, by a function of Triton's own that calls others."""
    return tl.sum(x, axis=0)


@triton.jit
def total(x, out, FAILS: tl.constexpr):
    """Store the sum of 16 numbers, by functions that call functions; or fail among them."""
    column = tl.arange(0, 16)
    found = sum_of(tl.load(x + column)) + tl.max(sum_of(tl.load(x + column)) + column, axis=0)
    tl.static_assert(not FAILS)
    tl.store(out, found)


@pytest.mark.skipif(not INTERPRETED, reason="nothing is replaced where kernels are compiled")
def test_names_are_replaced_in_every_launch_and_put_back_after_it():
    before = {name: getattr(tl, name) for name in ("load", "store", "range", "arange", "static_assert")}
    x, out = torch.ones(16, device=DEVICE), torch.zeros(1, device=DEVICE)
    for fails in (False, True, False):
        out.zero_()
        if fails:
            with pytest.raises(Exception, match="AssertionError"):
                total[(1,)](x, out, FAILS=True)
        else:
            total[(2,)](x, out, FAILS=False)
        assert float(out) == (0 if fails else 16 + 16 + 15)
        assert all(getattr(tl, name) is value for name, value in before.items())
