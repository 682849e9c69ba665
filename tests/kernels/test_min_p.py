import math

import numpy as np
import pytest
import torch

from mini_engine.kernels import min_p as op
from mini_engine.sampler import filters
from tests.kernels.cases import random, strided
from tests.kernels.conftest import DEVICE
from tests.kernels.filter_cases import BLOCK, WIDTHS, floats, lone, poison, same_bits, tied

OFTEN = (0.0, 1e-6, 0.05, 0.3, 0.9, 1.0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(op, "BLOCK", BLOCK)


def small(*numbers):
    return floats(*numbers, dtype=torch.float32)


def by_hand(logits, min_p):
    """Drop what is less likely than min-p times the likeliest, in float64; an exp is rounded to float32 before."""
    x = logits.cpu().numpy()
    least = np.exp((x - x.max(-1, keepdims=True)).astype(np.float64)).astype(np.float32)
    stays = torch.from_numpy(least >= min_p.cpu().numpy()[:, None]).to(logits.device)
    return torch.where(stays, logits, -torch.inf)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows_of", [random, tied])
def test_what_stays_is_that_of_lesson_four_and_of_float64(width, rows_of, monkeypatch):
    poison(monkeypatch)
    logits, min_p = rows_of(6, width) * 2, small(*OFTEN)
    got = op.apply_min_p(logits, min_p)
    assert same_bits(got, by_hand(logits, min_p))
    assert torch.equal(got, filters.apply_min_p(logits, min_p))


@pytest.mark.parametrize("probabilities", [(0.5, 0.25, 0.125, 0.125), (0.125, 0.5, 0.25, 0.125), (0.25,) * 4])
@pytest.mark.parametrize("min_p", [1.0, 0.5, 0.25])
def test_a_token_exactly_at_the_limit_stays_and_the_next_less_likely_one_goes(probabilities, min_p):
    logits = small(*(math.log(p) for p in probabilities))[None]
    got = op.apply_min_p(logits, small(min_p))
    assert (got[0] > -torch.inf).tolist() == [p >= min_p * max(probabilities) for p in probabilities]
    assert torch.equal(got.cpu(), filters.apply_min_p(logits.cpu(), small(min_p).cpu()))  # CUDA's exp may be an ulp off
    a_little_more = torch.nextafter(small(min_p), small(2.0))
    stays = (op.apply_min_p(logits, a_little_more)[0] > -torch.inf).tolist()
    assert stays == [p > min_p * max(probabilities) for p in probabilities]


def test_the_limit_is_that_of_float32_for_any_min_p():
    """Ten logits around log(min_p): their exp rounds to float32 numbers below, at and above min-p."""
    min_p = random(40).abs().clamp(1e-6, 0.99)
    steps = torch.arange(-5, 5, dtype=torch.int32, device=DEVICE)
    near = (min_p.double().log().float()[:, None].view(torch.int32) + steps).view(torch.float32)
    logits = torch.cat((torch.zeros(40, 1, device=DEVICE), near), dim=1)
    got = op.apply_min_p(logits, min_p)
    assert torch.equal(got, by_hand(logits, min_p))
    assert 0 < (got == -torch.inf).sum() < near.numel()


def test_one_token_alone_stays_and_a_row_that_is_off_keeps_its_bits():
    assert torch.equal(op.apply_min_p(lone(100), small(1.0, 0.5, 1e-30)), lone(100))
    odd = torch.stack((small(-0.0, 1e-42, -2000.0), lone(3)[0] - torch.inf))
    assert same_bits(op.apply_min_p(odd, small(0.0, 0.0)), odd)


def test_a_row_is_cut_alone_as_among_others_and_rows_may_lie_apart():
    logits, min_p = tied(6, 150), small(*OFTEN)
    whole = op.apply_min_p(logits, min_p)
    assert torch.equal(op.apply_min_p(strided(logits), min_p), whole)
    for row in range(6):
        assert torch.equal(op.apply_min_p(logits[row : row + 1], min_p[row : row + 1])[0], whole[row])
    assert op.apply_min_p(logits[:0], min_p[:0]).shape == (0, 150)


def test_the_reference_is_lesson_four():
    logits, min_p = random(6, 80), small(*OFTEN)
    assert torch.equal(op.apply_min_p_reference(logits, min_p), by_hand(logits, min_p))
