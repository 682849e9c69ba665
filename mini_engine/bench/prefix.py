"""``mini-engine bench prefix``: the radix cache on loads that share prefixes, and on one that does not.

The engine with the cache, without it, and ``transformers.generate`` take turns in every round. Ratios are taken within
a round, and the median round is reported. A load comes in waves, because a later request may continue an earlier one
and its answer, as in a chat or a tree of thoughts. A wave begins when the one before has ended.
"""

import json
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import torch
import transformers
import typer
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from mini_engine.bench.machine import SHAPES, chosen, machine, make_checkpoint
from mini_engine.bench.peers import STATIC, StaticPeer
from mini_engine.bench.serving import EngineSystem, Models, System
from mini_engine.bench.workload import Job, percentile
from mini_engine.config import Dtype, EngineConfig
from mini_engine.radix_cache import RadixCache
from mini_engine.view import EngineView

ON, OFF = "radix cache", "no cache"
SYSTEMS: dict[str, dict[str, Any]] = {
    OFF: {"prefix_cache": None, "wait_for_prefix": None},
    ON: {"prefix_cache": "radix", "wait_for_prefix": 32},
    "radix cache, invariant": {"prefix_cache": "radix", "wait_for_prefix": 32, "batch_invariant": True},
}
WAYS = ("packed", "fast", "compiled")
RUNNING = 32
TREE_TOKENS, PROMPT_TOKENS, PAGE_SIZE = 100_000, 4096, 16


@dataclass(frozen=True)
class Turn:
    """One request: ``own`` tokens after the prompt and the answer of request ``parent`` of the wave before."""

    own: list[int]
    new_tokens: int
    parent: int | None = None


Load = list[list[Turn]]  # in waves


def shared_prompt(draw: Callable[[int], list[int]]) -> Load:
    """64 requests with one system prompt of 512 tokens and 16 to 32 different ones; 32 new tokens."""
    system = draw(512)
    return [[Turn(system + draw(16 + i % 17), 32) for i in range(64)]]


def chats(draw: Callable[[int], list[int]]) -> Load:
    """8 conversations of 4 turns: a system prompt of 128 tokens, questions of 48, answers of 32."""
    system = draw(128)
    later = [[Turn(draw(48), 32, i) for i in range(8)] for _ in range(3)]
    return [[Turn(system + draw(48), 32) for _ in range(8)], *later]


def thoughts(draw: Callable[[int], list[int]]) -> Load:
    """Three levels of three branches each above a task of 192 tokens: 16 tokens a branch, and 24 new ones."""
    waves: Load = [[Turn(draw(192), 24)]]
    for _ in range(3):
        waves.append([Turn(draw(16), 24, parent) for parent in range(len(waves[-1])) for _ in range(3)])
    return waves


def few_shot(draw: Callable[[int], list[int]]) -> Load:
    """4 sets of examples of 384 tokens, 12 questions of 24 tokens for each, mixed; 16 new tokens."""
    examples = [draw(384) for _ in range(4)]
    return [[Turn(examples[i % 4] + draw(24), 16) for i in range(48)]]


def unshared(draw: Callable[[int], list[int]]) -> Load:
    """48 requests of 64 to 250 tokens without a shared prefix; 32 new tokens."""
    return [[Turn(draw(64 + i * 31 % 187), 32) for i in range(48)]]


LOADS: dict[str, Callable[[Callable[[int], list[int]]], Load]] = {
    "shared": shared_prompt,
    "chat": chats,
    "tree": thoughts,
    "few-shot": few_shot,
    "unshared": unshared,
}


@dataclass(frozen=True)
class Served:
    """One load served once. ``prompt_tokens``: of all requests, computed or not. ``evicted``: pages."""

    seconds: float
    output_tokens: int
    ttft: list[float]
    prompt_tokens: int
    hit_rate: float | None
    evicted: int


@dataclass(frozen=True)
class Row:
    """One system on one load: medians over the rounds; ratios to the engine without the cache within a round.

    ``speedup``: of output tokens per second. ``ttft_speedup``: of the median time to the first token.
    """

    load: str
    system: str
    output_tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    speedup: float
    ttft_speedup: float
    hit_rate: float | None
    evicted: int


def serve(system: System, load: Load) -> Served:
    """Serve a load wave by wave. A request continues the answer that this system gave."""
    began = time.perf_counter()
    ttft = list[float]()
    prompts = 0
    before: list[list[int]] = []
    output = 0
    system.open()
    try:
        for wave in load:
            jobs = [Job([*(before[t.parent] if t.parent is not None else []), *t.own], t.new_tokens) for t in wave]
            answers = system.serve(jobs).answers
            before = [job.prompt_ids + answer.token_ids for job, answer in zip(jobs, answers, strict=True)]
            ttft += [answer.times.ttft_s or 0.0 for answer in answers]
            prompts += sum(len(job.prompt_ids) for job in jobs)
            output += sum(len(answer.token_ids) for answer in answers)
        seconds = time.perf_counter() - began
        hit_rate, evicted = reuse(system)
    finally:
        system.close()
    return Served(seconds, output, ttft, prompts, hit_rate, evicted)


