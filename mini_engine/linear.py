"""The projection seam: how rows are multiplied by a weight matrix, and the activation between two of them.

Owns: three ways to compute the same ``x @ W.T``: ``TorchProjections`` (off: the bits of transformers),
``PackedProjections`` (oneDNN, weights packed once) and ``InvariantProjections`` (bits that do not depend on the number
of rows). Must not know: layers, attention, requests.

Why an activation lives here: on a CPU, a row's bits can depend on how many other rows are computed with it. Only two
operations of the model outside attention have that fault, the matrix product and SiLU; one object cures both.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.config import EngineConfig

Linear = Callable[[Tensor], Tensor]  # [M, in_features] -> [M, out_features]

# How fast oneDNN reads a packed matrix from memory depends on the number of rows, and on the machine how: six rows took
# 10 to 25 % less time than one where memory was slow for a core (15 GB/s), one row 10 % less than six where it was fast
# (30 GB/s). Four rows are within 5 % of the best number in all modes of the machine that were met with AVX-512.
FEW_ROWS = 4


class Projections(Protocol):
    """What the model asks of a projection family."""

    def linear(self, weight: Tensor) -> Linear:
        """Take ``weight`` [out_features, in_features] and return the function x [M, in] -> x @ weight.T [M, out]."""

    def silu(self, x: Tensor) -> Tensor:
        """Return ``x * sigmoid(x)``, same shape and dtype."""


class TorchProjections:
    """``F.linear`` and ``F.silu``: what transformers calls, so the bits are the same."""

    def linear(self, weight: Tensor) -> Linear:
        """Return ``x -> F.linear(x, weight)``."""
        return lambda x: F.linear(x, weight)

    def silu(self, x: Tensor) -> Tensor:
        """Return ``F.silu(x)``."""
        return F.silu(x)


class OneDnnProjections(TorchProjections):
    """oneDNN products instead of the default BLAS, over weights reordered into the kernel's own layout if ``pack``.

    Reordering happens once, at load time; the packed copy replaces the plain one, so the caller should drop its
    reference to ``weight``. Packed and plain weights give the same bits. The operators are the ones that torch's own
    compiler emits for CPUs (``torch._inductor``); they are private, so ``onednn_fault`` tries them first, and a build
    without them falls back to ``F.linear`` with a warning.

    In float32 the library compiles code for every number of rows that it meets, in a millisecond or two, and keeps it:
    half a megabyte for a small matrix, six for a large one. A server's steps have any number of rows, so they are
    padded to a few usual ones. Few rows are padded in any dtype: see ``FEW_ROWS``.
    """

    def __init__(self, pack: bool, numbers: int = 8) -> None:
        """Reorder weights, or leave them as they are; ``numbers`` of rows to pad to for each power of two."""
        self.pack, self.numbers = pack, numbers

    def linear(self, weight: Tensor) -> Linear:
        """Return the oneDNN product with ``weight``; ``F.linear`` where this build cannot do it in the dtype."""
        fault = onednn_fault(weight.dtype)
        if fault is not None:  # the same text every time, so Python shows it once
            warnings.warn(f"oneDNN is not used for {weight.dtype}, F.linear is: {fault}", stacklevel=2)
            return super().linear(weight)
        stored = pack_weight(weight) if self.pack else weight.contiguous()
        multiply = partial(onednn_linear, weight=stored)
        usual = partial(usual_rows, numbers=self.numbers) if weight.dtype == torch.float32 else few_rows
        return padding_rows(multiply, usual)


class PackedProjections(OneDnnProjections):
    """The fastest product for each size: packed oneDNN, and ``F.linear`` for a small float32 matrix and few rows.

    A call of the operator costs 15 to 40 microseconds before it multiplies, many times what the default BLAS takes. So
    for a small matrix the number of multiplications decides. It stays unpacked, as ``F.linear`` needs it: oneDNN then
    reorders it in every call, which is little beside the rows that it is called for. There are fewer numbers of rows
    then, since the code for each of them takes more memory than such a matrix.
    """

    SMALL_WEIGHT = 1 << 17  # elements; a 512 x 512 matrix no longer gains from F.linear
    FEW_PRODUCTS = 1 << 23  # rows times elements

    def __init__(self) -> None:
        """Pack every weight."""
        super().__init__(pack=True)

    def linear(self, weight: Tensor) -> Linear:
        """Return the product with ``weight`` that chooses by the number of rows, or the packed one if it is large."""
        if weight.dtype != torch.float32 or weight.numel() > self.SMALL_WEIGHT:
            return super().linear(weight)
        most_rows = self.FEW_PRODUCTS // weight.numel()
        many = OneDnnProjections(pack=False, numbers=2).linear(weight)
        return lambda x: F.linear(x, weight) if x.shape[0] <= most_rows else many(x)


def padding_rows(multiply: Linear, wanted: Callable[[int], int]) -> Linear:
    """Return ``multiply`` for M rows padded with zeros to ``wanted(M)``, without what comes out of those."""

    def padded(x: Tensor) -> Tensor:
        rows = x.shape[0]
        missing = wanted(rows) - rows
        return multiply(F.pad(x, (0, 0, 0, missing)))[:rows] if missing else multiply(x)

    return padded


def few_rows(rows: int) -> int:
    """Return ``FEW_ROWS`` for two and more rows that are fewer. One row stays alone: its bits are its own."""
    return FEW_ROWS if 1 < rows < FEW_ROWS else rows


def usual_rows(rows: int, numbers: int) -> int:
    """Return the least usual number of rows: 6, multiples of 4, then ``numbers`` numbers for each power of two."""
    if FEW_ROWS < rows <= 6:  # oneDNN multiplies six rows at a time and reads the matrix again for the next six
        return 6
    step = max(FEW_ROWS, (1 << (rows - 1).bit_length()) // (2 * numbers))
    return -(-rows // step) * step


def pack_weight(weight: Tensor) -> Tensor:
    """Reorder ``weight`` [out, in] into oneDNN's blocked layout, tuned for a batch of 16 rows; opaque afterwards."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)  # type: ignore[no-any-return]


