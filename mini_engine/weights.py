"""Where the tensors of a model come from: a dictionary, or files that are read one tensor at a time.

A model stores the tensors of a layer in its own way, and then the originals are let go before the next layer is read.
So memory holds the model and one layer, not the model twice. ``families.py`` says what a layer has.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from mini_engine.config import ModelConfig
from mini_engine.device import give_memory_back
from mini_engine.families import FINAL_NORM, HEAD

Index = tuple[int | slice | Tensor, ...]  # () is the whole tensor
MUCH = 1 << 28  # bytes of weights; what fewer leave behind is not worth asking the system


class Weights(Protocol):
    """What a model is built from. A dictionary of tensors is one."""

    def pop(self, name: str, /) -> Tensor:
        """Give the tensor ``name`` away. Raises ``KeyError`` if it is not there, or no longer."""


class Matrix(NamedTuple):
    """A weight matrix and the bias that its product adds, if there is one."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]


def stacked(*matrices: Matrix) -> Matrix:
    """Stack matrices [out, in] of the same rows -> [sum of out, in]. If only some have a bias, that of others is 0."""
    weight = torch.cat([own.weight for own in matrices])
    bias = next((own.bias for own in matrices if own.bias is not None), None)
    if bias is None:
        return Matrix(weight)
    biases = [bias.new_zeros(own.weight.shape[0]) if own.bias is None else own.bias for own in matrices]
    return Matrix(weight, torch.cat(biases))


NO_VECTOR = torch.empty(0)
NO_MATRIX: Any = None


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """The tensors of one decoder layer, as a checkpoint stores them. Every form of the model is made of these.

    A vector that a family does not have has no elements, and a matrix is ``None``. The last two fields are those of a
    layer with E MLPs that each have gate and up in one matrix; it has no ``gate_proj``, ``up_proj`` and ``down_proj``.
    Without a ``router`` E is 1.
    """

    input_norm: Tensor  # [H]
    q_proj: Matrix  # [Hq * D, H]
    k_proj: Matrix  # [Hkv * D, H]
    v_proj: Matrix  # [Hkv * D, H]
    q_norm: Tensor = NO_VECTOR  # [D], one for all query heads, or [Hq * D]
    k_norm: Tensor = NO_VECTOR  # [D] or [Hkv * D]
    o_proj: Matrix  # [H, Hq * D]
    post_attention_norm: Tensor  # [H]
    gate_proj: Matrix = NO_MATRIX  # [F, H]
    up_proj: Matrix = NO_MATRIX  # [F, H]
    down_proj: Matrix = NO_MATRIX  # [H, F]
    router: Matrix = NO_MATRIX  # [E, H]
    experts: Sequence[tuple[Matrix, Matrix]] = ()  # E times [2 F, H], gate and up, and [H, F], down


def take_layer(weights: Weights, config: ModelConfig, layer: int) -> LayerWeights:
    """Take what the family of ``config`` has in layer number ``layer``. Raises ``KeyError`` for a tensor not there."""
    taken = dict[str, Any]()
    for field_name, part in config.family.parts.items():
        each = [{kind: weights.pop(name) for kind, name in names.items()} for names in config.names(part, layer)]
        made = [Matrix(**tensors) if len(part.shape) > 1 else tensors["weight"] for tensors in each]
        taken[field_name] = made if part.is_of_expert else made[0]
    if "router" in taken:
        matrices = zip(*(taken.pop(f"expert_{name}") for name in ("gates", "ups", "downs")), strict=True)
        taken["experts"] = [(stacked(gate, up), down) for gate, up, down in matrices]
    elif "gate_up_proj" in taken:
        taken["experts"] = [(taken.pop("gate_up_proj"), taken.pop("down_proj"))]
    return LayerWeights(**taken)


@contextmanager
def opened(file: Path) -> Iterator[safe_open]:
    """Map a safetensors file into memory; its tensors are read where they are used. Raises ``ValueError`` naming it."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read ({error}); it may be truncated, download it again") from error


@dataclass
class StoredWeights:
    """The tensors of a checkpoint, in one dtype on one device. Each is read when it is asked for, and not kept.

    ``places``: the file of each tensor, a name there, and where in the tensor of that name it is. ``bar`` counts the
    tensors that were given away, and ``num_bytes`` their bytes. ``pieces``: what is read of some tensors; of others
    all is.
    """

    places: dict[str, tuple[Path, str, Index]]
    dtype: torch.dtype
    device: str
    bar: "tqdm[NoReturn]" = field(default_factory=partial(tqdm, disable=True))
    num_bytes: int = 0
    pieces: Mapping[str, Index] = field(default_factory=dict)

    def take(self, name: str, piece: Index = ()) -> Tensor:
        """Read the tensor ``name``, or a ``piece`` of it, into fresh memory; of other rows nothing is read.

        Raises ``KeyError`` for an unknown name, and ``ValueError`` if the file can no longer be read.
        """
        file, stored_name, index = self.places[name]
        with opened(file) as tensors:  # a file that is left open would hold all that was read of it in memory
            tensor: Tensor = tensors.get_tensor(stored_name)[index][piece]
            # A copy, not a view of the mapped file: fresh memory is aligned, and alignment can change a product's bits.
            return tensor.to(device=self.device, dtype=self.dtype, copy=True)

    def pop(self, name: str, /) -> Tensor:
        """Read the tensor ``name``, or its piece, and forget where it is. Raises what ``take`` raises."""
        if name in (FINAL_NORM, HEAD) and self.num_bytes > MUCH:
            give_memory_back()  # what the layers were made of; the head is large
        tensor = self.take(name, self.pieces.get(name, ()))
        self.num_bytes += tensor.nbytes
        del self.places[name]
        self.bar.update()
        if not self.places:
            self.bar.close()
        return tensor
