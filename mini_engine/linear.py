"""The projection seam: how rows are multiplied by a weight matrix, and the activation between two of them.

``TorchProjections`` is off: the bits of transformers. ``fast/products.py`` has the faster products and those whose bits
do not depend on the number of rows.

Why an activation lives here: on a CPU, a row's bits can depend on how many other rows are computed with it. Only two
operations of the model outside attention have that fault, the matrix product and SiLU; one object cures both.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]  # [M, in_features] -> [M, out_features]


class Projections(Protocol):
    """What the model asks of its projections."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return the function x [M, in] -> x @ weight.T [M, out] of ``weight`` [out, in]; ``bias`` [out] is added."""

    def silu(self, x: Tensor) -> Tensor:
        """Return ``x * sigmoid(x)``, same shape and dtype."""


class TorchProjections:
    """``F.linear`` and ``F.silu``: what transformers calls, so the bits are the same."""

    silu: Callable[[Tensor], Tensor] = staticmethod(F.silu)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return ``x -> F.linear(x, weight, bias)``."""
        return partial(F.linear, weight=weight, bias=bias)


def with_bias(product: Linear, bias: Tensor | None) -> Linear:
    """Return ``product`` with ``bias`` [out] added to every row of its result, rounded once more."""
    return product if bias is None else lambda x: product(x) + bias
