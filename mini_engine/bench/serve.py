"""``mini-engine bench serve``: the HTTP server, the ``AsyncEngine`` behind it, and the server of transformers.

Servers run in processes of their own and stream to this one. ``AsyncEngine`` runs in this one. The systems take turns
in every round. Ratios are taken within a round, and the median round is reported. No end-of-sequence id stops a
request, and every round has prompts of its own.
"""

import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from typing import Annotated, Any, Protocol

import torch
import typer
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from mini_engine.async_engine import AsyncEngine
from mini_engine.attention.allocator import pages_needed
from mini_engine.bench.machine import chosen, machine
from mini_engine.bench.workload import make_jobs, percentile
from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.config import DEFAULT_POOL_TOKENS, EngineConfig
from mini_engine.llm import load_driver, make_engine
from mini_engine.sampler.params import SamplingParams
from mini_engine.tiny.corpus import documents

BARE, OURS, THEIRS = "AsyncEngine", "mini-engine serve", "transformers serve"
RUNNING, TOKENS_PER_STEP, PAGE_TOKENS = 32, 512, 32  # the first two are the defaults of ``mini-engine serve``
HOST = "127.0.0.1"
LEAST_SPEED, MOST_TTFT = 0.85, 1.3
THEIR_COMMAND = ["transformers.cli.transformers", "serve", str(TINY_MODEL), "--device", "cpu", "--host", HOST]
# As much memory and as long a step as the engine has; by itself it would take nearly all memory of the machine.
CONTINUOUS = f"--continuous-batching --cb-block-size {PAGE_TOKENS} --cb-max-batch-tokens {TOKENS_PER_STEP}".split()
CONTINUOUS += ["--cb-num-blocks", str(pages_needed(DEFAULT_POOL_TOKENS, PAGE_TOKENS))]


@dataclass(frozen=True)
class Ask:
    """A request of the load: the text before the answer, and the seconds from the start to its arrival."""

    prompt: str
    new_tokens: int
    arrival_s: float


class System(Protocol):
    """What answers requests."""

    async def ask(self, ask: Ask) -> list[float]:
        """Stream one answer; return the moments at which text came. Raises ``RuntimeError`` for a wrong length."""


class Bare:
    """``AsyncEngine`` without HTTP. Prompts are tokenized as in the server."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Load the embedded model, with what ``mini-engine serve`` sets."""
        config = EngineConfig.serving(
            max_running_requests=RUNNING, max_tokens_per_step=TOKENS_PER_STEP, prefix_cache="radix"
        )
        self.tokenizer = tokenizer
        self.engine = AsyncEngine(make_engine(load_driver(None, config), tokenizer.backend_tokenizer))

    async def ask(self, ask: Ask) -> list[float]:
        """Stream one answer."""
        params = SamplingParams(max_new_tokens=ask.new_tokens, ignore_eos=True)
        handle = await self.engine.submit(self.tokenizer.encode(ask.prompt), params)
        moments = []
        async for deltas in handle.steps():
            if any(delta.text for delta in deltas):
                moments.append(time.perf_counter())
        check_length(ask, len(handle.outputs[handle.names[0]].token_ids))
        return moments


class Received(asyncio.Protocol):
    """The other end of a connection: all that came, piece by piece, with the moments."""

    def __init__(self) -> None:
        """Wait for the first piece."""
        self.pieces: list[bytes] = []
        self.moments: list[float] = []
        self.closed = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Keep a piece. It is read after the last one, so that reading slows no server down. Mutates."""
        self.moments.append(time.perf_counter())
        self.pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let the reader go on. Mutates."""
        self.closed.set_result(None)

    def events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yield the events of the stream, each with the moment at which its end came."""
        ends = list(accumulate(map(len, self.pieces)))
        for found in re.finditer(rb"data: (\{.*\})\r?\n", b"".join(self.pieces)):
            yield self.moments[bisect(ends, found.end() - 1)], json.loads(found[1])


class Http:
    """A server of OpenAI's interface. Each request has a connection of its own."""

    def __init__(self, port: int, more: Callable[[Ask], dict[str, Any]]) -> None:
        """Ask the server at ``port``. ``more``: the fields of a request that this server needs."""
        self.port = port
        self.more = more

    async def ask(self, ask: Ask) -> list[float]:
        """Stream one answer."""
        fields = {"prompt": ask.prompt, "max_tokens": ask.new_tokens, "stream": True, **self.more(ask)}
        body = json.dumps(fields).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json"
        loop = asyncio.get_running_loop()
        transport, received = await loop.create_connection(Received, HOST, self.port)
        transport.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await received.closed
        events = list(received.events())
        usages = [event["usage"] for _, event in events if event.get("usage")]
        check_length(ask, usages[-1]["completion_tokens"] if usages else 0)
        return [moment for moment, event in events if event["choices"] and event["choices"][0]["text"]]


