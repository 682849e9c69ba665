import pytest
import torch
from torch import Tensor

from mini_engine import model
from mini_engine.kernels import rotary as op
from tests.kernels.cases import DTYPES, random, relative_error, ulps
from tests.kernels.conftest import DEVICE

SHAPES = [(1, 2, 1, 32), (5, 4, 2, 64), (3, 8, 1, 128), (4, 3, 3, 20), (2, 5, 2, 2)]  # tokens, Hq, Hkv, D
FUNCTIONS = [op.apply_rotary, op.apply_rotary_reference]


def table(tokens: int, head_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    positions = torch.arange(tokens) * 37 + 5
    cos, sin = model.rotary_table(positions, model.rotary_frequencies(head_dim, 10_000.0), dtype)
    return cos.to(DEVICE), sin.to(DEVICE)


def exact_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotation is the product of complex numbers."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.complex(cos[:, None, :half].double(), sin[:, None, :half].double())
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("apply", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rotation_is_that_of_float64(shape, dtype, apply):
    tokens, q_heads, k_heads, head_dim = shape
    q = random(tokens, q_heads, head_dim, dtype=dtype)
    k = random(tokens, k_heads, head_dim, dtype=dtype, seed=1)
    cos, sin = table(tokens, head_dim, dtype)
    exact = [exact_rotation(x, cos, sin) for x in (q, k)]
    apply(q, k, cos, sin)
    for got, wanted in zip((q, k), exact, strict=True):
        assert got.dtype == dtype
        if dtype == torch.float32:
            assert relative_error(got, wanted) <= 2e-6
        else:
            assert ulps(got, wanted) <= 1
