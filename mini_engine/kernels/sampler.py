"""L8: the operations of L4's sampler, by kernels.

``TorchOps`` is the oracle: greedy and seeded rows choose the same tokens. The others choose the same tokens for the
same uniform numbers, except where rounding moves the border between two tokens.
"""

import sys
from functools import partial

import torch
from torch import Tensor

from mini_engine.grammar.base import GrammarObject
from mini_engine.kernels.registry import KernelSet
from mini_engine.sampler.batch import Processor, SamplingBatch, TorchOps
from mini_engine.sampler.filters import apply_temperature
from mini_engine.sampler.penalties import Penalties
from mini_engine.sampler.sampler import Sampler


class KernelOps(TorchOps):
    """``TorchOps`` with ``kernels`` for what touches every logit."""

    chunk = sys.maxsize

    def __init__(self, kernels: KernelSet) -> None:
        """Compute with ``kernels``; those that have the name and the arguments of torch's function stand in for it."""
        self.kernels = kernels
        vars(self).update(kernels.functions, apply_joint=partial(kernels.apply_top_k_top_p, joint=True))

    def apply(self, processor: Processor, logits: Tensor) -> None:
        """Let ``processor`` alter ``logits`` [N, V]; the penalties have a kernel. Mutates ``logits``."""
        if isinstance(processor, Penalties):
            self.kernels.apply_penalties(logits, *(each.to(logits.device) for each in processor.entries()))
        else:
            processor.apply(logits)

    def apply_vocab_mask(self, grammar: GrammarObject, logits: Tensor, mask: Tensor) -> None:
        """Ban in ``logits`` [N, V] what ``mask`` bans; a boolean mask is the grammar's. Mutates ``logits``."""
        (self.kernels.apply_token_bitmask if mask.dtype == torch.int32 else grammar.apply_vocab_mask)(logits, mask)

    def draw_uniform(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Draw one id per row. ``logits`` [R, V], ``uniform`` [R] float64 in [0, 1) -> ids [R]."""
        off = torch.zeros_like(uniform)
        drawn = self.kernels.sample_top_k_top_p(logits, off.long(), off + 1, off.float(), uniform)
        return drawn  # type: ignore[no-any-return]

    def filter_and_draw(
        self, sampler: Sampler, logits: Tensor, batch: SamplingBatch, rows: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Filter and draw, in rows without a seed by one kernel if neither a report nor a trace reads what is between.

        ``logits`` [R, V] of ``rows`` -> ids [R], logits [R, V], filtered if something reads them.
        """
        seeded = [i for i, row in enumerate(rows) if batch.params[row].seed is not None]
        unseeded = [i for i, row in enumerate(rows) if batch.params[row].seed is None]
        if batch.need_logprobs or sampler.trace is not None or not unseeded:
            return super().filter_and_draw(sampler, logits, batch, rows)
        ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        if seeded:
            ids[seeded], _ = super().filter_and_draw(sampler, logits[seeded], batch, [rows[i] for i in seeded])
        own = [rows[i] for i in unseeded]
        ids[unseeded] = self.kernels.sample_top_k_top_p(
            apply_temperature(logits[unseeded], batch.temperature[own]),
            batch.top_k[own],
            batch.top_p[own],
            batch.min_p[own],
            torch.rand(len(own), generator=sampler.generator, dtype=torch.float64).to(logits.device),
            joint=sampler.filter_order == "joint",
        )
        return ids, logits
