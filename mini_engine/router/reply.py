"""What the client of one request has received, from one worker or, if that ended, from several."""

import re
from collections.abc import AsyncIterator
from http import HTTPStatus

from starlette.types import Send

from mini_engine.router.workers import Answer, WorkerBusyError, WorkerGoneError
from mini_engine.server.errors import ApiError

NOT_PASSED = {b"connection", b"date", b"keep-alive", b"server", b"transfer-encoding"}  # they are about one connection
CHOICE = re.compile(rb'"choices":\[\{"index":(\d+)')
COUNTS = re.compile(rb'"(cached_tokens|accepted_prediction_tokens|rejected_prediction_tokens)":\d+')
ENDS = re.compile(rb'event: error\n.*"code":"service_unavailable"', re.DOTALL)  # the last words of a server


class Reply:
    """An answer while the client receives it. A stream that goes on elsewhere must begin as it did before."""

    def __init__(self, send: Send) -> None:
        """Begin with nothing sent."""
        self.send = send
        self.has_begun = False
        self.sent: dict[bytes, list[int]] = {}  # by choice, as choices may alternate otherwise: hashes of its events

    async def take(self, answer: Answer, is_last: bool) -> None:
        """Pass an answer on to its end; ``is_last``: no other worker can be asked instead of one whose queue is full.

        Raises ``WorkerGoneError`` if it is not whole, and ``ApiError`` if it does not go on where the last one broke.
        """
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise WorkerGoneError("the worker is about to end")
        if dict(answer.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            await self.begin(answer)
            async for event in self.new_events(answer):
                await self.write(event)
            await self.write(b"", more_body=False)
            return
        body = b"".join([piece async for piece in answer.pieces])
        if self.has_begun or (answer.status == HTTPStatus.TOO_MANY_REQUESTS and not is_last):
            raise WorkerBusyError(f"the worker does not take the request: {body[:200]!r}")
        await self.begin(answer)
        await self.write(body, more_body=False)

    async def begin(self, answer: Answer) -> None:
        """Send status and headers, once. Mutates."""
        if not self.has_begun:
            self.has_begun = True
            headers = [(name, value) for name, value in answer.headers if name.lower() not in NOT_PASSED]
            await self.send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def write(self, data: bytes, more_body: bool = True) -> None:
        """Send a part of the body."""
        await self.send({"type": "http.response.body", "body": data, "more_body": more_body})

    async def new_events(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the events that the client has not got. Mutates."""
        seen = dict.fromkeys(self.sent, 0)
        async for event in whole_events(answer.pieces):
            if ENDS.match(event):
                raise WorkerGoneError("the worker ended while it answered")
            if event.startswith(b":"):
                yield event
                continue
            choice = CHOICE.search(event)
            name = choice[1] if choice else b""
            own = self.sent.setdefault(name, [])
            place = seen[name] = seen.get(name, 0) + 1
            found = hash(COUNTS.sub(b"", event))
            if place > len(own):
                own.append(found)
                yield event
            elif own[place - 1] != found:
                raise begun_again()


async def whole_events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield server-sent events and comments, each with the empty line that ends it."""
    rest = b""
    async for piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            yield event + b"\n\n"
    if rest:
        yield rest


def begun_again() -> ApiError:
    """Return the error of a stream that cannot go on."""
    return ApiError(
        HTTPStatus.BAD_GATEWAY,
        "the worker that wrote this answer has ended. The request was begun again elsewhere, and the new answer is not "
        "the one that was sent so far, so it stops here; ask again. With --batch-invariant, workers of one kind and a "
        "seed or temperature 0, answers go on",
        code="begun_again",
    )
