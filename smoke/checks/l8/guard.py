"""Memory that shows what a kernel read or wrote where it should not, and what it left unwritten.

A kernel gets addresses. In Triton's interpreter a read outside a tensor finds whatever lies there, and a write outside
it damages another tensor; neither raises an error. So every tensor here lies in the middle of larger memory: what is
read around it is NaN, what is written around it is noticed, and an output that was not written is NaN as well.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

MARGIN = 32768  # numbers on either side: a tile of rows beyond the last ends within it
UNWRITTEN = -77  # an integer that was not written
GAP = 37  # numbers between two rows: more than any rounding of a width, and not a power of two
BEHIND = 300  # numbers after a vector
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers: NaN is itself then, and -0.0 is not 0.0."""
    return tensor.contiguous().view(INTEGERS[tensor.dtype.itemsize])


def poison_of(dtype: torch.dtype) -> float:
    """Return what stands for a number that was not written."""
    return float("nan") if dtype.is_floating_point else UNWRITTEN


def apart(tensor: Tensor, between: float = torch.nan) -> Tensor:
    """Return the same numbers [R, V] in rows that lie further apart, with ``between`` between and after them."""
    wide = torch.full((len(tensor) + 1, tensor.shape[1] + GAP), between).to(tensor.dtype)
    wide[:-1, : tensor.shape[1]] = tensor
    return wide[:-1, : tensor.shape[1]]


def gaps_of(tensor: Tensor) -> Tensor:
    """Return what lies between and after the rows of a tensor that ``apart`` made, as one vector."""
    rows, width = tensor.shape
    wide = tensor.as_strided((rows + 1, width + GAP), (width + GAP, 1))
    return torch.cat((wide[:-1, width:].flatten(), wide[-1]))


def followed_by(numbers: Tensor, behind: float) -> Tensor:
    """Return a vector with ``behind`` in the memory after it, which a kernel must not read."""
    longer = torch.cat((numbers, torch.full((BEHIND,), behind).to(numbers.dtype)))
    return longer[: len(numbers)]


def with_signs(x: Tensor) -> dict[str, Tensor]:
    """Return logits and where their zeros are negative: the two zeros compare as equal, but their bits differ."""
    return {"logits": x, "minus zeros": (x == 0) & x.signbit()}


@contextmanager
def set_for_now(module: Any, **constants: Any) -> Iterator[None]:
    """Set constants of a module until the context ends."""
    with patch.multiple(module, create=True, **constants):
        yield


class Guard:
    """Tensors in memory with margins. ``damaged`` names those around which something was written.

    ``margin`` lies around the tensors that ``allocate`` returns, if it fits their dtype.
    """

    def __init__(self, margin: float) -> None:
        """Hold nothing."""
        self.margin = margin
        self.held: list[tuple[str, Tensor, Tensor, Tensor]] = []  # name, memory, what is outside the tensor, its bits

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
        """Name every tensor around which something was written."""
        return [name for name, memory, outside, before in self.held if not torch.equal(bits(memory)[outside], before)]

    def allocate(self, *size: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Return a new tensor of NaN, or of ``UNWRITTEN`` integers, with a margin around it."""
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        kind = dtype or torch.float32
        unwritten = torch.full(tuple(shape), poison_of(kind), dtype=kind)
        whole = -7 if kind.is_signed else 7
        margin = self.margin if kind.is_floating_point else whole
        return self.put(f"an allocated tensor {list(shape)}", unwritten, margin=margin)


def poisoned(load: Any) -> Any:
    """Return the interpreter's ``load`` with poison, and not 0, where a mask is off and the kernel gives no ``other``.

    On a GPU it can be anything.
    """
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    def masked_load(builder: Any, pointers: Any, mask: Any, other: Any, *options: Any) -> Any:
        if other is None:
            kind = pointers.get_element_ty()
            dtype = np.dtype(_get_np_dtype(kind))
            other = TensorHandle(np.full(pointers.data.shape, np.nan if dtype.kind == "f" else 77, dtype), kind)
        return load(builder, pointers, mask, other, *options)

    return masked_load


@contextmanager
def guarded(margin: float = -7.0) -> Iterator[Guard]:
    """While this is open, ``torch.empty``, ``torch.empty_like`` and ``Tensor.new_empty`` allocate from a guard.

    With a ``margin`` of NaN a read outside an allocated tensor shows in the result; with a number every write does.
    What a kernel's mask leaves out is poison, if the load names no other number for it.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    guard = Guard(margin)

    def empty(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        return guard.allocate(*options.get("size", size), dtype=dtype)

    def empty_like(tensor: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return guard.allocate(tensor.shape, dtype=dtype or tensor.dtype)

    def new_empty(tensor: Tensor, *size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return guard.allocate(*size, dtype=dtype or tensor.dtype)

    with (
        patch.object(torch, "empty", empty),
        patch.object(torch, "empty_like", empty_like),
        patch.object(torch.Tensor, "new_empty", new_empty),
        patch.object(InterpreterBuilder, "create_masked_load", poisoned(InterpreterBuilder.create_masked_load)),
    ):
        yield guard
