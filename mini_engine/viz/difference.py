"""How far two tensors of logits are apart: in bits, in size, and in the greedy choices that they change."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """Two [T, V] logit tensors compared row by row.

    ``largest``: the largest absolute difference. ``rows_differing`` of ``rows`` rows differ in at least one bit.
    ``choices_changed`` rows have another argmax, so that greedy decoding would take another token.
    """

    name: str
    largest: float
    rows_differing: int
    rows: int
    choices_changed: int


def compare_logits(name: str, first: Tensor, second: Tensor) -> Difference:
    """Compare two [T, V] tensors, of any float dtypes. Raises ``ValueError`` for different shapes."""
    if first.shape != second.shape:
        raise ValueError(f"{name}: logits of shape {tuple(first.shape)} and {tuple(second.shape)} cannot be compared")
    a, b = first.float(), second.float()
    return Difference(
        name=name,
        largest=float((a - b).abs().max()),
        rows_differing=int((a != b).any(dim=-1).sum()),
        rows=len(a),
        choices_changed=int((a.argmax(dim=-1) != b.argmax(dim=-1)).sum()),
    )


def smallest_first(differences: Sequence[Difference]) -> list[Difference]:
    """Sort by the largest logit difference."""
    return sorted(differences, key=lambda difference: difference.largest)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    return first.dtype == second.dtype and torch.equal(first, second)
