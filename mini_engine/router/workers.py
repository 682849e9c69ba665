"""What answers the requests that a router passes on: the protocol of all workers, and applications of this process.

``servers.py`` has servers, ``replicas.py`` those that the router starts itself, ``actors.py`` Ray's actors.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote

from starlette.types import ASGIApp, Message

Headers = Sequence[tuple[bytes, bytes]]


class WorkerGoneError(ConnectionError):
    """A worker cannot be reached, or has ended before its answer was whole."""


class WorkerBusyError(WorkerGoneError):
    """A worker is there, but has no room for a request, or does not go on with an answer that another has begun."""


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


class Incoming:
    """An answer while it comes: who writes it adds to ``unread``, and who reads it takes all that is there."""

    def __init__(self) -> None:
        """Wait for the first of it."""
        self.head: tuple[int, Headers] | None = None
        self.unread = bytearray()
        self.is_whole = False
        self.fault: str | None = None  # why nothing more will come, though it is not whole
        self.news = asyncio.Event()

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

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield what is new until the end. Raises ``WorkerGoneError``."""
        while data := await self.more():
            yield data

    async def wait(self) -> None:
        """Wait for news. Raises ``WorkerGoneError`` if none can come."""
        if self.fault is not None:
            raise WorkerGoneError(self.fault)
        self.news.clear()
        await self.news.wait()

    def fail(self, reason: str) -> None:
        """Let nothing more come. Mutates."""
        self.fault = reason
        self.news.set()


class Call(Incoming):
    """One request to an application, which runs in a task."""

    def __init__(self, app: ASGIApp, asked: Asked) -> None:
        """Begin to run."""
        super().__init__()
        self.asked = asked
        self.is_read = False
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
        """Wake the reader. Mutates."""
        error = None if task.cancelled() else task.exception()
        self.fail(f"the application has ended before its answer was whole: {error!r}")

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
            yield Answer(*await call.start(), call.pieces())
        finally:
            self.calls.discard(call)
            await call.leave()

    async def close(self) -> None:
        """End every call."""
        for call in list(self.calls):
            await call.leave()
