"""The command line: ``mini-engine generate | chat | bench``.

Owns: arguments, what is printed where, exit codes. Must not know: how a token is computed.
Generated text goes to standard output, everything else to standard error. Exit codes: 0 done, 1 a task of
``--engine`` is not written yet, 2 the input is at fault.
"""

import json
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, cast

import torch
import typer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from mini_engine.bench.forward import bench_forward
from mini_engine.checkpoint import load_tokenizer, resolve_folder
from mini_engine.config import AttentionKind, Dtype, EngineConfig, LinearKind
from mini_engine.driver import GreedyDriver
from mini_engine.overlay import installed_folder
from mini_engine.startup import load_driver

app = typer.Typer(
    help="Run a Qwen3 model with the engine of this course.", no_args_is_help=True, pretty_exceptions_enable=False
)
bench = typer.Typer(help="Measure the engine beside a peer, in the same process.", no_args_is_help=True)
app.add_typer(bench, name="bench")
bench.command("forward")(bench_forward)

Model = Annotated[
    str | None, typer.Option(help="Checkpoint folder or hub id of a dense Qwen3; the embedded model if not given.")
]
MaxNewTokens = Annotated[int, typer.Option(help="Stop after this many tokens.")]
DtypeOption = Annotated[str, typer.Option(help="float32 or bfloat16.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")]
LinearOption = Annotated[
    str, typer.Option(help="torch: the bits of transformers. packed: weights packed once, 2-3 times faster on a CPU.")
]
AttentionOption = Annotated[
    str, typer.Option(help="torch: the bits of transformers. grouped: faster decode steps in bfloat16.")
]
Engine = Annotated[
    Path | None, typer.Option(help="Folder whose modules stand in for the engine's own, such as your work/.")
]
BatchInvariant = Annotated[bool, typer.Option(help="Bits that do not depend on batch, chunks or threads.")]


@dataclass
class Reply:
    """One generated answer as it grows: ids, the text shown so far and when each token came."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    started: float = field(default_factory=time.perf_counter)
    token_times: list[float] = field(default_factory=list)

    def timings(self) -> dict[str, float]:
        """Return the seconds to the first token (prefill), the seconds of the rest and the decode rate."""
        prefill, decode = self.token_times[0] - self.started, self.token_times[-1] - self.token_times[0]
        rate = (len(self.token_ids) - 1) / decode if decode > 0 else 0.0
        return {"prefill_s": prefill, "decode_s": decode, "decode_tokens_per_s": rate}


@contextmanager
def input_errors() -> Iterator[None]:
    """Show a ``ValueError`` as one line and exit with 2: it names what the user gave and what to do instead."""
    warnings.showwarning = lambda message, *_, **__: typer.secho(f"warning: {message}", fg="yellow", err=True)
    try:
        yield
    except ValueError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
    except NotImplementedError as error:  # a student's engine with a task still open
        typer.secho(f"error: not written yet: {error}", fg="red", err=True)
        raise typer.Exit(1) from error


def check_engine(folder: Path | None) -> None:
    """Raise ``ValueError`` unless the modules that are running are those that ``--engine`` asks for."""
    running = installed_folder()
    if (folder and folder.resolve()) != running:
        raise ValueError(f"--engine is {folder}, but the modules of {running or 'the engine itself'} are running")
    if running is not None:
        typer.secho(f"running the modules of {running}", dim=True, err=True)


def make_config(dtype: str, device: str, linear: str, attention: str, batch_invariant: bool) -> EngineConfig:
    """Build the configuration, which checks the words. Raises ``ValueError`` for a device that is not there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device {device!r} cannot be used ({str(error).splitlines()[0]}); try --device cpu"
        ) from error
    return EngineConfig(
        dtype=cast(Dtype, dtype),
        device=device,
        linear=cast(LinearKind, linear),
        attention=cast(AttentionKind, attention),
        batch_invariant=batch_invariant,
    )


def start(model: str | None, engine: Path | None, config: EngineConfig) -> tuple[GreedyDriver, PreTrainedTokenizerBase]:
    """Load what a command runs on. Raises ``ValueError`` for a faulty checkpoint or another engine than asked for."""
    check_engine(engine)
    folder = resolve_folder(model)
    return load_driver(folder, config), load_tokenizer(folder)


