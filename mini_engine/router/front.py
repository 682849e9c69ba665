"""The router: an application that passes each request on to the worker that holds most of its prompt.

    client ──request──► front ──policy: which worker?──► worker, whose bytes go back as they come
                          ▲                                │
                          └──── each second: alive, and what its prefix cache holds and dropped

A request whose worker ends goes on elsewhere. The front judges no request: what is wrong with it, a worker says.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, cast

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from mini_engine.router.fleet import Fleet, in_tree_of
from mini_engine.router.metrics import merged
from mini_engine.router.reply import Reply
from mini_engine.router.workers import Asked, WorkerGoneError
from mini_engine.server.app import add_gate
from mini_engine.server.chat import Chat
from mini_engine.server.completions import Completion
from mini_engine.server.errors import ApiError, add_handlers, as_api_error
from mini_engine.server.identity import HEADER, make_header
from mini_engine.server.reader import Reader
from mini_engine.server.responses import Responses
from mini_engine.server.responses_schema import ResponsesBody
from mini_engine.server.schema import ChatBody, CompletionBody
from mini_engine.server.service import Service
from mini_engine.server.stream import ClientGoneError, event, race

PASSED = {b"accept", b"authorization", b"content-type"}  # headers of a request
OF_ONE_ENGINE = ("/page/", "/v1/steps", "/v1/stages", "/v1/attention", "/worker_events")
LONG_BODY = 16 * 2**10  # bytes; to tokenize more would hold up other streams
MOST_TRIES = 4  # a request that was with so many workers that ended may be the reason


class Front:
    """What passes requests on. ``limits`` are those of the router's own process."""

    def __init__(self, fleet: Fleet, reader: Reader) -> None:
        """Pass requests on to ``fleet``; ``reader`` turns them into ids, as the workers do."""
        self.fleet = fleet
        self.reader = reader
        self.limits = reader.limits
        self.is_ending = False

    def abort_all(self) -> None:
        """Break off every request, because this process is to end."""
        self.breaking = [asyncio.ensure_future(worker.close()) for worker in self.fleet.workers.values()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, as long as its client is there."""
        path = scope["path"]
        if path == "/" or path.startswith(OF_ONE_ENGINE):
            raise HTTPException(HTTPStatus.NOT_FOUND, f"{path} shows one engine; ask a worker for it, not the router")
        headers = [(name, value) for name, value in scope["headers"] if name in PASSED]
        query = scope["query_string"] and b"?" + scope["query_string"]
        reply = Reply(send)
        try:
            body = await Request(scope, receive).body()
            target = (scope["raw_path"] + query).decode("latin-1")
            asked = Asked(scope["method"], target, [*headers, (HEADER, make_header())], body)
            await race(receive, self.pass_on(asked, reply))
        except (ClientDisconnect, ClientGoneError):
            return
        except Exception as error:
            if not reply.has_begun:
                raise
            await reply.write(event(as_api_error(error).body, "error"), more_body=False)

    async def pass_on(self, asked: Asked, reply: Reply) -> None:
        """Have a request answered by a worker, or by others if that ends. Raises ``ApiError``."""
        is_long = len(asked.body) > LONG_BODY
        tokens = await run_in_threadpool(self.tokens_of, asked) if is_long else self.tokens_of(asked)
        failed = set[str]()
        for number in range(1, MOST_TRIES + 1):
            if self.is_ending:
                raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down")
            name = await self.fleet.place(tokens, failed)
            is_last = number == MOST_TRIES or not self.fleet.has_other({*failed, name})
            try:
                with self.fleet.turn(name, tokens):
                    async with self.fleet.workers[name].answer(asked) as answer:
                        await reply.take(answer, is_last)
                return
            except WorkerGoneError as error:
                failed.add(name)
                why = error
        raise ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"the request was with {MOST_TRIES} workers that were lost, the last one because {why}; it may be the "
            "reason, so it is not sent again",
        )

    def tokens_of(self, asked: Asked) -> Sequence[int]:
        """Return the first prompt of a request as ids, empty if it has none or is at fault."""
        service = cast(Service, self.reader)  # they are only read, not answered
        try:
            match asked.target:
                case "/v1/completions":
                    completion = CompletionBody.model_validate_json(asked.body)
                    return in_tree_of(completion.cache_salt, Completion(service, completion).prompts[0])
                case "/v1/chat/completions":
                    chat = ChatBody.model_validate_json(asked.body)
                    return in_tree_of(chat.cache_salt, Chat(service, chat).prompt)
                case "/v1/responses":
                    return Responses(service, ResponsesBody.model_validate_json(asked.body)).chat.prompt
        except (ApiError, ValueError):
            pass
        return []

    async def ask_all(self, asked: Asked) -> dict[str, bytes]:
        """Return what those workers answer that are there and do not fail."""

        async def ask(name: str) -> tuple[str, bytes | None]:
            try:
                async with self.fleet.workers[name].answer(asked) as answer:
                    body = b"".join([piece async for piece in answer.pieces])
                    return name, body if answer.status == HTTPStatus.OK else None
            except WorkerGoneError:
                return name, None

        answers = await asyncio.gather(*map(ask, self.fleet.links))
        return {name: body for name, body in answers if body is not None}


def create_front(
    fleet: Fleet,
    reader: Reader,
    api_key: str | None = None,
    hosts: Sequence[str] | None = None,
    origins: Sequence[str] = (),
) -> FastAPI:
    """Return the router as an application; the options are those of ``create_app``."""
    front = Front(fleet, reader)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        async with fleet.watched():
            yield

    app = FastAPI(lifespan=life, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = front
    app.router.default = front
    add_handlers(app)
    add_operation(app, front)
    add_gate(app, api_key, hosts, origins, reader.limits)
    return app


def add_operation(app: FastAPI, front: Front) -> None:
    """Add the endpoints that are about all workers. Mutates ``app``."""
    fleet = front.fleet

    @app.head("/health")
    @app.get("/health")
    async def health() -> Response:
        """Answer 200 while a worker takes requests, 503 otherwise; with the state of each."""
        states = fleet.states()
        is_up = not front.is_ending and any(about["state"] == "up" for about in states.values())
        status = HTTPStatus.OK if is_up else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse({"status": "ok" if is_up else "unavailable", "workers": states}, status)

    @app.head("/metrics")
    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the numbers of all workers, and the router's."""
        texts = await front.ask_all(Asked("GET", "/metrics", fleet.headers))
        text = merged(fleet, {name: body.decode() for name, body in texts.items()})
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.post("/flush_cache")
    async def flush_cache() -> dict[str, int]:
        """Empty the prefix caches of all workers."""
        answers = await front.ask_all(Asked("POST", "/flush_cache", fleet.headers))
        for name in answers:
            fleet.policy.dropped(name, [], 0)
        return {"num_pages_flushed": sum(json.loads(body)["num_pages_flushed"] for body in answers.values())}

    @app.post("/workers/{name}/drain")
    async def drain(name: str) -> dict[str, Any]:
        """Give a worker no new request; those that it has end as they would."""
        return fleet.set_drained(name, True)

    @app.post("/workers/{name}/resume")
    async def resume(name: str) -> dict[str, Any]:
        """Let a worker take requests again."""
        return fleet.set_drained(name, False)
