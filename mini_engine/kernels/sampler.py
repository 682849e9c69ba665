"""L8: the sampler of L4 with kernels for what touches every logit.

``sampler.Sampler`` is the oracle: greedy and seeded rows choose the same tokens. The others choose the same tokens for
the same uniform numbers, except where rounding moves the border between two tokens.
"""

from typing import Any

import torch
from torch import Tensor

from mini_engine.kernels.registry import KernelSet
from mini_engine.sampler.batch import SamplingBatch
from mini_engine.sampler.filters import apply_temperature
from mini_engine.sampler.sampler import Sampler, SamplerOutput, find_errors, make_output


class KernelSampler(Sampler):
    """``Sampler`` over ``kernels``. A trace needs the result of every stage, so with one the plain path runs."""

    def __init__(self, kernels: KernelSet, **options: Any) -> None:
        """Sample with ``kernels``; ``options`` are those of ``Sampler``."""
        super().__init__(**options)
        self.kernels = kernels

    @torch.inference_mode()
    def __call__(self, logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
        """Do what ``Sampler`` does. A stage that declares its ``operation`` is computed by the kernel of that name."""
        if self.trace is not None:
            return super().__call__(logits, batch)
        assert len(logits) == len(batch), f"{len(logits)} rows of logits for {len(batch)} requests"
        processed = batch.process(logits, kernels=self.kernels.functions)
        peaks, chosen = self.kernels.argmax(processed)  # [N] each: the lowest id among equals, NaN above all
        errors = find_errors(logits, batch, peaks)
        final = processed
        rows = [row for row in batch.random_rows if row not in errors]
        if rows:
            scaled = apply_temperature(processed[rows].float(), batch.temperature[rows])  # [R, V]
            if batch.need_logprobs:
                scaled = self.filter_scaled(scaled, batch, rows)
                final = processed.to(torch.float32, copy=True)
                final[rows] = scaled
            chosen[rows] = self.draw_scaled(scaled, batch, rows)
        return make_output(logits, final, chosen, batch, errors)

    def filter_scaled(self, scaled: Tensor, batch: SamplingBatch, rows: list[int]) -> Tensor:
        """Cut the distributions of the rows that are drawn. ``scaled`` [R, V] -> [R, V]."""
        kernels = self.kernels
        joint = self.filter_order == "joint"
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