def reuse(system: System) -> tuple[float | None, int]:
    """Return the hit rate of a system's prefix cache and its number of evicted pages, if it has a cache."""
    tree = EngineView(system.engine).tree if isinstance(system, EngineSystem) and system.engine is not None else None
    return (None, 0) if tree is None else (tree.stats.hit_rate, tree.stats.num_pages_evicted)


def make_rows(load: str, rounds: Sequence[dict[str, Served]]) -> list[Row]:
    """Reduce the rounds of one load to a row for every system."""

    def middle(values: Sequence[float]) -> float:
        return statistics.median(values)

    rows = []
    for name in rounds[0]:
        each = [one[name] for one in rounds]
        base = [one[OFF] for one in rounds]
        rates = [one.output_tokens / one.seconds for one in each]
        starts = [percentile(one.ttft, 50) for one in each]
        rows.append(
            Row(
                load=load,
                system=name,
                output_tokens_per_s=middle(rates),
                ttft_p50=middle(starts),
                ttft_p99=middle([percentile(one.ttft, 99) for one in each]),
                speedup=middle([r / (b.output_tokens / b.seconds) for r, b in zip(rates, base, strict=True)]),
                ttft_speedup=middle([percentile(b.ttft, 50) / s for s, b in zip(starts, base, strict=True)]),
                hit_rate=each[-1].hit_rate,
                evicted=each[-1].evicted,
            )
        )
    return rows


@dataclass(frozen=True)
class TreeFigures:
    """Microseconds of the tree's operations on a prompt of 4,096 tokens in a tree of 100,000, at 16 tokens a page.

    ``peer_match``: a dictionary from (node, tokens of a page) to node, with one look-up per page, as in block-hash
    caches. ``bytes_per_token``: memory of the tree, without keys and values.
    """

    match: float
    match_half: float
    insert: float
    evict: float
    peer_match: float
    bytes_per_token: float


