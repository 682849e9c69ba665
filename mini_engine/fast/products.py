"""Ways to multiply rows by a weight matrix on a CPU, and the rule that says which one a weight gets.

Two ways add up a product in two orders, so their bits differ. The choice must therefore be the same in every process.
It follows from the dtype and the size of the whole matrix and from what holds on this machine, in a fixed order of
preference. No time is measured. What holds is tried when a model is loaded, once for each shape and dtype
(``invariant/findings.py`` keeps the answer).
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.config import EngineConfig
from mini_engine.invariant.findings import cpu, remembered
from mini_engine.invariant.probe import THREADS, opposite_terms, row_numbers, rows_that_hold
from mini_engine.linear import Linear, Projections, TorchProjections, with_bias

# How fast oneDNN reads a packed matrix from memory depends on the number of rows, and on the machine how: six rows took
# 10 to 25 % less time than one where memory was slow for a core (15 GB/s), one row 10 % less than six where it was fast
# (30 GB/s). Four rows are within 5 % of the best number in all modes of the machine that were met with AVX-512.
FEW_ROWS = 4
LARGEST_PIECE = 1 << 24  # elements of a weight; a larger one is computed piece by piece, so that trying it is quick
LARGEST_BLOCK = 256  # rows; a larger block is hardly faster, and trying it takes longer
COMPARED_ROWS = (1, 2, 3, 4, 5, 7, 16, 33, 64)
SMALL_WEIGHT = 1 << 17  # elements; up to here a call takes longer than the arithmetic, and weights stay in the caches


@dataclass(frozen=True)
class Way:
    """A way to compute ``x @ weight.T``: ``store`` the weight once, then ``multiply(x, stored)``, or with a ``bias``.

    ``is_compiled``: the library compiles code for every number of float32 rows that it meets, in a millisecond or two,
    and keeps it: half a megabyte for a small matrix, six for a large one. So rows are padded to usual numbers.
    """

    store: Callable[[Tensor], Tensor]
    multiply: Callable[..., Tensor]
    is_compiled: bool


def pack_weight(weight: Tensor) -> Tensor:
    """Reorder ``weight`` [out, in] into oneDNN's blocked layout, tuned for a batch of 16 rows; opaque afterwards."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)  # type: ignore[no-any-return]


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply ``x`` [M, in] by a plain or packed weight, add ``bias`` [out] before it is rounded -> [M, out].

    The operators are the ones that torch's own compiler emits for CPUs (``torch._inductor``). They are private, so
    ``onednn_fault`` tries them first.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


