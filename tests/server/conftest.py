"""A server with the embedded model in a thread of the tests, and clients for it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI

from mini_engine.async_engine import AsyncEngine
from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.config import EngineConfig
from mini_engine.llm import load_driver, make_engine
from mini_engine.server.app import create_app
from mini_engine.server.life import Server, make_server
from mini_engine.server.service import Limits, Service

CONFIG = EngineConfig(
    batch_invariant=True,
    max_running_requests=8,
    max_tokens_per_step=64,
    preemption=True,
    prefix_cache="radix",
    grammar_backend="auto",
)


class Running:
    """A server that runs in a thread. ``engine`` is its engine, to be looked at between requests."""

    def __init__(
        self, config: EngineConfig, limits: Limits, api_key: str | None, defaults: dict[str, Any] | None
    ) -> None:
        torch.set_num_threads(1)
        self.tokenizer = load_tokenizer(TINY_MODEL)
        engine = make_engine(load_driver(None, config), self.tokenizer.backend_tokenizer)
        self.service = Service(AsyncEngine(engine, limits.max_waiting), self.tokenizer, "tiny", limits, defaults)
        self.engine = engine
        self.api_key = api_key or "none"
        self.server: Server = make_server(create_app(self.service, api_key), "127.0.0.1", 0, log_level="critical")
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def start(self) -> None:
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive(), "the server has not started"
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive(), "the server does not end"

    def client(self, **options: object) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=self.api_key, **{"max_retries": 0, **options})

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def wait_until_idle(self, seconds: float = 5.0) -> None:
        """Wait until no request runs or waits; then every page must be free or cached."""
        end = time.monotonic() + seconds
        while self.engine.has_work or self.engine.entries or self.service.engine.handles:
            assert time.monotonic() < end, f"requests are left: {list(self.engine.entries)}"
            time.sleep(0.01)
        self.engine.scheduler.check_pages()


@contextmanager
def serving(
    config: EngineConfig = CONFIG,
    limits: Limits | None = None,
    api_key: str | None = None,
    defaults: dict[str, Any] | None = None,
) -> Iterator[Running]:
    running = Running(config, limits or Limits(), api_key, defaults)
    running.start()
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture
def client(server: Running) -> OpenAI:
    return server.client()


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client
