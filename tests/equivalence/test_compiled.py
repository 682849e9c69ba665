"""Loops compiled for the CPU: each against float64, the model and its attention against the plain path, and the engine
over them against the engine without."""

import os
import pickle
import random
import subprocess
import sys
from functools import partial

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.caching import CompileResultCacheImpl

from mini_engine import llm as startup
from mini_engine.attention.allocator import pages_needed
from mini_engine.attention.dense import DenseAttention, sdpa_attention
from mini_engine.attention.metadata import SequenceChunk, pack_batch
from mini_engine.attention.paged import PagedAttention
from mini_engine.attention.pool import KVPool
from mini_engine.bench import forward
from mini_engine.bench import machine as bench_machine
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.fast.compiled import attention as compiled_attention
from mini_engine.fast.compiled import attention_loops, loops, product_loops
from mini_engine.fast.compiled import products as compiled_products
from mini_engine.fast.compiled.attention import CompiledAttention
from mini_engine.fast.compiled.model import CompiledQwen3
from mini_engine.fast.compiled.products import NO_STEPS, LoopProjections, Packed
from mini_engine.fast.products import SMALL_WEIGHT, make_projections, pack_weight
from mini_engine.invariant.probe import thread_count
from mini_engine.llm import load_driver, make_engine
from mini_engine.model import Qwen3, rotary_frequencies, rotary_table
from mini_engine.sampler.params import SamplingParams
from tests.conftest import skip_without_bfloat16
from tests.support.shapes import SHAPES, weights_of

NUMBA = EngineConfig(compute="compiled")


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def near(got: np.ndarray, exact: np.ndarray, relative: float = 2e-6) -> None:
    """At most ``relative`` of its row's largest from the float64 result; a NaN is near to nothing."""
    assert got.dtype == np.float32
    gap = np.abs(got.astype(np.float64) - exact)
    assert (gap <= relative * np.abs(exact).max(-1, keepdims=True)).all(), gap.max()


# Each loop


@numba.njit  # not kept on disk: it would outlive a change of what it calls
def exponentials(x, out):
    for i in range(x.shape[0]):
        out[i] = loops.exponential(x[i])


def exponential(x: np.ndarray) -> np.ndarray:
    out = np.full_like(x, np.nan)
    exponentials(x, out)
    return out


def test_the_exponential_is_exact_to_about_a_unit_in_the_last_place_everywhere():
    x = np.concatenate([np.linspace(-87, 88, 1 << 20), np.linspace(-1e-3, 1e-3, 1001)]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(exponential(x) - exact) <= 1.2 * np.spacing(exact.astype(np.float32))).all()


def test_the_exponential_at_the_ends():
    x = np.array([-np.inf, -1e30, -87.1, 0.0, -0.0, 88.1, 1e30, np.inf, np.nan], np.float32)
    got = exponential(x)
    assert got[:5].tolist() == [0, 0, 0, 1, 1]
    np.testing.assert_allclose(got[5:8], np.exp(88.0), rtol=1e-6)
    assert np.isnan(got[8])


ROWS = [(1, 1), (16, 128), (5, 333)]


@pytest.mark.parametrize(("rows", "width"), ROWS)
def test_norms(rows, width):
    x = draw(rows, width)
    residual = draw(rows, width, seed=1)
    weight = draw(width, seed=2)

    def exact(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)

    out = np.full_like(x, np.nan)
    loops.rms_norm(x, weight, 1e-6, out)
    near(out, exact(x.astype(np.float64)))
    total = x + residual
    loops.add_rms_norm(x, residual, weight, 1e-6, out)
    assert np.array_equal(residual, total)
    near(out, exact(total.astype(np.float64)))


@pytest.mark.parametrize(("rows", "width"), ROWS)
def test_silu_and_mul(rows, width):
    gate_up = draw(rows, 2 * width) * 8
    out = np.full((rows, width), np.nan, np.float32)
    loops.silu_and_mul(gate_up, out)
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    exact = gate / (1 + np.exp(-gate)) * up
    assert (np.abs(out - exact) <= 1e-6 * np.abs(exact) + 1e-30).all()


