"""One attention call over many sequences where they lie: the values of the plain path, for every layout."""

import random
from math import gcd

import pytest
import torch

from mini_engine.attention.metadata import SequenceChunk, pack_batch
from mini_engine.attention.paged import PagedAttention
from mini_engine.config import EngineConfig
from mini_engine.fast.attention.ragged import StepCache, grouped_attention
from mini_engine.fast.attention.strided import DecodeRow, StridedAttention, cheapest, find_grids
from mini_engine.fast.pages import PlacedAllocator
from mini_engine.llm import load_driver, make_engine
from mini_engine.sampler.params import SamplingParams
from tests.support.pools import (
    chunk_at,
    make_pool,
)


def run_both(chunks, num_pages, page_size, dtype=torch.float32):
    """Attend with the plain path and over the grid, on equal pools -> both outputs, both pools."""
    inputs = pack_batch(chunks, page_size)
    rows = len(inputs.input_ids)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(rows, heads, 16, generator=generator).to(dtype) for heads in (6, 2, 2))
    first, second = make_pool(num_pages, page_size, dtype), make_pool(num_pages, page_size, dtype)
    plain = PagedAttention(first, inputs.metadata, grouped_attention)(1, q, k, v)
    cache = StepCache(second, inputs.metadata)
    grids = find_grids(cache)
    assert grids, "this layout has a grid"
    strided = StridedAttention(cache, grids, grouped_attention)(1, q, k, v)
    return plain, strided, first, second


