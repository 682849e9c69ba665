"""``mini-engine batch``: a file of requests through the engine, many at a time; answers as JSON lines in their order.

Owns: the format of requests and answers. Must not know: how a step is made.

A line of the file is a prompt, or a JSON object with "prompt", "messages" or "token_ids" and any sampling parameter:

    {"prompt": "Once upon a time", "max_new_tokens": 30, "stop": ["."], "temperature": 0.8, "seed": 1}

A line that cannot be run has its error in its place; the others go on.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import PreTrainedTokenizerBase

from mini_engine import cli_options as options
from mini_engine.cli_start import encode_chat, input_errors, start
from mini_engine.config import EngineConfig
from mini_engine.engine import Engine
from mini_engine.outputs import RequestOutput
from mini_engine.radix_cache import EVICTIONS, RadixCache
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.policy import POLICIES

PROMPT_KEYS = ("prompt", "messages", "token_ids")
PARAMETERS = tuple(field.name for field in fields(SamplingParams))


@dataclass(frozen=True)
class Line:
    """One request of the file: ids and parameters, or what is wrong with it."""

    prompt_ids: list[int]
    params: SamplingParams
    error: str | None = None


def read_line(text: str, tokenizer: PreTrainedTokenizerBase, base: SamplingParams) -> Line:
    """Read one line. Raises ``ValueError`` naming what is wrong; ``base`` holds what the line does not say."""
    if not text.lstrip().startswith("{"):
        return Line(tokenizer.encode(text, add_special_tokens=False), base)
    try:
        given: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is no JSON object ({error}); a line that begins with {{ must be one") from error
    unknown = sorted(set(given) - set(PARAMETERS) - set(PROMPT_KEYS))
    if unknown:
        raise ValueError(f"there is no parameter {unknown[0]!r}; choose from {', '.join([*PROMPT_KEYS, *PARAMETERS])}")
    prompts = [key for key in PROMPT_KEYS if key in given]
    if len(prompts) != 1:
        raise ValueError(f"{len(prompts)} of {', '.join(PROMPT_KEYS)} are given; give exactly one")
    changes = {key: value for key, value in given.items() if key not in PROMPT_KEYS}
    if isinstance(changes.get("logit_bias"), dict):
        changes["logit_bias"] = {int(token): bias for token, bias in changes["logit_bias"].items()}  # JSON keys: text
    return Line(encode(prompts[0], given[prompts[0]], tokenizer), replace(base, **changes))


def encode(kind: str, value: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of a prompt given as text, as a conversation or as ids. Raises ``ValueError`` for another type."""
    if kind == "prompt" and isinstance(value, str):
        return list(tokenizer.encode(value, add_special_tokens=False))
    if kind == "messages" and isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
        return encode_chat(tokenizer, value, think=False)
    if kind == "token_ids" and isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise ValueError(f"{kind} is {value!r}; give a text, a list of messages, or a list of ids")


def read_lines(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, base: SamplingParams) -> list[Line]:
    """Read all lines that are not empty; a faulty one keeps its place, with its error."""
    lines = []
    for text in (text for text in texts if text.strip()):
        try:
            lines.append(read_line(text, tokenizer, base))
        except (ValueError, TypeError) as error:
            lines.append(Line([], base, str(error)))
    return lines


def run_lines(engine: Engine, lines: Sequence[Line]) -> list[list[RequestOutput]]:
    """Run what can be run, and return the answers of every line."""
    good = [line for line in lines if line.error is None]
    answers = iter(
        engine.generate(
            [line.prompt_ids for line in good], [line.params for line in good], progress=sys.stderr.isatty()
        )
    )
    return [
        next(answers) if line.error is None else [RequestOutput("", [], finish_reason="error", error=line.error)]
        for line in lines
    ]


