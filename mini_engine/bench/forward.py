"""``mini-engine bench forward``: the greedy driver compared with ``transformers.generate``, batch 1, in one process.

All systems have the same prompt and weights, and take turns in every round, so that a slow minute of the machine
affects all of them. Ratios are taken within a round, and the median round is reported. The roofline uses the median
read bandwidth right before and after each run, because other programs can halve it within a round.
"""

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import psutil
import torch
import transformers
import typer
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from mini_engine.bench.machine import SHAPES, machine, make_checkpoint, names_in, peak_rss
from mini_engine.bench.peers import TokenClock, generate_greedily
from mini_engine.config import Dtype, EngineConfig
from mini_engine.driver import GreedyDriver
from mini_engine.llm import load_model, make_driver

SYSTEMS: dict[str, dict[str, Any]] = {
    "off": {},
    "packed": {"compute": "packed"},
    "fast": {"compute": "fast"},
    "invariant": {"batch_invariant": True},
    "packed+invariant": {"compute": "packed", "batch_invariant": True},
    "compiled": {"compute": "compiled"},
}
PEER = "transformers"
READ_ELEMENTS = 1 << 26  # 256 MiB
# What was promised for two CPU cores, as (workload, figure, system) -> least value.
TARGETS = {
    ("tiny float32", "decode", "off"): 1.5,
    ("tiny float32", "decode", "packed"): 2.0,
    ("0.6b bfloat16", "decode", "packed"): 2.5,
    ("0.6b float32", "decode", "packed"): 2.2,
    ("0.6b bfloat16", "roofline", "packed"): 0.55,
    ("0.6b float32", "roofline", "packed"): 0.80,
    ("0.6b bfloat16", "decode", "packed+invariant"): 2.0,
    ("0.6b float32", "decode", "packed+invariant"): 2.0,
    ("0.6b float32", "prefill", "packed"): 2.0,
}


@dataclass(frozen=True)
class Timing:
    """One run: tokens per second of the prefill and of the decode steps after it, and the generated ids."""

    prefill: float
    decode: float
    token_ids: list[int]


@dataclass(frozen=True)
class Row:
    """The figures of one system on one workload: medians over the rounds, and ratios to the peer within a round."""

    workload: str
    system: str
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    prefill_ratio: float
    decode_ratio: float
    roofline: float
    same_ids_as_peer: bool


def time_peer(model: PreTrainedModel, prompt: Sequence[int], new_tokens: int) -> Timing:
    """Time ``transformers.generate``, greedy, with its default attention and cache."""
    clock = TokenClock()
    ids = torch.tensor([prompt])
    began = time.perf_counter()
    out = generate_greedily(model, ids, new_tokens, clock)
    return timing(began, clock.times[1:], prompt, out[0, len(prompt) :].tolist())


def time_driver(driver: GreedyDriver, prompt: Sequence[int], new_tokens: int) -> Timing:
    """Time the greedy driver; it has no end-of-sequence ids, so that both sides generate as much."""
    times, token_ids = [], []
    began = time.perf_counter()
    for step in driver.steps(prompt, new_tokens):
        times.append(time.perf_counter())
        token_ids.append(step.token_id)
    return timing(began, times, prompt, token_ids)


def timing(began: float, times: list[float], prompt: Sequence[int], token_ids: list[int]) -> Timing:
    """Turn the arrival times of the generated tokens into rates."""
    return Timing(len(prompt) / (times[0] - began), (len(times) - 1) / (times[-1] - times[0]), token_ids)


