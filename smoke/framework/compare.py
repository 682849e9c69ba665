"""Comparisons between what a spec says and what a probe returned.

Owns: the walk through nested values and the words about the first difference. Must not know: what the values mean.
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from smoke.framework.check import Failure, Plain, Values, Verdict, is_tensor

if TYPE_CHECKING:  # torch is not needed to compare numbers and texts
    from torch import Tensor

Expected = Callable[[int], Values]
FLOAT_OF = {"torch.int32": "float32", "torch.int16": "float16"}


def remember(spec: Expected) -> Expected:
    """Compute a spec once per seed."""
    return lru_cache(maxsize=4)(spec)


def bitwise(spec: Expected) -> Verdict:
    """Return a verdict that accepts exactly the values of ``spec``: same shapes, same dtypes, same bits."""
    expected = remember(spec)
    return lambda seed, got: differences(expected(seed), got, None)


def close(spec: Expected, tolerance: float) -> Verdict:
    """Return a verdict that accepts floats within ``tolerance`` (absolute, and relative above 1) of ``spec``.

    The dtype of a float tensor is not compared: a float64 spec has another one.
    """
    expected = remember(spec)
    return lambda seed, got: differences(expected(seed), got, tolerance)


def differences(expected: Plain, got: Plain, tolerance: float | None, case: str = "") -> list[Failure]:
    """Walk both values and return the differences, at most one per leaf; ``tolerance`` None means bitwise."""
    if is_tensor(expected):
        return tensor_difference(expected, got, tolerance, case)
    if isinstance(expected, Mapping):
        if not isinstance(got, Mapping) or set(got) != set(expected):
            keys = sorted(got) if isinstance(got, Mapping) else type(got).__name__
            return [Failure(case or "the result's parts", "", str(sorted(expected)), str(keys))]
        found = []
        for key, value in expected.items():
            found += differences(value, got[key], tolerance, f"{case}, {key}" if case else key)
        return found
    if isinstance(expected, list | tuple):
        return list_difference(list(expected), got, tolerance, case)
    if isinstance(expected, float) and isinstance(got, float | int) and tolerance is not None:
        # An infinite expectation would have an infinite tolerance.
        near = math.isfinite(expected) and abs(expected - got) <= tolerance * max(1.0, abs(expected))
        if near or expected == got:
            return []
        return [Failure(case, "", repr(expected), repr(got))]
    if type(expected) is not type(got) or expected != got:
        return [Failure(case, "", repr(expected), shorten(got))]
    return []


def list_difference(expected: list[Plain], got: Plain, tolerance: float | None, case: str) -> list[Failure]:
    """Compare two lists and return the first difference: an item, or else the length."""
    if not isinstance(got, list | tuple):
        return [Failure(case, "", f"a list of {len(expected)}", shorten(got))]
    for index, (want, have) in enumerate(zip(expected, got, strict=False)):
        found = differences(want, have, tolerance, case)
        if found:
            first = found[0]
            place = f"item {index}" + (f", {first.place}" if first.place else "")
            return [Failure(first.case, place, first.expected, first.got, first.note)]
    if len(expected) != len(got):
        place = f"item {min(len(expected), len(got))}"
        return [Failure(case, place, f"{len(expected)} items, {shorten(expected)}", f"{len(got)}, {shorten(got)}")]
    return []


def tensor_difference(expected: "Tensor", got: Plain, tolerance: float | None, case: str) -> list[Failure]:
    """Compare two tensors and describe the first element that differs, by its index."""
    if not is_tensor(got):
        return [Failure(case, "", f"a tensor {list(expected.shape)}", shorten(got))]
    if got.shape != expected.shape:
        return [Failure(case, "shape", str(list(expected.shape)), str(list(got.shape)))]
    bound = None if not expected.is_floating_point() else tolerance
    if bound is None and got.dtype != expected.dtype:
        return [Failure(case, "dtype", str(expected.dtype), str(got.dtype))]
    gap = (expected.double() - got.double()).abs()
    if bound is None:
        wrong = ~((expected == got) | (expected.isnan() & got.isnan()))
    else:
        near = expected.isfinite() & (gap <= bound * expected.double().abs().clamp(min=1.0))  # NaN is not near
        wrong = ~(near | (expected == got))
    if not bool(wrong.any()):
        return []
    index = tuple(wrong.nonzero()[0].tolist())
    most = max(gap[gap.isfinite()].tolist(), default=math.inf)
    note = f"{int(wrong.sum())} of {wrong.numel()} elements differ"
    if "bits" in case and str(expected.dtype) in FLOAT_OF:  # a float that was looked at as an integer: no distance
        return [Failure(case, place_of(index), pattern(expected[index]), pattern(got[index]), note)]
    lost = int((wrong & ~got.isfinite() & expected.isfinite()).sum()) if got.is_floating_point() else 0
    if str(expected.dtype) != "torch.bool":  # true and false have no distance
        note += f"; {lost} of them are infinite or NaN" if lost else f", by at most {most:.3g}"
    return [Failure(case, place_of(index), number(expected[index]), number(got[index]), note)]


def place_of(index: tuple[int, ...]) -> str:
    """Name an index in the words of the course: rows are tokens of the packed step, the last axis is the vocabulary."""
    if len(index) == 2:
        return f"row {index[0]}, column {index[1]}"
    return f"index {list(index)}" if index else ""


def number(value: "Tensor") -> str:
    """Print one element with enough digits to tell neighbouring floats apart."""
    item = value.item()
    return f"{item:.9g}" if isinstance(item, float) else str(item)


def pattern(bits: "Tensor") -> str:
    """Print the float that an integer holds the bits of, and the bits."""
    width = bits.element_size() * 2  # hexadecimal digits
    import torch

    as_float = bits.view(getattr(torch, FLOAT_OF[str(bits.dtype)]))
    return f"{number(as_float)} (bits {bits.item() % 16**width:0{width}x})"


def shorten(value: object, limit: int = 120) -> str:
    """Print a value in at most ``limit`` characters."""
    text = f"a tensor {list(value.shape)}" if is_tensor(value) else repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
