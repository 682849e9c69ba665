"""What ``compile_for_gpu`` launches: every operation once per dtype, in the shapes of Qwen3-0.6B."""

from collections.abc import Callable

import torch

from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.kernels import (
    argmax,
    gumbel,
    kv_store,
    matmul,
    min_p,
    paged_attention,
    penalties,
    rms_norm,
    rotary,
    sample,
    silu_and_mul,
    split_attention,
    token_bitmask,
    top_k,
    top_k_top_p,
    top_p,
)
from mini_engine.kernels.query_blocks import cut_queries, whole_sequences

T, H, D, V = 64, 1024, 128, 151936
Case = Callable[[torch.dtype], object]


def rotary_of_stacked_heads(dtype: torch.dtype) -> object:
    """Turn q and k where the projection of q, k and v left them."""
    heads = torch.empty(T, 32, D, dtype=dtype)
    return rotary.apply_rotary(heads[:, :16], heads[:, 16:24], *torch.empty(2, T, D, dtype=dtype))


def store_of_stacked_heads(dtype: torch.dtype) -> object:
    """Store k and v from where the projection of q, k and v left them."""
    heads = torch.empty(T, 32, D, dtype=dtype)
    slots = torch.empty(T, dtype=torch.int64)
    return kv_store.store_kv(heads[:, 16:24], heads[:, 24:], *torch.empty(2, 8, 1025, D, dtype=dtype), slots)


def product(dtype: torch.dtype, columns: int, depth: int) -> object:
    """Multiply ``T`` rows by a weight [columns, depth]."""
    return matmul.invariant_matmul(torch.empty(T, depth, dtype=dtype), torch.empty(columns, depth, dtype=dtype))


def bitmask(dtype: torch.dtype, rows: torch.Tensor | None) -> object:
    """Ban tokens in ``T`` rows of logits."""
    mask = torch.empty(T, V // 32, dtype=torch.int32)
    return token_bitmask.apply_token_bitmask(torch.empty(T, V, dtype=dtype), mask, rows)


def attention(dtype: torch.dtype, heads: int, head_dim: int, is_split: bool) -> object:
    """Attend with a chunk of a prompt and with one decode row, over 8 key-value heads."""
    q = torch.empty(T + 1, heads, head_dim, dtype=dtype)
    pool = torch.empty(8, 1025, head_dim, dtype=dtype)
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, T, T + 1], dtype=torch.int32),
        seq_lens_kv=torch.tensor([1000, 500], dtype=torch.int32),
        block_table=torch.empty(2, 64, dtype=torch.int32),
        slot_mapping=torch.empty(T + 1, dtype=torch.int64),
        page_size=16,
    )
    op = split_attention.split_queries if is_split else paged_attention.paged_queries
    blocks = cut_queries(whole_sequences(metadata), op(heads // 8, head_dim, dtype), "cpu")
    if is_split:
        return split_attention.split_attention(q, pool, pool, metadata, blocks, q, split_attention.INVARIANT_SPLIT)
    return paged_attention.paged_attention(q, pool, pool, metadata, blocks, q)


ROWS = torch.empty(T, V)  # the sampler's: float32, whatever the model's dtype
STRENGTHS = torch.empty(T)
IDS = torch.empty(T, dtype=torch.int64)
SHARES = torch.empty(T, dtype=torch.float64)

CASES: dict[str, Case] = {
    "rms_norm": lambda dtype: rms_norm.rms_norm(torch.ones(T, H, dtype=dtype), torch.ones(H, dtype=dtype), 1e-6),
    "qk_norm": lambda dtype: rms_norm.rms_norm(torch.ones(T, 16, D, dtype=dtype), torch.ones(D, dtype=dtype), 1e-6),
    "add_rms_norm": lambda dtype: rms_norm.add_rms_norm(
        torch.ones(T, H, dtype=dtype), torch.ones(T, H, dtype=dtype), torch.ones(H, dtype=dtype), 1e-6
    ),
    "rotary": rotary_of_stacked_heads,
    "silu_and_mul": lambda dtype: silu_and_mul.silu_and_mul(torch.empty(T, 2 * 3 * H, dtype=dtype)),
    "kv_store": store_of_stacked_heads,
    "matmul_head": lambda dtype: product(dtype, V, H),
    "matmul_gate_up": lambda dtype: product(dtype, 6 * H, H),
    "matmul_down": lambda dtype: product(dtype, H, 3 * H),
    "token_bitmask": lambda dtype: bitmask(dtype, None),
    "token_bitmask_rows": lambda dtype: bitmask(dtype, torch.arange(T)),
    "paged_attention": lambda dtype: attention(dtype, heads=16, head_dim=D, is_split=False),
    "paged_attention_4b": lambda dtype: attention(dtype, heads=32, head_dim=D, is_split=False),
    "paged_attention_64": lambda dtype: attention(dtype, heads=24, head_dim=64, is_split=False),
    "split_attention": lambda dtype: attention(dtype, heads=16, head_dim=D, is_split=True),
    "split_attention_4b": lambda dtype: attention(dtype, heads=32, head_dim=D, is_split=True),
    "split_attention_64": lambda dtype: attention(dtype, heads=24, head_dim=64, is_split=True),
    "argmax": lambda dtype: argmax.argmax(ROWS.to(dtype)),
    "top_k": lambda dtype: top_k.apply_top_k(ROWS, IDS),
    "top_p": lambda dtype: top_p.apply_top_p(ROWS, SHARES),
    "min_p": lambda dtype: min_p.apply_min_p(ROWS, STRENGTHS),
    "top_k_top_p": lambda dtype: top_k_top_p.apply_top_k_top_p(ROWS, IDS, SHARES),
    "top_k_top_p_joint": lambda dtype: top_k_top_p.apply_top_k_top_p(ROWS, IDS, SHARES, joint=True),
    "sample": lambda dtype: sample.sample_top_k_top_p(ROWS, IDS, SHARES, STRENGTHS, SHARES),
    "sample_joint": lambda dtype: sample.sample_top_k_top_p(ROWS, IDS, SHARES, STRENGTHS, SHARES, joint=True),
    "draw_seeded": lambda dtype: gumbel.draw_seeded(ROWS, IDS, IDS),
    "hash_tokens": lambda dtype: gumbel.hash_tokens(IDS, IDS, IDS),
    "penalties": lambda dtype: penalties.apply_penalties(ROWS, IDS, IDS, *[STRENGTHS] * 4),
}
