"""Rows of logits that the tests of filters share, and the widths at which they are cut."""

import numpy as np
import torch
from torch import Tensor

from tests.kernels.cases import random
from tests.kernels.conftest import DEVICE

WIDTHS = [1, 2, 63, 64, 65, 200]  # around a block of 64, which ``small_blocks`` sets
BLOCK = 64


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


def top_k_by_hand(logits, k):
    """Keep the first k of each row in the order of (falling logit, rising id)."""
    kept = logits.clone()
    for row, count in enumerate(k.tolist()):
        numbers = logits[row].cpu().numpy()
        order = np.lexsort((np.arange(len(numbers)), -numbers))
        if 0 < count < len(numbers):
            kept[row, torch.from_numpy(order[count:].copy()).to(logits.device)] = -torch.inf
    return kept


def top_p_by_hand(logits, p):
    """Keep tokens in the order of (falling logit, rising id) while the mass before them is below p, in float64."""
    kept = logits.clone()
    for row, share in enumerate(p.tolist()):
        numbers = logits[row].cpu().numpy().astype(np.float64)
        order = np.lexsort((np.arange(len(numbers)), -numbers))
        masses = np.exp(numbers[order] - numbers.max())
        before = np.concatenate(([0.0], masses.cumsum()[:-1])) / masses.sum()
        if share < 1:
            kept[row, torch.from_numpy(order[before >= share].copy()).to(logits.device)] = -torch.inf
    return kept
