import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mini_engine.kernels import top_p as op
from mini_engine.sampler import filters
from tests.kernels.cases import random, strided
from tests.kernels.conftest import DEVICE
from tests.kernels.filter_cases import (
    BLOCK,
    WIDTHS,
    floats,
    lone,
    poison,
    same_bits,
    tied,
    top_p_by_hand,
)

OFTEN = (0.5, 1e-9, 0.9, 0.37, 0.999, 1.0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(op, "BLOCK", BLOCK)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows_of", [random, tied])
def test_the_nucleus_is_that_of_lesson_four_and_of_float64(width, rows_of, monkeypatch):
    poison(monkeypatch)
    logits, p = rows_of(6, width) * 2, floats(*OFTEN)
    got = op.apply_top_p(logits, p)
    assert same_bits(got, top_p_by_hand(logits, p))
    assert torch.equal(got, filters.apply_top_p(logits, p))


@pytest.mark.parametrize(
    ("equal", "p", "kept"), [(4, 0.25, 1), (4, 0.3, 2), (8, 0.5, 4), (8, 0.51, 5), (128, 0.75, 96)]
)
def test_a_token_stays_only_if_the_mass_before_it_is_below_p(equal, p, kept):
    """Equal logits have masses that float32 holds exactly; a mass that just reaches p is enough."""
    logits = torch.full((1, equal + 30), -torch.inf, device=DEVICE)
    logits[0, 20 : 20 + equal] = -1.5
    got = op.apply_top_p(logits, floats(p))
    assert (got[0] > -torch.inf).nonzero()[:, 0].tolist() == list(range(20, 20 + kept))
    assert torch.equal(got, filters.apply_top_p(logits, floats(p)))


def test_one_token_alone_stays_and_a_row_that_is_off_keeps_its_bits():
    logits, p = lone(100), floats(1e-12, 0.5, 1 - 1e-12)
    assert torch.equal(op.apply_top_p(logits, p), logits)
    odd = torch.stack((floats(-0.0, 1e-42, -200.0, dtype=torch.float32), lone(3)[0] - torch.inf))
    assert same_bits(op.apply_top_p(odd, floats(1.0, 1.0)), odd)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([-np.inf, -3.0, -0.5, -0.0, 0.0, 0.25, 1.0, 1.5, 4.0]), min_size=1, max_size=12),
    st.floats(0.01, 0.99),
)
def test_small_rows_with_many_equals(row, p):
    assume(max(row) > -np.inf)
    masses = np.exp(np.sort(np.array(row, dtype=np.float64))[::-1])
    assume(np.abs(masses.cumsum() / masses.sum() - p).min() > 1e-6)  # float32 masses may fall on either side
    logits = floats(*row, dtype=torch.float32)[None]
    got = op.apply_top_p(logits, floats(p))
    assert torch.equal(got, top_p_by_hand(logits, floats(p)))
    assert torch.equal(got, filters.apply_top_p(logits, floats(p)))


def test_a_row_is_cut_alone_as_among_others_in_any_block_and_rows_may_lie_apart(monkeypatch):
    logits, p = tied(6, 150) * 1.5, floats(*OFTEN)
    whole = op.apply_top_p(logits, p)
    assert torch.equal(op.apply_top_p(strided(logits), p), whole)
    for row in range(6):
        assert torch.equal(op.apply_top_p(logits[row : row + 1], p[row : row + 1])[0], whole[row])
    monkeypatch.setattr(op, "BLOCK", 256)
    assert torch.equal(op.apply_top_p(logits, p), whole)
    assert op.apply_top_p(logits[:0], p[:0]).shape == (0, 150)


def test_the_reference_is_lesson_four():
    logits, p = random(6, 80), floats(*OFTEN)
    assert torch.equal(op.apply_top_p_reference(logits, p), top_p_by_hand(logits, p))
