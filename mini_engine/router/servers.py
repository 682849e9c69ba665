"""Workers that are servers, over connections that stay open."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from urllib.parse import urlsplit

import httptools

from mini_engine.router.workers import Answer, Asked, Incoming, WorkerGoneError

CONNECT_S = 5.0
IDLE_S = 4.0  # a connection is used again for so long; the server closes it after 5
MOST_UNREAD = 2**18  # bytes; a server whose client is slow waits


class Connection(Incoming, asyncio.Protocol):
    """A connection to a server, for one request at a time. httptools calls what begins with ``on_``."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin. Mutates."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Let nothing more come. Mutates."""
        self.fail(f"the server closed the connection: {exc!r}")

    def ask(self, asked: Asked, host: bytes) -> None:
        """Send a request. Mutates."""
        super().__init__()
        self.method = asked.method
        self.is_free = False
        self.parser = httptools.HttpResponseParser(self)
        headers = [(b"host", host), (b"content-length", b"%d" % len(asked.body)), *asked.headers]
        head = b"".join(b"%b: %b\r\n" % each for each in headers)
        line = f"{asked.method} {asked.target} HTTP/1.1\r\n".encode("latin-1")
        self.transport.write(line + head + b"\r\n" + asked.body)
        self.transport.resume_reading()  # the last answer may have been left unread
        if self.transport.is_closing():
            self.fail("the connection was closed before the request")

    def data_received(self, data: bytes) -> None:
        """Read a part of the answer. Mutates."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"the server does not speak HTTP: {error!r}")
            self.transport.abort()
        if len(self.unread) > MOST_UNREAD:
            self.transport.pause_reading()
        self.news.set()

    def on_message_begin(self) -> None:
        """Forget the headers of an answer that comes before the answer, status 100 to 199. Mutates."""
        self.headers = list[tuple[bytes, bytes]]()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Mutates."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Keep the head of the answer; one to HEAD is whole then. Mutates."""
        status = self.parser.get_status_code()
        if status >= HTTPStatus.OK:
            self.head = status, self.headers
            self.is_whole = self.method == "HEAD"

    def on_body(self, data: bytes) -> None:
        """Keep a part of the body. Mutates."""
        self.unread += data

    def on_message_complete(self) -> None:
        """Note the end, and whether the server takes another request. Mutates."""
        self.is_whole = self.head is not None
        self.is_free = self.is_whole and self.method != "HEAD" and self.parser.should_keep_alive()

    async def more(self) -> bytes:
        """Return all that is new, empty at the end. Raises ``WorkerGoneError``. Mutates."""
        data = await super().more()
        self.transport.resume_reading()
        return data


class HttpWorker:
    """A server, ``mini-engine serve`` as a rule, that somebody else looks after."""

    def __init__(self, name: str, url: str) -> None:
        """Ask the server at ``url``, of which host and port count."""
        self.name = name
        self.parts = urlsplit(url)
        self.busy = set[Connection]()
        self.idle = list[tuple[float, Connection]]()  # since when; the last one is the newest

    @asynccontextmanager
    async def answer(self, asked: Asked) -> AsyncIterator[Answer]:
        """Send a request."""
        connection = self.idle_connection() or await self.connect()
        self.busy.add(connection)
        try:
            connection.ask(asked, self.parts.netloc.encode())
            yield Answer(*await connection.start(), connection.pieces())
        finally:
            self.busy.discard(connection)
            if connection.is_free:
                self.idle.append((time.monotonic(), connection))
            else:
                connection.transport.abort()

    def idle_connection(self) -> Connection | None:
        """Return a connection that is open; close those that were idle for too long. Mutates."""
        while self.idle:
            since, connection = self.idle.pop()
            if time.monotonic() - since < IDLE_S and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    async def connect(self) -> Connection:
        """Return a new connection. Raises ``WorkerGoneError``."""
        is_secret = self.parts.scheme == "https"
        host, port = self.parts.hostname or "", self.parts.port or (443 if is_secret else 80)
        try:
            async with asyncio.timeout(CONNECT_S):
                made = await asyncio.get_running_loop().create_connection(Connection, host, port, ssl=is_secret or None)
        except (OSError, TimeoutError) as error:
            raise WorkerGoneError(f"{self.name} cannot be reached: {error!r}") from error
        return made[1]

    async def close(self) -> None:
        """Close all connections. Mutates."""
        for connection in (*self.busy, *(own for _, own in self.idle)):
            connection.transport.abort()
