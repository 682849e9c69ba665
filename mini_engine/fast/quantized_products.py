"""Products with quantized weights, by torch's kernels for them, and where each matrix gets how many bits.

The kernels read the ids as they are stored, which is fast for few rows: a decode step waits for memory. They multiply
row after row, which is slow for many. So many rows are multiplied by a piece of the matrix that is unpacked for them.
The two add up in different orders. Under ``batch_invariant`` the kernels multiply all rows.

The table of embeddings, the head and the routers of experts have 8 bits, also with "int4": 4 bits would cost more
there than everywhere else, and a tied head is the table itself, not a second copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.config import EngineConfig
from mini_engine.families import EMBEDDING, HEAD
from mini_engine.fast.products import (
    InvariantProjections,
    describe,
    in_blocks,
    make_projections,
)
from mini_engine.fast.quantized import (
    GROUP,
    dequantize_int8,
    linear_int4,
    linear_int8,
    quantize_int4,
    quantize_int8,
    unpack_int4,
)
from mini_engine.invariant.findings import remembered
from mini_engine.invariant.probe import opposite_terms, row_numbers, rows_that_hold
from mini_engine.linear import Linear, Projections, TorchProjections, with_bias
from mini_engine.weights import Weights

TILE = 64  # rows that torch packs together with AVX-512; it packs 32 elsewhere
ROUNDED = 1 << 18  # elements that are rounded at a time; with all at once the copies in float32 leave the caches
LARGEST_PIECE = 1 << 22  # elements that are unpacked at a time
LARGEST_CALL = 64  # rows that are tried; the kernels take as long for each row of more
IN_8_BITS = (EMBEDDING, HEAD, ".gate.weight")  # how their names end; the last are routers


def in_multiples(x: Tensor, columns: int, rows: int = 1) -> Tensor:
    """Return ``x`` [M, K] with zeros added, until M and K are multiples of ``rows`` and ``columns``."""
    missing = (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)
    return F.pad(x, missing) if any(missing) else x.contiguous()


@dataclass(frozen=True)
class Rows:
    """A matrix [N, K] whose tensors have a row for each of its rows, so that it can be split and stacked."""

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by their names."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def split(self, size: int) -> list[Self]:
        """Return its pieces of ``size`` rows; they share its memory."""
        pieces = {name: tensor.split(size) for name, tensor in self.tensors().items()}
        return [replace(self, **dict(zip(pieces, each, strict=True))) for each in zip(*pieces.values(), strict=True)]

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Stack matrices for ``torch.cat``; torch asks here. Takes no other function."""
        if function is not torch.cat:
            return NotImplemented
        (parts,) = args
        each = [part.tensors() for part in parts]
        return replace(parts[0], **{name: torch.cat([own[name] for own in each]) for name in each[0]})


@dataclass(frozen=True)
class Int8(Rows):
    """A matrix in 8 bits, or some of its rows. As a table of embeddings ``F.embedding`` takes it for a tensor."""

    ids: Tensor  # [N, K up to a multiple of 32] int8
    scales: Tensor  # [N]
    in_features: int  # K
    most_rows: ClassVar[int] = 16  # from 17 rows on unpacking takes less time than the kernel's additional rows

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Quantize ``weight`` [N, K], piece by piece. Raises ``ValueError`` for a weight that is not finite."""
        count, in_features = weight.shape
        ids = weight.new_empty((count, in_features + -in_features % GROUP), dtype=torch.int8)
        scales = weight.new_empty(count)
        size = rows_of_piece(in_features, ROUNDED)
        for first in range(0, count, size):
            part = slice(first, first + size)
            ids[part], scales[part] = quantize_int8(in_multiples(weight[part], GROUP))
        return cls(ids, scales, in_features)

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return len(self.ids), self.in_features

    @property
    def dtype(self) -> torch.dtype:
        """What it is multiplied by, and the type of its values."""
        return self.scales.dtype

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.ids.device

    def few(self, x: Tensor) -> Tensor:
        """Multiply ``x`` [M, K] by the kernel -> [M, N]."""
        return torch._weight_int8pack_mm(in_multiples(x, GROUP), self.ids, self.scales)

    def many(self, x: Tensor) -> Tensor:
        """Multiply ``x`` [M, K] by the unpacked matrix -> [M, N]."""
        return linear_int8(in_multiples(x, GROUP), self.ids, self.scales)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Look up the rows [T, K] of ``F.embedding(token_ids, self)``; torch asks here, and for ``torch.cat``.

        Here and in products, memory has no gaps, because compiled loops add up in another order where it has some.
        """
        if function is not F.embedding:
            return super().__torch_function__(function, types, args, kwargs)
        token_ids, table = args
        return dequantize_int8(table.ids[token_ids], table.scales[token_ids])[..., : table.in_features].contiguous()


