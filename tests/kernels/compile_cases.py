"""What ``compile_for_gpu`` launches: every operation once per dtype, in the shapes of Qwen3-0.6B."""

from collections.abc import Callable

import torch

from mini_engine.kernels import kv_store, matmul, rms_norm, rotary, silu_and_mul, token_bitmask

T, H, D, V = 64, 1024, 128, 151936
Case = Callable[[torch.dtype], object]


def rotary_of_stacked_heads(dtype: torch.dtype) -> object:
    """Turn q and k where the projection of q, k and v left them."""
    heads = torch.empty(T, 32, D, dtype=dtype)
    return rotary.apply_rotary(heads[:, :16], heads[:, 16:24], *torch.empty(2, T, D, dtype=dtype))


def store_of_stacked_heads(dtype: torch.dtype) -> object:
    """Store k and v from where the projection of q, k and v left them."""
    heads, slots = torch.empty(T, 32, D, dtype=dtype), torch.empty(T, dtype=torch.int64)
    return kv_store.store_kv(heads[:, 16:24], heads[:, 24:], *torch.empty(2, 8, 1025, D, dtype=dtype), slots)


def product(dtype: torch.dtype, columns: int, depth: int) -> object:
    """Multiply ``T`` rows by a weight [columns, depth]."""
    return matmul.invariant_matmul(torch.empty(T, depth, dtype=dtype), torch.empty(columns, depth, dtype=dtype))


def bitmask(dtype: torch.dtype, rows: torch.Tensor | None) -> object:
    """Ban tokens in ``T`` rows of logits."""
    mask = torch.empty(T, V // 32, dtype=torch.int32)
    return token_bitmask.apply_token_bitmask(torch.empty(T, V, dtype=dtype), mask, rows)


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
}
