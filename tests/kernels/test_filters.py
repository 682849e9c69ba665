"""The filters: each against the filter of lesson 4, which sorts, alone and among other rows."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from mini_engine.kernels import min_p, top_k, top_k_top_p, top_p
from mini_engine.sampler import filters
from tests.kernels.cases import random, strided
from tests.kernels.conftest import DEVICE
from tests.kernels.filter_cases import BLOCK, floats, ints, lone, poison, same_bits, tied

P = (0.5, 1e-9, 0.9, 0.37, 0.999, 1.0)
LEAST = (0.0, 1e-6, 0.05, 0.3, 0.9, 1.0)


def in_a_row(logits, k, p):
    return filters.apply_top_p(filters.apply_top_k(logits, k), p)


@dataclass(frozen=True)
class Filter:
    """A kernel, its reference, the filter of lesson 4, and parameters of six rows."""

    apply: Any
    reference: Any
    of_lesson_four: Any
    numbers: Any
    off: tuple[float, ...]


def numbers_of_k(width):
    return (ints(0, 1, max(width // 3, 1), width - 1, width, width + 5),)


def numbers_of_p(width):
    return (floats(*P),)


def numbers_of_min_p(width):
    return (floats(*LEAST, dtype=torch.float32),)


def numbers_of_both(width):
    return (*numbers_of_k(width), *numbers_of_p(width))


BOTH, BOTH_REFERENCE = top_k_top_p.apply_top_k_top_p, top_k_top_p.apply_top_k_top_p_reference
JOINT, JOINT_REFERENCE = (partial(function, joint=True) for function in (BOTH, BOTH_REFERENCE))
FILTERS = {
    "top-k": Filter(top_k.apply_top_k, top_k.apply_top_k_reference, filters.apply_top_k, numbers_of_k, (0,)),
    "top-p": Filter(top_p.apply_top_p, top_p.apply_top_p_reference, filters.apply_top_p, numbers_of_p, (1.0,)),
    "min-p": Filter(min_p.apply_min_p, min_p.apply_min_p_reference, filters.apply_min_p, numbers_of_min_p, (0.0,)),
    "both": Filter(BOTH, BOTH_REFERENCE, in_a_row, numbers_of_both, (0, 1.0)),
    "jointly": Filter(JOINT, JOINT_REFERENCE, filters.apply_joint, numbers_of_both, (0, 1.0)),
}
BY_WIDTH = [(name, width) for name in FILTERS for width in ([1, 64, 65, 200] if "-" in name else [150])]  # blocks of 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for module in (top_k, top_p, min_p, top_k_top_p):
        monkeypatch.setattr(module, "BLOCK", BLOCK)


@pytest.mark.parametrize(("name", "width"), BY_WIDTH)
@pytest.mark.parametrize("rows_of", [random, tied])
def test_what_stays_is_what_lesson_four_says(name, width, rows_of, monkeypatch):
    poison(monkeypatch)
    own = FILTERS[name]
    logits = rows_of(6, width, seed=3) * 2
    numbers = own.numbers(width)
    got = own.apply(logits, *numbers)
    assert same_bits(got, own.of_lesson_four(logits, *numbers))
    assert torch.equal(got, own.reference(logits, *numbers))


@pytest.mark.parametrize("name", FILTERS)
def test_one_token_alone_stays_and_a_row_that_is_off_keeps_its_bits(name):
    own = FILTERS[name]
    assert torch.equal(own.apply(lone(100), *(part[1:4] for part in own.numbers(100))), lone(100))
    odd = torch.stack((floats(-0.0, 1e-42, -2000.0, dtype=torch.float32), lone(3)[0] - torch.inf))
    off = (torch.full((2,), own.off[i], dtype=part.dtype, device=DEVICE) for i, part in enumerate(own.numbers(3)))
    assert same_bits(own.apply(odd, *off), odd)


@pytest.mark.parametrize("name", FILTERS)
def test_a_row_is_cut_alone_as_among_others_and_rows_may_lie_apart(name):
    own = FILTERS[name]
    logits = tied(6, 150) * 1.5
    numbers = own.numbers(150)
    whole = own.apply(strided(logits), *numbers)
    for row in (1, 4):
        one = slice(row, row + 1)
        assert torch.equal(own.apply(logits[one], *(part[one] for part in numbers))[0], whole[row])
    assert own.apply(logits[:0], *(part[:0] for part in numbers)).shape == (0, 150)


def test_the_limit_of_min_p_is_that_of_float32():
    """Ten logits around log(min_p): their exp rounds to float32 numbers below, at and above min-p."""
    least = random(40).abs().clamp(1e-6, 0.99)
    steps = torch.arange(-5, 5, dtype=torch.int32, device=DEVICE)
    near = (least.double().log().float()[:, None].view(torch.int32) + steps).view(torch.float32)
    logits = torch.cat((torch.zeros(40, 1, device=DEVICE), near), dim=1)
    got = min_p.apply_min_p(logits, least)
    stays = logits.cpu().double().exp().float().to(DEVICE) >= least[:, None]
    assert torch.equal(got, torch.where(stays, logits, -torch.inf))
    assert 0 < (got == -torch.inf).sum() < near.numel()
