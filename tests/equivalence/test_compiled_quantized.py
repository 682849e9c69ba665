"""Quantized weights under compiled loops: products against float64, what keeps a row's bits, and the table."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mini_engine.config import EngineConfig
from mini_engine.families import EMBEDDING
from mini_engine.fast.compiled import product_loops
from mini_engine.fast.compiled import products as compiled_products
from mini_engine.fast.compiled import quantized as compiled_quantized
from mini_engine.fast.compiled.driver import build_model
from mini_engine.fast.compiled.quantized import MOST_ROWS, Quantized, QuantizedLoops, TiledWeights
from mini_engine.fast.quantized_products import KINDS, QuantizedWeights
from mini_engine.invariant.probe import opposite_terms, thread_count
from tests.conftest import skip_without_bfloat16
from tests.support.quantized import ROUNDING, magnitudes, values_of
from tests.support.shapes import SHAPES, weights_of

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["packed", "copied"])
def _room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where oneDNN packs matrices as the loops read them, and where it does not."""
    if request.param == "copied":
        monkeypatch.setattr(compiled_quantized, "find_tiles", lambda stored, weight: None)


@pytest.mark.usefixtures("_room")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_product_is_that_of_the_rounded_matrix(kind: str, dtype: torch.dtype, monkeypatch) -> None:
    """Of any shape, by the loop, whose rows and sums are float32 in either dtype, and unpacked.

    The loop rounds K terms at most, and for each group of 4 bits a zero point and two sums. Unpacked, rows, values and
    results are rounded to ``dtype``, too.
    """
    skip_without_bfloat16(dtype)
    monkeypatch.setattr(compiled_quantized, "UNPACKED", 1 << 12)  # a matrix is several pieces
    drawn = random.Random(0)
    torch.manual_seed(0)
    for _ in range(18):
        rows, out_features, in_features = (
            drawn.choice([1, 2, 3, 7, 9, 70]),
            drawn.randint(1, 300),
            drawn.randint(1, 130),
        )
        weight, x = torch.randn(out_features, in_features).to(dtype), torch.randn(rows, in_features)
        exact = x.double() @ values_of(weight, kind).T
        terms = x.double().abs() @ magnitudes(weight).T
        bound = terms * (in_features + 8) * 2.0**-23
        found = Quantized.of(weight, kind).multiply(x)
        assert found.dtype == torch.float32
        assert ((found.double() - exact).abs() <= bound).all(), (rows, out_features, in_features)
        bias = torch.randn(out_features).to(dtype)
        found = QuantizedLoops(kind, False).linear(weight, bias)(x)
        if rows > MOST_ROWS:
            bound += terms * 3 * ROUNDING[dtype] + exact.abs() * ROUNDING[dtype]
        bound += (exact + bias.double()).abs() * 2.0**-24
        assert ((found.double() - exact - bias.double()).abs() <= bound).all(), (rows, out_features, in_features)


@pytest.mark.parametrize("kind", KINDS)
def test_unpacked_values_are_rounded_to_the_nearest(kind: str) -> None:
    weight = torch.randn(128, 96).bfloat16()
    matrix = Quantized.of(weight, kind)
    words = np.zeros((2, 48, 64), np.uint32)
    product_loops.unpack(matrix.tiles, matrix.steps, words, 1, 1, 0)
    assert not words[1].any()  # there is no third tile
    found = torch.from_numpy(words[0]).view(torch.bfloat16).view(48, 64, 2).transpose(0, 1).flatten(1).double()
    exact = values_of(weight, kind)[64:]
    assert ((found - exact).abs() <= exact.abs() * 2.0**-8 + magnitudes(weight)[64:] * 2.0**-22).all()


