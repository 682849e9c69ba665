"""Shared fixtures: small random models, saved as checkpoints and loaded by both sides."""

import os
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mini_engine.fast.products import onednn_fault

if "PYTEST_XDIST_WORKER" in os.environ:  # each core has a worker, and threads of two workers would wait for each other
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the commands that tests run

pytest.register_assert_rewrite("tests.support")  # so that their assertions say what they compared


def skip_without_bfloat16(dtype: str | torch.dtype) -> None:
    """Skip a bfloat16 test where oneDNN has no such products, unless the CPU has AVX-512: there it must have them."""
    can = torch.backends.cpu.get_cpu_capability() == "AVX512" or onednn_fault(torch.bfloat16) is None
    if dtype in ("bfloat16", torch.bfloat16) and not can:
        pytest.skip("oneDNN has no bfloat16 for this CPU")


def random_checkpoint(folder: Path, **changes: object) -> Path:
    """Write a random 2-layer Qwen3 checkpoint to ``folder``."""
    shape = {
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "intermediate_size": 100,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
        "eos_token_id": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**shape | changes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)
