"""The command line: ``mini-engine generate | chat | batch | cache | bench``.

Owns: arguments, what is printed where, exit codes. Must not know: how a token is computed.
Generated text goes to standard output, everything else to standard error. Exit codes: 0 done, 1 a task of
``--engine`` is not written yet, 2 the input is at fault, or the answers of ``batch`` cannot be written, 130 Ctrl-C.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

import typer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from mini_engine import __version__
from mini_engine.bench.ablate import bench_ablate
from mini_engine.bench.batch import bench_batch
from mini_engine.bench.forward import bench_forward
from mini_engine.bench.grammar.command import bench_grammar
from mini_engine.bench.kernels.command import bench_kernels
from mini_engine.bench.prefix import bench_prefix
from mini_engine.bench.sampler import bench_sampler
from mini_engine.bench.serving import bench_serving
from mini_engine.cli import grammar as grammars
from mini_engine.cli import options
from mini_engine.cli.batch import batch
from mini_engine.cli.cache import show_cache
from mini_engine.cli.options import make_config, make_params
from mini_engine.cli.start import input_errors, start
from mini_engine.cli.tables import print_logprobs, print_trace
from mini_engine.outputs import table_as_json
from mini_engine.prompts import encode_chat, encode_text
from mini_engine.sampler.driver import FinishReason, SampledStep, SamplingDriver
from mini_engine.sampler.logprobs import TokenLogprob
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.trace import SamplingTrace

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
bench = typer.Typer(help="Measure the engine beside a peer, in the same process.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def show_version(asked: bool) -> None:
    """Print the version and end, if it was asked for."""
    if asked:
        typer.echo(f"mini-engine {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Run a Qwen3 model with the engine of this course."""


app.command("batch")(batch)
app.command("cache")(show_cache)
bench.command("forward")(bench_forward)
bench.command("sampler")(bench_sampler)
bench.command("serving")(bench_serving)
bench.command("ablate")(bench_ablate)
bench.command("prefix")(bench_prefix)
bench.command("grammar")(bench_grammar)
bench.command("kernels")(bench_kernels)
bench.command("batch")(bench_batch)


@dataclass
class Reply:
    """One generated answer as it grows: its steps, the text shown so far and when each token came."""

    prompt_ids: list[int]
    steps: list[SampledStep] = field(default_factory=list)
    text: str = ""
    started: float = field(default_factory=time.perf_counter)
    token_times: list[float] = field(default_factory=list)

    def timings(self) -> dict[str, float]:
        """Return the seconds to the first token (prefill), the seconds of the rest and the decode rate."""
        prefill, decode = self.token_times[0] - self.started, self.token_times[-1] - self.token_times[0]
        rate = (len(self.steps) - 1) / decode if decode > 0 else 0.0
        return {"prefill_s": prefill, "decode_s": decode, "decode_tokens_per_s": rate}


def run_steps(
    driver: SamplingDriver, tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], params: SamplingParams
) -> Iterator[SampledStep]:
    """Yield the tokens of one answer. With every option off this is L3's own loop, so that ``--engine`` shows it."""
    if params.grammar is not None:
        yield from grammars.stream_valid(driver, tokenizer, prompt_ids, params)
        return
    if driver.sampler.trace is not None or params != SamplingParams(max_new_tokens=params.max_new_tokens):
        yield from driver.stream(prompt_ids, params)
        return
    for count, step in enumerate(driver.steps(prompt_ids, params.max_new_tokens), start=1):
        ended = (
            "stop" if step.token_id in driver.eos_token_ids else "length" if count == params.max_new_tokens else None
        )
        yield SampledStep(0, step.token_id, step.logits, finish_reason=cast(FinishReason | None, ended))


