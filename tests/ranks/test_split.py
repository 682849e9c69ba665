"""A model in parts gives the logits of the whole, to the bit, or says by name what this machine cannot keep.

The ranks are threads here. What one rank gives is compared with transformers in ``tests/equivalence``.
"""

import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine import linear
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.families import FAMILIES
from mini_engine.llm import build_model, make_driver
from mini_engine.ranks import checks
from mini_engine.ranks.split import Split, divides
from tests.conftest import skip_without_bfloat16
from tests.equivalence.test_families import draw
from tests.support.engines import _one_thread  # noqa: F401
from tests.support.ranks import Board, ThreadRanks, at_each_rank, part_of
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
        if engine.batch_invariant and engine.dtype == "float32":
            raise
        with pytest.raises(ValueError, match=REFUSED):
            raise
        return bool(error) and False
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


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_split(family: str, batch_invariant: bool, size: int) -> None:
    for number in (1, 2):
        for compute in ("reference", "packed"):
            config = shape_of(family, number, tie_word_embeddings=number == 1)
            check_parts(config, EngineConfig(compute=compute, batch_invariant=batch_invariant), size)  # type: ignore[arg-type]
