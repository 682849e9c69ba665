"""L5: the engine: requests in, tokens and text out, many at a time.

Owns: the step (schedule, forward, sample, update), the text of each request and what is reported. Must not know: how a
batch is chosen (``scheduler``), how a token is chosen (``sampler``), how rows are computed, what limits an answer.

    requests ──► Scheduler.schedule() ──► ScheduledBatch ──► pack_batch ──► hidden states of all rows
                                                                                │ rows that sample
       text ◄── Detokenizer ◄── Scheduler.update() ◄── token ids ◄── Sampler ◄──┘ logits
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from mini_engine.attention.allocator import PageAllocator, pages_needed
from mini_engine.attention.metadata import BatchInputs, SequenceChunk, pack_batch, slots_of
from mini_engine.attention.pool import KVPool
from mini_engine.config import DEFAULT_POOL_TOKENS, EngineConfig, ModelConfig
from mini_engine.constraints import ConstraintError, Constraints, NoConstraints
from mini_engine.detokenizer import Detokenizer
from mini_engine.outputs import Delta, RequestOutput, StepLog, StepOutput, best, phase
from mini_engine.sampler.driver import SamplingDriver, sample_params
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.rows import SampledRows, isolating
from mini_engine.sampler.sampler import SamplerOutput
from mini_engine.scheduler.policy import make_policy
from mini_engine.scheduler.prefix_cache import PrefixCache
from mini_engine.scheduler.request import FinishReason, Request, RequestState, RequestTimes
from mini_engine.scheduler.scheduler import Allocator, ScheduledBatch, ScheduledChunk, Scheduler, SchedulerLimits
from mini_engine.scheduler.sharing import SharingLimits
from mini_engine.scoring import score_forced, score_prompt

QUEUED = 1024  # answers of ``generate`` that wait or run; the scheduler looks at all who wait, in every step
IDLE_S = 0.005  # how long a step waits for a constraint when there is nothing else to do


@dataclass
class Entry:
    """Everything that the engine keeps about one request beside the scheduler's part.

    ``unread``: the deltas that its stream has not given out yet, ``None`` without a stream.
    """

    request: Request
    output: RequestOutput
    detokenizer: Detokenizer | None
    unread: deque[Delta] | None = None


class Engine:
    """Runs many requests over one model. Not thread-safe: one caller steps it."""

    def __init__(
        self,
        driver: SamplingDriver,
        tokenizer: Tokenizer | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        allocator: Callable[[int], Allocator] = PageAllocator,
        prefix_cache: PrefixCache | None = None,
        constraints: Constraints | None = None,
    ) -> None:
        """Serve with ``driver``'s model, sampler and configuration; without a ``tokenizer`` there is no text.

        ``allocator`` makes what hands out the pool's pages. ``llm.make_engine`` gives all parts that the configuration
        asks for. Raises ``ValueError`` if it asks for a prefix cache or grammars and they are not given.
        """
        config, model = driver.config, driver.model
        check_parts(config, prefix_cache, constraints)
        num_pages = config.num_pages or default_pages(config, model.config)
        sharing = SharingLimits(config.wait_for_prefix, config.wait_below_match)
        limits = SchedulerLimits(
            config.max_running_requests, config.max_tokens_per_step, config.preemption, config.max_steps_waited, sharing
        )
        policy = make_policy(config.policy, config.policy_seed)
        self.driver, self.tokenizer, self.clock = driver, tokenizer, clock
        self.pool = KVPool(model.config, num_pages, config.page_size, model.embedding.dtype, config.device)
        self.scheduler = Scheduler(
            num_pages, config.page_size, limits, policy, prefix_cache, allocator=allocator(num_pages)
        )
        self.rows: SampledRows[Request] = SampledRows(driver.vocabulary, config.device)
        self.constraints: Constraints = constraints or NoConstraints()
        self.entries: dict[str, Entry] = {}
        self.log = StepLog(clock)
        self.deltas: list[Delta] = []  # of the step in progress, and
        self.forced: dict[str, int] = {}  # how many tokens constraints appended in it
        self.arrivals = count()

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        cache_key: str | None = None,
        cache_priority: int = 0,
        siblings: Sequence[Request] = (),
    ) -> str:
        """Queue a request and return its id. Raises ``ValueError`` for one that cannot be run; the others go on.

        ``cache_key``: only requests with the same one share pages of the prefix cache. ``cache_priority``: pages of
        higher ones stay longer with ``eviction="priority"``. ``siblings``: the requests with the same prompt that share
        one prefill; ``add_samples`` fills it.
        """
        # A number that a caller chose as an id is passed over when the engine chooses.
        arrival = next(n for n in self.arrivals if request_id is not None or str(n) not in self.entries)
        name = str(arrival) if request_id is None else request_id
        if name in self.entries:
            raise ValueError(f"there is a request {name!r} already; give another id")
        if params.num_samples > 1:
            raise ValueError(f"{params.num_samples} samples are several requests; use generate")
        if cache_priority < 0:
            raise ValueError(f"cache_priority is {cache_priority}; the least is 0, and higher ones stay longer")
        self.driver.check_params(prompt_ids, params.for_ids)
        self.constraints.check(params)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer and this engine has none; give stop_token_ids")
        times = RequestTimes(self.clock())
        request = Request(name, list(prompt_ids), params, arrival, times, siblings=siblings)
        request.cache_key, request.cache_priority = cache_key, cache_priority
        self.scheduler.check_fits(request)
        if not self.constraints.submit(request):
            self.scheduler.add(request)
        text = Detokenizer(self.tokenizer, params.stop, params.min_new_tokens) if self.tokenizer else None
        self.entries[name] = Entry(request, RequestOutput(name, list(prompt_ids), times=times), text)
        return name

    def abort(self, request_id: str) -> None:
        """End a request at once, wherever it is. Unknown and finished ones are passed over. Mutates."""
        entry = self.entries.get(request_id)
        if entry is not None and entry.request.state is not RequestState.FINISHED:
            self.end(entry, "abort")

    @property
    def has_work(self) -> bool:
        """Whether any request waits, for its constraint or for its turn, or runs."""
        return self.scheduler.has_work or self.constraints.num_waiting > 0

    def step(self) -> StepOutput:
        """Compute one batch: at most one sampled token for each running request. Mutates.

        With no request waiting or running there is nothing in it.
        """
        self.log.begin()
        batch = self.schedule()
        if batch.chunks:
            logits = self.forward(batch)
            sampled = self.sample(batch.sampling, logits)
            self.update(batch, logits, sampled)
        deltas, self.deltas, forced, self.forced = self.deltas, [], self.forced, {}
        return self.log.end(batch, self.scheduler, deltas, forced, self.constraints.num_waiting)

    @phase
    def schedule(self) -> ScheduledBatch:
        """Choose who computes what in this step. Requests whose constraint is ready may be among them. Mutates."""
        if self.constraints.num_waiting:
            ready, failed = self.constraints.admit(0.0 if self.scheduler.has_work else IDLE_S)
            for name in ready:
                self.scheduler.add(self.entries[name].request)
            for name, reason in failed.items():
                self.end(self.entries[name], "error", reason)
        batch = self.scheduler.schedule()
        for chunk in batch.chunks:
            if chunk.request.times.started is None:
                chunk.request.times.started = self.log.began
        return batch

    @phase
    def forward(self, batch: ScheduledBatch) -> Tensor:
        """Compute all rows of a batch -> logits [N, V], a row for each request of ``batch.sampling``. Mutates."""
        for chunk in batch.chunks:
            if chunk.copied_from is not None:
                self.copy_prefix(chunk, chunk.copied_from)
        inputs = pack_batch([packed(c) for c in batch.chunks], self.scheduler.page_size, self.driver.config.device)
        hidden = self.driver.hidden_states(inputs, self.pool)  # [T, H]
        self.score_given(batch, inputs, hidden)
        rows = [row for row, chunk in enumerate(batch.chunks) if chunk.samples]
        return self.driver.logits(hidden, inputs.logit_rows[rows])

    def copy_prefix(self, chunk: ScheduledChunk, source: Request) -> None:
        """Give a chunk's request what a sibling has computed of their prompt already. Mutates."""
        stretch = (chunk.start - chunk.num_copied, chunk.start, self.scheduler.page_size)
        slots = [torch.tensor(slots_of(pages, *stretch)) for pages in (source.pages, chunk.request.pages)]
        self.pool.copy(*(own.to(self.driver.config.device) for own in slots))
        output, known = (self.entries[r.request_id].output for r in (chunk.request, source))
        if known.prompt_logprobs is not None and len(known.prompt_logprobs) > len(output.prompt_logprobs or ()):
            output.prompt_logprobs = list(known.prompt_logprobs)

    def score_given(self, batch: ScheduledBatch, inputs: BatchInputs, hidden: Tensor) -> None:
        """Report the log-probabilities of prompt tokens and forced tokens to who asks. ``hidden`` [T, H]. Mutates."""
        for chunk, query_range in zip(batch.chunks, inputs.metadata.query_ranges, strict=True):
            if chunk.request.params.prompt_logprobs is not None or chunk.request.params.logprobs is not None:
                output, rows = self.entries[chunk.request.request_id].output, hidden[slice(*query_range)]
                score_prompt(chunk, output, rows, self.driver.logits)
                score_forced(chunk, output, rows, self.driver.logits)

    @phase
    @isolating
    def sample(self, requests: Sequence[Request], logits: Tensor) -> SamplerOutput:
        """Choose the next token of each of ``requests`` from its row of ``logits`` [N, V]. Mutates."""
        self.rows.follow(requests)
        self.rows.batch.final_mask = self.constraints.mask(requests)
        output = self.driver.sampler(logits, self.rows.batch)
        self.rows.cumulate([None if row in output.errors else token for row, token in enumerate(output.token_ids)])
        return output

    @phase
    def update(self, batch: ScheduledBatch, logits: Tensor, sampled: SamplerOutput) -> None:
        """Give out the tokens of a step, and end the requests that have an error. ``logits`` [N, V]. Mutates.

        Free pages of a request with an error are zeroed. Last, ``append_forced`` appends what constraints force.
        """
        requests = batch.sampling
        for row, reason in sampled.errors.items():
            pages = requests[row].pages
            self.end(self.entries[requests[row].request_id], "error", reason)
            own = [page for page in pages if self.scheduler.allocator.is_free(page)]
            self.pool.fill(own, 0.0)  # so that no NaN is left for whoever comes next
        tokens = {r.request_id: token for r, token in zip(requests, sampled.token_ids, strict=True)}
        self.scheduler.update(batch, tokens)
        for row, (request, its_logits) in enumerate(zip(requests, logits.unbind(), strict=True)):
            if row not in sampled.errors:
                name = request.request_id
                self.take_token(request, Delta(name, tokens[name], "", sampled.logprobs[row], None, its_logits))
        for request in requests:
            if request.state is not RequestState.FINISHED:
                self.append_forced(request)

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
            self.end(self.entries[request.request_id], "error", str(error))
        if num_forced:
            self.forced[request.request_id] = num_forced
            self.rows.forget(request)  # it is built again from its history, with what was appended

    def take_token(self, request: Request, delta: Delta) -> None:
        """Give a new token to its request: time, text, and whether it was the last. Mutates.

        ``finish_reason`` knows whether. A token that it refuses ends the request with "error", and has no text.
        """
        entry = self.entries[request.request_id]
        assert delta.token_id is not None, "a delta without a token is made by end()"
        request.times.tokens.append(self.clock())
        entry.output.token_ids.append(delta.token_id)
        if delta.logprobs is not None:
            entry.output.logprobs.append(delta.logprobs)
        try:
            reason, text = self.finish_reason(request, delta.token_id), ""
        except ConstraintError as error:
            self.end(entry, "error", str(error), last=delta)
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
            self.end(entry, reason, last=last)

    def finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        """Take a token into the request's constraint, and only then ask whether it was the last. Mutates.

        In this order a grammar that has ended ends the request in the same step, also with ``ignore_eos``: nothing can
        follow it unmasked. Raises ``ConstraintError``.
        """
        return "stop" if self.constraints.accept(request, token_id) else self.driver.finish_reason(request)

    def report(self, entry: Entry, delta: Delta) -> None:
        """Put a delta where the step's caller and the request's stream find it. Mutates."""
        self.deltas.append(delta)
        if entry.unread is not None:
            entry.unread.append(delta)

    def end(self, entry: Entry, reason: FinishReason, error: str | None = None, last: Delta | None = None) -> None:
        """End a request: let it ``leave``, give out the rest of its text with its ``last`` token. Mutates.

        ``times.finished`` is when. When the reason is final, ``report_constraint`` reports what limited the answer.
        """
        request, output = entry.request, entry.output
        self.leave(request, reason)
        request.error, request.times.finished = error, self.clock()
        rest = entry.detokenizer.flush() if entry.detokenizer else ""
        output.text += rest
        if entry.detokenizer is not None and entry.detokenizer.matched is not None and reason == "length":
            request.finish_reason, request.matched = "stop", entry.detokenizer.matched
        output.finish_reason, output.matched, output.error = request.finish_reason, request.matched, error
        output.num_preemptions = request.num_preemptions
        self.report_constraint(entry)
        last = last or Delta(request.request_id, None, "")
        self.report(entry, replace(last, text=last.text + rest, finish_reason=request.finish_reason, error=error))

    def leave(self, request: Request, reason: FinishReason) -> None:
        """Finish a request where it waits or runs, and free its pages. Mutates."""
        if self.constraints.drop(request):  # the scheduler never knew it
            request.state = RequestState.FINISHED
            request.finish_reason = reason
        else:
            self.scheduler.finish(request, reason)

    def report_constraint(self, entry: Entry) -> None:
        """Report what a request's constraint says of its answer, once it is known what ended it. Mutates."""
        report = self.constraints.finish(entry.request)
        if report is not None:
            entry.output.grammar_stats, entry.output.is_grammar_complete = report

    def close(self) -> None:
        """Abort what has not ended and give up compiles that have not begun. Mutates."""
        for name in list(self.entries):
            self.abort(name)
        self.constraints.close()

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
        Prompts are queued when fewer than ``QUEUED`` answers are under way, so a long list costs no more for each.
        When something is raised on the way (Ctrl-C in a notebook), nothing of the list stays behind in the engine.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(each)} parameters; give one for all or one for each")
        names: list[list[str]] = []
        left: set[str] = set()
        try:
            with tqdm(total=sum(own.num_samples for own in each), disable=not progress, unit="answer") as bar:
                while len(names) < len(prompts) or left:
                    while len(names) < len(prompts) and len(left) < QUEUED:
                        names.append(self.add_samples(prompts[len(names)], each[len(names)]))
                        left.update(names[-1])
                    left -= (ended := {n for n in left if self.entries[n].request.state is RequestState.FINISHED})
                    bar.update(len(ended))
                    if left:
                        self.step()
            answers = [[self.take_output(name) for name in own] for own in names]
            return [best(samples, own.n) for samples, own in zip(answers, each, strict=True)]
        finally:
            for name in chain.from_iterable(names):
                self.abort(name)
                self.entries.pop(name, None)

    def add_samples(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[str]:
        """Queue every sample of a request and return their ids. Those that run together compute the prompt once.

        A request that is refused becomes a finished one, so that its place in a list of answers is not lost.
        """
        names: list[str] = []
        siblings: list[Request] = []
        for one in sample_params(params):
            try:
                names.append(self.add_request(prompt_ids, one, siblings=siblings))
            except ValueError as error:
                names.append(self.refuse(prompt_ids, one, str(error)))
                break
            siblings.append(self.entries[names[-1]].request)
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


def check_parts(config: EngineConfig, prefix_cache: PrefixCache | None, constraints: Constraints | None) -> None:
    """Raise ``ValueError`` if ``config`` asks for a part that is not given."""
    wants_cache = config.prefix_cache is not None and prefix_cache is None
    if wants_cache or (config.grammar_backend != "none" and constraints is None):
        raise ValueError(
            f"prefix_cache={config.prefix_cache!r} and grammar_backend={config.grammar_backend!r} need parts of later "
            "lessons; build the engine with mini_engine.llm.make_engine"
        )


def default_pages(config: EngineConfig, model: ModelConfig) -> int:
    """Return the default size of the pool in pages: room for all requests that may run, within a limit."""
    longest = model.max_position_embeddings
    tokens = min(config.max_running_requests * longest, max(DEFAULT_POOL_TOKENS, longest))
    return pages_needed(tokens, config.page_size)


def packed(chunk: ScheduledChunk) -> SequenceChunk:
    """Return a scheduled chunk in the form of ``pack_batch``."""
    request = chunk.request
    return SequenceChunk(request.tokens(chunk.start, chunk.start + chunk.num_tokens), chunk.start, request.pages)