def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``x`` [M, in] by a plain or packed weight -> [M, out]; no bias, no fused activation."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # type: ignore[no-any-return]


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


@dataclass(frozen=True)
class InvariantProjections:
    """Another family with its rows padded, so that a row's bits do not depend on how many rows there are.

    BLAS libraries pick another kernel, and so another order of additions, for few rows. Measured on CPUs: oneDNN has
    one order for 1 row and one for all other counts, at any number of threads. MKL in float32 has one for 1 row, one
    for 2 and 3, one for multiples of 4, and for some shapes another per thread count. Padding to ``row_multiple`` (2
    for oneDNN, 4 for MKL) leaves a single order.
    """

    inner: Projections
    row_multiple: int

    def linear(self, weight: Tensor) -> Linear:
        """Return the inner product over rows padded to a multiple of ``row_multiple``."""
        return padding_rows(self.inner.linear(weight), lambda rows: rows + -rows % self.row_multiple)

    def silu(self, x: Tensor) -> Tensor:
        """Return SiLU as ``x / (1 + exp(-x))`` in float32.

        ``F.silu`` uses another ``exp`` in its vector loop than in the scalar tail after it, so a value's bits depend
        on where in the tensor it stands. ``torch.exp`` has no such seam.
        """
        wide = x.float()
        return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def make_projections(config: EngineConfig) -> Projections:
    """Choose the family that ``config.linear`` and ``config.batch_invariant`` ask for."""
    if not config.batch_invariant:
        return PackedProjections() if config.linear == "packed" else TorchProjections()
    fault = onednn_fault(getattr(torch, config.dtype))
    if fault is None:
        return InvariantProjections(OneDnnProjections(pack=config.linear == "packed"), row_multiple=2)
    if config.linear == "packed":
        warnings.warn(f"linear='packed' needs oneDNN; F.linear is used for {config.dtype}: {fault}", stacklevel=2)
    return InvariantProjections(TorchProjections(), row_multiple=4)
