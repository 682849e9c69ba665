import pytest
import torch
from torch import Tensor

from mini_engine.kernels import rms_norm as op
from tests.kernels.cases import DTYPES, random, relative_error, ulps

EPS = 1e-6
SHAPES = [(1, 8), (3, 20), (5, 96), (2, 128), (7, 1000)]


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return weight.double() * x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_that_of_float64(shape, dtype):
    x = random(*shape, dtype=dtype)
    weight = random(shape[1], dtype=dtype, seed=1)
    got = op.rms_norm(x, weight, EPS)
    assert got.dtype == dtype
    if dtype == torch.float32:
        assert relative_error(got, exact_norm(x, weight)) <= 2e-6
    else:  # the cast before the weight is L1's, so the reference rounds there too
        x_normed = exact_norm(x, torch.ones_like(weight)).to(dtype)
        assert ulps(got, weight.double() * x_normed.double()) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_stays_in_the_residual_and_its_norm_comes_back(dtype):
    x = random(5, 96, dtype=dtype)
    residual = random(5, 96, dtype=dtype, seed=2)
    weight = random(96, dtype=dtype, seed=1)
    total = residual + x
    got = op.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, total)
    assert torch.equal(got, op.rms_norm(total, weight, EPS))


def test_a_row_has_the_same_bits_alone():
    x = random(70, 128)
    weight = random(128, seed=1)
    whole = op.rms_norm(x, weight, EPS)
    for row in (0, 33, 69):
        assert torch.equal(op.rms_norm(x[row : row + 1], weight, EPS)[0], whole[row])
