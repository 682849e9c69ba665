"""The checks of parts of a matrix (L12.A): who has what, and two ways to make a product whole. No model.

Owns: matrices of whole numbers, whose sums are exact in every order, so that each rounding can be told.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smoke.framework.cases import DTYPES
from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise

REGISTRY = Registry()
SHARES = ((6, 1), (6, 2), (6, 3), (6, 6), (0, 2), (8, 4), (1, 1), (7, 2), (6, 4), (2, 4), (1, 2), (151_936, 8))
PARTS = ((12, 20, 1), (12, 20, 2), (20, 12, 4), (8, 8, 2), (24, 6, 6))  # rows, columns, ranks
REFUSED = (("rows", 10, 12, 4), ("columns", 12, 10, 4))
PRODUCTS = ((1, 4, 8, 2), (3, 8, 6, 2), (5, 12, 16, 4), (2, 6, 9, 3), (4, 5, 7, 1), (0, 4, 6, 2))  # T, N, K, ranks


def whole_numbers(seed: int, shape: tuple[int, ...], most: int) -> Tensor:
    """Draw whole numbers from ``-most`` to ``most``, in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def attempt(call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns, or "ValueError" if it raises one."""
    try:
        return call()
    except ValueError:
        return "ValueError"


def outline(things: Sequence[int]) -> dict[str, int | None]:
    """Say which is the first of ``things``, and how many there are."""
    return {"the first": things[0] if things else None, "how many": len(things)}


def share_probe(seed: int) -> Values:
    """Ask for every rank's share."""
    from mini_engine.processes.halves import share

    values: Values = {}
    for total, size in SHARES:
        for rank in range(size):
            own = attempt(partial(share, total, rank, size))
            things = range(total)[own] if isinstance(own, slice) else None
            values[f"{total} for rank {rank} of {size}"] = str(own) if things is None else outline(things)
    return values


def share_spec(seed: int) -> Values:
    """Deal the things out: the first one, and how many."""
    values: Values = {}
    for total, size in SHARES:
        for rank in range(size):
            own = [thing for thing in range(total) if thing * size // max(total, 1) == rank]
            values[f"{total} for rank {rank} of {size}"] = "ValueError" if total % size else outline(own)
    return values


REGISTRY.add(
    "L12.A.share",
    "Every rank has as many, side by side, in the order of ranks; a number that ranks cannot share is a ValueError.",
    share_probe,
    bitwise(share_spec),
)


def matrices(seed: int) -> dict[str, tuple[Tensor, int]]:
    """Return matrices and the ranks that share them, one of them seen through a transposed view."""
    found = {}
    for dtype, kind in DTYPES.items():
        for rows, columns, size in PARTS:
            weight = whole_numbers(seed, (rows, columns), 99).to(kind)
            found[f"{dtype} [{rows}, {columns}], {size} ranks"] = (weight, size)
    found["a transposed view, 2 ranks"] = (whole_numbers(seed + 1, (12, 8), 99).T, 2)
    return found


def parts_probe(seed: int) -> Values:
    """Cut every matrix in both ways; look at the parts' memory, and at the matrix when the parts are overwritten."""
    from mini_engine.processes.halves import column_part, row_part

    values: Values = {}
    for name, (weight, size) in matrices(seed).items():
        before = weight.clone()
        for kind, cut in (("rows", row_part), ("columns", column_part)):
            parts = [cut(weight, rank, size) for rank in range(size)]
            values[f"{name}, {kind}"] = [part.clone() for part in parts]
            held = [part.untyped_storage().nbytes() for part in parts]
            values[f"{name}, {kind}, bytes that the parts hold in memory"] = held
            for part in parts:
                part.zero_()
        values[f"{name}, the matrix after its parts were overwritten"] = bool(torch.equal(weight, before))
    for kind, rows, columns, size in REFUSED:
        cut = row_part if kind == "rows" else column_part
        weight = torch.ones(rows, columns)
        values[f"{kind} of [{rows}, {columns}], {size} ranks"] = attempt(partial(cut, weight, 0, size))
    return values


def parts_spec(seed: int) -> Values:
    """Cut by torch's own function for that."""
    values: Values = {}
    for name, (weight, size) in matrices(seed).items():
        for axis, kind in enumerate(("rows", "columns")):
            parts = [part.contiguous() for part in weight.tensor_split(size, dim=axis)]
            values[f"{name}, {kind}"] = parts
            held = [part.numel() * part.element_size() for part in parts]
            values[f"{name}, {kind}, bytes that the parts hold in memory"] = held
        values[f"{name}, the matrix after its parts were overwritten"] = True
    refused = {f"{kind} of [{rows}, {columns}], {size} ranks": "ValueError" for kind, rows, columns, size in REFUSED}
    return values | refused


REGISTRY.add(
    "L12.A.parts",
    "A part has the rank's rows or columns in memory of its own, of its own size: the whole matrix can be let go.",
    parts_probe,
    bitwise(parts_spec),
)


def factors(seed: int, shape: tuple[int, int, int, int], dtype: str) -> tuple[Tensor, Tensor]:
    """Draw ``x`` [T, K] and a matrix [N, K] of whole numbers, whose sums are exact in float32 and long in bfloat16."""
    rows, outs, columns, _ = shape
    x = whole_numbers(seed, (rows, columns), 9)
    weight = whole_numbers(seed + 1, (outs, columns), 99)
    return x.to(DTYPES[dtype]), weight.to(DTYPES[dtype])


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return the exact product, rounded once to the dtype of ``x``."""
    return (x.double() @ weight.double().T).to(x.dtype)


def product_cases(seed: int) -> dict[str, tuple[Tensor, Tensor, int]]:
    """Return what is multiplied, and the ranks."""
    return {
        f"{dtype}, {shape[0]} rows times [{shape[1]}, {shape[2]}], {shape[3]} ranks": (
            *factors(seed, shape, dtype),
            shape[3],
        )
        for dtype in DTYPES
        for shape in PRODUCTS
    }


def gathered_probe(seed: int) -> Values:
    """Multiply by matrices that are cut by rows."""
    from mini_engine.processes.halves import gathered

    values: Values = {}
    for name, (x, weight, size) in product_cases(seed).items():
        values[name] = gathered(x, list(weight.chunk(size)))
        values[f"{name}, x afterwards"] = x
    return values


def gathered_spec(seed: int) -> Values:
    """Every number is a whole sum, rounded once."""
    values: Values = {}
    for name, (x, weight, _) in product_cases(seed).items():
        values |= {name: exact_product(x, weight), f"{name}, x afterwards": x}
    return values


REGISTRY.add(
    "L12.A.gathered",
    "Rows of a matrix on several ranks give the whole product, each output in its place and rounded once.",
    gathered_probe,
    bitwise(gathered_spec),
)


def sum_cases(seed: int) -> dict[str, tuple[Tensor, list[Tensor]]]:
    """Return ``x`` and parts by columns. In some, large and small numbers meet: the order shows in float32 too."""
    cases = {name: (x, list(weight.chunk(size, dim=1))) for name, (x, weight, size) in product_cases(seed).items()}
    rng = random.Random(f"sums {seed}")
    for size in (2, 3, 4, 5):
        terms = [2.0**24, 1.0, 1.0, -(2.0**24), 3.0][:size]
        rows = [rng.sample(terms, size) for _ in range(6)] + [terms, terms[::-1]]
        cases[f"large and small numbers, {size} ranks"] = (
            torch.tensor([[1.0, 0.0] * size, [2.0, 5.0] * size]),
            [torch.tensor([[row[rank], 0.0] for row in rows]) for rank in range(size)],
        )
    return cases


def summed_probe(seed: int) -> Values:
    """Multiply by matrices that are cut by columns."""
    from mini_engine.processes.halves import summed

    values: Values = {}
    for name, (x, parts) in sum_cases(seed).items():
        values[name] = summed(x, parts)
        values[f"{name}, x and parts afterwards"] = [x, *parts]
    return values


def summed_spec(seed: int) -> Values:
    """Round every rank's part of a sum, and add one after the other."""
    values: Values = {}
    for name, (x, parts) in sum_cases(seed).items():
        width = x.shape[1] // len(parts)
        own = [exact_product(x[:, rank * width : (rank + 1) * width], part) for rank, part in enumerate(parts)]
        total = own[0]
        for other in own[1:]:
            total = total + other
        values |= {name: total, f"{name}, x and parts afterwards": [x, *parts]}
    return values


REGISTRY.add(
    "L12.A.summed",
    "Columns of a matrix on several ranks give parts of each sum: every one is rounded to the dtype of x, and they are "
    "added in the order of ranks.",
    summed_probe,
    bitwise(summed_spec),
)
