"""Products of rows with a weight as it lies in memory, as loops, and a weight in fewer bytes written out for others.

A weight [N, K] lies in tiles of 64 output features, whose numbers of one column are side by side. So the CPU adds up
several features at once, each in the order of its columns, and no feature's bits depend on N, on the other rows or on
the threads. K is filled up with zeros, and N too.

Four kinds of tiles, and ``steps`` of as many dimensions as tell them apart:

- float32 [N / 64, K, 64], or two bfloat16 numbers a word [N / 64, K / 2, 64], the first in the lower half;
  ``steps`` [0, 0];
- ids of 8 bits [N / 64, K, 64]; ``steps`` [N]: the scales;
- eight ids of 4 bits a word [N / 64, K / 8, 64], the first in the lowest bits; ``steps`` [N / 64, K / 32, 2, 64]: the
  scales and zero points of groups, ``Halves``.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types, uint32
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from mini_engine.fast.compiled.loops import Float, Floats, Halves, as_written, compiled, wide

Words = NDArray[np.uint32] | Floats
Tiles = Words | NDArray[np.int8]
Steps = Halves

TILE = 64
HALF_STEP = np.uint32(0x8000)  # half of the last bit that bfloat16 keeps
PLACES = tuple(np.float32(16.0 ** -(place % 7)) for place in range(8))  # the last id of a word is shifted down
AHEAD = 4096  # bytes; what is asked for so early has come when it is needed, and is still in the nearest cache

by_threads = compiled("contract", parallel=True)


@intrinsic  # type: ignore[untyped-decorator]
def fetch(context: Any, array: Any, offset: Any) -> Any:
    """Ask for the 64 bytes at ``offset`` bytes of ``array``, which may be beyond its end, without waiting for them."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        memory = context.make_array(signature.args[0])(context, builder, values[0]).data
        place = builder.gep(builder.bitcast(memory, ir.IntType(8).as_pointer()), [values[1]])
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(function, [place, flag(0), flag(3), flag(1)])  # to read; into every cache; data
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def with_terms(total: Float, x: Floats, tile: Tiles, i: int, n: int) -> Float:
    """Return ``total`` with the products of the numbers in ``tile[i, n]`` and of ``x`` added."""


@as_written
def with_two_terms(total: Float, x: Floats, word: Any, i: int) -> Float:
    """Return ``total`` with the products of the two bfloat16 numbers in ``word`` and of ``x`` [K] added."""
    total += wide(np.uint16(word)) * x[2 * i]
    return total + np.uint32(word & np.uint32(0xFFFF0000)).view(np.float32) * x[2 * i + 1]


@as_written
def put(first: Float, second: Float, words: Words, i: int, n: int) -> None:
    """Write number n of columns 2 i and 2 i + 1 into ``words`` as ``unpack_tile`` takes them. Neither is a NaN.

    In bfloat16 it is the nearest number, on ties the one farther from 0.
    """
    if words.ndim == 3:
        words[i, 0, n] = first
        words[i, 1, n] = second
    else:
        low, high = np.float32(first).view(np.uint32), np.float32(second).view(np.uint32)
        words[i, n] = np.uint32(low + HALF_STEP) >> np.uint32(16) | np.uint32(high + HALF_STEP) & np.uint32(0xFFFF0000)


overload(with_terms)(
    lambda total, x, tile, i, n: (
        (lambda total, x, tile, i, n: with_two_terms(total, x, tile[i, n], i))
        if tile.dtype == uint32
        else (lambda total, x, tile, i, n: total + x[i] * np.float32(tile[i, n]))
    )
)


@as_written
def add_up(x: Floats, tile: Tiles, totals: Floats) -> None:
    """Write the products of a row ``x`` [K] with a tile into ``totals`` [64]."""
    totals[:] = 0
    line = TILE * tile.itemsize
    for i in range(0, tile.shape[0], 4):
        for offset in range(0, 4 * line, 64):
            fetch(tile, i * line + AHEAD + offset)
        for n in range(TILE):
            total = totals[n]
            for j in range(4):
                total = with_terms(total, x, tile, i + j, n)
            totals[n] = total


@as_written
def numbered(word: Any, place: int) -> Float:
    """Return the id at ``place`` of a word times 16**place. The last one is shifted down; its first bit is no sign."""
    bits = word >> np.uint32(28) if place == 7 else word & np.uint32(15 << 4 * place)
    return np.float32(np.int32(bits))


