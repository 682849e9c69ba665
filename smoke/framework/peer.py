"""``transformers`` as the oracle: the same weights, the same inputs, its own code.

Owns: how its models and modules are built and called. Must not know: ``mini_engine``.

A trap lies in ``model.to(torch.bfloat16)``: it also casts the rotary frequencies, which a model loaded in bfloat16 by
``from_pretrained`` keeps in float32. They are put back here.
"""

from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from smoke.framework.cases import DTYPES, MODEL_FOLDER, ModelCase
from smoke.framework.prepared import prepared


@cache
def qwen3() -> Any:
    """Import the module of transformers' models. It takes seconds, which most checks need not spend."""
    from transformers.models.qwen3 import modeling_qwen3
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return modeling_qwen3


@lru_cache(maxsize=40)
def model(case: ModelCase, dtype: str, implementation: str) -> Any:
    """Build the case's ``Qwen3ForCausalLM`` with the attention implementation "eager" or "sdpa"."""
    if case.seed is None:
        load = qwen3().Qwen3ForCausalLM.from_pretrained
        return load(MODEL_FOLDER, dtype=DTYPES[dtype], attn_implementation=implementation).eval()
    config = qwen3().Qwen3Config(**case.hf_config)
    config._attn_implementation = implementation
    peer = qwen3().Qwen3ForCausalLM(config)
    missing = peer.load_state_dict(case.weights("float32"), strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, f"the case lacks {missing}"
    peer.tie_weights()
    frequencies = peer.model.rotary_emb.inv_freq.clone()
    peer = peer.to(DTYPES[dtype]).eval()
    peer.model.rotary_emb.inv_freq = frequencies
    return peer


@prepared
@torch.no_grad()
def logits(
    case: ModelCase,
    dtype: str,
    implementation: str,
    ids: list[int],
    *,
    positions: list[int] | None = None,
    rows: list[int] | None = None,
) -> Tensor:
    """Run one prompt without a cache -> [T, V], or [R, V] for the ``rows`` asked for."""
    out = model(case, dtype, implementation)(
        input_ids=torch.tensor([ids]),
        position_ids=None if positions is None else torch.tensor([positions]),
        logits_to_keep=0 if rows is None else torch.tensor(rows),
        use_cache=False,
    )
    return out.logits[0]  # type: ignore[no-any-return]


@prepared
@lru_cache(maxsize=400)
@torch.no_grad()
def generate(
    case: ModelCase,
    dtype: str,
    prompt: tuple[int, ...],
    count: int,
    eos: tuple[int, ...],
    *,
    cache: bool = True,
    implementation: str = "sdpa",
) -> tuple[list[int], Tensor]:
    """Generate greedily -> the new ids (an end-of-sequence id included) and the logits [steps, V] they came from."""
    out = model(case, dtype, implementation).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        use_cache=cache,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    # generate() hands its logits out in float32; casting them back loses nothing.
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).to(DTYPES[dtype])


@torch.no_grad()
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Call ``Qwen3RMSNorm``."""
    module = qwen3().Qwen3RMSNorm(weight.shape[0], eps=eps).to(weight.dtype)
    module.weight.copy_(weight)
    return module(x)  # type: ignore[no-any-return]


def rotary(head_dim: int, theta: float) -> Any:
    """Build ``Qwen3RotaryEmbedding``."""
    config = qwen3().Qwen3Config(
        head_dim=head_dim, hidden_size=2 * head_dim, num_attention_heads=2, num_key_value_heads=1, rope_theta=theta
    )
    return qwen3().Qwen3RotaryEmbedding(config)


@prepared
def rotary_frequencies(head_dim: int, theta: float) -> Tensor:
    """Return ``inv_freq`` [D / 2]."""
    return rotary(head_dim, theta).inv_freq  # type: ignore[no-any-return]


@prepared
def rotary_table(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [T, D]."""
    cos, sin = rotary(head_dim, theta)(torch.zeros(1, dtype=dtype), positions[None])
    return cos[0], sin[0]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` [T, heads, D], which transformers wants as [1, heads, T, D]."""
    heads_first = x.transpose(0, 1)[None]
    turned, _ = qwen3().apply_rotary_pos_emb(heads_first, heads_first, cos[None], sin[None])
    return turned[0].transpose(0, 1)  # type: ignore[no-any-return]


def attention(q: Tensor, k: Tensor, v: Tensor, implementation: str) -> Tensor:
    """Attend causally, the queries being the last positions. ``q`` [Hq, Tq, D], ``k`` [Hkv, Tk, D] -> [Hq, Tq, D]."""
    q_len, kv_len = q.shape[1], k.shape[1]
    module = SimpleNamespace(num_key_value_groups=q.shape[0] // k.shape[0], training=False, is_causal=True)
    if implementation == "sdpa":
        assert q_len in (1, kv_len), "transformers has no maskless call for a chunk"
        sdpa = qwen3().ALL_ATTENTION_FUNCTIONS["sdpa"]
        out, _ = sdpa(module, q[None], k[None], v[None], None, scaling=q.shape[-1] ** -0.5)
    else:
        first = kv_len - q_len
        hidden = torch.tensor([[j > first + i for j in range(kv_len)] for i in range(q_len)])
        mask = torch.zeros(q_len, kv_len, dtype=q.dtype).masked_fill(hidden, torch.finfo(q.dtype).min)
        eager = qwen3().eager_attention_forward
        out, _ = eager(module, q[None], k[None], v[None], mask[None, None], q.shape[-1] ** -0.5)
    return out[0].transpose(0, 1)  # type: ignore[no-any-return]


@torch.no_grad()
def mlp_block(case: ModelCase, dtype: str, layer: int, x: Tensor) -> Tensor:
    """Call one decoder layer's second norm and MLP on ``x`` [T, H]."""
    block = model(case, dtype, "eager").model.layers[layer]
    return block.mlp(block.post_attention_layernorm(x[None]))[0]  # type: ignore[no-any-return]


@torch.no_grad()
def attention_block(case: ModelCase, dtype: str, layer: int, x: Tensor, positions: Tensor) -> Tensor:
    """Call one decoder layer's first norm and attention (eager, causal) on ``x`` [T, H]."""
    peer = model(case, dtype, "eager").model
    block = peer.layers[layer]
    length = x.shape[0]
    cos, sin = peer.rotary_emb(x[None], positions[None])
    hidden = torch.tensor([[j > i for j in range(length)] for i in range(length)])
    mask = torch.zeros(length, length, dtype=x.dtype).masked_fill(hidden, torch.finfo(x.dtype).min)
    out, _ = block.self_attn(block.input_layernorm(x[None]), (cos, sin), mask[None, None])
    return out[0]  # type: ignore[no-any-return]
