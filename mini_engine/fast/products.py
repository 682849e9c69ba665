"""Ways to multiply rows by a weight matrix on a CPU, and the choice between them by experiment.

Owns: the ways, what they need, and which one a weight gets. Must not know: layers, attention, requests.

Which way is fast, and which keeps a row's bits, differs from CPU to CPU and from shape to shape. So both are measured
when a model is loaded, once for each shape and dtype (``invariant/findings.py`` keeps the answer).
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.config import EngineConfig
from mini_engine.invariant.findings import cpu, remembered
from mini_engine.invariant.probe import opposite_terms, row_numbers, rows_that_hold
from mini_engine.linear import Linear, Projections, TorchProjections

# How fast oneDNN reads a packed matrix from memory depends on the number of rows, and on the machine how: six rows took
# 10 to 25 % less time than one where memory was slow for a core (15 GB/s), one row 10 % less than six where it was fast
# (30 GB/s). Four rows are within 5 % of the best number in all modes of the machine that were met with AVX-512.
FEW_ROWS = 4
ONE, FEW, MANY = 1, 16, 128  # numbers of rows that are timed: a decode step alone, of some requests, a prefill
CLEARLY_FASTER = 0.9  # the time of what replaces the usual choice; less would be noise
LARGEST_PIECE = 1 << 22  # elements of a weight; a larger one is computed piece by piece, so that trying it is quick
LARGEST_BLOCK = 64  # rows; a larger block is hardly faster for a large weight, and trying it takes longer
LARGEST_BLOCK_OF_SMALL = 128
PADDED_UP_TO = 32  # rows; a few more cost less than a second call
COMPARED_ROWS = (1, 2, 3, 4, 5, 7, 16, 33, 64)
SMALL_WEIGHT = 1 << 17  # elements; up to here a call takes longer than the arithmetic, and weights stay in the caches
EMPTIES_CACHES = 1 << 24  # bytes
TIMED_RUNS = 2


Product = Callable[[Tensor], Linear]  # a weight [out, in] -> the product with it


@dataclass(frozen=True)
class Way:
    """A way to compute ``x @ weight.T``: ``store`` the weight once, then ``multiply(x, stored)``.

    ``is_compiled``: the library compiles code for every number of float32 rows that it meets, in a millisecond or two,
    and keeps it: half a megabyte for a small matrix, six for a large one. So rows are padded to usual numbers.
    """

    store: Callable[[Tensor], Tensor]
    multiply: Callable[[Tensor, Tensor], Tensor]
    is_compiled: bool


def pack_weight(weight: Tensor) -> Tensor:
    """Reorder ``weight`` [out, in] into oneDNN's blocked layout, tuned for a batch of 16 rows; opaque afterwards."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)  # type: ignore[no-any-return]


def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``x`` [M, in] by a plain or packed weight -> [M, out]; no bias, no fused activation.

    The operators are the ones that torch's own compiler emits for CPUs (``torch._inductor``). They are private, so
    ``onednn_fault`` tries them first.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # type: ignore[no-any-return]


WAYS = {
    "packed": Way(pack_weight, onednn_linear, is_compiled=True),
    "onednn": Way(lambda weight: weight.contiguous(), onednn_linear, is_compiled=True),
    "torch": Way(lambda weight: weight.contiguous(), F.linear, is_compiled=False),
}


@cache
def onednn_fault(dtype: torch.dtype) -> str | None:
    """Pack and multiply a small matrix; return why that is impossible here, or ``None`` if it works."""
    if not torch.backends.mkldnn.is_available():
        return "this torch build has no oneDNN"
    try:
        onednn_linear(torch.ones(2, 32, dtype=dtype), pack_weight(torch.ones(32, 32, dtype=dtype)))
    except (RuntimeError, AttributeError) as error:  # bfloat16 wants AVX-512; another build may lack the operators
        return str(error).splitlines()[0]
    return None


