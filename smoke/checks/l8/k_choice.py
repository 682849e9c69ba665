"""The checks of L8.K and of L8.L by itself: the product that does not know its batch, and who computes what.

Owns: matrices of odd sizes in poisoned memory, operations that only say their names, and packed rows to be cut.
"""

import math
import random
import re
import warnings
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from smoke.checks.l8.guard import ON_GPU, apart, guarded, set_for_now
from smoke.checks.l8.spec_kernels import first_wrong
from smoke.framework.cases import random_tensor
from smoke.framework.check import Failure, Plain, Registry, Values
from smoke.framework.compare import differences

REGISTRY = Registry()

# The product --------------------------------------------------------------------------------------------------------

SHAPES = ((1, 1, 1), (1, 33, 20), (5, 96, 128), (64, 64, 64), (67, 41, 70), (3, 130, 301))  # rows, columns, depth
DTYPES = {"float32": torch.float32, "float16": torch.float16}


def matrices(seed: int, rows: int, columns: int, depth: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Draw x [M, K] and weight [N, K]."""
    x = random_tensor(rows, depth, seed=seed + depth)
    weight = random_tensor(columns, depth, seed=seed + depth + 1)
    return x.to(DTYPES[dtype]), weight.to(DTYPES[dtype])


def product_probe(seed: int) -> Values:
    """Multiply; rows of the weight lie apart, with NaN between them."""
    from mini_engine.kernels.matmul import invariant_matmul

    values: Values = {}
    with guarded(math.nan) as guard:
        for dtype in DTYPES:
            for shape in SHAPES:
                x, weight = matrices(seed, *shape, dtype)
                far = guard.stretch("the weight", apart(weight))
                values[f"{shape} {dtype}"] = invariant_matmul(guard.put("x", x), far)
        values["x with gaps"] = invariant_matmul(apart(x), weight)
        for shape in ((0, 33, 45), (5, 0, 45), (5, 33, 0)):
            values[f"empty {shape}"] = invariant_matmul(*matrices(seed, *shape, "float32"))
        values[ON_GPU] = guard.faults()
    return values


def product_faults(case: str, exact: Tensor, bound: Tensor, got: Plain, dtype: torch.dtype) -> list[Failure]:
    """Ask for a product of ``dtype`` no farther than ``bound`` from ``exact``; both [M, N] in float64."""
    if not isinstance(got, Tensor) or got.shape != exact.shape or got.dtype != dtype:
        return differences(exact.to(dtype), got, None, case)
    error = (got.double() - exact).abs()
    worst = (error / bound).nan_to_num(math.inf).max()
    return first_wrong(case, exact, got, error <= bound, f"by up to {worst:.3g} times what float32 sums may be")


def product_verdict(seed: int, got: Values) -> list[Failure]:
    """Allow K roundings of float32, each at its worst, and one of the dtype."""
    failures = differences([], got[ON_GPU], None, ON_GPU)
    for shape in ((0, 33, 45), (5, 0, 45), (5, 33, 0)):
        failures += differences(torch.zeros(shape[:2]), got[f"empty {shape}"], None, f"empty {shape}")
    for dtype, torch_dtype in DTYPES.items():
        for shape in SHAPES:
            case = f"{shape} {dtype}"
            (x, weight) = matrices(seed, *shape, dtype)
            exact = x.double() @ weight.double().T
            bound = shape[2] * 2.0**-24 * (x.double().abs() @ weight.double().abs().T)
            if dtype != "float32":
                limits = torch.finfo(torch_dtype)
                bound = bound + limits.eps / 2 * (exact.abs() + bound) + limits.smallest_normal
            failures += product_faults(case, exact, bound, got[case], torch_dtype)
    return failures + differences(got[f"{SHAPES[-1]} float16"], got["x with gaps"], None, "x with gaps")


REGISTRY.add(
    "L8.K.product",
    "The product is x @ weight.T summed in float32, for sizes that are multiples of nothing and rows that lie apart.",
    product_probe,
    product_verdict,
)


def rows_probe(seed: int) -> Values:
    """Multiply a batch, its beginnings, single rows, its rows in another order, and among NaN and infinity."""
    from mini_engine.kernels.matmul import invariant_matmul

    values: Values = {}
    for dtype in DTYPES:
        x, weight = matrices(seed, 70, 27, 173, dtype)
        order = torch.randperm(70, generator=torch.Generator().manual_seed(seed))
        invalid = x.clone()
        invalid[:3] = math.nan
        invalid[4:] = math.inf
        with np.errstate(invalid="ignore"):  # the interpreter multiplies with NumPy
            beside = invariant_matmul(invalid, weight)
        values[dtype] = {
            "all": invariant_matmul(x, weight),
            "beginnings": {str(n): invariant_matmul(x[:n], weight) for n in (1, 2, 15, 16, 17, 33, 63, 64, 65)},
            "alone": {str(i): invariant_matmul(x[i : i + 1], weight) for i in (7, 63, 64, 69)},
            "in another order": invariant_matmul(x[order], weight),
            "row 3 among NaN and infinity": beside[3].clone(),
            "rows of NaN": bool(beside[:3].isnan().all()),
        }
    return values


def rows_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask every row for the bits that it has among all."""
    failures = []
    order = torch.randperm(70, generator=torch.Generator().manual_seed(seed))
    for dtype, values in got.items():
        whole = values["all"]
        for n, part in values["beginnings"].items():
            failures += differences(whole[: int(n)], part, None, f"{dtype}, the first {n} rows of 70")
        for i, part in values["alone"].items():
            failures += differences(whole[int(i)][None], part, None, f"{dtype}, row {i} alone")
        failures += differences(whole[order], values["in another order"], None, f"{dtype}, in another order")
        name = "row 3 among NaN and infinity"
        failures += differences(whole[3], values[name], None, f"{dtype}, {name}")
        failures += differences(True, values["rows of NaN"], None, f"{dtype}, the product of rows of NaN is NaN")
    return failures + differences(sorted(DTYPES), sorted(got), None, "dtypes")


REGISTRY.add(
    "L8.K.rows",
    "A row has the same bits alone, in any batch and in any place, whatever its neighbours are.",
    rows_probe,
    rows_verdict,
)


def tiles_probe(seed: int) -> Values:
    """Multiply with tiles of 16 rows in groups of 4, so that there are many tiles; then with one infinite weight."""
    import mini_engine.kernels.matmul as op

    x, weight = matrices(seed, 16 * 7 - 5, 150, 16, "float32")
    with set_for_now(op, ROWS=16, GROUP=4):
        many = op.invariant_matmul(x, weight)
    x, weight = matrices(seed, 3, 33, 45, "float32")
    weight[32, 44] = math.inf
    with np.errstate(invalid="ignore"):
        return {"many tiles": many, "an infinite weight": op.invariant_matmul(x, weight)}


def tiles_verdict(seed: int, got: Values) -> list[Failure]:
    """Allow 16 roundings; the infinity stays in its column, since what lies beyond the matrix is not multiplied."""
    x, weight = matrices(seed, 16 * 7 - 5, 150, 16, "float32")
    failures = differences(x.double() @ weight.double().T, got["many tiles"], 3e-5, "many tiles")
    x, weight = matrices(seed, 3, 33, 45, "float32")
    weight[32, 44] = math.inf
    exact = x.double() @ weight.double().T
    return failures + differences(exact, got["an infinite weight"], 3e-5, "an infinite weight")


REGISTRY.add(
    "L8.K.tiles",
    "Every tile is computed once, in whatever order the programs start, and nothing beyond the matrices counts.",
    tiles_probe,
    tiles_verdict,
)

FAR_BLOCKS = 1 << 20  # of 64 rows, so that x and the product have 4.7e9 and 2.7e9 numbers
FAR_SHAPE = (64, 40, 70)  # of one block: rows, columns, depth


def far_probe(seed: int) -> Values:
    """Run single programs of a launch over a million blocks of rows, which are the same block in memory."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    import mini_engine.kernels.matmul as op

    rows, columns, depth = FAR_SHAPE
    x, weight = matrices(seed, *FAR_SHAPE, "float32")
    values: Values = {}
    for number in (0, FAR_BLOCKS * 2 // 3, FAR_BLOCKS - 1):
        program = TensorHandle(np.array([number], dtype=np.int32), tl.int32)
        with (
            guarded() as guard,
            patch.object(InterpreterBuilder, "create_get_program_id", lambda *_, program=program: program),
        ):
            out = guard.put("the product", torch.full((rows, columns), math.nan), margin=-7.0)
            x = guard.repeat("x", guard.put("x", x), FAR_BLOCKS)
            guard.repeat("the product", out, FAR_BLOCKS)
            sizes = (rows * FAR_BLOCKS, columns, depth, weight.stride(0))
            op.matmul_kernel[(1,)](x, weight, out, *sizes, ROWS=64, COLUMNS=64, DEPTH=16, GROUP=8)
        values[f"program {number}"] = {"product": out, ON_GPU: guard.faults()}
    return values


def far_verdict(seed: int, got: Values) -> list[Failure]:
    """Allow as many roundings as the depth has numbers."""
    x, weight = matrices(seed, *FAR_SHAPE, "float32")
    failures: list[Failure] = []
    for name, values in got.items():
        failures += differences([], values[ON_GPU], None, f"{name}, {ON_GPU}")
        failures += differences(x.double() @ weight.double().T, values["product"], 3e-5, name)
    return failures


REGISTRY.add(
    "L8.K.far",
    "Rows of x and of the product are found where their offsets need more than 32 bits.",
    far_probe,
    far_verdict,
)

WEIGHTS = (1, 20, 1024, 2560, 4096, 6144, 8192, 19456, 151936)  # their rows


def shape_probe(seed: int) -> Values:
    """Ask for the tiles of real weights."""
    from mini_engine.kernels.matmul import ROWS, tile_shape

    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    shapes = {
        f"{columns} columns, {name}": [int(size) for size in tile_shape(columns, dtype)]
        for name, dtype in dtypes.items()
        for columns in WEIGHTS
    }
    return {"rows": int(ROWS), "shapes": shapes}


def shape_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for tiles that a tensor core multiplies, that fit into shared memory and that keep a GPU busy."""
    failures = []
    for case, (columns, depth, stages) in got["shapes"].items():
        size = 4 if "float32" in case else 2
        for name, number in (("columns", columns), ("depth", depth)):
            if number < 16 or number & (number - 1):
                failures.append(Failure(case, f"{name} of the tile", "a power of 2 from 16 on", str(number)))
        if stages < 1 or stages * (got["rows"] + columns) * depth * size > 227 * 1024:
            held = stages * (got["rows"] + columns) * depth * size
            failures.append(Failure(case, "shared memory of its stages", "at most 227 KB", f"{held / 1024:.0f} KB"))
    small, large = (got["shapes"][f"{columns} columns, bfloat16"][0] for columns in (1024, 151936))
    if 1024 / small < 16:
        failures.append(Failure("1024 columns, bfloat16", "columns of the tile", "at least 16 tiles", str(small)))
    if large < 64:
        failures.append(Failure("151936 columns, bfloat16", "columns of the tile", "at least 64", str(large)))
    return failures


REGISTRY.add(
    "L8.K.shape",
    "Tiles are powers of 2 that fit into shared memory, narrow for few columns and wide for many.",
    shape_probe,
    shape_verdict,
)

# Kernel or reference ------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
WORDS = {"dtype": "this kernel reads no float16", "device": "this kernel wants another device"}


def toy(name: str, why: str | None, asked: list[list[str]], invariant: bool = True) -> Any:
    """Make an operation that says who computes it; in float16 it has the fault ``why``."""
    from mini_engine.kernels.registry import Kernel

    def fault(device: torch.device, dtype: torch.dtype) -> str | None:
        asked.append([str(device), str(dtype)])
        return None if why is None or dtype != torch.float16 else WORDS[why]

    return Kernel(lambda: f"kernel of {name}", lambda: f"reference of {name}", fault, invariant)


def choice_of(registry: Any, *args: Any) -> Values:
    """Choose among the operations of the registry, and tell who computes what and which warnings came."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            chosen = registry.choose_kernels(*args)
        except ValueError as error:
            return {"refused": str(error), "warnings": [str(one.message) for one in heard]}
    names = sorted({**registry.BUILT_IN, **registry.REGISTERED})
    return {"by": {name: getattr(chosen, name)() for name in names}, "warnings": [str(one.message) for one in heard]}


def choose_probe(seed: int) -> Values:
    """Choose in both dtypes, with and without invariance, and when an operation was registered."""
    from mini_engine.kernels import registry

    asked: list[list[str]] = []
    built_in = {
        "plain": toy("plain", None, asked),
        "narrow": toy("narrow", "dtype", asked),
        "elsewhere": toy("elsewhere", "device", asked),
        "small": toy("small", "dtype", asked),
    }
    fixed = {**built_in, "moody": toy("moody", None, asked)}
    moody = {**built_in, "moody": toy("moody", "device", asked, invariant=False)}
    own = {"narrow": toy("my narrow", None, asked), "plain": toy("my plain", "device", asked)}
    able, unable = (toy("my moody", why, asked, invariant=False) for why in (None, "device"))
    values: Values = {}
    with set_for_now(registry, BUILT_IN=built_in, REGISTERED={}):
        for dtype in (torch.float32, torch.float16):
            values[f"{dtype}"] = choice_of(registry, CPU, dtype)
            values[f"{dtype}, invariant"] = choice_of(registry, CPU, dtype, True)
        for name, kernel in own.items():
            registry.register_kernel(name, kernel)
        values["registered"] = choice_of(registry, CPU, torch.float16)
        values["what is built in was left alone"] = [registry.BUILT_IN[name] not in own.values() for name in own]
        values["asked on cuda in bfloat16"] = choice_of(registry, torch.device("cuda"), torch.bfloat16)
    with set_for_now(registry, BUILT_IN=fixed, REGISTERED={}):
        values["invariant by its kernel"] = choice_of(registry, CPU, torch.float16, True)
        registry.register_kernel("moody", able)
        values["invariant by the registered kernel"] = choice_of(registry, CPU, torch.float16, True)
        registry.register_kernel("moody", unable)
        values["another order in the registered reference, invariant"] = choice_of(registry, CPU, torch.float16, True)
    with set_for_now(registry, BUILT_IN=moody, REGISTERED={}):
        values["another order in the reference"] = choice_of(registry, CPU, torch.float16)
        values["another order in the reference, invariant"] = choice_of(registry, CPU, torch.float16, True)
    values["asked"] = sorted({tuple(one) for one in asked})
    return values


def chosen(left_out: dict[str, str], names: str = "plain narrow elsewhere small") -> dict[str, str]:
    """Return who computes what; ``left_out`` has a reference's owner for each operation without a kernel."""
    return {name: left_out.get(name, f"kernel of {name}") for name in sorted(names.split())}


def choose_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare the choice, and ask every warning for one reason and the operations that it concerns."""
    few = {name: f"reference of {name}" for name in ("narrow", "elsewhere", "small")}
    mine = {**few, "narrow": "kernel of my narrow", "plain": "reference of my plain"}
    all_names = "plain narrow elsewhere small moody"
    by_dtype = [WORDS["dtype"], ["narrow", "small"]]
    by_device = [WORDS["device"], ["elsewhere"]]
    expected: dict[str, tuple[dict[str, str], list[Any]]] = {
        "torch.float32": (chosen({}), []),
        "torch.float32, invariant": (chosen({}), []),
        "torch.float16": (chosen(few), [by_dtype, by_device]),
        "torch.float16, invariant": (chosen(few), [by_dtype, by_device]),
        "registered": (chosen(mine), [[WORDS["dtype"], ["small"]], [WORDS["device"], ["plain", "elsewhere"]]]),
        "asked on cuda in bfloat16": (chosen({"narrow": "kernel of my narrow", "plain": "kernel of my plain"}), []),
        "invariant by its kernel": (chosen(few, all_names), [by_dtype, by_device]),
        "invariant by the registered kernel": (
            chosen({**few, "moody": "kernel of my moody"}, all_names),
            [by_dtype, by_device],
        ),
        "another order in the reference": (
            chosen({**few, "moody": "reference of moody"}, all_names),
            [by_dtype, [WORDS["device"], ["elsewhere", "moody"]]],
        ),
    }
    failures = []
    for case, (by, reasons) in expected.items():
        if "refused" in got[case]:
            failures.append(Failure(case, "", "a choice", f"ValueError: {got[case]['refused']}"))
            continue
        failures += differences(by, got[case]["by"], None, case)
        failures += judge_warnings(case, got[case]["warnings"], reasons, all_names.split())
    for case in ("another order in the reference, invariant", "another order in the registered reference, invariant"):
        words = got[case].get("refused", "")
        if "moody" not in words or WORDS["device"] not in words:
            failures.append(Failure(case, "", "a ValueError that names moody and its fault", words or "no error"))
    case = "what is built in was left alone"
    failures += differences([True, True], got[case], None, case)
    asked = [["cpu", "torch.float16"], ["cpu", "torch.float32"], ["cuda", "torch.bfloat16"]]
    return failures + differences(asked, [list(one) for one in got["asked"]], None, "asked for")


def judge_warnings(case: str, heard: list[str], reasons: list[Any], names: list[str]) -> list[Failure]:
    """Ask for one warning for each reason, with its operations and no others."""
    failures = differences(len(reasons), len(heard), None, f"{case}, warnings, one for each reason")
    for why, concerned in reasons:
        text = next((one for one in heard if why in one), "").replace(why, "")
        lists = (set(one.split(", ")) & set(names) for one in re.findall(r"\w+(?:, \w+)*", text))
        named = max(lists, key=len, default=set())
        told_here = f"{case}, operations, separated by ', ', in the warning {text!r} for the fault {why!r}"
        failures += differences(sorted(concerned), sorted(named), None, told_here)
    return failures


REGISTRY.add(
    "L8.L.choose",
    "A kernel computes what it can, its reference the rest, with one warning for each reason; what the reader "
    "registered comes first, and a reference that breaks batch_invariant is refused.",
    choose_probe,
    choose_verdict,
)


def built_in_probe(seed: int) -> Values:
    """Choose among the engine's own operations, here and in a dtype that the interpreter cannot compute in."""
    from mini_engine.kernels import registry

    values: Values = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.float32, torch.bfloat16):
            found = registry.choose_kernels(CPU, dtype)
            values[f"{dtype}"] = {
                name: [getattr(found, name) is kernel.launch, getattr(found, name) is kernel.reference]
                for name, kernel in registry.BUILT_IN.items()
            }
        try:
            registry.choose_kernels(CPU, torch.bfloat16, batch_invariant=True)
        except ValueError as error:
            values["refused"] = str(error)
    return values


