"""Experiments: for which numbers of rows a product or an attention kernel gives one row the same bits everywhere.

A library adds the terms of a sum in an order that it chooses by the shape of its input and by the number of threads,
and another order gives other bits. The experiment puts one row at every place of every number of rows, on every number
of threads, and keeps the numbers for which the row comes out the same. Only these numbers are used afterwards.

The data makes the order visible. Every term has its opposite somewhere in the sum, so the exact result is 0 and what is
computed is rounding alone. With ordinary data the last step, the rounding to bfloat16, hides most differences.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

THREADS = (1, 2, 4, 8)  # and as many as are in use
REFERENCE_ROWS = 16
DRAWN = 127  # vectors; drawing all would take longer than multiplying. A prime, so that no block of them repeats

Rows = Callable[[Tensor], Tensor]  # [M, K] -> [M, ...]


def row_numbers(most: int) -> list[int]:
    """Return the numbers of rows that are tried up to ``most``: the powers of two, three times them, and ``most``."""
    return sorted({n << i for n in (1, 3) for i in range(most.bit_length()) if n << i < most} | {most})


def opposite_terms(size: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a row [size] and vectors [count, size] whose products with it are 0 where nothing is rounded.

    Magnitudes spread over many powers of two, so that every order of additions rounds in its own way. The vectors
    repeat after ``DRAWN``.
    """
    generator = torch.Generator().manual_seed(size)
    half = size // 2
    order = torch.randperm(2 * half, generator=generator)

    def draw(*shape: int) -> Tensor:
        powers = torch.randint(-4, 5, shape, generator=generator)
        return torch.randn(shape, generator=generator).ldexp(powers).to(dtype)

    row = draw(half)
    vectors = draw(DRAWN, half)
    row = torch.cat((row, row))[order]
    vectors = torch.cat((vectors, -vectors), dim=1)[:, order]
    row, vectors = (F.pad(part, (0, size % 2)) for part in (row, vectors))
    return row, vectors[torch.arange(count) % DRAWN]


@torch.inference_mode()
def rows_that_hold(
    compute: Rows, row: Tensor, numbers: Sequence[int], threads: Sequence[int] = (), reference: Rows | None = None
) -> list[int]:
    """Return those of ``numbers`` of rows for which ``row`` [K] has the same bits at every place, on all ``threads``.

    ``compute`` maps [M, K] to [M, ..., out]; everything but the last dimension must be equal. What the bits are
    compared with is the first place of ``REFERENCE_ROWS`` rows on one thread, of ``reference`` if that is given.
    Without ``threads`` these are ``THREADS`` and as many as are in use.
    """
    with thread_count(1):
        expected = (reference or compute)(row.expand(REFERENCE_ROWS, -1).contiguous()).flatten(0, -2)[0].clone()
    held = list(numbers)
    for count in set(threads) or {*THREADS, torch.get_num_threads()}:
        with thread_count(count):
            held = [n for n in held if bool((compute(row.expand(n, -1).contiguous()) == expected).all())]
    return held


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    """Have torch use ``count`` threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
