"""Memory that shows what a kernel read or wrote where it should not, and what it left unwritten.

A kernel gets addresses. In Triton's interpreter a read outside a tensor finds whatever lies there, and a write outside
it damages another tensor; neither raises an error. So every tensor here lies in the middle of larger memory: what is
read around it is NaN, what is read or written around it is noticed, and an output that was not written is NaN as well.
A kernel can be told that rows lie 2**30 numbers apart, or come a million times: its loads and stores are led back to
where they really lie. So offsets beyond 32 bits cost no memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
FAR = 1 << 30  # numbers between two rows: those of the fourth begin where 32 bits end
BEYOND = 1 << 60  # an address that no memory has
WINDOW = 1 << 45  # bytes from one such address to the next
LEAST_SUMMED = 256  # bits: the compiler wants a product to sum over 16 numbers of 16 bits, or 8 of 32
ON_GPU = "wrong on a GPU"  # what stands before ``Guard.faults``
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


@dataclass(frozen=True)
class Far:
    """A tensor that kernels find elsewhere: its rows of ``row`` numbers lie ``pitch`` apart, and come ``times`` times.

    ``by_axis``: rows are those of axis 0, and the launcher hears of the pitch.
    """

    name: str
    tensor: Tensor
    row: int
    by_axis: bool = False
    pitch: int = FAR
    times: int = 1

    def find(self, numbers: Any) -> tuple[Any, Any]:
        """Return where these numbers of the far tensor really are, as numbers of ``tensor``, and which are nowhere."""
        index, rest = np.divmod(numbers, self.pitch)
        length = extent(self.tensor)
        rows = max(1, -(-length // self.row))
        place = index % rows * self.row + rest
        return place, (index < 0) | (index >= rows * self.times) | (rest >= self.row) | (place >= length)


class Guard:
    """Tensors in memory with margins. ``faults`` says what kernels did that a GPU would not forgive.

    ``margin`` lies around the tensors that ``allocate`` returns, if it fits their dtype.
    """

    def __init__(self, margin: float) -> None:
        """Hold nothing."""
        self.margin = margin
        self.held: list[tuple[str, Tensor, Tensor, Tensor]] = []  # name, memory, what is outside the tensor, its bits
        self.far: list[Far] = []
        self.is_honest = False  # whether even a tensor of ``far`` tells its real strides
        self.noted = set[str]()
        self.unread = set[str]()  # names of tensors that a kernel has no reason to read

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

    def stretch(self, name: str, tensor: Tensor, row: int = 0) -> Tensor:
        """Have kernels find the rows of ``tensor`` FAR numbers apart, ``row`` numbers each; 0: those of axis 0."""
        self.far.append(Far(name, tensor, row or tensor.stride(0), by_axis=not row))
        return tensor

    def repeat(self, name: str, tensor: Tensor, times: int) -> Tensor:
        """Have kernels find the rows of ``tensor``, which lie without gaps, ``times`` times one after the other."""
        self.far.append(Far(name, tensor, tensor.shape[-1], pitch=tensor.shape[-1], times=times))
        return tensor

    def faults(self) -> list[str]:
        """Say outside which tensors something was read or written, and what else was noted."""
        written = {n for n, memory, outside, before in self.held if not torch.equal(bits(memory)[outside], before)}
        return sorted({f"written outside {name}" for name in written} | self.noted)

    def stride(self, tensor: Tensor, strides: tuple[int, ...], *axis: int) -> Any:
        """Return what a launcher is told of the ``strides`` of ``tensor``."""
        if not self.is_honest and any(tensor is far.tensor and far.by_axis for far in self.far):
            strides = (FAR, *strides[1:])
        return strides[axis[0]] if axis else strides

    def address(self, real: int) -> int:
        """Return the address that a kernel gets for the ``real`` one."""
        places = (number for number, far in enumerate(self.far) if address_of(far.tensor) == real)
        return next((BEYOND + number * WINDOW for number in places), real)

    def locate(self, addresses: Any, mask: Any, verb: str) -> tuple[Any, Any]:
        """Note what is outside every tensor -> the real addresses, and the mask without those that are nowhere.

        ``verb`` says what is done there. Both arrays have one shape.
        """
        for number, far in enumerate(self.far):
            size = far.tensor.itemsize
            offset = addresses.astype(np.int64) - (BEYOND + number * WINDOW)
            mine = abs(offset) < WINDOW // 2
            place, is_nowhere = far.find(offset // size)
            real = address_of(far.tensor) + place * size
            inside = mine & ~is_nowhere
            if (mask & mine & ~inside).any():
                self.noted.add(f"{verb} outside {far.name}")
            addresses = np.where(inside, real.astype(np.uint64), addresses)
            mask = mask & (inside | ~mine)
        if verb == "read":
            self.note_reads(addresses[mask])
        return addresses, mask

    def note_reads(self, addresses: Any) -> None:
        """Note the tensors around which something is read, and those that nothing should read."""
        for name, memory, _, _ in self.held if addresses.size else ():
            start = address_of(memory)
            margin = MARGIN * memory.itemsize
            here = addresses[(addresses >= start) & (addresses < start + memory.nbytes)]
            if name in self.unread and here.size:
                self.noted.add(f"read {name}")
            if ((here < start + margin) | (here >= start + memory.nbytes - margin)).any():
                self.noted.add(f"read outside {name}")

    def allocate(self, *size: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Return a new tensor of NaN, or of ``UNWRITTEN`` integers, with a margin around it."""
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        kind = dtype or torch.float32
        unwritten = torch.full(tuple(shape), poison_of(kind), dtype=kind)
        whole = -7 if kind.is_signed else 7
        margin = self.margin if kind.is_floating_point else whole
        return self.put(f"an allocated tensor {list(shape)}", unwritten, margin=margin)