def make_projections(config: EngineConfig) -> Projections:
    """Return the projections that ``config.compute`` and ``config.batch_invariant`` ask for.

    Where oneDNN cannot multiply in the dtype, packed weights are those of ``F.linear`` and a warning says so.
    """
    is_packed = config.packs_weights
    if not (is_packed or config.batch_invariant):
        return TorchProjections()
    fault = onednn_fault(getattr(torch, config.dtype))
    if fault is not None and is_packed:
        warnings.warn(
            f"compute={config.compute!r} needs oneDNN; F.linear is used for {config.dtype}: {fault}", stacklevel=2
        )
    usable = ("packed", "onednn", "torch") if fault is None else ("torch",)
    return InvariantProjections(usable) if config.batch_invariant else FastProjections(usable)


@dataclass(frozen=True)
class FastProjections(TorchProjections):
    """The fastest of the ``usable`` ways for one row, few and many, among those that share a stored weight."""

    usable: Sequence[str]

    def linear(self, weight: Tensor) -> Linear:
        """Return the product with ``weight``, stored as it needs it; the caller should drop its own reference."""
        plan = find_plan(weight, self.usable)
        stored = WAYS[plan[0]].store(weight)
        one, few, many = (padded(WAYS[name], stored) for name in plan)
        if len(set(plan)) == 1:
            return many

        def multiply(x: Tensor) -> Tensor:
            rows = x.shape[0]
            return one(x) if rows <= FEW_ROWS else few(x) if rows <= (FEW + MANY) // 2 else many(x)

        return multiply


