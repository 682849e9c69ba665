"""Quantized weights in a folder, so that they are rounded once. ``mini-engine quantize`` writes one.

In ``model.safetensors`` a matrix NAME is ``NAME.ids`` and ``NAME.scales``. With 4 bits there is ``NAME.zeros``, too,
and a byte has two ids. ``config.json`` says what was rounded and how, and so does the header of the weights.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mini_engine.checkpoint import SINGLE_FILE, read_json
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.fast.quantized import GROUP
from mini_engine.fast.quantized_products import IN_8_BITS, KINDS, Int8, Nibbles
from mini_engine.hf_files import OWN_METHOD
from mini_engine.weights import Index, opened


def form_of(name: str, kind: str) -> type[Int8] | type[Nibbles]:
    """Return how the matrix ``name`` is stored."""
    return Int8 if kind == "int8" or name.endswith(IN_8_BITS) else Nibbles


def stored(name: str, tensor: Tensor, kind: str) -> dict[str, Tensor]:
    """Return the tensors that stand for the weight ``name`` in a file. Raises ``ValueError`` if it is not finite."""
    if tensor.dim() == 1:
        return {name: tensor}
    return {f"{name}.{part}": own for part, own in form_of(name, kind).of(tensor).tensors().items()}


def stored_shapes(name: str, shape: tuple[int, ...], kind: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of these tensors for a weight of ``shape``."""
    if len(shape) == 1:
        return {name: shape}
    count, groups = shape[0], -(-shape[1] // GROUP)
    if form_of(name, kind) is Int8:
        return {f"{name}.ids": (count, groups * GROUP), f"{name}.scales": (count,)}
    steps = (count, groups)
    return {f"{name}.ids": (count, groups * GROUP // 2), f"{name}.scales": steps, f"{name}.zeros": steps}


@dataclass
class QuantizedFile:
    """The weights of such a folder. Each is read when it is asked for, and not kept.

    ``pieces``: what is read of some matrices, rows of them.
    """

    file: Path
    shapes: dict[str, tuple[int, ...]]  # of the weights that are not given away yet
    kind: str
    dtype: torch.dtype
    pieces: Mapping[str, Index] = field(default_factory=dict)

    def pop(self, name: str, /) -> Any:
        """Give a weight away: a matrix is ``Int8`` or ``Nibbles``. Raises ``KeyError`` if it is not there."""
        shape = self.shapes.pop(name)
        piece = self.pieces.get(name, ())
        with opened(self.file) as tensors:
            parts = [tensors.get_tensor(part)[piece].clone() for part in stored_shapes(name, shape, self.kind)]
        own = [part.to(self.dtype) if part.is_floating_point() else part for part in parts]
        return own[0] if len(shape) == 1 else form_of(name, self.kind)(*own, shape[1])  # type: ignore[call-arg]


def open_quantized(folder: Path, model: ModelConfig, engine: EngineConfig) -> tuple[QuantizedFile, EngineConfig] | None:
    """Return the weights in ``folder`` and ``engine`` with their ``quantize``; ``None`` if they are not quantized.

    Raises ``ValueError`` if ``engine`` asks for another ``quantize`` or dtype, and naming file and tensor for a file
    that was made of other weights than ``config.json`` says, that lacks a tensor, or has another or of another shape.
    """
    facts = read_json(folder / "config.json").get("quantization_config")
    if facts is None:
        return None
    file, kind, dtype = folder / SINGLE_FILE, facts.get("kind"), facts.get("dtype")
    with opened(file) as tensors:
        if kind not in KINDS or (tensors.metadata() or {}).get(OWN_METHOD) != json.dumps(facts, sort_keys=True):
            raise ValueError(f"{file} was not made of what config.json says; copy both files, or quantize it again")
        found = {name: tuple(tensors.get_slice(name).get_shape()) for name in list(tensors.keys())}
    if engine.quantize not in ("off", kind):
        raise ValueError(f"{folder} is quantized to {kind!r} and quantize is {engine.quantize!r}; leave quantize out")
    if dtype == "float32" != engine.dtype:
        raise ValueError(f"{folder} is quantized in {dtype!r} and dtype is {engine.dtype!r}; set dtype={dtype!r}")
    shapes = model.weight_shapes()
    expected = {part: own for name in shapes for part, own in stored_shapes(name, shapes[name], kind).items()}
    for name in sorted(found | expected):
        if found.get(name) != expected.get(name):
            asked = f"config.json asks for {expected.get(name)}"
            raise ValueError(f"{file}: {name} has shape {found.get(name)}, {asked}; quantize the model again")
    return QuantizedFile(file, shapes, kind, getattr(torch, engine.dtype)), replace(engine, quantize=kind)
