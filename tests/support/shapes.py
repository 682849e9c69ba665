"""Small models of many shapes, random weights for them, and their logits token by token."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from mini_engine.attention.allocator import pages_needed
from mini_engine.attention.metadata import SequenceChunk, pack_batch
from mini_engine.attention.pool import KVPool
from mini_engine.config import ModelConfig
from mini_engine.driver import GreedyDriver

# (hidden, Hq, Hkv, head_dim, intermediate, vocab): even sizes, odd sizes, one key-value head, wide heads
SHAPES = [(128, 6, 2, 32, 384, 512), (96, 3, 3, 16, 200, 259), (64, 5, 1, 24, 100, 301), (80, 8, 2, 128, 96, 128)]


# For kernels in the interpreter, which needs milliseconds for every program.
ONE_LAYER = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=40,
    max_position_embeddings=256,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
)


def peer_config(shape: tuple[int, ...], **changes: Any) -> Qwen3Config:
    """The transformers configuration of a shape; three layers and 512 positions unless ``changes`` say otherwise."""
    hidden, heads, kv_heads, head_dim, inner, vocab = shape
    options = {"num_hidden_layers": 3, "max_position_embeddings": 512} | changes
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        tie_word_embeddings=False,
        initializer_range=0.15,
        **options,
    )


@cache
def peer(shape: tuple[int, ...], dtype: str, rope: tuple[tuple[str, Any], ...] = ()) -> Qwen3ForCausalLM:
    """A random transformers model whose norm weights are not all 1, and differ between queries and keys."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(peer_config(shape, rope_parameters=dict(rope) or None))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        parameter.data = parameter.data.to(getattr(torch, dtype))  # model.to() would also round the rotary table
    return model.eval()


def weights_of(
    shape: tuple[int, ...], dtype: str, rope: tuple[tuple[str, Any], ...] = ()
) -> tuple[ModelConfig, dict[str, Tensor]]:
    model = peer(shape, dtype, rope)
    return ModelConfig.from_hf(model.config.to_dict()), {k: v.clone() for k, v in model.state_dict().items()}


@torch.inference_mode()
def teacher_forced(driver: GreedyDriver, ids: list[int], prompt: int) -> Tensor:
    """Logits of the last prompt token and of every token after it, each of them decoded alone."""
    num_pages = 1 + pages_needed(len(ids), 16)
    pool = KVPool(driver.model.config, num_pages, 16, driver.model.embedding.dtype)
    pages = list(range(1, num_pages))
    done = 0
    rows = []
    for end in range(prompt, len(ids) + 1):
        rows.append(driver.forward(pack_batch([SequenceChunk(ids[done:end], done, pages)], 16), pool)[0])
        done = end
    return torch.stack(rows)


@torch.inference_mode()
def peer_logits(model: Qwen3ForCausalLM, ids: list[int], prompt: int) -> Tensor:
    """What ``teacher_forced`` returns, from transformers. It too multiplies the head with one row at a time."""
    out = model(torch.tensor([ids[:prompt]]), use_cache=True, logits_to_keep=1)
    rows = [out.logits[0, -1]]
    for token in ids[prompt:]:
        out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
        rows.append(out.logits[0, -1])
    return torch.stack(rows)
