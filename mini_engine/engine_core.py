"""L5: the step of the engine: requests go in, and each step gives tokens and text of many requests.

The parts it puts together decide everything else: the scheduler chooses the batch, the worker computes the rows, the
sampler chooses the tokens, and constraints limit the answers.

    requests ──► Scheduler.schedule() ──► ScheduledBatch ──► pack_batch ──► Worker.run(), the model
                                                                                │ logits of the rows that sample
       text ◄── Detokenizer ◄── Scheduler.update() ◄── token ids ◄── Sampler ◄──┘
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mini_engine.attention.allocator import PageAllocator
from mini_engine.attention.metadata import BatchInputs, SequenceChunk, pack_batch, slots_of
from mini_engine.constraints import ConstraintError, Constraints, NoConstraints
from mini_engine.detokenizer import Detokenizer
from mini_engine.outputs import Delta, RequestOutput, StepLog, StepOutput
from mini_engine.sampler.driver import SamplingDriver, StepInputs
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.rows import SampledRows, isolating
from mini_engine.sampler.sampler import SamplerOutput
from mini_engine.scheduler.drafts import Drafter, make_drafting, steps_ahead, with_drafts
from mini_engine.scheduler.policy import make_policy
from mini_engine.scheduler.prefix_cache import PrefixCache
from mini_engine.scheduler.request import NO_OPTIONS, FinishReason, Request, RequestOptions, RequestState, RequestTimes
from mini_engine.scheduler.scheduler import Allocator, ScheduledBatch, ScheduledChunk, Scheduler, SchedulerLimits
from mini_engine.scoring import check_scoring, given_tokens, report

IDLE_S = 0.005  # how long a step without other work waits for a constraint


@dataclass
class Entry:
    """What the engine keeps of one request.

    ``unread``: deltas that the request's stream has not yielded yet; ``None`` without a stream.
    """

    request: Request
    output: RequestOutput
    detokenizer: Detokenizer | None
    unread: deque[Delta] | None = None


class EngineCore:
    """Takes requests and computes them step by step. Not thread-safe: one caller steps it."""

    def __init__(
        self,
        driver: SamplingDriver,
        tokenizer: Tokenizer | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        allocator: Callable[[int], Allocator] = PageAllocator,
        prefix_cache: PrefixCache | None = None,
        constraints: Constraints | None = None,
        drafter: Callable[[], Drafter] | None = None,
    ) -> None:
        """Use the model, the sampler and the configuration of ``driver``; without a ``tokenizer`` there is no text.

        ``clock`` returns seconds. ``allocator`` is called with the number of pages and returns the page allocator.
        ``drafter`` is called for each request with drafts="own". ``llm.make_engine`` builds every part that the
        configuration asks for. Raises ``ValueError`` if the configuration asks for a prefix cache, for grammars or for
        a drafter and the part is not given.
        """
        config = driver.config
        config.check_parts(prefix_cache is not None, constraints is not None)
        num_pages = config.pool_pages(driver.model.config)
        limits = SchedulerLimits.from_config(config)
        policy = make_policy(config.policy, config.policy_seed)
        self.driver = driver
        self.tokenizer = tokenizer
        self.clock = clock
        self.worker = driver.make_worker(num_pages)
        self.scheduler = Scheduler(
            num_pages, config.page_size, limits, policy, prefix_cache, allocator=allocator(num_pages)
        )
        self.rows: SampledRows[Request] = SampledRows(driver.vocabulary, config.device)
        self.constraints: Constraints = constraints or NoConstraints()
        self.entries: dict[str, Entry] = {}
        self.stale: list[int] = []  # pages that the next step clears: no NaN may reach their next owner
        self.log = StepLog(clock)
        self.deltas: list[Delta] = []  # for the next StepOutput
        self.forced: dict[str, int] = {}  # tokens that constraints have appended, also for the next StepOutput
        self.accepted: dict[str, int] = {}  # drafted tokens that have come, also for the next StepOutput
        self.arrivals = count()
        self.drafting = make_drafting(config, self.scheduler, driver.vocabulary.size, drafter)
        self.begin_receipts: Callable[[], None] = no_receipts  # called when a request asks for one

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        options: RequestOptions = NO_OPTIONS,
        siblings: Sequence[Request] = (),
    ) -> str:
        """Queue a request and return its id. Raises ``ValueError`` for one that cannot be run; the others go on.

        ``siblings``: the requests with the same prompt that share one prefill; ``Engine.add_samples`` fills the list.
        """
        # A caller may have chosen a number as an id: skip it.
        arrival = next(n for n in self.arrivals if request_id is not None or str(n) not in self.entries)
        name = str(arrival) if request_id is None else request_id
        if name in self.entries:
            raise ValueError(f"there is a request {name!r} already; give another id")
        if params.num_samples > 1:
            raise ValueError(f"{params.num_samples} samples are several requests; use generate")
        check_scoring(params, options)
        self.driver.check_params(prompt_ids, params.for_ids)
        self.constraints.check(params)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer and this engine has none; give stop_token_ids")
        text = Detokenizer(self.tokenizer, params.stop, params.min_new_tokens) if self.tokenizer else None
        times = RequestTimes(self.clock())
        request = Request(name, list(prompt_ids), params, arrival, times, siblings=siblings, options=options)
        self.scheduler.check_fits(request)
        if params.receipt:
            self.begin_receipts()
        if not self.constraints.submit(request):
            self.scheduler.add(request)
        self.entries[name] = Entry(request, RequestOutput(name, list(prompt_ids), times=times), text)
        return name

    def abort(self, request_id: str) -> None:
        """End a request at once, in any state. Does nothing for an unknown or finished request. Mutates."""
        entry = self.entries.get(request_id)
        if entry is not None and entry.request.state is not RequestState.FINISHED:
            self.finish(entry, "abort")

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs; one may wait for its constraint."""
        return self.scheduler.has_work or self.constraints.num_waiting > 0

    def step(self) -> StepOutput:
        """Compute one batch: a sampled token for each running request, and more where its draft is right. Mutates.

        If no request waits or runs, the output is empty.
        """
        self.log.begin()
        batch = self.schedule()
        self.log.mark("schedule")
        if batch.chunks:
            logits = self.forward(batch if self.drafting is None else with_drafts(batch))
            self.log.mark("forward")
            if self.drafting is not None:
                logits, ahead = logits.tensor_split([len(batch.sampling)])  # [N, V], [D, V]
            sampled = self.sample(batch.sampling, logits)
            self.log.mark("sample")
            self.update(batch, logits, sampled)
            if self.drafting is not None:
                self.follow(batch, ahead)
                self.drafting.give_back(batch)
            self.log.mark("update")
        parts = self.deltas, self.forced, self.constraints.num_waiting, self.accepted
        output = self.log.end(batch, self.scheduler, *parts)
        self.deltas = []
        self.forced = {}
        self.accepted = {}
        return output

    def schedule(self) -> ScheduledBatch:
        """Choose the requests of this step and their tokens. A request whose constraint is ready may start. Mutates."""
        if self.constraints.num_waiting:
            ready, failed = self.constraints.admit(0.0 if self.scheduler.has_work else IDLE_S)
            for name in ready:
                self.scheduler.add(self.entries[name].request)
            for name, reason in failed.items():
                self.finish(self.entries[name], "error", reason)
        batch = self.scheduler.schedule()
        if self.drafting is not None:
            trace = self.driver.sampler.trace
            if trace is None or trace.keeps_calls:
                batch = self.drafting.extend(batch)
        for chunk in batch.chunks:
            if chunk.request.times.started is None:
                chunk.request.times.started = self.log.began
                self.entries[chunk.request.request_id].output.num_cached_tokens = chunk.start
        return batch

    def forward(self, batch: ScheduledBatch) -> Tensor:
        """Compute all rows of ``batch`` -> logits [N, V], one row for each request of ``batch.sampling``. Mutates."""
        copies = [self.copy_prefix(chunk, chunk.copied_from) for chunk in batch.chunks if chunk.copied_from is not None]
        inputs = pack_batch([packed(c) for c in batch.chunks], self.scheduler.page_size, self.driver.config.device)
        rows = [row for row, chunk in enumerate(batch.chunks) if chunk.samples]
        logits = self.worker.run(StepInputs(inputs, inputs.logit_rows[rows], copies, self.stale))
        self.stale = []
        self.score_given(batch, inputs)
        return logits

    def copy_prefix(self, chunk: ScheduledChunk, source: Request) -> tuple[Tensor, Tensor]:
        """Return the slots [n] of the sibling ``source``, and those of the chunk's request to copy them to. Mutates.

        What is known about their prompt is copied here.
        """
        stretch = (chunk.start - chunk.num_copied, chunk.start, self.scheduler.page_size)
        device = self.driver.config.device
        theirs, own = (torch.tensor(slots_of(r.pages, *stretch), device=device) for r in (source, chunk.request))
        output, known = (self.entries[r.request_id].output for r in (chunk.request, source))
        if known.prompt_logprobs is not None and len(known.prompt_logprobs) > len(output.prompt_logprobs or ()):
            output.prompt_logprobs = list(known.prompt_logprobs)
        return theirs, own

    def score_given(self, batch: ScheduledBatch, inputs: BatchInputs) -> None:
        """Report log-probabilities of prompt tokens and forced tokens where asked. Mutates.

        The head computes all their rows at once. The rows that sample had a call of their own, whose bits do not depend
        on what is reported.
        """
        given = []
        for chunk, (first, _) in zip(batch.chunks, inputs.metadata.query_ranges, strict=True):
            params = chunk.request.params
            if params.prompt_logprobs is not None or params.logprobs is not None:
                given += given_tokens(chunk, self.entries[chunk.request.request_id].output, first)
        if given:
            rows = torch.tensor([row for one in given for row in one.rows], device=self.driver.config.device)
            report(given, self.worker.more(rows))

    @isolating
    def sample(self, requests: Sequence[Request], logits: Tensor) -> SamplerOutput:
        """Choose the next token of each of ``requests`` from its row of ``logits`` [N, V]. Mutates."""
        self.rows.sync(requests)
        self.rows.batch.final_mask = self.constraints.mask(requests)
        output = self.driver.sampler(logits, self.rows.batch)
        self.rows.cumulate([None if row in output.errors else token for row, token in enumerate(output.token_ids)])
        return output

    def update(self, batch: ScheduledBatch, logits: Tensor, sampled: SamplerOutput) -> None:
        """Give each request its token, and end the requests that have an error. ``logits`` [N, V]. Mutates.

        At the end ``append_forced`` appends what constraints force.
        """
        requests = batch.sampling
        for row, reason in sampled.errors.items():
            self.finish(self.entries[requests[row].request_id], "error", reason)
        tokens = {r.request_id: [token] for r, token in zip(requests, sampled.token_ids, strict=True)}
        self.scheduler.update(batch, tokens)
        for row, (request, its_logits) in enumerate(zip(requests, logits.unbind(), strict=True)):
            if row not in sampled.errors:
                delta = Delta(request.request_id, sampled.token_ids[row], "", sampled.logprobs[row], None, its_logits)
                self.take_token(request, delta)
        for request in requests:
            if request.state is not RequestState.FINISHED:
                self.append_forced(request)

    def follow(self, batch: ScheduledBatch, logits: Tensor) -> None:
        """Go on with each request that has got the token it had drafted, a row at a time. Mutates.

        ``logits`` [D, V]: of all drafted tokens. Each row is sampled and taken in as in a step of its own: only the
        forward pass is not needed any more.
        """
        for chunk in batch.chunks:
            self.entries[chunk.request.request_id].output.num_drafted += len(chunk.draft)
        for ahead, rows in steps_ahead(batch):
            own = logits[rows]
            self.update(ahead, own, self.sample(ahead.sampling, own))
            for request in ahead.sampling:
                self.accepted[request.request_id] = self.accepted.get(request.request_id, 0) + 1
                self.entries[request.request_id].output.num_accepted += 1

    def append_forced(self, request: Request) -> None:
        """Append the tokens that a request's constraint forces after the newest one. Mutates."""
        num_forced = 0
        try:
            for token in self.constraints.forced(request):
                request.output_ids.append(token)
                self.take_token(request, Delta(request.request_id, token, ""))
                num_forced += 1
                if request.state is RequestState.FINISHED:
                    break
        except ConstraintError as error:
            self.finish(self.entries[request.request_id], "error", str(error))
        if num_forced:
            self.forced[request.request_id] = num_forced
            self.rows.forget(request)  # it is built again from its history, with what was appended

    def take_token(self, request: Request, delta: Delta) -> None:
        """Give a new token to its request: note the time, decode the text, end the request if it was the last. Mutates.

        ``finish_reason`` says whether it was. A token that it refuses ends the request with "error" and adds no text.
        A ``score_only`` request ends with "length" and gets no token.
        """
        entry = self.entries[request.request_id]
        assert delta.token_id is not None, "a delta without a token is made by finish()"
        if request.options.score_only:
            self.finish(entry, "length")
            return
        request.times.tokens.append(self.clock())
        entry.output.token_ids.append(delta.token_id)
        if delta.logprobs is not None:
            entry.output.logprobs.append(delta.logprobs)
        try:
            reason = self.finish_reason(request, delta.token_id)
            text = ""
        except ConstraintError as error:
            self.finish(entry, "error", str(error), last=delta)
            return
        if reason == "stop":
            request.matched = delta.token_id  # a stop token is in the ids and not in the text
        elif entry.detokenizer is not None:
            text = entry.detokenizer.add(delta.token_id)
            request.matched = entry.detokenizer.matched
            reason = "stop" if request.matched is not None else reason
        entry.output.text += text
        last = replace(delta, text=text) if text else delta
        if reason is None:
            self.report(entry, last)
        else:
            self.finish(entry, reason, last=last)

    def finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        """Give the token to the request's constraint; return why the request ends, ``None`` if it goes on. Mutates.

        The constraint comes first: a grammar that is complete ends its request in the same step, also with
        ``ignore_eos``, so that no unmasked token follows. Raises ``ConstraintError``.
        """
        return "stop" if self.constraints.accept(request, token_id) else self.driver.finish_reason(request)

    def report(self, entry: Entry, delta: Delta) -> None:
        """Add a delta to the output of the step and to the request's stream. Mutates."""
        self.deltas.append(delta)
        if entry.unread is not None:
            entry.unread.append(delta)

    def finish(self, entry: Entry, reason: FinishReason, error: str | None = None, last: Delta | None = None) -> None:
        """End a request: ``release`` it, fill in its output, report ``last`` with the rest of its text. Mutates.

        Notes the time in ``times.finished``. Calls ``report_constraint`` once the reason is final.
        """
        request, output = entry.request, entry.output
        self.release(request, reason)
        request.error = error
        request.times.finished = self.clock()
        rest = entry.detokenizer.flush() if entry.detokenizer else ""
        output.text += rest
        if entry.detokenizer is not None and entry.detokenizer.matched is not None and reason == "length":
            request.finish_reason = "stop"
            request.matched = entry.detokenizer.matched
        output.finish_reason = request.finish_reason
        output.matched = request.matched
        output.error = error
        output.num_preemptions = request.num_preemptions
        self.report_constraint(entry)
        last = last or Delta(request.request_id, None, "")
        self.report(entry, replace(last, text=last.text + rest, finish_reason=request.finish_reason, error=error))

    def release(self, request: Request, reason: FinishReason) -> None:
        """Take a request out of the scheduler, or out of the constraints it waits for, and free its pages. Mutates.

        Pages that an error has freed are ``stale``; those that it shares with the prefix cache may be free then too.
        """
        pages = request.pages
        if self.constraints.drop(request):  # it has not reached the scheduler
            request.state = RequestState.FINISHED
            request.finish_reason = reason
        else:
            self.scheduler.finish(request, reason)
        if reason == "error":
            self.stale += [page for page in pages if self.scheduler.allocator.is_free(page)]

    def report_constraint(self, entry: Entry) -> None:
        """Add the report of a request's constraint to the output, after ``matched`` and the reason are set. Mutates."""
        report = self.constraints.finish(entry.request)
        if report is not None:
            entry.output.grammar_stats, entry.output.is_grammar_complete = report

    def close(self) -> None:
        """Abort every request that has not ended, and cancel constraints that are not begun. Mutates."""
        for name in list(self.entries):
            self.abort(name)
        self.constraints.close()


def no_receipts() -> None:
    """Raise ``ValueError``; it is ``EngineCore.begin_receipts`` unless the driver knows its checkpoint's folder."""
    raise ValueError(
        "receipt is True, but this engine does not know the files of its checkpoint; use LLM, or leave receipt out"
    )


def packed(chunk: ScheduledChunk) -> SequenceChunk:
    """Return a scheduled chunk in the form that ``pack_batch`` takes."""
    request = chunk.request
    return SequenceChunk(request.tokens(chunk.start, chunk.start + chunk.num_tokens), chunk.start, request.pages)