def test_the_rotary_table_is_that_of_the_model():
    positions = torch.tensor([0, 1, 77, 2047, 40_000])
    frequencies = rotary_frequencies(64, 1e6)
    cos, sin = np.empty((2, 5, 32), np.float32)
    loops.rotary_table(positions.numpy(), frequencies.numpy(), cos, sin)
    for got, whole in zip((cos, sin), rotary_table(positions, frequencies, torch.float32), strict=True):
        np.testing.assert_allclose(got, whole[:, :32].numpy(), rtol=0, atol=1e-7)


@pytest.mark.parametrize(("rows", "num_heads", "num_kv_heads", "dim"), [(1, 1, 1, 2), (7, 5, 1, 24)])
def test_heads_are_normed_and_turned(rows, num_heads, num_kv_heads, dim):
    count = num_heads + num_kv_heads
    heads = draw(rows, count + num_kv_heads, dim)
    weights = draw(count, dim, seed=1)
    angles = draw(rows, dim // 2)
    q, k = (np.full((rows, n, dim), np.nan, np.float32) for n in (num_heads, num_kv_heads))
    loops.norm_and_rotate(heads, weights, np.cos(angles), np.sin(angles), 1e-6, q, k)
    x = heads[:, :count].astype(np.float64)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weights
    turned = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * np.exp(1j * angles.astype(np.float64))[:, None]
    exact = np.concatenate([turned.real, turned.imag], -1)
    near(np.concatenate([q, k], 1), exact)


def test_keys_and_values_in_bfloat16_are_rounded_as_torch_rounds_them():
    """Random bits are numbers of every size; then ties, the largest numbers, infinities and NaN."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32)
    edges = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FFFFFFF], np.uint32)
    numbers = np.concatenate([bits, edges]).view(np.float32)[None, None]
    expected = torch.from_numpy(numbers).bfloat16()
    keys, values = np.zeros((2, 1, 1, numbers.size), np.uint16)
    attention_loops.store(numbers, -numbers, keys, values, np.zeros(1, np.int64))
    for got, exact in ((keys, expected), (values, -expected)):
        assert torch.equal(torch.from_numpy(got).view(torch.bfloat16).nan_to_num(7.0), exact.nan_to_num(7.0))


# Products


def product_of(dtype, features, width, monkeypatch, batch_invariant=False):
    """A weight [features, width], a bias, nine rows, the product with them, and a list of the loop's calls."""
    torch.manual_seed(features)
    weight, bias = torch.randn(features, width).to(dtype), torch.randn(features).to(dtype)
    name = str(dtype).removeprefix("torch.")
    engine = EngineConfig(compute="compiled", dtype=name, batch_invariant=batch_invariant)
    calls = []
    multiply = Packed.multiply
    monkeypatch.setattr(Packed, "multiply", lambda *args: calls.append(1) or multiply(*args))
    product = LoopProjections(make_projections(engine)).linear(weight, bias)
    return weight, bias, torch.randn(9, width), product, calls


DTYPES = [torch.float32, torch.bfloat16]
WEIGHTS = [(1, 1), (64, 8), (100, 70), (259, 96), (1100, 515)]  # [out, in]; the last one is packed in float32 too


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("features", "width"), WEIGHTS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_products_are_as_near_to_float64_as_their_roundings_allow(features, width, dtype, batch_invariant, monkeypatch):
    weight, bias, rows, product, calls = product_of(dtype, features, width, monkeypatch, batch_invariant)
    is_small = weight.numel() <= SMALL_WEIGHT
    takes_all = is_small and (batch_invariant or dtype == torch.float32)
    exact = rows.double() @ weight.double().T + bias.double()
    # A product, an addition and all that follow each round by at most 2**-24 of what they return.
    bound = (width + 2) * 2**-24 * (rows.double().abs() @ weight.double().abs().T + bias.double().abs())
    for some in (rows[:1], rows) if takes_all else (rows[:1],):
        got = product(some)
        assert calls or not is_small
        if not calls:
            pytest.skip("a large weight is float32 or invariant, or oneDNN packs it in another order for this CPU")
        assert got.dtype == torch.float32
        assert got.shape == (len(some), features)
        assert ((got.double() - exact[: len(some)]).abs() <= bound[: len(some)]).all()
    if not takes_all:
        near(product(rows).float().numpy(), exact.numpy(), 2e-2)
        assert len(calls) == 1, "several rows are multiplied by oneDNN"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("features", "width"), WEIGHTS[:-1])
