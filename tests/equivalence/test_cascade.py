"""Attention over a common prefix and over the rest, merged: the values of the plain path, for every layout."""

from dataclasses import replace

import pytest
import torch

from mini_engine.attention.metadata import SequenceChunk, pack_batch
from mini_engine.attention.paged import PagedAttention
from mini_engine.config import EngineConfig
from mini_engine.fast.attention.cascade import LEAST_SHARED, CascadeAttention, find_cascade, find_scattered
from mini_engine.fast.attention.consecutive import UnlessNaN
from mini_engine.fast.attention.ragged import StepCache, grouped_attention
from mini_engine.llm import load_driver, make_engine
from mini_engine.sampler.params import SamplingParams
from tests.support.pools import chunk_at, make_pool

PAGE = 8


def tail(shared, own_pages, kv_len, new=1):
    """A sequence of ``kv_len`` tokens that lies on the first ``shared`` pages of the pool and on pages of its own."""
    return SequenceChunk([1] * new, kv_len - new, [*range(shared), *own_pages])


def run_both(chunks, dtype=torch.float32, num_pages=80, find=find_cascade):
    inputs = pack_batch(chunks, PAGE)
    generator = torch.Generator().manual_seed(1)
    rows = len(inputs.input_ids)
    q, k, v = (torch.randn(rows, heads, 16, generator=generator).to(dtype) for heads in (6, 2, 2))
    first, second = make_pool(num_pages, PAGE, dtype), make_pool(num_pages, PAGE, dtype)
    plain = PagedAttention(first, inputs.metadata, grouped_attention)(1, q, k, v)
    cache = StepCache(second, inputs.metadata)
    cascade = find(cache)
    assert cascade is not None, "this layout has a common prefix"
    out = CascadeAttention(cache, cascade, grouped_attention)(1, q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(first.keys + first.values, second.keys + second.values, strict=True))
    return plain, out, cascade


LAYOUTS = {
    "two alike": [tail(8, [20], 70), tail(8, [30, 31], 75)],
    "the rest is one token": [tail(8, [20], 65), tail(8, [30], 65)],
    "the shorter one ends with the prefix": [tail(9, [], 72), tail(10, [30], 85)],
    "a stranger and a prompt between them": [
        tail(10, [20], 83),
        chunk_at(40, 30, PAGE),
        tail(10, [30, 31, 25], 100),
        chunk_at(50, 40, PAGE, 9),
        tail(10, [35], 81, 1),
    ],
    "a sequence of the prefix itself": [tail(12, [], 90), tail(11, [30], 90)],
    "a prompt that begins alike": [tail(10, [20], 83), tail(10, [30, 31], 90, 7), tail(10, [32], 83)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_values_are_those_of_the_plain_path(name, dtype):
    plain, out, _ = run_both(LAYOUTS[name], dtype)
    torch.testing.assert_close(out, plain, atol=1e-5 if dtype is torch.float32 else 2e-2, rtol=1e-5)


def test_two_groups_and_who_is_in_them():
    apart = SequenceChunk([1], 79, [*range(40, 49), 70])
    chunks = [tail(8, [20], 70), apart, tail(8, [30], 66), chunk_at(40, 79, PAGE), chunk_at(60, 9, 8)]
    plain, out, cascade = run_both(chunks)
    assert [len(prefix.slots) for prefix in cascade.prefixes] == [64, 72]
    assert cascade.members == [0, 2, 1, 3]
    torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "chunks",
    [
        [tail(8, [20], 70)],
        [tail(7, [20], 60), tail(7, [30], 60)],  # 56 tokens: fewer than LEAST_SHARED
        [tail(8, [], 64), tail(10, [30], 85)],  # 56 besides the newest one
        [tail(8, [20], 70), tail(8, [*range(30, 60)], 300), tail(8, [70], 66), tail(8, [71], 66)],  # padding costs more
        [tail(8, [20, 21], 75, 9), tail(8, [30], 70)],  # one of the two is a prompt
        [
            chunk_at(40, 80, PAGE),
            chunk_at(40, 79, PAGE),
            chunk_at(40, 78, PAGE),
        ],  # a draft, which a grid reads in place
    ],
)
def test_no_cascade_where_it_would_not_help(chunks):
    assert LEAST_SHARED == 64
    assert find_cascade(StepCache(make_pool(80, PAGE), pack_batch(chunks, PAGE).metadata)) is None


def scattered(kv_len, *pages):
    """A sequence in the middle of its answer, on these pages."""
    return SequenceChunk([1], kv_len - 1, pages)


SCATTERED = {
    "all of them": [scattered(20, 30, 9, 4), scattered(33, 1, 3, 5, 7, 11), scattered(17, 60, 50, 40)],
    "two and one that lies together": [scattered(20, 30, 9, 4), chunk_at(12, 33, PAGE), scattered(17, 60, 50, 40)],
    "a prompt between them": [scattered(20, 30, 9, 4), chunk_at(12, 33, PAGE, 9), scattered(24, 60, 50, 40)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCATTERED)
def test_scattered_sequences_are_read_together(name, dtype):
    plain, out, cascade = run_both(SCATTERED[name], dtype, find=find_scattered)
    assert cascade.members == [i for i, chunk in enumerate(SCATTERED[name]) if len(chunk.token_ids) == 1]
    torch.testing.assert_close(out, plain, atol=1e-5 if dtype is torch.float32 else 2e-2, rtol=1e-5)


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk_at(12, 33, PAGE), chunk_at(40, 30, PAGE)],
        [scattered(20, 30, 9, 4)],
        [scattered(20, 30, 9, 4), scattered(17, 60, 50, 40), *(chunk_at(i, 8, PAGE) for i in (10, 20, 70))],
        [scattered(9, 30, 9), scattered(9, 60, 50), scattered(8 * 14, *range(10, 24, 2), *range(11, 24, 2))],
    ],
)
def test_nothing_is_copied_where_most_rows_lie_together_or_padding_would_double_it(chunks):
    assert find_scattered(StepCache(make_pool(80, PAGE), pack_batch(chunks, PAGE).metadata)) is None