def read_times(block: Tensor) -> list[float]:
    """Return the seconds of each of a few sums of ``block``, far larger than any cache, with all threads."""
    return [timed(block.sum) for _ in range(8)]


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes that a decode step must read: every parameter once (a tied table is the head)."""
    embedding = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.nbytes
    return sum(int(parameter.nbytes) for parameter in model.parameters()) - int(embedding)


def measure(workload: str, dtype: Dtype, folder: Path, prompt_len: int, new_tokens: int, rounds: int) -> list[Row]:
    """Run all systems in turn for ``rounds`` rounds, after one that is not counted, and return a row each."""
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    configs = {name: EngineConfig(dtype=dtype, **SYSTEMS[name]) for name in names_in(dtype, SYSTEMS)}
    drivers = {name: make_driver(load_model(folder, config), config) for name, config in configs.items()}
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, peer.config.vocab_size, (prompt_len,), generator=generator).tolist()
    systems = {PEER: partial(time_peer, peer)} | {name: partial(time_driver, own) for name, own in drivers.items()}
    runs: dict[str, list[Timing]] = {name: [] for name in systems}
    at_best: dict[str, list[float]] = {name: [] for name in systems}
    read = weight_bytes(peer)
    block = torch.ones(READ_ELEMENTS)
    for _ in tqdm(range(rounds + 1), desc=workload, unit="round"):
        for name, run in systems.items():
            before = read_times(block)
            run(prompt, 2)  # the reads have emptied the caches
            runs[name].append(run(prompt, new_tokens))
            at_best[name].append(statistics.median(before + read_times(block)) * read / block.nbytes)
    return [make_row(workload, name, times[1:], runs[PEER][1:], at_best[name][1:]) for name, times in runs.items()]


def make_row(workload: str, system: str, runs: list[Timing], peer: list[Timing], at_best: list[float]) -> Row:
    """Reduce the counted rounds of one system to medians. ``at_best``: least seconds to read the weights, per run."""
    pairs = list(zip(runs, peer, strict=True))
    return Row(
        workload=workload,
        system=system,
        prefill_tokens_per_s=statistics.median(run.prefill for run in runs),
        decode_tokens_per_s=statistics.median(run.decode for run in runs),
        prefill_ratio=statistics.median(run.prefill / other.prefill for run, other in pairs),
        decode_ratio=statistics.median(run.decode / other.decode for run, other in pairs),
        roofline=statistics.median(run.decode * best for run, best in zip(runs, at_best, strict=True)),
        same_ids_as_peer=all(run.token_ids == other.token_ids for run, other in pairs),
    )


def print_rows(rows: list[Row]) -> None:
    """Print the table; a figure with a target shows it, and whether it was reached."""
    typer.echo(f"{'workload':15}{'system':18}{'prefill tok/s':>20}{'decode tok/s':>20}{'roofline':>20}  ids")
    for row in rows:

        def cell(figure: str, text: str, value: float, row: Row = row) -> str:
            target = TARGETS.get((row.workload, figure, row.system))
            goal = "" if target is None else f" ({'≥' if value >= target else '<'}{target})"
            return f"{text}{goal}".rjust(20)

        typer.echo(
            f"{row.workload:15}{row.system:18}"
            + cell("prefill", f"{row.prefill_tokens_per_s:.0f} {row.prefill_ratio:.2f}x", row.prefill_ratio)
            + cell("decode", f"{row.decode_tokens_per_s:.1f} {row.decode_ratio:.2f}x", row.decode_ratio)
            + cell("roofline", f"{row.roofline:.0%}", row.roofline)
            + ("  same" if row.same_ids_as_peer else "  other")
        )


def bench_forward(
    workload: Annotated[list[str] | None, typer.Option(help='"tiny float32", "0.6b bfloat16", … (all)')] = None,
    prompt: Annotated[int, typer.Option(help="Prompt tokens.", min=1)] = 128,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=2)] = 64,
    rounds: Annotated[int, typer.Option(help="Counted rounds.", min=1)] = 5,
    threads: Annotated[int, typer.Option(help="Torch threads; 0 leaves torch's choice.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Prefill and decode speed of the greedy driver beside transformers; the last line is JSON."""
    if threads:
        torch.set_num_threads(threads)
    chosen = workload or ["tiny float32", "tiny bfloat16", "0.6b float32", "0.6b bfloat16"]
    command = f"mini-engine bench forward --prompt {prompt} --new-tokens {new_tokens} --rounds {rounds} --seed {seed}"
    where = machine(torch.get_num_threads())
    typer.echo(f"{command}\n{json.dumps(where)}")
    transformers.logging.set_verbosity_error()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in chosen:
            shape, _, dtype = name.partition(" ")
            if shape not in SHAPES or dtype not in ("float32", "bfloat16"):
                shapes = ", ".join(SHAPES)
                raise typer.BadParameter(f"workload {name!r}; write one of {shapes}, a space, 'float32' or 'bfloat16'")
            folder = make_checkpoint(shape, Path(scratch) / shape, seed)
            rows += measure(name, cast(Dtype, dtype), folder, prompt, new_tokens, rounds)
            gc.collect()
    print_rows(rows)
    peak = max(psutil.Process().memory_info().rss, peak_rss())
    report = {"command": command, "machine": where, "peak_rss_bytes": peak}
    typer.echo(json.dumps({**report, "rows": [asdict(row) for row in rows]}))