WAYS = {
    "packed": Way(pack_weight, onednn_linear, is_compiled=True),
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
    usable = ("packed", "torch") if fault is None else ("torch",)
    return InvariantProjections(usable) if config.batch_invariant else FastProjections(usable)


def in_order_of_preference(
    out_features: int, in_features: int, dtype: torch.dtype, usable: Sequence[str]
) -> Sequence[str]:
    """Return the ``usable`` ways, the preferred one first: "packed", but for a small float32 matrix "torch".

    A packed matrix is read from memory faster. A small one stays in the caches, and ``F.linear`` has the shorter call.
    In bfloat16 ``F.linear`` calls oneDNN as well.
    """
    is_small = out_features * in_features <= SMALL_WEIGHT
    return usable[::-1] if is_small and dtype == torch.float32 else usable


@dataclass(frozen=True)
class FastProjections(TorchProjections):
    """The preferred one of the ``usable`` ways; in bfloat16 only one with the bits of ``F.linear``, of transformers.

    ``choices``: the way of each shape, in words.
    """

    usable: Sequence[str]
    choices: dict[str, str] = field(default_factory=dict)

    def linear(self, weight: Tensor, bias: Tensor | None = None, whole: int | None = None) -> Linear:
        """Return the product with ``weight`` [out, in], plus ``bias`` [out].

        ``whole``: the output features of the whole matrix, where ``weight`` and ``bias`` are a part of it; the part is
        multiplied in the way of the whole. The weight is stored as the product needs it; the caller should drop its own
        reference.
        """
        return padded(*self.store(weight, whole), bias)

    def store(self, weight: Tensor, whole: int | None = None) -> tuple[Way, Tensor]:
        """Return the way of ``weight`` [out, in], and the weight as that way stores it. ``whole``: see ``linear``."""
        name = find_way(weight, self.usable, whole)
        self.choices[describe(weight.shape[0], weight.shape[1], weight.dtype)] = name
        return WAYS[name], WAYS[name].store(weight)


@cache  # asked for every product
def usual_rows(rows: int) -> int:
    """Return the least usual number of rows from ``rows`` on: 1, 2, 4, 6, 8, then four for each power of two."""
    if rows <= 2 or 4 < rows <= 6:  # oneDNN multiplies six float32 rows at a time
        return max(1, rows + rows % 2) if rows > 2 else rows
    step = max(4, (1 << (rows - 1).bit_length()) // 8)
    return -(-rows // step) * step


def padded(way: Way, stored: Tensor, bias: Tensor | None = None) -> Linear:
    """Return the product with ``stored`` over rows padded with zeros where that saves time or memory.

    One row stays alone, since its bits are its own.
    """
    product = way.multiply if bias is None else partial(way.multiply, bias=bias)
    if not way.is_compiled:
        return lambda x: product(x, stored)
    is_float32 = stored.dtype == torch.float32

    def multiply(x: Tensor) -> Tensor:
        rows = x.shape[0]
        wanted = usual_rows(rows) if is_float32 else rows
        missing = (max(wanted, FEW_ROWS) if rows > 1 else 1) - rows
        return product(F.pad(x, (0, 0, 0, missing)), stored)[:rows] if missing else product(x, stored)

    return multiply


def find_way(weight: Tensor, usable: Sequence[str], whole: int | None = None) -> str:
    """Return the way that ``FastProjections`` takes for ``weight``, or for a matrix of ``whole`` output features."""
    ways = in_order_of_preference(whole or weight.shape[0], weight.shape[1], weight.dtype, usable)
    if weight.dtype != torch.bfloat16 or ways[0] == "torch":
        return ways[0]
    name = (
        f"packed has the bits of F.linear, with a bias too: {describe(weight.shape[0], weight.shape[1], weight.dtype)}"
    )
    return "packed" if remembered(name, lambda: packed_has_default_bits(weight)) else "torch"


@torch.inference_mode()
def packed_has_default_bits(weight: Tensor) -> bool:
    """Whether a packed weight like ``weight`` has the bits of ``F.linear`` on some numbers of rows, with a bias too."""
    row, vectors = opposite_terms(weight.shape[1], min(weight.shape[0], LARGEST_PIECE // weight.shape[1]), weight.dtype)
    rows = row.expand(max(COMPARED_ROWS), -1).contiguous()
    packed = pack_weight(vectors)
    for bias in (None, vectors[:, 0].contiguous()):
        multiply = padded(WAYS["packed"], packed, bias)
        if not all(torch.equal(multiply(rows[:n]), F.linear(rows[:n], vectors, bias)) for n in COMPARED_ROWS):
            return False
    return True


@dataclass(frozen=True)
class InvariantProjections:
    """Products whose rows have the same bits whatever their number and place, by one of the ``usable`` ways.

    Rows are multiplied in blocks, and a block has one of the numbers of rows for which the experiment found the same
    bits (``invariant/probe.py``); a smaller block is padded with zeros. A large weight is cut into pieces of a power of
    two of output features, so that many weights consist of the same pieces, and what is tried is what is used.
    ``choices``: the way of each shape of a piece, in words.
    """

    usable: Sequence[str]
    choices: dict[str, str] = field(default_factory=dict)

    def linear(self, weight: Tensor, bias: Tensor | None = None, whole: int | None = None) -> Linear:
        """Return the product with ``weight`` [out, in], plus ``bias`` [out].

        ``whole``: the output features of the whole matrix, where ``weight`` and ``bias`` are a part of it. An output
        feature has the same bits in the matrix and in each part of it. Raises ``ValueError`` where no way keeps a row's
        bits on this machine.
        """
        fitting = max(1, LARGEST_PIECE // weight.shape[1])
        size = min(whole or weight.shape[0], 1 << (fitting.bit_length() - 1))
        parts = [self.piece(piece, size) for piece in weight.split(size)]
        joined = parts[0] if len(parts) == 1 else lambda x: torch.cat([part(x) for part in parts], dim=-1)
        return with_bias(joined, bias)

    def piece(self, weight: Tensor, size: int) -> Linear:
        """Return the product with up to ``size`` output features, small enough to be tried whole.

        Fewer are padded with zeros to ``size`` where the library would add them up in another order.
        """
        features, in_features = weight.shape
        name, numbers = find_blocks(size, in_features, weight.dtype, self.usable)
        self.choices[describe(size, in_features, weight.dtype)] = f"{name}, rows {' '.join(map(str, numbers))}"
        way = WAYS[name]
        is_padded = features < size and not is_like_the_whole(name, features, size, in_features, weight.dtype, numbers)
        stored = way.store(F.pad(weight, (0, 0, 0, size - features)) if is_padded else weight)
        multiply = in_blocks(lambda x: way.multiply(x, stored), numbers)
        return (lambda x: multiply(x)[:, :features]) if is_padded else multiply

    def silu(self, x: Tensor) -> Tensor:
        """Return SiLU as ``x / (1 + exp(-x))`` in float32.

        ``F.silu`` uses another ``exp`` in its vector loop than in the scalar tail after it, so a value's bits depend
        on where in the tensor it stands. ``torch.exp`` has no such seam.
        """
        wide = x.float()
        return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)


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
    """Return the sizes of the blocks for every number of rows from 0 up to the largest of ``numbers``.

    Each is one of ``numbers``, and the last may be larger than its rows. They are those that take the least time, if a
    block takes as long as its rows and ``FEW_ROWS`` more: 100 rows are 96 + 4, and 20 are 24. To read the weight takes
    as long as twice ``FEW_ROWS``.
    """
    best: list[tuple[int, int, list[int]]] = [(0, 0, [])]  # cost, how many blocks, their sizes
    for rows in range(1, numbers[-1] + 1):
        cuts = [(max(number, FEW_ROWS) + FEW_ROWS, number, best[max(0, rows - number)]) for number in numbers]
        best.append(min((cost + own[0], own[1] + 1, [number, *own[2]]) for cost, number, own in cuts))
    return [sorted(sizes, reverse=True) for _, _, sizes in best]


def find_blocks(
    out_features: int, in_features: int, dtype: torch.dtype, usable: Sequence[str]
) -> tuple[str, list[int]]:
    """Return the preferred way that keeps a row's bits, and for which numbers of rows.

    One that holds for fewer than ``FEW_ROWS`` rows comes last. The choice depends on the matrix and on ``THREADS``.
    Raises ``ValueError`` if no way holds, or the chosen one does not hold on the threads in use.
    """
    ways = in_order_of_preference(out_features, in_features, dtype, usable)
    numbers = row_numbers(LARGEST_BLOCK)
    shape = describe(out_features, in_features, dtype)

    def experiment() -> tuple[str, list[int]]:
        held = dict[str, list[int]]()
        for name in ways:
            held[name] = numbers_that_hold(WAYS[name], out_features, in_features, dtype, numbers)
            if max(held[name], default=0) >= FEW_ROWS:
                break
        name = max(held, key=lambda name: max(held[name], default=0))
        if (in_use := torch.get_num_threads()) not in THREADS:
            held[name] = numbers_that_hold(WAYS[name], out_features, in_features, dtype, held[name], [in_use])
        return name, held[name]

    name, held = remembered(f"invariant by {' '.join(usable)}: {shape}", experiment)
    if not held:
        raise ValueError(
            f"batch_invariant=True cannot be kept on this CPU ({cpu()['model name']}) with {torch.get_num_threads()} "
            f"threads: no product with a weight of {shape} gives a row the same bits in every batch (tried: "
            f"{', '.join(ways)}); leave batch_invariant off, or try another dtype or number of threads"
        )
    return name, held


def numbers_that_hold(
    way: Way,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    numbers: Sequence[int],
    threads: Sequence[int] = THREADS,
) -> list[int]:
    """Try a product of this shape; see ``rows_that_hold``."""
    row, vectors = opposite_terms(in_features, out_features, dtype)
    stored = way.store(vectors)
    return rows_that_hold(lambda x: way.multiply(x, stored), row, numbers, threads)


def is_like_the_whole(
    name: str, features: int, whole: int, in_features: int, dtype: torch.dtype, numbers: list[int]
) -> bool:
    """Whether the last ``features`` of ``whole`` output features get the same bits in a product of their own."""

    def experiment() -> bool:
        row, vectors = opposite_terms(in_features, whole, dtype)
        stored, part = (WAYS[name].store(each) for each in (vectors, vectors[whole - features :]))
        threads = [*THREADS, torch.get_num_threads()]
        held = rows_that_hold(
            lambda x: WAYS[name].multiply(x, part),
            row,
            numbers,
            threads,
            lambda x: WAYS[name].multiply(x, stored)[:, whole - features :],
        )
        return held == numbers

    question = f"{features} of {describe(whole, in_features, dtype)} alone, {name}"
    return bool(remembered(question, experiment))


def describe(out_features: int, in_features: int, dtype: torch.dtype) -> str:
    """Return shape and dtype in words, ``3072 x 1024 float32``."""
    return f"{out_features} x {in_features} {str(dtype).removeprefix('torch.')}"
