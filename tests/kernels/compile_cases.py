"""What ``compile_for_gpu`` launches: every operation once per dtype, in the shapes of Qwen3-0.6B."""

from collections.abc import Callable

import torch

from mini_engine.kernels import rms_norm

T, H, D = 64, 1024, 128
Case = Callable[[torch.dtype], object]

CASES: dict[str, Case] = {
    "rms_norm": lambda dtype: rms_norm.rms_norm(torch.ones(T, H, dtype=dtype), torch.ones(H, dtype=dtype), 1e-6),
    "qk_norm": lambda dtype: rms_norm.rms_norm(torch.ones(T, 16, D, dtype=dtype), torch.ones(D, dtype=dtype), 1e-6),
    "add_rms_norm": lambda dtype: rms_norm.add_rms_norm(
        torch.ones(T, H, dtype=dtype), torch.ones(T, H, dtype=dtype), torch.ones(H, dtype=dtype), 1e-6
    ),
}
