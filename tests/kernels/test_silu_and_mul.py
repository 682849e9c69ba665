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


def test_a_row_has_the_same_bits_alone():
    gate_up = random(7, 2 * 100)
    whole = op.silu_and_mul(gate_up)
    for row in (0, 3, 6):
        assert torch.equal(op.silu_and_mul(gate_up[row : row + 1])[0], whole[row])


@pytest.mark.parametrize(("shape", "words"), [((3, 7), "has 7 columns"), ((3, 2, 8), r"must be \[any, any\]")])
def test_a_wrong_shape_is_refused_before_any_address_is_used(shape, words):
    with pytest.raises(ValueError, match=words):
        op.silu_and_mul(random(*shape))


def test_gaps_between_the_numbers_of_a_row_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        op.silu_and_mul(random(8, 4).T)
