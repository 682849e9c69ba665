"""``mini-engine quantize``: a folder of rounded weights, and what does not fit such a folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mini_engine import EngineConfig
from mini_engine.checkpoint import TINY_MODEL
from mini_engine.cli.app import app
from mini_engine.cli.quantize import write
from mini_engine.fast.quantized import dequantize_int4, dequantize_int8
from mini_engine.llm import load_driver

WEIGHTS = "model.safetensors"
IDS = list(range(5, 25))


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in 4 bits, for float32."""
    folder = tmp_path_factory.mktemp("quantize") / "rounded"
    result = CliRunner().invoke(app, ["quantize", str(folder), "--kind", "int4"])
    assert result.exit_code == 0, result.output
    assert f"wrote {folder}; try: mini-engine generate Once --model {folder} --dtype float32" in result.stderr
    return folder


@pytest.fixture
def folder(rounded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rounded, tmp_path / "copy"))


def test_a_folder_is_small_and_answers_as_weights_that_are_rounded_on_load(rounded: Path) -> None:
    ratio = (rounded / WEIGHTS).stat().st_size / (TINY_MODEL / WEIGHTS).stat().st_size
    assert ratio < 0.3
    result = CliRunner().invoke(app, ["generate", "Once", "--model", str(rounded), "--max-new-tokens", "20"])
    assert result.exit_code == 0, result.output
    expected = CliRunner().invoke(app, ["generate", "Once", "--quantize", "int4", "--max-new-tokens", "20"])
    assert result.stdout == expected.stdout


@pytest.mark.parametrize(("compute", "way"), [("reference", "kernel up to"), ("compiled", "a loop up to")])
def test_a_receipt_says_how_the_weights_of_a_folder_are_quantized_and_multiplied_and_replays(
    compute: str, way: str, rounded: Path, tmp_path: Path
) -> None:
    file = tmp_path / "receipt.json"
    asked = ["generate", "Once", "--model", str(rounded), "--max-new-tokens", "4", "--receipt", str(file)]
    result = CliRunner().invoke(app, [*asked, "--compute", compute])
    assert result.exit_code == 0, result.output
    receipt = json.loads(file.read_text())
    assert receipt["engine"]["quantize"] == "int4"
    products = receipt["environment"]["products"]
    assert {name.split()[0] for name in products} == {"int4", "int8"}
    assert all(way in each for each in products.values())
    result = CliRunner().invoke(app, ["replay", str(file)])
    assert result.exit_code == 0, result.output
    assert "equal, to the bit" in result.stdout


def test_what_the_file_holds_are_the_weights_within_half_a_step(rounded: Path) -> None:
    """Two ids of a byte are neighbours; the table has 8 bits; a norm is as it was."""
    before, after = load_file(TINY_MODEL / WEIGHTS), load_file(rounded / WEIGHTS)
    name = "model.layers.1.mlp.down_proj.weight"
    ids, scales, zeros = (after[f"{name}.{part}"] for part in ("ids", "scales", "zeros"))
    ids = torch.stack((ids % 16, ids // 16), dim=-1).flatten(1)
    error = (dequantize_int4(ids, scales, zeros) - before[name].float()).abs()
    assert (error <= 0.51 * scales.repeat_interleave(32, -1)).all()
    table = "model.embed_tokens.weight"
    scales = after[f"{table}.scales"]
    error = (dequantize_int8(after[f"{table}.ids"], scales) - before[table].float()).abs()
    assert (error <= 0.51 * scales[:, None]).all()
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"].float())


def test_steps_in_bfloat16_are_taken_for_float32_too(tmp_path: Path) -> None:
    folder = tmp_path / "rounded"
    write(TINY_MODEL, folder, EngineConfig(dtype="bfloat16", quantize="int8"))
    expected = load_driver(TINY_MODEL, EngineConfig(dtype="bfloat16", quantize="int8")).generate(IDS, 8)
    assert load_driver(folder, EngineConfig(dtype="bfloat16")).generate(IDS, 8).token_ids == expected.token_ids
    assert load_driver(folder).generate(IDS, 8).token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int8"}, "is quantized to 'int4' and quantize is 'int8'; leave quantize out"),
        ({"dtype": "bfloat16"}, "is quantized in 'float32' and dtype is 'bfloat16'; set dtype='float32'"),
        ({"compute": "triton"}, "quantize='int4' is for CPUs"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(rounded: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_driver(rounded, EngineConfig(**options))


def test_weights_that_were_made_of_others_are_refused(folder: Path) -> None:
    """As after copying one of the two files of a model with the same shapes."""
    config = json.loads((folder / "config.json").read_text())
    digests = config["quantization_config"]["source"]
    assert list(digests) == [WEIGHTS]
    digests[WEIGHTS] = "0" * 64
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"safetensors was not made of what config\.json says; copy both files"):
        load_driver(folder)


def test_tensors_that_do_not_fit_the_configuration_are_refused(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        metadata = file.metadata()
    name = "model.layers.0.mlp.up_proj.weight.zeros"
    shorter = tensors[name][:-1].contiguous()
    changes: list[tuple[dict[str, torch.Tensor], str]] = [
        ({"model.more": torch.ones(3)}, r"model\.more has shape \(3,\), config\.json asks for None"),
        ({name: shorter}, rf"{name} has shape .*, config\.json asks for .*; quantize the model again"),
    ]
    for change, message in changes:
        save_file({**tensors, **change}, folder / WEIGHTS, metadata)
        with pytest.raises(ValueError, match=message):
            load_driver(folder)
    del tensors[name]
    save_file(tensors, folder / WEIGHTS, metadata)
    with pytest.raises(ValueError, match=f"{name} has shape None"):
        load_driver(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "off"], "kind is 'off'; choose one of int8, int4"),
        (["--kind", "int2"], "kind is 'int2'; choose one of int8, int4"),
        ([], "is not empty; give a folder that does not exist"),
    ],
)
def test_what_cannot_be_written_is_refused(rounded: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["quantize", str(rounded), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_rounded_weights_are_not_rounded_again(rounded: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["quantize", str(tmp_path / "new"), "--model", str(rounded)])
    assert result.exit_code == 2
    assert f"{rounded} is quantized already; give the checkpoint that it was made of" in result.stderr