def reply_to(
    driver: SamplingDriver,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[int],
    params: SamplingParams,
    silent: bool = False,
) -> Reply:
    """Generate, print the text as it comes (nothing inside a split character) unless ``silent``, and return it all.

    Raises ``ValueError`` if no token can be chosen any more.
    """
    reply = Reply(prompt_ids)
    decoder = DecodeStream(skip_special_tokens=True)
    for step in run_steps(driver, tokenizer, prompt_ids, params):
        if step.error is not None:
            raise ValueError(f"token {len(reply.steps) + 1} cannot be chosen: {step.error}")
        reply.token_times.append(time.perf_counter())
        reply.steps.append(step)
        # A stop token is in the ids and not in the text.
        piece = decoder.step(tokenizer.backend_tokenizer, step.token_id) or "" if step.finish_reason != "stop" else ""
        reply.text += piece
        if driver.sampler.trace is not None:
            print_trace(driver.sampler.trace, tokenizer, step)
        elif not silent:
            sys.stdout.write(piece)
            sys.stdout.flush()
    return reply


def print_summary(reply: Reply) -> None:
    """Print counts and rates of a reply to standard error."""
    timings = reply.timings()
    typer.secho(
        f"{len(reply.prompt_ids)} prompt tokens in {timings['prefill_s']:.2f} s, {len(reply.steps)} tokens at "
        f"{timings['decode_tokens_per_s']:.0f} per second, finished by {reply.steps[-1].finish_reason}",
        dim=True, err=True,
    )  # fmt: skip


def report_steps(tokenizer: PreTrainedTokenizerBase, steps: Sequence[SampledStep]) -> dict[str, Any]:
    """Return the JSON form of a finished sequence."""
    ids = [step.token_id for step in steps if step.error is None]
    tables = [step.logprobs for step in steps if step.logprobs is not None]
    report: dict[str, Any] = {
        "token_ids": ids,
        "text": tokenizer.decode(ids, skip_special_tokens=True),
        "finish_reason": steps[-1].finish_reason,
    }
    if steps[-1].error is not None:
        report["error"] = steps[-1].error
    return {**report, "logprobs": [table_as_json(table) for table in tables]} if tables else report


def show_samples(
    driver: SamplingDriver,
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    params: SamplingParams,
    load_s: float | None,
) -> None:
    """Generate several samples and print them, each under a heading, or as JSON if ``load_s`` is given."""
    began = time.perf_counter()
    free = params.grammar is None
    samples = driver.complete(ids, params) if free else grammars.complete_valid(driver, tokenizer, ids, params)
    total_s = time.perf_counter() - began
    if load_s is not None:
        entries = [
            {**report_steps(tokenizer, sample.steps), "cumulative_logprob": sample.cumulative_logprob}
            for sample in samples
        ]
        typer.echo(
            json.dumps({"prompt_ids": ids, "samples": entries, "timings": {"load_s": load_s, "total_s": total_s}})
        )
        return
    for sample in samples:
        typer.secho(f"sample {sample.index + 1}, finished by {sample.finish_reason}", dim=True, err=True)
        typer.echo(tokenizer.decode(sample.token_ids, skip_special_tokens=True))
        show_logprobs(tokenizer, sample.steps)


