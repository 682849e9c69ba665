"""Penalties without a table: a set of seen ids and a counter per row, spread over the whole vocabulary when asked."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mini_engine.sampler.processors.base import History, LogitsProcessor, Vocabulary

Seen = tuple[tuple[float, float, float], frozenset[int], Counter[int]]


def repeat_penalty(logits: Tensor, counts: Tensor, strength: Tensor) -> Tensor:
    """Divide by the strength or by its inverse."""
    return logits / torch.where(logits > 0, strength, 1 / strength)


def frequency_penalty(logits: Tensor, counts: Tensor, strength: Tensor) -> Tensor:
    """Subtract once per occurrence."""
    return logits - counts * strength


def presence_penalty(logits: Tensor, counts: Tensor, strength: Tensor) -> Tensor:
    """Subtract once."""
    return torch.where(counts > 0, logits - strength, logits)


class Penalties(LogitsProcessor[Seen]):
    """The state of a row holds its strengths, what it has seen and the counts of its output."""

    @classmethod
    def start(cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary) -> Seen | None:
        """Count the past."""
        strengths = (
            float(arguments["repetition_penalty"]),
            float(arguments["frequency_penalty"]),
            float(arguments["presence_penalty"]),
        )
        seen = frozenset(history.prompt_ids) | frozenset(history.output_ids)
        return None if strengths == (1.0, 0.0, 0.0) else (strengths, seen, Counter(history.output_ids))

    def advance(self, state: Seen, token_id: int) -> Seen:
        """Count one token."""
        strengths, seen, counts = state
        return strengths, seen | {token_id}, counts + Counter([token_id])

    def apply(self, logits: Tensor) -> None:
        """Work on whole rows [V], with zeros where nothing was seen."""
        for row, (strengths, seen, counts) in self.states.items():
            repetition, frequency, presence = torch.tensor(strengths)
            mask = torch.zeros(logits.shape[1], dtype=torch.bool)
            dense = torch.zeros(logits.shape[1])
            mask[list(seen)] = True
            dense[list(counts)] = torch.tensor([float(count) for count in counts.values()])
            values = logits[row].clone()
            if repetition != 1.0:
                values = torch.where(mask, repeat_penalty(values, dense, repetition), values)
            if frequency != 0.0:
                values = torch.where(dense > 0, frequency_penalty(values, dense, frequency), values)
            logits[row] = presence_penalty(values, dense, presence) if presence != 0.0 else values
