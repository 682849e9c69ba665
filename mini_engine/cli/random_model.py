"""``mini-engine random-model``: write a model of a real size whose weights are random, to measure with."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from mini_engine.bench.machine import RANDOM, make_checkpoint
from mini_engine.checkpoint import TINY_MODEL
from mini_engine.cli.start import input_errors

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def random_model(
    folder: Annotated[Path, typer.Argument(help="Where to write it; 0.6b takes 1.2 GB.")],
    shape: Annotated[str, typer.Option(help=f"In the shape of which model: {', '.join(RANDOM)}.")] = "0.6b",
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Write a model with random weights in a real shape, to measure speed with."""
    with input_errors():
        if shape not in RANDOM:
            raise ValueError(f"shape is {shape!r}; choose one of {', '.join(RANDOM)}")
        if folder.exists() and (folder.is_file() or any(folder.iterdir())):
            raise ValueError(f"{folder} is not empty; give a folder that does not exist")
    make_checkpoint(shape, folder, seed)
    for name in TOKENIZER:
        if (TINY_MODEL / name).is_file():
            shutil.copy(TINY_MODEL / name, folder / name)
    typer.echo(f"wrote {folder}; try: mini-engine generate Once --model {folder}", err=True)
