"""The server's process: it listens, and when it is told to end it finishes what runs and then aborts the rest."""

import asyncio
from types import FrameType
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mini_engine.server.reader import Limits

GRACE_S = 5  # for the last writes, after everything was aborted
IDLE_S = 30.0  # a connection over which no request has come by then is closed


class Served(Protocol):
    """What answers the requests: a service, or a router."""

    is_ending: bool

    @property
    def limits(self) -> Limits:
        """How long requests have to end."""

    def abort_all(self) -> None:
        """Abort every request."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection, which would wait for its first request for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self.idle_timer = self.loop.call_later(IDLE_S, self.close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop to wait: the timer would keep the connection in memory."""
        self.idle_timer.cancel()
        super().connection_lost(exc)

    def close_if_idle(self) -> None:
        """Close the connection if the headers of its first request have not come."""
        if self.cycle is None:
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server. After SIGTERM it accepts no connection, and requests have ``drain_s`` seconds to end."""

    def __init__(self, config: uvicorn.Config, service: Served) -> None:
        """Serve ``config``, over ``service``."""
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; a second Ctrl-C ends at once."""
        super().handle_exit(sig, frame)
        self.service.is_ending = True

    async def shutdown(self, sockets: Any = None) -> None:
        """Let requests end; abort those that have not after ``drain_s`` seconds."""
        timer = asyncio.get_running_loop().call_later(self.service.limits.drain_s, self.service.abort_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def make_server(app: FastAPI, host: str, port: int, **options: Any) -> Server:
    """Return the server of an application; ``run`` blocks until SIGTERM or Ctrl-C."""
    service: Served = app.state.service
    grace = int(service.limits.drain_s) + GRACE_S
    options |= {"http": Connection, "ws": "none", "timeout_graceful_shutdown": grace, "server_header": False}
    config = uvicorn.Config(app, host, port, **options)
    return Server(config, service)
