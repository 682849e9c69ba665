"""How far two computations of the same thing are apart: in bits, in size and in consequence.

Owns: the measures. Must not know: pictures, or how the two tensors were computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_engine.viz.trace import ForwardTrace


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


@dataclass(frozen=True)
class ErrorCurve:
    """The relative difference of two residual streams at every stage: rms(a - b) / rms(a) over all tokens."""

    name: str
    errors: list[float]


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


def error_curve(name: str, first: ForwardTrace, second: ForwardTrace) -> ErrorCurve:
    """Compare two residual streams stage by stage."""
    pairs = zip(first.residual, second.residual, strict=True)
    return ErrorCurve(name, [relative_error(a, b) for a, b in pairs])


def relative_error(first: Tensor, second: Tensor) -> float:
    """Return rms(first - second) / rms(first), in float64."""
    a, b = first.double(), second.double()
    return float((a - b).pow(2).mean().sqrt() / a.pow(2).mean().sqrt())


def root_mean_square(x: Tensor) -> Tensor:
    """Return the size of each row's entries, [T, H] -> [T]."""
    return x.float().pow(2).mean(dim=-1).sqrt()


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    return first.dtype == second.dtype and torch.equal(first, second)
