"""``mini-engine bench forward``: the greedy driver compared with ``transformers.generate``, batch 1, in one process.

All systems have the same prompt and weights, and take turns in every round, so that a slow minute of the machine
affects all of them. Ratios are taken within a round, and the median round is reported. The roofline uses the median
read bandwidth right before and after each run, because other programs can halve it within a round.

With ``--peer llama.cpp`` it takes turns with the others, on as many threads, with the same weights: F32 as they are,
or BF16 as they are and Q8_0 and Q4_0 rounded to 8 and 4 bits, with a scale for each 32 columns of a row. Every matrix
has the one format; of ours, "int4" keeps the table of embeddings in 8 bits. It caches keys and values in float16.
Our "int8" is compared with Q8_0, "int4" with Q4_0, and every other system with the weights as they are.
"""

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
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

from mini_engine.bench import llama_cpp
from mini_engine.bench.llama_cpp import LlamaCpp
from mini_engine.bench.machine import SHAPES, chosen, machine, make_checkpoint, names_in, peak_rss, share_read
from mini_engine.bench.peers import TokenClock, generate_greedily
from mini_engine.config import Dtype, EngineConfig
from mini_engine.driver import GreedyDriver
from mini_engine.fast.quantized import GROUP
from mini_engine.fast.quantized_products import IN_8_BITS
from mini_engine.llm import load_model, make_driver

SYSTEMS: dict[str, dict[str, Any]] = {
    "off": {},
    "packed": {"compute": "packed"},
    "fast": {"compute": "fast"},
    "invariant": {"batch_invariant": True},
    "packed+invariant": {"compute": "packed", "batch_invariant": True},
    "compiled": {"compute": "compiled"},
    "compiled+invariant": {"compute": "compiled", "batch_invariant": True},
    "int8": {"compute": "compiled", "quantize": "int8"},
    "int4": {"compute": "compiled", "quantize": "int4"},
}
QUANTIZED = {"int8": "Q8_0", "int4": "Q4_0"}  # system of ours -> format of llama.cpp with as many bits
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
    ("0.6b bfloat16", "decode × llama.cpp", "compiled"): 1.05,
    ("0.6b bfloat16", "decode × llama.cpp", "int8"): 1.1,
    ("0.6b bfloat16", "decode × llama.cpp", "int4"): 1.0,
    ("0.6b bfloat16", "prefill × llama.cpp", "compiled"): 3.0,
    ("0.6b bfloat16", "prefill × llama.cpp", "int8"): 3.0,
    ("0.6b bfloat16", "prefill × llama.cpp", "int4"): 3.0,
}


@dataclass(frozen=True)
class Timing:
    """One run: tokens per second of the prefill and of the decode steps after it, and the generated ids.

    ``bandwidth``: bytes a second that all threads together read right before and after it; 0 if that is not measured.
    """

    prefill: float
    decode: float
    token_ids: list[int]
    bandwidth: float = 0.0


@dataclass(frozen=True)
class System:
    """What is measured: ``run`` takes a prompt and a number of new tokens, and a decode step reads ``read`` bytes."""

    run: Callable[[Sequence[int], int], Timing]
    read: int


@dataclass(frozen=True)
class Row:
    """The figures of one system on one workload: medians over the rounds, and ratios to the peer within a round.

    ``roofline``: the share of ``bandwidth`` (bytes a second) that the decode steps took to read the weights.
    ``…_to_llama_cpp``: ratios to llama.cpp with weights of as many bits; None where there is no such run.
    """

    workload: str
    system: str
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    prefill_ratio: float
    decode_ratio: float
    roofline: float
    bandwidth: float
    same_ids_as_peer: bool
    prefill_ratio_to_llama_cpp: float | None = None
    decode_ratio_to_llama_cpp: float | None = None


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


def time_llama_cpp(server: LlamaCpp, prompt: Sequence[int], new_tokens: int) -> Timing:
    """Time a greedy request to llama.cpp."""
    began, times, token_ids = server.generate(prompt, new_tokens)
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


def weight_bytes(model: PreTrainedModel, quantize: str = "off") -> int:
    """Return the bytes of weights that a decode step must read."""
    parameters = model.named_parameters()
    return int(
        sum(stored_bytes(name, weight, quantize) * share_read(name, model.config) for name, weight in parameters)
    )


