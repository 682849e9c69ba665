"""``mini-engine bench route``: where requests go, simulated with the policy of the router and its rivals.

The costs of a step are measured on the embedded model first, or given. What follows depends on them and on the seed
alone. A load grows with the workers: as many requests, examples and open chats for each.
"""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Annotated

import numpy as np
import torch
import typer
from tqdm import tqdm

from mini_engine.bench.machine import chosen, machine
from mini_engine.bench.serving import Models
from mini_engine.bench.workload import make_jobs, percentile
from mini_engine.checkpoint import TINY_MODEL
from mini_engine.config import EngineConfig
from mini_engine.outputs import StepOutput
from mini_engine.router.rules import RULES, VARIANTS
from mini_engine.router.simulation import Costs, Limits, Session, Simulation, Turn

WORKERS = (2, 4, 8, 16, 32, 64, 128, 256)
VOCABULARY = 1000
SYSTEM, QUESTION, ANSWER, TURNS = 128, 48, 32, 6  # tokens of a chat, and its requests
EXAMPLES, ASKED, GIVEN = 384, 24, 16  # tokens of a set of examples, of a question and of its answer
OPEN_CHATS, SETS = 16, 32  # for each worker
BUSY = 1.0  # of the time a worker would compute if nothing were cached and four requests shared each step
SHARED = 4


def per_second(prompt: float, answer: int, costs: Costs) -> float:
    """Return how many requests a second keep a worker busy for ``BUSY`` of the time."""
    return BUSY / (costs.token * prompt + answer * (costs.row + costs.step / SHARED))


