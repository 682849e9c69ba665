"""The experiments behind ``batch_invariant``: each planted dependence is found, and only those are."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mini_engine.invariant import attention as invariant
from mini_engine.invariant.probe import (
    REFERENCE_ROWS,
    THREADS,
    opposite_terms,
    row_numbers,
    rows_that_hold,
    thread_count,
)

NUMBERS = [1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 100, 112, 128]


def in_halves(x: Tensor, weight: Tensor, cut: int) -> Tensor:
    """The product with its sum cut in two, as a library does that shares K among threads; float32 until the end."""
    wide, other = x.float(), weight.float()
    parts = [row[:cut] @ other[:, :cut].T + row[cut:] @ other[:, cut:].T for row in wide]
    return torch.stack(parts).to(x.dtype)


def steady(x: Tensor, weight: Tensor) -> Tensor:
    """One row after the other: bits that depend on nothing."""
    return torch.stack([in_order(row, weight) for row in x])


def in_order(row: Tensor, weight: Tensor) -> Tensor:
    terms = (weight.float() * row.float()).numpy()
    return torch.from_numpy(np.add.accumulate(terms, axis=-1)[:, -1]).to(row.dtype)  # torch's cumsum adds in float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1024, 351])
def test_the_data_shows_rounding_and_nothing_else(size: int, dtype: torch.dtype) -> None:
    row, vectors = opposite_terms(size, 2000, dtype)
    assert row.dtype == vectors.dtype == dtype
    assert vectors.shape == (2000, size)
    terms = vectors.double() * row.double()
    assert float(terms.sort(dim=-1).values.flip(-1).add(terms.sort(dim=-1).values).abs().max()) == 0  # all opposite
    computed = steady(row[None], vectors)[0]
    assert float((computed != 0).float().mean()) > 0.9
    reordered = in_halves(row[None], vectors, size // 3)[0]
    assert float((computed != reordered).float().mean()) > 0.9, "another order must show in nearly every output"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [3, 30, 60])
def test_a_dependence_on_the_number_of_rows_is_found(limit: int, dtype: torch.dtype) -> None:
    row, weight = opposite_terms(64, 24, dtype)

    def planted(x: Tensor) -> Tensor:
        return in_halves(x, weight, 20) if len(x) > limit else steady(x, weight)

    held = [n for n in NUMBERS if (n > limit) == (limit < REFERENCE_ROWS)]
    assert rows_that_hold(planted, row, NUMBERS) == held


@pytest.mark.parametrize("count", [n for n in THREADS if n > 1])
def test_a_dependence_on_the_number_of_threads_is_found(count: int) -> None:
    row, weight = opposite_terms(64, 24, torch.bfloat16)
    before = torch.get_num_threads()

    def planted(x: Tensor) -> Tensor:
        shares_out = len(x) >= 64 and torch.get_num_threads() == count
        return in_halves(x, weight, 20) if shares_out else steady(x, weight)

    assert rows_that_hold(planted, row, NUMBERS) == [n for n in NUMBERS if n < 64]
    assert torch.get_num_threads() == before


def test_threads_are_put_back_after_an_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError), thread_count(before + 1):
        raise RuntimeError
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("planted_at", row_numbers(64))
def test_a_dependence_at_any_one_number_that_is_tried_is_found(planted_at: int) -> None:
    """It may show in the last row alone, in a few outputs, and on one number of threads."""
    row, weight = opposite_terms(64, 200, torch.bfloat16)

    def planted(x: Tensor) -> Tensor:
        out = steady(x, weight)
        if len(x) == planted_at and torch.get_num_threads() == THREADS[-1]:
            out[-1, 130:140] = in_halves(x[-1:], weight[130:140], 20)[0]
        return out

    assert rows_that_hold(planted, row, row_numbers(64)) == [n for n in row_numbers(64) if n != planted_at]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [24, 128])
@pytest.mark.parametrize("sums", ["of scores", "of values"])
def test_a_fault_of_the_attention_kernel_is_found(
    sums: str, head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another order of additions for the last rows of some numbers: what a BLAS beneath does to a tail."""
    original = invariant.kernel
    numbers = row_numbers(256)
    sound = invariant.query_rows_that_hold(2, head_dim, dtype, numbers)
    assert len(sound) >= 2

    def planted(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = original(q, keys, values, mask)
        if q.shape[2] in sound[::2]:
            over_scores = (q.flip(3), keys.flip(3), values)
            over_values = (q, keys.flip(2), values.flip(2))
            turned = original(*(over_scores if sums == "of scores" else over_values), mask)
            for whole, part in zip((out, lse), turned, strict=True):
                whole[:, :, -4:] = part[:, :, -4:]
        return out, lse

    monkeypatch.setattr(invariant, "kernel", planted)
    assert invariant.query_rows_that_hold(2, head_dim, dtype, numbers) == sound[1::2]


def test_attention_that_cannot_be_kept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "remembered", lambda name, experiment: [2])
    with pytest.raises(ValueError, match="attention with 12 query heads, 3 key-value heads of 64, float32"):
        invariant.query_rows(12, 3, 64, torch.float32)
