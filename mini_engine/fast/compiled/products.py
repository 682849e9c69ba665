"""Products by loops: of any rows with a small float32 weight, and of one row with a bfloat16 one.

64 output features lie side by side in memory, so that the CPU adds up several of them at once, each in the order of its
terms. No row's bits depend on the others. A call for a few rows with a small weight takes less time than one of BLAS.

A decode step of one request reads every weight once, so a product takes as long as reading its weight. In bfloat16
oneDNN's code for one row takes longer where memory is fast. The loop reads the matrix that oneDNN has packed for many
rows. Several rows are left to oneDNN there, which multiplies bfloat16 numbers twice as fast, and so are large float32
matrices, which it reads as fast.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.fast.compiled import product_loops as loops
from mini_engine.fast.compiled.loops import Halves
from mini_engine.fast.compiled.product_loops import TILE, Steps, Tiles, Words
from mini_engine.fast.products import SMALL_WEIGHT, FastProjections, describe, padded
from mini_engine.linear import Linear, Projections, with_bias

SHARED_FROM = 1 << 20  # bytes of a weight; one thread has read fewer before another would have begun
NO_STEPS = np.empty((0, 0), np.float32)


@dataclass(frozen=True)
class Packed:
    """A weight as the loops read it. ``tiles`` and ``steps`` as in ``product_loops.py``."""

    tiles: Tiles
    steps: Steps
    features: int  # N
    width: int  # K as it is filled up

    def multiply(self, x: Tensor) -> Tensor:
        """Multiply ``x`` [M, K] float32 -> [M, N] float32."""
        reads = (len(x) + 3) // 4  # four rows take as long as one
        return self.product(x, most_threads() if self.tiles.nbytes * reads >= SHARED_FROM else 1)

    def product(self, x: Tensor, threads: int) -> Tensor:
        """Multiply on ``threads``, which change no bit; see ``multiply``."""
        rows = self.filled(x)
        out = torch.empty(len(x), len(self.tiles) * TILE)
        in_shares(loops.multiply, loops.multiply_shared, threads, rows.numpy(), self.tiles, self.steps, out.numpy())
        return out if out.shape[1] == self.features else out[:, : self.features].contiguous()

    def compile(self) -> Self:
        """Compile the loops for such a weight, or read them from where they are kept; return ``self``."""
        for threads in {1, most_threads()}:
            self.product(torch.zeros(0, self.width), threads)  # of no rows, so that no weight is read
        return self

    def filled(self, x: Tensor) -> Tensor:
        """Return ``x`` [M, K] without gaps, K filled up with zeros."""
        return x.contiguous() if x.shape[1] == self.width else F.pad(x, (0, self.width - x.shape[1]))


def in_shares(alone: Callable[..., None], shared: Callable[..., None], threads: int, *arrays: Any) -> None:
    """Call a loop over ``arrays``: ``alone``, or the one that several ``threads`` share."""
    if threads == 1:
        alone(*arrays, 1, 0)
    else:
        on_threads(shared, threads, *arrays)


def on_threads(shared: Callable[..., None], threads: int, *arrays: Any) -> None:
    """Call a loop over ``arrays`` that ``threads`` share."""
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # without, it wakes one for each core
    shared(*arrays, threads)


def most_threads() -> int:
    """Return how many threads may share a loop."""
    return torch.get_num_threads() if can_share() else 1


@cache
def can_share() -> bool:
    """Whether Numba's threads serve two callers at a time. Where it has only those of its own, they do not."""
    number = torch.get_num_threads()
    tiles = np.zeros((1, 8, TILE), np.float32)
    loops.multiply_shared(np.zeros((1, 8), np.float32), tiles, NO_STEPS, np.empty((1, TILE), np.float32), 2)
    torch.set_num_threads(number)  # Numba begins with one for each core, and tells OpenMP, whose number is torch's
    return bool(numba.threading_layer() != "workqueue")


