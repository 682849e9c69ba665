"""The checks of products with rounded weights (L11.C): what two ids in a byte are, and sums against float64. No model.

Owns: tiles that are packed by hand, matrices whose sums cancel, and how far a product may be from the exact one.
"""

import random
from typing import Any

import torch
from torch import Tensor

from smoke.checks.l11.a_int8 import ULP, wrong_parts
from smoke.checks.l11.b_int4 import CENTRE, LEVELS, SIZE
from smoke.framework.cases import DTYPES
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences

REGISTRY = Registry()
TILES = ((1, 2, 3), (2, 4, 5), (1, 8, 32), (3, 32, 64), (2, 64, 32), (0, 32, 32))  # tiles, rows of a tile, columns
SHAPES = ((1, 32, 32), (3, 40, 96), (20, 64, 256), (70, 33, 64), (0, 8, 32))  # rows of x, N, K
FORMS = ("drawn", "terms that cancel", "one column counts")


def drawn_ids(seed: int, shape: tuple[int, ...], least: int, end: int) -> Tensor:
    """Draw whole numbers from ``least`` to ``end`` - 1."""
    return torch.randint(least, end, shape, generator=torch.Generator().manual_seed(seed))


def packed_by_hand(ids: list[list[int]], size: int, is_halved: bool) -> list[list[list[int]]]:
    """Return the bytes of rows of ids: tile after tile, in a tile column after column, in a column pair after pair."""
    tiles = []
    for first in range(0, len(ids), size):
        rows = ids[first : first + size]
        pairs = [(j, j + size // 2) if is_halved else (2 * j, 2 * j + 1) for j in range(size // 2)]
        columns = range(len(rows[0]))
        tiles.append([[rows[low][column] + 16 * rows[high][column] for low, high in pairs] for column in columns])
    return tiles


def packings(seed: int) -> dict[str, tuple[Tensor, Tensor, bool]]:
    """Return ids, their bytes, and which two rows share one."""
    found = {}
    for number, (tiles, size, columns) in enumerate(TILES):
        for is_halved in (False, True):
            ids = drawn_ids(seed + number, (tiles * size, columns), 0, LEVELS)
            by_hand = packed_by_hand(ids.tolist(), size, is_halved)
            packed = torch.tensor(by_hand, dtype=torch.uint8).reshape(tiles, columns, size // 2)
            order = "rows of both halves" if is_halved else "neighbours"
            found[f"{tiles} tiles of {size} rows, {columns} columns, {order}"] = (
                ids.to(torch.uint8),
                packed,
                is_halved,
            )
    return found


def unpack_probe(seed: int) -> Values:
    """Unpack every tile, and look at the bytes afterwards."""
    from mini_engine.fast.quantized import unpack_int4

    values: Values = {}
    for name, (_, packed, is_halved) in packings(seed).items():
        given = packed.clone()
        values[name] = unpack_int4(given, is_halved)
        values[f"{name}, bytes afterwards"] = given
    return values


def unpack_spec(seed: int) -> Values:
    """Return what was packed."""
    values: Values = {}
    for name, (ids, packed, _) in packings(seed).items():
        values |= {name: ids, f"{name}, bytes afterwards": packed}
    return values


REGISTRY.add(
    "L11.C.unpack",
    "Every id comes out of its byte and stands in its row and column, for tiles of 2 to 64 rows in both orders.",
    unpack_probe,
    bitwise(unpack_spec),
)


def factors(seed: int, form: str, shape: tuple[int, int, int], dtype: str, end: int) -> tuple[Tensor, Tensor]:
    """Draw ``x`` [M, K] and ids [N, K] from ``1 - end`` to ``end - 1``; in one form neighbouring terms cancel."""
    rows, out_features, columns = shape
    rng = random.Random(f"factors {seed} {form} {shape} {dtype}")
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    x = torch.randn(rows, columns, generator=generator)
    ids = torch.randint(1 - end, end, (out_features, columns), generator=generator)
    if form == "terms that cancel":
        x[:, 1::2] = -x[:, ::2]
        ids[:, 1::2] = (ids[:, ::2] + (ids[:, 1::2] % 3 - 1)).clamp(1 - end, end - 1)
    if form == "one column counts":
        x = x * (torch.arange(columns) == rng.randrange(columns))
    return x.to(DTYPES[dtype]), ids


def cases(seed: int) -> list[tuple[str, str, tuple[int, int, int], str]]:
    """Return what is multiplied: name, form, shape and dtype."""
    return [
        (f"{dtype}, {form}, {rows} rows times [{outs}, {columns}]", form, (rows, outs, columns), dtype)
        for dtype in DTYPES
        for rows, outs, columns in SHAPES
        for form in FORMS
    ]


def int8_inputs(seed: int, form: str, shape: tuple[int, int, int], dtype: str) -> list[Tensor]:
    """Draw ``x``, ids and scales of very different rows."""
    x, ids = factors(seed, form, shape, dtype, 128)
    powers = 10.0 ** drawn_ids(seed, (shape[1],), -4, 3)
    scales = (torch.rand(shape[1], generator=torch.Generator().manual_seed(seed)) + 0.5) * powers
    return [x, ids.to(torch.int8), scales.to(DTYPES[dtype])]


def int8_probe(seed: int) -> Values:
    """Multiply, and look at what was given afterwards."""
    from mini_engine.fast.quantized import linear_int8

    values: Values = {}
    for name, form, shape, dtype in cases(seed):
        given = int8_inputs(seed, form, shape, dtype)
        values[name] = linear_int8(given[0], given[1], given[2])
        values[f"{name}, afterwards"] = given
    return values


def too_far(name: str, got: Any, exact: Tensor, bound: Tensor, dtype: str) -> list[Failure]:
    """Compare a product with the exact one, element by element."""
    wrong = wrong_parts({name: (got, exact.to(DTYPES[dtype]))})
    if wrong or not exact.numel():
        return wrong
    far = ((got.double() - exact).abs() / bound).nan_to_num(torch.inf)
    row, column = divmod(int(far.argmax()), exact.shape[1])
    if far[row, column] <= 1:
        return []
    words = f"{exact[row, column]:.6g}, at most {bound[row, column]:.2g} away"
    return [Failure(name, f"row {row}, column {column}", words, f"{float(got[row, column]):.6g}")]


def int8_verdict(seed: int, got: Values) -> list[Failure]:
    """Allow the sum in float32 by any order, and two roundings of the result: of the sum, and of the scaled one."""
    failures = []
    for name, form, shape, dtype in cases(seed):
        inputs = int8_inputs(seed, form, shape, dtype)
        failures += differences(inputs, got[f"{name}, afterwards"], None, f"{name}, afterwards")
        x, ids, scales = (each.double() for each in inputs)
        exact, terms = x @ ids.T * scales, x.abs() @ ids.abs().T * scales
        bound = exact.abs() * 1.01 * ULP[dtype] + terms * shape[2] * ULP["float32"] + 1e-30
        failures += too_far(name, got[name], exact, bound, dtype)
    return failures


REGISTRY.add(
    "L11.C.int8",
    "A product with 8 bits is that of float64 up to the sum in float32 and two roundings of the result: no weight is "
    "rounded a second time, also where terms cancel.",
    int8_probe,
    int8_verdict,
)


def int4_inputs(seed: int, form: str, shape: tuple[int, int, int], dtype: str) -> list[Tensor]:
    """Draw ``x``, ids, scales and zero points of every group."""
    x, ids = factors(seed, form, shape, dtype, CENTRE)
    generator = torch.Generator().manual_seed(seed)
    groups = shape[1], shape[2] // SIZE
    scales = torch.rand(groups, generator=generator) + 0.5
    zeros = torch.randn(groups, generator=generator) * 2
    return [x, (ids + CENTRE).to(torch.uint8), *(each.to(DTYPES[dtype]) for each in (scales, zeros))]


def int4_probe(seed: int) -> Values:
    """Multiply, and look at what was given afterwards."""
    from mini_engine.fast.quantized import linear_int4

    values: Values = {}
    for name, form, shape, dtype in cases(seed):
        given = int4_inputs(seed, form, shape, dtype)
        values[name] = linear_int4(given[0], given[1], given[2], given[3])
        values[f"{name}, afterwards"] = given
    return values


def int4_verdict(seed: int, got: Values) -> list[Failure]:
    """Allow two roundings of each weight as well: of id times scale, and of that plus the zero point."""
    failures = []
    for name, form, shape, dtype in cases(seed):
        inputs = int4_inputs(seed, form, shape, dtype)
        failures += differences(inputs, got[f"{name}, afterwards"], None, f"{name}, afterwards")
        x, ids, scales, zeros = (each.double() for each in inputs)
        steps = (ids - CENTRE) * scales.repeat_interleave(SIZE, -1)
        weight = steps + zeros.repeat_interleave(SIZE, -1)
        exact = x @ weight.T
        terms = x.abs() @ (steps.abs() + 2 * weight.abs()).T
        bound = exact.abs() * ULP[dtype] + terms * (0.51 * ULP[dtype] + shape[2] * ULP["float32"]) + 1e-30
        failures += too_far(name, got[name], exact, bound, dtype)
    return failures


REGISTRY.add(
    "L11.C.int4",
    "A product with 4 bits is that of float64 with each group's scale and zero point, up to what the dtype rounds.",
    int4_probe,
    int4_verdict,
)
