"""L8: the rotary embedding of queries and keys, in place, in one launch.

The torch way writes a turned copy of the input before it multiplies. Here the program that turns a pair holds both of
its numbers, so each is read once and written once, where it was.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.launch import check_last_contiguous, check_shape


@triton.jit
def turn_heads(x, cos, sin, heads, half, head_stride, x_dtype: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Turn every pair (i, i + D/2) of the ``heads`` of one token: ``x`` is its first head, ``cos`` its first angle."""
    head = tl.arange(0, HEADS).to(tl.int64)[:, None]  # [HEADS, 1]
    pair = tl.arange(0, HALF)[None, :]  # [1, HALF]
    cosine = tl.load(cos + pair, mask=pair < half, other=0.0).to(tl.float32)  # one angle for all heads
    sine = tl.load(sin + pair, mask=pair < half, other=0.0).to(tl.float32)
    place = x + head * head_stride + pair  # [HEADS, HALF]
    mask = (head < heads) & (pair < half)
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (first * cosine - second * sine).to(x_dtype), mask=mask)
    tl.store(place + half, (second * cosine + first * sine).to(x_dtype), mask=mask)


@triton.jit
def rotary_kernel(
    q,
    k,
    cos,
    sin,
    q_heads,
    k_heads,
    half,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    cos_stride,
    sin_stride,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Turn all heads of one token. The strides without ``head`` lead from one token to the next."""
    token = tl.program_id(0).to(tl.int64)
    cos += token * cos_stride
    sin += token * sin_stride
    turn_heads(q + token * q_stride, cos, sin, q_heads, half, q_head_stride, q.dtype.element_ty, Q_HEADS, HALF)
    turn_heads(k + token * k_stride, cos, sin, k_heads, half, k_head_stride, k.dtype.element_ty, K_HEADS, HALF)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Compute ``model.apply_rotary`` of ``q`` [T, Hq, D] and ``k`` [T, Hkv, D] in place. Mutates both.

    ``cos`` and ``sin`` [T, D] are those of ``model.rotary_table``, whose halves are alike: only the first is read.
    Tokens and heads may lie any distance apart, as they do in the output of a projection that makes q, k and v at once.
    Computes in float32 and rounds once, where the torch way rounds each product and the sum.
    Raises ``ValueError`` for other shapes, an odd D, and numbers of a head that do not lie side by side.
    """
    check_shape("q", q, None, None, None)
    tokens, q_heads, head_dim = q.shape
    check_shape("k", k, tokens, None, head_dim)
    check_shape("cos", cos, tokens, head_dim)
    check_shape("sin", sin, tokens, head_dim)
    check_last_contiguous(q=q, k=k, cos=cos, sin=sin)
    if head_dim % 2:
        raise ValueError(f"the head dim is {head_dim}; a rotation turns pairs, so it must be even")
    if tokens:
        rotary_kernel[(tokens,)](
            q,
            k,
            cos,
            sin,
            q_heads,
            k.shape[1],
            head_dim // 2,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            cos.stride(0),
            sin.stride(0),
            Q_HEADS=triton.next_power_of_2(q_heads),
            K_HEADS=triton.next_power_of_2(k.shape[1]),
            HALF=triton.next_power_of_2(head_dim // 2),
        )


def apply_rotary_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Do what ``apply_rotary`` does, in torch. Mutates ``q`` and ``k``."""
    half = q.shape[-1] // 2
    cosine, sine = (table[:, None, :half].float() for table in (cos, sin))  # [T, 1, D/2]
    for x in (q, k):
        first, second = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1))