@dataclass(frozen=True)
class Nibbles(Rows):
    """A matrix in 4 bits in the order of its columns, as a file has it."""

    ids: Tensor  # [N, K / 2 up to a multiple of 16] uint8; the lower bits are the first of two columns
    scales: Tensor  # [N, K / 32]
    zeros: Tensor  # [N, K / 32]
    in_features: int  # K

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Quantize ``weight`` [N, K], piece by piece. Raises ``ValueError`` for a weight that is not finite."""
        pieces = weight.split(rows_of_piece(weight.shape[1], ROUNDED))
        each = [quantize_int4(in_multiples(piece, GROUP)) for piece in pieces]
        ids, scales, zeros = (torch.cat(parts) for parts in zip(*each, strict=True))
        return cls(ids[:, ::2] | ids[:, 1::2] << 4, scales, zeros, weight.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return len(self.ids), self.in_features

    @property
    def dtype(self) -> torch.dtype:
        """What it is multiplied by."""
        return self.scales.dtype

    def unpacked(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ids [N, K up to a multiple of 32], the scales and the zero points, as ``quantize_int4`` does."""
        return torch.stack((self.ids & 15, self.ids >> 4), dim=-1).flatten(-2), self.scales, self.zeros


@dataclass(frozen=True)
class Int4:
    """A matrix in 4 bits, in the order of torch's kernel: tile after tile of rows, in a tile column after column."""

    packed: Tensor  # [N, K / 2] uint8, N and K up to multiples of 64 and 32
    steps: Tensor  # [K / 32, N, 2]: the scale and the zero point of each group
    out_features: int  # N
    most_rows: ClassVar[int] = 64  # unpacking takes longer than with 8 bits

    @classmethod
    def of(cls, weight: Tensor | Nibbles) -> Self:
        """Quantize ``weight`` [N, K], piece by piece. Raises ``ValueError`` for a weight that is not finite."""
        packed, steps = [], []
        for piece in weight.split(rows_of_piece(weight.shape[1], ROUNDED)):
            parts = piece.unpacked() if isinstance(piece, Nibbles) else quantize_int4(in_multiples(piece, GROUP))
            ids, scales, zeros = (in_multiples(part, 1, TILE) for part in parts)
            packed.append(torch._convert_weight_to_int4pack_for_cpu(ids.int(), 1))
            steps.append(torch.stack((scales.T, zeros.T), dim=-1))
        return cls(torch.cat(packed), torch.cat(steps, dim=1), weight.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        """N and K as they are stored."""
        return self.steps.shape[1], len(self.steps) * GROUP

    @property
    def dtype(self) -> torch.dtype:
        """What it is multiplied by."""
        return self.steps.dtype

    def few(self, x: Tensor) -> Tensor:
        """Multiply ``x`` [M, K] by the kernel -> [M, N]."""
        padded = in_multiples(x, GROUP)
        return torch._weight_int4pack_mm_for_cpu(padded, self.packed, GROUP, self.steps)[
            :, : self.out_features
        ].contiguous()

    def many(self, x: Tensor) -> Tensor:
        """Multiply ``x`` [M, K] by the unpacked matrix -> [M, N]."""
        size, is_halved = tile_order()
        ids = unpack_int4(self.packed.view(torch.uint8).view(-1, self.shape[1], size // 2), is_halved)
        steps = self.steps.transpose(0, 1).unbind(-1)
        return linear_int4(in_multiples(x, GROUP), ids, *steps)[:, : self.out_features].contiguous()


@cache
def tile_order() -> tuple[int, bool]:
    """Return how many rows torch packs into a tile, and whether a byte has a row of each half; else two neighbours.

    That depends on the instructions in use. So it is read off a matrix: the first byte has row 0 and one of rows
    1, 16 and 32, whose ids tell them apart.
    """
    ids = torch.zeros(TILE, GROUP, dtype=torch.int32)
    ids[1], ids[16], ids[32] = 1, 2, 3
    first = torch._convert_weight_to_int4pack_for_cpu(ids, 1).view(torch.uint8).flatten()[0]
    return {1: (32, False), 2: (32, True), 3: (64, True)}[int(first) >> 4]


KINDS: Mapping[str, type[Int8] | type[Int4]] = {"int8": Int8, "int4": Int4}


def rows_of_piece(in_features: int, largest: int) -> int:
    """Return how many rows of a matrix are a piece of at most ``largest`` elements, a tile at least: a power of two."""
    return max(TILE, 1 << (max(1, largest // in_features).bit_length() - 1))


class QuantizedProjections:
    """Quantizes each weight that it is given, unless it is quantized already.

    ``quantize``: the name of the kind. ``choices``: how each shape of a piece is multiplied, in words.
    """

    def __init__(self, kind: str, batch_invariant: bool) -> None:
        """Quantize to the ``kind`` "int8" or "int4"."""
        self.quantize = kind
        self.kind = KINDS[kind]
        self.batch_invariant = batch_invariant
        plain: Projections = InvariantProjections(()) if batch_invariant else TorchProjections()
        self.silu = plain.silu
        self.choices = dict[str, str]()

    def linear(self, weight: Tensor | Int8 | Nibbles, bias: Tensor | None = None) -> Linear:
        """Return the product with ``weight`` [out, in], quantized unless it is, plus ``bias`` [out].

        Raises ``ValueError`` for a weight that is not finite, and under ``batch_invariant`` where the kernel does not
        keep a row's bits on this machine.
        """
        pieces = weight.split(rows_of_piece(weight.shape[1], LARGEST_PIECE))
        kind: Any = self.kind
        parts = [self.piece(piece if isinstance(piece, Int8) else kind.of(piece)) for piece in pieces]
        joined = parts[0] if len(parts) == 1 else lambda x: torch.cat([part(x) for part in parts], dim=-1)
        return with_bias(joined, bias)

    def piece(self, matrix: Int8 | Int4) -> Linear:
        """Return the product with a piece of a matrix."""
        name = f"{type(matrix).__name__.lower()} {describe(*matrix.shape, matrix.dtype)}"
        if not self.batch_invariant:
            self.choices[name] = f"kernel up to {matrix.most_rows} rows, unpacked for more"
            return partial(by_rows, matrix)
        numbers = find_rows(name, matrix)
        self.choices[name] = f"kernel, rows {' '.join(map(str, numbers))}"
        return in_blocks(matrix.few, numbers)


def by_rows(matrix: Int8 | Int4, x: Tensor) -> Tensor:
    """Multiply ``x`` [M, K] by the kernel or by the unpacked matrix, whichever its number of rows asks for."""
    return matrix.few(x) if len(x) <= matrix.most_rows else matrix.many(x)


def find_rows(name: str, matrix: Int8 | Int4) -> list[int]:
    """Return the numbers of rows for which the kernel gives a row the same bits, with a matrix like this one.

    ``name``: what it is, in words. Raises ``ValueError`` if there are none.
    """

    def experiment() -> list[int]:
        row, vectors = opposite_terms(matrix.shape[1], matrix.shape[0], matrix.dtype)
        return rows_that_hold(type(matrix).of(vectors).few, row, row_numbers(LARGEST_CALL))

    numbers: list[int] = remembered(f"kernel of {name}", experiment)
    if not numbers:
        raise ValueError(
            f"batch_invariant=True cannot be kept on this CPU with {torch.get_num_threads()} threads: torch's kernel "
            f"for {name} gives a row other bits in other batches; leave batch_invariant off, or set quantize='off'"
        )
    return numbers


@dataclass(frozen=True)
class QuantizedWeights:
    """Weights of which the table of embeddings, the head and routers are quantized to 8 bits as they are taken."""

    weights: Weights

    def pop(self, name: str, /) -> Any:
        """Give the tensor ``name`` away. Raises ``KeyError`` if it is not there, or no longer."""
        tensor: Any = self.weights.pop(name)
        return Int8.of(tensor) if isinstance(tensor, Tensor) and name.endswith(IN_8_BITS) else tensor


def make_parts(weights: Weights, engine: EngineConfig) -> tuple[Weights, Projections]:
    """Return what a model of ``engine`` is built from. Raises ``ValueError`` if torch lacks the kernels here."""
    if engine.quantize == "off":
        return weights, make_projections(engine)
    check_kernel(engine.quantize, getattr(torch, engine.dtype))
    return QuantizedWeights(weights), QuantizedProjections(engine.quantize, engine.batch_invariant)


@cache
def check_kernel(kind: str, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless this build of torch has the kernel, and stores ids where ``many`` reads them."""
    x, weight = torch.eye(GROUP, dtype=dtype), torch.arange(2.0 * TILE * GROUP).view(-1, GROUP).sin().to(dtype)
    try:
        matrix = KINDS[kind].of(weight)
        is_same = torch.allclose(matrix.few(x), matrix.many(x), rtol=0.02, atol=0.02)
        fault = None if is_same else "its products are not those of the same ids unpacked"
    except NotImplementedError:  # of a student's file
        raise
    except (RuntimeError, AttributeError, KeyError) as error:
        fault = str(error).splitlines()[0]
    if fault is not None:
        raise ValueError(f"quantize={kind!r} cannot use torch {torch.__version__} here ({fault}); set quantize='off'")
