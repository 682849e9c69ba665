import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from mini_engine.kernels import threshold
from tests.kernels.cases import random
from tests.kernels.conftest import DEVICE
from tests.kernels.filter_cases import floats, ints


@triton.jit
def key_kernel(x, keys, numbers, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    key = threshold.order_key(tl.load(x + place))
    tl.store(keys + place, key)
    tl.store(numbers + place, threshold.number_of(key))


@triton.jit
def cut_kernel(logits, cuts, weights, width, target, MASS: tl.constexpr, BLOCK: tl.constexpr):
    peak = threshold.find_peak(logits, width, BLOCK)
    low, _ = threshold.whole_row(width)
    cut, above = threshold.find_cut(logits, width, peak, low, tl.load(target), MASS, BLOCK)
    tl.store(cuts, cut)
    tl.store(weights, above)


def find_cut(x, target, mass, block):
    cut, above = torch.full((1,), torch.nan, device=DEVICE), torch.full((1,), -1, device=DEVICE)
    cut_kernel[(1,)](x, cut, above, len(x), ints(target), MASS=mass, BLOCK=block)
    return cut.item(), above.item()


def test_keys_compare_as_numbers_and_lead_back():
    tiny, most = 1e-45, 3.4028234663852886e38
    numbers = [-np.inf, -most, -1.5, -1e-38, -tiny, -0.0, 0.0, tiny, 1e-38, 1.0, 1.0000001, 1.5, 2.0, 3.5, most, np.inf]
    x = floats(*numbers, dtype=torch.float32)
    keys, back = torch.empty(16, dtype=torch.int32, device=DEVICE), torch.empty_like(x)
    key_kernel[(1,)](x, keys, back, BLOCK=16)
    assert torch.equal(back, x)
    for i in range(15):
        assert (keys[i] < keys[i + 1]) == (numbers[i] < numbers[i + 1])
        assert (keys[i] == keys[i + 1]) == (numbers[i] == numbers[i + 1])


def rows_to_search():
    x = random(100) * 5
    yield "random", x
    yield "shifted", x + 1000.0
    yield "negative", -x.abs() - 1
    yield "around zero", x * 1e-42
    yield "both zeros", torch.where(x > 4, 1.0, torch.where(x > 0, 0.0, torch.where(x > -5, -0.0, -1e-45)))
    yield "few values", x.round()
    yield "all equal", torch.full((100,), -7.25, device=DEVICE)
    yield "huge", torch.tensor([-3e38, 3e38, 1e-45, 0.0, -1e-45], device=DEVICE)
    yield "with -inf", x.masked_fill(x > 3, -torch.inf)
    yield "alone", x[:1]


SLOW = ("shifted", "negative")  # interpreted, each takes seconds
by_row = pytest.mark.parametrize(
    ("name", "x"), [pytest.param(*row, marks=[pytest.mark.slow] * (row[0] in SLOW)) for row in rows_to_search()]
)


@by_row
def test_the_cut_of_a_count_is_what_a_sort_finds(name, x):
    order = np.sort(x.cpu().numpy())[::-1]
    for target in {1, len(x) // 2 or 1, len(x) - 1 or 1, len(x)}:
        for block in (16, 128):
            cut, above = find_cut(x, target, False, block)
            assert cut == order[target - 1]
            assert above == int((order > cut).sum())


@by_row
def test_the_cut_of_a_mass_is_what_a_sort_finds_and_no_block_size_changes_it(name, x):
    order = np.sort(x.cpu().numpy())[::-1]
    weights = np.exp(order.astype(np.float64) - order[0]) * 2.0**40
    for share in (1e-9, 0.11, 0.52, 0.93):
        target = int(weights.sum() * share) + 1
        if np.abs(weights.cumsum() / weights.sum() - share).min() < 1e-6:
            continue  # a boundary that float32 masses need not hit
        cut, above = find_cut(x, target, True, 128)
        assert cut == order[(weights.cumsum() < target).sum()]
        assert above == pytest.approx(weights[order > cut].sum(), rel=1e-6)
        assert find_cut(x, target, True, 16) == (cut, above)


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
