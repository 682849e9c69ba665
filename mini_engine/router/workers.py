"""What answers the requests that a router passes on, behind one protocol: an application of this process, or a server.

``actors.py`` has the third kind, Ray's actors, and ``replicas.py`` servers that the router starts itself.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import httpcore
from starlette.types import ASGIApp, Message

Headers = Sequence[tuple[bytes, bytes]]
CONNECT_S = 5.0
IDLE_S = 4.0  # a connection is used again for so long; the server closes it after 5


class WorkerGoneError(ConnectionError):
    """A worker cannot be reached, or has ended before its answer was whole."""


class WorkerBusyError(WorkerGoneError):
    """A worker is there, but does not go on with an answer that another has begun."""


@dataclass(frozen=True)
class Asked:
    """A request as it is passed on. ``target``: the path, with the query."""

    method: str
    target: str
    headers: Headers = ()
    body: bytes = b""


@dataclass(frozen=True)
class Answer:
    """What came back; ``pieces`` come as the worker writes them, and raise ``WorkerGoneError`` if it ends before."""

    status: int
    headers: Headers
    pieces: AsyncIterator[bytes]


class Worker(Protocol):
    """What answers requests."""

    name: str

    def answer(self, asked: Asked) -> AbstractAsyncContextManager[Answer]:
        """Send a request; leaving the context aborts it. Raises ``WorkerGoneError``."""

    async def close(self) -> None:
        """Break off whatever runs there. Mutates."""


class HttpWorker:
    """A server, ``mini-engine serve`` as a rule, that somebody else looks after."""

    def __init__(self, name: str, url: str) -> None:
        """Ask the server at ``url``, without ``/v1``."""
        self.name = name
        self.url = httpcore.URL(url)
        self.host = urlsplit(url).netloc.encode()
        self.pool = make_pool()

    @asynccontextmanager
    async def answer(self, asked: Asked) -> AsyncIterator[Answer]:
        """Send a request."""
        target = asked.target.encode("latin-1")
        url = httpcore.URL(scheme=self.url.scheme, host=self.url.host, port=self.url.port, target=target)
        headers = [(b"host", self.host), (b"content-length", b"%d" % len(asked.body)), *asked.headers]
        waits = {"timeout": {"connect": CONNECT_S}}  # an answer may take any time, as the server has a limit of its own
        request = httpcore.Request(asked.method, url, headers=headers, content=asked.body, extensions=waits)
        with gone(self.name):
            response = await self.pool.handle_async_request(request)
        try:
            yield Answer(response.status, response.headers, self.pieces(response))
        finally:
            await response.aclose()

    async def pieces(self, response: httpcore.Response) -> AsyncIterator[bytes]:
        """Yield the body as it comes."""
        with gone(self.name):
            async for piece in response.aiter_stream():
                yield piece

    async def close(self) -> None:
        """Close all connections. Mutates."""
        pool = self.pool
        self.pool = make_pool()
        await pool.aclose()


def make_pool() -> httpcore.AsyncConnectionPool:
    """Return a pool of connections without a limit."""
    return httpcore.AsyncConnectionPool(max_connections=None, keepalive_expiry=IDLE_S)


@contextmanager
def gone(name: str) -> Iterator[None]:
    """Raise errors of a connection as ``WorkerGoneError``."""
    try:
        yield
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, RuntimeError) as error:
        raise WorkerGoneError(
            f"the connection to {name} failed: {error!r}"
        ) from error  # RuntimeError: the pool was closed


class Call:
    """One request to an application, which runs in a task. What it writes meanwhile is taken at once."""

    def __init__(self, app: ASGIApp, asked: Asked) -> None:
        """Begin to run."""
        self.asked = asked
        self.is_read = self.is_whole = False
        self.head: tuple[int, Headers] | None = None
        self.unread = bytearray()
        self.news = asyncio.Event()
        self.task = asyncio.create_task(self.run(app))
        self.task.add_done_callback(self.ended)

    async def run(self, app: ASGIApp) -> None:
        """Let the application answer."""
        path, _, query = self.asked.target.partition("?")
        scope: dict[str, Any] = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
        scope |= {"path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(), "root_path": ""}
        length = (b"content-length", str(len(self.asked.body)).encode())
        headers = [(b"host", b"localhost"), length, *self.asked.headers]
        await app(scope | {"method": self.asked.method, "headers": headers}, self.receive, self.send)

    def ended(self, task: asyncio.Task[None]) -> None:
        """Wake the reader; an error of the application is one of the worker. Mutates."""
        self.news.set()
        if not task.cancelled():
            task.exception()

    async def receive(self) -> Message:
        """Return the body, and then nothing more: a client that leaves cancels the task. Mutates."""
        if self.is_read:
            await asyncio.Event().wait()
        self.is_read = True
        return {"type": "http.request", "body": self.asked.body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Keep what the application writes. Mutates."""
        if message["type"] == "http.response.start":
            self.head = message["status"], list(message["headers"])
        else:
            self.unread += message.get("body", b"")
            self.is_whole = not message.get("more_body", False)
        self.news.set()

    async def start(self) -> tuple[int, Headers]:
        """Return status and headers. Raises ``WorkerGoneError``."""
        while self.head is None:
            await self.wait()
        return self.head

    async def more(self) -> bytes:
        """Return all that is new, empty at the end. Raises ``WorkerGoneError``. Mutates."""
        while not self.unread and not self.is_whole:
            await self.wait()
        data = bytes(self.unread)
        self.unread.clear()
        return data

    async def wait(self) -> None:
        """Wait for news. Raises ``WorkerGoneError`` if none can come."""
        if self.task.done():
            raise WorkerGoneError("the application has ended before its answer was whole")
        self.news.clear()
        await self.news.wait()

    async def leave(self) -> None:
        """End the task, as when the client leaves."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class AppWorker:
    """An application in this process."""

    def __init__(self, name: str, app: ASGIApp) -> None:
        """Ask ``app``."""
        self.name = name
        self.app = app
        self.calls = set[Call]()

    @asynccontextmanager
    async def answer(self, asked: Asked) -> AsyncIterator[Answer]:
        """Send a request."""
        call = Call(self.app, asked)
        self.calls.add(call)
        try:
            yield Answer(*await call.start(), until_empty(call.more))
        finally:
            self.calls.discard(call)
            await call.leave()

    async def close(self) -> None:
        """End every call."""
        for call in list(self.calls):
            await call.leave()


async def until_empty(more: Callable[[], Awaitable[bytes]]) -> AsyncIterator[bytes]:
    """Yield what ``more`` returns, until that is empty."""
    while data := await more():
        yield data