def our_fields(ask: Ask) -> dict[str, Any]:
    """Return what makes our server generate greedily and past the end of the text, and report the tokens."""
    return {"temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}


def their_fields(ask: Ask) -> dict[str, Any]:
    """Return what makes the server of transformers do the same."""
    config = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": ask.new_tokens}
    return {"model": str(TINY_MODEL), "generation_config": json.dumps(config)}


def check_length(ask: Ask, num_tokens: int) -> None:
    """Raise ``RuntimeError`` if an answer has another length than was asked for: then the figures mean nothing."""
    if num_tokens != ask.new_tokens:
        raise RuntimeError(f"{ask.new_tokens} tokens were asked for and {num_tokens} came")


@contextmanager
def server(command: Sequence[str], threads: int) -> Iterator[int]:
    """Run a server until the context is left; yield its port. Raises ``RuntimeError`` if it does not start."""
    with socket.socket() as own:
        own.bind((HOST, 0))
        port = own.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as log,
        subprocess.Popen(
            [sys.executable, "-m", *command, "--port", str(port)], stdout=log, stderr=log, env=environment
        ) as process,
    ):
        try:
            while not answers(port):
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError((log.read().strip().splitlines() or ["it ended without a word"])[-1])
                time.sleep(0.1)
            yield port
        finally:
            process.kill()


def answers(port: int) -> bool:
    """Return whether a server listens at ``port``."""
    with socket.socket() as own:
        return own.connect_ex((HOST, port)) == 0


def make_asks(workload: str, count: int, tokenizer: PreTrainedTokenizerBase, rate: float, seed: int) -> list[Ask]:
    """Return requests with the lengths and arrivals of ``make_jobs``, and stories as prompts."""
    texts = map(tokenizer.encode, documents(seed))
    ids = list[int]()
    asks = []
    for job in make_jobs(workload, count, 1, rate, seed):
        while len(ids) < len(job.prompt_ids):
            ids += next(texts)
        prompt, ids = ids[: len(job.prompt_ids)], ids[len(job.prompt_ids) :]
        asks.append(Ask(tokenizer.decode(prompt), job.new_tokens, job.arrival_s))
    return asks


@dataclass(frozen=True)
class Figures:
    """A load served once. Times in milliseconds; ``itl``: from one piece of an answer's text to the next."""

    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float


async def serve_load(system: System, asks: Sequence[Ask]) -> Figures:
    """Send ``asks`` as they arrive and wait for the last answer."""
    began = time.perf_counter()

    async def one(ask: Ask) -> list[float]:
        await asyncio.sleep(began + ask.arrival_s - time.perf_counter())
        return await system.ask(ask)

    answers = await asyncio.gather(*map(one, asks))
    seconds = max(moments[-1] for moments in answers) - began
    ttft = [moments[0] - began - ask.arrival_s for ask, moments in zip(asks, answers, strict=True)]
    itl = [after - before for moments in answers for before, after in pairwise(moments)]
    times = [1e3 * percentile(values, percent) for values in (ttft, itl) for percent in (50, 99)]
    return Figures(sum(ask.new_tokens for ask in asks) / seconds, *times)


@dataclass(frozen=True)
class Row:
    """One system under one load: medians over the rounds, and the median ratios to ``AsyncEngine`` in a round.

    ``rate``: arrivals per second; 0.0: all at once.
    """

    rate: float
    system: str
    figures: Figures
    over_bare: Figures


def medians(rounds: Sequence[Figures]) -> Figures:
    """Return the median of every figure."""
    return Figures(*(statistics.median(getattr(one, each.name) for one in rounds) for each in fields(Figures)))


def ratios(own: Figures, bare: Figures) -> Figures:
    """Return every figure as a multiple of the other's."""
    return Figures(*(getattr(own, each.name) / getattr(bare, each.name) for each in fields(Figures)))


