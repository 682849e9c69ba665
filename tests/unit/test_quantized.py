"""Quantized weights: the rounding, by brute force; products, against float64; and what keeps a row's bits."""

import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.config import EngineConfig
from mini_engine.families import EMBEDDING, HEAD
from mini_engine.fast import quantized_products
from mini_engine.fast.quantized import dequantize_int4, dequantize_int8, quantize_int4, quantize_int8
from mini_engine.fast.quantized_products import KINDS, Int4, Int8, QuantizedProjections, QuantizedWeights, make_parts
from mini_engine.invariant.probe import opposite_terms, thread_count
from tests.support.quantized import ROUNDING, magnitudes, values_of

DTYPES = [torch.float32, torch.bfloat16]


def hard_rows(dtype: torch.dtype) -> Tensor:
    """Rows [10, 96] of magnitudes from 1e-20 to 1e20: among them zeros, equal numbers, and one number far from all."""
    torch.manual_seed(0)
    rows = torch.randn(10, 96)
    rows[0], rows[1], rows[2], rows[3, 5] = 0, 0.3, -7, 1e6
    rows[4:6] = rows[4:6].abs()
    rows[6], rows[7] = rows[6] * 1e-20, rows[7] * 1e20
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_takes_the_nearest_multiple_of_the_scale_of_its_row(dtype: torch.dtype) -> None:
    weight = hard_rows(dtype)
    ids, scales = quantize_int8(weight)
    assert (ids.dtype, scales.dtype, ids.shape, scales.shape) == (torch.int8, dtype, weight.shape, (10,))
    for row, own, scale in zip(weight.tolist(), ids.tolist(), scales.tolist(), strict=True):
        most = max(map(abs, row))
        assert math.isclose(scale, most / 127, rel_tol=2 * ROUNDING[dtype])
        assert max(map(abs, own)) == (127 if most else 0)
        for value, found in zip(row, own, strict=True):
            assert abs(value - found * scale) <= scale * 0.5001, (value, found)
    assert dequantize_int8(ids, scales).dtype == dtype
    expected = ids.double() * scales.double()[:, None]
    torch.testing.assert_close(dequantize_int8(ids, scales).double(), expected, rtol=ROUNDING[dtype], atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_takes_the_nearest_of_the_16_values_of_its_group(dtype: torch.dtype) -> None:
    """Scale and zero point are rounded to ``dtype`` as well, so a group's end can lie beyond its 16 values."""
    weight = hard_rows(dtype)
    ids, scales, zeros = quantize_int4(weight)
    assert (ids.dtype, ids.shape, scales.shape, zeros.shape) == (torch.uint8, weight.shape, (10, 3), (10, 3))
    for n in range(10):
        for g in range(3):
            row, own = (each[n, 32 * g : 32 * g + 32].tolist() for each in (weight, ids))
            scale, zero = float(scales[n, g]), float(zeros[n, g])
            assert math.isclose(scale, (max(row) - min(row)) / 15, rel_tol=3 * ROUNDING[dtype])
            assert abs(zero - 8 * scale - min(row)) <= (abs(zero) + 8 * scale) * ROUNDING[dtype]
            values = [(choice - 8) * scale + zero for choice in range(16)]
            for value, found in zip(row, own, strict=True):
                nearest = min(abs(value - choice) for choice in values)
                assert abs(value - values[found]) <= nearest + 1e-4 * scale, (value, found)
    expected = (ids.double().view(10, 3, 32) - 8) * scales.double()[..., None] + zeros.double()[..., None]
    near = (17 * scales.double() + zeros.double().abs())[..., None] * ROUNDING[dtype]
    assert ((dequantize_int4(ids, scales, zeros).double().view(10, 3, 32) - expected).abs() <= near).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])