def measure_tree(seed: int, repeats: int = 15) -> TreeFigures:
    """Time the radix tree and its plain peer on the same prompts; the median of ``repeats`` over all prompts."""
    source = random.Random(seed)
    pages = count()
    stems = [source.choices(range(150_000), k=1024) for _ in range(4)]
    prompts = [stems[i % 4] + source.choices(range(150_000), k=PROMPT_TOKENS - 1024) for i in range(32)]
    tracemalloc.start()
    cache = RadixCache(PAGE_SIZE)
    for prompt in prompts:
        cache.insert(list(prompt), [next(pages) for _ in range(PROMPT_TOKENS // PAGE_SIZE)])
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert cache.total_size > TREE_TOKENS, f"the tree holds {cache.total_size} tokens"
    chains = dict[tuple[Any, ...], int]()
    ids = count(1)
    for prompt in prompts:
        chain(chains, prompt, lambda: next(ids))
    # Equal numbers in other objects, as in a new request.
    asked = [[int(str(token)) for token in prompt] for prompt in prompts]
    halves = [prompt[: PROMPT_TOKENS // 2 + 5] + source.choices(range(150_000), k=2048) for prompt in asked]
    fresh = [source.choices(range(150_000), k=PROMPT_TOKENS) for _ in range(repeats)]
    match = median_us(lambda i: cache.match(asked[i]), repeats * len(asked), len(asked))
    peer = median_us(lambda i: chain(chains, asked[i]), repeats * len(asked), len(asked))
    half = median_us(lambda i: cache.match(halves[i]), len(halves), len(halves))
    own = [[next(pages) for _ in range(PROMPT_TOKENS // PAGE_SIZE)] for _ in fresh]
    insert = median_us(lambda i: cache.insert(fresh[i], own[i]), repeats, repeats)
    evict = median_us(lambda i: cache.evict(64), repeats, repeats)
    return TreeFigures(match, half, insert, evict, peer, held / cache.total_size)


def chain(known: dict[tuple[Any, ...], int], tokens: list[int], fresh: Callable[[], int] | None = None) -> int:
    """Follow ``tokens`` page by page through a dictionary; with ``fresh`` add what is missing. Return the last node."""
    node = 0
    for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        key = (node, *tokens[start : start + PAGE_SIZE])
        if key not in known:
            if fresh is None:
                return node
            known[key] = fresh()
        node = known[key]
    return node


def median_us(call: Callable[[int], object], times: int, size: int) -> float:
    """Return the median of ``times`` calls in microseconds; the call gets 0 … ``size`` - 1 over and over."""
    spent = []
    for n in range(times):
        began = time.perf_counter()
        call(n % size)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent) * 1e6


def goals(shape: str, dtype: str, rows: Sequence[Row], tree: TreeFigures) -> list[tuple[str, float, bool]]:
    """Return the promises for two CPU cores, the measured values, and whether they are kept."""
    found = {row.load: row for row in rows if row.system == ON}
    promised = [("match of 4,096 tokens, us <= 100", tree.match, tree.match <= 100)]
    if "unshared" in found:
        value = found["unshared"].speedup
        promised.append(("nothing to share: of the speed without a cache >= 0.98", value, value >= 0.98))
    if "shared" in found and (shape, dtype) == ("0.6b", "bfloat16"):
        row = found["shared"]
        promised.append(("shared prompt: throughput over no cache >= 4", row.speedup, row.speedup >= 4))
        promised.append(("shared prompt: median TTFT of no cache over >= 5", row.ttft_speedup, row.ttft_speedup >= 5))
    return promised


def make_systems(folder: Path, dtype: Dtype, compute: str, names: Sequence[str]) -> dict[str, System]:
    """Return the systems ``names`` over one checkpoint, warm; ours compute as ``compute`` says."""
    models = Models(folder)
    same = {"dtype": dtype, "compute": compute, "max_running_requests": RUNNING}
    systems: dict[str, System] = {
        name: models.system(EngineConfig.serving(**same, **own))[0] for name, own in SYSTEMS.items() if name in names
    }
    if STATIC in names:
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        systems[STATIC] = StaticPeer(peer, RUNNING)
    return systems


def bench_prefix(
    model: Annotated[str, typer.Option(help="tiny: the embedded model. 0.6b: random weights.")] = "tiny",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    compute: Annotated[str, typer.Option(help=f"How ours compute: {', '.join(WAYS)}.")] = "fast",
    load: Annotated[list[str] | None, typer.Option(help=f"One or more of {', '.join(LOADS)}; all.")] = None,
    system: Annotated[list[str] | None, typer.Option(help=f"{', '.join([*SYSTEMS, STATIC])}; all.")] = None,
    rounds: Annotated[int, typer.Option(help="Counted rounds; 0: 3, at 0.6b 1.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of weights and loads.")] = 0,
) -> None:
    """Serve loads that share beginnings with and without the radix cache; the last line is JSON."""
    chosen([model], SHAPES, "model")
    chosen([dtype], get_args(Dtype), "dtype")
    chosen([compute], WAYS, "compute")
    loads = chosen(load, LOADS, "load")
    names = chosen(system, [*SYSTEMS, STATIC], "system")
    names = [OFF, *(name for name in names if name != OFF)]  # ratios are to it
    rounds = rounds or (1 if model == "0.6b" else 3)
    command = f"mini-engine bench prefix --model {model} --dtype {dtype} --compute {compute} --rounds {rounds}"
    command += f" --seed {seed}" + "".join(
        f" --{option} '{name}'" for option, given in (("load", load), ("system", system)) for name in given or ()
    )
    where = machine(torch.get_num_threads())
    typer.echo(f"{command}\n{json.dumps(where)}")
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_checkpoint(model, Path(scratch) / model, seed)
        systems = make_systems(folder, cast(Dtype, dtype), compute, names)
        rows = [row for name in loads for row in measure(name, systems, rounds, seed)]
    tree = measure_tree(seed)
    promised = goals(model, dtype, rows, tree)
    print_figures(rows, tree)
    for text, reached_value, enough in promised:
        typer.echo(f"{text}: {reached_value:.2f}, {'reached' if enough else 'MISSED'}")
    report = {"command": command, "machine": where, "rows": [asdict(row) for row in rows], "tree": asdict(tree)}
    typer.echo(json.dumps({**report, "goals": promised}))


def measure(name: str, systems: dict[str, System], rounds: int, seed: int) -> list[Row]:
    """Serve one load with every system in turn, ``rounds`` times. Every round draws new tokens."""
    served = []
    with tqdm(total=rounds * len(systems), desc=name, unit="run") as bar:
        for number in range(rounds):
            source = random.Random(seed * 1000 + number)
            drawn = LOADS[name](lambda size, source=source: source.choices(range(1000), k=size))  # type: ignore[misc]
            own = {}
            for system_name, system in systems.items():
                own[system_name] = serve(system, drawn)
                bar.update()
            served.append(own)
    return make_rows(name, served)


def print_figures(rows: Sequence[Row], tree: TreeFigures) -> None:
    """Print the two tables."""
    typer.echo(f"\n{'load':10}{'system':26}{'out tok/s':>10}{'x':>7}{'TTFT p50':>10}{'x':>7}{'p99 s':>8}{'hits':>7}")
    for row in rows:
        hits = "-" if row.hit_rate is None else f"{row.hit_rate:.0%}"
        typer.echo(
            f"{row.load:10}{row.system:26}{row.output_tokens_per_s:10.1f}{row.speedup:7.2f}"
            f"{row.ttft_p50:10.3f}{row.ttft_speedup:7.2f}{row.ttft_p99:8.3f}{hits:>7}"
        )
    typer.echo(
        f"\nthe tree, us: match {tree.match:.0f} (a dictionary, page by page: {tree.peer_match:.0f}), "
        f"match that ends in the middle of a node {tree.match_half:.0f}, insert {tree.insert:.0f}, "
        f"evict 64 pages {tree.evict:.0f}; {tree.bytes_per_token:.0f} bytes per cached token\n"
    )
