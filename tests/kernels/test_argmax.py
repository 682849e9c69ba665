import pytest
import torch

from mini_engine.kernels import argmax as op
from tests.kernels.cases import DTYPES, random, strided
from tests.kernels.conftest import DEVICE


def check(logits):
    values, ids = op.argmax(logits)
    wanted, wanted_ids = logits.cpu().float().numpy().max(-1), logits.cpu().float().numpy().argmax(-1)
    assert values.dtype == torch.float32
    assert ids.dtype == torch.int64
    assert ids.tolist() == wanted_ids.tolist()  # numpy takes the first of equals, and NaN before all
    assert torch.equal(values.isnan().cpu(), torch.from_numpy(wanted).isnan())
    assert torch.equal(values.nan_to_num(0.0).cpu(), torch.from_numpy(wanted).nan_to_num(0.0))


@pytest.mark.parametrize("width", [1, 64, 65, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_its_id(width, dtype, monkeypatch):
    monkeypatch.setattr(op, "BLOCK", 64)
    check(logits := strided(random(3, width, dtype=dtype)))
    assert torch.equal(op.argmax(logits)[1], op.argmax_reference(logits)[1])


def test_the_lowest_id_of_equals_within_a_block_and_across_blocks(monkeypatch):
    monkeypatch.setattr(op, "BLOCK", 64)
    logits = torch.full((4, 200), -1.0, device=DEVICE)
    logits[0, [70, 71, 150]] = 2.0
    logits[1, [5, 199]] = 2.0
    logits[2, 3:] = torch.tensor([0.0, -0.0] * 98 + [0.0], device=DEVICE)  # equal, whatever the sign
    logits[3, [60, 130]] = torch.tensor([-0.0, 0.0], device=DEVICE)
    check(logits)


def test_all_equal_nothing_allowed_infinities_and_nan(monkeypatch):
    monkeypatch.setattr(op, "BLOCK", 64)
    logits = random(7, 200)
    logits[0] = 5.0
    logits[1] = -torch.inf
    logits[2, 150] = torch.inf
    logits[3, [20, 140]] = torch.nan
    logits[4, 100], logits[4, 130] = torch.inf, -torch.nan  # a NaN with the sign bit
    logits[5] = -torch.inf
    logits[5, 199] = -3.4e38
    logits[6] = -logits[6].abs()
    check(logits)