class LoopProjections:
    """Loops for small weights in float32, and for one row of a weight in bfloat16; else the products of ``others``.

    Where ``others`` keep a row's bits in every batch, loops have all rows of small weights, and none of large ones.
    Rows are in float32. In bfloat16 ``others`` get them rounded. ``choices``: the way of each shape, in words.
    """

    def __init__(self, others: Projections) -> None:
        """Take over from ``others``."""
        self.others = others
        self.silu = others.silu
        self.choices: dict[str, str] = getattr(others, "choices", {})

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return the product of float32 rows with ``weight`` [out, in], plus ``bias`` [out].

        It is float32 or, of several rows, of the dtype of ``weight``.
        """
        others, name = self.others, describe(weight.shape[0], weight.shape[1], weight.dtype)
        is_small, is_float32 = weight.numel() <= SMALL_WEIGHT, weight.dtype == torch.float32
        if is_small and (is_float32 or not isinstance(others, FastProjections)):
            self.choices[name] = "a loop"
            return with_bias(packed(weight.float()).multiply, bias)
        if not isinstance(others, FastProjections):
            return over_float32(others.linear(weight, bias), weight.dtype)
        way, stored = others.store(weight)
        many = over_float32(padded(way, stored, bias), weight.dtype)
        if is_float32:
            return many
        tiles = None if is_small else find_tiles(stored, weight)
        if tiles is None and not is_small:
            return many
        self.choices[name] += ", a loop for one row"
        one = with_bias(packed(weight, tiles).multiply, bias)
        return lambda x: one(x) if len(x) == 1 else many(x)


def packed(weight: Tensor, tiles: Words | None = None) -> Packed:
    """Return ``weight`` [N, K] for the loops: its ``tiles`` where they lie, or a copy."""
    if tiles is None:
        tiles = make_tiles(weight, -(-weight.shape[1] // 8) * 8)
    return Packed(tiles, NO_STEPS, len(weight), tiles.shape[1] * 4 // weight.element_size()).compile()


def over_float32(product: Linear, dtype: torch.dtype) -> Linear:
    """Return ``product``, which takes rows of ``dtype``, over rows in float32."""
    return product if dtype == torch.float32 else lambda x: product(x.to(dtype))


def halves(tensor: Tensor) -> Halves:
    """Return the memory of ``tensor``, float32 or bfloat16, as the loops read it."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def find_tiles(stored: Tensor, weight: Tensor) -> Words | None:
    """Return ``weight`` [N, K] as the loop reads it, where it is packed in ``stored``.

    ``None`` if it is not, or in another order than that of ``make_tiles``, as on CPUs without AVX2. The first and the
    last tile are compared.
    """
    if not stored.is_mkldnn:
        return None
    size = torch.ops.mkldnn._nbytes(stored)
    count = -(-len(weight) // TILE)
    width, rest = divmod(size, count * TILE * weight.element_size())
    if rest or width < weight.shape[1] or width % 8:
        return None
    memory = (ctypes.c_uint32 * (size // 4)).from_address(torch.ops.mkldnn.data_ptr(stored))
    memory.owner = stored  # which lives as long as the array that is returned
    found = np.ctypeslib.as_array(memory).reshape(count, -1, TILE)
    for first in (0, count - 1):
        expected = make_tiles(weight[first * TILE : (first + 1) * TILE], width)
        if not np.array_equal(found[first], expected[0].view(np.uint32)):
            return None
    return found if weight.dtype == torch.bfloat16 else found.view(np.float32)


def make_tiles(weight: Tensor, width: int) -> Words:
    """Return ``weight`` [N, K] in tiles of 64 output features, whose numbers lie side by side.

    [N / 64, width, 64] float32, or [N / 64, width / 2, 64] words of two bfloat16 numbers, the first in the lower half.
    N and K are filled up with zeros, K to ``width``.
    """
    each = 4 // weight.element_size()
    filled = F.pad(weight, (0, width - weight.shape[1], 0, -len(weight) % TILE))
    tiles = filled.view(-1, TILE, width // each, each).transpose(1, 2).contiguous()
    words = tiles.view(torch.int32 if each == 2 else torch.float32).numpy()
    return (words.view(np.uint32) if each == 2 else words).reshape(len(tiles), -1, TILE)
