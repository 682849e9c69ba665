import random as dice
import struct

import mmh3
import pytest
import torch

from mini_engine.kernels import gumbel as op
from mini_engine.kernels.launch import INTERPRETED
from mini_engine.sampler import draw
from tests.kernels.cases import random, strided
from tests.kernels.conftest import DEVICE
from tests.kernels.filter_cases import ints

# Vectors of another engine's hash; the last was found because its uniform number is exactly 1.
VECTORS = {
    (42, 0, 0): 1868632036,
    (42, 0, 1): 1791484015,
    (42, 7, 151935): 2377481450,
    (0, 0, 0): 2167721464,
    (-1, 5, 3): 2679508119,
    (2**63 - 1, 100, 32000): 1168555603,
    (12345678901234, 4096, 50256): 3310812723,
    (43, 0, 0): 1668824596,
    (6469398791980356130, 7371, 248146): 0xFFFFFFFF,
}


def test_the_vectors_and_thousands_of_others_hash_as_mmh3():
    rng = dice.Random(0)
    ends = [0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63)]
    cases = list(VECTORS) + [(seed, p, token) for seed in ends for p in (0, 2**31, 2**32 - 1) for token in (0, 151_935)]
    cases += [(rng.randrange(-(2**63), 2**63), rng.randrange(2**32), rng.randrange(2**32)) for _ in range(5000)]
    got = op.hash_tokens(*torch.tensor(cases, device=DEVICE).T.contiguous()).tolist()
    assert got[: len(VECTORS)] == list(VECTORS.values())
    assert got == [mmh3.hash(struct.pack("<QII", s % 2**64, p, token), 0, signed=False) for s, p, token in cases]


@pytest.mark.parametrize("width", [1, 64, 300])
def test_the_draws_are_those_of_lesson_four(width, monkeypatch):
    monkeypatch.setattr(op, "BLOCK", 64)
    logits = strided(random(5, width))
    seeds = ints(42, 0, -1, 2**63 - 1, 43)
    positions = ints(0, 1, 5, 4096, 2**31)
    got = op.draw_seeded(logits, seeds, positions)
    assert torch.equal(got, draw.draw_seeded(logits, seeds, positions))
    assert torch.equal(got, op.draw_seeded_reference(logits, seeds, positions))


def test_the_hash_of_all_ones_does_not_draw_a_banned_token(monkeypatch):
    """Once its noise was plus infinity, and minus infinity plus that is NaN, which wins every comparison."""
    if INTERPRETED:
        monkeypatch.setattr(op, "BLOCK", 1 << 18)  # one program; the assembler of a GPU would take an hour for it
    token = 248_146
    seed = ints(6469398791980356130)
    position = ints(7371)
    logits = torch.full((1, token + 10), -torch.inf, device=DEVICE)
    logits[0, 5] = -50.0
    assert op.draw_seeded(logits, seed, position).item() == 5
    logits[0, token] = 0.0
    assert op.draw_seeded(logits, seed, position).item() == token
