"""Servers that a router starts itself, in processes that end with it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

from mini_engine.router.servers import HttpWorker
from mini_engine.router.workers import Answer, Asked

HOST = "127.0.0.1"


class Replica(HttpWorker):
    """``mini-engine serve`` on a free port. It is started again if it ends."""

    def __init__(self, name: str, options: Sequence[str], key: str | None = None) -> None:
        """Start it with ``options`` of the command; clients must have the ``key``."""
        with socket.socket() as own:
            own.bind((HOST, 0))
            port = own.getsockname()[1]
        super().__init__(name, f"http://{HOST}:{port}")
        self.command = [sys.executable, "-m", "mini_engine", "serve", *options, "--port", str(port)]
        self.environment = os.environ | ({} if key is None else {"MINI_ENGINE_API_KEY": key})  # not for all to see
        self.start()

    def start(self) -> None:
        """Start the process. Ctrl-C does not reach it, as it is to end after the router. Mutates."""
        self.process = subprocess.Popen(self.command, env=self.environment, start_new_session=True)

    @asynccontextmanager
    async def answer(self, asked: Asked) -> AsyncIterator[Answer]:
        """Send a request; if the process has ended, start it again for those that come later. Mutates."""
        if self.process.poll() is not None:
            self.start()
        async with super().answer(asked) as answer:
            yield answer

    async def close(self) -> None:
        """Kill a process that does not answer, and close all connections."""
        self.process.kill()
        await super().close()

    def wait_until_ready(self) -> None:
        """Wait until it listens. Raises ``ValueError`` if it ends before."""
        while self.process.poll() is None:
            with socket.socket() as own:
                if own.connect_ex((HOST, self.parts.port)) == 0:
                    return
            time.sleep(0.1)
        raise ValueError(f"{self.name} has ended with exit code {self.process.returncode} before it could answer")


@contextmanager
def replicas(count: int, options: Sequence[str], key: str | None = None) -> Iterator[list[Replica]]:
    """Run ``count`` replicas until the context is left. Begins when all can answer. Raises ``ValueError``.

    SIGTERM raises ``SystemExit`` meanwhile, so that they end with this process.
    """
    signal.signal(signal.SIGTERM, end)
    started = list[Replica]()
    try:
        started += (Replica(f"replica-{number}", options, key) for number in range(count))
        for each in started:
            each.wait_until_ready()
        yield started
    finally:
        for each in started:
            each.process.kill()
            each.process.wait()


def end(number: int, _: FrameType | None) -> None:
    """End this process because of a signal, after all contexts were left."""
    sys.exit(128 + number)
