"""L1: causal attention of one sequence over itself, and the two kernels that plain attention is built from.

A *kernel* here is a function ``(q [Hq, Tq, D], k [Hkv, Tk, D], v [Hkv, Tk, D]) -> [Hq, Tq, D]``. The queries are the
last ``Tq`` of the ``Tk`` positions, so ``Tq == Tk`` is a whole prompt and ``Tq == 1`` a decode step. Both kernels give
the bits of transformers with the attention implementation of the same name.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

AttentionKernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal_mask(q_len: int, kv_len: int, device: torch.device | str = "cpu") -> Tensor:
    """Return True where query i may see key j -> [q_len, kv_len] bool.

    The mask is aligned bottom-right: the last query sees every key. (``is_causal=True`` of torch's SDPA aligns
    top-left, which is another mask whenever ``q_len != kv_len``.)
    """
    query_positions = torch.arange(kv_len - q_len, kv_len, device=device)  # [q_len]
    key_positions = torch.arange(kv_len, device=device)  # [kv_len]
    return key_positions <= query_positions[:, None]


def eager_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention step by step: scores, mask, softmax, weighted sum. Shapes as in the module's docstring.

    Scores are scaled after the product; the softmax is taken in float32 and cast back before it meets the values.
    """
    group = q.shape[0] // k.shape[0]  # query heads that share one key-value head
    k = k.repeat_interleave(group, dim=0)  # [Hq, Tk, D]: heads 0, 0, 0, 1, 1, 1 and not 0, 1, 0, 1
    v = v.repeat_interleave(group, dim=0)
    scores = torch.matmul(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5  # [Hq, Tq, Tk]
    hidden = ~causal_mask(q.shape[1], k.shape[1], q.device)
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v)  # [Hq, Tq, D]


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention with torch's fused kernel, called as transformers calls it. Shapes as in the docstring above.

    Three calls: a whole prompt uses the kernel's own causal mask, a single query needs no mask, and a chunk in the
    middle gets an explicit one because the kernel's mask would be aligned wrongly.
    """
    q_len, kv_len = q.shape[1], k.shape[1]
    mask = causal_mask(q_len, kv_len, q.device) if 1 < q_len < kv_len else None
    out = F.scaled_dot_product_attention(
        q[None],
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=q_len > 1 and mask is None,
        enable_gqa=q.shape[0] != k.shape[0],
    )
    return out[0]


class DenseAttention:
    """Attention of one whole sequence: every call computes all positions from scratch. Keeps nothing."""

    def __init__(self, kernel: AttentionKernel = eager_attention) -> None:
        """Use ``kernel`` for the arithmetic."""
        self.kernel = kernel

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend causally. ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D] -> [T, Hq, D]; ``layer`` is not needed."""
        out = self.kernel(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))  # [Hq, T, D]
        return out.transpose(0, 1)