def test_a_row_of_a_small_product_has_its_bits_in_every_batch(features, width, dtype, monkeypatch):
    weight, _, rows, product, _ = product_of(dtype, features, width, monkeypatch, batch_invariant=True)
    alone = torch.cat([product(row[None]) for row in rows])
    assert weight.numel() <= SMALL_WEIGHT
    for count in range(1, 10):
        for first in range(10 - count):
            assert torch.equal(product(rows[first : first + count]), alone[first : first + count])
    *_, other, _ = product_of(dtype, features, width, monkeypatch)
    assert torch.equal(other(rows), alone) == (dtype == torch.float32), "the loop has all rows in float32"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_has_the_same_bits_on_any_threads_and_in_any_part(dtype, monkeypatch):
    tiles = compiled_products.make_tiles(torch.randn(500, 300).to(dtype), 304)
    row = torch.randn(1, 300)
    whole = Packed(tiles, NO_STEPS, 500, 304).multiply(row)
    shared = []
    loop = product_loops.multiply_shared
    monkeypatch.setattr(product_loops, "multiply_shared", lambda *args: shared.append(args[-1]) or loop(*args))
    monkeypatch.setattr(compiled_products, "SHARED_FROM", 0)
    for threads in (1, 2, 3, 8, 20):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(Packed(tiles, NO_STEPS, 500, 304).multiply(row), whole)
    assert shared[-4:] == [2, 3, 8, 20]
    assert torch.equal(Packed(tiles[2:], NO_STEPS, 300, 304).multiply(row), whole[:, 128:428])
    rows = Packed(tiles, NO_STEPS, 500, 304).multiply(row.expand(5, -1).contiguous())
    assert torch.equal(rows, whole.expand(5, -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_is_packed_in_another_order_is_left_to_others(dtype):
    skip_without_bfloat16(dtype)
    weight = torch.randn(129, 4000).to(dtype)
    for other in (weight.roll(1, 0), weight.roll(1, 1), weight[:64], torch.cat((weight, weight[:70]))):
        assert compiled_products.find_tiles(pack_weight(other), weight) is None
    assert compiled_products.find_tiles(weight, weight) is None, "large and not packed"


WORDS = numba.types.Array(numba.uint32, 2, "C")
BYTES = numba.types.Array(numba.int8, 2, "C")
HALVES = numba.types.Array(numba.uint16, 2, "C")
PAIRS = numba.types.Array(numba.uint16, 3, "C")
FLOATS = [None, *(numba.types.Array(numba.float32, ndim, "C") for ndim in (1, 2, 3))]  # by number of dimensions
SLOTS = numba.types.Array(numba.uintp, 1, "C")
INTS = numba.types.Array(numba.int64, 1, "C")
LOOPS = (loops, product_loops, attention_loops)
ARGUMENTS = {
    "exponential": [numba.float32],
    "inverse_rms": [FLOATS[1], numba.float64],
    "silu_and_mul": [FLOATS[2], FLOATS[2]],
    "norm_and_rotate": [FLOATS[3], *[FLOATS[2]] * 3, numba.float64, FLOATS[3], FLOATS[3]],
    "score": [FLOATS[2], HALVES, SLOTS, FLOATS[2]],
    "softmax": [FLOATS[1], numba.int64],
    "mix": [FLOATS[2], HALVES, SLOTS, FLOATS[2]],
    "score_block": [FLOATS[2], HALVES, SLOTS, FLOATS[2]],
    "softmax_block": [FLOATS[2], INTS, FLOATS[1]],
    "rounded": [numba.float32],
    "add_up": [FLOATS[1], BYTES, FLOATS[1]],
    "with_two_terms": [numba.float32, FLOATS[1], numba.uint32, numba.int64],
    "add_up_groups": [FLOATS[1], FLOATS[1], WORDS, PAIRS, FLOATS[1]],
    "by_place": [FLOATS[1], FLOATS[1], FLOATS[1]],
    "unpack_tile": [WORDS, PAIRS, WORDS],
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_no_loop_computes_in_float64(name):
    """A whole number times a float32 is a float64 to the compiler: right, and half as fast."""
    (home,) = (each for each in LOOPS if getattr(getattr(each, name, None), "__module__", "") == each.__name__)
    loop = numba.njit(getattr(home, name).py_func)
    loop.compile(tuple(ARGUMENTS[name]))
    (compiled,) = loop.overloads.values()
    types = compiled.type_annotation.typemap.items()
    doubles = {variable for variable, kind in types if "float64" in str(kind) and not variable.startswith("$const")}
    assert doubles <= {"eps", "arg.eps"}


# Attention

CONFIG = ModelConfig(32, 64, 2, 6, 2, 16, 64, 4096, 1e4, 1e-6, True)


def make_pool(num_pages, page_size, dtype=torch.float32):
    torch.manual_seed(0)
    pool = KVPool(CONFIG, num_pages, page_size, dtype)
    pool.poison(list(range(num_pages)))  # what is not this step's own must not be read
    return pool


def scattered(lengths_and_queries, page_size, seed=0):
    """Sequences on pages in any order -> chunks, number of pages."""
    needed = [pages_needed(length, page_size) for length, _ in lengths_and_queries]
    pages = list(range(sum(needed) + 3))
    random.Random(seed).shuffle(pages)
    chunks = []
    for (length, queries), count in zip(lengths_and_queries, needed, strict=True):
        own, pages = pages[:count], pages[count:]
        chunks.append(SequenceChunk([1] * queries, length - queries, own))
    return chunks, sum(needed) + 3


def run_both(lengths_and_queries, page_size, batch_invariant, dtype=torch.float32, num_heads=6):
    """Attend with the plain path and with the loops, on equal pools -> both outputs; the pools end equal.

    The loops' pool is of ``dtype``, and the plain one holds the same numbers.
    """
    chunks, num_pages = scattered(lengths_and_queries, page_size)
    batch = pack_batch(chunks, page_size)
    first, second = make_pool(num_pages, page_size), make_pool(num_pages, page_size, dtype)
    for chunk in chunks:  # what was computed before
        slots = [chunk.pages[p // page_size] * page_size + p % page_size for p in range(chunk.num_computed_tokens)]
        past = torch.randn(2, len(slots), 16).to(dtype)
        for pool in (first, second):
            pool.keys[1][:, slots] = past.to(pool.keys[1].dtype)
            pool.values[1][:, slots] = past.flip(0).to(pool.keys[1].dtype)
    rows = len(batch.input_ids)
    q, k, v = (torch.randn(rows, heads, 16) for heads in (num_heads, 2, 2))
    plain = PagedAttention(first, batch.metadata)(1, q, *(x.to(dtype).float() for x in (k, v)))
    found = CompiledAttention(second, batch.metadata, num_heads, batch_invariant)(1, q, k, v)
    for a, b in zip(first.keys + first.values, second.keys + second.values, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=0, atol=0, equal_nan=True)
    return plain, found


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.sampled_from([1, 1, 1, 2, 9])), min_size=1, max_size=6),
    st.sampled_from([1, 4, 16, 64]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_attention_is_that_of_the_plain_path_for_any_sequences_on_any_pages(wanted, page_size, one_by_one, dtype):
    """In bfloat16 keys and values are rounded once, when they are kept."""
    sequences = [(max(length, queries), queries) for length, queries in wanted]
    plain, found = run_both(sequences, page_size, one_by_one, dtype)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("group", [5, 64, 65])  # a block has 64 rows, those of whole positions
def test_any_number_of_heads_shares_keys(group):
    plain, found = run_both([(30, 20)], 4, False, num_heads=2 * group)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("size", "relative"), [(3, 4e-6), (300, 1e-3)])  # scores of hundreds are rounded by 1e-5
@pytest.mark.parametrize("dim", [20, pytest.param(128, marks=pytest.mark.slow)])
def test_attention_against_float64(dim, size, relative):
    rng = np.random.default_rng(3)
    keys, values = (rng.standard_normal((2, 400, dim)).astype(np.float32) for _ in range(2))
    q = draw(1, 8, dim, seed=4) * np.float32(size)
    for length in (1, 2, 3, 4, 5, 127, 400):
        pages = np.arange(400, dtype=np.int32)[None]
        zero = np.zeros(1, np.int64)
        own = np.array([length])
        slots = attention_loops.find_slots(pages, 1, own)
        alone, block = np.full((2, 1, 8, dim), np.nan, np.float32)
        attention_loops.attend(q, keys, values, (zero, zero, own), slots, alone, 1, 0)
        attention_loops.attend_blocks(q, keys, values, (zero, np.array([0, 1]), own), slots, block, 1, 0)
        for head in range(8):
            own_keys, own_values = (pool[head // 4, :length].astype(np.float64) for pool in (keys, values))
            scores = own_keys @ q[0, head] / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            for out in (alone, block):
                near(out[0, head], weights / weights.sum() @ own_values, relative)


@pytest.mark.parametrize("one_by_one", [True, False])
def test_work_that_is_shared_among_threads_has_the_same_bits(one_by_one, monkeypatch):
    sequences = [(50, 1), (80, 30), (3, 1), (9, 9)]
    monkeypatch.setattr(compiled_attention, "FEW_PRODUCTS", 0)
    used, found = [], []
    for name in ("attend_shared", "attend_blocks_shared"):
        loop = getattr(attention_loops, name)
        spy = lambda *args, loop=loop: used.append(args[-1]) or loop(*args)  # noqa: E731
        monkeypatch.setattr(attention_loops, name, spy)
    for threads in (1, 2, 3):  # of two key-value heads
        monkeypatch.setattr(compiled_attention, "most_threads", lambda threads=threads: threads)
        torch.manual_seed(1)
        found.append(run_both(sequences, 4, one_by_one)[1])
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])
    assert used == ([1, 2, 3] if one_by_one else [1, 1, 2, 2, 3, 3]), "there is one loop for any number of threads"


def test_loops_have_the_threads_that_torch_has():
    """Numba begins with one for each core, and tells OpenMP, whose number is torch's too."""
    program = (
        "import numba, torch\n"
        "from mini_engine import LLM\n"
        "from mini_engine.fast.compiled import products\n"
        "torch.set_num_threads(3)\n"
        "products.SHARED_FROM = 0\n"
        "LLM(compute='compiled').generate(['Once'])\n"
        "print(torch.get_num_threads(), numba.get_num_threads())"
    )
    env = os.environ | {"NUMBA_NUM_THREADS": "5"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "3"]


# Model and engine


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=[pytest.mark.slow] * (i % 2)) for i, shape in enumerate(SHAPES)], ids=str
)
@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}], ids=str)
def test_the_compiled_model_computes_what_the_plain_one_computes(shape, options):
    config, weights = weights_of(shape, "float32")
    engine = EngineConfig(**options, compute="compiled")
    plain = Qwen3(config, dict(weights), make_projections(engine))
    compiled = startup.build_model(config, weights, engine)
    assert type(compiled) is CompiledQwen3
    for tokens in (1, 2, 3, 7, 33, 130):
        ids = torch.randint(0, shape[-1], (tokens,), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            expected, got = (
                m(ids, torch.arange(tokens) + 5, DenseAttention(sdpa_attention)) for m in (plain, compiled)
            )
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}], ids=str)
def test_the_compiled_model_in_bfloat16(options):
    """Against the same weights in float32. One row is not rounded between products where the loop multiplies it."""
    config, weights = weights_of(SHAPES[0], "bfloat16")
    plain = Qwen3(config, {name: weight.float() for name, weight in weights.items()})
    dense = DenseAttention(sdpa_attention)
    in_float32 = lambda layer, q, k, v: dense(layer, q, k, v.float())  # noqa: E731
    compiled = startup.build_model(config, weights, EngineConfig(dtype="bfloat16", compute="compiled", **options))
    for tokens in (1, 2, 7, 130):
        ids = torch.randint(0, SHAPES[0][-1], (tokens,), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            expected, got = (m(ids, torch.arange(tokens) + 5, in_float32) for m in (plain, compiled))
        bound = 2e-5 if tokens == 1 and not options else 3e-2
        torch.testing.assert_close(got, expected, rtol=0, atol=bound * float(expected.abs().max()))


@pytest.mark.slow
def test_no_request_waits_for_the_compiler(monkeypatch):
    """What is compiled when the model is built serves chunks, decoding rows, one row and shared work."""
    found = {name: (home, own) for home in LOOPS for name, own in vars(home).items()}
    names = {name: home for name, (home, own) in found.items() if hasattr(own, "signatures")}
    assert {"attend_shared", "attend_blocks_shared", "rms_norm", "exponential", "multiply", "unpack_shared"} <= set(
        names
    )
    for name, home in names.items():  # other tests may have called them with other types
        options = {"parallel": name.endswith("_shared")}
        monkeypatch.setattr(home, name, numba.njit(**options)(getattr(home, name).py_func))
    monkeypatch.setattr(compiled_attention, "FEW_PRODUCTS", 50_000)
    for batch_invariant, dtype, quantize in (
        (False, "float32", "off"),
        (True, "float32", "int8"),
        (False, "bfloat16", "off"),
        (False, "bfloat16", "int4"),
    ):
        config = EngineConfig(
            compute="compiled", batch_invariant=batch_invariant, dtype=dtype, quantize=quantize, max_running_requests=4
        )
        with thread_count(2):
            driver = load_driver(engine=config)
        before = {name: len(getattr(home, name).signatures) for name, home in names.items()}
        assert before["attend_shared"] == (2 if dtype == "bfloat16" else 1)
        for prompts in ([[1, 2, 3] * 30, [4], [5, 6]], [[7]]):
            make_engine(driver).generate(prompts, SamplingParams(max_new_tokens=4, prompt_logprobs=0))
        assert {name: len(getattr(home, name).signatures) for name, home in names.items()} == before


def test_greedy_answers_are_those_of_torch():
    rng = random.Random(0)
    prompts = [[rng.randrange(1019) for _ in range(rng.randint(1, 200))] for _ in range(40)]
    params = SamplingParams(max_new_tokens=20)
    found = {}
    for changes in ({}, {"compute": "compiled"}):
        engine = make_engine(
            load_driver(engine=EngineConfig(**changes, max_running_requests=32, max_tokens_per_step=512))
        )
        found[str(changes)] = [samples[0].token_ids for samples in engine.generate(prompts, params)]
    plain, compiled = found.values()
    assert compiled == plain


# Options, and where there is no Numba


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"device": "cuda"}, "use compute='reference' there"),
    ],
)
def test_what_the_loops_cannot_do_is_refused_with_the_remedy(changes, remedy):
    with pytest.raises(ValueError, match=remedy):
        EngineConfig(compute="compiled", **changes)


