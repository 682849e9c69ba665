"""The checks of rows in 8 bits (L11.A): the nearest multiples of a scale, number by number. No model.

Owns: matrices of every kind that a checkpoint may hold, which L11.B rounds too, and what a rounding in float64 says.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from smoke.framework.cases import DTYPES
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences

REGISTRY = Registry()
ULP = {"float32": 2.0**-23, "bfloat16": 2.0**-7}  # the distance of 1 to the next number
NO_NUMBERS = (math.nan, math.inf, -math.inf)
ROW_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal numbers": lambda row: row,
    "zeros": lambda row: row * 0,
    "one number alone": lambda row: row * (torch.arange(len(row)) == len(row) // 2),
    "positive": lambda row: row.abs() + 0.01,
    "negative": lambda row: -row.abs() - 0.01,
    "all the same": lambda row: row * 0 - 0.3,
    "far from zero, close together": lambda row: row * 0.05 + 7,
    "far below zero, close together": lambda row: row * 0.05 - 7,
    "across a power of two, close together": lambda row: row * 0.03 + 8,
    "one far from all": lambda row: torch.cat((row[:1] * 0 - 50, row[1:])),
    "tiny": lambda row: row * 1e-20,
    "huge": lambda row: row * 1e20,
    "halves between steps": lambda row: torch.cat((row[:1] * 0 + 127, (row[1:] * 20).round() + 0.5)),
    "larger to the end": lambda row: row * torch.arange(1, len(row) + 1),
}


def matrix(seed: int, dtype: str, columns: int) -> Tensor:
    """Draw a matrix with a row of every kind, in an order that is drawn as well."""
    rng = random.Random(f"matrix {seed} {dtype} {columns}")
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    kinds = rng.sample(list(ROW_KINDS.values()), len(ROW_KINDS))
    return torch.stack([kind(torch.randn(columns, generator=generator)) for kind in kinds]).to(DTYPES[dtype])


def matrices(seed: int) -> dict[str, tuple[str, Tensor]]:
    """Return what is rounded: name -> dtype and matrix, some of them not contiguous."""
    found = {}
    for dtype in DTYPES:
        for columns in (32, 64, 160):
            found[f"{dtype}, {columns} columns"] = (dtype, matrix(seed, dtype, columns))
        wide = matrix(seed + 1, dtype, 192)
        found[f"{dtype}, every second column of 192"] = (dtype, wide[:, ::2])
        found[f"{dtype}, one row"] = (dtype, wide[seed % len(wide)][None])
        found[f"{dtype}, as long as wide"] = (dtype, matrix(seed + 2, dtype, 32)[:4].repeat(8, 1))
    return found


def half_step(exact: float, dtype: str) -> float:
    """Return how far the nearest number of ``dtype`` is from ``exact`` at most; float32 may have rounded before."""
    own = 2.0 ** math.floor(math.log2(exact)) * ULP[dtype] if exact else 0.0
    return 0.5 * own + exact * ULP["float32"]


class Casts(TorchDispatchMode):
    """Counts NaN that is cast to whole numbers: what becomes of it depends on the processor."""

    num_lost = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count what it loses."""
        result = func(*args, **(kwargs or {}))
        floats = [each for each in args if isinstance(each, Tensor) and each.is_floating_point()]
        if (
            floats
            and isinstance(result, Tensor)
            and result.dtype in (torch.int8, torch.uint8, torch.int32, torch.int64)
        ):
            self.num_lost += sum(int(each.isnan().sum()) for each in floats)
        return result


def ids_probe(seed: int) -> Values:
    """Round every matrix, and look at it afterwards."""
    from mini_engine.fast.quantized import quantize_int8

    values: Values = {}
    for name, (_, weight) in matrices(seed).items():
        given = weight.clone() if weight.is_contiguous() else weight
        with Casts() as casts:
            ids, scales = quantize_int8(given)
        values[name] = {"ids": ids, "scales": scales, "weight afterwards": given, "NaN": casts.num_lost}
    return values


def wrong_parts(parts: dict[str, tuple[Any, Tensor]]) -> list[Failure]:
    """Compare shape and dtype of each part: name -> what was given, and a tensor like the right one."""
    failures = []
    for name, (got, like) in parts.items():
        want = f"{list(like.shape)} {like.dtype}"
        have = f"{list(got.shape)} {got.dtype}" if isinstance(got, Tensor) else type(got).__name__
        if want != have:
            failures.append(Failure(name, "shape and dtype", want, have))
    return failures


