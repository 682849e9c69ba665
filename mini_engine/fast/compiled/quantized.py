"""Products with quantized weights by compiled loops, over one form of a weight for few rows and for many.

The loop for few rows reads the ids where they lie, at the speed of memory. For many rows a piece of the matrix is
unpacked to where oneDNN would have packed it, which stays in the CPU's cache, and multiplied there. Under
``batch_invariant`` the loop multiplies all rows: each of its numbers is the sum of the same terms in the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.config import EngineConfig
from mini_engine.families import EMBEDDING
from mini_engine.fast.compiled import product_loops as loops
from mini_engine.fast.compiled.product_loops import TILE, Words
from mini_engine.fast.compiled.products import Packed, find_tiles, halves, in_shares, make_tiles, most_threads
from mini_engine.fast.products import WAYS, describe, onednn_fault, padded
from mini_engine.fast.quantized import GROUP, dequantize_int8
from mini_engine.fast.quantized_products import Int8, Nibbles, QuantizedWeights, in_multiples, rows_of_piece
from mini_engine.linear import Linear, TorchProjections, with_bias
from mini_engine.weights import Weights

FORMS: dict[str, type[Int8] | type[Nibbles]] = {"int8": Int8, "int4": Nibbles}
UNPACKED = 1 << 21  # elements that are unpacked at a time; more leave the nearest caches
MOST_ROWS = 8  # that the loop multiplies in less time than a matrix is unpacked


@dataclass(frozen=True)
class Quantized(Packed):
    """A matrix in 8 or 4 bits as the loops read it. As a table of embeddings ``F.embedding`` takes it for a tensor."""

    in_features: int  # K
    dtype: torch.dtype  # of the values that it stands for

    @classmethod
    def of(cls, weight: Tensor | Int8 | Nibbles, kind: str) -> Self:
        """Quantize ``weight`` [N, K] to ``kind`` unless it is, and lay it out in tiles, piece by piece.

        Raises ``ValueError`` for a weight that is not finite.
        """
        part = FORMS[kind].of(weight) if isinstance(weight, Tensor) else weight
        features, in_features = part.shape
        if isinstance(part, Int8):
            tiles, steps = in_tiles(part.ids), in_tiles(part.scales.float()[:, None]).flatten()
        else:
            tiles = in_tiles(part.ids.view(torch.int32)).view(torch.uint32)
            steps = torch.stack((in_tiles(part.scales), in_tiles(part.zeros)), dim=2)
        width = part.scales.shape[-1] * GROUP if isinstance(part, Nibbles) else part.ids.shape[1]
        return cls(tiles.numpy(), halves(steps), features, width, in_features, part.scales.dtype)

    @property
    def kind(self) -> str:
        """Its bits: "int8" or "int4"."""
        return "int8" if self.tiles.dtype == np.int8 else "int4"

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return torch.device("cpu")

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Look up the rows [T, K] of ``F.embedding(token_ids, self)``, a table in 8 bits; torch asks here."""
        if function is not F.embedding:
            return NotImplemented
        token_ids, table = args
        tiles, scales = torch.from_numpy(table.tiles), torch.from_numpy(table.steps)
        ids = tiles[token_ids // TILE, :, token_ids % TILE]
        return dequantize_int8(ids, scales[token_ids].to(table.dtype))[..., : table.in_features].contiguous()


def in_tiles(rows: Tensor) -> Tensor:
    """Return ``rows`` [N, C] in tiles of 64 rows that lie side by side, [N / 64, C, 64]; N is filled up with zeros."""
    return in_multiples(rows, 1, TILE).view(-1, TILE, rows.shape[1]).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Room:
    """Memory for a piece of a matrix, and the product with what is in it."""

    words: Words  # [n, K / 2, 64], or float32 [n, K / 2, 2, 64]
    product: Linear  # [M, K] -> [M, 64 n]
    lock: Lock = field(default_factory=Lock)

    @classmethod
    def of(cls, rows: int, width: int, dtype: torch.dtype) -> Self:
        """Make room for [rows, width], where oneDNN packs such a matrix in tiles; elsewhere products copy the tiles."""
        sample = torch.arange(rows * width).sin().view(rows, width).to(dtype)
        stored = sample if onednn_fault(dtype) else WAYS["packed"].store(sample)
        words = find_tiles(stored, sample)
        if words is None:
            words = make_tiles(sample, width)
            product: Linear = partial(copied_product, torch.from_numpy(words).view(dtype).unflatten(-1, (TILE, -1)))
        else:
            product = padded(WAYS["packed"], stored)
        return cls(words if dtype == torch.bfloat16 else words.reshape(len(words), -1, 2, TILE), product)


def copied_product(tiles: Tensor, x: Tensor) -> Tensor:
    """Multiply ``x`` [M, K] by what lies in ``tiles`` [n, C, 64, K / C] -> [M, 64 n]."""
    return F.linear(x, tiles.transpose(1, 2).reshape(-1, x.shape[1]))


class QuantizedLoops(TorchProjections):
    """Quantizes each weight that it is given. Rows are float32 before a product.

    ``quantize`` and ``choices``: see ``QuantizedProjections``.
    """

    def __init__(self, kind: str, batch_invariant: bool) -> None:
        """Quantize to the ``kind`` "int8" or "int4"."""
        self.quantize = kind
        self.batch_invariant = batch_invariant
        self.rooms = dict[tuple[int, int, torch.dtype], Room]()
        self.choices = dict[str, str]()

    def linear(self, weight: Tensor | Int8 | Nibbles | Quantized, bias: Tensor | None = None) -> Linear:
        """Return the product with ``weight`` [out, in], quantized unless it is, plus ``bias`` [out].

        Raises ``ValueError`` for a weight that is not finite.
        """
        bias = None if bias is None else bias.float()
        matrix = (weight if isinstance(weight, Quantized) else Quantized.of(weight, self.quantize)).compile()
        name = f"{matrix.kind} {describe(matrix.features, matrix.in_features, matrix.dtype)}"
        self.choices[name] = "a loop" if self.batch_invariant else f"a loop up to {MOST_ROWS} rows, unpacked for more"
        if self.batch_invariant:
            return with_bias(matrix.multiply, bias)
        rows = min(rows_of_piece(matrix.width, UNPACKED), len(matrix.tiles) * TILE)
        shape = rows, matrix.width, matrix.dtype
        room = self.rooms.get(shape) or self.rooms.setdefault(shape, Room.of(*shape))
        unpack(matrix, len(matrix.tiles), room)  # compiles it
        return with_bias(lambda x: matrix.multiply(x) if len(x) <= MOST_ROWS else unpacked(x, matrix, room), bias)


def unpack(matrix: Quantized, start: int, room: Room) -> None:
    """Unpack the tiles of ``matrix`` from ``start`` on into ``room``, as many as it has room for."""
    in_shares(loops.unpack, loops.unpack_shared, most_threads(), matrix.tiles, matrix.steps, room.words, start)


def unpacked(x: Tensor, matrix: Quantized, room: Room) -> Tensor:
    """Multiply ``x`` [M, K] by ``matrix``, unpacked piece by piece into ``room`` -> [M, N] of the matrix's dtype."""
    rows = matrix.filled(x).to(matrix.dtype)
    out = torch.empty(len(x), len(matrix.tiles) * TILE, dtype=matrix.dtype)
    for start in range(0, len(matrix.tiles), len(room.words)):
        own = out[:, start * TILE : (start + len(room.words)) * TILE]
        with room.lock:
            unpack(matrix, start, room)
            own.copy_(room.product(rows)[:, : own.shape[1]])
    return out if out.shape[1] == matrix.features else out[:, : matrix.features].contiguous()


@dataclass(frozen=True)
class TiledWeights:
    """Weights of which the table of embeddings is in tiles as it is taken, so that a tied head is the same memory."""

    weights: QuantizedWeights

    def pop(self, name: str, /) -> Any:
        """Give the tensor ``name`` away. Raises ``KeyError`` if it is not there, or no longer."""
        weight = self.weights.pop(name)
        return Quantized.of(weight, "int8") if name == EMBEDDING else weight


def make_loop_parts(weights: Weights, engine: EngineConfig) -> tuple[Any, QuantizedLoops]:
    """Return what a compiled model of ``engine``, which quantizes, is built from."""
    return TiledWeights(QuantizedWeights(weights)), QuantizedLoops(engine.quantize, engine.batch_invariant)