def stored_bytes(name: str, weight: Tensor, quantize: str) -> int:
    """Return the bytes of a parameter. "int8" has a scale a row, "int4" a scale and a zero point a group."""
    if quantize == "off" or weight.ndim < 2:
        return int(weight.nbytes)
    if quantize == "int8" or name.endswith(IN_8_BITS):
        return weight.numel() + weight.numel() // weight.shape[-1] * weight.itemsize
    return weight.numel() // 2 + weight.numel() // GROUP * 2 * weight.itemsize


def counterpart(system: str, dtype: Dtype) -> str:
    """Return the name of llama.cpp with weights of as many bits."""
    return f"{llama_cpp.NAME} {QUANTIZED.get(system, llama_cpp.FORMATS[dtype][0])}"


def llama_cpp_systems(model: PreTrainedModel, dtype: Dtype, folder: Path, context: int) -> dict[str, System]:
    """Write ``model`` to files in ``folder``, one for each format, and return llama.cpp with each."""
    systems = {}
    for form in tqdm(llama_cpp.FORMATS[dtype], desc="files of llama.cpp", unit="file"):
        file = folder / f"{form}.gguf"
        read = llama_cpp.write_gguf(model, file, form)
        server = llama_cpp.serve_apart(file, context, torch.get_num_threads())
        systems[f"{llama_cpp.NAME} {form}"] = System(partial(time_llama_cpp, server), read)
    return systems


def own_systems(model: PreTrainedModel, dtype: Dtype, folder: Path, names: list[str]) -> dict[str, System]:
    """Load our systems ``names`` from ``folder``, which has the weights of ``model``."""
    systems = {}
    for name in names:
        config = EngineConfig(dtype=dtype, **SYSTEMS[name])
        driver = make_driver(load_model(folder, config), config)
        read = weight_bytes(model, SYSTEMS[name].get("quantize", "off"))
        systems[name] = System(partial(time_driver, driver), read)
    return systems


def measure(systems: dict[str, System], prompt: list[int], new_tokens: int, rounds: int) -> dict[str, list[Timing]]:
    """Run all systems in turn for ``rounds`` rounds, after one that is not counted."""
    runs: dict[str, list[Timing]] = {name: [] for name in systems}
    block = torch.ones(READ_ELEMENTS)
    for _ in tqdm(range(rounds + 1), unit="round"):
        for name, system in systems.items():
            before = read_times(block)
            system.run(prompt, 2)  # the reads have emptied the caches
            found = system.run(prompt, new_tokens)
            bandwidth = block.nbytes / statistics.median(before + read_times(block))
            runs[name].append(replace(found, bandwidth=bandwidth))
    return {name: found[1:] for name, found in runs.items()}


def make_row(workload: str, name: str, read: int, runs: dict[str, list[Timing]], other: str | None) -> Row:
    """Reduce the rounds of system ``name``, whose decode steps read ``read`` bytes, to medians.

    ``other``: what it is compared with beside transformers, if that ran.
    """
    own, others = runs[name], runs.get(other or "")
    return Row(
        workload=workload,
        system=name,
        prefill_tokens_per_s=statistics.median(run.prefill for run in own),
        decode_tokens_per_s=statistics.median(run.decode for run in own),
        prefill_ratio=ratio("prefill", own, runs[PEER]),
        decode_ratio=ratio("decode", own, runs[PEER]),
        roofline=statistics.median(run.decode * read / run.bandwidth for run in own),
        bandwidth=statistics.median(run.bandwidth for run in own),
        same_ids_as_peer=all(run.token_ids == peer.token_ids for run, peer in zip(own, runs[PEER], strict=True)),
        prefill_ratio_to_llama_cpp=ratio("prefill", own, others) if others else None,
        decode_ratio_to_llama_cpp=ratio("decode", own, others) if others else None,
    )


def ratio(figure: str, runs: list[Timing], others: list[Timing]) -> float:
    """Return the median over the rounds of how many times the ``figure`` of the other system this one has."""
    pairs = zip(runs, others, strict=True)
    return statistics.median(float(getattr(run, figure) / getattr(other, figure)) for run, other in pairs)


def run_workload(
    workload: str, folder: Path, prompt_len: int, new_tokens: int, rounds: int, names: list[str], files: Path | None
) -> list[Row]:
    """Measure transformers and our systems ``names`` with the checkpoint in ``folder``, and return a row for each.

    llama.cpp is measured if there is a folder for its ``files``.
    """
    dtype = cast(Dtype, workload.rpartition(" ")[-1])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, model.config.vocab_size, (prompt_len,), generator=generator).tolist()
    systems = {PEER: System(partial(time_peer, model), weight_bytes(model))} | own_systems(model, dtype, folder, names)
    if files is not None:
        systems |= llama_cpp_systems(model, dtype, files, prompt_len + new_tokens)
    runs = measure(systems, prompt, new_tokens, rounds)
    others = {name: counterpart(name, dtype) for name in SYSTEMS}
    return [make_row(workload, name, systems[name].read, runs, others.get(name)) for name in systems]


