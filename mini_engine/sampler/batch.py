"""L4: the sampling side of a batch: one parameter per row as tensors, processors with their past, flags.

Parameters are tensors of length N and never scalars, because each row has its own: one is greedy, its neighbour samples
at temperature 0.7, and one call chooses both tokens. SGLang's class for this is ``SamplingBatchInfo``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from mini_engine.sampler.draw import draw_seeded, draw_uniform
from mini_engine.sampler.filters import apply_joint, apply_min_p, apply_top_k, apply_top_p
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.penalties import Penalties
from mini_engine.sampler.processors.base import History, LogitsProcessor, Vocabulary
from mini_engine.sampler.processors.constraints import AllowedTokens, BadWords, LogitBias, MinNewTokens
from mini_engine.sampler.processors.registry import find_processor

Processor = LogitsProcessor[Any]


class SampledRequest(Protocol):
    """What the sampler reads of a request."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Ids of the prompt, at least one."""

    @property
    def output_ids(self) -> Sequence[int]:
        """Ids generated so far."""

    @property
    def params(self) -> SamplingParams:
        """How its tokens are chosen."""


@dataclass
class SamplingRequest:
    """A minimal ``SampledRequest``."""

    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    output_ids: list[int] = field(default_factory=list)


# The processors of plain parameters, in the order of the pipeline. Registered ones follow, in the order of their names,
# so that a row's order does not depend on its neighbours'.
BUILT_IN: dict[str, type[Processor]] = {
    "penalties": Penalties,
    "min_new_tokens": MinNewTokens,
    "logit_bias": LogitBias,
    "allowed_token_ids": AllowedTokens,
    "bad_words": BadWords,
}


