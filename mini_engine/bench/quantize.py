"""``mini-engine bench quantize``: what quantized weights cost in accuracy, and what they save in memory and time.

Accuracy is that of the embedded model on stories and records that its training never saw: how far the distribution of
each next token is from that of unrounded weights. It is computed in float32, where only the weights are rounded and
every CPU finds the same. In bfloat16 two CPUs differ from each other by as much as int8 does. Memory and speed are
those of a random model in bfloat16; the ways take turns in every round, and ratios are taken within a round.
"""

import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, cast, get_args

import torch
import transformers
import typer
from torch import Tensor
from tqdm import tqdm

from mini_engine.attention.dense import DenseAttention, sdpa_attention
from mini_engine.bench.forward import Timing, ratio, time_driver
from mini_engine.bench.machine import SHAPES, chosen, machine, make_checkpoint, settled_rss
from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.config import Compute, EngineConfig, Quantize
from mini_engine.llm import load_model, make_driver
from mini_engine.tiny import corpus

WAYS: tuple[Quantize, ...] = get_args(Quantize)
COMPUTE = ("reference", "packed", "fast", "compiled")
# What was promised: mean KL divergence in nats on the embedded model, bytes in memory at 0.6B.
MOST_KL = {"int8": 2e-4, "int4": 2e-2}
MOST_BYTES = {("0.6b", "int8"): 750_000_000, ("0.6b", "int4"): 500_000_000}


@dataclass(frozen=True)
class Row:
    """A way to store weights. ``kl`` in nats; ``agreement``: the share of tokens with the same likeliest next token.

    ``num_bytes``: of memory that the model of the shape holds. Rates are medians over the rounds, and so are the ratios
    to the rates with unrounded weights.
    """

    quantize: str
    kl: float
    agreement: float
    num_bytes: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    prefill_ratio: float
    decode_ratio: float


@torch.inference_mode()
def logprobs(quantize: Quantize, compute: Compute, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return the log-probabilities [all tokens, V] of the embedded model after every token of all texts, float64."""
    model = load_model(TINY_MODEL, EngineConfig(quantize=quantize, compute=compute))
    attention = DenseAttention(sdpa_attention)
    rows = [model(torch.tensor(ids), torch.arange(len(ids)), attention) for ids in texts]
    return torch.cat(rows).double().log_softmax(-1)


def accuracy(compute: Compute, count: int) -> dict[Quantize, tuple[float, float]]:
    """Return the mean KL divergence and the agreement of each way, on ``count`` stories and as many records."""
    tokenizer, rng = load_tokenizer(TINY_MODEL), random.Random("quantize")
    tasks = [make(rng, held_out=True) for make in (corpus.story_task, corpus.record_task) for _ in range(count)]
    texts = [tokenizer.encode(f"{task.prompt}\n{task.answer}", add_special_tokens=False) for task in tasks]
    found = {way: logprobs(way, compute, texts) for way in WAYS}
    exact = found["off"]
    return {
        way: (
            float((exact.exp() * (exact - own)).sum(-1).mean()),
            float((exact.argmax(-1) == own.argmax(-1)).double().mean()),
        )
        for way, own in found.items()
    }


def measure(
    folder: Path, compute: Compute, prompt_len: int, new_tokens: int, rounds: int
) -> dict[Quantize, tuple[int, list[Timing]]]:
    """Return the bytes of memory of each way, and its runs in ``rounds`` rounds after one that is not counted."""
    drivers, sizes = {}, {}
    for way in WAYS:
        before = settled_rss()
        config = EngineConfig(dtype="bfloat16", compute=compute, quantize=way)
        drivers[way] = make_driver(load_model(folder, config), config)
        sizes[way] = settled_rss() - before
    prompt = [7 * i % 997 for i in range(prompt_len)]
    runs: dict[Quantize, list[Timing]] = {way: [] for way in WAYS}
    for _ in tqdm(range(rounds + 1), desc="speed", unit="round"):
        for way, driver in drivers.items():
            runs[way].append(time_driver(driver, prompt, new_tokens))
    return {way: (sizes[way], own[1:]) for way, own in runs.items()}


def make_rows(
    exactness: dict[Quantize, tuple[float, float]], measured: dict[Quantize, tuple[int, list[Timing]]]
) -> list[Row]:
    """Reduce what was measured to a row for each way."""
    exact = measured["off"][1]
    return [
        Row(
            way,
            *exactness[way],
            num_bytes,
            statistics.median(run.prefill for run in runs),
            statistics.median(run.decode for run in runs),
            ratio("prefill", runs, exact),
            ratio("decode", runs, exact),
        )
        for way, (num_bytes, runs) in measured.items()
    ]


def goal(value: float, most: float | None) -> str:
    """Return whether a figure reached its goal, in brackets; nothing where it has none."""
    return "" if most is None else f" ({'≤' if value <= most else '>'} {most:g})"


def bench_quantize(
    shape: Annotated[str, typer.Option(help=f"Of the model for memory and speed: {', '.join(SHAPES)}.")] = "0.6b",
    compute: Annotated[str, typer.Option(help=f"One of {', '.join(COMPUTE)}.")] = "compiled",
    texts: Annotated[int, typer.Option(help="Stories, and as many records, for the accuracy.", min=1)] = 20,
    prompt: Annotated[int, typer.Option(help="Prompt tokens.", min=1)] = 128,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=2)] = 32,
    rounds: Annotated[int, typer.Option(help="Counted rounds.", min=1)] = 3,
    threads: Annotated[int, typer.Option(help="Torch threads; 0 leaves torch's choice.", min=0)] = 0,
) -> None:
    """Accuracy, memory and speed of quantized weights beside bfloat16; the last line is JSON."""
    if threads:
        torch.set_num_threads(threads)
    (shape,) = chosen([shape], SHAPES, "shape")
    way = cast(Compute, chosen([compute], COMPUTE, "compute")[0])
    command = (
        f"mini-engine bench quantize --shape {shape} --compute {compute} --texts {texts} --prompt {prompt} "
        f"--new-tokens {new_tokens} --rounds {rounds}"
    )
    where = machine(torch.get_num_threads())
    typer.echo(f"{command}\n{json.dumps(where)}")
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch:
        measured = measure(make_checkpoint(shape, Path(scratch) / shape, 0), way, prompt, new_tokens, rounds)
    rows = make_rows(accuracy(way, texts), measured)
    typer.echo(f"{'weights':9}{'KL, nats':>20}{'same argmax':>13}{'MB':>15}{'prefill tok/s':>20}{'decode tok/s':>20}")
    for row in rows:
        most = MOST_BYTES.get((shape, row.quantize))
        size = f"{row.num_bytes / 1e6:.0f}{goal(row.num_bytes / 1e6, most and most / 1e6)}"
        kl = f"{row.kl:.1e}{goal(row.kl, MOST_KL.get(row.quantize))}"
        typer.echo(
            f"{row.quantize:9}{kl:>20}{row.agreement:>13.1%}{size:>15}"
            f"{f'{row.prefill_tokens_per_s:.0f} {row.prefill_ratio:.2f}x':>20}"
            f"{f'{row.decode_tokens_per_s:.1f} {row.decode_ratio:.2f}x':>20}"
        )
    typer.echo(json.dumps({"command": command, "machine": where, "rows": [asdict(row) for row in rows]}))
