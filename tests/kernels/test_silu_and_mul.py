import pytest
import torch
from torch import Tensor

from mini_engine.kernels import silu_and_mul as op
from tests.kernels.cases import DTYPES, random, relative_error, ulps
from tests.kernels.conftest import DEVICE

SHAPES = [(1, 1), (3, 20), (5, 96), (2, 1000), (2, 1025)]  # rows, F
FUNCTIONS = [op.silu_and_mul, op.silu_and_mul_reference]


def exact_product(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1.0 + torch.exp(-gate)) * up


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_product_is_that_of_float64(shape, dtype, function):
    gate_up = random(shape[0], 2 * shape[1], dtype=dtype) * 3
    got = function(gate_up)
    assert got.dtype == dtype
    assert got.shape == shape
    if dtype == torch.float32:
        assert relative_error(got, exact_product(gate_up)) <= 2e-6
    else:
        assert ulps(got, exact_product(gate_up)) <= 1


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_numbers_give_zero_or_themselves_and_never_nan(dtype, function):
    gate = torch.tensor([-65504.0, -200.0, -90.0, -20.0, 0.0, 20.0, 90.0, 200.0, 65504.0])
    gate_up = torch.cat((gate, torch.full_like(gate, 0.5)))[None].to(DEVICE, dtype)
    got = function(gate_up)[0]
    assert bool(got.isfinite().all())
    torch.testing.assert_close(got.double(), exact_product(gate_up)[0], rtol=torch.finfo(dtype).eps * 16, atol=1e-7)
    assert torch.equal(got[-3:], gate_up[0, 6:9] / 2)
