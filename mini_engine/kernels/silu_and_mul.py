"""L8: the activation of the MLP, ``silu(gate) * up``, on the output of the projection that makes both at once.

Two operations in torch write the activated gate and read it again. One kernel reads gate and up and writes the product:
three numbers through memory in place of five.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.launch import check_last_contiguous, check_shape

BLOCK = 1024  # columns per program: 8 numbers for each of 128 threads, 16 bytes in 16 bits, the widest single load


@triton.jit
def silu_and_mul_kernel(gate_up, out, width, gate_up_stride, out_stride, BLOCK: tl.constexpr):
    """Compute ``BLOCK`` columns of one row of ``out`` [T, width] from those of ``gate_up`` [T, 2 * width]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    place = gate_up + row * gate_up_stride + column
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + width, mask=mask, other=0.0).to(tl.float32)
    # exp(-gate) becomes infinite below gate = -88; the quotient is then the zero that silu tends to.
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + column, product.to(out.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu of the first half of each row times the second half. ``gate_up`` [T, 2 F] -> [T, F], same dtype.

    Rows may lie any distance apart. Computes in float32 and rounds once, where torch rounds the activation too.
    Raises ``ValueError`` for an odd number of columns, another number of axes, and gaps within a row.
    """
    check_shape("gate_up", gate_up, None, None)
    check_last_contiguous(gate_up=gate_up)
    rows, columns = gate_up.shape
    if columns % 2:
        raise ValueError(f"gate_up has {columns} columns; gate and up are its halves, so the number must be even")
    out = torch.empty((rows, columns // 2), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (rows, triton.cdiv(columns // 2, BLOCK))
        silu_and_mul_kernel[grid](gate_up, out, columns // 2, gate_up.stride(0), out.stride(0), BLOCK=BLOCK)
    return out


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """Do what ``silu_and_mul`` does, in torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