def test_without_numba_the_way_to_it_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("mini_engine.fast.compiled")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numba", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"mini-engine\[compiled\]"):
        load_driver(engine=NUMBA)


ONE_OF_SEVERAL = """
import sys
import time
import numba.core.caching as caching

find_name = caching.IndexDataCacheFile._data_name

def slowly(self, number):
    time.sleep(1)  # the other process looks for a number, too
    return find_name(self, number)

caching.IndexDataCacheFile._data_name = slowly
import kept
kept.double(kept.np.zeros(3, sys.argv[1]))
"""
KEPT = """
import numpy as np
from mini_engine.fast.compiled.loops import compiled

@compiled()
def double(x):
    return x + x
"""


def test_what_several_processes_keep_at_a_time_is_not_mixed_up(tmp_path, monkeypatch):
    (tmp_path / "kept.py").write_text(KEPT)
    monkeypatch.syspath_prepend(tmp_path)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    kinds = ("float32", "float64", "int32")
    running = [subprocess.Popen([sys.executable, "-c", ONE_OF_SEVERAL, kind], env=env) for kind in kinds]
    assert [process.wait(60) for process in running] == [0] * len(kinds)
    (index,) = tmp_path.rglob("*.nbi")
    with index.open("rb") as file:
        pickle.load(file)  # Numba's version
        _, names = pickle.load(file)
    assert {str(key[0][0].dtype) for key in names} == set(kinds)
    for key, name in names.items():
        found = pickle.loads((index.parent / name).read_bytes())
        assert key[0] in [part.args for part in found if hasattr(part, "args")], "the code of another signature"


