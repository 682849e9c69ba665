"""Rows for kernels: memory in which whatever a kernel must not touch shows, and constants of modules set for a probe.

Owns: poison. Must not know: operations, the engine, Triton.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

GAP = 37  # numbers between two rows: more than any rounding of a width, and no power of two
GUARD = 300  # numbers behind a fresh tensor
FILLERS = {torch.int64: 2**62 - 5, torch.int32: 2**30 - 5, torch.bool: True}


def filler(dtype: torch.dtype) -> Any:
    """Return what unwritten memory of a dtype holds."""
    return FILLERS.get(dtype, math.nan)


def apart(tensor: Tensor, between: float = math.nan) -> Tensor:
    """Return the same numbers [R, V] in rows that lie further apart, with ``between`` between them and behind."""
    wide = torch.full((len(tensor) + 1, tensor.shape[1] + GAP), between).to(tensor.dtype)
    wide[:-1, : tensor.shape[1]] = tensor
    return wide[:-1, : tensor.shape[1]]


def gaps_of(tensor: Tensor) -> Tensor:
    """Return what lies between and behind the rows of a tensor that ``apart`` made, as one vector."""
    rows, width = tensor.shape
    wide = tensor.as_strided((rows + 1, width + GAP), (width + GAP, 1))
    return torch.cat((wide[:-1, width:].flatten(), wide[-1]))


def guarded(numbers: Tensor, behind: float) -> Tensor:
    """Return a vector with ``behind`` in the memory behind it, for whoever reads too far."""
    longer = torch.cat((numbers, torch.full((GUARD,), behind).to(numbers.dtype)))
    return longer[: len(numbers)]


def with_signs(x: Tensor) -> dict[str, Tensor]:
    """Return logits and where their zeros are negative: a comparison takes the two zeros for equal, and bits differ."""
    return {"logits": x, "minus zeros": (x == 0) & x.signbit()}


@contextmanager
def set_for_now(module: Any, **constants: Any) -> Iterator[None]:
    """Set constants of a module, and set them back at the end."""
    before = {name: getattr(module, name) for name in constants if hasattr(module, name)}
    for name, value in constants.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


class Fresh:
    """What ``torch.empty`` and ``torch.empty_like`` give for now: poison, and a guard behind it."""

    def __init__(self) -> None:
        """Begin without tensors."""
        self.made: list[tuple[Tensor, int]] = []

    def empty(self, *size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        """Stand in for ``torch.empty`` on CPUs."""
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        shape = options.get("size", shape)
        dtype, count = dtype or torch.get_default_dtype(), math.prod(shape)
        memory = torch.full((count + GUARD,), filler(dtype), dtype=dtype)
        self.made.append((memory, count))
        return memory[:count].view(tuple(shape))

    def empty_like(self, tensor: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        """Stand in for ``torch.empty_like``; what it gives has no gaps."""
        return self.empty(*tensor.shape, dtype=dtype or tensor.dtype)

    def untouched(self) -> bool:
        """Whether nothing was written behind any of the tensors."""
        guards = [memory[count:] for memory, count in self.made]
        return all(
            bool((guard.isnan() if guard.is_floating_point() else guard == filler(guard.dtype)).all())
            for guard in guards
        )


@contextmanager
def poisoned() -> Iterator[Fresh]:
    """Fill what is allocated with poison for now."""
    fresh = Fresh()
    with set_for_now(torch, empty=fresh.empty, empty_like=fresh.empty_like):
        yield fresh