@cache  # asked for every product
def usual_rows(rows: int) -> int:
    """Return the least usual number of rows from ``rows`` on: 1, 2, 4, 6, 8, then four for each power of two."""
    if rows <= 2 or 4 < rows <= 6:  # oneDNN multiplies six float32 rows at a time
        return max(1, rows + rows % 2) if rows > 2 else rows
    step = max(4, (1 << (rows - 1).bit_length()) // 8)
    return -(-rows // step) * step


def padded(way: Way, stored: Tensor) -> Linear:
    """Return the product with ``stored`` over rows padded with zeros where that saves time or memory.

    One row stays alone, since its bits are its own.
    """
    if not way.is_compiled:
        return lambda x: way.multiply(x, stored)
    is_float32 = stored.dtype == torch.float32

    def multiply(x: Tensor) -> Tensor:
        rows = x.shape[0]
        wanted = usual_rows(rows) if is_float32 else rows
        missing = (max(wanted, FEW_ROWS) if rows > 1 else 1) - rows
        return way.multiply(F.pad(x, (0, 0, 0, missing)), stored)[:rows] if missing else way.multiply(x, stored)

    return multiply


def find_plan(weight: Tensor, usable: Sequence[str]) -> list[str]:
    """Return the names of the ways for one row, few and many, all of which store ``weight`` alike.

    In bfloat16 only ways with the bits of ``F.linear`` count, those of transformers.
    """
    if len(usable) == 1:
        return [usable[0]] * 3

    def experiment() -> list[str]:
        exact = usable if weight.dtype != torch.bfloat16 else ways_with_default_bits(usable, weight)
        return make_plan(time_ways(weight, {name: whole(name) for name in exact}, (ONE, FEW, MANY)))

    return list(remembered(f"fastest of {' '.join(usable)}: {describe(weight)}", experiment))


@torch.inference_mode()
def ways_with_default_bits(usable: Sequence[str], weight: Tensor) -> list[str]:
    """Return the ``usable`` ways with the bits of ``F.linear`` for weights like ``weight``, on some numbers of rows."""
    row, vectors = opposite_terms(weight.shape[1], min(weight.shape[0], LARGEST_PIECE // weight.shape[1]), weight.dtype)
    rows = row.expand(max(COMPARED_ROWS), -1).contiguous()
    expected = {n: F.linear(rows[:n], vectors) for n in COMPARED_ROWS}

    def is_exact(way: Way) -> bool:
        multiply = padded(way, way.store(vectors))
        return all(torch.equal(multiply(rows[:n]), expected[n]) for n in COMPARED_ROWS)

    return [name for name in usable if name == "torch" or is_exact(WAYS[name])]


def make_plan(times: dict[str, list[float]]) -> list[str]:
    """Choose from the seconds that each way takes for one row, few and many.

    Packed weights serve no other way, plain ones serve two. The kind of weight with the least product of its three
    times is taken, and within it the fastest way for each number of rows.
    """
    plain = [name for name in times if name != "packed"]
    plans = [["packed"] * 3] if "packed" in times else []
    plans.append([fastest({name: times[name][i] for name in plain}) for i in range(3)])
    return ranked({",".join(plan): [times[name][i] for i, name in enumerate(plan)] for plan in plans})[0].split(",")


def fastest(times: dict[str, float], clearly: float = CLEARLY_FASTER) -> str:
    """Return the name with the least time; the first one unless that takes less than ``clearly`` times as long."""
    first = next(iter(times))
    best = min(times, key=lambda name: times[name])
    return best if times[best] < clearly * times[first] else first


def ranked(times: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the names in the order in which they would be chosen, by the product of their times."""
    left = {name: math.prod(own) for name, own in times.items()}
    order = []
    while left:
        order.append(fastest(left, CLEARLY_FASTER ** len(next(iter(times.values())))))
        del left[order[-1]]
    return order


@torch.inference_mode()
def time_ways(weight: Tensor, ways: Mapping[str, Product], numbers: Sequence[int]) -> dict[str, list[float]]:
    """Return the least seconds of each of ``ways`` for each of ``numbers`` of rows, the weight outside the caches."""
    sample = weight[: max(1, LARGEST_PIECE // weight.shape[1])]
    rows = {number: torch.randn(number, weight.shape[1]).to(weight.dtype) for number in numbers}
    others = torch.ones(EMPTIES_CACHES // 4 if sample.numel() > SMALL_WEIGHT else 1)

    def seconds(multiply: Linear, x: Tensor) -> float:
        spent = []
        multiply(x)  # may compile
        for _ in range(TIMED_RUNS):
            others.sum()
            began = time.perf_counter()
            multiply(x)
            spent.append(time.perf_counter() - began)
        return min(spent)

    times = {}
    for name, product in ways.items():
        multiply = product(sample)
        times[name] = [seconds(multiply, x) for x in rows.values()]
    return times


@dataclass(frozen=True)
class InvariantProjections:
    """Products whose rows have the same bits whatever their number and place, by one of the ``usable`` ways.

    Rows are multiplied in blocks, and a block has one of the numbers of rows for which the experiment found the same
    bits (``invariant/probe.py``); a smaller block is padded with zeros. A large weight is cut into pieces of a power of
    two of output features, so that many weights consist of the same pieces, and what is tried is what is used.
    """

    usable: Sequence[str]

    def linear(self, weight: Tensor) -> Linear:
        """Return the product with ``weight``. Raises ``ValueError`` where no way keeps a row's bits on this machine."""
        fitting = max(1, LARGEST_PIECE // weight.shape[1])
        pieces = weight.split(1 << (fitting.bit_length() - 1))
        parts = [self.piece(piece) for piece in pieces]
        return parts[0] if len(parts) == 1 else lambda x: torch.cat([part(x) for part in parts], dim=-1)

    def piece(self, weight: Tensor) -> Linear:
        """Return the product with a weight that is small enough to be tried whole."""
        return in_blocks_of(*find_blocks(weight, self.usable), weight)

    def silu(self, x: Tensor) -> Tensor:
        """Return SiLU as ``x / (1 + exp(-x))`` in float32.

        ``F.silu`` uses another ``exp`` in its vector loop than in the scalar tail after it, so a value's bits depend
        on where in the tensor it stands. ``torch.exp`` has no such seam.
        """
        wide = x.float()
        return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)


def whole(name: str) -> Product:
    """Return the way of that ``name``: a weight -> its product with any number of rows."""

    def product(weight: Tensor) -> Linear:
        way = WAYS[name]
        stored = way.store(weight)
        return lambda x: way.multiply(x, stored)

    return product


def in_blocks_of(name: str, numbers: Sequence[int], weight: Tensor) -> Linear:
    """Return the product of the way ``name`` with ``weight``, in blocks of ``numbers`` of rows."""
    return in_blocks(whole(name)(weight), numbers)


def in_blocks(multiply: Linear, numbers: Sequence[int]) -> Linear:
    """Return ``multiply`` over blocks of rows that each have one of ``numbers``, which are in order."""
    largest = numbers[-1]
    cuts = all_block_sizes(tuple(numbers))

    def product(x: Tensor) -> Tensor:
        rows = x.shape[0]
        sizes = cuts[rows] if rows <= largest else [largest] * (rows // largest) + cuts[rows % largest]
        missing = sum(sizes) - rows
        if missing:
            x = torch.constant_pad_nd(x, (0, 0, 0, missing))  # ``F.pad`` is the same behind a wrapper in Python
        out = multiply(x) if len(sizes) < 2 else torch.cat([multiply(part) for part in x.split_with_sizes(sizes)])
        return out.narrow(0, 0, rows) if missing else out

    return product


@cache  # asked for by every weight
def all_block_sizes(numbers: tuple[int, ...]) -> list[list[int]]:
    """Return ``block_sizes`` for every number of rows from 0 up to the largest of ``numbers``."""
    return [block_sizes(rows, numbers) for rows in range(numbers[-1] + 1)]


def block_sizes(rows: int, numbers: Sequence[int]) -> list[int]:
    """Return the sizes of the blocks for ``rows`` rows, each one of ``numbers``; the last may be larger than its rows.

    Few rows are one padded block. Of more, the largest number is taken off first: 100 rows are 64 + 32 + 4.
    """
    if rows == 0:
        return []
    fitting = [n for n in numbers if n <= rows]
    if rows <= PADDED_UP_TO or not fitting:
        return [min(n for n in numbers if n >= rows)]
    return [fitting[-1], *block_sizes(rows - fitting[-1], numbers)]


def find_blocks(weight: Tensor, usable: Sequence[str]) -> tuple[str, list[int]]:
    """Return the fastest way that keeps a row's bits, and for which numbers of rows. ``ValueError`` if none does."""
    is_small = weight.numel() <= SMALL_WEIGHT
    numbers = row_numbers(LARGEST_BLOCK_OF_SMALL if is_small else LARGEST_BLOCK)
    timed = (FEW_ROWS, FEW, numbers[-1])

    def likely_fastest_first() -> Iterator[str]:
        has_short_call = is_small and weight.dtype == torch.float32  # in bfloat16 ``F.linear`` calls oneDNN as well
        untimed = ["torch"] if has_short_call or len(usable) == 1 else []
        yield from untimed
        yield from ranked(time_ways(weight, {name: whole(name) for name in usable if name not in untimed}, timed))

    def experiment() -> tuple[str, list[int]]:
        held: dict[str, list[int]] = {}
        for name in likely_fastest_first():
            held[name] = numbers_that_hold(WAYS[name], weight, numbers)
            if {FEW_ROWS, numbers[-1]} <= set(held[name]):
                break  # it loses nothing to blocks, and the others are slower
        kept = {name: partial(in_blocks_of, name, numbers) for name, numbers in held.items() if numbers}
        name = ranked(time_ways(weight, kept, timed))[0] if len(kept) > 1 else next(iter(kept), "")
        return name, held.get(name, [])

    name, held = remembered(f"invariant by {' '.join(usable)}: {describe(weight)}", experiment)
    if not held:
        raise ValueError(
            f"batch_invariant=True cannot be kept on this CPU ({cpu()['model name']}): no product with a weight of "
            f"{describe(weight)} gives a row the same bits in every batch (tried: {', '.join(usable)}); "
            "leave batch_invariant off, or try another dtype"
        )
    return name, held


def numbers_that_hold(way: Way, weight: Tensor, numbers: Sequence[int]) -> list[int]:
    """Try a product of the shape and dtype of ``weight``; see ``rows_that_hold``."""
    row, vectors = opposite_terms(weight.shape[1], weight.shape[0], weight.dtype)
    stored = way.store(vectors)
    return rows_that_hold(lambda x: way.multiply(x, stored), row, numbers)


def describe(weight: Tensor) -> str:
    """Return shape and dtype in words, ``3072 x 1024 float32``."""
    return f"{weight.shape[0]} x {weight.shape[1]} {str(weight.dtype).removeprefix('torch.')}"
