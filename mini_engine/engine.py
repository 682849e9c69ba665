"""L5: the engine as callers use it: lists of prompts, several samples of one prompt, streams.

Everything here adds requests to ``EngineCore`` and steps it until they have ended.
"""

from collections import deque
from collections.abc import Generator, Sequence
from itertools import chain

from tqdm import tqdm

from mini_engine.engine_core import EngineCore, Entry
from mini_engine.outputs import Delta, RequestOutput, best
from mini_engine.sampler.driver import sample_params
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.request import Request, RequestState

QUEUED = 1024  # answers of ``generate`` that wait or run; every step looks at all waiting requests


def check_stream(params: SamplingParams) -> None:
    """Raise ``ValueError`` for what a stream of deltas cannot give: a receipt is of the whole answer."""
    if params.receipt:
        raise ValueError("receipt is True, but a stream of deltas holds no receipt; use generate, or leave receipt out")


class Engine(EngineCore):
    """Runs many requests over one model and gives out whole answers or streams. Not thread-safe: one caller uses it."""

    def take_output(self, request_id: str) -> RequestOutput:
        """Return the answer of a finished request and forget the request. Mutates.

        Raises ``KeyError`` for an unknown id and ``ValueError`` for a request that has not ended.
        """
        if self.entries[request_id].request.state is not RequestState.FINISHED:
            raise ValueError(f"request {request_id!r} has not ended; step on, or abort it first")
        return self.entries.pop(request_id).output

    def end_running(self, reason: str) -> None:
        """End every running request with an error and forget the rows of the sampler. Mutates.

        Raises ``AssertionError`` if pages are missing afterwards.
        """
        for request in list(self.scheduler.running):
            self.finish(self.entries[request.request_id], "error", reason)
        self.rows.clear()
        self.scheduler.check_pages()

    def flush_cache(self) -> int:
        """Empty the prefix cache, but for what running requests use; return how many pages are free again. Mutates."""
        pages = self.scheduler.cache.evict(self.scheduler.cache.num_evictable)
        self.scheduler.allocator.free(pages)
        return len(pages)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        progress: bool = False,
    ) -> list[list[RequestOutput]]:
        """Run all ``prompts`` and return the ``n`` answers of each, in the order of the prompts.

        ``params``: for all prompts, or one for each. A request that cannot be run has one answer, with
        ``finish_reason`` "error" and the reason in ``error``; the others go on. At most about ``QUEUED`` answers are
        under way at a time, so that a long list costs no more for each prompt. If anything is raised
        (``KeyboardInterrupt``, for example), every request of the list is aborted and forgotten. Raises ``ValueError``
        for another number of parameters than of prompts.
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
        """Queue every sample of a request and return their ids. Samples that run together compute the prompt once.

        A refused request becomes one finished answer, so that it keeps its place in a list of answers. Mutates.
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
        """Store a request that was refused as a finished one with its ``error``; return its id. Mutates."""
        name = f"refused {next(self.arrivals)}"
        request = Request(
            name, list(prompt_ids), params, state=RequestState.FINISHED, finish_reason="error", error=error
        )
        output = RequestOutput(name, list(prompt_ids), finish_reason="error", error=error)
        self.entries[name] = Entry(request, output, None)
        return name

    def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generator[Delta, None, None]:
        """Yield the deltas of one request as they come; other requests share the steps.

        Closing the iterator aborts the request. Raises ``ValueError`` for a request that cannot be run.
        """
        check_stream(params)
        name = self.add_request(prompt_ids, params)
        deltas = self.deltas_of(name)
        next(deltas)  # only a generator that has begun aborts the request when it is closed
        return deltas

    def deltas_of(self, request_id: str) -> Generator[Delta, None, None]:
        """Yield an empty delta at the start, then the request's deltas until it ends. Steps the engine when needed."""
        entry = self.entries[request_id]
        entry.unread = unread = deque[Delta]()  # the step of another stream may add to it
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
