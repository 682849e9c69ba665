"""Parts of matrices for ranks: what each rank keeps, and how a layer becomes whole again.

Ranks are the processes of one model, numbered from 0. Here they take turns in one process: what they tell each other is
put together by ``torch.cat``. Where every part is by output rows, nothing of one rank is added to anything of another.

Shapes: T rows are multiplied by a matrix [N, K], N output features of K columns. ``size`` is the number of ranks.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# q [T, h, D], k and v [T, g, D], the heads of one rank -> [T, h, D]. Query head i sees key-value head i // (h // g).
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def share(total: int, rank: int, size: int) -> slice:
    """Return which of ``total`` things are ``rank``'s: as many for each, side by side, in the order of ranks.

    Raises ``ValueError`` if ``size`` ranks cannot have as many each.
    """
    if total % size:
        raise ValueError(f"{total} cannot be shared by {size} ranks; choose a number of ranks that divides it")
    own = total // size
    return slice(rank * own, rank * own + own)


def row_part(weight: Tensor, rank: int, size: int) -> Tensor:
    """Return the output rows of ``rank``, [N / size, K], copied. Raises ``ValueError`` if they cannot be shared."""
    return weight[share(weight.shape[0], rank, size)].clone()


def column_part(weight: Tensor, rank: int, size: int) -> Tensor:
    """Return the columns of ``rank``, [N, K / size], copied. Raises ``ValueError`` if they cannot be shared."""
    return weight[:, share(weight.shape[1], rank, size)].clone()


def gathered(x: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Multiply ``x`` [T, K] by a matrix of which each rank has its rows [N / size, K] -> [T, N].

    Every rank computes some of the output features, whole. They are put side by side.
    """
    return torch.cat([F.linear(x, part) for part in parts], dim=-1)


def summed(x: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Multiply ``x`` [T, K] by a matrix of which each rank has its columns [N, K / size] -> [T, N].

    Every rank computes a part of each sum, in the dtype of ``x``. These are added in the order of ranks.
    """
    columns = [share(x.shape[1], rank, len(parts)) for rank in range(len(parts))]
    first, *others = [F.linear(x[:, own], part) for own, part in zip(columns, parts, strict=True)]
    for other in others:
        first = first + other
    return first


def kv_share(kv_heads: int, rank: int, size: int) -> slice:
    """Return which key-value heads ``rank`` keeps. Where there are fewer than ranks, neighbours keep the same one.

    Raises ``ValueError`` unless one of ``kv_heads`` and ``size`` is a multiple of the other.
    """
    if kv_heads >= size:
        return share(kv_heads, rank, size)
    ranks = share(size, 0, kv_heads).stop  # so many keep the same head
    return slice(rank // ranks, rank // ranks + 1)


def keep_qkv(stack: Tensor, rank: int, size: int, heads: int, kv_heads: int) -> Tensor:
    """Return what ``rank`` keeps of the stacked [q; k; v], [(heads + 2 kv_heads) * D, K] -> [(h + 2 g) * D, K].

    These are the rows of its own query heads, and those of the key-value heads that they see, copied.
    Raises ``ValueError`` if heads cannot be shared.
    """
    width = len(stack) // (heads + 2 * kv_heads)
    q, k, v = stack.unflatten(0, (-1, width)).split([heads, kv_heads, kv_heads])
    queries, own = share(heads, rank, size), kv_share(kv_heads, rank, size)
    return torch.cat([q[queries], k[own], v[own]]).flatten(0, 1)


def keep_gate_up(stack: Tensor, rank: int, size: int) -> Tensor:
    """Return what ``rank`` keeps of the stacked [gate; up], [2 F, K] -> [2 F / size, K]: its rows of each, copied.

    Raises ``ValueError`` if features cannot be shared.
    """
    return torch.cat([row_part(half, rank, size) for half in stack.chunk(2)])


def attention_of_ranks(
    x: Tensor, qkv: Tensor, o: Tensor, size: int, heads: int, kv_heads: int, attend: Attend
) -> Tensor:
    """Compute what attention adds to a layer, rank by rank: ``x`` [T, K] -> [T, N].

    ``qkv``: the stacked [q; k; v], [(heads + 2 kv_heads) * D, K]. ``o``: [N, heads * D].
    """
    width = len(qkv) // (heads + 2 * kv_heads)
    outputs = []
    for rank in range(size):
        own = F.linear(x, keep_qkv(qkv, rank, size, heads, kv_heads)).unflatten(-1, (-1, width))
        h = heads // size
        g = (own.shape[1] - h) // 2
        outputs.append(attend(*own.split([h, g, g], dim=1)).flatten(1))
    return gathered(torch.cat(outputs, dim=-1), [row_part(o, rank, size) for rank in range(size)])


def mlp_of_ranks(x: Tensor, gate_up: Tensor, down: Tensor, size: int) -> Tensor:
    """Compute what the MLP adds to a layer, rank by rank: ``x`` [T, K] -> [T, N].

    ``gate_up``: the stacked [gate; up], [2 F, K]. ``down``: [N, F].
    """
    inner = []
    for rank in range(size):
        gate, up = F.linear(x, keep_gate_up(gate_up, rank, size)).chunk(2, dim=-1)
        inner.append(F.silu(gate) * up)
    return gathered(torch.cat(inner, dim=-1), [row_part(down, rank, size) for rank in range(size)])
