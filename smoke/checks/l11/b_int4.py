"""The checks of groups in 4 bits (L11.B): the nearest of a group's 16 values, number by number. No model.

Owns: what groups of 32, their scales and their zero points are in float64. The matrices are those of L11.A.
"""

import torch
from torch import Tensor

from smoke.checks.l11.a_int8 import ULP, Casts, half_step, matrices, refusals, refusals_spec, wrong_parts
from smoke.framework.cases import DTYPES
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences

REGISTRY = Registry()
SIZE = 32  # columns of a group
LEVELS, CENTRE = 16, 8  # ids, and that of the zero point


def group_probe(seed: int) -> Values:
    """Round every matrix, and look at it afterwards."""
    from mini_engine.fast.quantized import quantize_int4

    values: Values = {}
    for name, (_, weight) in matrices(seed).items():
        given = weight.clone() if weight.is_contiguous() else weight
        with Casts() as casts:
            ids, scales, zeros = quantize_int4(given)
        steps = {"ids": ids, "scales": scales, "zeros": zeros}
        values[name] = steps | {"weight afterwards": given, "NaN": casts.num_lost}
    return values


def group_failures(
    name: str, weights: list[float], ids: list[int], scale: float, zero: float, dtype: str
) -> list[Failure]:
    """Compare one group with the rounding in float64; the first difference is enough. The scale is given as it is."""
    least, most = min(weights), max(weights)
    exact, slack = (most - least) / 15, 2 * ULP["float32"] * max(abs(least), abs(most))
    if not abs(scale - exact) <= half_step(exact, dtype) + slack:
        return [Failure(name, "scale", f"{exact:.9g}, the range {least:.6g} to {most:.6g} / 15", f"{scale:.9g}")]
    middle = least + CENTRE * scale
    if not abs(zero - middle) <= half_step(abs(middle), dtype) + slack:
        words = f"{middle:.9g}: {least:.6g} and {CENTRE} steps of the scale as it is stored, {scale:.9g}"
        return [Failure(name, "zero point", words, f"{zero:.9g}")]
    points = [(choice - CENTRE) * scale + zero for choice in range(LEVELS)]
    for column, (value, found) in enumerate(zip(weights, ids, strict=True)):
        if not 0 <= found < LEVELS:
            return [Failure(name, f"column {column}", "an id from 0 to 15", str(found))]
        nearest = min(range(LEVELS), key=lambda choice, value=value: abs(value - points[choice]))  # type: ignore[misc]
        near = abs(value - points[nearest]) + 1e-4 * scale + slack
        if abs(value - points[found]) > near:
            words = f"{nearest}: of the group's 16 values {points[nearest]:.6g} is nearest to {value:.6g}"
            return [Failure(name, f"column {column}", words, f"{found}, which is {points[found]:.6g}")]
    return []


def group_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare every group, number by number."""
    failures = []
    for name, (dtype, weight) in matrices(seed).items():
        own = got[name]
        failures += differences(weight, own["weight afterwards"], None, f"{name}, the weight afterwards")
        failures += differences(0, own["NaN"], None, f"{name}, how many numbers were NaN when they became ids")
        count = weight.shape[1] // SIZE
        like = {"ids": weight.to(torch.uint8), "scales": weight[:, :count], "zeros": weight[:, :count]}
        wrong = wrong_parts({f"{name}, {part}": (own[part], tensor) for part, tensor in like.items()})
        if not wrong:
            whole, ids, scales, zeros = (each.tolist() for each in (weight, own["ids"], own["scales"], own["zeros"]))
            for row in range(len(weight)):
                for group in range(count):
                    part = slice(SIZE * group, SIZE * group + SIZE)
                    steps = scales[row][group], zeros[row][group]
                    where = f"{name}, row {row}, columns {part.start} to {part.stop - 1}"
                    wrong += group_failures(where, whole[row][part], ids[row][part], *steps, dtype)
        failures += wrong[:1]
    return failures


REGISTRY.add(
    "L11.B.ids",
    "Each 32 columns of a row have a scale, their range / 15, and a zero point, the least number and 8 steps of the "
    "stored scale; each id is that of the nearest of the 16 values that come out.",
    group_probe,
    group_verdict,
)


def stored(seed: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Draw ids, scales and zero points: every id in every group, zero points far from zero."""
    found: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for dtype, kind in DTYPES.items():
        for rows, columns in ((5, 32), (3, 128), (32, 32), (0, 64), (1, 96)):
            generator = torch.Generator().manual_seed(seed + len(found))
            shape = rows, columns // SIZE
            ids = torch.randint(LEVELS, (rows, columns), generator=generator).to(torch.uint8)
            scales, zeros = (torch.randn(shape, generator=generator).to(kind) for _ in range(2))
            found[f"{dtype}, ids [{rows}, {columns}]"] = (ids, scales.abs(), zeros * 3)
    return found


def values_probe(seed: int) -> Values:
    """Turn ids back into numbers."""
    from mini_engine.fast.quantized import dequantize_int4

    values: Values = {}
    for name, parts in stored(seed).items():
        given = [part.clone() for part in parts]
        values[name] = dequantize_int4(given[0], given[1], given[2])
        values[f"{name}, afterwards"] = given
    return values


def values_verdict(seed: int, got: Values) -> list[Failure]:
    """Allow three roundings: of the product, of the sum, and one more."""
    failures = []
    for name, (ids, scales, zeros) in stored(seed).items():
        wrong = wrong_parts({name: (got[name], ids.to(scales.dtype))})
        failures += differences([ids, scales, zeros], got[f"{name}, afterwards"], None, f"{name}, afterwards")
        if wrong:
            failures += wrong
            continue
        steps = scales.double().repeat_interleave(SIZE, -1), zeros.double().repeat_interleave(SIZE, -1)
        exact = (ids.double() - CENTRE) * steps[0] + steps[1]
        bound = (CENTRE * steps[0] + 2 * exact.abs()) * ULP[str(scales.dtype).removeprefix("torch.")] / 2
        far = (got[name].double() - exact).abs() - bound
        if len(ids) and not bool((far <= 0).all()):
            row, column = divmod(int(far.nan_to_num(torch.inf).argmax()), ids.shape[1])
            where = f"row {row}, column {column}"
            failures.append(Failure(name, where, f"{exact[row, column]:.6g}", f"{float(got[name][row, column]):.6g}"))
    return failures


REGISTRY.add(
    "L11.B.values",
    "An id stands for (id - 8) * scale + zero of its group, in the dtype of the scales, up to what that dtype rounds.",
    values_probe,
    values_verdict,
)


def refused_probe(seed: int) -> Values:
    """Round what has a number that is none."""
    from mini_engine.fast.quantized import quantize_int4

    return refusals(seed, quantize_int4)


REGISTRY.add(
    "L11.B.refused",
    "A weight with a number that is infinite or NaN is a ValueError: it would spoil its group without a word.",
    refused_probe,
    bitwise(refusals_spec),
)
