"""The endpoints."""

import hmac
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_engine import __version__
from mini_engine.server.chat import chat
from mini_engine.server.completions import complete
from mini_engine.server.errors import ApiError, add_handlers
from mini_engine.server.identity import HEADER, IDENTITY, read_header
from mini_engine.server.operation import add_operation
from mini_engine.server.reader import Limits
from mini_engine.server.responses import respond_to
from mini_engine.server.responses_schema import ResponsesBody
from mini_engine.server.schema import ChatBody, CompletionBody
from mini_engine.server.service import Service
from mini_engine.server.stream import CLIENT_CLOSED, ClientGoneError
from mini_engine.server.watch import add_page
from mini_engine.server.worker_events import add_worker_events

OPERATIONS = ("/flush_cache", "/workers/")  # POST without a body, which pages of other servers could send
OPEN_PATHS = ("/health", "/version", "/")  # no key is asked for; nor for the page's files, which send it themselves


def create_app(
    service: Service,
    api_key: str | None = None,
    page: bool = True,
    hosts: Sequence[str] | None = None,
    origins: Sequence[str] = (),
) -> FastAPI:
    """Return the application that serves ``service``. With an ``api_key`` every request under /v1 needs it.

    ``page``: with the page on which one sees the engine think; it shows the texts of all requests. ``hosts``: what a
    request's Host may name, without the port; anything if ``None``. ``origins``: pages of these may call the server.
    """

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.engine.close()

    app = FastAPI(title="mini_engine", version=__version__, lifespan=life, docs_url=None, redoc_url=None)
    app.state.service = service
    add_handlers(app)
    add_operation(app, service)
    add_worker_events(app, service, shows_tokens=page or api_key is not None)
    if page:
        add_page(app, service)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue prompts."""
        return await complete(service, body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a chat."""
        return await chat(service, body, request)

    @app.post("/v1/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """Answer a conversation with items."""
        return await respond_to(service, body, request)

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    app.add_exception_handler(ClientGoneError, gone)
    add_gate(app, api_key, hosts, origins, service.limits)
    return app


def add_gate(
    app: FastAPI, api_key: str | None, hosts: Sequence[str] | None, origins: Sequence[str], limits: Limits
) -> None:
    """Let requests in as ``create_app`` says. Mutates ``app``."""
    app.add_middleware(Gate, api_key=api_key, hosts=hosts, max_body_bytes=limits.max_body_bytes)
    if origins:
        shared: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": ["*"]}
        app.add_middleware(CORSMiddleware, allow_origins=origins, **shared)


class Gate:
    """Lets a request in if it has the key, and cuts off a body that is too long. It does not read bodies itself.

    Without a key it keeps web pages of other servers out: a name of theirs that leads here (``hosts``), and the two
    kinds of POST that a browser sends without asking this server first, one without a body and one that is not JSON.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, hosts: Sequence[str] | None, max_body_bytes: int) -> None:
        """Stand before ``app``."""
        self.app = app
        self.api_key = api_key
        self.hosts = hosts
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        error = self.refusal(scope["method"], scope["path"], headers)
        try:
            IDENTITY.set(read_header(headers[HEADER]) if HEADER in headers else None)
        except ApiError as fault:
            error = error or fault
        if error is not None:
            await error.response(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_body_bytes:
                error = self.too_long()
                raise HTTPException(error.status, error.message)  # the one kind that FastAPI passes on from here
            return message

        await self.app(scope, counted, send)

    def refusal(self, method: str, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        """Return why a request is not let in, ``None`` if it is. The keys are compared in constant time."""
        if self.api_key is not None and not (path in OPEN_PATHS or path.startswith("/page/")):
            kind, _, key = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self.api_key.encode()):
                return ApiError(
                    HTTPStatus.UNAUTHORIZED, "the API key is missing or wrong; send Authorization: Bearer KEY"
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body_bytes:
            return self.too_long()
        host = headers.get(b"host", b"").decode("latin-1")
        name = re.sub(r":\d*$", "", host).lower()
        if self.hosts is not None and name not in self.hosts:
            return ApiError(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"Host is {host!r}, but this server answers to {', '.join(self.hosts)} alone; start it with --host",
            )
        if method == "POST":
            return self.refusal_of_post(path, host, headers)
        return None

    def refusal_of_post(self, path: str, host: str, headers: dict[bytes, bytes]) -> ApiError | None:
        """Return why a POST is not let in, ``None`` if it is."""
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        kind = headers.get(b"content-type", b"").decode("latin-1")
        if has_body and not re.match(r"application/(\S+\+)?json\s*(;|$)", kind, re.IGNORECASE):
            said = f"is {kind!r}" if kind else "is missing"
            return ApiError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Type {said}; send the body with application/json"
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if path.startswith(OPERATIONS) and self.api_key is None and origin and origin.partition("://")[2] != host:
            return ApiError(HTTPStatus.FORBIDDEN, f"Origin {origin!r} is not this server; a page of it may not do this")
        return None

    def too_long(self) -> ApiError:
        """Return the error of a body that is too long."""
        return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {self.max_body_bytes} bytes")
