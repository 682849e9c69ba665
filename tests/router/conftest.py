"""Routers to workers without engines, driven as applications."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from mini_engine.checkpoint import TINY_MODEL, load_config, load_tokenizer
from mini_engine.router.fleet import Fleet
from mini_engine.router.front import create_front
from mini_engine.router.policy import PrefixPolicy
from mini_engine.router.workers import AppWorker, Asked
from mini_engine.server.reader import Reader, Sizes

from .fake import Fake


@pytest.fixture(scope="session")
def reader():
    return Reader(load_tokenizer(TINY_MODEL), "tiny", Sizes(2048, load_config(TINY_MODEL).vocab_size))


class Router:
    """A router that runs in the loop of a test, and a client for it."""

    def __init__(self, workers, reader, **options):
        self.fleet = Fleet(workers, PrefixPolicy(), options.pop("headers", ()))
        self.app = create_front(self.fleet, reader, **options)
        self.door = AppWorker("router", self.app)

    async def ask(self, method, target, body=None, headers=()):
        """Return status, headers and body of one answer."""
        async with self.opened(method, target, body, headers) as answer:
            return answer.status, dict(answer.headers), b"".join([piece async for piece in answer.pieces])

    def opened(self, method, target, body=None, headers=()):
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = [(b"content-type", b"application/json")] if data else []
        return self.door.answer(Asked(method, target, [*kind, *headers], data))

    async def until(self, condition, seconds=5.0):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)


@pytest.fixture
def routing(reader):
    """Return a context with a router to applications, ``Fake`` ones if numbers are given."""

    @asynccontextmanager
    async def context(*apps, **options):
        workers = [AppWorker(f"w{number}", app) for number, app in enumerate(apps)]
        router = Router(workers, reader, **options)
        async with router.fleet.watched():
            yield router

    return context


@pytest.fixture
def fakes():
    return [Fake(), Fake()]
