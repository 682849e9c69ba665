"""``mini-engine families``: which models run, and whether that of a folder does."""

from pathlib import Path
from typing import Annotated

import typer

from mini_engine.checkpoint import load_config
from mini_engine.cli.start import input_errors
from mini_engine.families import FAMILIES


def families(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="A checkpoint, to say whether it runs.")
    ] = None,
) -> None:
    """List the families of models that run, or say whether the checkpoint in FOLDER does, and why not."""
    if folder is None:
        for name, family in FAMILIES.items():
            typer.echo(f"{name:<17}{family.models}")
            typer.echo(f"{'':17}from Qwen3: {family.differs}" if family.differs else f"{'':17}the model of lesson 1")
            typer.echo(f"{'':17}compute: {', '.join(family.ways)}")
        return
    with input_errors():
        config = load_config(folder)
    biases = " with biases" * any(config.has_bias(part) for part in config.family.parts.values())
    typer.echo(
        f"{folder} runs: a {config.model_type}{biases} of {config.num_hidden_layers} layers, hidden size "
        f"{config.hidden_size}, {config.max_position_embeddings} positions"
    )
