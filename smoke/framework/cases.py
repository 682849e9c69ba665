"""The inputs of checks: model shapes, weights, prompts. All drawn from a seed, the same in probe and verdict.

Owns: inputs. Must not know: the engine (a probe builds it) and transformers (a spec builds it).
"""

import json
import math
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from smoke.framework.manifest import ENGINE

MODEL_FOLDER = ENGINE / "tiny" / "model"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LENGTHS = (1, 2, 7, 33, 128, 300)  # of prompts: one token, few, odd, around a tile of 128, several tiles


@dataclass(frozen=True)
class ModelCase:
    """A model: its Hugging Face config and a seed for its weights; seed ``None`` means the embedded model's own."""

    name: str
    config: tuple[tuple[str, Any], ...]
    seed: int | None

    @property
    def hf_config(self) -> dict[str, Any]:
        """The dictionary of ``config.json``. An object in it stands in ``config`` as its items."""
        return {key: dict(value) if isinstance(value, tuple) else value for key, value in self.config}

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.hf_config["vocab_size"])

    def weights(self, dtype: str) -> dict[str, Tensor]:
        """Return the weights, named as in a checkpoint, in ``dtype``."""
        source = embedded_weights() if self.seed is None else random_weights(self.config, self.seed)
        return {name: tensor.to(DTYPES[dtype]) for name, tensor in source.items()}


# heads, kv heads, head dim, hidden, inner, tied, theta, vocab, layers: odd counts, head_dim other than hidden / heads,
# one key-value head for all, one for each. An eps of 1e-6, but for two.
EPS = {"MHA 3:3, untied, theta 1e6": 1e-5, "GQA 9:3, wide heads": 1e-3}
SHAPES = {
    "GQA 6:2, tied": (6, 2, 32, 128, 96, True, 1e4, 131, 2),
    "MHA 3:3, untied, theta 1e6": (3, 3, 16, 96, 200, False, 1e6, 259, 2),
    "MQA 5:1, tied, theta 5e5": (5, 1, 24, 64, 100, True, 5e5, 101, 2),
    "GQA 4:2, untied, odd sizes": (4, 2, 20, 100, 90, False, 1e4, 128, 3),
    "MHA 4:4, tied, theta 1e6": (4, 4, 16, 64, 140, True, 1e6, 200, 2),
    "GQA 9:3, wide heads": (9, 3, 64, 72, 128, False, 1e6, 96, 2),
}


def random_cases(seed: int) -> list[ModelCase]:
    """Return the six random models."""
    return [random_case(name, seed) for name in SHAPES]


def random_case(name: str, seed: int) -> ModelCase:
    """Return one random model by its name in ``SHAPES``."""
    heads, kv_heads, head_dim, hidden, inner, tied, theta, vocab, layers = SHAPES[name]
    config = {
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "max_position_embeddings": 512,
        "rope_theta": theta,
        "rms_norm_eps": EPS.get(name, 1e-6),
        "tie_word_embeddings": tied,
    }
    return ModelCase(name, tuple(config.items()), seed * 1000 + list(SHAPES).index(name))


@cache
def embedded_case() -> ModelCase:
    """Return the model that the repository ships."""
    raw = json.loads((MODEL_FOLDER / "config.json").read_text())
    kept = {key: value for key, value in raw.items() if isinstance(value, int | float | str | bool)}
    kept["rope_theta"] = raw["rope_parameters"]["rope_theta"]
    return ModelCase("the embedded model", tuple(kept.items()), None)


@cache
def embedded_weights() -> dict[str, Tensor]:
    """Read the embedded model's weights."""
    return load_file(MODEL_FOLDER / "model.safetensors")


@cache
def embedded_eos_ids() -> frozenset[int]:
    """Return the ids that end a generation of the embedded model."""
    eos = json.loads((MODEL_FOLDER / "generation_config.json").read_text())["eos_token_id"]
    return frozenset(eos if isinstance(eos, list) else [eos])


@cache
def random_weights(config: tuple[tuple[str, Any], ...], seed: int) -> dict[str, Tensor]:
    """Draw weights that give logits of about unit size, and norm weights that are not 1, which would hide faults."""
    cfg = dict(config)
    generator = torch.Generator().manual_seed(seed)
    hidden = cfg["hidden_size"]
    inner = cfg["intermediate_size"]
    head_dim = cfg["head_dim"]
    q_size = cfg["num_attention_heads"] * head_dim
    kv_size = cfg["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    def norm(size: int) -> Tensor:
        return 1.0 + 0.3 * torch.randn(size, generator=generator)

    weights: dict[str, Tensor] = {"model.embed_tokens.weight": matrix(cfg["vocab_size"], hidden)}
    for index in range(cfg["num_hidden_layers"]):
        layer = {
            "input_layernorm": norm(hidden),
            "self_attn.q_proj": matrix(q_size, hidden),
            "self_attn.k_proj": matrix(kv_size, hidden),
            "self_attn.v_proj": matrix(kv_size, hidden),
            "self_attn.q_norm": norm(head_dim),
            "self_attn.k_norm": norm(head_dim),
            "self_attn.o_proj": matrix(hidden, q_size),
            "post_attention_layernorm": norm(hidden),
            "mlp.gate_proj": matrix(inner, hidden),
            "mlp.up_proj": matrix(inner, hidden),
            "mlp.down_proj": matrix(hidden, inner),
        }
        weights |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in layer.items()}
    weights["model.norm.weight"] = norm(hidden)
    if not cfg["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(cfg["vocab_size"], hidden)
    return weights


def random_ids(vocab_size: int, length: int, seed: int) -> list[int]:
    """Draw ``length`` token ids."""
    return [random.Random(f"ids {seed} {length} {i}").randrange(vocab_size) for i in range(length)]


def random_tensor(*shape: int, seed: int, dtype: str = "float32") -> Tensor:
    """Draw normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DTYPES[dtype])


ASK = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
OPENINGS = (
    "Once upon a time there was a {animal} named {name}.",
    "One day {name} the {animal} found a {color} box. {name}",
    ASK.format("Tell me a story about {name} the {animal}."),
    ASK.format("{name} is 9 years old and likes the color {color}. Turn this into JSON."),
    ASK.format("{name} has a {color} box. What color is the box?"),
)
WORDS = {
    "animal": ("fox", "owl", "bear", "cat", "otter", "duck", "hedgehog"),
    "name": ("Ada", "Ben", "Mila", "Otto", "Nora", "Theo", "Zoe"),
    "color": ("red", "blue", "green", "golden", "silver"),
}


@cache
def prompts(seed: int, count: int = 20) -> list[list[int]]:
    """Return prompts of the embedded model as token ids; the first ``count`` of one fixed list per seed."""
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    texts = []
    for index in range(count):
        slots = {slot: rng.choice(words) for slot, words in WORDS.items()}
        texts.append(OPENINGS[index % len(OPENINGS)].format(**slots))
    return [tokenizer.encode(text).ids for text in texts]