@as_written
def line_of(steps: Steps, group: int, n: int) -> tuple[Float, Float]:
    """Return the scale of a group, and what its id 0 stands for. ``steps`` [K / 32, 2, 64]."""
    scale = wide(steps[group, 0, n])
    return scale, wide(steps[group, 1, n]) - np.float32(8) * scale


@as_written
def of_word(x: Floats, k: int, word: Any) -> Float:
    """Return the sum of the products of a word's eight ids and of x[k], x[k + 1] and so on."""
    total = np.float32(0)
    for place in range(8):
        total += x[k + place] * numbered(word, place)
    return total


@as_written
def add_up_groups(x: Floats, sums: Floats, tile: Tiles, steps: Steps, totals: Floats) -> None:
    """Write the products of a row with a tile of 4 bits into ``totals`` [64].

    ``x`` [K] and ``sums`` [K / 32] as ``by_place`` makes them; ``steps`` [K / 32, 2, 64]. An id is left where it stands
    in its word: there it counts 16 times as much as one place further down. The four words of a group have sums of
    their own, which do not wait for one another.
    """
    totals[:] = 0
    for group in range(steps.shape[0]):
        for offset in range(0, 16 * TILE, 64):
            fetch(tile, 16 * TILE * group + AHEAD + offset)
        i = 4 * group
        for n in range(TILE):
            first, second = of_word(x, 8 * i, tile[i, n]), of_word(x, 8 * i + 8, tile[i + 1, n])
            third, fourth = of_word(x, 8 * i + 16, tile[i + 2, n]), of_word(x, 8 * i + 24, tile[i + 3, n])
            scale, least = line_of(steps, group, n)
            totals[n] = totals[n] + scale * ((first + second) + (third + fourth)) + least * sums[group]


@as_written
def add_up_four(x: Floats, tile: Tiles, totals: Floats) -> None:
    """Compute ``add_up``, not over words, for four rows. ``x`` [4 K] as of ``side_by_side``, ``totals`` [4 * 64]."""
    totals[:] = 0
    for i in range(0, tile.shape[0], 4):
        for n in range(TILE):
            a, b, c, d = totals[n], totals[TILE + n], totals[2 * TILE + n], totals[3 * TILE + n]
            for k in range(i, i + 4):
                number = np.float32(tile[k, n])
                a += x[4 * k] * number
                b += x[4 * k + 1] * number
                c += x[4 * k + 2] * number
                d += x[4 * k + 3] * number
            totals[n], totals[TILE + n], totals[2 * TILE + n], totals[3 * TILE + n] = a, b, c, d


@as_written
def add_up_groups_four(x: Floats, sums: Floats, tile: Tiles, steps: Steps, totals: Floats) -> None:
    """Compute ``add_up_groups`` for four rows at once. ``x`` [4 K] and ``sums`` [4 K / 32], ``totals`` [4 * 64]."""
    totals[:] = 0
    parts = np.empty((4, totals.shape[0]), np.float32)  # of the words of a group
    for group in range(steps.shape[0]):
        for i in range(4 * group, 4 * group + 4):
            part = parts[i % 4]
            for n in range(TILE):
                a = b = c = d = np.float32(0)
                for place in range(8):
                    number = numbered(tile[i, n], place)
                    k = 8 * i + place
                    a += x[4 * k] * number
                    b += x[4 * k + 1] * number
                    c += x[4 * k + 2] * number
                    d += x[4 * k + 3] * number
                part[n], part[TILE + n], part[2 * TILE + n], part[3 * TILE + n] = a, b, c, d
        for row in range(4):
            for n in range(TILE):
                scale, least = line_of(steps, group, n)
                m = row * TILE + n
                whole = (parts[0, m] + parts[1, m]) + (parts[2, m] + parts[3, m])
                totals[m] = totals[m] + scale * whole + least * sums[4 * group + row]


