"""The operations between two matrix products, as loops over numbers: what you would write if Python were fast.

Every loop is compiled when it is first called and kept on disk; NumPy arrays go in, and results are written into arrays
that the caller has.

One operation of torch on the rows of a decode step takes microseconds before it computes anything, and a norm is five
of them. A loop is one call, whatever it does. It runs on one thread, since waking another can take 0.2 ms, longer than
most loops.

The order of additions within a row depends on the row's length alone, so no row's bits depend on the other rows.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numba import njit, uint16
from numba.core.caching import FunctionCache
from numba.extending import overload
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.integer[Any]]
Halves = NDArray[np.uint16] | Floats  # the upper halves of float32 numbers, which is what bfloat16 is; or all of them
Float = Any  # one number: a float32 for the compiler

ONE = np.float32(1)
HALF = np.float32(0.5)
LOG2_E = np.float32(math.log2(math.e))
# ln 2 in two parts: the first has so few bits that a product with a whole number of up to 8 bits is exact.
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
SMALLEST, LARGEST = np.float32(-87.0), np.float32(88.0)  # beyond them exp is 0 or no longer a float32


class SharedCache(FunctionCache):
    """Numba's cache on disk, for several processes at a time.

    Numba takes a free number for a file, and writes the file a moment later. If another process took the number too,
    one signature of a loop has the code of another from then on: with other bits, or for other arrays. And it compiles
    a loop again when the loop's own file has changed; here when any file of the folder has, as what it calls is part
    of it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Find a folder. Raises ``RuntimeError`` if there is none that can be written."""
        super().__init__(function)
        files = sorted(Path(function.__code__.co_filename).parent.glob("*.py"))
        self._cache_file._source_stamp = [(each.name, each.stat().st_mtime, each.stat().st_size) for each in files]
        self.lock = FileLock(Path(self.cache_path) / "loops.lock")

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return what is kept for a signature, ``None`` if nothing is."""
        with self.lock:
            return super().load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled for a signature. Mutates."""
        with self.lock:
            super().save_overload(sig, data)


def compiled(*freedoms: str, parallel: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function for this CPU at its first call. ``freedoms``: what the compiler may do to sums of floats.

    What it calls becomes part of it. Elsewhere it would be compiled once more there, its sums in another order perhaps,
    and which one is called would depend on what the process has compiled and loaded before.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        options = {"nogil": True, "error_model": "numpy", "parallel": parallel, "forceinline": not parallel}
        loop = njit(fastmath=set(freedoms), **options)(function)
        with suppress(RuntimeError):
            loop._cache = SharedCache(function)
        return loop  # type: ignore[no-any-return]

    return decorate


# A sum may be taken in lanes that are added at its end. Without this freedom the CPU adds one number after the other.
in_lanes = compiled("reassoc", "contract", "nsz")
as_written = compiled("contract")


def wide(x: Any) -> Float:
    """Return a number of ``Halves`` as a float32."""


def narrow(x: Float, out: Halves) -> Any:
    """Return ``x`` as ``out`` holds it."""


@as_written
def rounded(x: Float) -> Any:
    """Return the nearest bfloat16 number, the even one on ties, as 16 bits. A NaN stays one."""
    bits = np.float32(x).view(np.uint32)
    nearest = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return np.uint16((bits | np.uint32(0x400000) if np.isnan(x) else nearest) >> np.uint32(16))


# The compiler looks up which of two bodies the type of an array asks for.
overload(wide)(
    lambda x: (lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)) if x == uint16 else (lambda x: x)
)
overload(narrow)(lambda x, out: (lambda x, out: rounded(x)) if out.dtype == uint16 else (lambda x, out: x))


@as_written
def exponential(x: Float) -> Float:
    """Return e**x to within 1 unit in the last place, 1.2 on a CPU that does not add a product at once.

    It is 0 below -87 and e**88 above 88.

    ``math.exp`` is a call for every number. This is arithmetic alone, which the compiler does for 8 or 16 at once:
    x = n ln 2 + r, e**x = 2**n e**r, with r in [-0.35, 0.35] where a polynomial is enough (Moshier, Cephes).
    """
    clipped = min(max(x, SMALLEST), LARGEST)
    n = np.floor(clipped * LOG2_E + HALF)  # math.floor's is an integer; times a float32 it would be a float64
    r = clipped - n * LN2_HIGH - n * LN2_LOW
    tail = np.float32(1.9875691500e-4)
    tail = tail * r + np.float32(1.3981999507e-3)
    tail = tail * r + np.float32(8.3334519073e-3)
    tail = tail * r + np.float32(4.1665795894e-2)
    tail = tail * r + np.float32(1.6666665459e-1)
    tail = tail * r + HALF
    tail = tail * r + ONE
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)  # 2**n, by its exponent bits
    return np.float32(0) if x < SMALLEST else (tail * r + ONE) * power


@in_lanes
def inverse_rms(x: Halves, eps: float) -> Float:
    """Return 1 / sqrt(mean(x**2) + eps) of one row ``x`` [H]."""
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += wide(x[i]) * wide(x[i])
    return ONE / np.sqrt(total / np.float32(x.shape[0]) + np.float32(eps))


@as_written
def rms_norm(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """Write the RMS norm of every row of ``x`` [T, H] into ``out`` [T, H]; ``weight`` [H]."""
    for t in range(x.shape[0]):
        scale = inverse_rms(x[t], eps)
        for i in range(x.shape[1]):
            out[t, i] = x[t, i] * scale * weight[i]


@as_written
def add_rms_norm(x: Halves, residual: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """Add ``x`` [T, H] to ``residual`` [T, H] and write the norm of the sum into ``out`` [T, H]. Mutates both."""
    for t in range(x.shape[0]):
        for i in range(x.shape[1]):
            residual[t, i] += wide(x[t, i])
    rms_norm(residual, weight, eps, out)


@as_written
def silu_and_mul(gate_up: Halves, out: Floats) -> None:
    """Write silu(gate) * up into ``out`` [T, F]; ``gate_up`` [T, 2 F] holds the gates, then the ups."""
    width = out.shape[1]
    for t in range(out.shape[0]):
        gate, up = gate_up[t, :width], gate_up[t, width:]
        for i in range(width):
            x = wide(gate[i])
            out[t, i] = x / (ONE + exponential(-x)) * wide(up[i])


@as_written
def rotary_table(positions: Ints, frequencies: Floats, cos: Floats, sin: Floats) -> None:
    """Write cosine and sine of every position's angles. ``positions`` [T], ``frequencies`` [D / 2]; two [T, D / 2]."""
    for t in range(positions.shape[0]):
        for i in range(frequencies.shape[0]):
            angle = np.float32(positions[t]) * frequencies[i]
            cos[t, i] = math.cos(angle)
            sin[t, i] = math.sin(angle)


