"""L4: the sampler: from the logits of N rows to N token ids, each row by its own parameters.

    raw log-probabilities, if asked
    float32 copy -> penalties -> least length -> bias -> allowed ids -> bad words -> registered processors -> grammar
    greedy rows: argmax ───────────────────────────────────────────────────┐
    other rows:  temperature -> top-k -> top-p -> min-p -> softmax -> draw ┴-> token ids -> log-probabilities

A stage runs only if some row needs it. Greedy rows leave before the temperature: their token is the argmax of the
processed logits, the lowest id among equals, whatever shares the batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from mini_engine.sampler.batch import TORCH, SamplingBatch, TorchOps
from mini_engine.sampler.filters import apply_temperature
from mini_engine.sampler.logprobs import TokenLogprob, token_logprobs
from mini_engine.sampler.trace import SamplingTrace

FilterOrder = Literal["sequential", "joint"]
Filter = tuple[str, Callable[[Tensor], Tensor]]  # the name of a filter, and the filter: [R, V] -> [R, V]
NO_TOKEN = -1
FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class SamplerOutput:
    """The tokens of one step. ``token_ids`` [N]: ``NO_TOKEN`` in the rows of ``errors``, which gives the reason.

    ``logprobs``: one list per row, the chosen token first; ``None`` for a row that did not ask.
    """

    token_ids: list[int]
    logprobs: list[list[TokenLogprob] | None]
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Chooses one token for each row of a batch. Its only state is the generator of the rows without a seed."""

    def __init__(
        self,
        filter_order: FilterOrder = "sequential",
        generator: torch.Generator | None = None,
        trace: SamplingTrace | None = None,
        ops: TorchOps = TORCH,
    ) -> None:
        """Create a sampler whose rows without a seed draw from ``generator`` (on the CPU).

        ``filter_order``: "sequential" applies top-p to what top-k has kept, "joint" applies both to the same
        distribution. Without a ``generator``, a new one is seeded by the operating system. ``trace`` records the logits
        after every stage. ``ops`` compute what touches every logit. Raises ``ValueError`` for another ``filter_order``.
        """
        if filter_order not in get_args(FilterOrder):
            raise ValueError(f"filter_order is {filter_order!r}; choose one of {', '.join(get_args(FilterOrder))}")
        self.filter_order = filter_order
        self.trace = trace
        self.ops = ops
        self.generator = generator or torch.Generator()
        if generator is None:
            self.generator.seed()

    @torch.inference_mode()
    def __call__(self, logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
        """Process, filter, draw. ``logits`` [N, V], float32 or shorter; neither they nor ``batch`` are changed.

        Give the tokens to ``batch.cumulate`` afterwards.
        """
        assert len(logits) == len(batch), f"{len(logits)} rows of logits for {len(batch)} requests"
        processed = batch.process(logits, None if self.trace is None else self.trace.start(logits), self.ops)
        peaks, chosen = self.ops.argmax(processed)  # [N] each: the lowest id among equals; NaN is above all
        errors = self.find_errors(logits, batch, peaks)
        if batch.all_greedy:
            return self.make_output(logits, processed, chosen, batch, errors)
        rows = [row for row in batch.random_rows if row not in errors]
        final = processed.to(torch.float32, copy=True) if batch.need_logprobs else processed
        for part in split_rows(rows, self.ops.chunk // logits.shape[1]):
            chosen[part], filtered = self.ops.filter_and_draw(self, processed[part].float(), batch, part)
            if batch.need_logprobs:
                final[part] = filtered
        return self.make_output(logits, final, chosen, batch, errors)

    def filter_rows(self, logits: Tensor, batch: SamplingBatch, rows: list[int]) -> Tensor:
        """Apply the ``filters`` to the rows that are drawn, and show each to the trace. ``logits`` [R, V] -> [R, V]."""
        for name, apply in self.filters(batch, rows):
            logits = apply(logits)
            if self.trace is not None:
                self.trace.note(name, logits, rows)
        return logits

    def filters(self, batch: SamplingBatch, rows: list[int]) -> list[Filter]:
        """Return the filters that some row needs, in order, with the parameters of ``rows`` [R].

        Their names: "temperature", then "top-k" and "top-p" ("top-k and top-p" in the joint order), then "min-p".
        """
        filters: list[Filter] = [("temperature", partial(apply_temperature, temperature=batch.temperature[rows]))]
        if self.filter_order == "joint" and batch.need_top_k and batch.need_top_p:
            filters.append(("top-k and top-p", partial(self.ops.apply_joint, k=batch.top_k[rows], p=batch.top_p[rows])))
        else:
            if batch.need_top_k:
                filters.append(("top-k", partial(self.ops.apply_top_k, k=batch.top_k[rows])))
            if batch.need_top_p:
                filters.append(("top-p", partial(self.ops.apply_top_p, p=batch.top_p[rows])))
        if batch.need_min_p:
            filters.append(("min-p", partial(self.ops.apply_min_p, min_p=batch.min_p[rows])))
        return filters

    def draw(self, logits: Tensor, batch: SamplingBatch, rows: list[int]) -> Tensor:
        """Draw one id per row of ``logits`` [R, V]: with a seed from its noise, without one from the generator."""
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        seeded = [i for i, row in enumerate(rows) if batch.params[row].seed is not None]
        unseeded = [i for i, row in enumerate(rows) if batch.params[row].seed is None]
        if seeded:
            own = [rows[i] for i in seeded]
            token_ids[seeded] = self.ops.draw_seeded(logits[seeded], batch.seeds[own], batch.positions[own])
        if unseeded:
            uniform = torch.rand(len(unseeded), generator=self.generator, dtype=torch.float64)
            token_ids[unseeded] = self.ops.draw_uniform(logits[unseeded], uniform.to(logits.device))
        return token_ids

    @staticmethod
    def find_errors(logits: Tensor, batch: SamplingBatch, peaks: Tensor) -> dict[int, str]:
        """Return the rows from which no token can be chosen, each with the reason. ``logits`` [N, V]: the model's own.

        ``peaks`` [N]: each row's largest logit after processing.
        """
        values = peaks.tolist()
        limit = FLOAT32_MAX * batch.least_temperature
        if all(map(math.isfinite, values)) and -limit <= min(values, default=0.0) <= max(values, default=0.0) <= limit:
            return {}  # the usual case; looking at each row in turn costs more than the argmax
        invalid = [row for row, peak in enumerate(values) if not fits(peak, batch.params[row].temperature)]
        return {row: diagnose(logits, batch, row) for row in invalid}

    @staticmethod
    def make_output(
        raw: Tensor, final: Tensor, chosen: Tensor, batch: SamplingBatch, errors: dict[int, str]
    ) -> SamplerOutput:
        """Return the output of a step: ``chosen`` [N] without the rows of ``errors``, and the asked log-probabilities.

        ``raw`` and ``final`` [N, V]: the logits before and after all stages.
        """
        token_ids = chosen.tolist()
        for row in errors:
            token_ids[row] = NO_TOKEN
        logprobs: list[list[TokenLogprob] | None] = [None] * len(batch)
        for mode, logits in (("raw", raw), ("processed", final)) if batch.need_logprobs else ():
            rows = [
                row
                for row, params in enumerate(batch.params)
                if params.logprobs is not None and params.logprobs_mode == mode and row not in errors
            ]
            if rows:
                counts = [batch.params[row].logprobs or 0 for row in rows]
                table = token_logprobs(logits[rows].double().log_softmax(-1), chosen[rows], counts)
                for row, entries in zip(rows, table, strict=True):
                    logprobs[row] = entries
        return SamplerOutput(token_ids, logprobs, errors)


def split_rows(rows: list[int], size: int) -> list[list[int]]:
    """Cut ``rows`` into pieces of at most ``size``, but at least one row."""
    size = max(1, size)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def fits(peak: float, temperature: float) -> bool:
    """Whether a row's largest logit is finite, also after division by the temperature; 0 is greedy."""
    return abs(peak) <= FLOAT32_MAX * min(temperature or 1.0, 1.0)


def fault_of(logits: Tensor) -> str | None:
    """Return what is wrong with a row of logits [V]; ``None`` if a token can be chosen from it."""
    if bool(logits.isnan().any()):
        return "holds NaN"
    peak = float(logits.max())
    if peak == -torch.inf:
        return "allows no token"
    return "holds plus infinity" if peak == torch.inf else None


def diagnose(logits: Tensor, batch: SamplingBatch, row: int) -> str:
    """Return which stage made a row invalid: apply the stages to ``logits`` [N, V] again, one by one."""
    fault = fault_of(logits[row])
    if fault is not None:
        return f"the model's own row of logits {fault}; check the weights and the prompt's length"
    work = logits.to(torch.float32, copy=True)
    for name, apply in batch.stages():
        apply(work)
        fault = fault_of(work[row])
        if fault is not None:
            return f"after {name} the row {fault}; loosen {name} or what comes before it"
    temperature = batch.params[row].temperature
    return f"its largest logit divided by the temperature {temperature} is beyond float32; check the weights"
