"""L8: what every launcher needs: whether kernels can run here, how large a block is, how a shape is checked."""

import torch
import triton
from torch import Tensor

# Triton decides at import and again at every ``@triton.jit``, so the two cannot differ: it is one answer per process.
INTERPRETED: bool = triton.knobs.runtime.interpret
if INTERPRETED:
    from mini_engine.kernels import interpreter

    interpreter.install()
BLOCK_ELEMENTS = 4096  # of a tile of whole rows: 32 numbers for each of 128 threads
LOG2_E = 1.4426950408889634  # exp(x) is exp2(x * LOG2_E), and exp2 is what the hardware has


def launch_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a kernel cannot run on tensors of ``device`` and ``dtype``, ``None`` if it can."""
    if INTERPRETED and dtype == torch.bfloat16:
        return "Triton's interpreter computes nonsense in bfloat16; use float32 there, bfloat16 needs a GPU"
    if INTERPRETED or device.type == "cuda":
        return None
    return f"no Triton kernel runs on device {device.type!r}; set TRITON_INTERPRET=1 to run them in the interpreter"


def block_shape(width: int) -> tuple[int, int]:
    """Return rows and columns of the tile that holds whole rows of ``width`` numbers: powers of 2, as Triton wants.

    The number of rows depends on the width alone, never on how many rows there are: another tile is another order of
    additions, and the bits of a row would depend on its neighbours.
    """
    columns = triton.next_power_of_2(width)
    return max(1, BLOCK_ELEMENTS // columns), columns


def check_shape(name: str, tensor: Tensor, *shape: int | None) -> None:
    """Raise ``ValueError`` unless ``tensor`` has this shape; ``None`` is any size.

    A kernel gets addresses, and a wrong shape would read and write someone else's memory without a word.
    """
    wanted = len(tensor.shape) == len(shape) and all(b in (None, a) for a, b in zip(tensor.shape, shape, strict=True))
    if not wanted:
        text = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has the shape {list(tensor.shape)}; it must be [{text}]")


def check_last_contiguous(**tensors: Tensor) -> None:
    """Raise ``ValueError`` unless the numbers of every row lie side by side; rows may be any distance apart."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{name} has strides {tensor.stride()}; the last must be 1, call .contiguous() on it first"
            )