def report(answer: RequestOutput) -> dict[str, Any]:
    """Return the JSON form of an answer: the text, how it ended, and what it had to wait."""
    known: dict[str, Any] = {
        "text": answer.text, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason,
        "matched": answer.matched,
    }  # fmt: skip
    if answer.error is not None:
        known["error"] = answer.error
    if answer.logprobs:
        known["cumulative_logprob"] = answer.cumulative_logprob
    if answer.times is not None:
        times = answer.times
        known |= {"queue_s": times.queue_s, "ttft_s": times.ttft_s, "tpot_s": times.tpot_s}
        known["preemptions"] = answer.num_preemptions
    return known


def summary(engine: Engine, answers: Sequence[Sequence[RequestOutput]]) -> str:
    """Return one line about the whole run."""
    flat = [answer for own in answers for answer in own]
    seconds = sum(sum(step.seconds.values()) for step in engine.log)
    tokens, rows = sum(len(a.token_ids) for a in flat), sum(c[2] for step in engine.log for c in step.chunks)
    refused = sum(answer.finish_reason == "error" for answer in flat)
    text = (
        f"{len(answers)} requests, {tokens} tokens in {seconds:.2f} s ({tokens / max(seconds, 1e-9):.0f} per second), "
        f"{len(engine.log)} steps of {rows / max(len(engine.log), 1):.1f} rows"
    )
    cache = engine.scheduler.cache
    if isinstance(cache, RadixCache):
        text += f", {cache.stats.hit_rate:.0%} of the tokens from the prefix cache"
    return text + (f"; {refused} ended with an error" if refused else "")


def batch(
    file: Annotated[Path, typer.Argument(help="Requests, one on each line; '-' is standard input.")],
    model: options.Model = None,
    max_new_tokens: options.MaxNewTokens = 200,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A string that ends an answer; several times for more.")
    ] = None,
    running: Annotated[int, typer.Option(help="So many requests share a step.")] = 32,
    tokens_per_step: Annotated[int, typer.Option(help="Rows of a step; longer prompts are computed in chunks.")] = 512,
    policy: Annotated[str, typer.Option(help=f"Who is let in first: {', '.join(POLICIES)}.")] = "fcfs",
    preemption: Annotated[bool, typer.Option(help="Start on an estimate; send back when pages run out.")] = True,
    page_size: Annotated[int, typer.Option(help="Tokens in a page.")] = 16,
    num_pages: Annotated[int | None, typer.Option(help="Pages in the pool.")] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Keep what was computed for requests that begin alike.")] = False,
    eviction: Annotated[str, typer.Option(help=f"With it, who goes first: {', '.join(EVICTIONS)}.")] = "lru",
    dtype: options.DtypeOption = "float32",
    device: options.Device = "cpu",
    batch_invariant: options.BatchInvariant = False,
    kernels: options.KernelsOption = "torch",
    engine: options.Engine = None,
) -> None:
    """Answer every request of FILE, many at a time, one JSON line for each in the order of the file."""
    with input_errors():
        options.check_device(device)
        config = EngineConfig.serving(
            dtype=dtype, device=device, batch_invariant=batch_invariant, kernels=kernels,
            max_running_requests=running, policy=policy,
            max_tokens_per_step=tokens_per_step, preemption=preemption, page_size=page_size, num_pages=num_pages,
            prefix_cache="radix" if prefix_cache else None, eviction=eviction,
            wait_for_prefix=32 if prefix_cache else None,
        )  # fmt: skip
        given = {"temperature": temperature, "seed": seed, "stop": stop}
        base = options.make_params(None, max_new_tokens=max_new_tokens, **given)
        try:
            texts = (sys.stdin.read() if str(file) == "-" else file.read_text()).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} cannot be read ({error}); give a text file, a request on each line") from error
        driver, tokenizer = start(model, engine, config)
        served = Engine(driver, tokenizer.backend_tokenizer)
        lines = read_lines(texts, tokenizer, base)
        answers = run_lines(served, lines)
    for index, (line, own) in enumerate(zip(lines, answers, strict=True)):
        typer.echo(
            json.dumps({"line": index, "prompt_tokens": len(line.prompt_ids), "answers": list(map(report, own))})
        )
    typer.secho(summary(served, answers), dim=True, err=True)
