"""With ``batch_invariant=True`` a row's bits depend on its own sequence alone.

The oracle of every case is the same prompt alone, whole, in order, at two threads. A negative control shows that the
plain path does not pass these tests, so they can fail.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3ForCausalLM

from mini_engine import llm as startup
from mini_engine.attention.allocator import pages_needed
from mini_engine.attention.dense import eager_attention, sdpa_attention
from mini_engine.attention.metadata import SequenceChunk, pack_batch
from mini_engine.attention.pool import KVPool
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.driver import GreedyDriver
from mini_engine.fast.attention.ragged import grouped_attention
from mini_engine.fast.products import make_projections
from mini_engine.llm import build_model, load_driver
from tests.support.shapes import SHAPES, peer_config


@cache
def make_driver(shape: tuple[int, ...], engine: EngineConfig) -> GreedyDriver:
    config = peer_config(shape, num_hidden_layers=2, max_position_embeddings=2048)
    torch.manual_seed(0)
    weights = {k: v.to(getattr(torch, engine.dtype)) for k, v in Qwen3ForCausalLM(config).state_dict().items()}
    return startup.make_driver(build_model(ModelConfig.from_hf(config.to_dict()), weights, engine), engine)


@dataclass(frozen=True)
class Case:
    """Some prompts, how each is cut into chunks, and a seed for the order, the packing and the pages."""

    lengths: list[int]
    chunk_sizes: list[list[int]]
    page_size: int
    threads: int
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 4))
    lengths = draw(
        st.lists(st.sampled_from([1, 2, 3, 17, 64, 127, 128, 129, 200, 300]), min_size=count, max_size=count)
    )
    sizes = st.lists(st.sampled_from([1, 1, 2, 3, 7, 16, 50, 128, 300]), max_size=40)
    return Case(
        lengths=lengths,
        chunk_sizes=draw(st.lists(sizes, min_size=count, max_size=count)),
        page_size=draw(st.sampled_from([1, 4, 16, 64])),
        threads=draw(st.sampled_from([1, 2, 4, 8])),
        seed=draw(st.integers(0, 2**31)),
    )


def prompt(driver: GreedyDriver, seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(driver.model.config.vocab_size) for _ in range(length)]


def run(driver: GreedyDriver, prompts: list[list[int]], sizes: list[list[int]], case: Case) -> list[Tensor]:
    """Prefill ``prompts`` in random packings, in scattered pages of a poisoned pool -> logits [len, V] of each."""
    rng = random.Random(case.seed)
    needed = [pages_needed(len(p), case.page_size) for p in prompts]
    order = list(range(sum(needed) + 2))
    rng.shuffle(order)
    pool = KVPool(driver.model.config, len(order), case.page_size, driver.model.embedding.dtype)
    pool.poison(order)
    stops = list(itertools.accumulate(needed))
    pages = [order[stop - count : stop] for stop, count in zip(stops, needed, strict=True)]
    cuts = [iter([*own, *itertools.repeat(1000, 2)]) for own in sizes]
    done = [0] * len(prompts)
    outputs = [list[Tensor]() for _ in prompts]
    while live := [i for i, p in enumerate(prompts) if done[i] < len(p)]:
        picked = rng.sample(live, rng.randint(1, len(live)))
        chunks = [SequenceChunk(prompts[i][done[i] : done[i] + next(cuts[i])], done[i], pages[i]) for i in picked]
        batch = pack_batch(chunks, case.page_size)
        with torch.inference_mode():
            logits = driver.model(batch.input_ids, batch.positions, driver.make_attention(pool, batch.metadata))
        for i, part in zip(picked, logits.split([len(c.token_ids) for c in chunks]), strict=True):
            outputs[i].append(part)
            done[i] += len(part)
    return [torch.cat(parts) for parts in outputs]


@cache
def alone(driver: GreedyDriver, seed: int, length: int) -> Tensor:
    torch.set_num_threads(2)
    whole = Case([length], [[]], 16, 2, seed)
    return run(driver, [prompt(driver, seed, length)], [[]], whole)[0]


def rows_that_differ(driver: GreedyDriver, case: Case) -> int:
    seeds = [case.seed % 7 + i for i in range(len(case.lengths))]  # few prompts, so that ``alone`` is cached
    expected = [alone(driver, seed, length) for seed, length in zip(seeds, case.lengths, strict=True)]
    torch.set_num_threads(case.threads)
    prompts = [prompt(driver, seed, length) for seed, length in zip(seeds, case.lengths, strict=True)]
    got = run(driver, prompts, case.chunk_sizes, case)
    return sum(int((a != b).any(-1).sum()) for a, b in zip(got, expected, strict=True))


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "float32", "compute": "packed"},
        {"dtype": "float32", "compute": "compiled"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "compute": "packed"},
        {"dtype": "bfloat16", "compute": "compiled"},
    ],
    ids=str,
)
def test_logits_are_bitwise_the_same_in_any_packing_chunking_page_size_and_thread_count(
    shape: tuple[int, ...], options: dict[str, str]
) -> None:
    driver = make_driver(shape, EngineConfig(**options, batch_invariant=True))

    @settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases())
    def check(case: Case) -> None:
        assert rows_that_differ(driver, case) == 0

    check()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "compute": "packed"}], ids=str)
@pytest.mark.parametrize("limits", [(0, 1 << 12), (0, 1 << 22), (1 << 40, 1 << 22)], ids=str)
def test_sequences_that_begin_alike_have_the_bits_that_each_has_alone(
    shape: tuple[int, ...], options: dict[str, str], limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full tiles that several sequences share are read once, others for each: in many calls, in few and never.

    The last tokens come three at a time, or as the rows of a draft do, each as a sequence with the same pages.
    """
    monkeypatch.setattr("mini_engine.invariant.attention.LEAST_SAVED", limits[0])
    monkeypatch.setattr("mini_engine.invariant.attention.CALL_BYTES", limits[1])
    driver = make_driver(shape, EngineConfig(**options, batch_invariant=True))
    size, common = 16, 272  # two tiles and a page that begins the third
    stem = prompt(driver, 0, common)
    tails = [prompt(driver, 1 + i, length) for i, length in enumerate((130, 20, 1, 1, 97, 40))]
    prompts = [stem[: 128 + size] + tails[0], *(stem + tail for tail in tails[1:]), prompt(driver, 9, 290)]
    stems = [128 + size, *[common] * 5, 0]  # the last one shares nothing
    shared = list(range(common // size))
    pages = list[list[int]]()
    for ids, begun in zip(prompts, stems, strict=True):
        first = max(pages[-1] if pages else shared) + 1
        own = pages_needed(len(ids) - begun, size)
        pages.append([*shared[: begun // size], *range(first, first + own)])
    pool = KVPool(driver.model.config, pages[-1][-1] + 1, size, driver.model.embedding.dtype)
    pool.poison(list(range(pool.num_pages)))

    def forward(chunks: list[SequenceChunk]) -> list[Tensor]:
        batch = pack_batch(chunks, size)
        with torch.inference_mode():
            logits = driver.model(batch.input_ids, batch.positions, driver.make_attention(pool, batch.metadata))
        return list(logits.split([len(chunk.token_ids) for chunk in chunks]))

    forward([SequenceChunk(stem, 0, shared)])
    before = [max(begun, len(ids) - 3) for begun, ids in zip(stems, prompts, strict=True)]
    for ids, begun, end, own in zip(prompts, stems, before, pages, strict=True):
        if end > begun:
            forward([SequenceChunk(ids[begun:end], begun, own)])
    last = list[SequenceChunk]()
    for number, (ids, end, own) in enumerate(zip(prompts, before, pages, strict=True)):
        size_of_chunk = 3 if number % 3 == 1 else 1
        last += [SequenceChunk(ids[at : at + size_of_chunk], at, own) for at in range(end, len(ids), size_of_chunk)]
    found = torch.cat(forward(last)).split([len(ids) - end for ids, end in zip(prompts, before, strict=True)])
    for rows, ids in zip(found, prompts, strict=True):
        whole = Case([len(ids)], [[]], size, 2, 0)
        assert torch.equal(rows, run(driver, [ids], [[]], whole)[0][-len(rows) :])


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"compute": "compiled"}], ids=str)
def test_the_plain_path_fails_the_same_test(options: dict[str, str]) -> None:
    """The negative control: without the option most rows change, so the test above is not vacuous."""
    if "dtype" in options and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("without AVX-512 the slow bfloat16 products are invariant by themselves")
    driver = make_driver(SHAPES[0], EngineConfig(**options))
    case = Case([129, 300, 64], [[100, *[1] * 29], [250, *[1] * 50], [10, *[1] * 54]], 4, 2, seed=3)
    assert rows_that_differ(driver, case) > 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_invariant_attention_computes_the_same_values_as_the_plain_path(dtype: str) -> None:
    """Another order of additions, not another result: against the plain path in float32 and float64-like bounds."""
    engine = EngineConfig(dtype=dtype)
    plain, invariant = (make_driver(SHAPES[2], replace(engine, batch_invariant=on)) for on in (False, True))
    case = Case([300, 5], [[100, 1, 1], []], 16, 2, seed=1)
    prompts = [prompt(plain, seed, length) for seed, length in zip((1, 2), case.lengths, strict=True)]
    bound = 1e-5 if dtype == "float32" else 0.05
    for a, b in zip(run(plain, prompts, [[], []], case), run(invariant, prompts, [[], []], case), strict=True):
        assert float((a.float() - b.float()).abs().max()) <= bound * float(a.float().abs().max())


def test_silu_of_a_value_does_not_depend_on_where_it_stands() -> None:
    projections = make_projections(EngineConfig(batch_invariant=True))
    x = torch.randn(1000)
    whole = projections.silu(x)
    assert all(torch.equal(projections.silu(x[i : i + 1]), whole[i : i + 1]) for i in range(1000))
    torch.testing.assert_close(whole.double(), x.double() * x.double().sigmoid(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_decode_attention_gives_the_same_values_and_chunks_the_same_bits(dtype: str) -> None:
    """Rows of one matrix instead of repeated heads: against eager attention in float64."""
    torch.manual_seed(0)
    for heads, kv_heads, kv_len in ((6, 2, 1), (6, 2, 130), (5, 1, 77), (4, 4, 300)):
        sizes = ((heads, 1), (kv_heads, kv_len), (kv_heads, kv_len))
        q, k, v = (torch.randn(n, length, 32).to(getattr(torch, dtype)) for n, length in sizes)
        exact = eager_attention(q.double(), k.double(), v.double())
        error = float((grouped_attention(q, k, v).double() - exact).abs().max())
        assert error < (2e-6 if dtype == "float32" else 2e-2)
        if kv_len > 3:
            chunk = torch.randn(heads, 3, 32).to(q.dtype)
            assert torch.equal(grouped_attention(chunk, k, v), sdpa_attention(chunk, k, v))


def test_fast_with_invariance_has_the_invariant_attention() -> None:
    """So "fast" gives the bits of "packed" then."""
    prompt = [5, 6, 7, 8, 9]
    rows = []
    for compute in ("packed", "fast"):
        driver = load_driver(engine=EngineConfig(compute=compute, batch_invariant=True))
        rows.append([step.logits for step in driver.steps(prompt, 4)])
    assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))
