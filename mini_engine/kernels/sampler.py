"""L8: the sampler of L4 with kernels for what touches every logit.

Owns: which stage has a kernel. Must not know: models, requests. ``sampler.Sampler`` is the oracle: greedy and seeded
rows choose the same tokens, the others the same for the same uniform numbers but at the edges of rounding.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mini_engine.grammar.base import GrammarObject
from mini_engine.grammar.rows import mask_rows
from mini_engine.kernels.registry import KernelSet
from mini_engine.sampler.batch import SamplingBatch
from mini_engine.sampler.filters import apply_temperature
from mini_engine.sampler.penalties import EMPTY, PENALTIES, Penalties
from mini_engine.sampler.sampler import NO_TOKEN, Sampler, SamplerOutput, diagnose, report, spoilt_rows


class KernelMasked:
    """A grammar whose bitmask a kernel writes onto the logits; everything else is the grammar's own."""

    def __init__(self, grammar: GrammarObject, apply: Callable[[Tensor, Tensor], None]) -> None:
        """Let ``apply(logits, bitmask)`` stand in for the grammar's own function."""
        self.grammar, self.apply = grammar, apply

    def __getattr__(self, name: str) -> Any:
        """Ask the grammar."""
        return getattr(self.grammar, name)

    def apply_vocab_mask(self, logits: Tensor, mask: Tensor) -> None:
        """Write minus infinity over what ``mask`` bans; a boolean mask has no kernel. Mutates ``logits`` [N, V]."""
        (self.apply if mask.dtype == torch.int32 else self.grammar.apply_vocab_mask)(logits, mask)


class KernelSampler(Sampler):
    """``Sampler`` over ``kernels``. With a trace, which wants to see every stage, it takes the plain path."""

    def __init__(self, kernels: KernelSet, **options: Any) -> None:
        """Sample with ``kernels``; ``options`` are those of ``Sampler``."""
        super().__init__(**options)
        self.kernels = kernels

    @torch.inference_mode()
    def __call__(self, logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
        """Choose. ``logits`` [N, V], float32 or shorter, not written to. ``batch`` stays as it is: ``cumulate`` it."""
        if self.trace is not None:
            return super().__call__(logits, batch)
        assert len(logits) == len(batch), f"{len(logits)} rows of logits for {len(batch)} requests"
        processed = self.process(logits, batch)
        peaks, chosen = self.kernels.argmax(processed)  # [N] each: the lowest id among equals, NaN above all
        errors = {row: diagnose(logits, batch, row) for row in spoilt_rows(peaks.tolist(), batch)}
        final = processed
        rows = [row for row in batch.random_rows if row not in errors]
        if rows:
            scaled = apply_temperature(processed[rows].float(), batch.temperature[rows])  # [R, V]
            if batch.need_logprobs:
                scaled = self.filter_scaled(scaled, batch, rows)
                final = processed.to(torch.float32, copy=True)
                final[rows] = scaled
            chosen[rows] = self.draw_scaled(scaled, batch, rows)
        token_ids = [NO_TOKEN if row in errors else token for row, token in enumerate(chosen.tolist())]
        return SamplerOutput(token_ids, report(logits, final, chosen, batch, errors), errors)

    def process(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Do what ``SamplingBatch.process`` does, with kernels for penalties and grammar masks. [N, V] -> [N, V]."""
        stages = batch.stages()
        if not stages:
            return logits
        logits = logits.to(torch.float32, copy=True)
        for _, apply in stages:
            self.with_kernel(apply)(logits)
        return logits

    def with_kernel(self, apply: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Return the form of a stage that uses a kernel, or the stage itself if there is none."""
        owner = getattr(apply, "__self__", None)
        if isinstance(owner, Penalties):
            return partial(self.penalise, owner)
        if isinstance(apply, partial) and apply.func is mask_rows:
            rows, grammars, stop_ids = apply.args
            masked = [KernelMasked(grammar, self.kernels.apply_token_bitmask) for grammar in grammars]
            return partial(mask_rows, rows, masked, stop_ids)  # type: ignore[arg-type]
        return apply

    def penalise(self, penalties: Penalties, logits: Tensor) -> None:
        """Penalise the tokens of the table in one launch. Mutates ``logits`` [N, V]."""
        table = penalties.table
        places, columns = (table.token_ids != EMPTY).nonzero(as_tuple=True)  # [K] each: the entries in use
        entries = (torch.tensor(list(penalties.states))[places], table.token_ids[places, columns])
        strengths = [
            torch.tensor([state[name] for state in penalties.states.values()])[places] for name, _, _ in PENALTIES
        ]
        counts = table.counts[places, columns]
        self.kernels.apply_penalties(logits, *(each.to(logits.device) for each in (*entries, counts, *strengths)))

    def filter_scaled(self, scaled: Tensor, batch: SamplingBatch, rows: list[int]) -> Tensor:
        """Cut the distributions of the rows that are drawn. ``scaled`` [R, V] -> [R, V]."""
        kernels, joint = self.kernels, self.filter_order == "joint"
        if batch.need_top_k and batch.need_top_p:
            scaled = kernels.apply_top_k_top_p(scaled, batch.top_k[rows], batch.top_p[rows], joint)
        elif batch.need_top_k:
            scaled = kernels.apply_top_k(scaled, batch.top_k[rows])
        elif batch.need_top_p:
            scaled = kernels.apply_top_p(scaled, batch.top_p[rows])
        return kernels.apply_min_p(scaled, batch.min_p[rows]) if batch.need_min_p else scaled

    def draw_scaled(self, scaled: Tensor, batch: SamplingBatch, rows: list[int]) -> Tensor:
        """Draw one id per row of ``scaled`` [R, V], filtered already if log-probabilities are wanted -> ids [R]."""
        chosen = torch.empty(len(rows), dtype=torch.int64, device=scaled.device)
        seeded = [i for i, row in enumerate(rows) if batch.params[row].seed is not None]
        unseeded = [i for i, row in enumerate(rows) if batch.params[row].seed is None]
        if seeded:
            own = [rows[i] for i in seeded]
            filtered = scaled[seeded] if batch.need_logprobs else self.filter_scaled(scaled[seeded], batch, own)
            chosen[seeded] = self.kernels.draw_seeded(filtered, batch.seeds[own], batch.positions[own])
        if unseeded:
            own = [rows[i] for i in unseeded]
            uniform = torch.rand(len(own), generator=self.generator, dtype=torch.float64).to(scaled.device)
            off = batch.need_logprobs  # it is filtered
            chosen[unseeded] = self.kernels.sample_top_k_top_p(
                scaled[unseeded],
                torch.zeros_like(batch.top_k[own]) if off else batch.top_k[own],
                torch.ones_like(batch.top_p[own]) if off else batch.top_p[own],
                torch.zeros_like(batch.min_p[own]) if off else batch.min_p[own],
                uniform,
                joint=self.filter_order == "joint",
            )
        return chosen