LAYOUTS = {
    "every place taken": [(0, 30, 1), (8, 5, 1), (16, 64, 1), (24, 1, 1)],
    "a place in the middle is idle": [(0, 30, 1), (16, 12, 1), (24, 40, 1)],
    "out of order": [(24, 30, 1), (0, 3, 1), (16, 60, 1), (8, 8, 1)],
    "a chunk of a prompt between them": [(0, 30, 1), (8, 40, 9), (16, 12, 1)],
    "the grid does not begin at 0": [(8, 30, 1), (16, 31, 1)],
    "rows of the grid overlap": [(0, 64, 1), (8, 3, 1)],
    "the rows of a draft": [(8, 30, 1), (8, 31, 1), (8, 32, 1), (8, 33, 1)],
    "drafts of several lengths, and none": [(0, 30, 1), (16, 12, 1), (8, 9, 1), (0, 31, 1), (0, 32, 1), (16, 13, 1)],
    "two grids, a chunk and a row alone": [(20, 30, 1), (3, 20, 1), (0, 31, 1), (8, 33, 9), (10, 25, 1), (33, 4, 1)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_values_are_those_of_the_plain_path(name, dtype):
    chunks = [chunk_at(page, kv_len, 8, new) for page, kv_len, new in LAYOUTS[name]]
    plain, strided, first, second = run_both(chunks, 40, 8, dtype)
    torch.testing.assert_close(strided, plain, atol=1e-5 if dtype is torch.float32 else 2e-2, rtol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(first.keys + first.values, second.keys + second.values, strict=True))


CUTS = {  # (first page, keys) of each sequence, pages of 8 in a pool of 960; what is served together
    "one sequence, which a view serves": ([(0, 20)], []),
    "a pair at any distance": ([(3, 20), (950, 20)], [[3, 950]]),
    "two neighbours and one far away": ([(0, 50), (7, 50), (390, 50)], [[0, 7]]),
    "between the places of another grid": (
        [(0, 200), (100, 200), (200, 200), (300, 200), (430, 200), (530, 200), (630, 200)],
        [[0, 100, 200, 300], [430, 530, 630]],
    ),
    "every place has two generations": (
        [(0, 200), (45, 200), (200, 200), (245, 200), (400, 200), (445, 200), (600, 200)],
        [[0, 200, 400, 600], [45, 245, 445]],
    ),
    "two groups with a wide gap": (
        [(0, 300), (40, 300), (80, 300), (720, 300), (760, 300)],
        [[0, 40, 80], [720, 760]],
    ),
    "one much longer than the rest": ([(0, 3900), (480, 10), (600, 10), (720, 10)], [[480, 600, 720]]),
    "the last would reach beyond the pool": ([(0, 300), (959, 4)], []),
}


@pytest.mark.parametrize("name", CUTS)
def test_rows_are_cut_into_grids_where_it_saves_more_than_a_call(name):
    layout, expected = CUTS[name]
    grids = find_grids(StepCache(make_pool(960, 8), pack_batch([chunk_at(*one, 8) for one in layout], 8).metadata))
    pages = [[layout[row][0] for row, idle in zip(g.rows, g.is_idle, strict=True) if not idle] for g in grids]
    assert pages == expected


def test_sequences_on_scattered_pages_are_on_no_grid():
    chunks = [chunk_at(0, 20, 8), SequenceChunk([1], 19, [30, 9, 4])]
    assert find_grids(StepCache(make_pool(40, 8), pack_batch(chunks, 8).metadata)) == []


def test_cuts_cost_no_more_than_one_grid_or_a_call_for_each():
    generator = random.Random(5)
    for _ in range(200):
        firsts = sorted(generator.sample(range(0, 4000, generator.choice([1, 16, 100])), generator.randint(1, 20)))
        rows = [DecodeRow(first, generator.randint(1, 300), row) for row, first in enumerate(firsts)]
        call = generator.choice([10, 250, 5000])
        limit = 4300
        cost, parts = cheapest(rows, call, limit)
        assert sorted(row for part in parts for row in part) == rows
        assert cost == sum(call + places(part) * max(row.kv_len for row in part) for part in parts)
        assert cost <= sum(call + row.kv_len for row in rows)
        assert cost <= call + places(rows) * max(row.kv_len for row in rows)
        assert all(part[-1].first + max(row.kv_len for row in part) <= limit for part in parts)


def places(rows):
    """How many places a grid of these rows has."""
    distance = gcd(*(row.first - rows[0].first for row in rows)) or 1
    return (rows[-1].first - rows[0].first) // distance + 1


def test_allocator_keeps_a_request_together_and_places_apart():
    allocator = PlacedAllocator(24, 8)
    first, second = allocator.allocate(3), allocator.allocate(1)
    assert (first, second) == ([0, 1, 2], [8])
    assert allocator.allocate(2, after=2) == [3, 4]
    third = allocator.allocate(9)  # no place is free for nine: the longest free run
    assert third == list(range(9, 18))
    assert allocator.allocate(1, after=8) == [5]  # its next page is taken
    assert allocator.allocate(7) == [6, 7, 18, 19, 20, 21, 22]  # no run is long enough: the lowest free pages


def test_allocator_refuses_a_double_free():
    allocator = PlacedAllocator(8, 4)
    pages = allocator.allocate(2)
    allocator.free(pages)
    with pytest.raises(ValueError, match="freed twice"):
        allocator.free(pages)
    with pytest.raises(ValueError, match="freed twice"):
        allocator.free(allocator.allocate(1) * 2)
    with pytest.raises(ValueError, match="at least 1 page"):
        PlacedAllocator(0, 1)


GROUPED = EngineConfig(compute="fast", page_size=4, max_running_requests=3, num_pages=72)


def answers(engine, names):
    while engine.scheduler.has_work:
        engine.step()
    return [engine.take_output(name) for name in names]


def test_an_engine_with_many_requests_takes_the_grid_and_keeps_the_answers(monkeypatch):
    prompts = [list(range(20, 20 + n)) for n in (5, 60, 17)]
    params = [SamplingParams(max_new_tokens=30, temperature=0.7 * (i % 2), seed=i, ignore_eos=True) for i in range(3)]
    alone = [
        load_driver(None, GROUPED).complete(ids, own)[0].token_ids for ids, own in zip(prompts, params, strict=True)
    ]
    found = []
    monkeypatch.setattr(
        "mini_engine.fast.attention.consecutive.find_grids", lambda *args: found.append(find_grids(*args)) or found[-1]
    )
    engine = make_engine(load_driver(None, GROUPED))
    names = [engine.add_request(ids, own) for ids, own in zip(prompts, params, strict=True)]
    assert [output.token_ids for output in answers(engine, names)] == alone
    assert sum(len(grids) == 1 and len(grids[0].rows) == 3 for grids in found) >= 25, "most steps decode three rows"


def test_a_request_with_nan_in_its_cache_ends_alone():
    """Place 0 is read 60 slots far for the sake of place 1, and so meets the keys of place 1: NaN crosses over.

    The plain path is asked then; and the pages of the guilty request are wiped, so that the next step is fast again.
    """
    prompts = [list(range(20, 25)), list(range(20, 120))]
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    alone = load_driver(None, GROUPED).complete(prompts[0], params)[0].token_ids
    engine = make_engine(load_driver(None, GROUPED))
    names = [engine.add_request(ids, params) for ids in prompts]
    for _ in range(5):
        engine.step()
    innocent, guilty = (engine.entries[name].request for name in names)
    engine.worker.pool.poison([guilty.pages[0]])
    assert innocent.pages[0] == 0
    first, second = answers(engine, names)
    assert second.finish_reason == "error"
    assert len(second.token_ids) == 5
    assert "NaN" in (second.error or "")
    assert first.finish_reason == "length"
    assert first.token_ids == alone
    engine.generate([[5]], params)  # the next step clears its pages
    assert all(bool(tensor.isfinite().all()) for tensor in (*engine.worker.pool.keys, *engine.worker.pool.values))
