"""L4: the distribution after every stage of the sampler, for notebooks, ``--trace`` and debugging. Off by default.

A trace only copies logits, so a sampler with a trace chooses the same tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stage:
    """One row's distribution after one stage. ``probs`` [V] float64.

    ``support``: tokens that can still come. ``entropy``: in bits. ``kept``: the mass that the stage before gave to the
    tokens that are left, so 1 - ``kept`` was cut here. ``top``: the likeliest ids and their probabilities.
    """

    name: str
    probs: Tensor
    support: int
    entropy: float
    kept: float
    top: list[tuple[int, float]]


@dataclass
class SamplingTrace:
    """Keeps the logits after every stage of the last call.

    ``keeps_calls``: whether it keeps more calls than the last, so that a step may sample a request several times.
    """

    keeps_calls: ClassVar[bool] = False
    top: int = 5
    records: list[tuple[str, list[int], Tensor]] = field(default_factory=list)

    def start(self, logits: Tensor) -> Callable[[str, Tensor], None]:
        """Forget the last call, note the model's own ``logits`` [N, V] and return ``note``. Mutates."""
        self.records = []
        self.note("logits", logits)
        return self.note

    def note(self, name: str, logits: Tensor, rows: Sequence[int] | None = None) -> None:
        """Copy ``logits`` [R, V], which are those of ``rows`` (all rows if not given). Mutates."""
        rows = list(range(len(logits))) if rows is None else list(rows)
        self.records.append((name, rows, logits.detach().to("cpu", torch.float64, copy=True)))

    def stages(self, row: int) -> list[Stage]:
        """Return the stages that ``row`` went through, in order."""
        stages: list[Stage] = []
        for name, rows, logits in self.records:
            if row in rows:
                before = stages[-1].probs if stages else None
                stages.append(describe(name, logits[rows.index(row)].softmax(-1), before, self.top))
        return stages

    def table(self, row: int) -> list[dict[str, object]]:
        """Return the stages of ``row`` as rows of a small table: name, support, entropy, kept mass, top token."""
        return [
            {"stage": s.name, "support": s.support, "entropy": s.entropy, "kept": s.kept, "top": s.top}
            for s in self.stages(row)
        ]


def describe(name: str, probs: Tensor, before: Tensor | None, top: int) -> Stage:
    """Measure the distribution ``probs`` [V] after a stage; ``before`` [V] is that of the stage before."""
    positive = probs[probs > 0]
    kept = 1.0 if before is None else float(before[probs > 0].sum())
    values, ids = probs.topk(min(top, len(probs)))
    pairs = [(token, value) for token, value in zip(ids.tolist(), values.tolist(), strict=True) if value > 0]
    entropy = abs(float((positive * positive.log()).sum())) / math.log(2)  # abs: the sum of one token is -0.0
    return Stage(name, probs, len(positive), entropy, kept, pairs)
