"""A model in parts gives the logits of the whole, to the bit, or says by name what this machine cannot keep.

The ranks are threads here. What one rank gives is compared with transformers in ``tests/equivalence``.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.checkpoint import TINY_MODEL, load_config
from mini_engine.cli.quantize import write
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.families import FAMILIES
from mini_engine.fast import quantized_products
from mini_engine.fast.products import SMALL_WEIGHT, onednn_fault
from mini_engine.fast.quantized_products import Int8, QuantizedProjections
from mini_engine.llm import build_model, load_model, make_driver
from mini_engine.ranks import checks
from mini_engine.ranks.checks import needs_padding
from mini_engine.ranks.split import check_size
from tests.conftest import skip_without_bfloat16
from tests.equivalence.test_families import draw
from tests.support.engines import _one_thread  # noqa: F401
from tests.support.ranks import ThreadRanks, at_each_rank, part_of
from tests.support.shapes import teacher_forced

IDS = [(7 * i * i + 3 * i) % 131 for i in range(160)]
REFUSED = "tensor_parallel=[24] cannot keep the bits of one rank on this CPU .* differ; set batch_invariant=True"


def shape_of(family: str, number: int = 1, **changes: Any) -> ModelConfig:
    """The configuration of a random model of a family, with sizes that four ranks can share."""
    drawn = draw(family, number)
    raw = drawn.to_dict() | {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "vocab_size": 131}
    raw |= {"intermediate_size": 128, "moe_intermediate_size": 64, "shared_intermediate_size": 64}
    if raw.get("head_dim") is not None:
        raw["head_dim"] = 24 if family == "qwen3" else 8
    return ModelConfig.from_hf({**raw, **changes})


def weights_of(config: ModelConfig, dtype: str) -> dict[str, Tensor]:
    """Random weights, norms near 1."""
    generator = torch.Generator().manual_seed(3)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in config.weight_shapes().items()}
    scaled = {name: x.mul(0.2).add(1) if "norm" in name else x.mul(0.15) for name, x in drawn.items()}
    return {name: x.to(getattr(torch, dtype)) for name, x in scaled.items()}


def check_parts(config: ModelConfig, engine: EngineConfig, size: int, prompt: int = 30) -> bool:
    """Compare all logits of a prompt and of tokens after it. Return whether the machine can keep the bits."""
    weights = weights_of(config, engine.dtype)

    def logits(model: Any) -> Tensor:
        return teacher_forced(make_driver(model, engine), IDS[: prompt + 6], prompt)

    expected = logits(build_model(config, {name: x.clone() for name, x in weights.items()}, engine))
    try:
        results, _ = at_each_rank(size, lambda ranks: logits(part_of(config, weights, engine, ranks)))
    except ValueError as error:
        if engine.batch_invariant or not re.match(REFUSED, str(error)):
            raise
        return False
    assert torch.equal(results[0], expected)
    return True


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("compute", ["reference", "packed", "fast"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_have_the_bits_of_the_whole(dtype: str, compute: str, batch_invariant: bool, size: int) -> None:
    skip_without_bfloat16(dtype)
    engine = EngineConfig(dtype=dtype, compute=compute, batch_invariant=batch_invariant)  # type: ignore[arg-type]
    check_parts(shape_of("qwen3"), engine, size)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_part_is_multiplied_in_the_way_of_the_whole(batch_invariant: bool) -> None:
    """Which a part alone would not be: ``down_proj`` is large and a quarter of it small."""
    config = shape_of("qwen3", hidden_size=256, intermediate_size=1024)
    assert config.hidden_size * config.intermediate_size // 4 <= SMALL_WEIGHT < config.hidden_size * 1024
    engine = EngineConfig(compute="packed", batch_invariant=batch_invariant)
    kept = check_parts(config, engine, 4)
    if kept and onednn_fault(torch.float32) is None:
        weights = weights_of(config, "float32")
        models, _ = at_each_rank(4, lambda ranks: part_of(config, weights, engine, ranks))
        (way,) = {way for shape, way in models[1].projections.choices.items() if " x 1024 " in shape}
        assert way.split(",")[0] == "packed" or batch_invariant
        if batch_invariant:
            assert models[1].projections.choices == build_model(config, weights, engine).projections.choices


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_split(family: str, batch_invariant: bool, size: int) -> None:
    for number in (1, 2):
        for compute in ("reference", "packed"):
            config = shape_of(family, number, tie_word_embeddings=number == 1)
            engine = EngineConfig(compute=compute, batch_invariant=batch_invariant)  # type: ignore[arg-type]
            check_parts(config, engine, size)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_rounded_weights_can_be_split(family: str, quantize: str, batch_invariant: bool) -> None:
    engine = EngineConfig(compute="packed", quantize=quantize, batch_invariant=batch_invariant)  # type: ignore[arg-type]
    check_parts(shape_of(family), engine, 2)


def test_a_folder_of_rounded_weights_is_read_in_parts(tmp_path: Path) -> None:
    write(TINY_MODEL, tmp_path, EngineConfig(quantize="int4"))
    engine = EngineConfig(batch_invariant=True, tensor_parallel=2)

    def logits(model: Any) -> Tensor:
        return teacher_forced(make_driver(model, engine), IDS[:36], 30)

    expected = logits(load_model(tmp_path, EngineConfig(batch_invariant=True)))
    results, _ = at_each_rank(2, lambda ranks: logits(load_model(tmp_path, engine, False, ranks)))
    assert torch.equal(results[0], expected)


def test_a_rank_reads_its_own_bytes_alone() -> None:
    """Half of every matrix, and all vectors."""
    engine = EngineConfig(batch_invariant=True, tensor_parallel=2)
    models, _ = at_each_rank(2, lambda ranks: load_model(TINY_MODEL, engine, False, ranks))
    shapes = load_config(TINY_MODEL).weight_shapes().values()
    expected = sum(4 * (shape[0] if len(shape) == 1 else shape[0] * shape[1] // 2) for shape in shapes)
    assert [model.projections.num_bytes for model in models] == [expected, expected]
    assert models[0].embedding.weight.shape == (512, 128)


@pytest.mark.parametrize(("sums", "of_layer"), [(False, 4), (True, 2)])
def test_a_layer_needs_four_exchanges_or_two_sums(sums: bool, of_layer: int) -> None:
    config, engine = shape_of("qwen3"), EngineConfig(batch_invariant=not sums)
    weights = weights_of(config, "float32")

    def logits(model: Any) -> Tensor:
        return teacher_forced(make_driver(model, engine), IDS[:30], 30)

    expected = logits(build_model(config, dict(weights), engine))
    (first, *_), board = at_each_rank(4, lambda ranks: logits(part_of(config, weights, engine, ranks, sums)))
    assert board.num_exchanges == of_layer * config.num_hidden_layers + 2  # and the table of embeddings, and the head
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, "tensor_parallel is 3, which does not divide .*num_attention_heads 8.*; choose one of 1, 2, 4, 8$"),
        ({"num_key_value_heads": 8}, 16, "choose one of 1, 2, 4, 8$"),
        ({"intermediate_size": 130}, 4, "intermediate_size 130.*; choose one of 1, 2$"),
        ({"hidden_size": 66}, 4, "hidden_size 66.*; choose one of 1, 2$"),
    ],
)
def test_a_number_that_does_not_divide_a_model_is_refused(changes: Any, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_size(size, shape_of("qwen3", **changes))


def other_order_if_few(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A library that adds up in another order where a matrix has fewer than 64 rows."""
    total = torch.zeros(len(x), len(weight)) if bias is None else bias.expand(len(x), -1).clone()
    terms = range(x.shape[1])
    for k in terms if len(weight) >= 64 else reversed(terms):
        total += x[:, k, None] * weight[:, k]
    return total


