import pytest
import torch

from mini_engine.kernels import sample as op
from mini_engine.kernels.registry import KernelSet, choose_kernels
from mini_engine.kernels.sampler import KernelOps
from mini_engine.sampler import filters
from mini_engine.sampler.batch import TORCH, SamplingBatch, SamplingRequest
from mini_engine.sampler.draw import draw_uniform
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.processors.base import Vocabulary
from mini_engine.sampler.sampler import Sampler
from mini_engine.sampler.trace import SamplingTrace
from tests.kernels.cases import random, strided
from tests.kernels.conftest import DEVICE
from tests.kernels.filter_cases import BLOCK, floats, ints, lone, tied

K = (0, 5, 40, 100, 1, 12, 0, 90)
P = (0.9, 1.0, 0.5, 0.77, 0.3, 0.97, 1.0, 0.9)
MIN_P = (0.0, 0.1, 0.0, 0.05, 0.5, 0.2, 0.0, 1.0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(op, "BLOCK", BLOCK)


def filtered(logits, k, p, min_p, joint):
    cut = filters.apply_joint(logits, k, p) if joint else filters.apply_top_p(filters.apply_top_k(logits, k), p)
    return filters.apply_min_p(cut, min_p)


def distance_from_edge(logits, uniform):
    """Return how far each number is from the nearest edge between two tokens' shares, of the whole as 1."""
    edges = logits.double().softmax(-1).cumsum(-1)
    return (edges - uniform[:, None]).abs().amin(-1)


@pytest.mark.parametrize("rows_of", [random, tied])
@pytest.mark.parametrize("joint", [False, True])
def test_the_token_is_the_one_that_lesson_four_draws(rows_of, joint):
    logits = rows_of(8, 150, seed=5)
    k = ints(*K)
    p = floats(*P)
    min_p = floats(*MIN_P, dtype=torch.float32)
    uniform = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    left = filtered(logits, k, p, min_p, joint)
    assert distance_from_edge(left, uniform).min() > 1e-5
    got = op.sample_top_k_top_p(logits, k, p, min_p, uniform, joint)
    assert got.dtype == torch.int64
    assert torch.equal(got, draw_uniform(left, uniform))
    assert torch.equal(op.sample_top_k_top_p_reference(logits, k, p, min_p, uniform, joint), got)


def test_both_ends_of_the_interval_find_a_token_that_may_be_drawn():
    logits = torch.full((3, 200), -torch.inf, device=DEVICE)
    logits[:, 70:140:2] = random(3, 35)
    last = torch.nextafter(floats(1.0), floats(0.0)).item()
    off = ints(0, 0, 0), floats(1.0, 1.0, 1.0), floats(0.0, 0.0, 0.0, dtype=torch.float32)
    assert op.sample_top_k_top_p(logits, *off, floats(0.0, last, last)).tolist() == [70, 138, 138]
    assert op.sample_top_k_top_p(lone(130), *off, floats(0.0, 0.5, last)).tolist() == [0, 65, 129]


def test_rows_may_lie_apart_and_blocks_are_of_any_size(monkeypatch):
    logits = random(3, 150) * 2
    k = ints(*K[:3])
    p = floats(*P[:3])
    min_p = floats(*MIN_P[:3], dtype=torch.float32)
    uniform = floats(0.1, 0.9, 0.4)
    whole = op.sample_top_k_top_p(strided(logits), k, p, min_p, uniform)
    monkeypatch.setattr(op, "BLOCK", 256)
    assert torch.equal(op.sample_top_k_top_p(logits, k, p, min_p, uniform), whole)
    assert op.sample_top_k_top_p(logits[:0], k[:0], p[:0], min_p[:0], uniform[:0]).shape == (0,)


def test_a_number_that_rounds_up_to_one_stays_inside_the_row():
    """A product of a number below 1 and the sum of a row may round to the sum: the last token, not one beyond it."""
    from mini_engine.kernels.sample import sample_top_k_top_p_reference

    row = torch.tensor([[0.0, 1.0, 2.0, 0.5]])
    off = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64), torch.zeros(1)
    drawn = sample_top_k_top_p_reference(row, *off, torch.ones(1, dtype=torch.float64))
    assert drawn.tolist() == [3]


ROWS = (
    {"frequency_penalty": 0.5},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.5},
    {"temperature": 0.7, "top_k": 9, "min_p": 0.2, "seed": 3},
    {"temperature": 1.2, "min_p": 0.3},
) * 5


@pytest.mark.parametrize("order", ["sequential", "joint"])
@pytest.mark.parametrize("reader", ["nobody", "a report", "a trace"])
def test_rows_without_a_seed_are_cut_and_drawn_by_one_kernel_if_nobody_reads_what_is_between(order, reader):
    called = {}

    def noted(name, function):
        def call(*given, **named):
            called[name] = given
            return function(*given, **named)

        return call

    functions = choose_kernels(torch.device(DEVICE), torch.float32).functions
    kernels = KernelOps(KernelSet({name: noted(name, function) for name, function in functions.items()}))
    reported = 2 if reader == "a report" else None
    requests = [SamplingRequest([1, 2], SamplingParams(**row, logprobs=reported), [2]) for row in ROWS]
    tokens = []
    for ops in (TORCH, kernels):
        trace = SamplingTrace() if reader == "a trace" else None
        batch = SamplingBatch.from_requests(requests, Vocabulary(150), DEVICE)
        sampler = Sampler(order, torch.Generator().manual_seed(1), trace, ops)
        tokens.append(sampler(2 * random(20, 150), batch).token_ids)
    assert tokens[0] == tokens[1]
    assert called["sample_top_k_top_p"][1].tolist() == [20 if reader == "nobody" else 0, 0] * 5
    assert {"apply_penalties", "argmax", "draw_seeded", "apply_min_p"} <= called.keys()