def show_logprobs(tokenizer: PreTrainedTokenizerBase, steps: Sequence[SampledStep]) -> None:
    """Print the log-probabilities of a sequence, if it has any."""
    tables: list[list[TokenLogprob]] = [step.logprobs for step in steps if step.logprobs is not None]
    if tables:
        print_logprobs(tokenizer, tables)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; '-' reads it from standard input.")],
    model: options.Model = None,
    max_new_tokens: options.MaxNewTokens = 200,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the chat template.")] = False,
    think: Annotated[bool, typer.Option(help="With --chat: let the model think before it answers.")] = True,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
    logprobs: options.LogprobsOption = None,
    trace: options.Trace = False,
    n: options.Samples = 1,
    best_of: options.BestOf = None,
    preset: options.Preset = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    min_new_tokens: options.MinNewTokens = None,
    seed: options.Seed = None,
    regex: grammars.Regex = None,
    json_schema: grammars.JsonSchema = None,
    choices: grammars.Choices = None,
    grammar_backend: grammars.Backend = None,
    jump_forward: grammars.JumpForward = False,
    dtype: options.DtypeOption = "float32",
    device: options.Device = "cpu",
    compute: options.ComputeOption = "reference",
    batch_invariant: options.BatchInvariant = False,
    engine: options.Engine = None,
) -> None:
    """Continue PROMPT and stream the text: greedily, or as the sampling options say."""
    with input_errors():
        if not chat and not think:
            raise ValueError("--no-think only means something with --chat; add --chat or leave it out")
        if trace and (json_output or n > 1 or best_of):
            raise ValueError("--trace prints tables for one streamed answer; leave out --json, --n and --best-of")
        grammar = grammars.grammar_options(regex, json_schema, choices)
        params = make_params(
            preset, **grammar, reasoning=bool(grammar) and chat and think, max_new_tokens=max_new_tokens, n=n,
            best_of=best_of, temperature=temperature, top_k=top_k,
            top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty, min_new_tokens=min_new_tokens, seed=seed, logprobs=logprobs,
        )  # fmt: skip
        changes = grammars.engine_options(grammar, grammar_backend, jump_forward, params.num_samples)
        began = time.perf_counter()
        config = make_config(dtype, device, compute, batch_invariant, **changes)
        driver, tokenizer = start(model, engine, config)
        driver.sampler.trace = SamplingTrace() if trace else None
        load_s = time.perf_counter() - began
        text = sys.stdin.read() if prompt == "-" else prompt
        messages = [{"role": "user", "content": text}]
        ids = encode_chat(tokenizer, messages, think) if chat else encode_text(tokenizer, text)
        if params.num_samples > 1:
            show_samples(driver, tokenizer, ids, params, load_s if json_output else None)
            return
        if not json_output and not chat and not trace:
            sys.stdout.write(text)
        reply = reply_to(driver, tokenizer, ids, params, silent=json_output)
    if json_output:
        timings = {"load_s": load_s, **reply.timings()}
        typer.echo(json.dumps({"prompt_ids": ids, **report_steps(tokenizer, reply.steps), "timings": timings}))
        return
    typer.echo()
    show_logprobs(tokenizer, reply.steps)
    print_summary(reply)


@app.command()
def chat(
    model: options.Model = None,
    max_new_tokens: options.MaxNewTokens = 400,
    system: Annotated[str | None, typer.Option(help="A system message that opens the conversation.")] = None,
    think: Annotated[bool, typer.Option(help="Let the model think before it answers.")] = True,
    preset: options.Preset = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    dtype: options.DtypeOption = "float32",
    device: options.Device = "cpu",
    compute: options.ComputeOption = "reference",
    batch_invariant: options.BatchInvariant = False,
    engine: options.Engine = None,
) -> None:
    """Talk with the model. /new forgets the conversation, /exit (or Ctrl-D) ends it."""
    with input_errors():
        params = make_params(
            preset, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            seed=seed,
        )  # fmt: skip
        config = make_config(dtype, device, compute, batch_invariant)
        driver, tokenizer = start(model, engine, config)
        encode_chat(tokenizer, [{"role": "user", "content": ""}], think)  # a missing template shows now, not later
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    typer.secho("Ask something. /new forgets the conversation, /exit ends it.", dim=True, err=True)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo(err=True)
            return
        if text == "/exit":
            return
        if text == "/new":
            messages = list(opening)
        elif text:
            messages = answer(driver, tokenizer, messages, text, params, think)


def answer(
    driver: SamplingDriver,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    text: str,
    params: SamplingParams,
    think: bool,
) -> list[dict[str, str]]:
    """Answer one turn and return the conversation with it; a turn that cannot be run leaves it as it was."""
    asked = [*messages, {"role": "user", "content": text}]
    try:
        reply = reply_to(driver, tokenizer, encode_chat(tokenizer, asked, think), params)
    except ValueError as error:  # the conversation has grown beyond the model's positions
        typer.secho(f"error: {error} (/new starts a fresh conversation)", fg="red", err=True)
        return messages
    except KeyboardInterrupt:
        typer.secho("\n(interrupted; this turn is forgotten)", dim=True, err=True)
        return messages
    typer.echo()
    return [*asked, {"role": "assistant", "content": reply.text}]


if __name__ == "__main__":
    app()
