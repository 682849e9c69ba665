"""Beside Triton's interpreter: a ``tl.dot`` in which no row's bits depend on its place in the tile, and less to do.

The interpreter hands a ``tl.dot`` to NumPy, and NumPy to a BLAS library. Some CPUs' code there (OpenBLAS for AVX2, say)
adds in another order for some rows of a tile than for others. A GPU's tensor cores do not, so a kernel that is right
would break its promise here and nowhere else.

At every call of a function inside a kernel the interpreter replaces some hundred names of ``triton.language``, which
takes longer than most functions. Once in a launch is enough.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from triton import language
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


@cache
def languages(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of Triton's modules that a function sees, whose contents are replaced for it."""
    modules = (language, language.core)
    return frozenset(seen.__name__ for seen in function.__globals__.values() if any(seen is each for each in modules))


def replace_once(function: Callable[..., Any]) -> Any:
    """Do what Triton's ``_patch_lang`` does, unless it was done since the kernel began -> what its end restores."""
    if languages(function) in replaced:
        return interpreter._LangPatchScope()
    replaced.add(languages(function))
    scope = replace_names(function)
    restore = scope.restore

    def end() -> None:
        restore()
        replaced.clear()

    scope.restore = end
    return scope


blas_dot = interpreter.InterpreterBuilder.create_dot
replace_names = interpreter._patch_lang
replaced: set[frozenset[str]] = set()


def install() -> None:
    """Have every kernel that is interpreted in this process use what stands here. Mutates Triton's interpreter."""
    interpreter.InterpreterBuilder.create_dot = steady_dot
    interpreter._patch_lang = replace_once