def chats(workers: int, requests: int, costs: Costs, seed: int) -> list[Session]:
    """Return conversations with one system prompt; ``requests`` for each worker, in chats of ``TURNS``."""
    source = random.Random(seed)

    def draw(size: int) -> list[int]:
        return source.choices(range(VOCABULARY), k=size)

    prompt = SYSTEM + QUESTION + (TURNS - 1) / 2 * (QUESTION + ANSWER)
    rate = workers * per_second(prompt, ANSWER, costs)
    pause = OPEN_CHATS * workers / rate
    system = draw(SYSTEM)
    sessions = []
    for arrival in accumulate(source.expovariate(rate / TURNS) for _ in range(workers * requests // TURNS)):
        first = Turn(system + draw(QUESTION), draw(ANSWER))
        later = [Turn(draw(QUESTION), draw(ANSWER), source.expovariate(1 / pause)) for _ in range(TURNS - 1)]
        sessions.append(Session(arrival, [first, *later]))
    return sessions


def few_shot(workers: int, requests: int, costs: Costs, seed: int) -> list[Session]:
    """Return questions after sets of examples; the n-th set is asked 1 / n times as often as the first one."""
    source = random.Random(seed)

    def draw(size: int) -> list[int]:
        return source.choices(range(VOCABULARY), k=size)

    rate = workers * per_second(EXAMPLES + ASKED, GIVEN, costs)
    sets = [draw(EXAMPLES) for _ in range(workers * SETS)]
    weights = list(accumulate(1 / n for n in range(1, len(sets) + 1)))
    asked = source.choices(sets, cum_weights=weights, k=workers * requests)
    arrivals = accumulate(source.expovariate(rate) for _ in asked)
    return [Session(when, [Turn(own + draw(ASKED), draw(GIVEN))]) for when, own in zip(arrivals, asked, strict=True)]


LOADS = {"chat": chats, "few-shot": few_shot}


@dataclass(frozen=True)
class Row:
    """One load with one rule, simulated. ``ttft_p50``, ``ttft_p99``: seconds. ``busy``: share of the workers' time."""

    load: str
    rule: str
    workers: int
    hit_rate: float
    ttft_p50: float
    ttft_p99: float
    longest_queue: int
    busy: float


def simulate(load: str, rule: str, workers: int, requests: int, costs: Costs, seed: int) -> Row:
    """Simulate ``requests`` for each worker."""
    sessions = LOADS[load](workers, requests, costs, seed)
    out = Simulation((RULES | VARIANTS)[rule](seed), workers, costs, Limits()).run(sessions)
    p50, p99 = (percentile(out.ttft, percent) for percent in (50, 99))
    return Row(load, rule, workers, out.hit_rate, p50, p99, out.longest_queue, out.busy)


def as_one(load: str, workers: int, requests: int, costs: Costs, seed: int) -> float:
    """Return the hit rate of the same load on one engine with the pools of all ``workers``, and as fast as they."""
    sessions = LOADS[load](workers, requests, costs, seed)
    limits = Limits()
    together = Limits(*(workers * limit for limit in (limits.pool, limits.running, limits.step)))
    faster = Costs(*(cost / workers for cost in (costs.step, costs.token, costs.row)))
    return Simulation(RULES["round robin"](seed), 1, faster, together).run(sessions).hit_rate


def measure_costs(seed: int, requests: int, rounds: int) -> tuple[Costs, float]:
    """Fit the costs to the steps of the embedded model; return them and the median error of a step, relative.

    A step counts with the least of its times in ``rounds`` rounds, in which the same steps are made.
    """
    system, _ = Models(TINY_MODEL).system(EngineConfig.serving())
    jobs = make_jobs("ragged", requests, VOCABULARY, 0, seed)
    logs = list[list[StepOutput]]()
    for _ in tqdm(range(rounds), desc="costs", unit="round"):
        system.open()
        logs.append(list(system.serve(jobs).steps))
        system.close()
    spent = np.array([[sum(step.seconds.values()) for step in log] for log in logs]).min(axis=0)
    work = np.array([[1, prompt_tokens(step), len(step.chunks)] for step in logs[0]])
    fitted = np.linalg.lstsq(work / spent[:, None], np.ones(len(spent)), rcond=None)[0]  # relative errors count
    error = float(np.median(np.abs(work @ fitted / spent - 1)))
    return Costs(*(max(float(cost), 0.0) for cost in fitted)), error


def prompt_tokens(step: StepOutput) -> int:
    """Return how many tokens of prompts a step computed: those in chunks of more than one."""
    return sum(size for _, _, size in step.chunks if size > 1)


def bench_route(
    load: Annotated[list[str] | None, typer.Option(help=f"{' or '.join(LOADS)}; both.")] = None,
    rule: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join([*RULES, *VARIANTS])}; the first {len(RULES)}.")
    ] = None,
    workers: Annotated[list[int] | None, typer.Option(help="How many, one or more times; 2 to 256.", min=1)] = None,
    requests: Annotated[int, typer.Option(help="For each worker.", min=TURNS)] = 120,
    costs: Annotated[
        tuple[float, float, float] | None,
        typer.Option(help="Seconds of a step, of a prompt token and of a row; measured."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of loads and rules.")] = 0,
) -> None:
    """Simulate where requests go with 2 to 256 workers; the last line is JSON."""
    loads = chosen(load, LOADS, "load")
    rules = chosen(rule, RULES | VARIANTS, "rule") if rule else list(RULES)
    began = time.perf_counter()
    found, error = (Costs(*costs), None) if costs else measure_costs(seed, requests=64, rounds=5)
    where = machine(torch.get_num_threads())
    typer.echo(f"costs of a step, seconds: {asdict(found)}; error of a step: {error}\n{json.dumps(where)}")
    runs = [(name, count, one) for name in loads for count in workers or WORKERS for one in rules]
    rows = [
        simulate(name, one, count, requests, found, seed)
        for name, count, one in tqdm(sorted(runs, key=lambda run: run[1]), desc="simulated", unit="run")
    ]
    one = {name: as_one(name, 2, requests, found, seed) for name in loads}
    print_rows(rows, one)
    report = {"requests": requests, "seed": seed, "costs": asdict(found), "error": error, "machine": where}
    report |= {"one_engine": one, "rows": [asdict(row) for row in rows], "seconds": time.perf_counter() - began}
    typer.echo(json.dumps(report))


def print_rows(rows: Sequence[Row], one: dict[str, float]) -> None:
    """Print the table, and how near two workers come to one engine."""
    head = f"{'load':10}{'workers':>8}  {'rule (simulated)':20}{'hits':>7}{'TTFT p50 ms':>13}{'p99 ms':>9}"
    typer.echo(f"{head}{'queue':>7}{'busy':>7}")
    for row in sorted(rows, key=lambda row: row.load):
        typer.echo(
            f"{row.load:10}{row.workers:8}  {row.rule:20}{row.hit_rate:7.1%}{row.ttft_p50 * 1e3:13.1f}"
            f"{row.ttft_p99 * 1e3:9.1f}{row.longest_queue:7}{row.busy:7.0%}"
        )
    for row in rows:
        if row.rule == "prefix" and row.workers == 2:
            share = row.hit_rate / one[row.load]
            typer.echo(
                f"{row.load}: hit rate of two workers over one engine with both pools >= 0.95: {share:.3f}, "
                f"{'reached' if share >= 0.95 else 'MISSED'}"
            )
