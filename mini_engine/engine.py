"""L5: the engine: requests in, tokens and text out, many at a time.

Owns: the step (schedule, forward, sample, update), the text of each request and what is reported. Must not know: how a
batch is chosen (``scheduler``), how a token is chosen (``sampler``), how rows are computed.

    requests ──► Scheduler.schedule() ──► ScheduledBatch ──► pack_batch ──► hidden states of all rows
                                                                                │ rows that sample
       text ◄── Detokenizer ◄── Scheduler.update() ◄── token ids ◄── Sampler ◄──┘ logits
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from mini_engine.attention.allocator import pages_needed
from mini_engine.attention.metadata import SequenceChunk, pack_batch
from mini_engine.attention.pool import KVPool
from mini_engine.config import DEFAULT_POOL_TOKENS
from mini_engine.detokenizer import Detokenizer
from mini_engine.sampler.driver import SamplingDriver, sample_params
from mini_engine.sampler.logprobs import TokenLogprob, token_logprobs
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.rows import SampledRows
from mini_engine.scheduler.policy import make_policy
from mini_engine.scheduler.request import FinishReason, Request, RequestState, RequestTimes
from mini_engine.scheduler.scheduler import ScheduledBatch, ScheduledChunk, Scheduler, SchedulerLimits


@dataclass(frozen=True)
class Delta:
    """What one step added to one request: a token, the text that can be shown now, and how it ended if it did.

    ``token_id`` is ``None`` when a request ends without one (an abort or an error, which ``error`` explains).
    ``logits`` [V] is the row the token came from.
    """

    request_id: str
    token_id: int | None
    text: str
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    logits: Tensor | None = None
    error: str | None = None


@dataclass(frozen=True)
class StepOutput:
    """One step of the engine, as the event log keeps it.

    ``chunks``: request id, first position and number of tokens of every piece that was computed. ``seconds``: the parts
    "schedule", "forward", "sample" and "update" of a step that began at ``began``.
    """

    number: int
    began: float
    seconds: dict[str, float]
    deltas: list[Delta]
    chunks: list[tuple[str, int, int]]
    preempted: list[str]
    num_running: int
    num_waiting: int
    num_pages_used: int


class Laps:
    """A stopwatch: seconds from one mark to the next, by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start now."""
        self.clock, self.began, self.seconds = clock, clock(), dict[str, float]()
        self.last = self.began

    def mark(self, name: str) -> None:
        """End the lap ``name`` here. Mutates."""
        now = self.clock()
        self.seconds[name], self.last = now - self.last, now


@dataclass
class RequestOutput:
    """A request's answer so far."""

    request_id: str
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    matched: int | str | None = None
    error: str | None = None
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    times: RequestTimes | None = None
    num_preemptions: int = 0

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the chosen tokens' log-probabilities, of those that were reported."""
        return sum(entries[0].logprob for entries in self.logprobs)


@dataclass
class Entry:
    """Everything that the engine keeps about one request beside the scheduler's part.

    ``unread``: the deltas that its stream has not given out yet, ``None`` if nobody streams it.
    """

    request: Request
    output: RequestOutput
    detokenizer: Detokenizer | None
    unread: deque[Delta] | None = None


