"""L8: RMSNorm, alone and fused with the addition of the residual before it.

Both read every number once and write it once. The fused one saves a round trip through memory: added apart, the sum is
written and then read again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine import model
from mini_engine.kernels.launch import block_shape, check_last_contiguous, check_shape


@triton.jit(do_not_specialize=["rows"])  # otherwise another binary, and perhaps other bits, for 1 row and for 16
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    rows,
    width,
    eps,
    x_stride,
    residual_stride,
    out_stride,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Norm ``ROWS`` rows of ``x``, after adding them to ``residual`` if ``ADD``."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]  # [ROWS, 1]
    column = tl.arange(0, COLUMNS)[None, :]  # [1, COLUMNS]
    mask = (row < rows) & (column < width)
    wide = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        place = residual + row * residual_stride + column
        # The sum is rounded to the residual's dtype before it is normed: that rounded sum is what goes on.
        total = (wide + tl.load(place, mask=mask, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(place, total, mask=mask)
        wide = total.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=1, keep_dims=True) / width  # of the row, not of the padded tile
    normed = (wide * tl.math.rsqrt(mean_square + eps)).to(out.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, (scale * normed).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute ``model.rms_norm``. ``x`` [..., H], rows any distance apart, ``weight`` [H] -> [..., H]."""
    rows = x.reshape(-1, x.shape[-1])  # a copy only if the leading axes cannot be joined
    return launch(rows, None, weight, eps).view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add ``x`` [T, H] to ``residual`` [T, H] in place, and return the norm of the sum [T, H]. Mutates ``residual``."""
    check_shape("residual", residual, *x.shape)
    return launch(x, residual, weight, eps)


def launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Run the kernel over the rows of ``x`` [T, H]. Raises ``ValueError`` for shapes or strides it cannot read."""
    check_shape("x", x, None, None)
    check_shape("weight", weight, x.shape[1])
    check_last_contiguous(x=x, weight=weight, **({} if residual is None else {"residual": residual}))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block_rows, columns = block_shape(x.shape[1])
    added = x if residual is None else residual
    grid = (triton.cdiv(len(x), block_rows),)
    if len(x):
        rms_norm_kernel[grid](
            x,
            added,
            weight,
            out,
            len(x),
            x.shape[1],
            eps,
            x.stride(0),
            added.stride(0),
            out.stride(0),
            ADD=residual is not None,
            ROWS=block_rows,
            COLUMNS=columns,
        )
    return out


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Do what ``rms_norm`` does, in torch."""
    return model.rms_norm(x, weight, eps)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Do what ``add_rms_norm`` does, in torch. Mutates ``residual``."""
    return rms_norm_reference(residual.add_(x), weight, eps)
