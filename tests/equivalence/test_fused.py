"""What ``compute="packed"`` puts beside the plain path: the fused model and attention without copies, each against its
oracle, and both against transformers."""

import copy
import weakref

import pytest
import torch
from torch import Tensor

from mini_engine.attention.dense import DenseAttention, sdpa_attention
from mini_engine.attention.metadata import SequenceChunk, pack_batch
from mini_engine.attention.paged import PagedAttention
from mini_engine.attention.pool import KVPool
from mini_engine.config import EngineConfig
from mini_engine.driver import GreedyDriver
from mini_engine.fast import products
from mini_engine.fast.attention.consecutive import ConsecutiveAttention
from mini_engine.fast.attention.ragged import StepCache, first_slots, grouped_attention
from mini_engine.fast.fused import FusedQwen3
from mini_engine.fast.products import make_projections
from mini_engine.linear import Linear, TorchProjections
from mini_engine.llm import build_model, load_model, make_driver
from mini_engine.model import Qwen3
from mini_engine.viz.forward.measure import trace_forward
from tests.conftest import skip_without_bfloat16
from tests.support.shapes import (
    SHAPES,
    peer,
    peer_logits,
    teacher_forced,
    weights_of,
)


def models(shape: tuple[int, ...], engine: EngineConfig) -> tuple[Qwen3, Qwen3]:
    """The plain and the fused model over the same projections."""
    config, weights = weights_of(shape, engine.dtype)
    return Qwen3(config, dict(weights), make_projections(engine)), build_model(config, weights, engine)


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_fused_model_computes_what_the_plain_one_computes(
    shape: tuple[int, ...], dtype: str, batch_invariant: bool
) -> None:
    engine = EngineConfig(dtype=dtype, compute="packed", batch_invariant=batch_invariant)
    plain, fused = models(shape, engine)
    assert type(fused) is FusedQwen3
    generator = torch.Generator().manual_seed(1)
    for tokens in (1, 2, 3, 7, 33, 130):
        ids = torch.randint(0, shape[-1], (tokens,), generator=generator)
        positions = torch.arange(tokens) + 5
        for rows in (None, torch.tensor([tokens - 1])):
            with torch.inference_mode():
                expected, got = (m(ids, positions, DenseAttention(sdpa_attention), rows) for m in (plain, fused))
            if dtype == "bfloat16":
                assert torch.equal(got, expected), f"{tokens} tokens"
            close(got, expected)


