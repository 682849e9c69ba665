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
from dataclasses import dataclass, replace
from itertools import chain, count

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from mini_engine.attention.allocator import pages_needed
from mini_engine.attention.metadata import BatchInputs, SequenceChunk, pack_batch, slots_of
from mini_engine.attention.pool import KVPool
from mini_engine.config import DEFAULT_POOL_TOKENS, EngineConfig
from mini_engine.detokenizer import Detokenizer
from mini_engine.grammar.base import GrammarObject, TokenRefusedError
from mini_engine.grammar.queue import Gather
from mini_engine.grammar.service import GrammarService
from mini_engine.outputs import Delta, Laps, RequestOutput, StepOutput, best, without_logits
from mini_engine.radix_cache import RadixCache
from mini_engine.sampler.batch import SamplingBatch
from mini_engine.sampler.driver import SamplingDriver, sample_params
from mini_engine.sampler.logprobs import token_logprobs
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.rows import SampledRows
from mini_engine.scheduler.policy import make_policy
from mini_engine.scheduler.prefix_cache import NullPrefixCache, PrefixCache
from mini_engine.scheduler.request import FinishReason, Request, RequestState, RequestTimes
from mini_engine.scheduler.scheduler import ScheduledBatch, ScheduledChunk, Scheduler, SchedulerLimits
from mini_engine.scheduler.sharing import SharingLimits

QUEUED = 1024  # answers of ``generate`` that wait or run; the scheduler looks at all who wait, in every step
LOGGED_STEPS = 65_536  # the event log forgets older ones
IDLE_S = 0.005  # how long a step waits for a grammar when there is nothing else to do


@dataclass
class Entry:
    """Everything that the engine keeps about one request beside the scheduler's part.

    ``unread``: the deltas that its stream has not given out yet, ``None`` if nobody streams it. ``grammar``: its state
    in the grammar of its answer, ``None`` until that is compiled, and without one. It is here and not with the pages,
    so a preemption does not touch it.
    """

    request: Request
    output: RequestOutput
    detokenizer: Detokenizer | None
    unread: deque[Delta] | None = None
    grammar: GrammarObject | None = None


