"""L4: the sampler: from the logits of N rows to N token ids, each row by its own parameters.

Owns: the order of the stages. Must not know: the model, requests, text.

    raw log-probabilities, if asked
    float32 copy -> penalties -> least length -> bias -> allowed ids -> bad words -> registered processors -> grammar
    greedy rows: argmax ───────────────────────────────────────────────────┐
    other rows:  temperature -> top-k -> top-p -> min-p -> softmax -> draw ┴-> token ids -> log-probabilities

Every stage is a branch that is taken only if some row needs it. Greedy rows leave before the temperature: they are the
argmax of the processed logits, the lowest id among equals, whatever shares the batch.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from mini_engine.sampler.batch import SamplingBatch
from mini_engine.sampler.draw import draw_seeded, draw_uniform
from mini_engine.sampler.filters import apply_joint, apply_min_p, apply_temperature, apply_top_k, apply_top_p
from mini_engine.sampler.logprobs import TokenLogprob, token_logprobs
from mini_engine.sampler.trace import SamplingTrace

FilterOrder = Literal["sequential", "joint"]
NO_TOKEN = -1
FLOAT32_MAX = torch.finfo(torch.float32).max
CHUNK = 1 << 21  # logits that are filtered and drawn from at a time: 8 MB stay in the cache


@dataclass(frozen=True)
class SamplerOutput:
    """What a step chose. ``token_ids`` [N]: ``NO_TOKEN`` in the rows of ``errors``, which says why.

    ``logprobs``: one list per row, chosen token first, or ``None`` where the row did not ask.
    """

    token_ids: list[int]
    logprobs: list[list[TokenLogprob] | None]
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Chooses one token for each row of a batch. Holds a generator for rows without a seed, and no past of any row."""

    def __init__(
        self,
        filter_order: FilterOrder = "sequential",
        generator: torch.Generator | None = None,
        trace: SamplingTrace | None = None,
    ) -> None:
        """Sample with top-p after top-k ("sequential") or beside it ("joint"); unseeded rows use ``generator`` (CPU).

        Raises ``ValueError`` for another word. Without a generator one is made and seeded by the operating system.
        """
        if filter_order not in get_args(FilterOrder):
            raise ValueError(f"filter_order is {filter_order!r}; choose one of {', '.join(get_args(FilterOrder))}")
        self.filter_order, self.trace = filter_order, trace
        self.generator = generator or torch.Generator()
        if generator is None:
            self.generator.seed()

    @torch.inference_mode()
    def __call__(self, logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
        """Choose. ``logits`` [N, V], float32 or shorter, not written to. ``batch`` stays as it is: ``cumulate`` it."""
        assert len(logits) == len(batch), f"{len(logits)} rows of logits for {len(batch)} requests"
        if self.trace is not None:
            self.trace.clear()
            self.trace.note("logits", logits)
        processed = batch.process(logits, self.trace.note if self.trace is not None else None)
        peaks, chosen = processed.max(-1)  # [N] each: the lowest id among equals; NaN wins every comparison
        spoilt = spoilt_rows(peaks.tolist(), batch)
        errors = {row: diagnose(logits, batch, row) for row in spoilt}
        final = processed
        if not batch.all_greedy:
            rows = [row for row in batch.random_rows if row not in errors]
            final = processed.to(torch.float32, copy=True) if batch.need_logprobs else processed
            for part in split_rows(rows, logits.shape[1]):
                filtered = self.filter_rows(processed[part].float(), batch, part)
                chosen[part] = self.draw(filtered, batch, part)
                if batch.need_logprobs:
                    final[part] = filtered
        token_ids = chosen.tolist()
        for row in errors:
            token_ids[row] = NO_TOKEN
        logprobs = report(logits, final, chosen, batch, errors)
        return SamplerOutput(token_ids, logprobs, errors)

    def filter_rows(self, logits: Tensor, batch: SamplingBatch, rows: list[int]) -> Tensor:
        """Scale and cut the distributions of the rows that are drawn. ``logits`` [R, V] float32 -> [R, V]."""
        logits = apply_temperature(logits, batch.temperature[rows])
        self.note("temperature", logits, rows)
        if self.filter_order == "joint" and batch.need_top_k and batch.need_top_p:
            logits = apply_joint(logits, batch.top_k[rows], batch.top_p[rows])
            self.note("top-k and top-p", logits, rows)
        else:
            if batch.need_top_k:
                logits = apply_top_k(logits, batch.top_k[rows])
                self.note("top-k", logits, rows)
            if batch.need_top_p:
                logits = apply_top_p(logits, batch.top_p[rows])
                self.note("top-p", logits, rows)
        if batch.need_min_p:
            logits = apply_min_p(logits, batch.min_p[rows])
            self.note("min-p", logits, rows)
        return logits

    def note(self, name: str, logits: Tensor, rows: list[int]) -> None:
        """Show a stage to the trace, if there is one."""
        if self.trace is not None:
            self.trace.note(name, logits, rows)

    def draw(self, logits: Tensor, batch: SamplingBatch, rows: list[int]) -> Tensor:
        """Draw one id per row of ``logits`` [R, V]: seeded rows from their noise, the others from the generator."""
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        seeded = [i for i, row in enumerate(rows) if batch.params[row].seed is not None]
        unseeded = [i for i, row in enumerate(rows) if batch.params[row].seed is None]
        if seeded:
            own = [rows[i] for i in seeded]
            token_ids[seeded] = draw_seeded(logits[seeded], batch.seeds[own], batch.positions[own])
        if unseeded:
            uniform = torch.rand(len(unseeded), generator=self.generator, dtype=torch.float64)
            token_ids[unseeded] = draw_uniform(logits[unseeded], uniform.to(logits.device))
        return token_ids


def split_rows(rows: list[int], vocab_size: int) -> list[list[int]]:
    """Cut ``rows`` into pieces of at most ``CHUNK`` logits, but at least one row."""
    size = max(1, CHUNK // vocab_size)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def spoilt_rows(peaks: list[float], batch: SamplingBatch) -> list[int]:
    """Return the rows of which no token can be chosen; ``peaks`` [N] holds each row's largest logit."""
    limit = FLOAT32_MAX * batch.least_temperature
    if all(map(math.isfinite, peaks)) and -limit <= min(peaks, default=0.0) <= max(peaks, default=0.0) <= limit:
        return []  # as a rule; looking at each row in turn costs more than the argmax
    return [row for row, peak in enumerate(peaks) if not fits(peak, batch.params[row].temperature)]


def fits(peak: float, temperature: float) -> bool:
    """Whether a row's largest logit is finite and stays so when it is divided by the temperature, 0 for greedy."""
    return abs(peak) <= FLOAT32_MAX * min(temperature or 1.0, 1.0)


def fault_of(logits: Tensor) -> str | None:
    """Return what is wrong with a row of logits [V], ``None`` if a token can be chosen from it."""
    if bool(logits.isnan().any()):
        return "holds NaN"
    peak = float(logits.max())
    if peak == -torch.inf:
        return "allows no token"
    return "holds plus infinity" if peak == torch.inf else None


def diagnose(logits: Tensor, batch: SamplingBatch, row: int) -> str:
    """Find the stage that spoilt a row, by applying the stages one by one once more. ``logits`` [N, V]."""
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


def report(
    raw: Tensor, final: Tensor, chosen: Tensor, batch: SamplingBatch, errors: dict[int, str]
) -> list[list[TokenLogprob] | None]:
    """Return the log-probabilities of every row that asked for them, raw or after all stages. Tensors [N, V], [N]."""
    lists: list[list[TokenLogprob] | None] = [None] * len(batch)
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
                lists[row] = entries
    return lists
