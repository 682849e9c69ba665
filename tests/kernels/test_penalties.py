import numpy as np
import pytest
import torch

from mini_engine.kernels import penalties as op
from tests.kernels.cases import random, strided
from tests.kernels.conftest import DEVICE
from tests.kernels.filter_cases import same_bits

OFF = (1.0, 0.0, 0.0)
STRENGTHS = [(1.3, 0.37, 0.71), (0.7, -0.4, 0.0), (1.0, 0.1, 0.0), (1.0, 0.0, -1.3), (1.9, 0.0, 0.0), OFF]


def entries_of(width, seed=0):
    """Return rows, token ids, counts and strengths of entries in six rows, no pair twice, in no order."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(len(STRENGTHS) * width, generator=generator)[: 2 * width]
    rows = places // width
    token_ids = places % width
    counts = torch.randint(0, 5, (len(places),), generator=generator).float()
    strengths = torch.tensor(STRENGTHS)[rows].T.contiguous()
    return [each.to(DEVICE) for each in (rows, token_ids, counts, *strengths)]


def by_hand(logits, rows, token_ids, counts, repetition, frequency, presence):
    """Do the arithmetic in numpy's float32, one rounded operation at a time."""
    wanted = logits.cpu().numpy().copy()
    for row, token, *numbers in zip(
        rows.tolist(), token_ids.tolist(), counts, repetition, frequency, presence, strict=True
    ):
        count, repeat, often, ever = (np.float32(number.item()) for number in numbers)
        x = wanted[row, token]
        if repeat != 1:
            x = x / repeat if x > 0 else x * repeat
        if often != 0:
            x = x - often * count
        if ever != 0:
            x = x - ever * np.float32(count > 0)
        wanted[row, token] = x
    return torch.from_numpy(wanted).to(logits.device)


@pytest.mark.parametrize("width", [1, 50, 300])
def test_every_entry_has_the_bits_of_rounded_arithmetic_and_no_other_logit_changes(width):
    logits = random(len(STRENGTHS), width) * 7
    logits[:, width // 2] = -torch.inf
    logits[:, 0] = -0.0
    entries = entries_of(width)
    wanted = by_hand(logits, *entries)
    torch_too = logits.clone()
    op.apply_penalties_reference(torch_too, *entries)
    apart = strided(logits)
    op.apply_penalties(logits, *entries)
    op.apply_penalties(apart, *entries)
    assert same_bits(logits, wanted)
    assert same_bits(apart, wanted)
    assert same_bits(torch_too, wanted)
