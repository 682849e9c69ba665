import pytest
import torch

from mini_engine.kernels import top_k_top_p as op
from mini_engine.sampler import filters
from tests.kernels.cases import random, strided
from tests.kernels.conftest import DEVICE
from tests.kernels.filter_cases import BLOCK, floats, ints, lone, poison, same_bits, tied, top_k_by_hand, top_p_by_hand

K = (0, 5, 40, 100, 1, 12, 90)
P = (0.9, 1.0, 0.5, 0.77, 0.3, 0.97, 0.999)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(op, "BLOCK", BLOCK)


def by_hand(logits, k, p, joint):
    if joint:
        return torch.minimum(top_k_by_hand(logits, k), top_p_by_hand(logits, p))
    return top_p_by_hand(top_k_by_hand(logits, k), p)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 65, 150])
@pytest.mark.parametrize("rows_of", [random, tied])
@pytest.mark.parametrize("joint", [False, True])
def test_both_cuts_are_those_of_lesson_four(width, rows_of, joint, monkeypatch):
    poison(monkeypatch)
    logits, k, p = rows_of(7, width, seed=3), ints(*K), floats(*P)
    got = op.apply_top_k_top_p(logits, k, p, joint)
    assert same_bits(got, by_hand(logits, k, p, joint))
    assert torch.equal(got, op.apply_top_k_top_p_reference(logits, k, p, joint))
    wanted = filters.apply_joint(logits, k, p) if joint else filters.apply_top_p(filters.apply_top_k(logits, k), p)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(("joint", "kept"), [(False, [0]), (True, [0, 1])])
def test_top_p_judges_what_top_k_left_or_the_whole_row(joint, kept):
    """The vector on which the engines differ: of .5 and .2 alone, .5 is more than 60 %; of everything it is less."""
    logits = torch.tensor([[0.5, 0.2, 0.15, 0.15]], device=DEVICE).log()
    got = op.apply_top_k_top_p(logits, ints(2), floats(0.6), joint)
    assert (got[0] > -torch.inf).nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(("k", "p", "kept"), [(6, 0.25, 2), (2, 0.9, 2), (7, 1.0, 7), (0, 0.75, 6)])
def test_of_equals_the_stricter_cut_counts(joint, k, p, kept):
    logits = torch.zeros(1, 8, device=DEVICE)
    got = op.apply_top_k_top_p(logits, ints(k), floats(p), joint)
    assert (got[0] == 0).nonzero()[:, 0].tolist() == list(range(kept))


def test_a_row_is_cut_alone_as_among_others_and_rows_may_lie_apart():
    logits, k, p = tied(6, 150), ints(*K[:6]), floats(*P[:6])
    for joint in (False, True):
        whole = op.apply_top_k_top_p(strided(logits), k, p, joint)
        for row in (0, 5):
            one = slice(row, row + 1)
            assert torch.equal(op.apply_top_k_top_p(logits[one], k[one], p[one], joint)[0], whole[row])
    assert torch.equal(op.apply_top_k_top_p(lone(70), ints(1, 5, 69), floats(0.5, 0.5, 0.5)), lone(70))
    assert op.apply_top_k_top_p(logits[:0], k[:0], p[:0]).shape == (0, 150)