def test_many_rows_are_multiplied_by_an_unpacked_matrix(monkeypatch) -> None:
    monkeypatch.setattr(Quantized, "multiply", lambda self, x: "loop")
    monkeypatch.setattr(compiled_quantized, "unpacked", lambda x, matrix, room: "unpacked")
    for kind in KINDS:
        product, invariant = (QuantizedLoops(kind, keeps).linear(torch.randn(64, 32)) for keeps in (False, True))
        found = [product(torch.ones(rows, 32)) for rows in (1, MOST_ROWS, MOST_ROWS + 1)]
        assert found == ["loop", "loop", "unpacked"]
        assert invariant(torch.ones(MOST_ROWS + 1, 32)) == "loop"


@pytest.mark.parametrize("kind", KINDS)
def test_unpacking_takes_the_threads_of_torch_where_they_serve_several_callers(kind: str, monkeypatch) -> None:
    shared = []
    loop = product_loops.unpack_shared
    monkeypatch.setattr(product_loops, "unpack_shared", lambda *args: shared.append(args[-1]) or loop(*args))
    product = QuantizedLoops(kind, False).linear(torch.randn(500, 96))
    x = torch.randn(MOST_ROWS + 1, 96)
    with thread_count(1):  # of the library that multiplies; the loop is told of others
        expected = product(x)
        shared.clear()
        for threads in (1, 2, 3, 20):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            assert torch.equal(product(x), expected)
        assert shared == [2, 3, 20]
        monkeypatch.setattr(compiled_products, "can_share", lambda: False)
        assert torch.equal(product(x), expected)
        assert shared == [2, 3, 20]
        monkeypatch.undo()  # before the threads are set back


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_batch(kind: str, dtype: torch.dtype, monkeypatch) -> None:
    """At every place, among any number of rows, on any number of threads, and in a matrix of fewer features."""
    monkeypatch.setattr(compiled_products, "SHARED_FROM", 0)
    row, weight = opposite_terms(96, 150, dtype)
    row = row.float()
    product = QuantizedLoops(kind, True).linear(weight, weight[:, 0].contiguous())
    expected = product(row[None])
    assert expected.abs().amax() > 0
    for threads in (1, 2, 3):
        with thread_count(threads):
            for rows in (1, 2, 3, 4, 6, 17, 67):
                assert torch.equal(product(row.expand(rows, -1).contiguous()), expected.expand(rows, -1)), rows
    part = QuantizedLoops(kind, True).linear(weight[:70], weight[:70, 0].contiguous())
    assert torch.equal(part(row[None]), expected[:, :70])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_table_gives_its_rows_and_is_the_memory_of_a_tied_head(dtype: torch.dtype) -> None:
    weight = torch.randn(70, 40).to(dtype)
    table = TiledWeights(QuantizedWeights({EMBEDDING: weight})).pop(EMBEDDING)
    assert (table.dtype, table.device.type) == (dtype, "cpu")
    ids = torch.tensor([3, 69, 0, 3])
    got = F.embedding(ids, table)
    assert got.is_contiguous()
    assert torch.equal(got, values_of(weight, "int8")[ids].to(dtype))
    product = QuantizedLoops("int4", False).linear(table)
    assert torch.equal(product(weight[:3].float()), table.multiply(weight[:3].float()))
    with pytest.raises(TypeError):
        F.linear(weight, table)


def test_a_tied_head_is_no_second_copy(monkeypatch) -> None:
    config, weights = weights_of(SHAPES[0], "float32")
    used = []
    multiply = Quantized.multiply
    monkeypatch.setattr(Quantized, "multiply", lambda self, x: used.append(self) or multiply(self, x))
    model = build_model(config, weights, EngineConfig(compute="compiled", quantize="int4"))
    assert (used[-1].tiles is model.embedding.tiles) == config.tie_word_embeddings


def test_a_weight_that_is_no_number_is_refused() -> None:
    weight = torch.ones(3, 64)
    weight[1, 40] = torch.nan
    with pytest.raises(ValueError, match=r"not a number and cannot be quantized; set quantize='off'"):
        QuantizedLoops("int4", False).linear(weight)
