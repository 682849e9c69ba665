"""``mini-engine bench ranks``: a step of one model in several processes, in the products of a rank and in exchanges.

The ranks share this machine, its cores and its memory, so more of them are not faster here. What is measured is what a
step waits for: the exchanges of rank 0, other ranks that come late included, and the rest, which is its own products.
What networks would add is computed beside it on paper, from the bytes and the number of exchanges.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import transformers
import typer
from tqdm import tqdm

from mini_engine.attention.metadata import SequenceChunk, pack_batch
from mini_engine.bench.machine import SHAPES, chosen, machine, make_checkpoint
from mini_engine.checkpoint import load_config
from mini_engine.config import Dtype, EngineConfig, Exchange, ModelConfig
from mini_engine.llm import load_driver
from mini_engine.ranks.split import divides
from mini_engine.sampler.driver import SamplingDriver, StepInputs, Worker

NETWORKS = {"10 Gbit Ethernet": (50e-6, 1.25e9), "100 Gbit, RDMA": (5e-6, 12.5e9)}  # s of an exchange, bytes per s
CONTEXT = 64  # tokens before those of a step


@dataclass(frozen=True)
class Row:
    """A step of ``rows`` tokens at ``ranks`` ranks: medians of its seconds, and of those within exchanges.

    ``refused``: why this machine does not compute it. ``received``: bytes that a rank gets from others. ``on_paper``:
    the seconds of its exchanges over each of ``NETWORKS``.
    """

    shape: str
    ranks: int
    mode: str
    rows: int
    step_s: float = 0.0
    exchange_s: float = 0.0
    exchanges: int = 0
    received: int = 0
    on_paper: dict[str, float] | None = None
    refused: str | None = None


def received(model: ModelConfig, ranks: int, mode: str, rows: int, itemsize: int) -> int:
    """Return the bytes that one rank gets from the others in the layers of a step of ``rows`` tokens.

    A gather brings the columns that the others have. A sum goes around a ring twice, a share of the columns at a time.
    """
    others = (ranks - 1) / ranks
    gathered = model.q_size + 2 * model.hidden_size + model.intermediate_size
    columns = 2 * 2 * model.hidden_size if mode == "sum" else gathered
    return int(model.num_hidden_layers * rows * columns * others * itemsize)


def time_steps(driver: SamplingDriver, rows: int, rounds: int) -> tuple[float, float, int]:
    """Return the median seconds of a step, of its exchanges, and their number, after one step that is not counted."""
    config = driver.config
    pages = -(-(CONTEXT + rows) // config.page_size)
    batch = pack_batch([SequenceChunk([7] * rows, CONTEXT, range(pages))], config.page_size)
    worker: Worker = driver.make_worker(pages)
    spent = list[float]()

    def timed(call: Callable[[Any], None], given: Any) -> None:
        began = time.perf_counter()
        call(given)
        spent.append(time.perf_counter() - began)

    ranks: Any = getattr(driver, "ranks", None)
    if ranks is not None:
        for name in ("send", "exchange"):
            setattr(ranks, name, partial(timed, getattr(type(ranks), name).__get__(ranks)))
    steps = []
    for _ in range(rounds + 1):
        spent.clear()
        began = time.perf_counter()
        worker.run(StepInputs(batch, batch.logit_rows))
        steps.append((time.perf_counter() - began, sum(spent)))
    step_s, exchange_s = (statistics.median(each) for each in zip(*steps[1:], strict=True))
    return step_s, exchange_s, len(spent)


def measure(shape: str, folder: Path, config: EngineConfig, rows: Sequence[int], rounds: int) -> list[Row]:
    """Measure steps of one number of ranks in one mode."""
    model, ranks = load_config(folder), config.tensor_parallel
    mode = config.tensor_parallel_mode if ranks > 1 else "-"
    try:
        driver = load_driver(folder, config)
    except ValueError as error:
        return [Row(shape, ranks, mode, number, refused=str(error)) for number in rows]
    found = []
    for number in rows:
        step_s, exchange_s, exchanges = time_steps(driver, number, rounds)
        num_bytes = received(model, ranks, mode, number, getattr(torch, config.dtype).itemsize)
        paper = {name: exchanges * latency + num_bytes / rate for name, (latency, rate) in NETWORKS.items()}
        found.append(Row(shape, ranks, mode, number, step_s, exchange_s, exchanges, num_bytes, paper))
    driver.close()
    return found


def bench_ranks(
    shape: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SHAPES)} (tiny, 0.6b)")] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="Numbers of ranks (1, 2, 4)", min=1)] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Tokens of a step (1, 16, 128)", min=1)] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "bfloat16",
    rounds: Annotated[int, typer.Option(help="Counted steps.", min=1)] = 10,
    threads: Annotated[int, typer.Option(help="Torch threads of each rank.", min=1)] = 1,
) -> None:
    """Seconds of a step at several ranks, those within exchanges, and on paper those on networks; ends with JSON."""
    torch.set_num_threads(threads)
    where = machine(threads)
    shapes = chosen(shape, SHAPES, "shape") if shape else ["tiny", "0.6b"]
    command = f"mini-engine bench ranks {' '.join(f'--shape {each}' for each in shapes)} --rounds {rounds}"
    typer.echo(f"{command}\n{json.dumps(where)}")
    transformers.logging.set_verbosity_error()
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for each in shapes:
            folder = make_checkpoint(each, Path(scratch) / each, 0)
            one = EngineConfig(dtype=cast(Dtype, dtype), compute="packed")
            configs = [one] if 1 in (ranks or [1]) else []
            fitting = [n for n in ranks or (2, 4) if n > 1 and divides(n, load_config(folder))]
            modes: Sequence[Exchange] = ("gather", "sum")
            configs += [replace(one, tensor_parallel=n, tensor_parallel_mode=mode) for n in fitting for mode in modes]
            for config in tqdm(configs, desc=each, unit="group"):
                found += measure(each, folder, config, rows or (1, 16, 128), rounds)
    names = "".join(f"{name:>20}" for name in NETWORKS)
    typer.echo(
        f"{'model':6}{'ranks':>6} {'mode':8}{'rows':>5}{'step ms':>10}{'products':>10}{'exchange':>10}{'n':>5}{names}"
    )
    for row in found:
        head = f"{row.shape:6}{row.ranks:>6} {row.mode:8}{row.rows:>5}"
        if row.refused is not None:
            typer.echo(f"{head}  {row.refused}")
            continue
        times = (row.step_s, row.step_s - row.exchange_s, row.exchange_s)
        paper = "".join(f"{1e3 * seconds:>20.2f}" for seconds in (row.on_paper or {}).values())
        typer.echo(f"{head}{''.join(f'{1e3 * seconds:>10.2f}' for seconds in times)}{row.exchanges:>5}{paper}")
    typer.echo(json.dumps({"command": command, "machine": where, "rows": [asdict(row) for row in found]}))
