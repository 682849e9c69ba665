"""The arithmetic of kernels, emulated in torch: sums in blocks and dtypes, and the online softmax.

torch rounds the result of every bfloat16 addition and product to nearest, ties to even, as a register of that type
does. Everything but the running sums is float64, so that only the sums cause errors.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCKS = (1, 4, 16, 64, 256, 1024, 4096)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROWS, LENGTH, HEAD_DIM = 16, 4096, 32


def tree_sum(x: Tensor) -> Tensor:
    """Add up the last axis as a block of threads does: one half to the other, rounding each time. [..., n] -> [...].

    ``n`` must be a power of 2.
    """
    while x.shape[-1] > 1:
        first, second = x.chunk(2, dim=-1)
        x = first + second
    return x[..., 0]


def blocked_sum(x: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Add up the last axis in ``dtype``: ``block`` numbers at a time as a tree, the blocks one after the other.

    ``x`` [..., n] float64, ``block`` a power of 2 that divides n -> [...] float64.
    """
    total = torch.zeros(x.shape[:-1], dtype=dtype)
    for part in x.to(dtype).split(block, dim=-1):
        total = total + tree_sum(part)
    return total.double()


@dataclass(frozen=True)
class TileStep:
    """One tile of an online softmax over rows: [R] each, and the tile's weights [R, tile], relative to ``top``.

    ``top``: the largest score so far; ``keep``: the factor of the sums before; ``added``: the sum of the tile's
    weights; ``total``: the sum of all weights so far.
    """

    top: Tensor
    keep: Tensor
    added: Tensor
    total: Tensor
    weight: Tensor


def online_softmax(scores: Tensor, tile: int, dtype: torch.dtype = torch.float32) -> Iterator[TileStep]:
    """Walk over ``scores`` [R, n] float64, ``tile`` at a time, with the running sum in ``dtype``.

    Source: Milakov and Gimelshein, 2018.
    """
    top = torch.full((len(scores),), -torch.inf, dtype=torch.float64)
    total = torch.zeros(len(scores), dtype=dtype)
    for part in scores.split(tile, dim=-1):
        new_top = torch.maximum(top, part.amax(-1))
        keep = (top - new_top).exp()  # 0 before the first tile
        weight = (part - new_top[:, None]).exp()
        added = tree_sum(weight.to(dtype))
        total = total * keep.to(dtype) + added
        yield TileStep(new_top, keep, added, total, weight)
        top = new_top


def sum_error(block: int, dtype: torch.dtype, seed: int) -> float:
    """Return the error of sums of numbers above 0."""
    x = draw(seed, ROWS, LENGTH).abs()
    return relative_error(blocked_sum(x, block, dtype)[:, None], x.sum(-1, keepdim=True))


def norm_error(block: int, dtype: torch.dtype, seed: int) -> float:
    """Return the error of RMSNorm."""
    x = draw(seed, ROWS, LENGTH)
    own = blocked_sum(x * x, block, dtype)
    exact = (x * x).sum(-1)
    return relative_error(x * (own / LENGTH).rsqrt()[:, None], x * (exact / LENGTH).rsqrt()[:, None])


def softmax_error(block: int, dtype: torch.dtype, seed: int) -> float:
    """Return the error of a softmax."""
    scores = draw(seed, ROWS, LENGTH)
    *_, last = online_softmax(scores, block, dtype)
    return relative_error((scores - last.top[:, None]).exp() / last.total.double()[:, None], scores.softmax(-1))


def attention_error(block: int, dtype: torch.dtype, seed: int) -> float:
    """Return the error of attention, whose weighted values are summed in ``dtype`` too."""
    scores = draw(seed, ROWS, LENGTH)
    values = draw(seed + 1, LENGTH, HEAD_DIM)
    values = values + 1  # so that the sums do not cancel
    weighted = torch.zeros(ROWS, HEAD_DIM, dtype=dtype)
    for step, part in zip(online_softmax(scores, block, dtype), values.split(block), strict=True):
        products = step.weight[:, None, :] * part.T  # [R, D, block]
        weighted = weighted * step.keep.to(dtype)[:, None] + tree_sum(products.to(dtype))
    return relative_error(weighted.double() / step.total.double()[:, None], scores.softmax(-1) @ values)


def draw(seed: int, *shape: int) -> Tensor:
    """Draw normal numbers that bfloat16 holds exactly, as float64, so that inputs have no error."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().double()


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Return the largest error of a row over its largest number, the mean of all rows. [R, n] each."""
    return float(((got - exact).abs().amax(-1) / exact.abs().amax(-1)).mean())


OPERATIONS: dict[str, Callable[[int, torch.dtype, int], float]] = {
    f"Sum of {LENGTH} positive numbers": sum_error,
    f"RMSNorm of a row of {LENGTH}": norm_error,
    f"Softmax of a row of {LENGTH}": softmax_error,
    f"Attention to {LENGTH} keys": attention_error,
}


def accumulation_errors(seed: int = 0) -> dict[str, dict[str, list[float]]]:
    """Return operation -> dtype of the running sums -> its error for each of ``BLOCKS``."""
    return {
        title: {name: [error(block, dtype, seed) for block in BLOCKS] for name, dtype in DTYPES.items()}
        for title, error in OPERATIONS.items()
    }