def row_failures(name: str, weights: list[float], ids: list[int], scale: float, dtype: str) -> list[Failure]:
    """Compare one row with the rounding in float64; the first difference is enough."""
    most = max(map(abs, weights))
    if not abs(scale - most / 127) <= half_step(most / 127, dtype):
        return [Failure(name, "scale", f"{most / 127:.9g}, the largest magnitude {most:.6g} / 127", f"{scale:.9g}")]
    for column, (value, found) in enumerate(zip(weights, ids, strict=True)):
        nearest = min(127, max(-127, value / scale)) if scale else 0.0
        if abs(found - nearest) > 0.5 + 1e-4 or found == -128:
            words = f"the whole number nearest to {value:.6g} / {scale:.6g} = {nearest:.5f}, from -127 to 127"
            return [Failure(name, f"column {column}", words, str(found))]
    return []


def ids_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare every row, number by number."""
    failures = []
    for name, (dtype, weight) in matrices(seed).items():
        own = got[name]
        failures += differences(weight, own["weight afterwards"], None, f"{name}, the weight afterwards")
        failures += differences(0, own["NaN"], None, f"{name}, how many numbers were NaN when they became ids")
        like = {"ids": weight.to(torch.int8), "scales": weight[:, 0]}
        wrong = wrong_parts({f"{name}, {part}": (own[part], tensor) for part, tensor in like.items()})
        if not wrong:
            rows = zip(weight.tolist(), own["ids"].tolist(), own["scales"].tolist(), strict=True)
            for row, (weights, ids, scale) in enumerate(rows):
                wrong += row_failures(f"{name}, row {row}", weights, ids, scale, dtype)
        failures += wrong[:1]
    return failures


REGISTRY.add(
    "L11.A.ids",
    "The scale of a row is its largest magnitude / 127 in the weight's dtype, and each id is the whole number from "
    "-127 to 127 nearest to weight / scale: rows of zeros, tiny, huge and one-sided rows as well.",
    ids_probe,
    ids_verdict,
)


def stored(seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Draw ids and scales of many shapes, the rows of a table and a single row among them."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for dtype, kind in DTYPES.items():
        for shape in ((5, 32), (32, 32), (2, 3, 64), (48,), (0, 32)):
            generator = torch.Generator().manual_seed(seed + len(found))
            ids = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
            scales = torch.randn(shape[:-1], generator=generator).abs().to(kind) * 0.37
            found[f"{dtype}, ids {list(shape)}"] = (ids, scales)
    return found


def values_probe(seed: int) -> Values:
    """Turn ids back into numbers."""
    from mini_engine.fast.quantized import dequantize_int8

    values: Values = {}
    for name, (ids, scales) in stored(seed).items():
        values[name] = dequantize_int8(ids, scales)
        values[f"{name}, ids and scales afterwards"] = [ids, scales]
    return values


def values_spec(seed: int) -> Values:
    """Multiply in float64, where the product is exact, and round once."""
    values: Values = {}
    for name, (ids, scales) in stored(seed).items():
        values[name] = (ids.double() * scales.double().unsqueeze(-1)).to(scales.dtype)
        values[f"{name}, ids and scales afterwards"] = [ids, scales]
    return values


REGISTRY.add(
    "L11.A.values",
    "An id stands for id * scale, in the dtype of the scales: whole matrices, some rows of a table, and a single row.",
    values_probe,
    bitwise(values_spec),
)


def refusals(seed: int, quantize: Callable[[Tensor], Any]) -> Values:
    """Round matrices that have one number that is none, in any row; say what is raised, or that nothing is."""
    rng = random.Random(f"refusals {seed}")
    values: Values = {}
    for dtype, kind in DTYPES.items():
        for number in (*NO_NUMBERS, 1.0):
            for where in ("first", "middle", "last"):
                weight = torch.ones(5, 96, dtype=kind)
                row = {"first": 0, "middle": rng.randrange(1, 4), "last": 4}[where]
                weight[row, rng.randrange(96)] = number
                try:
                    quantize(weight)
                    raised = "nothing"
                except ValueError:
                    raised = "ValueError"
                values[f"{dtype}, {number} in the {where} row"] = raised
    return values


def refusals_spec(seed: int) -> Values:
    """Only finite numbers are taken."""
    return {
        f"{dtype}, {number} in the {where} row": "nothing" if math.isfinite(number) else "ValueError"
        for dtype in DTYPES
        for number in (*NO_NUMBERS, 1.0)
        for where in ("first", "middle", "last")
    }


def refused_probe(seed: int) -> Values:
    """Round what has a number that is none."""
    from mini_engine.fast.quantized import quantize_int8

    return refusals(seed, quantize_int8)


REGISTRY.add(
    "L11.A.refused",
    "A weight with a number that is infinite or NaN is a ValueError: it would spoil its row without a word.",
    refused_probe,
    bitwise(refusals_spec),
)