class DoubleProjections(TorchProjections):
    """Products in float64, rounded once: a row of a stacked matrix gives the same float32 as a row of its own."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        wide = weight.double()
        return lambda x: (x.double() @ wide.T).to(x.dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_products_may_round_otherwise_in_the_fused_model(shape: tuple[int, ...], dtype: str) -> None:
    """With products that do not depend on the size of the matrix, float32 keeps every bit too.

    SiLU of gates that lie in the stacked rows changed bits: its vector loop then ends, with a scalar tail, at every
    row instead of once.
    """
    config, weights = weights_of(shape, dtype)
    plain = Qwen3(config, dict(weights), DoubleProjections())
    fused = FusedQwen3(config, weights, DoubleProjections())
    for tokens in (1, 2, 7, 33, 130):
        ids = torch.randint(0, shape[-1], (tokens,), generator=torch.Generator().manual_seed(tokens))
        with torch.inference_mode():
            got, expected = (m(ids, torch.arange(tokens) + 5, DenseAttention(sdpa_attention)) for m in (fused, plain))
        assert torch.equal(got, expected), f"{tokens} tokens"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_prefill_and_decode_beside_transformers(shape: tuple[int, ...], dtype: str) -> None:
    """In bfloat16 the very bits; in float32 the values, and so the greedy ids of a model without near-ties."""
    engine = EngineConfig(dtype=dtype, compute="packed")
    driver = make_driver(build_model(*weights_of(shape, dtype), engine), engine)
    ids = torch.randint(0, shape[-1], (90,), generator=torch.Generator().manual_seed(2)).tolist()
    got = teacher_forced(driver, ids, 60)
    expected = peer_logits(peer(shape, dtype), ids, 60)
    if dtype == "bfloat16":
        assert torch.equal(got, expected)
    close(got, expected)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_tensor_that_was_stacked_or_packed_stays_alive(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_bfloat16(dtype)  # nothing is packed there
    monkeypatch.setattr(products, "find_way", lambda *_: "packed")
    engine = EngineConfig(dtype=dtype, compute="packed")
    config, weights = weights_of((1024, 8, 8, 128, 1152, 64), dtype)
    originals = {name: weakref.ref(w) for name, w in weights.items() if "proj" in name}
    model = build_model(config, weights, engine)
    assert weights == {}
    assert [name for name, original in originals.items() if original() is not None] == []
    assert model.layers == []


# --------------------------------------------------------------------------------------------- attention without copies


def chunk(new: int, cached: int, pages: list[int]) -> SequenceChunk:
    return SequenceChunk([0] * new, cached, pages)


@pytest.mark.parametrize("kernel", [sdpa_attention, grouped_attention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reading_a_view_gives_the_bits_of_reading_a_copy(shape, dtype, kernel) -> None:
    """A ragged batch of a decode, a middle chunk, a sequence on scattered pages and a whole prompt."""
    torch.manual_seed(3)
    _, heads, kv_heads, head_dim, _, _ = shape
    config, _ = weights_of(shape, "float32")
    pool = KVPool(config, 60, 5, dtype)
    pool.poison(list(range(60)))
    chunks = [chunk(1, 147, list(range(3, 33))), chunk(9, 4, [40, 41, 42]), chunk(3, 0, [50]), chunk(2, 4, [52, 47])]
    batch = pack_batch([*chunks, chunk(7, 0, [58, 59])], 5)
    assert first_slots(batch.metadata) == [15, 200, 250, None, 290]
    for layer in range(config.num_hidden_layers):
        for tensor in (pool.keys[layer], pool.values[layer]):
            for first, count in ((15, 147), (200, 4), (260, 4)):
                tensor[:, first : first + count] = torch.randn(kv_heads, count, head_dim).to(dtype)
    ours = copy.deepcopy(pool)
    theirs = pool
    for layer in range(config.num_hidden_layers):
        q, k, v = (torch.randn(22, n, head_dim).to(dtype) for n in (heads, kv_heads, kv_heads))
        got = ConsecutiveAttention(StepCache(ours, batch.metadata), kernel)(layer, q, k, v)
        expected = PagedAttention(theirs, batch.metadata, kernel)(layer, q, k, v)
        assert not expected.isnan().any()
        assert torch.equal(got, expected)
        assert torch.equal(ours.keys[layer].nan_to_num(), theirs.keys[layer].nan_to_num())
        assert torch.equal(ours.values[layer].nan_to_num(), theirs.values[layer].nan_to_num())


def test_a_sequence_is_viewed_only_where_its_pages_follow_one_another() -> None:
    def first(*chunks: SequenceChunk) -> list[int | None]:
        return first_slots(pack_batch(chunks, 4).metadata)

    assert first(chunk(1, 8, [4, 5, 6])) == [16]
    assert first(chunk(1, 8, [4, 6, 5])) == [None]
    assert first(chunk(1, 8, [6, 5, 4])) == [None]
    assert first(chunk(2, 0, [9]), chunk(1, 8, [4, 5, 7])) == [36, None]
    # A page that holds no token of the sequence yet does not matter, and neither does padding of the table.
    assert first(chunk(1, 7, [4, 5, 1]), chunk(3, 0, [2])) == [16, 8]


def test_each_option_gets_its_own_model_and_attention(untied) -> None:
    """Off is the plain path; packed is the fast one where it applies."""
    together, scattered = (pack_batch([chunk(1, 8, pages)], 4) for pages in ([0, 1, 2], [0, 2, 1]))
    for engine, model, attention in (
        (EngineConfig(), Qwen3, PagedAttention),
        (EngineConfig(compute="packed"), FusedQwen3, ConsecutiveAttention),
        (EngineConfig(compute="fast"), FusedQwen3, ConsecutiveAttention),
    ):
        driver = make_driver(load_model(untied, engine), engine)
        pool = KVPool(driver.model.config, 3, 4, torch.float32)
        assert type(driver.model) is model
        assert type(driver.make_attention(pool, together.metadata)) is attention
        kernel = grouped_attention if engine.compute == "fast" else sdpa_attention
        assert driver.make_attention(pool, together.metadata).kernel is kernel
        assert type(driver.make_attention(pool, scattered.metadata)) is attention


@pytest.mark.parametrize("options", [{"batch_invariant": True}, {"compute": "fast"}], ids=str)
def test_a_driver_refuses_options_that_the_attention_it_has_does_not_compute(untied, options) -> None:
    engine = EngineConfig(**options)
    with pytest.raises(ValueError, match=r"need an attention of their own; build the driver with .*make_driver"):
        GreedyDriver(load_model(untied, engine), engine)


def test_a_fused_model_has_no_blocks_to_trace(untied) -> None:
    with pytest.raises(ValueError, match="load it with compute='reference'"):
        trace_forward(load_model(untied, EngineConfig(compute="packed")), [1, 2, 3])
