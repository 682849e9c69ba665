import random as dice
import struct

import mmh3
import pytest
import torch
import triton

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


@triton.jit
def noise_kernel(hashes, noise):
    triton.language.store(noise, op.gumbel(triton.language.load(hashes).to(triton.language.uint32)))


def test_the_vectors_and_thousands_of_others_hash_as_mmh3():
    rng = dice.Random(0)
    ends = [0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63)]
    cases = list(VECTORS) + [(seed, p, token) for seed in ends for p in (0, 2**31, 2**32 - 1) for token in (0, 151_935)]
    cases += [(rng.randrange(-(2**63), 2**63), rng.randrange(2**32), rng.randrange(2**32)) for _ in range(5000)]
    got = op.hash_tokens(*torch.tensor(cases, device=DEVICE).T.contiguous()).tolist()
    assert got[: len(VECTORS)] == list(VECTORS.values())
    assert got == [mmh3.hash(struct.pack("<QII", s % 2**64, p, token), 0, signed=False) for s, p, token in cases]


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 2, 2**32 - 1])
def test_the_noise_is_finite_at_both_ends_and_that_of_lesson_four(word):
    noise = torch.empty(1, dtype=torch.float64, device=DEVICE)
    noise_kernel[(1,)](ints(word), noise)
    assert noise.isfinite().all()
    assert noise.item() == pytest.approx(draw.gumbel(ints(word)).item(), rel=1e-14)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 300])
def test_the_draws_are_those_of_lesson_four(width, monkeypatch):
    monkeypatch.setattr(op, "BLOCK", 64)
    logits, seeds, positions = random(5, width), ints(42, 0, -1, 2**63 - 1, 43), ints(0, 1, 5, 4096, 2**31)
    got = op.draw_seeded(logits, seeds, positions)
    assert torch.equal(got, draw.draw_seeded(logits, seeds, positions))
    assert torch.equal(got, op.draw_seeded_reference(logits, seeds, positions))


@pytest.mark.slow
def test_a_token_is_drawn_as_often_as_it_is_likely_and_a_banned_one_never():
    logits = torch.tensor([2.0, 1.0, -torch.inf, 0.5, -1.0], device=DEVICE)
    rows = 100
    drawn = op.draw_seeded(
        logits.expand(rows, -1), ints(7).expand(rows).contiguous(), torch.arange(rows, device=DEVICE)
    )
    wanted = logits.double().softmax(-1) * rows
    hits = drawn.bincount(minlength=5)
    assert hits[2] == 0
    allowed = wanted > 0
    chi_square = ((hits - wanted)[allowed].square() / wanted[allowed]).sum()
    assert chi_square < 16.3  # of 3 degrees of freedom, exceeded once in 1000


def test_the_hash_of_all_ones_does_not_draw_a_banned_token(monkeypatch):
    """Once its noise was plus infinity, and minus infinity plus that is NaN, which wins every comparison."""
    if INTERPRETED:
        monkeypatch.setattr(op, "BLOCK", 1 << 18)  # one program; the assembler of a GPU would take an hour for it
    token, seed, position = 248_146, ints(6469398791980356130), ints(7371)
    logits = torch.full((1, token + 10), -torch.inf, device=DEVICE)
    logits[0, 5] = -50.0
    assert op.draw_seeded(logits, seed, position).item() == 5
    logits[0, token] = 0.0
    assert op.draw_seeded(logits, seed, position).item() == token


def test_a_row_is_drawn_alone_as_among_others_and_rows_may_lie_apart(monkeypatch):
    monkeypatch.setattr(op, "BLOCK", 64)
    logits, seeds, positions = random(4, 200), ints(1, 1, 2, 3), ints(9, 10, 9, 9)
    whole = op.draw_seeded(logits, seeds, positions)
    assert torch.equal(op.draw_seeded(strided(logits), seeds, positions), whole)
    for row in range(4):
        one = slice(row, row + 1)
        assert op.draw_seeded(logits[one], seeds[one], positions[one]).item() == whole[row]
    assert op.draw_seeded(logits[:0], seeds[:0], positions[:0]).shape == (0,)


@pytest.mark.parametrize(("seeds", "words"), [((3,), r"seeds has the shape \[3\]"), ((2,), r"seeds is torch\.float32")])
def test_seeds_of_another_shape_or_dtype_are_refused(seeds, words):
    with pytest.raises(ValueError, match=words):
        op.draw_seeded(random(2, 8), torch.ones(seeds, device=DEVICE), ints(0, 0))
