"""L4: the greedy driver with a sampler in place of its argmax, and several sequences at a time.

All sequences start together; L5 lets them arrive at any time. There is no text here, so there are no stop strings.
With ``SamplingParams()`` its ids and logits are those of L3, bit for bit.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mini_engine.attention.allocator import PageAllocator, pages_needed
from mini_engine.attention.metadata import BatchInputs, SequenceChunk, pack_batch
from mini_engine.attention.pool import KVPool
from mini_engine.config import EngineConfig
from mini_engine.driver import AttentionFactory, GreedyDriver
from mini_engine.model import Qwen3
from mini_engine.sampler.batch import SampledRequest, SamplingBatch, SamplingRequest
from mini_engine.sampler.head import LogitsHead
from mini_engine.sampler.logprobs import TokenLogprob, prompt_logprobs
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.processors.base import Vocabulary
from mini_engine.sampler.processors.constraints import stop_token_ids
from mini_engine.sampler.processors.registry import check_processors
from mini_engine.sampler.sampler import Sampler

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class SampledStep:
    """One token of sequence ``index``, the logits [V] it came from, and ``finish_reason`` if it was the last.

    With "error" there is no token: ``token_id`` is -1 and ``error`` says why. ``prompt_logprobs`` comes with the first.
    """

    index: int
    token_id: int
    logits: Tensor
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True)
class SampledGeneration:
    """A finished sequence: its steps, first to last."""

    steps: list[SampledStep]

    @property
    def token_ids(self) -> list[int]:
        """The generated ids, an end-of-sequence id included when it was generated."""
        return [step.token_id for step in self.steps if step.error is None]

    @property
    def index(self) -> int:
        """Which of the samples it is, from 0."""
        return self.steps[0].index

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        reason = self.steps[-1].finish_reason
        assert reason is not None, "the sequence has not ended"
        return reason

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the chosen tokens' log-probabilities, minus infinity after an error."""
        if self.finish_reason == "error":
            return -math.inf
        return sum(step.logprobs[0].logprob for step in self.steps if step.logprobs is not None)


@dataclass
class Running:
    """A sequence in the batch: its request, its pages and how many of its tokens have keys and values."""

    index: int
    request: SamplingRequest
    pages: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        return [*self.request.prompt_ids, *self.request.output_ids]


@dataclass(frozen=True)
class StepInputs:
    """What a ``Worker`` computes in one step: ``batch``, and logits of its packed rows ``rows`` [R].

    Before that the pages ``clear`` are set to zero, and then each of ``copies`` copies slots [n] to slots [n].
    """

    batch: BatchInputs
    rows: Tensor
    copies: Sequence[tuple[Tensor, Tensor]] = ()
    clear: list[int] = field(default_factory=list)


class WorkerLostError(RuntimeError):
    """A part of the worker has gone, so it computes nothing any more."""


class Worker:
    """Has the model, and the pool with the keys and values of all sequences: a step reaches tensors only through it.

    It knows no requests. What a step computes is said in one object, so that a worker could as well be many, each with
    a part of the model. ``fault``: why it computes nothing any more; ``None`` while it does.
    """

    fault: str | None = None

    def __init__(
        self, model: Qwen3, pool: KVPool, make_attention: AttentionFactory, head: LogitsHead | None = None
    ) -> None:
        """Compute with ``model`` over ``pool``; without a ``head`` logits are the plain product."""
        self.model = model
        self.pool = pool
        self.make_attention = make_attention
        self.head = head

    @torch.inference_mode()
    def run(self, step: StepInputs) -> Tensor:
        """Run all layers of one packed step -> logits [R, V] of ``step.rows``. Mutates the pool."""
        if step.clear:
            self.pool.fill(step.clear, 0.0)
        for source, target in step.copies:
            self.pool.copy(source, target)
        batch = step.batch
        attention = self.make_attention(self.pool, batch.metadata)
        self.hidden = self.model.hidden_states(batch.input_ids, batch.positions, attention)  # [T, H]
        return self.more(step.rows)

    @torch.inference_mode()
    def more(self, rows: Tensor) -> Tensor:
        """Return the logits of ``rows`` [R] of the last step -> [R, V]."""
        if self.head is not None:
            return self.head(self.hidden, rows, self.model.lm_head)
        return self.model.lm_head(self.hidden[rows])