BITS = """
import hashlib
import numpy as np
from mini_engine.fast.compiled import attention_loops, loops

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 127, 16)).astype(np.float32) for _ in range(3))
lengths, out = np.array([127]), np.empty((127, 2, 16), np.float32)
slots = attention_loops.find_slots(np.arange(127)[None], 1, lengths)
rows = attention_loops.rows_of_short(np.array([0, 127]), lengths, 127)
attention_loops.attend_shared(q.transpose(1, 0, 2).copy(), k, v, rows, slots, out, 2)
x, weight = q.reshape(-1, 254), np.ones(254, np.float32)
loops.add_rms_norm(x, k.reshape(-1, 254), weight, 1e-6, v.reshape(-1, 254))
print(hashlib.sha256(out.tobytes() + v.tobytes()).hexdigest())
"""


def test_a_process_that_compiles_computes_the_bits_of_one_that_loads_what_was_kept(tmp_path):
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = partial(subprocess.run, [sys.executable, "-c", BITS], env=env, capture_output=True, text=True, check=True)
    compiling, loading = run(), run()
    assert compiling.stdout == loading.stdout


CALLER = """
from called import number
from mini_engine.fast.compiled.loops import as_written

@as_written
def caller():
    return number()
"""
CALLED = """
from mini_engine.fast.compiled.loops import as_written

@as_written
def number():
    return {}
"""


def test_a_loop_is_compiled_again_when_a_file_of_what_it_calls_has_changed(tmp_path):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    (tmp_path / "caller.py").write_text(CALLER)
    for number in (1, 22):
        (tmp_path / "called.py").write_text(CALLED.format(number))
        run = [sys.executable, "-c", "from caller import caller; print(caller())"]
        assert subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout == f"{number}\n"


def test_loops_compile_where_nothing_can_be_kept(monkeypatch):
    monkeypatch.setattr(CompileResultCacheImpl, "_locator_classes", [])
    double = loops.compiled("contract")(lambda x: x * 2)
    assert double(3) == 6


# Benchmarks


def test_benchmarks_run_without_numba_and_say_what_they_leave_out(monkeypatch, capsys):
    monkeypatch.setattr(bench_machine, "find_spec", lambda name: None)
    without = ["off", "packed", "fast", "invariant", "packed+invariant"]
    assert bench_machine.names_in("float32", forward.SYSTEMS) == without
    assert capsys.readouterr().out == "left out, as Numba is not installed: compiled, compiled+invariant\n"
