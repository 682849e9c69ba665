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
from typing import Any

import numpy as np
from numba import njit, uint16
from numba.extending import overload
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.integer[Any]]
Halves = NDArray[np.uint16] | Floats  # the upper halves of float32 numbers, which is what bfloat16 is; or all of them
Float = Any  # one number: a float32 for the compiler
Head = tuple[bool, ...]  # of the length of a head: a tuple's length is known to the compiler, an array's is not

ONE = np.float32(1)
HALF = np.float32(0.5)
LOG2_E = np.float32(math.log2(math.e))
# ln 2 in two parts: the first has so few bits that a product with a whole number of up to 8 bits is exact.
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
AT_ONCE = 4  # keys that attention takes together: their sums do not wait for one another
SMALLEST, LARGEST = np.float32(-87.0), np.float32(88.0)  # beyond them exp is 0 or no longer a float32


def compiled(*freedoms: str, parallel: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function for this CPU at its first call. ``freedoms``: what the compiler may do to sums of floats."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        options = {"fastmath": set(freedoms), "nogil": True, "error_model": "numpy", "parallel": parallel}
        try:
            return njit(cache=True, **options)(function)  # type: ignore[no-any-return]
        except RuntimeError:  # no folder to keep it in
            return njit(**options)(function)  # type: ignore[no-any-return]

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
def inverse_rms(x: Floats, eps: float) -> Float:
    """Return 1 / sqrt(mean(x**2) + eps) of one row ``x`` [H]."""
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    return ONE / np.sqrt(total / np.float32(x.shape[0]) + np.float32(eps))


@as_written
def rms_norm(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """Write the RMS norm of every row of ``x`` [T, H] into ``out`` [T, H]; ``weight`` [H]."""
    for t in range(x.shape[0]):
        scale = inverse_rms(x[t], eps)
        for i in range(x.shape[1]):
            out[t, i] = x[t, i] * scale * weight[i]


@as_written
def add_rms_norm(x: Floats, residual: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """Add ``x`` [T, H] to ``residual`` [T, H] and write the norm of the sum into ``out`` [T, H]. Mutates both."""
    for t in range(x.shape[0]):
        for i in range(x.shape[1]):
            residual[t, i] += x[t, i]
    rms_norm(residual, weight, eps, out)


@as_written
def silu_and_mul(gate_up: Floats, out: Floats) -> None:
    """Write silu(gate) * up into ``out`` [T, F]; ``gate_up`` [T, 2 F] holds the gates, then the ups."""
    width = out.shape[1]
    for t in range(out.shape[0]):
        gate, up = gate_up[t, :width], gate_up[t, width:]
        for i in range(width):
            out[t, i] = gate[i] / (ONE + exponential(-gate[i])) * up[i]


@as_written
def rotary_table(positions: Ints, frequencies: Floats, cos: Floats, sin: Floats) -> None:
    """Write cosine and sine of every position's angles. ``positions`` [T], ``frequencies`` [D / 2]; two [T, D / 2]."""
    for t in range(positions.shape[0]):
        for i in range(frequencies.shape[0]):
            angle = np.float32(positions[t]) * frequencies[i]
            cos[t, i] = math.cos(angle)
            sin[t, i] = math.sin(angle)


@as_written
def norm_and_rotate(heads: Floats, weights: Floats, cos: Floats, sin: Floats, eps: float, q: Floats, k: Floats) -> None:
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
                a = x[i] * scale * weight[i] if norms else x[i]
                b = x[half + i] * scale * weight[half + i] if norms else x[half + i]
                turned[i] = a * cos[t, i] - b * sin[t, i]
                turned[half + i] = b * cos[t, i] + a * sin[t, i]


@as_written
def store(k: Floats, v: Floats, keys: Halves, values: Halves, slots: Ints) -> None:
    """Copy ``k`` and ``v`` [T, Hkv, D] into the ``slots`` [T] of ``keys`` and ``values`` [Hkv, all slots, D]."""
    for t in range(k.shape[0]):
        for head in range(k.shape[1]):
            for i in range(k.shape[2]):
                keys[head, slots[t], i] = narrow(k[t, head, i], keys)
                values[head, slots[t], i] = narrow(v[t, head, i], values)


@as_written
def rows_of_short(bounds: Ints, lengths: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Return the packed rows of sequences with up to ``most`` queries, their sequences and the keys that they see.

    ``bounds`` [N + 1] as ``cu_seqlens_q``, ``lengths`` [N] as ``seq_lens_kv`` -> three [R].
    """
    rows, owners, visible = np.empty((3, bounds[-1]), np.int64)
    count = 0
    for n in range(lengths.shape[0]):
        first = bounds[n]
        end = bounds[n + 1]
        for row in range(first, end if end - first <= most else first):
            rows[count] = row
            owners[count] = n
            visible[count] = lengths[n] - (end - 1 - row)
            count += 1
    return rows[:count], owners[:count], visible[:count]


@as_written
def find_slots(pages: Ints, page_size: int, lengths: Ints) -> tuple[Ints, Ints]:
    """Return the slots of every sequence's keys, one sequence after the other, and where each begins.

    They are those of ``AttentionMetadata.kv_slots``, without torch's calls for every sequence of every step.
    ``pages`` [N, most pages], ``lengths`` [N] -> [sum of lengths], [N].
    """
    starts = np.cumsum(lengths) - lengths
    slots = np.empty(lengths.sum(), np.uintp)  # unsigned, so that no loop asks whether one is negative
    for n in range(lengths.shape[0]):
        own = slots[starts[n] : starts[n] + lengths[n]]
        for page in range((lengths[n] + page_size - 1) // page_size):
            part = own[page * page_size : (page + 1) * page_size]
            for i in range(part.shape[0]):
                part[i] = pages[n, page] * page_size + i
    return slots, starts


@as_written
def attend(
    q: Floats,
    keys: Halves,
    values: Halves,
    rows: Ints,
    owners: Ints,
    lengths: Ints,
    slots: Ints,
    starts: Ints,
    head: Head,
    out: Floats,
) -> None:
    """Attend for some rows of a step, reading keys and values where they lie.

    ``q`` and ``out`` [T, Hq, D]; ``keys`` and ``values`` [Hkv, slots, D]; ``rows`` [R] are the packed rows to compute,
    ``owners`` [R] their sequences, ``lengths`` [R] the keys that they see; ``slots`` and ``starts`` as ``find_slots``
    returns them; ``head`` of length D. Mutates the rows ``rows`` of ``out``.
    """
    group = q.shape[1] // keys.shape[0]  # query heads that share a key-value head
    weights = np.empty((group, lengths.max() + AT_ONCE if len(lengths) else 0), np.float32)
    for kv_head in range(keys.shape[0]):  # outside, so that the rows of one sequence find its keys in the CPU's cache
        mine = slice(kv_head * group, (kv_head + 1) * group)
        for r in range(rows.shape[0]):
            seen = slots[starts[owners[r]] : starts[owners[r]] + lengths[r]]
            score(q[rows[r], mine], keys[kv_head], seen, head, weights)
            for g in range(group):
                softmax(weights[g], lengths[r])
            mix(weights, values[kv_head], seen, head, out[rows[r], mine])


@as_written
def at_once(slots: Ints, i: int) -> tuple[int, int, int, int]:
    """Return ``AT_ONCE`` slots from number ``i`` on; the last one stands for those that are missing."""
    last = slots.shape[0] - 1
    return slots[i], slots[min(i + 1, last)], slots[min(i + 2, last)], slots[min(i + 3, last)]


@in_lanes
def score(q: Floats, keys: Halves, slots: Ints, head: Head, scores: Floats) -> None:
    """Write the scaled products of ``q`` [group, D] with the keys of ``slots`` [n] into ``scores`` [group, n, …]."""
    scale = ONE / np.sqrt(np.float32(len(head)))
    for i in range(0, slots.shape[0], AT_ONCE):
        n0, n1, n2, n3 = at_once(slots, i)
        k0, k1, k2, k3 = keys[n0], keys[n1], keys[n2], keys[n3]
        for g in range(q.shape[0]):
            s0 = s1 = s2 = s3 = np.float32(0)
            for d in range(len(head)):
                s0 += q[g, d] * wide(k0[d])
                s1 += q[g, d] * wide(k1[d])
                s2 += q[g, d] * wide(k2[d])
                s3 += q[g, d] * wide(k3[d])
            for n, total in enumerate((s0, s1, s2, s3)):
                scores[g, i + n] = total * scale


@in_lanes
def softmax(scores: Floats, length: int) -> None:
    """Turn the first ``length`` of ``scores`` into probabilities, and what pads into 0, in place."""
    largest = scores[0]
    total = np.float32(0)
    for i in range(length):
        largest = max(largest, scores[i])
    for i in range(length):
        scores[i] = exponential(scores[i] - largest)
        total += scores[i]
    share = ONE / total
    for i in range(length):
        scores[i] *= share
    scores[length : length + AT_ONCE] = 0


@in_lanes
def mix(weights: Floats, values: Halves, slots: Ints, head: Head, out: Floats) -> None:
    """Write the sums of ``weights`` [group, n, …] times the values of ``slots`` [n] into ``out`` [group, D]."""
    out[:] = 0
    for i in range(0, slots.shape[0], AT_ONCE):
        n0, n1, n2, n3 = at_once(slots, i)
        v0, v1, v2, v3 = values[n0], values[n1], values[n2], values[n3]
        for g in range(out.shape[0]):
            w0 = weights[g, i]
            w1 = weights[g, i + 1]
            w2 = weights[g, i + 2]
            w3 = weights[g, i + 3]
            for d in range(len(head)):
                out[g, d] += w0 * wide(v0[d]) + w1 * wide(v1[d]) + w2 * wide(v2[d]) + w3 * wide(v3[d])