class SamplingDriver(GreedyDriver):
    """Generates with a ``Sampler``, one sequence or several side by side. Everything else is the greedy driver's.

    ``folder``: of the checkpoint, for receipts; ``load_driver`` sets it. ``weight_bytes``: of each of several ranks.
    """

    folder: Path | None = None
    weight_bytes: Sequence[int] = ()

    def __init__(
        self,
        model: Qwen3,
        config: EngineConfig,
        eos_token_ids: frozenset[int] = frozenset(),
        *,
        sampler: Sampler | None = None,
        head: LogitsHead | None = None,
        attention: AttentionFactory | None = None,
    ) -> None:
        """Drive ``model``; without a ``sampler`` the plain one is used, without a ``head`` the plain product."""
        super().__init__(model, config, eos_token_ids, attention=attention)
        self.sampler = sampler or Sampler()
        self.head = head
        self.vocabulary = Vocabulary(model.config.vocab_size, eos_token_ids)

    def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[SampledStep]:
        """Yield the tokens of one sequence as they come. Raises ``ValueError`` for a request that cannot be run."""
        if params.num_samples > 1:
            raise ValueError(f"{params.num_samples} samples cannot be streamed as one; use complete, or n=1")
        self.check_params(prompt_ids, params)
        return (step for steps in self.run([SamplingRequest(list(prompt_ids), params)]) for step in steps)

    def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[SampledGeneration]:
        """Generate ``best_of`` sequences side by side and return the ``n`` likeliest, in the order of their index.

        Raises ``ValueError`` for a request that cannot be run.
        """
        self.check_params(prompt_ids, params)
        requests = [SamplingRequest(list(prompt_ids), own) for own in sample_params(params)]
        steps: list[list[SampledStep]] = [[] for _ in requests]
        for step in (step for together in self.run(requests) for step in together):
            steps[step.index].append(step)
        generations = [SampledGeneration(own_steps) for own_steps in steps]
        ranked = sorted(generations, key=lambda generation: -generation.cumulative_logprob)
        return sorted(ranked[: params.n], key=lambda generation: generation.index)

    def run(self, requests: Sequence[SamplingRequest]) -> Iterator[list[SampledStep]]:
        """Run all requests side by side and yield the steps of each forward pass. Appends to their ``output_ids``."""
        page_size = self.config.page_size
        needed = [pages_needed(len(r.prompt_ids) + r.params.max_new_tokens - 1, page_size) for r in requests]
        allocator = PageAllocator(sum(needed))
        worker = self.make_worker(allocator.num_pages)
        running = [Running(index, request) for index, request in enumerate(requests)]
        batch = SamplingBatch.from_requests(requests, self.vocabulary, self.config.device)
        while running:
            for sequence in running:
                missing = pages_needed(len(sequence.token_ids), page_size) - len(sequence.pages)
                sequence.pages += allocator.allocate(missing)
            steps = self.step(running, batch, worker)
            yield steps
            keep = [row for row, step in enumerate(steps) if step.finish_reason is None]
            if len(keep) < len(running):
                running = [running[row] for row in keep]
                batch.filter(keep)
            batch.cumulate([steps[row].token_id for row in keep])

    def make_worker(self, num_pages: int) -> Worker:
        """Return a worker over a pool of ``num_pages`` pages. Raises ``ValueError`` if there is no memory for them."""
        model, config = self.model, self.config
        pool = KVPool(model.config, num_pages, config.page_size, model.embedding.dtype, config.device)
        return Worker(model, pool, self.make_attention, self.head)

    def close(self) -> None:
        """End what computes beside this process, if anything does. The driver is not used any more."""

    def step(self, running: Sequence[Running], batch: SamplingBatch, worker: Worker) -> list[SampledStep]:
        """Run one packed step over what is not computed yet and sample. Mutates the worker's pool and ``running``."""
        chunks = [SequenceChunk(s.token_ids[s.num_computed_tokens :], s.num_computed_tokens, s.pages) for s in running]
        inputs = pack_batch(chunks, self.config.page_size, self.config.device)
        logits = worker.run(StepInputs(inputs, inputs.logit_rows))  # [N, V]
        output = self.sampler(logits, batch)
        steps = []
        for row, (sequence, query_range) in enumerate(zip(running, inputs.metadata.query_ranges, strict=True)):
            token_id = output.token_ids[row]
            error = output.errors.get(row)
            about_prompt = self.prompt_report(sequence, query_range[0], worker)
            sequence.num_computed_tokens = len(sequence.token_ids)
            if error is None:
                sequence.request.output_ids.append(token_id)
            reason: FinishReason | None = "error" if error is not None else self.finish_reason(sequence.request)
            steps.append(
                SampledStep(sequence.index, token_id, logits[row], output.logprobs[row], about_prompt, reason, error)
            )
        return steps

    def prompt_report(
        self, sequence: Running, first_row: int, worker: Worker
    ) -> list[list[TokenLogprob] | None] | None:
        """Return the prompt's log-probabilities if the request asks and this was its prefill.

        Its prompt's rows begin with the packed row ``first_row``; those that a resumed request had written follow.
        """
        count = sequence.request.params.prompt_logprobs
        if count is None or sequence.num_computed_tokens > 0:
            return None
        prompt_ids = sequence.request.prompt_ids
        rows = torch.arange(first_row, first_row + len(prompt_ids), device=self.config.device)
        return prompt_logprobs(worker.more(rows), prompt_ids, count)

    def finish_reason(self, request: SampledRequest) -> FinishReason | None:
        """Return why ``request`` ends with its newest token, ``None`` if it goes on. A stop token wins over length."""
        params = request.params
        if request.output_ids[-1] in stop_token_ids(params.stop_token_ids, params.ignore_eos, self.vocabulary):
            return "stop"
        return "length" if len(request.output_ids) >= params.max_new_tokens else None

    def check_request(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        """Raise ``ValueError`` as the greedy driver does, and for a request that is longer than ``max_model_len``."""
        window, wanted = self.model.config.sliding_window, len(prompt_ids) + max_new_tokens
        if window is not None and wanted > window:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens and max_new_tokens={max_new_tokens} need {wanted} positions; "
                f"this model attends to the newest {window} alone (sliding_window), which the engine does not compute; "
                "shorten the prompt or ask for fewer tokens"
            )
        super().check_request(prompt_ids, max_new_tokens)
        most = self.config.positions(self.model.config)
        if wanted > most:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens and max_new_tokens={max_new_tokens} need {wanted} positions, "
                f"and max_model_len is {most}; shorten the prompt, ask for fewer tokens or raise max_model_len"
            )

    def check_params(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise ``ValueError``, naming value, limit and remedy, for a request that this driver cannot run."""
        self.check_request(prompt_ids, params.max_new_tokens)
        params.check_vocabulary(self.vocabulary.size)
        check_processors(params.logits_processors, self.vocabulary)
        if params.stop:
            raise ValueError(
                f"stop is {list(params.stop)}: this driver sees token ids and no text, so it cannot look for strings; "
                "give stop_token_ids"
            )
        if params.grammar is not None:
            raise ValueError(
                f"the request has a {params.grammar[0]}, and this driver has no grammars; run it in an Engine, with "
                "grammar_backend set"
            )
        if params.receipt:
            raise ValueError("the request asks for a receipt, and this driver writes none; run it in an Engine")


def sample_params(params: SamplingParams) -> list[SamplingParams]:
    """Return the parameters of each of ``params.num_samples`` sequences, which are requests of their own.

    Sample i has the seed ``seed + i``, as in vLLM; with one seed for all they would be one answer many times. Where the
    likeliest are to be chosen, the chosen tokens' log-probabilities are reported.
    """
    own = params if params.logprobs is not None or params.num_samples == params.n else replace(params, logprobs=0)
    return [
        replace(own, n=1, best_of=None, seed=sample_seed(params.seed, index)) for index in range(params.num_samples)
    ]


def sample_seed(seed: int | None, index: int) -> int | None:
    """Return the seed of sample ``index``: counted up, wrapping around within signed 64-bit numbers."""
    return None if seed is None else (seed + index + 2**63) % 2**64 - 2**63
