"""From a model to a server that is ready to run."""

import os
from collections.abc import Mapping
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from mini_engine.async_engine import AsyncEngine
from mini_engine.llm import make_engine
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.server.app import create_app
from mini_engine.server.life import Server, make_server
from mini_engine.server.service import Limits, Service

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Answering(Protocol):
    """The options of the command."""

    host: str
    port: int
    api_key: str | None
    max_waiting: int
    timeout: float
    drain: float
    page: bool | None
    tool_parser: str | None


def build_server(
    driver: SamplingDriver,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    options: Answering,
    defaults: Mapping[str, Any] | None = None,
) -> Server:
    """Return a server of ``driver``'s model under ``name``; ``Service`` takes ``defaults``. Raises ``ValueError``."""
    limits = Limits(max_waiting=options.max_waiting, timeout_s=options.timeout, drain_s=options.drain)
    engine = AsyncEngine(make_engine(driver, tokenizer.backend_tokenizer), limits.max_waiting)
    service = Service(engine, tokenizer, name, limits, defaults, options.tool_parser)
    key = options.api_key or os.environ.get("MINI_ENGINE_API_KEY") or None
    page = options.host in LOOPBACK if options.page is None else options.page
    return make_server(create_app(service, key, page), options.host, options.port)