def reply_to(
    driver: GreedyDriver,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[int],
    max_new_tokens: int,
    silent: bool = False,
) -> Reply:
    """Generate, print the text as it comes (nothing inside a split character) unless ``silent``, and return it all."""
    reply = Reply(prompt_ids)
    decoder = DecodeStream(skip_special_tokens=True)
    for step in driver.steps(prompt_ids, max_new_tokens):
        reply.token_times.append(time.perf_counter())
        reply.token_ids.append(step.token_id)
        if step.token_id in driver.eos_token_ids:
            reply.finish_reason = "stop"
        piece = decoder.step(tokenizer.backend_tokenizer, step.token_id) or ""
        reply.text += piece
        if not silent:
            sys.stdout.write(piece)
            sys.stdout.flush()
    return reply


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], think: bool) -> list[int]:
    """Render a conversation with the tokenizer's chat template and encode it, ready for the assistant's turn."""
    if not tokenizer.chat_template:
        raise ValueError("this checkpoint's tokenizer has no chat template; leave out --chat")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=think)
    return list(tokenizer.encode(cast(str, text), add_special_tokens=False))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; '-' reads it from standard input.")],
    model: Model = None,
    max_new_tokens: MaxNewTokens = 200,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the chat template.")] = False,
    think: Annotated[bool, typer.Option(help="With --chat: let the model think before it answers.")] = True,
    dtype: DtypeOption = "float32",
    device: Device = "cpu",
    linear: LinearOption = "torch",
    attention: AttentionOption = "torch",
    batch_invariant: BatchInvariant = False,
    engine: Engine = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
) -> None:
    """Continue PROMPT greedily and stream the text."""
    with input_errors():
        if not chat and not think:
            raise ValueError("--no-think only means something with --chat; add --chat or leave it out")
        began = time.perf_counter()
        driver, tokenizer = start(model, engine, make_config(dtype, device, linear, attention, batch_invariant))
        load_s = time.perf_counter() - began
        text = sys.stdin.read() if prompt == "-" else prompt
        messages = [{"role": "user", "content": text}]
        ids = encode_chat(tokenizer, messages, think) if chat else tokenizer.encode(text, add_special_tokens=False)
        if not json_output and not chat:
            sys.stdout.write(text)
        reply = reply_to(driver, tokenizer, ids, max_new_tokens, silent=json_output)
    if json_output:
        report = {
            "prompt_ids": reply.prompt_ids,
            "token_ids": reply.token_ids,
            "text": reply.text,
            "finish_reason": reply.finish_reason,
            "timings": {"load_s": load_s, **reply.timings()},
        }
        typer.echo(json.dumps(report))
        return
    timings = reply.timings()
    typer.echo()
    typer.secho(
        f"{len(reply.prompt_ids)} prompt tokens in {timings['prefill_s']:.2f} s, {len(reply.token_ids)} tokens at "
        f"{timings['decode_tokens_per_s']:.0f} per second, finished by {reply.finish_reason}",
        dim=True, err=True,
    )  # fmt: skip


@app.command()
def chat(
    model: Model = None,
    max_new_tokens: MaxNewTokens = 400,
    system: Annotated[str | None, typer.Option(help="A system message that opens the conversation.")] = None,
    think: Annotated[bool, typer.Option(help="Let the model think before it answers.")] = True,
    dtype: DtypeOption = "float32",
    device: Device = "cpu",
    linear: LinearOption = "torch",
    attention: AttentionOption = "torch",
    batch_invariant: BatchInvariant = False,
    engine: Engine = None,
) -> None:
    """Talk with the model. /new forgets the conversation, /exit (or Ctrl-D) ends it."""
    with input_errors():
        driver, tokenizer = start(model, engine, make_config(dtype, device, linear, attention, batch_invariant))
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
            messages = answer(driver, tokenizer, messages, text, max_new_tokens, think)


def answer(
    driver: GreedyDriver,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    text: str,
    max_new_tokens: int,
    think: bool,
) -> list[dict[str, str]]:
    """Answer one turn and return the conversation with it; a turn that cannot be run leaves it as it was."""
    asked = [*messages, {"role": "user", "content": text}]
    try:
        reply = reply_to(driver, tokenizer, encode_chat(tokenizer, asked, think), max_new_tokens)
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
