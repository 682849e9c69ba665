"""What every benchmark shares: the machine, memory readings, random checkpoints, and the check of names from a user."""

import gc
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
import typer
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from mini_engine.checkpoint import TINY_MODEL
from mini_engine.device import give_memory_back
from mini_engine.families import EMBEDDING

# What random models are made in the shape of. The function builds the configuration of transformers.
RANDOM: dict[str, Callable[[], PretrainedConfig]] = {
    "0.6b": lambda: Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        dtype="bfloat16",
    ),
    "llama-1b": lambda: LlamaConfig(  # Llama 3.2
        vocab_size=128_256,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=8192,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        dtype="bfloat16",
    ),
    "moe": lambda: Qwen3MoeConfig(  # 16 small experts, of which a token meets 2
        vocab_size=32_000,
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=3072,
        moe_intermediate_size=512,
        num_local_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        dtype="bfloat16",
    ),
}
SHAPES = ("tiny", *RANDOM)  # that ``make_checkpoint`` knows


def share_read(name: str, config: PretrainedConfig) -> float:
    """Return which share of the parameter ``name`` a decode step of one request reads.

    A table of embeddings is looked up, unless it is the head too. A token meets some of the experts.
    """
    if name == EMBEDDING and not config.tie_word_embeddings:
        return 0
    return config.num_experts_per_tok / config.num_experts if ".experts." in name else 1


def machine(threads: int) -> dict[str, Any]:
    """Describe the machine and the versions."""
    names = [line.split(":")[1].strip() for line in cpu_info() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def cpu_info() -> list[str]:
    """Return the lines of ``/proc/cpuinfo``; none if the file does not exist."""
    file = Path("/proc/cpuinfo")
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def peak_rss() -> int:
    """Return the peak memory of this process since ``forget_peak``, in bytes; 0 if the system does not report it."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def forget_peak() -> bool:
    """Reset ``peak_rss`` to the memory that is held now; return whether this system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


def settled_rss() -> int:
    """Return the bytes that this process holds after it has given free memory back to the system."""
    gc.collect()
    give_memory_back()
    return int(psutil.Process().memory_info().rss)


def names_in(dtype: str, systems: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    """Return the ``systems`` (name -> options) that are measured with ``dtype``.

    Compiled loops need Numba. Weights in fewer bytes are compared with those in bfloat16.
    """
    left_out = [name for name, options in systems.items() if dtype == "float32" and "quantize" in (options or {})]
    rest = {name: options or {} for name, options in systems.items() if name not in left_out}
    over_loops = [name for name, options in rest.items() if options.get("compute") == "compiled"]
    if find_spec("numba") is None:
        typer.echo(f"left out, as Numba is not installed: {', '.join(over_loops)}")
        left_out += over_loops
    return [name for name in systems if name not in left_out]


def chosen(given: Sequence[str] | None, known: Iterable[str], what: str) -> list[str]:
    """Return the given names, or all known ones. Raises ``typer.BadParameter`` for an unknown name."""
    names = list(known)
    unknown = sorted(set(given or ()) - set(names))
    if unknown:
        raise typer.BadParameter(f"{what} {unknown[0]!r} is not one of {', '.join(names)}")
    return list(given or names)


def make_checkpoint(shape: str, folder: Path, seed: int) -> Path:
    """Return the folder of the embedded model, or write a random one in a shape of ``RANDOM``, in bfloat16."""
    if shape == "tiny":
        return TINY_MODEL
    torch.manual_seed(seed)
    config = RANDOM[shape]()
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder
