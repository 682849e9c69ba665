import pytest
import torch
from torch import Tensor

from mini_engine import model
from mini_engine.kernels import rotary as op
from tests.kernels.cases import DTYPES, random, relative_error, strided, ulps
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
    q, k = random(tokens, q_heads, head_dim, dtype=dtype), random(tokens, k_heads, head_dim, dtype=dtype, seed=1)
    cos, sin = table(tokens, head_dim, dtype)
    exact = [exact_rotation(x, cos, sin) for x in (q, k)]
    apply(q, k, cos, sin)
    for got, wanted in zip((q, k), exact, strict=True):
        assert got.dtype == dtype
        if dtype == torch.float32:
            assert relative_error(got, wanted) <= 2e-6
        else:
            assert ulps(got, wanted) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_model_differs_by_rounding_only(dtype):
    q, k = random(5, 4, 64, dtype=dtype), random(5, 2, 64, dtype=dtype, seed=1)
    cos, sin = table(5, 64, dtype)
    of_model = [model.apply_rotary(x, cos, sin) for x in (q, k)]
    op.apply_rotary(q, k, cos, sin)
    for got, wanted in zip((q, k), of_model, strict=True):
        assert relative_error(got, wanted.double()) <= 2 * torch.finfo(dtype).eps


def test_heads_are_turned_where_the_projection_left_them_and_values_are_not():
    heads = strided(random(6, 4 + 2 + 2, 20))  # q, k and v of one projection
    cos, sin = table(6, 20)
    q, k, v = (part.clone() for part in heads.split((4, 2, 2), dim=1))
    op.apply_rotary(q, k, cos, sin)
    op.apply_rotary(heads[:, :4], heads[:, 4:6], strided(cos), strided(sin))
    assert torch.equal(heads, torch.cat((q, k, v), dim=1))


def test_no_memory_but_that_of_the_heads_is_written():
    memory = torch.full((4, 3, 24), -7.0, device=DEVICE)  # D = 20 of 24, the tile has 32 columns; 3 heads, 4 rows
    memory[1:3, :2, :20] = random(2, 2, 20)
    view = memory[1:3, :, :20]
    outside = memory.clone()
    cos, sin = table(2, 20)
    op.apply_rotary(view[:, :1], view[:, 1:2], cos, sin)
    assert not torch.equal(memory[1:3, :2, :20], outside[1:3, :2, :20])
    memory[1:3, :2, :20] = outside[1:3, :2, :20]
    assert torch.equal(memory, outside)


def test_only_the_first_half_of_the_table_is_read():
    q, k, (cos, sin) = random(3, 2, 32), random(3, 1, 32, seed=1), table(3, 32)
    first = q.clone(), k.clone()
    op.apply_rotary(*first, cos, sin)
    cos[:, 16:], sin[:, 16:] = torch.nan, torch.nan
    op.apply_rotary(q, k, cos, sin)
    assert torch.equal(q, first[0])
    assert torch.equal(k, first[1])


def test_no_tokens_are_no_tokens():
    op.apply_rotary(random(0, 2, 32), random(0, 1, 32), *table(0, 32))


def test_a_token_has_the_same_bits_alone():
    q, k, (cos, sin) = random(7, 4, 20), random(7, 2, 20, seed=1), table(7, 20)
    alone = q[4:5].clone(), k[4:5].clone()
    op.apply_rotary(q, k, cos, sin)
    op.apply_rotary(*alone, cos[4:5], sin[4:5])
    assert torch.equal(alone[0][0], q[4])
    assert torch.equal(alone[1][0], k[4])


@pytest.mark.parametrize(
    ("q", "k", "angles", "words"),
    [
        ((3, 2, 32), (2, 1, 32), (3, 32), r"k has the shape \[2, 1, 32\]"),
        ((3, 2, 32), (3, 1, 16), (3, 32), r"k has the shape"),
        ((3, 2, 32), (3, 1, 32), (3, 16), r"cos has the shape \[3, 16\]; it must be \[3, 32\]"),
        ((3, 2, 32), (3, 1, 32), (4, 32), r"cos has the shape"),
        ((3, 2, 7), (3, 1, 7), (3, 7), r"the head dim is 7"),
        ((3, 32), (3, 32), (3, 32), r"q has the shape"),
    ],
)
def test_a_wrong_shape_is_refused_before_any_address_is_used(q, k, angles, words):
    with pytest.raises(ValueError, match=words):
        op.apply_rotary(random(*q), random(*k), random(*angles), random(*angles))


def test_a_sine_of_another_shape_than_the_cosine_is_refused():
    with pytest.raises(ValueError, match=r"sin has the shape \[3, 16\]; it must be \[3, 32\]"):
        op.apply_rotary(random(3, 2, 32), random(3, 1, 32), random(3, 32), random(3, 16))


def test_gaps_between_the_numbers_of_a_head_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        op.apply_rotary(random(3, 32, 2).transpose(1, 2), random(3, 1, 32), *table(3, 32))
