"""The filters: each against a sort in float64 and the filter of lesson 4, alone and among other rows."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from mini_engine.kernels import min_p, threshold, top_k, top_k_top_p, top_p
from mini_engine.sampler import filters
from tests.kernels.cases import random, strided
from tests.kernels.conftest import DEVICE
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
    top_p_by_hand,
)

P = (0.5, 1e-9, 0.9, 0.37, 0.999, 1.0)
LEAST = (0.0, 1e-6, 0.05, 0.3, 0.9, 1.0)


def min_p_by_hand(logits, least):
    """Drop what is less likely than min-p times the likeliest, in float64; an exp is rounded to float32 before."""
    x = logits.cpu().numpy()
    likely = np.exp((x - x.max(-1, keepdims=True)).astype(np.float64)).astype(np.float32)
    stays = torch.from_numpy(likely >= least.cpu().numpy()[:, None]).to(logits.device)
    return torch.where(stays, logits, -torch.inf)


def in_a_row(logits, k, p):
    return filters.apply_top_p(filters.apply_top_k(logits, k), p)


@dataclass(frozen=True)
class Filter:
    """A kernel, its reference, the filter of lesson 4, what is done by hand, and parameters of six rows."""

    apply: Any
    reference: Any
    of_lesson_four: Any
    by_hand: Any
    numbers: Any
    off: tuple[float, ...]


def numbers_of_k(width):
    return ints(0, 1, max(width // 3, 1), width - 1, width, width + 5)


def numbers_of_p(width):
    return floats(*P)


both = partial(Filter, off=(0, 1.0), numbers=lambda width: (numbers_of_k(width), numbers_of_p(width)))
FILTERS = {
    "top-k": Filter(
        top_k.apply_top_k,
        top_k.apply_top_k_reference,
        filters.apply_top_k,
        top_k_by_hand,
        lambda width: (numbers_of_k(width),),
        (0,),
    ),
    "top-p": Filter(
        top_p.apply_top_p,
        top_p.apply_top_p_reference,
        filters.apply_top_p,
        top_p_by_hand,
        lambda width: (numbers_of_p(width),),
        (1.0,),
    ),
    "min-p": Filter(
        min_p.apply_min_p,
        min_p.apply_min_p_reference,
        filters.apply_min_p,
        min_p_by_hand,
        lambda width: (floats(*LEAST, dtype=torch.float32),),
        (0.0,),
    ),
    "both": both(
        top_k_top_p.apply_top_k_top_p,
        top_k_top_p.apply_top_k_top_p_reference,
        in_a_row,
        lambda logits, k, p: top_p_by_hand(top_k_by_hand(logits, k), p),
    ),
    "jointly": both(
        partial(top_k_top_p.apply_top_k_top_p, joint=True),
        partial(top_k_top_p.apply_top_k_top_p_reference, joint=True),
        filters.apply_joint,
        lambda logits, k, p: torch.minimum(top_k_by_hand(logits, k), top_p_by_hand(logits, p)),
    ),
}
BY_WIDTH = [(name, width) for name in FILTERS for width in (WIDTHS if "-" in name else [1, 65, 150])]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for module in (top_k, top_p, min_p, top_k_top_p):
        monkeypatch.setattr(module, "BLOCK", BLOCK)


@pytest.mark.parametrize(("name", "width"), BY_WIDTH)
@pytest.mark.parametrize("rows_of", [random, tied])
def test_what_stays_is_what_a_sort_in_float64_and_lesson_four_say(name, width, rows_of, monkeypatch):
    poison(monkeypatch)
    own, logits = FILTERS[name], rows_of(6, width, seed=3) * 2
    numbers = own.numbers(width)
    got = own.apply(logits, *numbers)
    assert same_bits(got, own.by_hand(logits, *numbers))
    assert torch.equal(got, own.of_lesson_four(logits, *numbers))
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
    own, logits = FILTERS[name], tied(6, 150) * 1.5
    numbers = own.numbers(150)
    whole = own.apply(strided(logits), *numbers)
    for row in range(0, 6, 1 if "-" in name else 3):
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
    assert torch.equal(got, min_p_by_hand(logits, least))
    assert 0 < (got == -torch.inf).sum() < near.numel()


@pytest.mark.parametrize(
    ("logits", "k", "words"),
    [
        (torch.empty(3, 4), torch.zeros(2, dtype=torch.int64), "k has the shape"),
        (torch.empty(3, 4), torch.zeros(3), "k is torch.float32"),
        (torch.empty(3, 4, dtype=torch.float16), torch.zeros(3, dtype=torch.int64), "float"),
        (torch.empty(3, 0), torch.zeros(3, dtype=torch.int64), "0 columns"),
        (torch.empty(4, 3).T, torch.zeros(3, dtype=torch.int64), "contiguous"),
        (torch.empty(3, 4), torch.zeros(6, dtype=torch.int64)[::2], "contiguous"),
    ],
)
def test_what_the_kernels_cannot_read_is_refused(logits, k, words):
    with pytest.raises(ValueError, match=words):
        threshold.check_rows(logits, k=k)
