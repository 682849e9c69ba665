"""Sums, products, softmax and curves that are rounded otherwise: a stand-in for CPUs that are not at hand.

Libraries add in the order that suits a CPU, so the last bits of a sum differ between machines. Here torch and NumPy
compute float32 in float64 and round once, at the end. What is float64 already is added from its end to its beginning.

``rounded_otherwise()`` does so in this process, in all of its threads. The variables ``OTHERWISE`` do so in a new one,
be it Python, pytest or a notebook's kernel. Numba's loops and oneDNN's packed weights stay as they are.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

ROOT = Path(__file__).parents[2]
OTHERWISE = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests" / "support" / "other_rounding", ROOT)))}
# What the least CPU of its kind has. The libraries read it when they are imported.
LEAST = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "OPENBLAS_CORETYPE": "Nehalem",
}
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

CURVES = "exp log sin cos tanh sigmoid silu rsqrt pow.Tensor_Scalar".split()
SUMS = "sum sum.dim_IntList mean mean.dim".split()
SOFTMAXES = "_softmax _log_softmax".split()
PRODUCTS = "mm bmm addmm baddbmm addmv mv dot".split()
OTHERS = "logsumexp linalg_vector_norm _scaled_dot_product_flash_attention_for_cpu".split()
NUMPY = "sum cumsum matmul".split()


def call(kernel: Any, *args: Any, **options: Any) -> Any:
    return kernel.call_boxed(CPU, *args, **options)


def sum_turned(kernel: Any, x: Tensor, dim: Any = None, *rest: Any) -> Tensor:
    return call(kernel, x.flatten().flip(0)) if dim is None else call(kernel, x.flip(dim), dim, *rest)


def softmax_turned(kernel: Any, x: Tensor, dim: int, *rest: Any) -> Tensor:
    return call(kernel, x.flip(dim), dim, *rest).flip(dim)


def product_turned(kernel: Any, *args: Any, **options: Any) -> Tensor:
    *start, a, b = args
    return call(kernel, *start, a.flip(-1), b.flip(max(b.dim() - 2, 0)), **options)


def running_sum(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Add one by one. A total of float32 is float32 here, and float64 in torch."""
    x = x if dtype is None else x.to(dtype)
    if not x.is_floating_point():
        return torch.from_numpy(np.cumsum(x.numpy(), axis=dim))
    total = np.longdouble if x.dtype == torch.float64 else np.float32
    sums = np.add.accumulate(x.double().numpy().astype(total), axis=dim)
    return torch.from_numpy(sums.astype(np.float64)).to(x.dtype)


TURNED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(CURVES + OTHERS, call),
    **dict.fromkeys(SUMS, sum_turned),
    **dict.fromkeys(SOFTMAXES, softmax_turned),
    **dict.fromkeys(PRODUCTS, product_turned),
}


def otherwise(name: str) -> Callable[..., Any]:
    """Return the kernel of ``aten::name`` for the CPU, rounded otherwise."""
    packet, _, overload = name.partition(".")
    kernel = torch.library.get_kernel(getattr(getattr(torch.ops.aten, packet), overload or "default"), "CPU")

    def compute(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
        if name in SUMS and dtype is not None:
            x = x.to(dtype)
        if not x.is_floating_point():
            kept = {} if dtype is None else {"dtype": dtype}
            return call(kernel, x, *args, **kept, **options)
        if x.dtype == torch.float64:
            return TURNED[name](kernel, x, *args, **options)
        wide = call(kernel, *as_type(torch.float64, (x, *args)), **as_type(torch.float64, options))
        return as_type(x.dtype, wide)

    return compute


def as_type(dtype: torch.dtype, values: Any) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, values)


def in_numpy(function: Callable[..., Any], x: Any, *args: Any, **options: Any) -> Any:
    """Return what ``function`` of NumPy returns for float32 arrays, computed in float64."""
    arrays = [each for each in (x, *args) if isinstance(each, np.ndarray)]
    if not arrays or {each.dtype for each in arrays} != {np.dtype(np.float32)}:
        return function(x, *args, **options)
    wide = (each.astype(np.float64) if isinstance(each, np.ndarray) else each for each in (x, *args))
    return function(*wide, **{name: value for name, value in options.items() if name != "dtype"}).astype(np.float32)


@contextmanager
def rounded_otherwise() -> Iterator[None]:
    """Round otherwise inside this context."""
    kernels = {"cumsum": running_sum, **{name: otherwise(name) for name in TURNED}}
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings(action="ignore"):  # each of the kernels had one before
            for name, kernel in kernels.items():
                library.impl(name, kernel, "CPU", allow_override=True)
        with mock.patch.multiple(np, **{name: partial(in_numpy, getattr(np, name)) for name in NUMPY}):
            yield
    finally:
        library._destroy()