def built_in_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for kernels in float32, for references in bfloat16, and for a refusal of invariance there."""
    failures = []
    for dtype, who in (("torch.float32", [True, False]), ("torch.bfloat16", [False, True])):
        want = dict.fromkeys(got["torch.float32"], who)
        failures += differences(want, got[dtype], None, f"{dtype}, [kernel, reference]")
    if "bfloat16" not in got.get("refused", ""):
        failures.append(Failure("bfloat16 with batch_invariant", "", "a ValueError with the reason", "no such error"))
    return failures


REGISTRY.add(
    "L8.L.built_in",
    "In the interpreter every operation of the engine has its kernel in float32, and its reference in bfloat16.",
    built_in_probe,
    built_in_verdict,
)


def packed(seed: int) -> dict[str, tuple[list[tuple[int, int, int, int]], int]]:
    """Return blocks (sequence, start, end, visible) and the most rows of a block."""
    cases = {"no sequences": (list[tuple[int, int, int, int]](), 4)}
    for number in range(12):
        rng = random.Random(f"cut {seed} {number}")
        start = 0
        blocks = []
        for sequence in range(rng.randint(1, 6)):
            rows = rng.choice([0, 1, 1, 2, 7, 16, 33])
            if rng.random() < 0.8:  # the others go to another launch
                blocks.append((sequence, start, start + rows, rows + rng.choice([0, 0, 3, 100])))
            start += rows
        rng.shuffle(blocks)
        cases[f"{len(blocks)} sequences, number {number}"] = (blocks, rng.choice([1, 2, 4, 16, 64]))
    return cases


def cut_probe(seed: int) -> Values:
    """Cut."""
    from mini_engine.kernels.query_blocks import QueryBlock, cut_queries

    values: Values = {}
    for name, (blocks, queries) in packed(seed).items():
        cut = cut_queries((QueryBlock(*block) for block in blocks), queries, "cpu")
        values[name] = {
            "blocks": [[int(x) for x in (one.sequence, one.start, one.end, one.visible)] for one in cut.blocks],
            "table": cut.table,
            "queries": int(cut.queries),
        }
    given = [QueryBlock(0, 0, 1, 1), QueryBlock(1, 1, 3, 9)]
    values["device"] = str(cut_queries(given, 4, "meta").table.device)
    values["what was given"] = [list(block) for block in given]
    for queries, sequences in ((0, [QueryBlock(0, 0, 2, 2)]), (-3, [])):
        try:
            cut_queries(sequences, queries, "cpu")
        except ValueError as error:
            values[f"{queries} queries"] = str(error)
    return values


def cut_verdict(seed: int, got: Values) -> list[Failure]:
    """Follow every row: it lies in one block of its sequence and sees what it saw before."""
    failures = []
    for name, (blocks, queries) in packed(seed).items():
        cut = got[name]["blocks"]
        seen = {row: visible - (end - 1 - row) for _, start, end, visible in blocks for row in range(start, end)}
        now = [(row, visible - (end - 1 - row)) for _, start, end, visible in cut for row in range(start, end)]
        failures += differences(sorted(seen.items()), sorted(now), None, f"{name}, rows and the keys that they see")
        owners = [next((b[0] for b in blocks if b[1] <= start < end <= b[2]), -1) for _, start, end, _ in cut]
        failures += differences(owners, [block[0] for block in cut], None, f"{name}, sequences")
        count = sum(-(-(end - start) // queries) for _, start, end, _ in blocks)
        failures += differences(count, len(cut), None, f"{name}, blocks of at most {queries}")
        if any(end - start > queries for _, start, end, _ in cut):
            failures.append(Failure(name, "", f"blocks of at most {queries} rows", str(cut)))
        place = {block[0]: index for index, block in enumerate(blocks)}
        order = [(-block[3], place.get(block[0], -1)) for block in cut]
        told_here = f"{name}, blocks by falling keys, equal ones in the order that was given: [- keys, place]"
        failures += differences(sorted(order), order, None, told_here)
        table = torch.tensor(cut, dtype=torch.int32).view(-1, 4)
        failures += differences([table, queries], [got[name]["table"], got[name]["queries"]], None, f"{name}, table")
    failures += differences("meta", got["device"], None, "device of the table")
    failures += differences([[0, 0, 1, 1], [1, 1, 3, 9]], got["what was given"], None, "the list that was given")
    for queries in (0, -3):
        if str(queries) not in got.get(f"{queries} queries", ""):
            failures.append(Failure(f"{queries} queries", "", "a ValueError that names them", "no such error"))
    return failures[:6]


REGISTRY.add(
    "L8.L.cut",
    "Blocks hold every row once and no more rows than asked for, know what their last row sees, and begin with the "
    "longest.",
    cut_probe,
    cut_verdict,
)
