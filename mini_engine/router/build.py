"""From workers to a router that is ready to run."""

import re
from collections.abc import Iterable
from pathlib import Path

from mini_engine.checkpoint import load_config, load_tokenizer
from mini_engine.config import EngineConfig
from mini_engine.router.fleet import Fleet
from mini_engine.router.front import create_front
from mini_engine.router.policy import PrefixPolicy
from mini_engine.router.servers import HttpWorker
from mini_engine.router.workers import Worker
from mini_engine.server.build import LOOPBACK, Answering, admission, limits_of
from mini_engine.server.life import Server, make_server
from mini_engine.server.reader import Reader, Sizes

SERVER = re.compile(r"https?://((?:\[[\w:.%]+\]|[^/?#@:\s]+)(?::\d+)?)(?:/v1)?/?")  # nothing of a path is asked for


def build_router(
    workers: Iterable[Worker], folder: Path, name: str, options: Answering, config: EngineConfig
) -> Server:
    """Return a router to ``workers``, which serve the model in ``folder`` under ``name``. Raises ``ValueError``."""
    model = load_config(folder)
    sizes = Sizes(config.positions(model), model.vocab_size)
    reader = Reader(load_tokenizer(folder), name, sizes, limits_of(options), tool_parser=options.tool_parser)
    own = admission(options)
    headers = [] if own["api_key"] is None else [(b"authorization", f"Bearer {own['api_key']}".encode())]
    app = create_front(Fleet(workers, PrefixPolicy(), headers), reader, **own)
    return make_server(app, options.host or LOOPBACK[0], options.port, access_log=False)  # each worker has one


def servers_at(urls: Iterable[str]) -> list[HttpWorker]:
    """Return the servers at ``urls`` as workers, named after host and port. Raises ``ValueError``."""
    workers: dict[str, HttpWorker] = {}
    for url in urls:
        found = SERVER.fullmatch(url)
        if found is None:
            raise ValueError(f"--worker is {url!r}; give the URL of a server, like http://10.0.0.5:8000")
        if found[1] in workers:
            raise ValueError(f"--worker names {found[1]} twice; name each server once")
        workers[found[1]] = HttpWorker(found[1], url)
    return list(workers.values())
