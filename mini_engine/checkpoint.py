"""Read a Hugging Face folder: ``config.json`` -> ``ModelConfig``, safetensors -> weights, tokenizer files -> tokenizer.

Files come from outside, so each fault is one ``ValueError`` that names the file and the tensor.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from mini_engine.checks import key_twice
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.families import EMBEDDING, FAMILIES, HEAD, UNREAD
from mini_engine.hf_files import STORED_QUANTIZED, GenerationFile, IndexFile, check_generation, parse
from mini_engine.weights import Index, StoredWeights, opened

if TYPE_CHECKING:  # imported where a tokenizer is loaded: it takes two seconds, and engines work on token ids
    from transformers import PreTrainedTokenizerBase

TINY_MODEL = Path(__file__).parent / "tiny" / "model"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
FETCHED_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model"]
VOCABULARY_FILES = ["vocab.json", "merges.txt", "tokenizer.model"]
READ_FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
]
STACKS = {"gate_up": ("expert_gates", "expert_ups"), "down": ("expert_downs",)}  # what transformers 5 puts into one
# How names of tensors end that GPTQ, AWQ, compressed-tensors and FP8 store.
QUANTIZED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def resolve_folder(model: str | Path | None) -> Path:
    """Return the folder of ``model``: ``None`` is the embedded one, a path is itself, anything else a hub id.

    A hub id is fetched, or found in the local cache, by ``huggingface_hub``. Raises ``ValueError`` when that fails.
    """
    if model is None:
        return TINY_MODEL
    if str(model).lower().endswith("gguf"):  # a file, or a hub id that says so
        raise ValueError(f"{model} is of the format GGUF; {STORED_QUANTIZED}")
    folder = Path(os.path.expanduser(model))  # as it is, where there is no home
    if folder.is_dir():
        check_readable(folder)
        return folder
    if folder.exists() or str(model).startswith((".", "/", "~")) or str(model).count("/") != 1:
        raise ValueError(f"{model} is not a folder; give a checkpoint folder or a hub id like Qwen/Qwen3-0.6B")
    try:
        return snapshot(str(model))
    except Exception as error:  # any network, name or permission fault means the same to the user
        raise ValueError(
            f"{model} is no local folder and the hub did not deliver it ({first_line(error)}); check the spelling and "
            "the network, or download the checkpoint and give its folder"
        ) from error


def check_readable(folder: Path) -> None:
    """Raise ``ValueError`` for a path that the locale's encoding lacks: libraries that want UTF-8 cannot open it."""
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the path {str(folder)!r} cannot be read in the encoding {sys.getfilesystemencoding()}; set PYTHONUTF8=1"
        ) from error


def snapshot(model: str) -> Path:
    """Fetch a hub id, or find it in the cache. Raises what ``huggingface_hub`` raises.

    Without a network a cached copy will do that has every file in ``READ_FILES`` which the hub lists for this model.
    """
    from huggingface_hub import snapshot_download  # imported here: most runs never touch the network
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=FETCHED_FILES))
    except LocalEntryNotFoundError as error:
        cached = getattr(error, "snapshot_path", None)
        if cached is None:
            raise
    is_whole = (Path(cached) / "tokenizer.json").is_file()  # then the vocabulary is in it
    needed = READ_FILES if is_whole else [*READ_FILES, *VOCABULARY_FILES]
    return Path(snapshot_download(model, allow_patterns=needed, local_files_only=True))


def first_line(error: Exception) -> str:
    """Return what an error of another library says, on one line."""
    return (str(error) or type(error).__name__).splitlines()[0]


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ``ValueError`` for a key that stands there twice."""
    if (twice := key_twice(pairs)) is not None:
        raise ValueError(f"{twice!r:.80} stands there twice")
    return dict(pairs)


def read_json(file: Path) -> dict[str, Any]:
    """Read one JSON object. Raises ``ValueError`` naming the file when it is missing or broken."""
    if not file.is_file():
        raise ValueError(f"{file} does not exist; a checkpoint folder needs it")
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}); correct it, or download it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}, not an object; is it the right file?")
    return value


def load_config(folder: Path) -> ModelConfig:
    """Read the model's shape. Raises ``ValueError`` naming the file for a model that is not computed."""
    if not (folder / "config.json").is_file() and (found := next(folder.glob("*.gguf"), None)) is not None:
        raise ValueError(f"{folder} has no config.json, but {found.name}; {STORED_QUANTIZED}")
    try:
        return ModelConfig.from_hf(read_json(folder / "config.json"))
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{folder}: {error}") from error


