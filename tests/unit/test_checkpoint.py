"""A checkpoint comes from outside: every fault is one error that names the file and the tensor."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, Qwen3ForCausalLM

from mini_engine.attention.dense import DenseAttention, sdpa_attention
from mini_engine.checkpoint import (
    TINY_MODEL,
    load_config,
    load_eos_ids,
    load_tokenizer,
    load_weights,
    resolve_folder,
)
from mini_engine.config import EngineConfig
from mini_engine.llm import load_model
from mini_engine.model import Qwen3

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(untied: Path, tmp_path: Path) -> Path:
    """A checkpoint that the test may damage."""
    return Path(shutil.copytree(untied, tmp_path / "model"))


def load(folder: Path) -> None:
    load_weights(folder, load_config(folder), EngineConfig(), progress=True)


def logits(folder: Path, dtype: str = "float32") -> torch.Tensor:
    model = load_model(folder, EngineConfig(dtype=dtype))
    with torch.inference_mode():
        return model(torch.arange(9), torch.arange(9), DenseAttention(sdpa_attention))


def peer_logits(folder: Path, dtype: str = "float32") -> torch.Tensor:
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.inference_mode():
        return model(torch.arange(9)[None]).logits[0]


def save_shards(folder: Path, shards: Path) -> Path:
    """Save the checkpoint again in several files."""
    Qwen3ForCausalLM.from_pretrained(folder).save_pretrained(shards, max_shard_size="60KB")
    return shards


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_float32_checkpoint_loads_in_either_dtype_with_the_bits_of_transformers(folder: Path, dtype: str) -> None:
    assert torch.equal(logits(folder, dtype), peer_logits(folder, dtype))


def test_a_bfloat16_checkpoint_is_widened_exactly(folder: Path) -> None:
    save_file({k: v.bfloat16() for k, v in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS, {"format": "pt"})
    assert torch.equal(logits(folder), peer_logits(folder))


def test_a_sharded_checkpoint_gives_the_bits_of_the_single_file(folder: Path, tmp_path: Path) -> None:
    whole = logits(folder)
    shards = save_shards(folder, tmp_path / "shards")
    assert len(list(shards.glob("*.safetensors"))) > 1
    assert torch.equal(logits(shards), whole)


def test_a_tied_checkpoint_may_repeat_its_table_as_the_head(tied: Path, tmp_path: Path) -> None:
    """Published tied checkpoints hold ``lm_head.weight`` too; it must be the same table, or something is wrong."""
    folder = Path(shutil.copytree(tied, tmp_path / "model"))
    before = logits(folder)
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    assert torch.equal(logits(folder), before)
    tensors["lm_head.weight"] += 1
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match=r"tie_word_embeddings.*lm_head\.weight differs"):
        load(folder)


def test_a_tied_checkpoint_may_hold_the_head_alone(tied: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tied, tmp_path / "model"))
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    assert torch.equal(logits(folder), logits(tied))
    assert torch.equal(logits(folder), peer_logits(folder))


def test_the_config_of_transformers_4_is_read_too(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    theta = raw.pop("rope_parameters")["rope_theta"]
    (folder / "config.json").write_text(json.dumps(raw | {"rope_theta": theta, "rope_scaling": None}))
    assert load_config(folder).rope_theta == theta == 5e5


WRONG_TENSORS: list[tuple[dict[str, torch.Tensor | None], str]] = [
    ({"model.layers.1.mlp.up_proj.weight": None}, r"lacks 1 tensors.*model\.layers\.1\.mlp\.up_proj\.weight"),
    (
        {"model.layers.0.self_attn.q_proj.bias": torch.ones(3)},
        r"model\.safetensors holds an unknown tensor .*q_proj\.bias",
    ),
    ({"model.norm.weight": torch.ones(47)}, r"model\.norm\.weight has shape \(47,\).*\(48,\)"),
    ({"model.norm.weight": torch.ones(48, dtype=torch.int8)}, r"model\.norm\.weight is torch\.int8"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_TENSORS, ids=["missing", "unknown", "shape", "quantised"])
def test_a_wrong_tensor_is_named_before_a_bar_is_shown(
    folder: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors = load_file(folder / WEIGHTS) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=message):
        load(folder)
    assert not capsys.readouterr().err


def test_a_truncated_file_is_named(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read .*truncated"):
        load(folder)


def test_a_missing_shard_is_named(folder: Path, tmp_path: Path) -> None:
    shards = save_shards(folder, tmp_path / "shards")
    gone = sorted(shards.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=rf"{gone.name} does not exist, but .*index\.json lists \d+ tensors"):
        load(shards)


def test_a_shard_without_a_tensor_that_the_index_promises_is_named(folder: Path, tmp_path: Path) -> None:
    shards = save_shards(folder, tmp_path / "shards")
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["model.norm.weight"]
    tensors = load_file(shards / shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shards / shard)
    with pytest.raises(ValueError, match=rf"{shard} lacks model\.norm\.weight"):
        load(shards)


STORED_QUANTIZED = (
    r"stored quantized are not read, load the model's bfloat16 checkpoint and set quantize='int8' or 'int4'$"
)


def test_a_file_of_gguf_and_a_folder_or_a_hub_id_with_one_are_refused_with_what_to_load_instead(folder: Path) -> None:
    for name in ("somebody/Model-GGUF", str(folder / "model.gguf")):
        with pytest.raises(ValueError, match=f"{name} is of the format GGUF; .*{STORED_QUANTIZED}"):
            resolve_folder(name)
    (folder / WEIGHTS).unlink()
    (folder / "model.gguf").touch()
    with pytest.raises(ValueError, match=f"has neither .* {STORED_QUANTIZED}"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=rf"has no config\.json, but model\.gguf; .* {STORED_QUANTIZED}"):
        load(folder)


@pytest.mark.parametrize("ending", ["qweight", "weight_packed", "weight_scale", "weight_scale_inv"])
def test_quantized_tensors_are_refused_with_what_to_load_instead(folder: Path, ending: str) -> None:
    """Those of GPTQ and AWQ, of compressed-tensors, and of FP8, where ``config.json`` does not say it."""
    weights = load_file(folder / WEIGHTS)
    name = "model.layers.0.mlp.up_proj"
    weights[f"{name}.{ending}"] = weights.pop(f"{name}.weight").to(torch.int32)
    save_file(weights, folder / WEIGHTS)
    with pytest.raises(ValueError, match=f"holds {name}.{ending}; .* {STORED_QUANTIZED}"):
        load(folder)


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, "model_type 'gemma'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"quantization_config": {"bits": 4}}, f"quantization_config .* {STORED_QUANTIZED}"),
        ({"num_key_value_heads": 2}, "num_attention_heads is 3 and num_key_value_heads 2"),
        ({"head_dim": 19}, "head_dim is 19"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "131"}, "vocab_size is '131'"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types 'sliding_attention'"),
        ({"layer_types": ["full_attention"] * 3}, "3 layer_types and num_hidden_layers 2"),
        ({"is_causal": False}, "is_causal False"),
        ({"rope_parameters": "x"}, "rope_parameters is 'x'"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_parameters.rope_theta is -1.0"),
        ({"rope_theta": "10000", "rope_parameters": {}}, r"json: rope_theta is '10000'"),
        ({"rope_parameters": {"rope_theta": "10000"}}, r"json: rope_parameters\.rope_theta is '10000'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
        ({"num_hidden_layers": 1_000_000_000}, "num_hidden_layers is 1000000000"),
    ],
)
def test_a_model_that_the_engine_does_not_compute_is_refused_by_name(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_config(folder)


def test_a_broken_config_names_the_file(folder: Path) -> None:
    for text in ('{"model_type": "qwen3"', '{"a": ' + "[" * 100_000):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
            load_config(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match="lacks vocab_size"):
        load_config(folder)


def test_a_folder_without_a_tokenizer_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer; it needs one of tokenizer\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="the tokenizer cannot be loaded"):
        load_tokenizer(folder)


def test_end_ids_come_from_the_generation_config_first(folder: Path) -> None:
    assert load_eos_ids(folder) == {5}
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_eos_ids(folder) == {7, 9}


@pytest.mark.parametrize("ids", [{}, -1, True, [3, "y"]])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_end_id_that_is_none_is_named(folder: Path, file: str, ids: object) -> None:
    (folder / "generation_config.json").unlink()
    (folder / file).write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ValueError, match=rf"{file}: eos_token_id is "):
        load_eos_ids(folder)


@pytest.mark.parametrize(("field", "value"), [("num_beams", 3), ("suppress_tokens", [3]), ("no_repeat_ngram_size", 2)])
def test_a_stored_default_that_changes_every_generation_is_refused(folder: Path, field: str, value: object) -> None:
    """transformers does what the file says, so the engine must not be silent about it."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 5, field: value}))
    assert getattr(GenerationConfig.from_pretrained(folder), field) == value
    with pytest.raises(ValueError, match=f"{field} .*does not take it as a default"):
        load_eos_ids(folder)
    path.write_text(GenerationConfig(eos_token_id=5, temperature=0.6, top_k=20, do_sample=True).to_json_string(False))
    assert load_eos_ids(folder) == {5}


