"""``mini-engine quantize``: round a model's weights once, into a folder that loads at once."""

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, cast

import typer
from safetensors.torch import save_file
from torch import Tensor

from mini_engine.checkpoint import INDEX_FILE, SINGLE_FILE, load_config, load_weights, read_json, resolve_folder
from mini_engine.cli.options import DtypeOption, Model
from mini_engine.cli.start import input_errors
from mini_engine.config import Dtype, EngineConfig, Quantize
from mini_engine.fast.quantized_files import stored
from mini_engine.fast.quantized_products import KINDS
from mini_engine.hf_files import OWN_METHOD
from mini_engine.receipt import checkpoint_of


def quantize(
    folder: Annotated[Path, typer.Argument(help="Where to write it.")],
    model: Model = None,
    kind: Annotated[str, typer.Option(help="To how many bits: int8 or int4, as with --quantize.")] = "int8",
    dtype: DtypeOption = "float32",
) -> None:
    """Round the weights of a model once and write them into FOLDER, which loads as any checkpoint does."""
    with input_errors():
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}; choose one of {', '.join(KINDS)}")
        if folder.exists() and (folder.is_file() or any(folder.iterdir())):
            raise ValueError(f"{folder} is not empty; give a folder that does not exist")
        write(resolve_folder(model), folder, EngineConfig(dtype=cast(Dtype, dtype), quantize=cast(Quantize, kind)))
    typer.echo(f"wrote {folder}; try: mini-engine generate Once --model {folder} --dtype {dtype}", err=True)


def write(source: Path, folder: Path, engine: EngineConfig) -> None:
    """Round the weights of ``source`` and write them, and copy its other files. Raises what loading it raises."""
    config, raw = load_config(source), read_json(source / "config.json")
    if "quantization_config" in raw:
        raise ValueError(f"{source} is quantized already; give the checkpoint that it was made of")
    facts = {"quant_method": OWN_METHOD, "kind": engine.quantize, "dtype": engine.dtype}
    facts |= {"source": checkpoint_of(source)["weights"]}
    weights = load_weights(source, config, engine, progress=sys.stderr.isatty())
    tensors: dict[str, Tensor] = {}
    for name in config.weight_shapes():
        tensors |= stored(name, weights.pop(name), engine.quantize)
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".txt", ".jinja", ".model") and file.name != INDEX_FILE:
            shutil.copy(file, folder / file.name)
    text = json.dumps({**raw, "quantization_config": facts}, indent=2)
    (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")
    save_file(tensors, folder / SINGLE_FILE, {"format": "pt", OWN_METHOD: json.dumps(facts, sort_keys=True)})