def spied(driver):
    """Note every attention that the driver makes. Mutates the driver."""
    used = []
    choose = driver.make_attention
    driver.make_attention = lambda pool, metadata: used.append(choose(pool, metadata)) or used[-1]
    return used


def test_an_engine_whose_cache_has_filled_the_pool_reads_scattered_rows_together():
    """Greedy, on the embedded model: the answers are those of an engine without a cache, whose rows lie together."""
    config = EngineConfig.serving(num_pages=60, max_running_requests=4, prefix_cache=None)
    loads = [[[start + i, *range(100 + start, 120 + start + i)] for i in range(6)] for start in (0, 10, 20, 30)]
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    plain = make_engine(load_driver(engine=config))
    driver = load_driver(engine=replace(config, prefix_cache="radix"))
    used = spied(driver)
    cached = make_engine(driver)
    for prompts in loads:
        answers = [[answer.token_ids for (answer,) in each.generate(prompts, params)] for each in (plain, cached)]
        assert answers[0] == answers[1]
    together = [each for each in cascades(used) if not each.cascade.prefixes]
    assert len(together) >= 10


def test_an_engine_with_a_prefix_cache_uses_it_and_answers_the_same():
    """Greedy, on the embedded model: the answers with common pages read once are those without the cache."""
    config = EngineConfig.serving(prefix_cache=None)
    driver = load_driver(engine=config)
    stem = list(range(50, 150))
    prompts = [[*stem, *range(300 + i, 310 + 2 * i)] for i in range(6)]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    plain = [answer.token_ids for (answer,) in make_engine(driver).generate(prompts, params)]
    driver = load_driver(engine=replace(config, prefix_cache="radix", wait_for_prefix=32))
    used = spied(driver)
    assert [answer.token_ids for (answer,) in make_engine(driver).generate(prompts, params)] == plain
    assert len(cascades(used)) >= 10


def cascades(used):
    """Return those of the attentions that an engine has used."""
    inner = [each.attention for each in used if isinstance(each, UnlessNaN)]
    return [each for each in inner if isinstance(each, CascadeAttention)]