def test_a_weight_that_is_no_number_is_refused(quantize: Any, value: float) -> None:
    weight = torch.ones(3, 64)
    weight[1, 40] = value
    with pytest.raises(ValueError, match=r"not a number and cannot be quantized; set quantize='off'"):
        quantize(weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_product_is_that_of_the_rounded_matrix(kind: str, dtype: torch.dtype) -> None:
    """Of any shape, by the kernel and unpacked.

    The bound: an unpacked weight is rounded thrice at most, K terms are added up in float32 by any order, and the
    result is rounded. The factor of the terms counts magnitudes, of a group's scale and zero point before they cancel.
    """
    drawn = random.Random(0)
    torch.manual_seed(0)
    for _ in range(12):
        rows, out_features, in_features = drawn.choice([1, 2, 5, 70]), drawn.randint(1, 200), drawn.randint(1, 130)
        weight, x = torch.randn(out_features, in_features).to(dtype), torch.randn(rows, in_features).to(dtype)
        exact = x.double() @ values_of(weight, kind).T
        terms = x.double().abs() @ magnitudes(weight).T
        bound = terms * (3 * ROUNDING[dtype] + in_features * 2.0**-23) + exact.abs() * ROUNDING[dtype]
        matrix = KINDS[kind].of(weight)
        for product in (matrix.few(x), matrix.many(x), QuantizedProjections(kind, False).linear(weight)(x)):
            assert product.dtype == dtype
            assert ((product.double() - exact).abs() <= bound).all(), (rows, out_features, in_features)
        assert matrix.few(x[:0]).shape == matrix.many(x[:0]).shape == (0, out_features)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_batch(kind: str, dtype: torch.dtype) -> None:
    """At every place, among any number of rows, on any number of threads; with a bias, and a matrix in pieces."""
    row, weight = opposite_terms(96, 150, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_products, "LARGEST_PIECE", 64 * 96)
        product = QuantizedProjections(kind, True).linear(weight, weight[:, 0].contiguous())
    expected = product(row[None])
    assert expected.abs().amax() > 0
    for threads in (1, 2):
        with thread_count(threads):
            for rows in (1, 2, 3, 17, 64, 67, 130):
                assert torch.equal(product(row.expand(rows, -1).contiguous()), expected.expand(rows, -1)), rows


def test_without_invariance_many_rows_are_multiplied_by_an_unpacked_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS.values():
        for name in ("few", "many"):
            monkeypatch.setattr(kind, name, lambda self, x, name=name: name)
    for kind, most in (("int8", 16), ("int4", 64)):
        product = QuantizedProjections(kind, False).linear(torch.randn(64, 32))
        assert [product(torch.ones(rows, 32)) for rows in (1, most, most + 1)] == ["few", "few", "many"]


def test_a_table_gives_its_rows_and_shares_its_memory_with_a_tied_head() -> None:
    weight = torch.randn(70, 40)
    weights = QuantizedWeights(
        {EMBEDDING: weight, HEAD: weight, "x.mlp.gate.weight": weight, "x.gate_proj.weight": weight}
    )
    table, head, router, other = (weights.pop(name) for name in list(weights.weights))  # type: ignore[call-overload]
    assert [type(each) for each in (table, head, router, other)] == [Int8, Int8, Int8, Tensor]
    ids = torch.tensor([3, 69, 0, 3])
    assert torch.equal(F.embedding(ids, table).double(), values_of(weight, "int8")[ids].float().double())
    (piece,) = table.split(128)
    assert piece.ids.data_ptr() == table.ids.data_ptr()
    product = QuantizedProjections("int4", False).linear(table)(weight[:3])
    torch.testing.assert_close(
        product.double(), weight[:3].double() @ values_of(weight, "int8").T, rtol=1e-5, atol=1e-4
    )
    with pytest.raises(TypeError):
        F.linear(weight, table)


def test_what_cannot_be_kept_or_computed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_products, "remembered", lambda name, experiment: [])
    with pytest.raises(
        ValueError, match=r"^batch_invariant=True cannot be kept .* int4 64 x 32 float32 .*quantize='off'"
    ):
        QuantizedProjections("int4", True).linear(torch.randn(9, 20))
    quantized_products.check_kernel.cache_clear()
    monkeypatch.setattr(quantized_products, "tile_order", lambda: (64, False))
    with pytest.raises(ValueError, match=r"^quantize='int4' cannot use torch .* unpacked\); set quantize='off'$"):
        make_parts({}, EngineConfig(quantize="int4"))
    quantized_products.check_kernel.cache_clear()


@pytest.mark.parametrize("options", [{"compute": "triton"}, {"device": "cuda"}])
def test_a_way_without_quantized_products_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"^quantize='int8' is for CPUs and not for compute='triton'; .*quantize='off'"
    ):
        EngineConfig(quantize="int8", **options)


def test_off_builds_of_the_weights_as_they_are() -> None:
    weights = {EMBEDDING: torch.ones(2, 2)}
    assert make_parts(weights, EngineConfig())[0] is weights
    assert isinstance(Int4.of(torch.ones(3, 3)), Int4)