@as_written
def side_by_side(rows: Floats, count: int) -> Floats:
    """Return ``count`` blocks of four ``rows`` [M, C], whose numbers of a column are neighbours, [count, 4 C].

    Where the last block has three rows, it has the last of them twice.
    """
    out = np.empty((count, 4 * rows.shape[1]), np.float32)
    for block in range(out.shape[0]):
        for i in range(out.shape[1]):
            out[block, i] = rows[min(4 * block + i % 4, rows.shape[0] - 1), i // 4]
    return out


@as_written
def by_place(x: Floats, terms: Floats, sums: Floats) -> None:
    """Write the numbers of a row ``x`` [K], divided by what their place in a word counts, and the sums of its groups.

    ``terms`` [K], ``sums`` [K / 32]. A division by a power of two is exact.
    """
    for word in range(0, x.shape[0], 8):
        for place in range(8):
            terms[word + place] = x[word + place] * PLACES[place]
    for group in range(sums.shape[0]):
        a = b = c = d = np.float32(0)  # four sums, which do not wait for one another
        for i in range(32 * group, 32 * group + 32, 4):
            a += x[i]
            b += x[i + 1]
            c += x[i + 2]
            d += x[i + 3]
        sums[group] = (a + b) + (c + d)


@as_written
def multiply(x: Floats, tiles: Tiles, steps: Steps, out: Floats, threads: int, share: int) -> None:
    """Write the products of rows ``x`` [M, K] with a weight into ``out`` [M, N]: those of one share of its tiles.

    K and N are filled up as those of ``tiles`` and ``steps``.
    """
    terms = np.empty_like(x) if steps.ndim == 4 else x
    sums = np.empty((x.shape[0], steps.shape[1] if steps.ndim == 4 else 0), np.float32)
    for row in range(x.shape[0] if steps.ndim == 4 else 0):
        by_place(x[row], terms[row], sums[row])
    has_words_of_two = 2 * tiles.shape[1] == x.shape[1]
    blocks = 0 if has_words_of_two else (x.shape[0] + 1) // 4  # three rows take less time as four than one by one
    fours, sums_of_fours = side_by_side(terms, blocks), side_by_side(sums, blocks)
    totals = np.empty(4 * TILE, np.float32)
    for tile in range(tiles.shape[0] * share // threads, tiles.shape[0] * (share + 1) // threads):
        own = slice(tile * TILE, (tile + 1) * TILE)
        for block in range(blocks):
            if steps.ndim == 4:
                add_up_groups_four(fours[block], sums_of_fours[block], tiles[tile], steps[tile], totals)
            else:
                add_up_four(fours[block], tiles[tile], totals)
            for row in range(4 * block, min(4 * block + 4, x.shape[0])):
                out[row, own] = totals[row % 4 * TILE : (row % 4 + 1) * TILE]
        for row in range(4 * blocks, x.shape[0]):
            if steps.ndim == 4:
                add_up_groups(terms[row], sums[row], tiles[tile], steps[tile], out[row, own])
            else:
                add_up(x[row], tiles[tile], out[row, own])
        for row in range(x.shape[0] if steps.ndim == 1 else 0):
            out[row, own] *= steps[own]


@by_threads
def multiply_shared(x: Floats, tiles: Tiles, steps: Steps, out: Floats, threads: int) -> None:
    """Compute ``multiply`` on several threads."""
    for share in prange(threads):
        multiply(x, tiles, steps, out, threads, share)


@as_written
def unpack_tile(tiles: Tiles, steps: Steps, words: Words) -> None:
    """Write what a tile of ids stands for into ``words``.

    ``tiles`` [K, 64] and ``steps`` [64], or [K / 8, 64] and [K / 32, 2, 64]. ``words`` is a tile of two bfloat16
    numbers a word [K / 2, 64], or of float32 numbers [K / 2, 2, 64].
    """
    if steps.ndim == 1:
        for pair in range(tiles.shape[0] // 2):
            for n in range(TILE):
                first, second = np.float32(tiles[2 * pair, n]), np.float32(tiles[2 * pair + 1, n])
                put(first * steps[n], second * steps[n], words, pair, n)
    else:
        for pair in range(4 * tiles.shape[0]):
            mask, factor = np.uint32(15 << 8 * (pair % 4)), PLACES[2 * (pair % 4)]
            for n in range(TILE):
                first = np.float32(np.int32(tiles[pair // 4, n] & mask)) * factor
                second = np.float32(np.int32(tiles[pair // 4, n] >> np.uint32(4) & mask)) * factor
                scale, least = line_of(steps, pair // 16, n)
                put(first * scale + least, second * scale + least, words, pair, n)


@as_written
def unpack(tiles: Tiles, steps: Steps, words: Words, start: int, threads: int, share: int) -> None:
    """Compute ``unpack_tile`` for one share of the tiles from ``start`` on, as many as ``words`` has or there are."""
    count = min(words.shape[0], tiles.shape[0] - start)
    for n in range(count * share // threads, count * (share + 1) // threads):
        tile = start + n
        own = steps[tile * TILE : (tile + 1) * TILE] if steps.ndim == 1 else steps[tile]
        unpack_tile(tiles[tile], own, words[n])


@by_threads
def unpack_shared(tiles: Tiles, steps: Steps, words: Words, start: int, threads: int) -> None:
    """Compute ``unpack`` on several threads."""
    for share in prange(threads):
        unpack(tiles, steps, words, start, threads, share)
