"""What every command begins with: errors shown in one line, the engine that is asked for, the model."""

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from transformers import PreTrainedTokenizerBase

from mini_engine.checkpoint import load_tokenizer, resolve_folder, stored_defaults
from mini_engine.config import EngineConfig
from mini_engine.device import check_device
from mini_engine.llm import load_defaults, load_driver
from mini_engine.overlay import installed
from mini_engine.sampler.driver import SamplingDriver, WorkerLostError
from mini_engine.sampler.params import SamplingParams, off_value


@contextmanager
def input_errors() -> Iterator[None]:
    """Show a ``ValueError`` as one line and exit with 2: it names what the user gave and what to do instead.

    A rank that is lost is one line, too, and exit code 1.
    """
    warnings.showwarning = lambda message, *_, **__: typer.secho(f"warning: {message}", fg="yellow", err=True)
    try:
        yield
    except ValueError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
    except WorkerLostError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(1) from error
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


def name_unwritten() -> None:
    """Say which tasks of the modules that are loaded are not the student's own."""
    overlay = installed()
    if overlay is not None and overlay.filled:
        tasks = ", ".join(sorted(overlay.filled))
        typer.secho(f"not written yet, so the reference's own: {tasks}", dim=True, err=True)


def take_defaults(model: str | None, choice: str, given: Collection[str] = ()) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a model and the defaults that a command takes from it, and say which.

    ``choice`` is that of ``load_defaults``. ``given``: options that go before a default of their name; a preset goes
    before all. Raises ``ValueError``.
    """
    folder = resolve_folder(model)
    stored = load_defaults(folder, choice)
    stored = {name: stored[name] for name in stored if name not in given and "preset" not in given}
    say(stored, "are taken", "--generation-config none turns them off")
    return folder, stored


def say(stored: Mapping[str, Any], what: str, remedy: str) -> None:
    """Say what becomes of defaults that the checkpoint stores."""
    if stored:
        shown = ", ".join(f"{name} {value}" for name, value in stored.items())
        typer.secho(f"the checkpoint's defaults {what}: {shown}; {remedy}", dim=True, err=True)


def start(
    model: str | Path | None, engine: Path | None, config: EngineConfig, params: SamplingParams | None = None
) -> tuple[SamplingDriver, PreTrainedTokenizerBase]:
    """Load what a command runs on.

    ``params``: those of a command that takes no stored defaults; it says which of them are not in force. Raises
    ``ValueError`` for a faulty checkpoint or another engine than asked for.
    """
    check_engine(engine)
    check_device(config.device)  # before a checkpoint is downloaded
    folder = resolve_folder(model)
    if params is not None:
        left = {
            name: value
            for name, value in stored_defaults(folder).items()
            if getattr(params, name) == off_value(name) != value
        }
        say(left, "are not taken here", "ask for what you want of them")
    driver = load_driver(folder, config)
    if driver.weight_bytes:
        each = ", ".join(f"{count / 2**20:.1f}" for count in driver.weight_bytes)
        typer.secho(f"{config.tensor_parallel} ranks, which have read {each} MiB of weights", dim=True, err=True)
    name_unwritten()  # the model and its kernels are loaded now
    return driver, load_tokenizer(folder)
