"""The server's process: it listens, and when it is told to end it finishes what runs and then aborts the rest."""

import asyncio
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from mini_engine.server.service import Service

GRACE_S = 5  # for the last writes, after everything was aborted


class Server(uvicorn.Server):
    """uvicorn's server. After SIGTERM it accepts no connection, and requests have ``drain_s`` seconds to end."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
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
    service: Service = app.state.service
    grace = int(service.limits.drain_s) + GRACE_S
    config = uvicorn.Config(app, host, port, timeout_graceful_shutdown=grace, server_header=False, **options)
    return Server(config, service)