class TorchOps:
    """What a ``Sampler`` computes with: torch's functions. L8 hands in kernels in their place (``KernelOps``)."""

    # Logits that are filtered and drawn from at a time. With more, the C library gives the memory of the temporaries
    # back to the system after every step, and the next one waits for new pages.
    chunk = 1 << 20
    apply_top_k = staticmethod(apply_top_k)
    apply_top_p = staticmethod(apply_top_p)
    apply_joint = staticmethod(apply_joint)
    apply_min_p = staticmethod(apply_min_p)
    draw_seeded = staticmethod(draw_seeded)
    draw_uniform = staticmethod(draw_uniform)

    def argmax(self, logits: Tensor) -> Any:
        """``logits`` [N, V] -> the largest of each row and the lowest id that has it, [N] each. NaN is the largest."""
        return torch.max(logits, dim=-1)

    def apply(self, processor: Processor, logits: Tensor) -> None:
        """Let ``processor`` alter ``logits`` [N, V]. Mutates ``logits``."""
        processor.apply(logits)

    def apply_vocab_mask(self, grammar: Any, logits: Tensor, mask: Tensor) -> None:
        """Ban in ``logits`` [N, V] what ``mask``, which has the form of ``grammar`` (L7), bans. Mutates ``logits``."""
        grammar.apply_vocab_mask(logits, mask)

    def filter_and_draw(
        self, sampler: Any, logits: Tensor, batch: "SamplingBatch", rows: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Filter and draw as ``sampler`` does. ``logits`` [R, V] of ``rows`` -> ids [R], filtered logits [R, V].

        An operation that does both at once need not filter if neither a report nor a trace reads it.
        """
        filtered = sampler.filter_rows(logits, batch, rows)
        return sampler.draw(filtered, batch, rows), filtered


TORCH = TorchOps()


class SamplingBatch:
    """N rows that are sampled together. ``filter``, ``merge`` and ``cumulate`` keep every part in step.

    ``temperature`` [N] float32, ``top_k`` [N] int64, ``top_p`` [N] float64, ``min_p`` [N] float32, ``seeds`` and
    ``positions`` [N] int64 (``positions``: of the last token of each row, which the draw hashes).
    ``processors``: name -> processor, in the order of application, only those that some row needs. ``final_mask``:
    called on the logits after every processor; L7 sets it, and nothing comes after it that could allow what it banned.
    ``random_rows``: those that are drawn; ``all_greedy``: there are none; ``least_temperature``: the lowest of theirs,
    at most 1.0; ``need_top_k``, ``need_top_p``, ``need_min_p``: one of them has it on; ``need_logprobs``: any row asked
    for log-probabilities. A row without a seed has 0 in ``seeds``, which nothing reads.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        num_tokens: Sequence[int],
        processors: dict[str, Processor],
        device: str = "cpu",
    ) -> None:
        """Hold rows with these parameters, numbers of tokens and processors."""
        self.params = list(params)
        self.num_tokens = list(num_tokens)
        self.processors = processors
        self.device = device
        self.final_mask: Callable[[Tensor, TorchOps], None] | None = None
        self.pack()

    @classmethod
    def from_requests(
        cls, requests: Sequence[SampledRequest], vocabulary: Vocabulary, device: str = "cpu"
    ) -> "SamplingBatch":
        """Build the batch; states are replayed from each request's history, so a preempted request loses nothing."""
        lengths = [len(request.prompt_ids) + len(request.output_ids) for request in requests]
        return cls([r.params for r in requests], lengths, build_processors(requests, vocabulary), device)

    def __len__(self) -> int:
        """Return N."""
        return len(self.params)

    def pack(self) -> None:
        """Build tensors and flags from the rows' parameters: after every change of rows, so that none is stale."""

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(p, name) for p in self.params], dtype=dtype, device=self.device)

        self.temperature = column("temperature", torch.float32)
        self.top_k = column("top_k", torch.int64)
        self.top_p = column("top_p", torch.float64)
        self.min_p = column("min_p", torch.float32)
        self.seeds = torch.tensor([p.seed or 0 for p in self.params], dtype=torch.int64, device=self.device)
        self.positions = torch.tensor(self.num_tokens, dtype=torch.int64, device=self.device) - 1
        self.random_rows = [row for row, p in enumerate(self.params) if not p.is_greedy]
        self.all_greedy = not self.random_rows
        sampled = [self.params[row] for row in self.random_rows]
        self.least_temperature = min([1.0, *(p.temperature for p in sampled)])
        self.need_top_k = any(p.top_k > 0 for p in sampled)
        self.need_top_p = any(p.top_p < 1.0 for p in sampled)
        self.need_min_p = any(p.min_p > 0.0 for p in sampled)
        self.need_logprobs = any(p.logprobs is not None for p in self.params)

    def process(
        self, logits: Tensor, note: Callable[[str, Tensor], None] | None = None, ops: TorchOps = TORCH
    ) -> Tensor:
        """Apply every stage in order. ``logits`` [N, V], float32 or shorter -> [N, V].

        Without stages the logits come back as they are. Otherwise the result is a float32 copy: the caller's tensor is
        never written to. ``ops`` compute the stages. ``note`` is called with each stage's name and result.
        """
        if not self.processors and self.final_mask is None:
            return logits
        logits = logits.to(torch.float32, copy=True)
        for name, apply in self.stages(ops):
            apply(logits)
            if note is not None:
                note(name, logits)
        return logits

    def stages(self, ops: TorchOps = TORCH) -> list[tuple[str, Callable[[Tensor], None]]]:
        """Return the name and the function of every stage that alters logits, in order. ``ops`` compute it."""
        mask = self.final_mask
        stages: list[tuple[str, Callable[[Tensor], None]]] = []
        stages += [(name, partial(ops.apply, p)) for name, p in self.processors.items()]
        return stages if mask is None else [*stages, ("grammar", lambda logits: mask(logits, ops))]

    def cumulate(self, token_ids: Sequence[int]) -> None:
        """Take the newest token of every row [N] into account. Mutates."""
        assert len(token_ids) == len(self), f"{len(token_ids)} tokens for {len(self)} rows"
        for processor in self.processors.values():
            processor.cumulate(token_ids)
        self.num_tokens = [count + 1 for count in self.num_tokens]
        self.positions = self.positions + 1

    def filter(self, keep: Sequence[int]) -> None:
        """Keep the rows ``keep``, in that order; a processor that no row needs any more is dropped. Mutates."""
        self.params = [self.params[row] for row in keep]
        self.num_tokens = [self.num_tokens[row] for row in keep]
        for processor in self.processors.values():
            processor.filter(keep)
        self.processors = {name: p for name, p in self.processors.items() if p.states}
        self.pack()

    def merge(self, other: "SamplingBatch") -> None:
        """Append the rows of ``other``, which must not be used again. Mutates."""
        for name, theirs in other.processors.items():
            theirs.shift(len(self))
            if name in self.processors:
                self.processors[name].merge(theirs)
            else:
                self.processors[name] = theirs
        self.processors = {name: self.processors[name] for name in stage_order(self.processors)}
        self.params = self.params + other.params
        self.num_tokens = self.num_tokens + other.num_tokens
        self.pack()


def stage_order(names: Iterable[str]) -> list[str]:
    """Return the names of processors in the order of the pipeline."""
    present = set(names)
    return [name for name in BUILT_IN if name in present] + sorted(present - set(BUILT_IN))


def build_processors(requests: Sequence[SampledRequest], vocabulary: Vocabulary) -> dict[str, Processor]:
    """Build every processor that some request needs, in the order of the pipeline."""
    chosen = {name for request in requests for name in request.params.logits_processors or {}}
    processors: dict[str, Processor] = {}
    for name in [*BUILT_IN, *sorted(chosen)]:
        kind = BUILT_IN.get(name) or find_processor(name)
        states = {}
        histories = []
        for row, request in enumerate(requests):
            arguments = processor_arguments(name, request.params)
            if arguments is None or (kind.is_argmax_invariant and request.params.is_greedy):
                continue
            history = History(request.prompt_ids, request.output_ids)
            state = kind.start(history, arguments, vocabulary)
            if state is not None:
                states[row] = state
                histories.append(history)
        if states:
            processors[name] = kind.build(states, histories)
    return processors


def processor_arguments(name: str, params: SamplingParams) -> Mapping[str, Any] | None:
    """Return the arguments of a processor: all parameters for a built-in one, its own for a registered one."""
    return vars(params) if name in BUILT_IN else (params.logits_processors or {}).get(name)
