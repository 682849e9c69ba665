"""Read a Hugging Face folder: ``config.json`` -> ``ModelConfig``, safetensors -> weights, tokenizer files -> tokenizer.

Owns: file names, tensor names and every check on them. Must not know: how a forward pass uses the weights.
Files come from outside, so each fault is one ``ValueError`` that names the file and the tensor.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.hf_files import GenerationFile, IndexFile, check_generation, parse

if TYPE_CHECKING:  # imported where a tokenizer is loaded: it takes two seconds, and engines work on token ids
    from transformers import PreTrainedTokenizerBase

TINY_MODEL = Path(__file__).parent / "tiny" / "model"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def resolve_folder(model: str | Path | None) -> Path:
    """Return the folder of ``model``: ``None`` is the embedded one, a path is itself, anything else a hub id.

    A hub id is fetched, or found in the local cache, by ``huggingface_hub``. Raises ``ValueError`` when that fails.
    """
    if model is None:
        return TINY_MODEL
    folder = Path(os.path.expanduser(model))  # as it is, where there is no home
    if folder.is_dir():
        return folder
    if folder.exists() or str(model).startswith((".", "/", "~")) or str(model).count("/") != 1:
        raise ValueError(f"{model} is not a folder; give a checkpoint folder or a hub id like Qwen/Qwen3-0.6B")
    from huggingface_hub import snapshot_download  # imported here: most runs never touch the network

    try:
        return Path(snapshot_download(str(model), allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except Exception as error:  # any network, name or permission fault means the same to the user
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{model} is no local folder and the hub did not deliver it ({reason}); check the spelling and the "
            "network, or download the checkpoint and give its folder"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """Read one JSON object. Raises ``ValueError`` naming the file when it is missing or broken."""
    if not file.is_file():
        raise ValueError(f"{file} does not exist; a checkpoint folder needs it")
    try:
        value = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}); was the download complete?") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}, not an object; is it the right file?")
    return value


def load_config(folder: Path) -> ModelConfig:
    """Read the model's shape. Raises ``ValueError`` naming the file for anything but a dense Qwen3."""
    try:
        return ModelConfig.from_hf(read_json(folder / "config.json"))
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{folder}: {error}") from error


def load_eos_ids(folder: Path) -> frozenset[int]:
    """Return the ids that end a generation, from ``generation_config.json`` or else ``config.json``; may be empty.

    Qwen3's generation config lists two, ``<|im_end|>`` and ``<|endoftext|>``; its ``config.json`` only one of them.
    Raises ``ValueError`` for an id that is no whole number, and for a stored default, such as a repetition penalty,
    that transformers would apply to every generation.
    """
    for name in ("generation_config.json", "config.json"):
        if not (folder / name).is_file():
            continue
        raw = read_json(folder / name)
        check_generation(raw, str(folder / name))
        eos = parse(GenerationFile, raw, str(folder / name)).eos_token_id
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Load the folder's tokenizer with transformers. Raises ``ValueError`` naming the folder."""
    from transformers import AutoTokenizer

    # Without these files transformers builds an empty tokenizer and says nothing.
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{folder} has no tokenizer; it needs one of {', '.join(TOKENIZER_FILES)}")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder}: the tokenizer cannot be loaded ({str(error).splitlines()[0]})") from error
    return tokenizer


def weight_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that a checkpoint of this model holds, in the order of the forward."""
    hidden, inner = cfg.hidden_size, cfg.intermediate_size
    q_size, kv_size = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.q_norm": (cfg.head_dim,),
        "self_attn.k_norm": (cfg.head_dim,),
        "self_attn.o_proj": (hidden, q_size),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (cfg.vocab_size, hidden)}
    for index in range(cfg.num_hidden_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not cfg.tie_word_embeddings:
        shapes["lm_head.weight"] = (cfg.vocab_size, hidden)
    return shapes


def load_weights(folder: Path, model: ModelConfig, engine: EngineConfig, progress: bool = False) -> dict[str, Tensor]:
    """Read all weights, memory-mapped, in ``engine.dtype`` on ``engine.device``.

    Raises ``ValueError`` naming file and tensor for a missing shard, a truncated file, an unknown or a missing tensor,
    a wrong shape, a dtype that is no float, or a separate head in a model that says its head is tied.
    """
    shapes = weight_shapes(model)
    if model.tie_word_embeddings:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]  # published checkpoints may repeat it
    weights: dict[str, Tensor] = {}
    bar = tqdm(total=len(shapes), desc="loading weights", unit="tensor", disable=not progress, leave=False)
    with bar:
        for file, name, tensor in stored_tensors(folder):
            check_tensor(file, name, tensor, shapes)
            # A copy, not a view of the mapped file: fresh memory is aligned, and alignment can change a product's bits.
            weights[name] = tensor.to(device=engine.device, dtype=getattr(torch, engine.dtype), copy=True)
            bar.update()
    if model.tie_word_embeddings:
        head = weights.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, weights.get("model.embed_tokens.weight", head)):
            raise ValueError(
                f"{folder}: config.json says tie_word_embeddings, but lm_head.weight differs from "
                "model.embed_tokens.weight; set tie_word_embeddings to false to use both"
            )
    missing = [name for name in weight_shapes(model) if name not in weights]
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} tensors, the first is {missing[0]}; is a shard missing?")
    return weights


def check_tensor(file: Path, name: str, tensor: Tensor, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise ``ValueError`` unless ``name`` belongs to the model and has its shape and a floating dtype."""
    if name not in shapes:
        raise ValueError(f"{file} holds an unknown tensor {name}; the model of config.json has no such weight")
    if tuple(tensor.shape) != shapes[name]:
        raise ValueError(f"{file}: {name} has shape {tuple(tensor.shape)}, config.json asks for {shapes[name]}")
    if not tensor.dtype.is_floating_point or tensor.itemsize < 2:
        raise ValueError(f"{file}: {name} is {tensor.dtype}; load a float32, bfloat16 or float16 checkpoint")


def stored_tensors(folder: Path) -> Iterator[tuple[Path, str, Tensor]]:
    """Yield (file, name, tensor) of a single-file or sharded checkpoint. Raises ``ValueError`` for a broken file."""
    for file, names in weight_files(folder).items():
        try:
            with safe_open(file, framework="pt") as tensors:
                stored = set(tensors.keys())
                absent = [name for name in names if name not in stored]
                if absent:
                    raise ValueError(f"{file} lacks {absent[0]}, which the index puts there; download the shard again")
                for name in sorted(stored):
                    yield file, name, tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read ({error}); it may be truncated, download it again") from error


def weight_files(folder: Path) -> dict[Path, list[str]]:
    """Return every weight file with the names that the index expects in it (none are expected of a single file)."""
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: []}
    if not (folder / INDEX_FILE).is_file():
        raise ValueError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors weights are read")
    files: dict[Path, list[str]] = {}
    index = parse(IndexFile, read_json(folder / INDEX_FILE), str(folder / INDEX_FILE))
    for name, shard in index.weight_map.items():
        files.setdefault(folder / Path(shard).name, []).append(name)
    for file, names in files.items():
        if not file.is_file():
            raise ValueError(f"{file} does not exist, but {INDEX_FILE} lists {len(names)} tensors in it")
    return files