def test_a_small_product_that_differs_is_computed_as_the_whole_and_a_large_one_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path))
    monkeypatch.setattr(F, "linear", other_order_if_few)
    config, engine = shape_of("qwen3", num_key_value_heads=4), EngineConfig()
    assert config.kv_size // 2 < 64
    assert check_parts(config, engine, 2)
    monkeypatch.setattr(checks, "SMALL_WEIGHT", 0)
    assert not check_parts(config, engine, 2)
    with pytest.raises(ValueError, match=r"rows in a product with \d+ of \d+ x 64 float32 by TorchProjections differ"):
        at_each_rank(2, lambda ranks: part_of(config, weights_of(config, "float32"), engine, ranks))


@pytest.mark.parametrize(("quantize", "stored"), [("int8", Tensor.clone), ("int4", Int8.of)])
def test_products_of_rounded_rows_are_tried_as_they_are_stored_and_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quantize: str, stored: Any
) -> None:
    """A head has 8 bits, also with "int4". Only without ``batch_invariant`` are many rows not the kernel's."""
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path))
    monkeypatch.setattr(quantized_products, "linear_int8", lambda x, ids, _: torch.full((len(x), len(ids)), len(ids)))
    part = stored(torch.ones(32, 64))
    assert not needs_padding(QuantizedProjections(quantize, True), part, 64, 2)
    other = QuantizedProjections(quantize, False)
    if isinstance(part, Tensor):
        assert needs_padding(other, part, 64, 2)
    else:
        with pytest.raises(ValueError, match=r"32 of 64 x 64 float32 by .* of Int8 to int4, .*=False differ"):
            needs_padding(other, part, 64, 2)


def test_an_activation_or_an_attention_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path / "one"))
    config, engine = shape_of("qwen3"), EngineConfig()
    weights = weights_of(config, "float32")

    def load(ranks: ThreadRanks) -> None:
        make_driver(part_of(config, weights, engine, ranks), engine)

    with monkeypatch.context() as patch:
        patch.setattr(F, "silu", lambda x: torch.sigmoid(x) * x + x.shape[-1] * 1e-9)
        with pytest.raises(ValueError, match="rows in SiLU of 64 of 128 columns in float32 differ"):
            at_each_rank(2, load)
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path / "other"))
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *a, **k: attend(q, *a, **k) + q.shape[1] * 1e-9)
    with pytest.raises(ValueError, match="heads in attention with PagedAttention, 4 heads over 1 of 8 heads over 2"):
        at_each_rank(2, load)