class Engine:
    """Runs many requests over one model. Not thread-safe: one caller steps it."""

    def __init__(
        self,
        driver: SamplingDriver,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        gather: Gather | None = None,
    ) -> None:
        """Serve with ``driver``'s model, sampler and configuration; without a ``tokenizer`` there is no text.

        ``gather``: how several processes that serve one model agree whose grammars are ready (``grammar.ranks``).
        """
        config, model = driver.config, driver.model
        longest = model.config.max_position_embeddings
        tokens = min(config.max_running_requests * longest, max(DEFAULT_POOL_TOKENS, longest))
        num_pages = config.num_pages or pages_needed(tokens, config.page_size)
        sharing = SharingLimits(config.wait_for_prefix, config.wait_below_match)
        limits = SchedulerLimits(
            config.max_running_requests, config.max_tokens_per_step, config.preemption, config.max_steps_waited, sharing
        )
        policy = make_policy(config.policy, config.policy_seed)
        self.driver, self.tokenizer, self.clock = driver, tokenizer, clock
        self.pool = KVPool(model.config, num_pages, config.page_size, model.embedding.dtype, config.device)
        self.scheduler = Scheduler(num_pages, config.page_size, limits, policy, make_prefix_cache(config))
        self.rows: SampledRows[Request] = SampledRows(driver.vocabulary, config.device)
        self.grammars = GrammarService(config, tokenizer, driver.vocabulary, clock, gather)
        self.entries: dict[str, Entry] = {}
        self.deltas: list[Delta] = []  # of the step in progress, and
        self.forced: dict[str, int] = {}  # how many tokens grammars appended in it
        self.log: deque[StepOutput] = deque(maxlen=LOGGED_STEPS)  # without logits, which would keep memory alive
        self.numbers, self.arrivals = count(), count()

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
        if params.grammar is not None:
            self.grammars.check(params.grammar, params)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer and this engine has none; give stop_token_ids")
        request = Request(
            name, list(prompt_ids), params, arrival, RequestTimes(self.clock()), siblings=siblings,
            cache_key=cache_key, cache_priority=cache_priority,
        )  # fmt: skip
        self.scheduler.check_fits(request)
        if params.grammar is None:
            self.scheduler.add(request)
        else:
            self.grammars.submit(name, params.grammar, params.reasoning)
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
        if self.grammars.is_waiting:
            self.admit_compiled()
        batch = self.scheduler.schedule()
        laps.mark("schedule")
        if batch.chunks:
            for request in (c.request for c in batch.chunks if c.request.times.started is None):
                request.times.started = laps.began
            hidden, inputs = self.forward(batch)
            self.report_forced(batch, hidden, inputs)
            self.sample(batch, hidden, inputs.logit_rows, laps)
            if self.driver.config.jump_forward:
                self.jump_forward(laps)
        return self.finish_step(batch, laps)

    @property
    def has_work(self) -> bool:
        """Whether any request waits, for its grammar or for its turn, or runs."""
        return self.scheduler.has_work or self.grammars.is_waiting

    def admit_compiled(self) -> None:
        """Queue the requests whose grammars are there, and end those whose grammars will never be. Mutates."""
        ready, failed = self.grammars.poll(0.0 if self.scheduler.has_work else IDLE_S)
        for name, grammar in ready:
            self.entries[name].grammar = grammar
            self.scheduler.add(self.entries[name].request)
        for name, reason in failed.items():
            self.end(self.entries[name], "error", reason)

    def forward(self, batch: ScheduledBatch) -> tuple[Tensor, BatchInputs]:
        """Run the layers over a scheduled batch -> hidden states [T, H] and what was packed. Mutates."""
        for chunk in batch.chunks:
            if chunk.copied_from is not None:
                self.copy_prefix(chunk, chunk.copied_from)
        inputs = pack_batch([packed(c) for c in batch.chunks], self.scheduler.page_size, self.driver.config.device)
        hidden = self.driver.hidden_states(inputs, self.pool)
        for chunk, query_range in zip(batch.chunks, inputs.metadata.query_ranges, strict=True):
            if chunk.request.params.prompt_logprobs is not None:  # asked here too: slicing costs more than asking
                self.report_prompt(chunk, hidden[slice(*query_range)])
        return hidden, inputs

    def copy_prefix(self, chunk: ScheduledChunk, source: Request) -> None:
        """Give a chunk's request what a sibling has computed of their prompt already. Mutates."""
        stretch = (chunk.start - chunk.num_copied, chunk.start, self.scheduler.page_size)
        slots = [torch.tensor(slots_of(pages, *stretch)) for pages in (source.pages, chunk.request.pages)]
        self.pool.copy(*(own.to(self.driver.config.device) for own in slots))
        output, known = (self.entries[r.request_id].output for r in (chunk.request, source))
        if known.prompt_logprobs is not None and len(known.prompt_logprobs) > len(output.prompt_logprobs or ()):
            output.prompt_logprobs = list(known.prompt_logprobs)

    def sample(self, batch: ScheduledBatch, hidden: Tensor, last_rows: Tensor, laps: Laps) -> None:
        """Choose a token where a chunk reaches the newest one, and take the tokens in. Mutates.

        ``hidden`` [T, H]; ``last_rows`` [N]: the last row of every chunk. ``laps``: "forward" is marked behind the
        logits, "sample" behind the sampler, "update" at the end.
        """
        try:
            requests = self.follow([chunk.request for chunk in batch.chunks if chunk.samples])
            place = {chunk.request.request_id: row for row, chunk in enumerate(batch.chunks)}
            # Before the head: only the rows that sample.
            rows = last_rows[[place[request.request_id] for request in requests]]
            logits = self.driver.logits(hidden, rows)  # [N, V]
            laps.mark("forward")
            output = self.driver.sampler(logits, self.rows.batch)
            laps.mark("sample")
            self.rows.cumulate([None if row in output.errors else token for row, token in enumerate(output.token_ids)])
        except BaseException as error:
            self.rows.clear()  # they may have taken in a token that no request has
            self.end_guilty(batch, hidden, last_rows, error)
            return
        for row, reason in output.errors.items():
            pages = requests[row].pages
            self.end(self.entries[requests[row].request_id], "error", reason)
            own = [page for page in pages if self.scheduler.allocator.is_free[page]]
            self.pool.fill(own, 0.0)  # so that no NaN is left for whoever comes next
        tokens = {r.request_id: token for r, token in zip(requests, output.token_ids, strict=True)}
        self.scheduler.update(batch, tokens)
        for row, (request, its_logits) in enumerate(zip(requests, logits.unbind(), strict=True)):
            if row not in output.errors:
                name = request.request_id
                self.take_token(request, Delta(name, tokens[name], "", output.logprobs[row], None, its_logits))
        laps.mark("update")

    def follow(self, requests: Sequence[Request]) -> list[Request]:
        """Make the sampler's rows those of ``requests``, masked by their grammars -> them, in their order. Mutates."""
        rows = self.rows.follow(requests)
        self.rows.batch.final_mask = self.grammars.mask([self.entries[request.request_id].grammar for request in rows])
        return rows

    def end_guilty(self, batch: ScheduledBatch, hidden: Tensor, last_rows: Tensor, error: BaseException) -> None:
        """End the requests whose processors or grammars made a step raise; the rest is computed again. Mutates.

        Who is guilty shows when each is sampled alone. Anything else that was raised, Ctrl-C for one, goes on to the
        caller: nothing is lost, the step is pending.
        """
        faults = {}
        for chunk, row in zip(batch.chunks, last_rows, strict=True):
            suspects = [*(chunk.request.params.logits_processors or ()), *(chunk.request.params.grammar or ())[:1]]
            if chunk.samples and suspects and isinstance(error, Exception):
                fault = self.fault_alone(chunk.request, self.driver.logits(hidden, row[None]))
                faults.update({chunk.request.request_id: fault} if fault is not None else {})
        if not faults:
            raise error
        for name, fault in faults.items():
            processors = ", ".join(self.entries[name].request.params.logits_processors or ())
            culprit = f"logits processors ({processors})" if processors else "grammar"
            self.end(self.entries[name], "error", f"its {culprit} raised {fault!r}")

    def fault_alone(self, request: Request, logits: Tensor) -> Exception | None:
        """Sample one request from its row of logits [1, V], and return what that raises."""
        try:
            batch = SamplingBatch.from_requests([request], self.driver.vocabulary, self.driver.config.device)
            batch.final_mask = self.grammars.mask([self.entries[request.request_id].grammar])
            output = self.driver.sampler(logits, batch)
            if not output.errors:
                batch.cumulate(output.token_ids)
        except Exception as error:  # a processor is anybody's code
            return error
        return None

    def finish_step(self, batch: ScheduledBatch, laps: Laps) -> StepOutput:
        """Return what a step did and log it. Mutates."""
        deltas, self.deltas, forced, self.forced = self.deltas, [], self.forced, {}
        scheduler = self.scheduler
        output = StepOutput(
            number=next(self.numbers), began=laps.began, seconds=laps.seconds, deltas=deltas,
            chunks=[(c.request.request_id, c.start, c.num_tokens) for c in batch.chunks],
            copied={c.request.request_id: c.num_copied for c in batch.chunks if c.num_copied},
            preempted=[request.request_id for request in batch.preempted],
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_pages_used=scheduler.allocator.num_pages - scheduler.allocator.num_free,
            num_tokens_held=sum(request.num_computed_tokens for request in scheduler.running),
            num_compiling=self.grammars.num_waiting,
            forced=forced,
        )  # fmt: skip
        if batch.chunks:
            self.log.append(replace(output, deltas=[without_logits(delta) for delta in deltas]))
        return output

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
            table = token_logprobs(logits.double().log_softmax(-1), ids, [wanted] * len(tokens))
        output.prompt_logprobs = [*known, *table]

    def report_forced(self, batch: ScheduledBatch, hidden: Tensor, inputs: BatchInputs) -> None:
        """Add the log-probabilities of tokens that grammars forced, whose rows are computed now. Mutates.

        ``hidden`` [T, H]. They were appended to the output without any logits; the row before each has them.
        """
        for chunk, query_range in zip(batch.chunks, inputs.metadata.query_ranges, strict=True):
            request, output = chunk.request, self.entries[chunk.request.request_id].output
            first, end = request.num_prompt_tokens + len(output.logprobs), chunk.start + chunk.num_tokens
            # The last row predicts the token after it.
            tokens = [] if request.params.logprobs is None else request.tokens(first, end + 1)
            if tokens and first > chunk.start:
                rows = hidden[slice(*query_range)][first - 1 - chunk.start :]
                table = self.driver.logits(rows, None)[: len(tokens)].double().log_softmax(-1)
                ids, counts = torch.tensor(tokens, device=table.device), [request.params.logprobs or 0] * len(tokens)
                output.logprobs += token_logprobs(table, ids, counts)

    def jump_forward(self, laps: Laps) -> None:
        """Append what grammars force after the tokens of this step. Mutates."""
        for entry in [self.entries[delta.request_id] for delta in self.deltas if delta.finish_reason is None]:
            if entry.grammar is not None:
                self.append_forced(entry, entry.grammar)
        laps.mark("update")  # a part of it, like the tokens before

    def append_forced(self, entry: Entry, grammar: GrammarObject) -> None:
        """Append what one grammar forces after the newest token, up to what ends the request. Mutates."""
        request, forced = entry.request, 0
        try:
            tokens = self.grammars.forced_tokens(grammar, request.output_ids, request.params)
        except Exception as error:
            self.end(entry, "error", f"its grammar raised {error!r}")
            return
        for token in tokens:
            request.output_ids.append(token)
            self.take_token(request, Delta(request.request_id, token, ""))
            forced += 1
            if entry.output.finish_reason is not None:
                break
        if forced:
            grammar.stats.num_forced_tokens += forced
            self.forced[request.request_id] = forced
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
            reason, text = self.finish_reason(entry, delta.token_id), ""
        except TokenRefusedError as error:
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

    def finish_reason(self, entry: Entry, token_id: int) -> FinishReason | None:
        """Take a token into the request's grammar, and only then ask whether it was the last. Mutates.

        In this order a grammar that has ended ends the request in the same step, also with ``ignore_eos``: nothing can
        follow it unmasked. Raises ``TokenRefusedError``.
        """
        if entry.grammar is not None and self.grammars.accept(entry.grammar, token_id):
            return "stop"
        return self.driver.finish_reason(entry.request)

    def report(self, entry: Entry, delta: Delta) -> None:
        """Put a delta where the step's caller and the request's stream find it. Mutates."""
        self.deltas.append(delta)
        if entry.unread is not None:
            entry.unread.append(delta)

    def end(self, entry: Entry, reason: FinishReason, error: str | None = None, last: Delta | None = None) -> None:
        """End a request: let it ``leave``, give out the rest of its text with its ``last`` token. Mutates.

        ``times.finished`` is when. When the reason is final, ``report_grammar`` reports what L7 has to say.
        """
        request, output = entry.request, entry.output
        self.leave(entry, reason)
        request.error, request.times.finished = error, self.clock()
        rest = entry.detokenizer.flush() if entry.detokenizer else ""
        output.text += rest
        if entry.detokenizer is not None and entry.detokenizer.matched is not None and reason == "length":
            request.finish_reason, request.matched = "stop", entry.detokenizer.matched
        output.finish_reason, output.matched, output.error = request.finish_reason, request.matched, error
        output.num_preemptions = request.num_preemptions
        self.report_grammar(entry)
        last = last or Delta(request.request_id, None, "")
        self.report(entry, replace(last, text=last.text + rest, finish_reason=request.finish_reason, error=error))

    def leave(self, entry: Entry, reason: FinishReason) -> None:
        """Finish a request where it waits or runs, and free its pages. Mutates."""
        if entry.request.params.grammar is not None and entry.grammar is None:  # the scheduler never knew it
            self.grammars.drop(entry.request.request_id)
            entry.request.state, entry.request.finish_reason = RequestState.FINISHED, reason
        else:
            self.scheduler.finish(entry.request, reason)

    def report_grammar(self, entry: Entry) -> None:
        """Report what a request's grammar says of its answer, once it is known what ended it. Mutates."""
        if entry.grammar is not None:
            entry.grammar.finished = True
            # A stop string, or a stop token that does not end the grammar, leaves less text than the grammar has seen.
            is_cut = entry.request.matched is not None and not entry.grammar.is_terminated()
            entry.output.grammar_stats = entry.grammar.stats
            entry.output.is_grammar_complete = entry.grammar.is_complete() and not is_cut

    def close(self) -> None:
        """Abort what has not ended and give up grammars that nobody has begun to compile. Mutates."""
        for name in list(self.entries):
            self.abort(name)
        self.grammars.close()

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


def make_prefix_cache(config: EngineConfig) -> PrefixCache:
    """Return the prefix cache that ``config`` asks for, by default the one that never has anything."""
    return NullPrefixCache() if config.prefix_cache is None else RadixCache(config.page_size, config.eviction)


def packed(chunk: ScheduledChunk) -> SequenceChunk:
    """Return a scheduled chunk in the form of ``pack_batch``."""
    request = chunk.request
    return SequenceChunk(request.tokens(chunk.start, chunk.start + chunk.num_tokens), chunk.start, request.pages)
