"""Memory that shows what a kernel wrote where it should not, and what it left unwritten.

Owns: poisoned allocations and tensors with margins. Must not know: single operations.

A kernel gets addresses. In Triton's interpreter a read beside a tensor finds whatever lies there and a write beside it
lands in somebody else's memory, both without a word. So every tensor lies in the middle of memory of its own here: what
is read beside it is NaN, what is written beside it is noticed, and an output that nobody wrote is NaN as well.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

MARGIN = 32768  # numbers on either side: a tile of rows beyond the last ends within it
UNWRITTEN = -77  # of an integer that nobody wrote
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers: NaN is itself then, and -0.0 is not 0.0."""
    return tensor.contiguous().view(INTEGERS[tensor.dtype.itemsize])


def poison_of(dtype: torch.dtype) -> float:
    """Return what stands for a number that nobody wrote."""
    return float("nan") if dtype.is_floating_point else UNWRITTEN


class Guard:
    """Tensors in memory with margins. ``damaged`` names those around which something was written."""

    def __init__(self) -> None:
        """Hold nothing."""
        self.held: list[tuple[str, Tensor, Tensor, Tensor]] = []  # name, memory, where it is no tensor, bits there

    def put(self, name: str, tensor: Tensor, gap: int = 0, margin: float = torch.nan) -> Tensor:
        """Return the same numbers, rows of the last axis ``gap`` numbers apart, with ``margin`` around and between.

        A margin of NaN shows reads, and not that NaN which was read is written back; a number shows every write.
        """
        sizes = [size + gap * (axis == tensor.ndim - 1) for axis, size in enumerate(tensor.shape)]
        strides = [prod(sizes[axis + 1 :]) for axis in range(tensor.ndim)]
        return self.lay(name, tensor, strides, margin)

    def lay(self, name: str, tensor: Tensor, strides: Sequence[int], margin: float) -> Tensor:
        """Return the same numbers with these strides."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
        total = MARGIN + max(extent, 0) + MARGIN
        memory = torch.full((total,), margin, dtype=tensor.dtype)
        view = memory.as_strided(tensor.shape, tuple(strides), MARGIN)
        view.copy_(tensor)
        outside = torch.ones(total, dtype=torch.bool)
        outside.as_strided(tensor.shape, tuple(strides), MARGIN).fill_(False)
        self.held.append((name, memory, outside, bits(memory)[outside].clone()))
        return view

    def damaged(self) -> list[str]:
        """Name every tensor beside which something was written."""
        return [name for name, memory, outside, before in self.held if not torch.equal(bits(memory)[outside], before)]

    def allocate(self, *size: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Return a new tensor of NaN, or of a strange integer, in memory of its own."""
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        kind = dtype or torch.float32
        unwritten = torch.full(tuple(shape), poison_of(kind), dtype=kind)
        return self.put(f"an allocated tensor {list(shape)}", unwritten, margin=-7 if kind.is_signed else 7)


@contextmanager
def guarded() -> Iterator[Guard]:
    """While this is open, ``torch.empty``, ``torch.empty_like`` and ``Tensor.new_empty`` allocate from a guard."""
    guard = Guard()

    def empty(*size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return guard.allocate(*size, dtype=dtype)

    def empty_like(tensor: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return guard.allocate(tensor.shape, dtype=dtype or tensor.dtype)

    def new_empty(tensor: Tensor, *size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return guard.allocate(*size, dtype=dtype or tensor.dtype)

    with (
        patch.object(torch, "empty", empty),
        patch.object(torch, "empty_like", empty_like),
        patch.object(torch.Tensor, "new_empty", new_empty),
    ):
        yield guard