@pytest.mark.parametrize("weight_map", [["a"], None])
def test_an_index_that_is_none_is_named(folder: Path, tmp_path: Path, weight_map: object) -> None:
    shards = save_shards(folder, tmp_path / "shards")
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"index\.json: weight_map is "):
        load(shards)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (3, r"weight_map\.model\.norm\.weight is 3"),
        ("../model.safetensors", r"gives model\.norm\.weight to \.\./model"),
        ("/tmp/model.safetensors", r"gives model\.norm\.weight to /tmp/model"),
    ],
)
def test_a_place_that_is_none_is_named(folder: Path, tmp_path: Path, place: object, message: str) -> None:
    shards = save_shards(folder, tmp_path / "shards")
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": place}}))
    with pytest.raises(ValueError, match=message):
        load(shards)


def save_index(folder: Path, places: dict[str, str]) -> None:
    (folder / WEIGHTS).unlink(missing_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("seed", range(8))
def test_each_tensor_comes_from_the_file_that_the_index_names(folder: Path, seed: int) -> None:
    """Any assignment, shards named in any order, in folders too, and stale copies in any of them: the same weights."""
    draw = random.Random(seed)
    tensors = load_file(folder / WEIGHTS)
    (folder / "b").mkdir()
    files = ["z.safetensors", "a.safetensors", "b/a.safetensors"]
    places = {name: draw.choice(files) for name in draw.sample(sorted(tensors), len(tensors))}
    for file in set(places.values()):
        part = {name: tensor for name, tensor in tensors.items() if places[name] == file}
        stale = {name: tensors[name] * 2 + 1 for name in draw.sample(sorted(tensors), 9) if name not in part}
        assert stale
        save_file(part | stale, folder / file, {"format": "pt"})
    save_index(folder, places)
    weights = load_weights(folder, load_config(folder), EngineConfig())
    assert weights.places.keys() == tensors.keys()
    assert all(torch.equal(weights.pop(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_tensor_are_read_as_often_as_asked_for_and_a_whole_one_is_given_away_once(
    folder: Path, dtype: str
) -> None:
    weights = load_weights(folder, load_config(folder), EngineConfig(dtype=dtype))
    name = "model.layers.1.mlp.up_proj.weight"
    whole = load_file(folder / WEIGHTS)[name].to(getattr(torch, dtype))
    columns = (slice(None), slice(3, 8))
    for piece in ((), (slice(3),), (slice(5, 17),), (slice(5, 17),), (torch.tensor([9, 2]),), (slice(4, 4),), columns):
        found = weights.take(name, piece)
        assert found.is_contiguous()
        assert torch.equal(found, whole[piece])
        assert (found.dtype, found.data_ptr() % 64) == (whole.dtype, 0)
    assert torch.equal(weights.pop(name), whole)
    for take in (weights.take, weights.pop):
        with pytest.raises(KeyError, match=name):
            take(name)


def test_a_file_that_is_gone_when_a_tensor_is_read_is_named(folder: Path) -> None:
    weights = load_weights(folder, load_config(folder), EngineConfig())
    (folder / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        Qwen3(load_config(folder), weights)


@pytest.mark.parametrize("show", [True, False])
def test_the_progress_bar_counts_what_the_model_takes(
    folder: Path, capsys: pytest.CaptureFixture[str], show: bool
) -> None:
    config = load_config(folder)
    weights = load_weights(folder, config, EngineConfig(), progress=show)
    assert ("loading weights:   0%" in capsys.readouterr().err) is show
    weights.bar.mininterval = 0
    Qwen3(config, weights)
    shown = capsys.readouterr().err
    total = len(config.weight_shapes())
    assert [f"{n}/{total}" in shown for n in (1, total - 1, total)] == [show] * 3
    assert weights.bar.disable  # closed: its line is free


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_proj.bias"])
def test_a_tensor_that_the_index_gives_to_no_file_is_refused(folder: Path, name: str) -> None:
    """transformers takes it, in silence: of two shards that hold it, that of the last."""
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {name: torch.ones(48)}, folder / "part.safetensors", {"format": "pt"})
    save_index(folder, {own: "part.safetensors" for own in tensors if own != name})
    with pytest.raises(ValueError, match=rf"part\.safetensors holds {name}, which weight_map .* gives to no file"):
        load(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_a_key_that_stands_twice_is_refused(folder: Path, tmp_path: Path, file: str) -> None:
    shards = save_shards(folder, tmp_path / "shards")
    key = {"config.json": "rms_norm_eps", "model.safetensors.index.json": "model.norm.weight"}[file]
    text = (shards / file).read_text()
    assert text.count(f'"{key}":') == 1
    (shards / file).write_text(text.replace(f'"{key}":', f'"{key}": 0.5, "{key}":'))
    with pytest.raises(ValueError, match=rf"{file} is not valid JSON \('{key}' stands there twice\)"):
        load(shards)


@pytest.mark.parametrize("name", ["no/such/folder", "missing", "pyproject.toml"])
def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        resolve_folder(name)


def test_a_hub_id_that_cannot_be_fetched_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="nobody/nothing is no local folder and the hub did not deliver it"):
        resolve_folder("nobody/nothing")


def cached(monkeypatch: pytest.MonkeyPatch, home: Path, listed: list[str]) -> Path:
    """Make a cache of the hub that has listed the files of nobody/tiny; return its snapshot, without files yet."""
    for name, value in {"HF_HUB_OFFLINE": True, "HF_HUB_CACHE": str(home)}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    commit = hashlib.sha1(str(home).encode()).hexdigest()
    repository = home / "models--nobody--tiny"
    for name in ("refs", "trees", f"snapshots/{commit}"):
        (repository / name).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    files = {name: {"size": 1, "blob_id": "0" * 40} for name in listed}
    (repository / "trees" / f"{commit}.json").write_text(json.dumps({"format_version": 1, "files": files}))
    return repository / "snapshots" / commit


@pytest.mark.parametrize("lacking", [None, *sorted(file.name for file in TINY_MODEL.iterdir())])
def test_a_cached_model_runs_offline_without_the_files_that_nobody_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacking: str | None
) -> None:
    files = [file for file in TINY_MODEL.iterdir() if file.name != "training.json"]
    unread = ["README.md", "training.json", "vocab.json", "merges.txt", "old/model.safetensors", "preprocessor.json"]
    snapshot = cached(monkeypatch, tmp_path, unread + [file.name for file in files])
    for file in files:
        if file.name != lacking:
            shutil.copy(file, snapshot)
    if lacking in (None, "training.json"):
        assert resolve_folder("nobody/tiny") == snapshot
        load(snapshot)
        assert load_tokenizer(snapshot).encode("Once") == load_tokenizer(TINY_MODEL).encode("Once")
    elif lacking == "tokenizer.json":
        with pytest.raises(ValueError, match=r"missing \(.*merges\.txt.*tokenizer\.json|missing \(.*vocab\.json"):
            resolve_folder("nobody/tiny")
    else:
        with pytest.raises(ValueError, match=rf"1 file\(s\) are missing \({lacking}\)"):
            resolve_folder("nobody/tiny")


# Fields of transformers' configuration that neither its forward pass in float32 nor ours reads.
UNREAD = (
    "architectures attention_dropout bos_token_id dtype torch_dtype initializer_range pad_token_id use_cache "
    "sliding_window max_window_layers tokenizer_class id2label num_labels transformers_version eos_token_id"
).split()
ODD_VALUES = [0, 1, -1, 0.5, 1e400, float("nan"), 10**30, None, True, "", "2", [], ["x"], {"a": 1}]


@pytest.mark.parametrize("value", ODD_VALUES, ids=repr)
def test_an_odd_value_in_any_field_is_as_in_transformers_or_is_named(tmp_path: Path, value: object) -> None:
    """What loads here and in transformers has the same bits. What does not load is an error that names the field."""
    tiny = json.loads((TINY_MODEL / "config.json").read_text(encoding="utf-8"))
    folder = Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))
    expected = logits(folder)
    for field in [*tiny, "rope_theta", "rope_scaling", *UNREAD]:
        (folder / "config.json").write_text(json.dumps(tiny | {field: value}))
        fault, got = None, None
        try:
            load_eos_ids(folder)
            got = logits(folder)
        except ValueError as error:
            fault = str(error)
        if fault is not None:
            words = {"rope_parameters": "rope", "rope_scaling": "rope", "num_hidden_layers": "layer"}
            assert re.search(rf"{words.get(field, field)}|config\.json asks for", fault), (field, fault)
            continue
        if field in UNREAD or value is None:
            theirs = expected
        elif field == "rms_norm_eps":  # transformers takes no whole number there
            edit_config(folder, rms_norm_eps=float(str(value)))
            theirs = peer_logits(folder)
        else:
            theirs = peer_logits(folder)
        assert torch.equal(got, theirs), field


@pytest.mark.parametrize(
    "changes", [{"initializer_range": 1}, {"rms_norm_eps": 0}, {"num_labels": "x"}, {"use_cache": None}], ids=str
)
def test_fields_that_no_tokenizer_reads_do_not_stop_it(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))
    edit_config(folder, **changes)
    assert load_tokenizer(folder).encode("Once") == load_tokenizer(TINY_MODEL).encode("Once")