@as_written
def norm_and_rotate(heads: Halves, weights: Floats, cos: Floats, sin: Floats, eps: float, q: Floats, k: Floats) -> None:
    """Norm and turn the query and key heads of every row into ``q`` [T, Hq, D] and ``k`` [T, Hkv, D].

    ``heads`` [T, Hq + 2 Hkv, D]; ``weights`` [Hq + Hkv, D], one for each of these heads, or [Hq + Hkv, 0]: then they
    are only turned; ``cos``, ``sin`` [T, D / 2]. Number i of a head turns with number i + D/2.
    """
    half = heads.shape[2] // 2
    num_heads = q.shape[1]
    norms = weights.shape[1] > 0
    for t in range(heads.shape[0]):
        for head in range(weights.shape[0]):
            x = heads[t, head]
            weight = weights[head]
            scale = inverse_rms(x, eps) if norms else np.float32(1.0)
            turned = q[t, head] if head < num_heads else k[t, head - num_heads]
            for i in range(half):
                a = wide(x[i]) * scale * weight[i] if norms else wide(x[i])
                b = wide(x[half + i]) * scale * weight[half + i] if norms else wide(x[half + i])
                turned[i] = a * cos[t, i] - b * sin[t, i]
                turned[half + i] = b * cos[t, i] + a * sin[t, i]
