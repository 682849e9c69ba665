"""Rows of logits that the tests of filters share."""

import torch
from torch import Tensor

from tests.kernels.cases import random
from tests.kernels.conftest import DEVICE

BLOCK = 64  # to which ``small_blocks`` sets those of kernels


def floats(*numbers: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, device=DEVICE)


def tied(rows: int, width: int, seed: int = 0) -> Tensor:
    """Draw logits of which many are equal, some of them both zeros, some minus infinity."""
    x = (random(rows, width, seed=seed) * 2).round() / 2  # -0.0 and 0.0 are among them
    return x.masked_fill(random(rows, width, seed=seed + 1) > 1.2, -torch.inf).index_fill(1, ints(width // 2), 1.0)


def lone(width: int) -> Tensor:
    """Return rows in which one token alone is possible, at the beginning, inside and at the end."""
    x = torch.full((3, width), -torch.inf, device=DEVICE)
    x[range(3), [0, width // 2, width - 1]] = -3.0
    return x


def poison(monkeypatch) -> None:
    """Fill what ``torch.empty_like`` gives with NaN, so that an element that is not written shows."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: empty_like(*args, **options).fill_(torch.nan))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
