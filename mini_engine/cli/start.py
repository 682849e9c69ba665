"""What every command begins with: errors shown in one line, the engine that is asked for, the model, the prompt's ids.

Owns: how input errors look and what is checked before anything runs. Must not know: commands.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import typer
from transformers import PreTrainedTokenizerBase

from mini_engine.checkpoint import load_tokenizer, resolve_folder
from mini_engine.config import EngineConfig
from mini_engine.llm import load_driver
from mini_engine.overlay import installed_folder
from mini_engine.sampler.driver import SamplingDriver


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


def start(
    model: str | None, engine: Path | None, config: EngineConfig
) -> tuple[SamplingDriver, PreTrainedTokenizerBase]:
    """Load what a command runs on. Raises ``ValueError`` for a faulty checkpoint or another engine than asked for."""
    check_engine(engine)
    folder = resolve_folder(model)
    return load_driver(folder, config), load_tokenizer(folder)


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], think: bool) -> list[int]:
    """Render a conversation with the tokenizer's chat template and encode it, ready for the assistant's turn."""
    if not tokenizer.chat_template:
        raise ValueError("this checkpoint's tokenizer has no chat template; leave out --chat")
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=think
        )
    except Exception as error:  # the checkpoint's template is a program and may raise anything
        raise ValueError(f"the checkpoint's chat template fails ({error}); leave out --chat, or mend it") from error
    return encode_text(tokenizer, cast(str, text))


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of ``text``. Raises ``ValueError`` for half a surrogate pair: a byte that was not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has {text[error.start]!r} at {error.start}, which is not a character; is the text UTF-8?"
        ) from error
    return list(tokenizer.encode(text, add_special_tokens=False))