class Engine:
    """Runs many requests over one model. Not thread-safe: one caller steps it."""

    def __init__(
        self, driver: SamplingDriver, tokenizer: Tokenizer | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Serve with ``driver``'s model, sampler and configuration; without a ``tokenizer`` there is no text."""
        config, model = driver.config, driver.model
        longest = model.config.max_position_embeddings
        tokens = min(config.max_running_requests * longest, max(DEFAULT_POOL_TOKENS, longest))
        num_pages = config.num_pages or pages_needed(tokens, config.page_size)
        limits = SchedulerLimits(config.max_running_requests, config.max_tokens_per_step, config.preemption)
        self.driver, self.tokenizer, self.clock = driver, tokenizer, clock
        self.scheduler = Scheduler(num_pages, config.page_size, limits, make_policy(config.policy))
        self.pool = KVPool(model.config, num_pages, config.page_size, model.embedding.dtype, config.device)
        self.rows: SampledRows[Request] = SampledRows(driver.vocabulary, config.device)
        self.entries: dict[str, Entry] = {}
        self.deltas: list[Delta] = []  # of the step in progress
        self.numbers, self.arrivals = count(), count()

    def add_request(self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
        """Queue a request and return its id. Raises ``ValueError`` for one that cannot be run; the others go on."""
        # A number that a caller chose as an id is passed over when the engine chooses.
        arrival = next(n for n in self.arrivals if request_id is not None or str(n) not in self.entries)
        name = str(arrival) if request_id is None else request_id
        if name in self.entries:
            raise ValueError(f"there is a request {name!r} already; give another id")
        if params.num_samples > 1:
            raise ValueError(f"{params.num_samples} samples are several requests; use generate")
        self.driver.check_params(prompt_ids, replace(params, stop=()))
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer and this engine has none; give stop_token_ids")
        request = Request(name, list(prompt_ids), params, arrival, RequestTimes(self.clock()))
        self.scheduler.add(request)
        text = Detokenizer(self.tokenizer, params.stop, params.min_new_tokens) if self.tokenizer else None
        output = RequestOutput(name, list(prompt_ids), times=request.times)
        self.entries[name] = Entry(request, output, text)
        return name

    def abort(self, request_id: str) -> None:
        """End a request at once, wherever it is. Unknown and finished ones are passed over. Mutates."""
        entry = self.entries.get(request_id)
        if entry is not None and entry.request.state is not RequestState.FINISHED:
            self.end(entry, "abort")

    def step(self) -> StepOutput:
        """Compute one batch. With no request waiting or running there is nothing in it. Mutates."""
        laps = Laps(self.clock)
        batch = self.scheduler.schedule()
        laps.mark("schedule")
        if batch.chunks:
            self.compute(batch, laps)
        deltas, self.deltas = self.deltas, []
        allocator = self.scheduler.allocator
        return StepOutput(
            number=next(self.numbers),
            began=laps.began,
            seconds=laps.seconds,
            deltas=deltas,
            chunks=[(c.request.request_id, c.start, c.num_tokens) for c in batch.chunks],
            preempted=[request.request_id for request in batch.preempted],
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_pages_used=allocator.num_pages - allocator.num_free,
        )

    def compute(self, batch: ScheduledBatch, laps: Laps) -> None:
        """Run the model over a batch, sample where a chunk reaches the newest token, take the tokens in. Mutates."""
        inputs = pack_batch([packed(c) for c in batch.chunks], self.scheduler.page_size, self.driver.config.device)
        hidden = self.driver.hidden_states(inputs, self.pool)  # [T, H]
        for chunk, query_range in zip(batch.chunks, inputs.metadata.query_ranges, strict=True):
            if chunk.request.times.started is None:
                chunk.request.times.started = laps.began
            self.report_prompt(chunk, hidden[slice(*query_range)])
        requests = self.rows.follow([chunk.request for chunk in batch.chunks if chunk.samples])
        place = {chunk.request.request_id: row for row, chunk in enumerate(batch.chunks)}
        # Before the head: only the rows that sample.
        rows = inputs.logit_rows[[place[request.request_id] for request in requests]]
        logits = self.driver.logits(hidden, rows)  # [N, V]
        laps.mark("forward")
        output = self.driver.sampler(logits, self.rows.batch)
        laps.mark("sample")
        for row, reason in output.errors.items():
            self.pool.fill(requests[row].pages, 0.0)  # so that no NaN is left for whoever comes next
            self.end(self.entries[requests[row].request_id], "error", reason)
        tokens = {r.request_id: token for r, token in zip(requests, output.token_ids, strict=True)}
        self.scheduler.update(batch, tokens)
        self.rows.cumulate([None if row in output.errors else token for row, token in enumerate(output.token_ids)])
        for row, request in enumerate(requests):
            if row not in output.errors:
                self.take_token(
                    request,
                    Delta(request.request_id, tokens[request.request_id], "", output.logprobs[row], None, logits[row]),
                )
        laps.mark("update")

    def report_prompt(self, chunk: ScheduledChunk, hidden: Tensor) -> None:
        """Add the log-probabilities of the prompt tokens that this chunk's rows predict. ``hidden`` [n, H]. Mutates.

        Row i of the chunk predicts the token after it; what was reported before a preemption is not repeated.
        """
        request, output = chunk.request, self.entries[chunk.request.request_id].output
        wanted = request.params.prompt_logprobs
        first, last = chunk.start, min(chunk.start + chunk.num_tokens, request.num_prompt_tokens - 1)
        if wanted is None or len(output.prompt_logprobs or ()) > last:
            return
        known = [None] if output.prompt_logprobs is None else output.prompt_logprobs
        skip, tokens = len(known) - 1 - first, request.tokens(len(known), last + 1)
        assert skip >= 0, f"rows that predict tokens {len(known)} to {first} were never computed"
        table = []
        if tokens:
            logits = self.driver.logits(hidden[skip:], None)[: len(tokens)]
            ids = torch.tensor(tokens, device=logits.device)
            table = token_logprobs(logits.float().log_softmax(-1), ids, [wanted] * len(tokens))
        output.prompt_logprobs = [*known, *table]

    def take_token(self, request: Request, delta: Delta) -> None:
        """Give a new token to its request: time, text, and whether it was the last. Mutates."""
        entry = self.entries[request.request_id]
        assert delta.token_id is not None, "a delta without a token is made by end()"
        request.times.tokens.append(self.clock())
        entry.output.token_ids.append(delta.token_id)
        if delta.logprobs is not None:
            entry.output.logprobs.append(delta.logprobs)
        text = entry.detokenizer.add(delta.token_id) if entry.detokenizer else ""
        entry.output.text += text
        delta = replace(delta, text=text)
        reason, request.matched = self.ending(request, entry)
        if reason is None:
            self.report(entry, delta)
        else:
            self.end(entry, reason, last=delta)

    def ending(self, request: Request, entry: Entry) -> tuple[FinishReason | None, int | str | None]:
        """Return why a request ends with its newest token and what matched. A stop string goes before a stop token."""
        if entry.detokenizer is not None and entry.detokenizer.matched is not None:
            return "stop", entry.detokenizer.matched
        reason = self.driver.finish_reason(request)
        return reason, request.output_ids[-1] if reason == "stop" else None

    def report(self, entry: Entry, delta: Delta) -> None:
        """Put a delta where the step's caller and the request's stream find it. Mutates."""
        self.deltas.append(delta)
        if entry.unread is not None:
            entry.unread.append(delta)

    def end(self, entry: Entry, reason: FinishReason, error: str | None = None, last: Delta | None = None) -> None:
        """End a request: free its pages, give out the rest of its text with its ``last`` token. Mutates."""
        request, output = entry.request, entry.output
        self.scheduler.finish(request, reason)
        request.error, request.times.finished = error, self.clock()
        rest = entry.detokenizer.flush() if entry.detokenizer else ""
        output.text += rest
        if entry.detokenizer is not None and entry.detokenizer.matched is not None and reason == "length":
            request.finish_reason, request.matched = "stop", entry.detokenizer.matched
        output.finish_reason, output.matched, output.error = request.finish_reason, request.matched, error
        output.num_preemptions = request.num_preemptions
        last = last or Delta(request.request_id, None, "", error=error)
        self.report(entry, replace(last, text=last.text + rest, finish_reason=request.finish_reason))

    def take_output(self, request_id: str) -> RequestOutput:
        """Return the answer of a finished request and forget it. Mutates.

        Raises ``KeyError`` for an unknown id and ``ValueError`` for a request that has not ended.
        """
        if self.entries[request_id].request.state is not RequestState.FINISHED:
            raise ValueError(f"request {request_id!r} has not ended; step on, or abort it first")
        return self.entries.pop(request_id).output

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        progress: bool = False,
    ) -> list[list[RequestOutput]]:
        """Run all ``prompts`` and return, in their order, the ``n`` answers of each.

        A request that cannot be run has one answer with ``finish_reason`` "error" that says why; the others go on.
        When something is raised on the way (Ctrl-C in a notebook), nothing of the list stays behind in the engine.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(each)} parameters; give one for all or one for each")
        names: list[list[str]] = []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                names.append(self.add_samples(prompt, own))
            self.finish([name for own in names for name in own], progress)
            answers = [[self.take_output(name) for name in own] for own in names]
        finally:
            for name in (name for own in names for name in own):
                self.abort(name)
                self.entries.pop(name, None)
        return [best(samples, own.n) for samples, own in zip(answers, each, strict=True)]

    def finish(self, names: Sequence[str], progress: bool) -> None:
        """Step until all of these requests have ended; others run along. Mutates."""
        left = {name for name in names if self.entries[name].request.state is not RequestState.FINISHED}
        with tqdm(total=len(names), initial=len(names) - len(left), disable=not progress, unit="answer") as bar:
            while left:
                ended = {delta.request_id for delta in self.step().deltas if delta.finish_reason is not None}
                bar.update(len(left & ended))
                left -= ended

    def add_samples(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[str]:
        """Queue every sample of a request and return their ids.

        A request that is refused becomes a finished one, so that its place in a list of answers is not lost.
        """
        names = []
        for one in sample_params(params):
            try:
                names.append(self.add_request(prompt_ids, one))
            except ValueError as error:
                names.append(self.refuse(prompt_ids, one, str(error)))
                break
        return names

    def refuse(self, prompt_ids: Sequence[int], params: SamplingParams, error: str) -> str:
        """Keep a finished request that was never queued, with the reason; return its id. Mutates."""
        name = f"refused {next(self.arrivals)}"
        request = Request(
            name, list(prompt_ids), params, state=RequestState.FINISHED, finish_reason="error", error=error
        )
        output = RequestOutput(name, list(prompt_ids), finish_reason="error", error=error)
        self.entries[name] = Entry(request, output, None)
        return name

    def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generator[Delta, None, None]:
        """Yield the deltas of one request as they come; other requests run along. Closing the iterator aborts it.

        Raises ``ValueError`` for a request that cannot be run.
        """
        name = self.add_request(prompt_ids, params)
        deltas = self.deltas_of(name)
        next(deltas)  # a generator that never began would not abort when it is closed
        return deltas

    def deltas_of(self, request_id: str) -> Generator[Delta, None, None]:
        """Yield an empty delta for the start, then the request's own until it ends; step when there is none."""
        entry = self.entries[request_id]
        entry.unread = unread = deque[Delta]()  # another stream's step may bring some of ours
        try:
            yield Delta(request_id, None, "")
            while unread or entry.request.state is not RequestState.FINISHED:
                if unread:
                    yield unread.popleft()
                else:
                    self.step()
        finally:
            self.abort(request_id)
            self.entries.pop(request_id, None)


def packed(chunk: ScheduledChunk) -> SequenceChunk:
    """Return a scheduled chunk in the form of ``pack_batch``."""
    request = chunk.request
    return SequenceChunk(request.tokens(chunk.start, chunk.start + chunk.num_tokens), chunk.start, request.pages)


def best(samples: list[RequestOutput], n: int) -> list[RequestOutput]:
    """Return the ``n`` likeliest of ``samples``, in their order; failed ones come last."""
    likeliest = sorted(samples, key=lambda s: (s.error is not None, -s.cumulative_logprob))[:n]
    return [sample for sample in samples if sample in likeliest]
