"""``mini-engine bench route-latency``: what a router adds to the time of a request.

A server, and a router to it, in processes of their own. Each request is sent to the server and through the router, one
after the other, over connections that stay open. The difference within a pair is what is reported. The server is
``mini-engine serve``, or one that answers at once: then the router is never cold, as it is not with many clients.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import httpx
import psutil
import typer
from starlette.types import Receive, Scope, Send
from tqdm import tqdm

from mini_engine.bench.machine import machine
from mini_engine.bench.serve import HOST, server
from mini_engine.bench.workload import percentile
from mini_engine.server.stream import event
from mini_engine.server.worker_events import PERIOD_S

MOST_MS = 1.0  # that the router may add, in the middle of all pairs
WARM = 20  # pairs that do not count
STORY = "Once upon a time there was a fox named Mila, and one day she met an owl. "
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": STORY * 2}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": STORY * 2}]}),
    "long chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": STORY * 40}]}),
    "completion, streamed": ("/v1/completions", {"prompt": STORY * 2, "stream": True}),
}


SERVERS = {
    "answers at once": ["uvicorn", "mini_engine.bench.route_latency:at_once", "--log-level", "critical"],
    "mini-engine serve": ["mini_engine", "serve"],
}


async def at_once(scope: Scope, receive: Receive, send: Send) -> None:
    """Be a worker without an engine."""
    if scope["type"] != "http":
        return
    await receive()
    tells = scope["path"] == "/worker_events"
    kind = b"text/event-stream" if tells else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    while tells:
        said = event({"running": 0, "waiting": 0, "dropped": []})
        await send({"type": "http.response.body", "body": said, "more_body": True})
        await asyncio.sleep(PERIOD_S)
    await send({"type": "http.response.body", "body": b"{}"})


@dataclass(frozen=True)
class Row:
    """One kind of request, times in milliseconds: of the server alone, and what the router added in a pair.

    ``router_cpu``: the router's CPU time for a request, the mean.
    """

    server: str
    kind: str
    alone_p50: float
    added_p50: float
    added_p90: float
    router_cpu: float


def measure(name: str, kind: str, urls: tuple[str, str], router: psutil.Process, pairs: int) -> Row:
    """Send pairs of requests to a server and to its router, the process ``router``."""
    path, body = ASKED[kind]
    alone, added = list[float](), list[float]()
    with httpx.Client(timeout=60, trust_env=False) as client:
        for number in tqdm(range(WARM + pairs), unit="pair", desc=kind):
            if number == WARM:
                before = router.cpu_times()
            took = {url: ask(client, url + path, body) for url in random.sample(urls, 2)}
            if number >= WARM:
                alone.append(took[urls[0]])
                added.append(took[urls[1]] - took[urls[0]])
    after = router.cpu_times()
    cpu = 1e3 * (after.user + after.system - before.user - before.system) / pairs
    return Row(name, kind, statistics.median(alone), statistics.median(added), percentile(added, 90), cpu)


def ask(client: httpx.Client, url: str, body: Mapping[str, Any]) -> float:
    """Ask for one token; return the milliseconds. Raises ``httpx.HTTPError``."""
    began = time.perf_counter()
    client.post(url, json={**body, "max_tokens": 1, "temperature": 0}).raise_for_status()
    return 1e3 * (time.perf_counter() - began)


def bench_route_latency(
    pairs: Annotated[int, typer.Option(help="Counted pairs of requests of each kind.", min=1)] = 300,
) -> None:
    """Send requests to a server and through a router to it, in turn; the last line is JSON."""
    command = f"mini-engine bench route-latency --pairs {pairs}"
    where = machine(1)
    typer.echo(f"{command}\n{json.dumps(where)}")
    rows = list[Row]()
    for name, served in SERVERS.items():
        with server(served, 1) as own:
            url = f"http://{HOST}:{own}"
            with server(["mini_engine", "route", "--worker", url], 1) as other:
                router = max(psutil.Process().children(), key=psutil.Process.create_time)
                rows += [measure(name, kind, (url, f"http://{HOST}:{other}"), router, pairs) for kind in ASKED]
    heads = (f"{head:>16}" for head in ("alone, p50", "added, p50", "added, p90", "router's CPU"))
    typer.echo(f"\n{'server':20}{'milliseconds':24}" + "".join(heads))
    for row in rows:
        values = (row.alone_p50, row.added_p50, row.added_p90, row.router_cpu)
        typer.echo(f"{row.server:20}{row.kind:24}" + "".join(f"{value:16.2f}" for value in values))
    short = [row.added_p50 for row in rows if row.server == "answers at once" and row.kind != "long chat"]
    verdict = "reached" if max(short) <= MOST_MS else "MISSED"
    typer.echo(f"at most {MOST_MS:g} ms for a short request to a server that answers at once: {verdict}")
    typer.echo(json.dumps({"command": command, "machine": where, "rows": [asdict(row) for row in rows]}))
