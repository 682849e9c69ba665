"""The page on which one sees the engine think, and the two streams of events that feed it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Annotated, Self

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response
from pydantic import Field, model_validator
from starlette.exceptions import HTTPException

from mini_engine.async_engine import AsyncEngine
from mini_engine.outputs import RequestOutput
from mini_engine.server.attention import add_attention
from mini_engine.server.completions import DEFAULT_MAX_TOKENS
from mini_engine.server.job import Job
from mini_engine.server.schema import GenerationBody
from mini_engine.server.service import Service
from mini_engine.server.steps import EventQueue, StageEvents, StepEvents, Watcher, engine_fields, text_of
from mini_engine.server.stream import HEADERS, event, respond_with_events
from mini_engine.server.structure import structure_of

PAGE = Path(__file__).parent / "page"
KINDS = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


class StagesBody(GenerationBody):
    """``POST /v1/stages``: one answer, streamed. ``top``: so many tokens of every distribution are reported."""

    prompt: str | list[int]
    top: Annotated[int, Field(ge=1, le=100)] = 12

    @model_validator(mode="after")
    def check_answer(self) -> Self:
        """Raise ``ValueError`` for what would have to be ignored."""
        for name in "stream_options prompt_logprobs prompt_logprobs_start no_stop_trim".split():
            if getattr(self, name) is not None:
                raise ValueError(f"{name} changes nothing here; leave it out")
        if self.n not in (None, 1) or self.stream is False or self.include_stop_str_in_output:
            raise ValueError("one answer is streamed, without its stop string; leave out n, stream and the like")
        if self.max_tokens == 0:
            raise ValueError("max_tokens is 0, and without a token there are no stages; ask for at least 1")
        return self


def add_page(app: FastAPI, service: Service) -> None:
    """Add the page and the endpoints that feed it. Mutates ``app``.

    ``app.state.modules``: whose modules the engine runs, to be shown on the page; ``None`` for its own.
    """
    add_attention(app, service)
    numbers = count()
    app.state.modules = None
    served = {path.name: path for path in PAGE.iterdir()}
    served["plotly.js"] = Path(str(files("plotly") / "package_data" / "plotly.min.js"))

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(served["index.html"], headers=HEADERS)

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> FileResponse:
        if name not in served:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"the page has no file {name!r}")
        return FileResponse(served[name], media_type=KINDS[served[name].suffix], headers=HEADERS)

    @app.get("/v1/steps")
    async def steps(request: Request) -> Response:
        """Stream every step of the engine."""
        return await respond_with_events(request.receive, step_events(service, app.state.modules))

    @app.post("/v1/stages")
    async def stages(body: StagesBody, request: Request) -> Response:
        """Complete a prompt and stream, for each token, the distribution before and after every stage."""
        events = stage_events(service, body, f"stages-{next(numbers)}")
        return await respond_with_events(request.receive, events)


@asynccontextmanager
async def attached(engine: AsyncEngine, watcher: Watcher) -> AsyncIterator[None]:
    """Attach ``watcher`` to the engine, between two steps."""
    try:
        await engine.call(watcher.attach)
        yield
    finally:
        engine.post(watcher.detach)


async def step_events(service: Service, modules: str | None) -> AsyncGenerator[bytes, None]:
    """Yield the events of all steps, the engine's own first."""
    engine = service.engine
    queue = EventQueue()
    async with attached(engine, StepEvents(engine.engine, queue.put)):
        about = {"model": service.model_name, "modules": modules}
        yield event(about | engine_fields(engine.engine), "engine")
        async for data in queue.written():
            yield data
            if service.is_ending and not engine.handles:
                return


async def stage_events(service: Service, body: StagesBody, name: str) -> AsyncGenerator[bytes, None]:
    """Run a request and yield its events. Closing the iterator aborts it. Raises ``ApiError``."""
    service.check_model(body.model)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    ids = service.truncate(service.encode(body.prompt), body, max_tokens)
    service.check_length(len(ids), max_tokens, "prompt")
    structure = structure_of(body)
    engine = service.engine
    queue = EventQueue()
    params = service.params(body, max_tokens, structure)
    request_id = f"{name}-0"  # as the handle names its only answer
    watcher = StageEvents(engine.engine, queue.put, request_id, params, body.top)
    async with attached(engine, watcher), Job(service) as job:
        await job.submit([ids], params, structure, body.options(score_only=False), name)
        ending = asyncio.create_task(end_of(job, queue))
        ending.add_done_callback(lambda task: task.cancelled() or task.exception())  # asked for by no reader who left
        prompt = [{"id": token, "piece": text_of(engine.engine, [token])} for token in ids]
        yield event({"request": request_id, "prompt": prompt}, "start")
        async for data in queue.written():
            yield data
        ((output,),) = await ending
        ends = {"finish_reason": output.finish_reason, "text": output.text, "usage": job.usage}
        yield event(ends, "done")


async def end_of(job: Job, queue: EventQueue) -> list[list[RequestOutput]]:
    """Return the answers of ``job``; the queue has an end then. Raises as ``Job.results`` does."""
    try:
        return await job.results()
    finally:
        queue.put_now(None)