def print_rows(rows: list[Row]) -> None:
    """Print the table; a figure with a target shows it, and whether it was reached."""
    heads = ["prefill tok/s", "decode tok/s", "roofline"]
    heads += ["prefill × llama.cpp", "decode × llama.cpp"] if any(row.decode_ratio_to_llama_cpp for row in rows) else []
    typer.echo(f"{'workload':15}{'system':18}" + "".join(f"{head:>21}" for head in heads) + "  ids")
    for row in rows:
        figures = {
            "prefill": (f"{row.prefill_tokens_per_s:.0f} {row.prefill_ratio:.2f}x", row.prefill_ratio),
            "decode": (f"{row.decode_tokens_per_s:.1f} {row.decode_ratio:.2f}x", row.decode_ratio),
            "roofline": (f"{row.roofline:.0%} of {row.bandwidth / 1e9:.0f} GB/s", row.roofline),
            "prefill × llama.cpp": (f"{row.prefill_ratio_to_llama_cpp or 0:.2f}x", row.prefill_ratio_to_llama_cpp),
            "decode × llama.cpp": (f"{row.decode_ratio_to_llama_cpp or 0:.2f}x", row.decode_ratio_to_llama_cpp),
        }
        cells = ""
        for figure, (text, value) in list(figures.items())[: len(heads)]:
            target = TARGETS.get((row.workload, figure, row.system))
            goal = "" if target is None or value is None else f" ({'≥' if value >= target else '<'}{target})"
            cells += f"{'' if value is None else text + goal:>21}"
        typer.echo(f"{row.workload:15}{row.system:18}{cells}  {'same' if row.same_ids_as_peer else 'other'}")


def bench_forward(
    workload: Annotated[list[str] | None, typer.Option(help='"tiny float32", "0.6b bfloat16", … (all)')] = None,
    system: Annotated[list[str] | None, typer.Option(help=f"Of ours: {', '.join(SYSTEMS)} (all).")] = None,
    peer: Annotated[str | None, typer.Option(help="Beside transformers: llama.cpp.")] = None,
    prompt: Annotated[int, typer.Option(help="Prompt tokens.", min=1)] = 128,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=2)] = 64,
    rounds: Annotated[int, typer.Option(help="Counted rounds.", min=1)] = 5,
    threads: Annotated[int, typer.Option(help="Torch threads; 0 leaves torch's choice.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Prefill and decode speed of the greedy driver beside transformers; the last line is JSON."""
    if threads:
        torch.set_num_threads(threads)
    names = chosen(system, SYSTEMS, "system")
    command = f"mini-engine bench forward --prompt {prompt} --new-tokens {new_tokens} --rounds {rounds} --seed {seed}"
    command += "".join(f' --workload "{name}"' for name in workload or ())
    command += "".join(f" --system {name}" for name in system or ())
    where = machine(torch.get_num_threads())
    if peer is not None:
        chosen([peer], [llama_cpp.NAME], "peer")
        command += f" --peer {peer}"
        where |= {peer: llama_cpp.version()}
    typer.echo(f"{command}\n{json.dumps(where)}")
    transformers.logging.set_verbosity_error()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for load in workload or ["tiny float32", "tiny bfloat16", "0.6b float32", "0.6b bfloat16"]:
            shape, _, dtype = load.partition(" ")
            if shape not in SHAPES or dtype not in ("float32", "bfloat16"):
                shapes = ", ".join(SHAPES)
                raise typer.BadParameter(f"workload {load!r}; write one of {shapes}, a space, 'float32' or 'bfloat16'")
            folder = make_checkpoint(shape, Path(scratch) / shape, seed)
            able = [name for name in names_in(dtype, SYSTEMS) if name in names]
            files = None if peer is None else Path(scratch)
            rows += run_workload(load, folder, prompt, new_tokens, rounds, able, files)
            gc.collect()
    print_rows(rows)
    peak = max(psutil.Process().memory_info().rss, peak_rss())
    report = {"command": command, "machine": where, "peak_rss_bytes": peak}
    typer.echo(json.dumps({**report, "rows": [asdict(row) for row in rows]}))