def address_of(tensor: Tensor) -> int:
    """Return the real address of a tensor's first number."""
    return int(tensor.storage_offset()) * tensor.itemsize + tensor.untyped_storage().data_ptr()


def extent(tensor: Tensor) -> int:
    """Return how many numbers of memory lie from the first to the last of a tensor."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, real_strides(tensor), strict=True))


def real_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, whatever ``Tensor.stride`` is told to say."""
    return tuple(torch._C.TensorBase.stride(tensor))


def poisoned(load: Any, guard: Guard) -> Any:
    """Return the interpreter's ``load`` with poison, and not 0, where a mask is off and the kernel gives no ``other``.

    On a GPU it can be anything. ``guard`` notes what is read.
    """
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    def masked_load(builder: Any, pointers: Any, mask: Any, other: Any, *options: Any) -> Any:
        if other is None:
            kind = pointers.get_element_ty()
            dtype = np.dtype(_get_np_dtype(kind))
            poison = np.full(pointers.data.shape, np.nan if dtype.kind == "f" else UNWRITTEN)
            other = TensorHandle(poison.astype(dtype), kind)
        found, real = guard.locate(pointers.data, mask.data, "read")
        return load(builder, TensorHandle(found, pointers.dtype), TensorHandle(real, mask.dtype), other, *options)

    return masked_load


def honest(collect: Any, guard: Guard) -> Any:
    """Return the interpreter's ``collect``, which copies arguments by their strides; it hears the real ones."""

    def collected(executor: Any, *arguments: Any) -> Any:
        with patch.object(guard, "is_honest", True):
            return collect(executor, *arguments)

    return collected


def watched(store: Any, guard: Guard) -> Any:
    """Return the interpreter's ``store``; ``guard`` notes what is written."""
    from triton.runtime.interpreter import TensorHandle

    def masked_store(builder: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        found, real = guard.locate(pointers.data, mask.data, "written")
        return store(builder, TensorHandle(found, pointers.dtype), value, TensorHandle(real, mask.dtype), *options)

    return masked_store


def precise(dot: Any, guard: Guard) -> Any:
    """Return the interpreter's ``dot``; ``guard`` notes where a GPU would use tf32, or refuse the product."""

    def checked(builder: Any, a: Any, b: Any, total: Any, precision: Any, *options: Any) -> Any:
        if a.dtype.primitive_bitwidth == 32 and "IEEE" not in str(precision).upper():
            guard.noted.add("a product of float32 tiles without input_precision='ieee'")
        least = LEAST_SUMMED // a.dtype.primitive_bitwidth
        if a.data.shape[-1] < least:
            guard.noted.add(f"a product over {a.data.shape[-1]} numbers, of which the compiler wants {least}")
        return dot(builder, a, b, total, precision, *options)

    return checked


@contextmanager
def guarded(margin: float = -7.0) -> Iterator[Guard]:
    """While this is open, ``torch.empty``, ``torch.empty_like`` and ``Tensor.new_empty`` allocate from a guard.

    With a ``margin`` of NaN a read outside an allocated tensor spoils the result; with a number every write shows.
    What a kernel's mask leaves out is poison, if the load names no other number for it.
    """
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    guard = Guard(margin)

    def empty(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        return guard.allocate(*options.get("size", size), dtype=dtype)

    def empty_like(tensor: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return guard.allocate(tensor.shape, dtype=dtype or tensor.dtype)

    def new_empty(tensor: Tensor, *size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return guard.allocate(*size, dtype=dtype or tensor.dtype)

    operations = ("create_masked_load", "create_masked_store", "create_dot")
    load, store, dot = (getattr(InterpreterBuilder, name) for name in operations)
    with (
        patch.object(torch, "empty", empty),
        patch.object(torch, "empty_like", empty_like),
        patch.object(torch.Tensor, "new_empty", new_empty),
        patch.object(torch.Tensor, "stride", lambda x, *axis: guard.stride(x, real_strides(x), *axis)),
        patch.object(torch.Tensor, "data_ptr", lambda x: guard.address(address_of(x))),
        patch.object(GridExecutor, "_init_args_hst", honest(GridExecutor._init_args_hst, guard)),
        patch.object(InterpreterBuilder, "create_masked_load", poisoned(load, guard)),
        patch.object(InterpreterBuilder, "create_masked_store", watched(store, guard)),
        patch.object(InterpreterBuilder, "create_dot", precise(dot, guard)),
    ):
        yield guard
