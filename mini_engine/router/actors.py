"""Workers that are actors of Ray, on any machine of its cluster. Ray places them and starts them again.

A call of an actor costs a millisecond, so an answer is fetched in batches: a call waits until something is there, and
returns all of it.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from typing import Any

import ray
from ray.exceptions import RayError
from starlette.types import ASGIApp

from mini_engine.router.workers import Answer, Asked, Call, Headers, WorkerGoneError

MOST_CALLS = 10_000  # that may wait in an actor at once


class AppActor:
    """An application in a process of Ray's."""

    def __init__(self, make_app: Callable[[], ASGIApp]) -> None:
        """Build the application here."""
        self.app = make_app()
        self.calls = dict[int, Call]()

    async def start(self, number: int, asked: Asked) -> tuple[int, Headers]:
        """Begin call ``number``; return its status and headers. Mutates."""
        self.calls[number] = Call(self.app, asked)
        return await self.calls[number].start()

    async def more(self, number: int) -> bytes:
        """Return all that is new of a call, empty at the end."""
        return await self.calls[number].more()

    async def leave(self, number: int) -> None:
        """End a call. Mutates."""
        if number in self.calls:
            await self.calls.pop(number).leave()


class RayWorker:
    """An actor that holds an application."""

    def __init__(self, name: str, make_app: Callable[[], ASGIApp]) -> None:
        """Let Ray start the actor. ``make_app`` runs in it, again after each restart."""
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": MOST_CALLS}
        self.name = name
        self.actor: Any = ray.remote(**options)(AppActor).remote(make_app)
        self.numbers = count()

    @asynccontextmanager
    async def answer(self, asked: Asked) -> AsyncIterator[Answer]:
        """Send a request."""
        number = next(self.numbers)

        async def pieces() -> AsyncIterator[bytes]:
            with gone(self.name):
                while data := await self.actor.more.remote(number):
                    yield data

        try:
            with gone(self.name):
                status, headers = await self.actor.start.remote(number, asked)
            yield Answer(status, headers, pieces())
        finally:
            with suppress(RayError):
                self.actor.leave.remote(number)

    async def close(self) -> None:
        """Kill the actor's process; Ray starts it again."""
        ray.kill(self.actor, no_restart=False)


@contextmanager
def gone(name: str) -> Iterator[None]:
    """Raise Ray's errors as ``WorkerGoneError``."""
    try:
        yield
    except RayError as error:
        raise WorkerGoneError(f"{name} is gone: {type(error).__name__}") from error


@contextmanager
def cluster() -> Iterator[None]:
    """Join Ray's cluster, the one that $RAY_ADDRESS names, or begin one on this machine."""
    ray.init(include_dashboard=False, log_to_driver=True)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def actors(count: int, make_app: Callable[[], ASGIApp]) -> Iterator[list[RayWorker]]:
    """Let Ray run ``count`` workers until the context is left. Begins when all have built their applications."""
    with cluster():
        started = [RayWorker(f"actor-{number}", make_app) for number in range(count)]
        ray.get([each.actor.__ray_ready__.remote() for each in started])
        yield started