async def measure(systems: Mapping[str, System], loads: Mapping[float, list[list[Ask]]]) -> list[Row]:
    """Let all systems serve all loads in turn. ``loads``: for each rate the rounds; the first does not count."""
    rows = []
    with tqdm(total=len(systems) * sum(map(len, loads.values())), unit="run") as bar:
        for rate, rounds in loads.items():
            runs: dict[str, list[Figures]] = {name: [] for name in systems}
            for asks in rounds:
                for name, system in systems.items():
                    bar.set_postfix_str(f"{name}, {rate:g}/s")
                    runs[name].append(await serve_load(system, asks))
                    bar.update()
            for name, own in runs.items():
                over = [ratios(*pair) for pair in zip(own[1:], runs[BARE][1:], strict=True)]
                rows.append(Row(rate, name, medians(own[1:]), medians(over)))
    return rows


def print_rows(rows: Sequence[Row]) -> None:
    """Print the table; the numbers in brackets are multiples of those of ``AsyncEngine``."""
    names = "out tok/s", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms"
    typer.echo(f"\n{'arrivals':17}{'system':32}" + "".join(f"{name:>17}" for name in names))
    for row in rows:
        pairs = zip(asdict(row.figures).values(), asdict(row.over_bare).values(), strict=True)
        arrivals = f"{row.rate:g} per second" if row.rate else "all at once"
        typer.echo(f"{arrivals:17}{row.system:32}" + "".join(f"{own:9.1f} ({over:5.2f})" for own, over in pairs))


def print_goals(rows: Sequence[Row]) -> None:
    """Print the promises of the server, and whether they are kept."""
    for row in (row for row in rows if row.system == OURS):
        over = row.over_bare
        if row.rate:
            text = f"<= {MOST_TTFT:g}"
            value = over.ttft_p99
            is_kept = value <= MOST_TTFT
            text = f"p99 of TTFT at {row.rate:g} per second {text}"
        else:
            text = f">= {LEAST_SPEED:g}"
            value = over.tokens_per_s
            is_kept = value >= LEAST_SPEED
            text = f"streamed throughput {text}"
        typer.echo(f"{text} of {BARE}: {value:.2f}, {'reached' if is_kept else 'MISSED'}")


def bench_serve(
    workload: Annotated[
        str, typer.Option(help="equal: prompts of 128, answers of 64 tokens. ragged: 16-512 and 8-256.")
    ] = "equal",
    requests: Annotated[int, typer.Option(help="Requests of a load.", min=1)] = 128,
    rate: Annotated[
        list[float] | None, typer.Option(help="Poisson arrivals per second, in addition to all at once.")
    ] = None,
    peer: Annotated[bool, typer.Option(help="Measure transformers serve too.")] = True,
    rounds: Annotated[int, typer.Option(help="Counted rounds.", min=1)] = 5,
    threads: Annotated[int, typer.Option(help="Torch threads of every system.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Seed of prompts, lengths and arrivals.")] = 0,
) -> None:
    """Stream one load from the server, from AsyncEngine alone and from transformers serve; the last line is JSON."""
    chosen([workload], ("ragged", "equal"), "workload")
    command = (
        f"mini-engine bench serve --workload {workload} --requests {requests} --rounds {rounds} --threads {threads} "
        f"--seed {seed}" + "".join(f" --rate {each:g}" for each in rate or ()) + ("" if peer else " --no-peer")
    )
    torch.set_num_threads(threads)
    where = machine(threads)
    typer.echo(f"{command}\n{json.dumps(where)}")
    tokenizer = load_tokenizer(TINY_MODEL)
    seeds = range(seed, seed + rounds + 1)
    loads = {
        each: [make_asks(workload, requests, tokenizer, each, own) for own in seeds] for each in (0.0, *(rate or ()))
    }
    commands = {OURS: (["mini_engine", "serve"], our_fields)}
    if peer:
        commands |= {
            THEIRS: (THEIR_COMMAND, their_fields),
            f"{THEIRS}, continuous": ([*THEIR_COMMAND, *CONTINUOUS], their_fields),
        }
    with ExitStack() as stack:
        systems: dict[str, System] = {BARE: Bare(tokenizer)}
        unavailable = {}
        for name, (own, more) in commands.items():
            try:
                systems[name] = Http(stack.enter_context(server(own, threads)), more)
            except RuntimeError as error:
                unavailable[name] = str(error)
        rows = asyncio.run(measure(systems, loads))
    print_rows(rows)
    for name, reason in unavailable.items():
        typer.echo(f"{name}: not runnable here: {reason}")
    print_goals(rows)
    report = {"command": command, "machine": where, "rows": [asdict(row) for row in rows], "unavailable": unavailable}
    typer.echo(json.dumps(report))
