"""Round weights of the embedded model, let it compute with some of them rounded, and count what a step reads."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from mini_engine.attention.dense import DenseAttention, sdpa_attention
from mini_engine.checkpoint import TINY_MODEL, load_config, load_tokenizer, load_weights
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.families import EMBEDDING
from mini_engine.fast import quantized
from mini_engine.linear import TorchProjections
from mini_engine.model import Qwen3
from mini_engine.tiny import corpus

FORMATS = {"bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 4 / quantized.GROUP}  # bytes of a weight with its group's steps
EVERYTHING = "all of them"


def stored_weights() -> dict[str, Tensor]:
    """Return the weights of the embedded model by name, in float32."""
    config = load_config(TINY_MODEL)
    stored = load_weights(TINY_MODEL, config, EngineConfig())
    return {name: stored.pop(name) for name in config.weight_shapes()}


def row_of(name: str, row: int, count: int) -> Tensor:
    """Return the first ``count`` numbers of a row of the matrix ``name`` as a matrix [1, count]."""
    return stored_weights()[name][row : row + 1, :count].clone()


def row_values(row: Tensor) -> dict[str, tuple[Tensor, list[list[float]]]]:
    """Round a row [1, K] to 4 bits in two ways: title -> the values [K], and the levels of each group."""
    step = float(row.abs().max()) / 7
    alone = (row[0] / step).round() * step
    ids, scales, zeros = quantized.quantize_int4(row)
    levels = [
        [float(zero + (place - quantized.MIDDLE) * scale) for place in range(16)]
        for scale, zero in zip(scales[0], zeros[0], strict=True)
    ]
    return {
        "one scale for the row": (alone, [[step * place for place in range(-7, 8)]]),
        "a scale and a zero point for 32 columns": (quantized.dequantize_int4(ids, scales, zeros)[0], levels),
    }


@dataclass(frozen=True)
class GroupError:
    """``error``: of 4 bits, root mean square, as a share of that of the weights; ``num_bytes``: of a weight."""

    error: float
    num_bytes: float


def group_errors(weights: Mapping[str, Tensor], sizes: Sequence[int]) -> dict[int, GroupError]:
    """Round all matrices of ``weights`` to 4 bits in groups of each of ``sizes`` columns, which divide their rows."""
    matrices = [weight for weight in weights.values() if weight.dim() == 2]
    total = sum(float(weight.double().square().sum()) for weight in matrices)
    found = {}
    for size in sizes:
        with patch.object(quantized, "GROUP", size):
            lost = sum(float((rounded(weight) - weight).double().square().sum()) for weight in matrices)
        found[size] = GroupError((lost / total) ** 0.5, 0.5 + 4 / size)
    return found


def rounded(weight: Tensor) -> Tensor:
    """Return what ``weight`` becomes in 4 bits."""
    return quantized.dequantize_int4(*quantized.quantize_int4(weight))


def texts(count: int) -> list[list[int]]:
    """Return ``count`` stories and as many records with names that training never saw, as token ids."""
    tokenizer, dice = load_tokenizer(TINY_MODEL), random.Random("texts")
    makers = (corpus.story_task, corpus.record_task)
    tasks = [make(dice, held_out=True) for make in makers for _ in range(count)]
    return [tokenizer.encode(f"{task.prompt}\n{task.answer}", add_special_tokens=False) for task in tasks]


@torch.inference_mode()
def logprobs(config: ModelConfig, weights: Mapping[str, Tensor], rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the log-probabilities [all tokens, V] after every token, in float64."""
    own: Any = dict(weights)
    model, attention = Qwen3(config, own, TorchProjections()), DenseAttention(sdpa_attention)
    logits = [model(torch.tensor(ids), torch.arange(len(ids)), attention) for ids in rows]
    return torch.cat(logits).double().log_softmax(-1)


def kl_by_part(count: int) -> dict[str, float]:
    """Return how far next tokens' distributions move, in nats, if one part of the model is rounded to 4 bits alone.

    Parts: the table, which is the head as well; each layer; and all of them. ``count``: of stories, and of records.
    """
    config, weights, rows = load_config(TINY_MODEL), stored_weights(), texts(count)
    parts = {"table and head": EMBEDDING} | {f"layer {i + 1}": f".layers.{i}." for i in range(config.num_hidden_layers)}
    exact = logprobs(config, weights, rows)
    found = {}
    for part, mark in (parts | {EVERYTHING: ""}).items():
        own = {name: rounded(each) if each.dim() == 2 and mark in name else each for name, each in weights.items()}
        found[part] = float((exact.exp() * (exact - logprobs(config, own, rows))).sum(-1).mean())
    return found


@dataclass(frozen=True)
class Product:
    """The products of a step: ``rows`` rows, ``num_bytes`` of weights, two operations for a row and a weight."""

    rows: int
    num_weights: int
    num_bytes: float

    @property
    def intensity(self) -> float:
        """Operations for each byte that is read."""
        return 2 * self.rows * self.num_weights / self.num_bytes


def step_bytes(config: ModelConfig, steps: Mapping[str, tuple[str, int]]) -> dict[str, Product]:
    """Return the products of steps of a model. ``steps``: title -> a format of ``FORMATS`` and the number of rows.

    The head has 8 bits where the other matrices have 4, as in the engine. The table is not multiplied.
    """
    shapes = {name: shape for name, shape in config.weight_shapes().items() if len(shape) == 2}
    head = shapes[EMBEDDING][0] * shapes[EMBEDDING][1]
    others = sum(out * columns for name, (out, columns) in shapes.items() if ".layers." in name)
    found = {}
    for title, (kind, rows) in steps.items():
        size = others * FORMATS[kind] + head * max(FORMATS[kind], FORMATS["int8"])
        found[title] = Product(rows, others + head, size)
    return found
