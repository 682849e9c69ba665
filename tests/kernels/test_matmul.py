import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mini_engine.kernels import matmul as op
from tests.kernels.cases import DTYPES, random, relative_error

SHAPES = [(1, 1, 1), (1, 33, 20), (5, 96, 128), (64, 64, 64), (67, 41, 70), (3, 130, 301)]  # M, N, K
FUNCTIONS = [op.invariant_matmul, op.invariant_matmul_reference]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_product_is_that_of_float64(shape, dtype, function):
    rows, columns, depth = shape
    x = random(rows, depth, dtype=dtype)
    weight = random(columns, depth, dtype=dtype, seed=1)
    got = function(x, weight)
    assert got.dtype == dtype
    assert got.shape == (rows, columns)
    assert is_within_bound(got, x, weight)
    if dtype == torch.float32:
        assert relative_error(got, x.double() @ weight.double().T) <= 2e-6


def is_within_bound(got: Tensor, x: Tensor, weight: Tensor) -> bool:
    """Whether ``got`` [M, N] is the product within what K roundings of float32 and one of the dtype can do at worst."""
    x, weight = x.double(), weight.double()
    exact = x @ weight.T
    bound = x.shape[1] * 2**-24 * (x.abs() @ weight.abs().T)
    if got.dtype != torch.float32:
        dtype = torch.finfo(got.dtype)
        bound = bound + dtype.eps / 2 * (exact.abs() + bound) + dtype.smallest_normal
    return bool(((got.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(dtype):
    x = random(70, 45, dtype=dtype)
    weight = random(27, 45, dtype=dtype, seed=1)
    whole = op.invariant_matmul(x, weight)
    for rows in (1, 2, 15, 16, 17, 33, 64, 65, 69):
        assert torch.equal(op.invariant_matmul(x[:rows], weight), whole[:rows]), rows
    for row in (0, 15, 64):
        assert torch.equal(op.invariant_matmul(x[row : row + 1], weight)[0], whole[row]), row


@pytest.mark.parametrize("shape", [(0, 33, 45), (5, 0, 45), (5, 33, 0)])
def test_empty_sums_and_empty_outputs(shape):
    rows, columns, depth = shape
    got = op.invariant_matmul(random(rows, depth), random(columns, depth))
    assert got.shape == (rows, columns)
    assert not bool(got.any())


PROGRAM = """
import torch
from triton.runtime.jit import JITFunction
from mini_engine.kernels.matmul import invariant_matmul
from tests.kernels.compile_for_gpu import compile_only

compile_only([])
compile_and_return, codes = JITFunction.run, []
JITFunction.run = lambda *args, **options: codes.append(compile_and_return(*args, **options).asm["ptx"])
for dtype in (torch.float32, torch.bfloat16):
    x, weight = torch.empty(80, 301, dtype=dtype), torch.empty(200, 301, dtype=dtype)
    for rows in (1, 2, 15, 16, 63, 64, 65, 80):
        invariant_matmul(x[:rows], weight)
        invariant_matmul(x[-rows:], weight)  # at an odd address
print(len(codes), len(set(codes)))
"""


@pytest.mark.slow
def test_every_number_of_rows_runs_the_same_machine_code():
    """Triton compiles anew for a number that is 1 or a multiple of 16, and for another alignment of an address."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=root)
    assert done.stdout.split() == ["32", "2"]  # launches; kernels, one for each dtype


@pytest.mark.compiled
@pytest.mark.parametrize(("columns", "depth"), [(4096, 1024), (1024, 3072), (6144, 1024)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_sizes_have_the_same_bits_in_every_batch(columns, depth, dtype):
    x = random(2048, depth, dtype=dtype)
    weight = random(columns, depth, dtype=dtype, seed=1)
    whole = op.invariant_matmul(x, weight)
    for rows in [*range(1, 130), 200, 512, 1111]:
        assert torch.equal(op.invariant_matmul(x[:rows], weight), whole[:rows]), rows
        assert torch.equal(op.invariant_matmul(x[-rows:], weight), whole[-rows:]), rows
    assert is_within_bound(whole, x, weight)
    # float32: the products are one sum, number after number
    limit = max(4e-6, depth * 2e-9) if dtype == torch.float32 else torch.finfo(dtype).eps
    assert relative_error(whole, x.double() @ weight.double().T) <= limit
