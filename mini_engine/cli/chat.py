"""``mini-engine chat``: a conversation, turn by turn."""

import sys
from typing import Annotated

import typer
from transformers import PreTrainedTokenizerBase

from mini_engine.cli.answers import stream_answer
from mini_engine.cli.options import (
    Computing,
    Drawing,
    GenerationConfig,
    MaxNewTokens,
    Model,
    make_params,
    with_groups,
)
from mini_engine.cli.start import input_errors, start, take_defaults
from mini_engine.outputs import Delta
from mini_engine.prompts import encode_chat
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.params import SamplingParams


@with_groups
def chat(
    drawing: Drawing,
    computing: Computing,
    model: Model = None,
    generation_config: GenerationConfig = "auto",
    max_new_tokens: MaxNewTokens = 400,
    system: Annotated[str | None, typer.Option(help="A system message that opens the conversation.")] = None,
    think: Annotated[bool, typer.Option(help="Let the model think before it answers.")] = True,
) -> None:
    """Talk with the model. /new forgets the conversation, /exit (or Ctrl-D) ends it."""
    with input_errors():
        config = computing.config()
        given = [name for name, value in vars(drawing).items() if value is not None]
        folder, stored = take_defaults(model, generation_config, given)
        params = make_params(drawing, stored=stored, max_new_tokens=max_new_tokens)
        driver, tokenizer = start(folder, computing.engine, config)
        encode_chat(tokenizer, [{"role": "user", "content": ""}], think)  # a missing template shows now, not later
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    typer.secho("Ask something. /new forgets the conversation, /exit ends it.", dim=True, err=True)
    while True:
        try:
            with input_errors():
                text = read_turn()
        except (EOFError, KeyboardInterrupt):
            typer.echo(err=True)
            return
        if text == "/exit":
            return
        if text == "/new":
            messages = list(opening)
        elif text:
            messages = answer_turn(driver, tokenizer, messages, text, params, think)


def read_turn() -> str:
    """Return a line of standard input. Raises ``EOFError`` at its end, ``ValueError`` for another encoding."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except UnicodeError as error:  # UTF-16 without its mark, for instance
        own = sys.stdin.encoding
        raise ValueError(f"standard input is not {own} ({error}); name its encoding in PYTHONIOENCODING") from error


def answer_turn(
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
        answer = stream_answer(driver, tokenizer, encode_chat(tokenizer, asked, think), params, show)
    except ValueError as error:  # the conversation has grown beyond the model's positions
        typer.secho(f"error: {error} (/new starts a fresh conversation)", fg="red", err=True)
        return messages
    except KeyboardInterrupt:
        typer.secho("\n(interrupted; this turn is forgotten)", dim=True, err=True)
        return messages
    typer.echo()
    return [*asked, {"role": "assistant", "content": answer.text}]


def show(delta: Delta) -> None:
    """Print what is new of an answer at once."""
    sys.stdout.write(delta.text)
    sys.stdout.flush()