def load_eos_ids(folder: Path) -> frozenset[int]:
    """Return the ids that end a generation, from ``generation_config.json`` or else ``config.json``; may be empty.

    Qwen3's generation config lists two, ``<|im_end|>`` and ``<|endoftext|>``; its ``config.json`` only one of them.
    Raises ``ValueError`` as ``generation_files`` does.
    """
    for file in generation_files(folder):
        eos = file.eos_token_id
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()


def stored_defaults(folder: Path) -> dict[str, Any]:
    """Return the fields of ``SamplingParams`` that the checkpoint stores as defaults of a request; may be empty.

    They come from ``generation_config.json``, or from ``config.json`` where that file is absent, as in transformers.
    Their ranges are not checked. Raises ``ValueError`` as ``generation_files`` does.
    """
    return next(generation_files(folder), GenerationFile()).defaults


def generation_files(folder: Path) -> Iterator[GenerationFile]:
    """Yield what is stored about generations: of ``generation_config.json``, then of ``config.json``.

    Raises ``ValueError`` for a field of a wrong type, and for a stored default that this engine does not take.
    """
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            raw = read_json(folder / name)
            check_generation(raw, str(folder / name))
            yield parse(GenerationFile, raw, str(folder / name))


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Load the folder's tokenizer with transformers. Raises ``ValueError`` naming the folder.

    Of ``config.json`` a tokenizer depends on two fields. transformers would check them all, and end at a whole number
    where it expects one with a point, in fields that nothing here reads.
    """
    from transformers import AutoConfig, AutoTokenizer

    # Without these files transformers builds an empty tokenizer and says nothing.
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{folder} has no tokenizer; it needs one of {', '.join(TOKENIZER_FILES)}")
    raw = read_json(folder / "config.json")
    config = None
    try:
        if str(raw.get("model_type")) in FAMILIES:
            config = AutoConfig.for_model(raw["model_type"], tokenizer_class=raw.get("tokenizer_class"))
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, config=config, local_files_only=True)
    except Exception as error:  # the files come from outside, and the library checks them in many ways
        raise ValueError(f"{folder}: the tokenizer cannot be loaded ({first_line(error)})") from error
    return tokenizer


def load_weights(folder: Path, model: ModelConfig, engine: EngineConfig, progress: bool = False) -> StoredWeights:
    """Check all weights by their files' headers; each is read when taken, in ``engine.dtype`` on ``engine.device``.

    Only a tied head that is stored beside its table is read here, since the two must be equal.

    Raises ``ValueError`` naming file and tensor for a missing shard, a truncated file, an unknown or a missing tensor,
    a wrong shape, a dtype that is no float, or a separate head in a model that says its head is tied.
    """
    needed = model.weight_shapes()
    shapes = {HEAD: needed[EMBEDDING]} | needed if model.tie_word_embeddings else needed  # stored twice, or as either
    places: dict[str, tuple[Path, str, Index]] = {}
    for file, stored, tensor in stored_tensors(folder):
        if stored.endswith(UNREAD):
            continue
        inside = experts_in(model, stored)
        if () not in inside.values():
            each = [shapes[name] for name in inside if name in shapes]
            rows = sum(shape[0] for shape in each) // model.num_experts
            check_tensor(file, stored, tensor, {stored: (model.num_experts, rows, each[0][1])} if each else {})
        for name, index in inside.items():
            check_tensor(file, name, tensor[index], shapes)
            places[name] = file, stored, index
    weights = StoredWeights(places, getattr(torch, engine.dtype), engine.device)
    if model.tie_word_embeddings and HEAD in places:
        if EMBEDDING in places and not torch.equal(weights.take(HEAD), weights.take(EMBEDDING)):
            raise ValueError(
                f"{folder}: config.json says tie_word_embeddings, but {HEAD} differs from {EMBEDDING}; set "
                "tie_word_embeddings to false to use both"
            )
        places.setdefault(EMBEDDING, places.pop(HEAD))
    missing = [name for name in needed if name not in places]
    if missing:
        guess = "tie_word_embeddings" if missing == [HEAD] else "a shard"
        raise ValueError(f"{folder} lacks {len(missing)} tensors, the first is {missing[0]}; is {guess} missing?")
    weights.bar = tqdm(total=len(places), desc="loading weights", unit="tensor", disable=not progress, leave=False)
    return weights


def experts_in(model: ModelConfig, stored: str) -> dict[str, Index]:
    """Return the names of the weights in a ``stored`` tensor, and the place of each: itself, or those of all experts.

    transformers 5 can store one stack for the experts of a layer, and calls every MLP "mlp" then.
    """
    parts = model.family.parts
    if "expert_gates" not in parts:
        return {stored: ()}
    found = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj", stored)
    if found is None:
        return {stored.replace(".mlp.", f".{parts['router'].stored.removesuffix('gate')}"): ()}
    kinds = [parts[kind] for kind in STACKS[found[2]]]
    size = getattr(model, kinds[0].shape[0])
    return {
        names["weight"]: (expert, slice(place * size, (place + 1) * size))
        for place, part in enumerate(kinds)
        for expert, names in enumerate(model.names(part, int(found[1])))
    }


def check_tensor(file: Path, name: str, tensor: Tensor, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise ``ValueError`` unless ``name`` belongs to the model and has its shape and a floating dtype."""
    if name.endswith(QUANTIZED):
        raise ValueError(f"{file} holds {name}; {STORED_QUANTIZED}")
    if name not in shapes:
        raise ValueError(f"{file} holds an unknown tensor {name}; the model of config.json has no such weight")
    if tuple(tensor.shape) != shapes[name]:
        raise ValueError(f"{file}: {name} has shape {tuple(tensor.shape)}, config.json asks for {shapes[name]}")
    if not tensor.dtype.is_floating_point or tensor.itemsize < 2:
        raise ValueError(f"{file}: {name} is {tensor.dtype}; load a float32, bfloat16 or float16 checkpoint")


