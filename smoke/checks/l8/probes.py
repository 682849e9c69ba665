"""Kernels that let a probe of L8 call one function of a candidate's kernel by itself.

Owns: loads and stores around a call. Must not know: what the function should give. Imported inside probes alone: where
Triton is not built, the checks of L8 are skipped and every other one must run.
"""

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def noise_kernel(gumbel: tl.constexpr, hashes: Any, noise: Any, size: tl.constexpr) -> None:
    """Turn ``size`` hashes into noise."""
    place = tl.arange(0, size)
    tl.store(noise + place, gumbel(tl.load(hashes + place).to(tl.uint32)))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def key_kernel(order_key: tl.constexpr, x: Any, keys: Any, size: tl.constexpr) -> None:
    """Map ``size`` numbers to keys."""
    place = tl.arange(0, size)
    tl.store(keys + place, order_key(tl.load(x + place)).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def number_kernel(order_key: tl.constexpr, number_of: tl.constexpr, x: Any, numbers: Any, size: tl.constexpr) -> None:
    """Map ``size`` numbers to keys and back."""
    place = tl.arange(0, size)
    tl.store(numbers + place, number_of(order_key(tl.load(x + place))))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def mass_kernel(mass_of: tl.constexpr, x: Any, peak: Any, masses: Any, size: tl.constexpr) -> None:
    """Return the masses of ``size`` logits."""
    place = tl.arange(0, size)
    tl.store(masses + place, mass_of(tl.load(x + place), tl.load(peak)))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def cut_kernel(
    find_cut: tl.constexpr,
    logits: Any,
    peak: Any,
    target: Any,
    cut: Any,
    above: Any,
    width: Any,
    by_mass: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Search one row for the cut of a count, or of a mass."""
    low = tl.full([], -float("inf"), tl.float32)
    found, weight = find_cut(logits, width, tl.load(peak), low, tl.load(target), by_mass, block)
    tl.store(cut, found)
    tl.store(above, weight.to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def mass_above_kernel(
    mass_above: tl.constexpr, logits: Any, peak: Any, cut: Any, limit: Any, mass: Any, width: Any, block: tl.constexpr
) -> None:
    """Add up the masses of one row above a cut."""
    tl.store(mass, mass_above(logits, width, tl.load(peak), tl.load(cut), tl.load(limit), block).to(tl.int64))
