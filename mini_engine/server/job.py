"""One HTTP request while the engine works for it: a handle for each prompt, a deadline, and an end in every case."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from http import HTTPStatus
from typing import Any, Protocol, Self

from mini_engine.async_engine import Handle
from mini_engine.outputs import Delta, RequestOutput
from mini_engine.receipt import checkpoint_of
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.request import RequestOptions
from mini_engine.server.errors import ApiError, bad_request
from mini_engine.server.schema import GenerationBody
from mini_engine.server.service import Service
from mini_engine.server.stream import DONE, event
from mini_engine.server.structure import Structure


class ChoiceWriter(Protocol):
    """What one choice of a stream has not shown yet."""

    def written(self, delta: Delta) -> bytes:
        """Return the events that ``delta`` completes."""


class Asked(Protocol):
    """A request that was checked."""

    service: Service
    head: dict[str, Any]

    @property
    def body(self) -> GenerationBody:
        """What the client has sent."""

    async def submit(self, job: "Job") -> None:
        """Queue the prompts. Raises ``ApiError``."""

    def choices(self, job: "Job") -> Sequence[ChoiceWriter]:
        """Return what writes the choices of a stream, in the order of their numbers."""


async def events_of(asked: Asked) -> AsyncGenerator[bytes, None]:
    """Yield an answer as events: one write for a step, chunks for each choice that has something new."""
    async with Job(asked.service) as job:
        await asked.submit(job)
        async for data in job.chunks(asked.choices(job)):
            yield data
        yield (event({**asked.head, "choices": [], "usage": job.usage}) if asked.body.wants_usage else b"") + DONE


class Job:
    """An asynchronous context: leaving it aborts what has not ended."""

    def __init__(self, service: Service) -> None:
        """Begin without prompts."""
        self.service = service
        self.handles = list[Handle]()
        self.news = asyncio.Event()
        self.is_late = False

    async def __aenter__(self) -> Self:
        """Start the clock of the deadline."""
        loop = asyncio.get_running_loop()
        self.deadline = loop.call_later(self.service.limits.timeout_s, self.expire)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Abort what has not ended."""
        self.deadline.cancel()
        for handle in self.handles:
            self.service.engine.abort(handle.id)

    def expire(self) -> None:
        """Abort everything, because the time is up. Mutates."""
        self.is_late = True
        for handle in self.handles:
            self.service.engine.abort(handle.id)

    async def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        structure: Structure | None,
        options: RequestOptions,
        handle_id: str | None = None,
    ) -> None:
        """Queue every prompt; a single one may get an id. Raises ``ApiError``. Mutates."""
        if self.service.is_ending:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down")
        self.service.engine.check_room(len(prompts) * params.num_samples)  # all of them or none
        names = {} if structure is None else {structure.kind: structure.param}
        names |= {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
        folder = self.service.view.folder
        for ids in prompts:
            try:
                if params.receipt and folder is not None:
                    await asyncio.to_thread(checkpoint_of, folder)  # the engine goes on while the files are read
                handle = await self.service.engine.submit(ids, params, options, handle_id=handle_id)
            except ValueError as error:
                raise bad_request(error, names) from error
            handle.news = self.news
            self.handles.append(handle)
            if self.is_late:
                self.expire()

    async def chunks(self, choices: Sequence[ChoiceWriter]) -> AsyncIterator[bytes]:
        """Yield the events of all choices, joined for each step. Raises ``ApiError`` for an answer that ended badly."""
        names = (name for handle in self.handles for name in handle.names)
        choice_of = dict(zip(names, choices, strict=True))
        while True:
            self.news.clear()
            if new := [delta for handle in self.handles for delta in handle.take()]:
                for delta in new:
                    self.check(delta.finish_reason, delta.error)
                if data := b"".join([choice_of[delta.request_id].written(delta) for delta in new]):
                    yield data
            elif all(handle.is_finished for handle in self.handles):
                return
            else:
                await self.news.wait()

    async def results(self) -> list[list[RequestOutput]]:
        """Wait for the end; return the answers to each prompt, the likeliest ``n``. Raises as ``chunks`` does."""
        answers = [await handle.results() for handle in self.handles]
        for output in (output for handle in self.handles for output in handle.outputs.values()):
            self.check(output.finish_reason, output.error)
        return answers

    def check(self, reason: str | None, error: str | None) -> None:
        """Raise ``ApiError`` for an answer that did not end well."""
        if reason == "error":
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, f"the request failed: {error}")
        if reason == "abort" and self.is_late:
            seconds = self.service.limits.timeout_s
            raise ApiError(
                HTTPStatus.GATEWAY_TIMEOUT, f"the answer took longer than {seconds:g} s; ask for fewer tokens"
            )
        if reason == "abort":
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE, "the request was aborted because the server is shutting down"
            )

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts, each counted once, and of all answers that were generated and have ended."""
        firsts = [handle.outputs.get(handle.names[0]) for handle in self.handles]
        ended = [output for handle in self.handles for output in handle.outputs.values()]
        cached = sum(first.num_cached_tokens for first in firsts if first is not None)
        prompts = sum(len(handle.prompt_ids) for handle in self.handles)
        known = usage(prompts, sum(len(output.token_ids) for output in ended), cached)
        drafted, accepted = (sum(getattr(o, name) for o in ended) for name in ("num_drafted", "num_accepted"))
        if drafted:
            guessed = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
            known["completion_tokens_details"] = guessed
        return known


def usage(num_prompt: int, num_completion: int, num_cached: int = 0) -> dict[str, Any]:
    """Return the ``usage`` object."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
