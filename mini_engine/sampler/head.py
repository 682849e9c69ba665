"""L4: the last stage of the model: from hidden states to logits, with the variations that models and ranks bring.

In SGLang this is ``layers/logits_processor.py``. Here "logits processor" means what vLLM and SGLang call *custom*
logits processors.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_engine.linear import Linear


@dataclass(frozen=True)
class LogitsHead:
    """How hidden states become logits. ``LogitsHead()`` is the plain product, bit for bit.

    ``scale``: a factor on the logits (Cohere's models), 1 is off. ``soft_cap``: squeeze them into (-cap, cap) by
    ``cap * tanh(logits / cap)`` (Gemma 2), ``None`` is off. ``gather``: called on the product when each rank holds a
    slice of the vocabulary, [R, V / ranks] -> [R, V]; ``None`` is off.
    """

    scale: float = 1.0
    soft_cap: float | None = None
    gather: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        """Check the numbers. Raises ``ValueError`` naming value, range and remedy."""
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale is {self.scale}; it must be a finite number above 0 (1.0 switches it off)")
        if self.soft_cap is not None and not 0 < self.soft_cap < math.inf:
            raise ValueError(f"soft_cap is {self.soft_cap}; it must be a finite number above 0 (None switches it off)")

    def __call__(self, hidden: Tensor, rows: Tensor | None, lm_head: Linear) -> Tensor:
        """Return the logits. ``hidden`` [T, H], ``rows`` [R] (``None``: all) -> [R, V] in the weights' dtype.

        Rows are taken first, so that the product is only paid for rows that are wanted. Slices are joined before the
        scale and the cap: every rank passes on its plain product.
        """
        logits = lm_head(hidden if rows is None else hidden[rows])
        if self.gather is not None:
            logits = self.gather(logits)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits
