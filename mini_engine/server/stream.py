"""Answers that end when the client leaves, plain ones and streams of server-sent events.

A client that leaves is known by a message of the protocol alone. It is raced against the work: so no middleware may
read bodies, which would swallow the message.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Coroutine
from json.encoder import encode_basestring
from typing import Any, Protocol, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mini_engine.server.errors import as_api_error

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
SILENCE_S = 15.0  # proxies and clients give a connection up over which nothing comes for a minute or so
COMMENT = b": still at work\n\n"  # clients skip it
CLIENT_CLOSED = 499  # nginx's number; no client sees it


class ClientGoneError(Exception):
    """The client has closed the connection."""


async def until_disconnect(receive: Receive) -> None:
    """Wait until the client leaves. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def race(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns; cancel it and raise ``ClientGoneError`` if the client leaves before."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(until_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """Return one server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {ENCODER.encode(data)}\n\n".encode()


class Frame:
    """An event of which one text changes: the rest is encoded once."""

    MARK = "\0"

    def __init__(self, data: dict[str, Any]) -> None:
        """Encode ``data``, which holds ``MARK`` in the place of the text."""
        self.before, self.after = event(data).split(encode_basestring(self.MARK).encode())

    def filled(self, text: str) -> bytes:
        """Return the event with ``text``."""
        return b"%b%b%b" % (self.before, encode_basestring(text).encode(), self.after)


async def anext_of(events: AsyncGenerator[bytes, None]) -> bytes:
    """Return the first of ``events``."""
    return await anext(events)


class EventResponse(Response):
    """Sends events as they come, a comment in a long silence, and an ``error`` event if something fails on the way."""

    media_type = "text/event-stream"

    def __init__(self, first: asyncio.Task[bytes], events: AsyncGenerator[bytes, None], silence_s: float) -> None:
        """Send ``first`` and then ``events``, which are closed at the end, whatever happens."""
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self.first = first
        self.events = events
        self.silence_s = silence_s
        self.sent_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, until the client leaves."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await race(receive, self.pump(send))
        except ClientGoneError:
            pass
        finally:
            await close(self.first, self.events)

    async def pump(self, send: Send) -> None:
        """Send the events one write each."""
        comments = asyncio.create_task(self.comment(send))
        try:
            await self.write(send, await self.first)
            async for data in self.events:
                await self.write(send, data)
        except Exception as error:
            await self.write(send, event(as_api_error(error).body, "error"))
        finally:
            comments.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def write(self, send: Send, data: bytes) -> None:
        """Send one event or comment."""
        self.sent_at = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def comment(self, send: Send) -> None:
        """Send a comment whenever nothing was sent for ``silence_s`` seconds."""
        while True:
            rest = self.sent_at + self.silence_s - time.monotonic()
            await (asyncio.sleep(rest) if rest > 0 else self.write(send, COMMENT))


class Asked(Protocol):
    """A request that was checked."""

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """Return the answer as events."""


async def respond(receive: Receive, asked: Asked, stream: bool) -> Response:
    """Return the answer, whole or as a stream."""
    if stream:
        return await respond_with_events(receive, asked.events())
    return JSONResponse(await race(receive, asked.answer()))


async def respond_with_events(
    receive: Receive, events: AsyncGenerator[bytes, None], silence_s: float | None = None
) -> Response:
    """Return a response that begins with the first event: an error before it still has a status of its own.

    A first event that does not come for ``silence_s`` seconds, ``SILENCE_S`` if not given, is not waited for: the
    response begins with a comment.
    """
    silence_s = SILENCE_S if silence_s is None else silence_s
    first = asyncio.create_task(anext_of(events))
    try:
        await race(receive, asyncio.wait({first}, timeout=silence_s))
        if first.done():
            first.result()
        return EventResponse(first, events, silence_s)
    except BaseException:
        await close(first, events)
        raise


async def close(first: asyncio.Task[bytes], events: AsyncGenerator[bytes, None]) -> None:
    """End ``events``, the first of which may not have come."""
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await events.aclose()
