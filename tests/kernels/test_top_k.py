import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.kernels import top_k as op
from mini_engine.sampler import filters
from tests.kernels.cases import random, strided
from tests.kernels.filter_cases import (
    BLOCK,
    WIDTHS,
    floats,
    ints,
    lone,
    poison,
    same_bits,
    tied,
    top_k_by_hand,
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(op, "BLOCK", BLOCK)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows_of", [random, tied])
def test_exactly_k_stay_the_lowest_ids_among_equals(width, rows_of, monkeypatch):
    poison(monkeypatch)
    logits, k = rows_of(6, width), ints(0, 1, max(width // 3, 1), width - 1, width, width + 5)
    got = op.apply_top_k(logits, k)
    assert same_bits(got, top_k_by_hand(logits, k))
    assert torch.equal(got, filters.apply_top_k(logits, k))


def test_rows_that_are_all_equal_or_have_one_token():
    logits = torch.cat((torch.full((2, 100), 3.5, device=lone(1).device), lone(100)))
    k = ints(70, 99, 1, 5, 99)
    assert torch.equal(op.apply_top_k(logits, k), top_k_by_hand(logits, k))


def test_a_row_that_is_off_keeps_its_bits_even_without_any_token():
    logits = torch.cat((floats(-0.0, 0.0, 1e-42, -torch.inf, dtype=torch.float32)[None], lone(4)[:1] - torch.inf))
    assert same_bits(op.apply_top_k(logits, ints(0, 4)), logits)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
def test_small_rows_with_any_numbers(data):
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    numbers = st.one_of(finite, st.sampled_from([-np.inf, 0.0, -0.0, 1.0, 1.0, 2.0]))
    row = data.draw(st.lists(numbers, min_size=1, max_size=12).filter(lambda row: max(row) > -np.inf))
    logits, k = floats(*row, dtype=torch.float32)[None], ints(data.draw(st.integers(0, len(row) + 1)))
    assert same_bits(op.apply_top_k(logits, k), top_k_by_hand(logits, k))


def test_a_row_is_cut_alone_as_among_others_and_rows_may_lie_apart():
    logits, k = tied(5, 150), ints(40, 3, 0, 149, 77)
    whole = op.apply_top_k(logits, k)
    assert torch.equal(op.apply_top_k(strided(logits), k), whole)
    for row in range(5):
        assert torch.equal(op.apply_top_k(logits[row : row + 1], k[row : row + 1])[0], whole[row])
    assert op.apply_top_k(logits[:0], k[:0]).shape == (0, 150)


def test_the_reference_is_lesson_four():
    logits, k = tied(4, 80), ints(0, 1, 40, 79)
    assert torch.equal(op.apply_top_k_reference(logits, k), top_k_by_hand(logits, k))
