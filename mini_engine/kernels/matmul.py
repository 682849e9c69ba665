"""L8: a matrix product in which a row's bits do not depend on the other rows.

A floating-point sum depends on its order. A BLAS chooses tiles, and how many programs share one sum (split-K), from the
number of rows: another batch is another order and other bits. Here one program computes each tile of the output, walks
K from its beginning, and has the same tile shape for 1 row and for 10,000: every number of the output is the same sum
in the same order. Source: Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference" (2025).

The price: one row is computed as a tile of 64, 63 of them zeros, and a prefill of thousands of rows gets the tile that
suits few. In 16 bits, decode bears it. Each weight read from memory is then used in 2 * 64 operations; at 4.8 TB/s that
is 307 of the 989 TFLOP/s of an H200, so memory is still what it waits for. Prefill would like tiles of 128 x 256.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.launch import check_last_contiguous, check_shape

ROWS = 64  # of a tile: the fewest that a Hopper tensor core instruction multiplies
GROUP = 8  # row blocks that visit the columns together


@triton.jit(do_not_specialize=["rows"])  # otherwise Triton compiles another kernel for rows == 1 and for rows % 16 == 0
def matmul_kernel(
    x,
    weight,
    out,
    rows,
    columns,
    depth,
    weight_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute one [ROWS, COLUMNS] tile of ``out``; ``x`` [rows, depth] and ``out`` [rows, columns] have no gaps.

    The grid has one dimension, a program for each tile. Any order of tiles is right; in groups of ``GROUP`` blocks of
    rows, programs that run together find more in the L2 cache.
    """
    row_blocks, column_blocks = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    # Programs start in order. In this order those that run together share GROUP blocks of x and few of the weight,
    # and find them in the L2 cache; row by row, each would want another part of the weight.
    row_block, column_block = tl.swizzle2d(
        program // column_blocks, program % column_blocks, row_blocks, column_blocks, GROUP
    )
    row = (row_block * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]  # [ROWS, 1]
    column = (column_block * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]  # [1, COLUMNS]
    inner = tl.arange(0, DEPTH)
    x_place = x + row * depth + inner[None, :]  # [ROWS, DEPTH]
    weight_place = weight + column * weight_stride + inner[:, None]  # [DEPTH, COLUMNS]: the transpose, by its addresses
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        left = depth - start  # what lies beyond is zero and adds nothing
        x_tile = tl.load(x_place, mask=(row < rows) & (inner[None, :] < left), other=0.0)
        weight_tile = tl.load(weight_place, mask=(column < columns) & (inner[:, None] < left), other=0.0)
        total = tl.dot(x_tile, weight_tile, total, input_precision="ieee")  # no tf32, which has 10 bits of mantissa
        x_place += DEPTH
        weight_place += DEPTH
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=(row < rows) & (column < columns))


def invariant_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T``, a row's bits the same in every batch. ``x`` [M, K], ``weight`` [N, K] -> [M, N].

    Sums in float32 and rounds once to the dtype of ``x``. The error of a sum is at most K * 2**-24 of the sum of its
    products' magnitudes. Rows of ``weight`` may lie any distance apart; ``x`` is copied if it has gaps.
    Raises ``ValueError`` for other shapes, two dtypes, and gaps within a row of the weight.
    """
    check_shape("x", x, None, None)
    rows, depth = x.shape
    check_shape("weight", weight, None, depth)
    check_last_contiguous(weight=weight)
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype} and weight {weight.dtype}; both must have one dtype, cast one of them")
    # Triton compiles another kernel for an address that is not a multiple of 16. New memory always begins at one.
    x = x.contiguous() if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
    columns = len(weight)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if out.numel():
        block_columns, block_depth, stages = tile_shape(columns, x.dtype)
        matmul_kernel[(triton.cdiv(rows, ROWS) * triton.cdiv(columns, block_columns),)](
            x,
            weight,
            out,
            rows,
            columns,
            depth,
            weight.stride(0),
            ROWS=ROWS,
            COLUMNS=block_columns,
            DEPTH=block_depth,
            GROUP=GROUP,
            num_warps=4,
            num_stages=stages,
        )
    return out


def tile_shape(columns: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the tile's columns, its depth, and how many tiles are on their way from memory at once.

    From the weight alone, never from the number of rows. A wide tile uses each number of ``x`` more often; a narrow one
    gives a small matrix enough programs to keep the processors of a GPU (132 on an H200) busy when the rows are few.
    In 16 bits all three hold 96 KB in shared memory, so that two programs fit at once; 227 KB is the most.
    Where the lines are drawn is free.
    """
    if dtype == torch.float32:
        return 64, 16, 3
    if columns >= 64 * 128:
        return 128, 64, 4
    return (64, 64, 6) if columns >= 64 * 64 else (32, 64, 8)


def invariant_matmul_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply as ``invariant_matmul`` does, in torch, one row at a time: the same operation whatever the batch."""
    rows = [(row[None].float() @ weight.float().T).to(x.dtype) for row in x]
    return torch.cat(rows) if rows else x.new_empty((0, len(weight)))
