"""A GPU that is not there: tensors that say they are on "cuda" and are computed on the CPU.

On a GPU an operation that mixes devices raises. On a machine without one every tensor is on the CPU, and a forgotten
``device=`` stays unseen until the code runs on a GPU. This mode sees every call into torch, keeps book of which tensors
were asked for on "cuda" or come from such ones, and raises where a GPU would. It computes nothing else: values are
those of the CPU. What it cannot see is what kernels do, and what happens inside of one call.
"""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
NEEDS_CPU = ("numpy", "__array__")
MAKE_SUBCLASS = torch.Tensor._make_subclass
CUDA: dict[str, Any] = {
    "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=132),  # those of an H200
    **{name: lambda *_: None for name in ("synchronize", "empty_cache", "reset_peak_memory_stats")},
    **{name: lambda *_: 0 for name in ("memory_allocated", "max_memory_allocated")},
}
MOVES = ("to", "cuda", "cpu")
AS_THEY_ARE = ("__set__", "copy_")  # between devices, or of no tensor


def device_of(tensor: Tensor | torch.Generator) -> torch.device:
    """Return where a tensor or a generator pretends to be."""
    return GPU if getattr(tensor, "is_pretended", False) else CPU


def put(result: Any, device: torch.device) -> Any:
    """Note for every tensor of ``result`` that it is on ``device``."""

    def note(tensor: Tensor) -> Tensor:
        tensor.is_pretended = device == GPU  # type: ignore[attr-defined]
        return tensor

    return tree_map_only(Tensor, note, result)


def target_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device that a call names, by keyword or as ``Tensor.to`` takes it, and drop the keyword."""
    named = kwargs.pop("device", None)
    for argument in (named, *args):
        if isinstance(argument, torch.device) or (isinstance(argument, str) and argument[:4] in ("cuda", "cpu")):
            return GPU if torch.device(argument).type == "cuda" else CPU
    return None


def make_subclass(cls: Any, data: Tensor, requires_grad: bool = False, **kwargs: Any) -> Tensor:
    """Make a parameter of a tensor, on the same device."""
    made: Tensor = put(MAKE_SUBCLASS(cls, data, requires_grad, **kwargs), device_of(data))
    return made


class PretendGenerator(torch.Generator):
    """A generator that says where it is; the numbers are those of the CPU's."""

    is_pretended: bool

    def __new__(cls, device: torch.device | str = "cpu") -> "PretendGenerator":
        """Make a generator of the CPU."""
        made = super().__new__(cls)
        made.is_pretended = torch.device(device).type == "cuda"
        return made


class PretendGpu(TorchFunctionMode):
    """While this is entered there is a GPU, as far as devices of tensors go."""

    def __enter__(self) -> "PretendGpu":
        """Let generators, parameters and what asks ``torch.cuda`` for facts find a GPU, too."""
        self.stand_ins = ExitStack()
        self.stand_ins.enter_context(patch.object(torch, "Generator", PretendGenerator))
        self.stand_ins.enter_context(patch.object(torch.Tensor, "_make_subclass", staticmethod(make_subclass)))
        self.stand_ins.enter_context(patch.multiple(torch.cuda, **CUDA))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        """Take it away again."""
        super().__exit__(*raised)
        self.stand_ins.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on the CPU, as though each tensor were where it says."""
        name = getattr(func, "__name__", str(func))
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:
            return device_of(args[0])
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return device_of(args[0]) == GPU
        if name in AS_THEY_ARE:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in NEEDS_CPU and device_of(args[0]) == GPU:
            raise TypeError(f"{name}: can't convert a tensor on cuda:0 to numpy; use Tensor.cpu() first")
        if name in MOVES:
            return move(name, args, kwargs)
        target = target_of((), kwargs)
        check_devices(name, args, tensors)
        if target is None:
            target = GPU if any(device_of(tensor) == GPU for tensor in tensors) else CPU
        generator = kwargs.get("generator")
        if generator is not None and device_of(generator) != target:
            raise RuntimeError(f"{name}: expected a generator on {target}, got one on {device_of(generator)}")
        return put(func(*args, **kwargs), target)


def move(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copy between devices: a tensor that changes its device is a new one."""
    source = args[0]
    target = GPU if name == "cuda" else CPU if name == "cpu" else target_of(args[1:], kwargs)
    if name == "to" and isinstance(args[1] if len(args) > 1 else None, Tensor):
        target = device_of(args[1])
    target = target or device_of(source)
    rest = [a for a in args[1:] if not isinstance(a, torch.device | str)]
    moved = source.to(*rest, **kwargs) if name == "to" and (rest or kwargs) else source
    if moved is source and target != device_of(source):
        moved = source.clone()
    return moved if moved is source else put(moved, target)


def check_devices(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    """Raise as a GPU does where tensors of two devices meet.

    Allowed are one number on the CPU beside tensors on the GPU, and indices on the CPU into a tensor on the GPU.
    """
    if name == "__getitem__" and device_of(args[0]) == GPU:
        return
    if name == "__setitem__":
        tensors = [args[0], *([args[2]] if isinstance(args[2], Tensor) and indexes(args[1]) else [])]
    on_gpu = [tensor for tensor in tensors if device_of(tensor) == GPU]
    on_cpu = [tensor for tensor in tensors if device_of(tensor) == CPU and tensor.dim() > 0]
    if on_gpu and on_cpu:
        shapes = [(str(device_of(tensor)), list(tensor.shape)) for tensor in tensors]
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but they are {shapes}")


def indexes(index: Any) -> bool:
    """Whether ``x[index] = value`` goes by tensors or lists, which wants the value on the same device; slices copy."""
    return any(isinstance(part, Tensor | list) for part in (index if isinstance(index, tuple) else (index,)))