@pytest.mark.parametrize("kind", [3, ["x"]])
def test_a_tokenizer_class_that_is_none_is_an_error_of_the_tokenizer(tmp_path: Path, kind: object) -> None:
    folder = Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))
    edit_config(folder, tokenizer_class=kind)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="the tokenizer cannot be loaded"):
        load_tokenizer(folder)


def test_a_checkpoint_is_read_in_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    """With a name from another alphabet, with a byte order mark and without, in a process whose locale is C."""
    config = json.loads((TINY_MODEL / "config.json").read_text(encoding="utf-8")) | {"_name_or_path": "/home/用户"}
    for encoding in ("utf-8", "utf-8-sig"):
        folder = Path(shutil.copytree(TINY_MODEL, tmp_path / encoding))
        (folder / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding=encoding)
    named = Path(shutil.copytree(TINY_MODEL, tmp_path / "模型"))
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = """
import sys
from pathlib import Path
from mini_engine.checkpoint import load_config, load_tokenizer, resolve_folder
for folder in Path(sys.argv[1]).glob("utf-8*"):
    load_config(folder)
    print(load_tokenizer(folder).encode("Once"))
try:
    resolve_folder(sys.argv[2])
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path, named],
        env=os.environ | locale,
        capture_output=True,
        text=True,
        check=False,
    )
    *read, refused = done.stdout.splitlines()
    assert read == [str(load_tokenizer(TINY_MODEL).encode("Once"))] * 2, done.stderr[-300:]
    assert refused.endswith("cannot be read in the encoding ascii; set PYTHONUTF8=1")  # tokenizers reads UTF-8 alone
