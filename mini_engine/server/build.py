"""From a model to a server that is ready to run."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from mini_engine.async_engine import AsyncEngine
from mini_engine.llm import make_engine
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.server.app import create_app
from mini_engine.server.life import Server, make_server
from mini_engine.server.reader import Limits
from mini_engine.server.service import Service

LOOPBACK = ("127.0.0.1", "::1", "localhost")
LOCAL_NAMES = ("127.0.0.1", "[::1]", "localhost")  # in a request's Host


class Answering(Protocol):
    """The options of the command."""

    host: str | None
    port: int
    api_key: str | None
    max_waiting: int
    timeout: float
    drain: float
    allow_origin: list[str] | None
    tool_parser: str | None


def build_server(
    driver: SamplingDriver,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    options: Answering,
    defaults: Mapping[str, Any] | None = None,
    page: bool | None = None,
) -> Server:
    """Return a server of ``driver``'s model under ``name``; ``Service`` takes ``defaults``. Raises ``ValueError``.

    ``page``: as for ``create_app``; by default on loopback alone.
    """
    limits = limits_of(options)
    engine = AsyncEngine(make_engine(driver, tokenizer.backend_tokenizer), limits.max_waiting)
    service = Service(engine, tokenizer, name, limits, defaults, options.tool_parser)
    host = options.host or LOOPBACK[0]
    app = create_app(service, page=host in LOOPBACK if page is None else page, **admission(options))
    return make_server(app, host, options.port)


def limits_of(options: Answering) -> Limits:
    """Return what the server accepts."""
    return Limits(max_waiting=options.max_waiting, timeout_s=options.timeout, drain_s=options.drain)


def admission(options: Answering) -> dict[str, Any]:
    """Return which requests are let in, as ``create_app`` takes it. Raises ``ValueError``."""
    key = options.api_key or os.environ.get("MINI_ENGINE_API_KEY") or None
    origins = checked_origins(options.allow_origin or (), key)
    return {"api_key": key, "hosts": None if options.host else LOCAL_NAMES, "origins": origins}


def checked_origins(origins: Sequence[str], key: str | None) -> Sequence[str]:
    """Return the origins whose pages may call the server. Raises ``ValueError``."""
    for origin in origins:
        if origin == "*" and key is not None:
            raise ValueError("--allow-origin is '*' and there is a key; name the pages that may use it")
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#@*]+", origin):
            raise ValueError(f"--allow-origin is {origin!r}; give one like https://a.org:80, without a path")
    return origins
