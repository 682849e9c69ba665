"""Beside Triton's interpreter: a ``tl.dot`` in which no row's bits depend on where in its tile the row stands.

Owns: the one operation of the interpreter that is replaced. Must not know: kernels.

The interpreter hands a ``tl.dot`` to NumPy, and NumPy to a BLAS library. Some CPUs' code there (OpenBLAS for AVX2, say)
adds in another order for some rows of a tile than for others. A GPU's tensor cores do not, so a kernel that is right
would break its promise here and nowhere else.
"""

from typing import Any

import numpy as np
from triton.runtime import interpreter


def steady_dot(self: Any, a: Any, b: Any, total: Any, *precision: Any) -> Any:
    """Return ``a @ b + total`` for tiles [M, K], [K, N] and [M, N]: ``InterpreterBuilder.create_dot``.

    Every product is rounded, and added to those before it for all of the tile at once: one order, whatever the CPU.
    """
    if 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):  # held as bytes: Triton knows what they mean
        return blas_dot(self, a, b, total, *precision)
    left, right = (tile.data.astype(total.data.dtype) for tile in (a, b))
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity go on, as on a GPU
        products = left[..., :, :, None] * right[..., None, :, :]  # [M, K, N]
        return type(total)(np.add.reduce(products, axis=-2) + total.data, total.dtype.scalar)


blas_dot = interpreter.InterpreterBuilder.create_dot


def install() -> None:
    """Have every kernel that is interpreted in this process use ``steady_dot``. Mutates Triton's interpreter."""
    interpreter.InterpreterBuilder.create_dot = steady_dot