def stored_tensors(folder: Path) -> Iterator[tuple[Path, str, Tensor]]:
    """Yield (file, name, tensor) of a single-file or sharded checkpoint. Raises ``ValueError`` for a broken file.

    A tensor is a view of the mapped file: its shape and dtype come from the header, and nothing else is read.
    Of each shard come the tensors that the index gives to it. A copy of a tensor that the index gives to another shard
    is left alone: it may be stale.
    """
    files = weight_files(folder)
    assigned = {name for names in files.values() for name in names}
    for file, names in files.items():
        with opened(file) as tensors:
            stored = set(tensors.keys())
            check_names(file, stored, names, assigned)
            for name in sorted(names or stored):
                yield file, name, tensors.get_tensor(name)


def check_names(file: Path, stored: set[str], names: list[str], assigned: set[str]) -> None:
    """Raise ``ValueError`` unless a shard has the tensors ``names``, and no tensor that is ``assigned`` to no shard.

    transformers loads such a tensor too, and of two the one in the shard whose name comes last.
    """
    absent = sorted(set(names) - stored)
    if absent:
        raise ValueError(f"{file} lacks {absent[0]}, which the index puts there; download the shard again")
    unassigned = sorted(stored - assigned)
    if names and unassigned:
        raise ValueError(
            f"{file} holds {unassigned[0]}, which weight_map of {INDEX_FILE} gives to no file; add it there, or remove "
            "it from the shard"
        )


def weight_files(folder: Path) -> dict[Path, list[str]]:
    """Return every weight file with the names that the index gives to it (a single file has no index: all are its own).

    Raises ``ValueError`` for a file that is missing, and for one outside of ``folder``.
    """
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: []}
    if not (folder / INDEX_FILE).is_file():
        remedy = STORED_QUANTIZED if any(folder.glob("*.gguf")) else "only safetensors weights are read"
        raise ValueError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; {remedy}")
    files: dict[Path, list[str]] = {}
    index = parse(IndexFile, read_json(folder / INDEX_FILE), str(folder / INDEX_FILE))
    for name, shard in index.weight_map.items():
        if Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise ValueError(f"{folder / INDEX_FILE} gives {name} to {shard}; a shard lies in the checkpoint's folder")
        files.setdefault(folder / shard, []).append(name)
    for file, names in files.items():
        if not file.is_file():
            raise ValueError(f"{file} does not exist, but {INDEX_FILE} lists {len(names)} tensors in it")
    return files
