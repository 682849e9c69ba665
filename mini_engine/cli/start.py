"""What every command begins with: errors shown in one line, the engine that is asked for, the model."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from transformers import PreTrainedTokenizerBase

from mini_engine.checkpoint import load_tokenizer, resolve_folder
from mini_engine.config import EngineConfig
from mini_engine.device import check_device
from mini_engine.llm import load_driver
from mini_engine.overlay import installed
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
    overlay = installed()
    running = overlay.folder if overlay is not None else None
    if (folder and folder.resolve()) != running:
        raise ValueError(f"--engine is {folder}, but the modules of {running or 'the engine itself'} are running")
    if overlay is not None:
        typer.secho(f"running the modules of {running}", dim=True, err=True)
    if overlay is not None and overlay.filled:
        tasks = ", ".join(sorted(overlay.filled))
        typer.secho(f"not written yet, so the reference's own: {tasks}", dim=True, err=True)


def start(
    model: str | None, engine: Path | None, config: EngineConfig
) -> tuple[SamplingDriver, PreTrainedTokenizerBase]:
    """Load what a command runs on. Raises ``ValueError`` for a faulty checkpoint or another engine than asked for."""
    check_engine(engine)
    check_device(config.device)  # before a checkpoint is downloaded
    folder = resolve_folder(model)
    return load_driver(folder, config), load_tokenizer(folder)
