"""L8: which function computes an operation: its Triton kernel, its torch reference, or one of the reader's own.

The choice is made once, when a model is built, for one device and dtype. What has no kernel there is computed by its
reference, and a warning names it; nothing is tuned or chosen anew while the engine runs, because another block size is
another order of additions and so other bits.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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
from mini_engine.kernels.launch import launch_fault

Function = Callable[..., Any]
Fault = Callable[[torch.device, torch.dtype], str | None]


@dataclass(frozen=True)
class Kernel:
    """One operation: ``launch`` and ``reference`` have the same signature and, to rounding, the same result.

    ``fault`` says why the kernel cannot run on a device in a dtype, ``None`` if it can. ``is_invariant_reference``: the
    reference, too, gives a row the same bits in any batch, so it may be used under ``batch_invariant``.
    """

    launch: Function
    reference: Function
    fault: Fault = launch_fault
    is_invariant_reference: bool = True


BUILT_IN: dict[str, Kernel] = {
    "rms_norm": Kernel(rms_norm.rms_norm, rms_norm.rms_norm_reference),
    "add_rms_norm": Kernel(rms_norm.add_rms_norm, rms_norm.add_rms_norm_reference),
    "apply_rotary": Kernel(rotary.apply_rotary, rotary.apply_rotary_reference),
    "silu_and_mul": Kernel(silu_and_mul.silu_and_mul, silu_and_mul.silu_and_mul_reference),
    "store_kv": Kernel(kv_store.store_kv, kv_store.store_kv_reference),
    "paged_attention": Kernel(
        paged_attention.paged_attention, paged_attention.paged_attention_reference, is_invariant_reference=False
    ),
    "split_attention": Kernel(
        split_attention.split_attention, split_attention.split_attention_reference, is_invariant_reference=False
    ),
    "invariant_matmul": Kernel(matmul.invariant_matmul, matmul.invariant_matmul_reference),
    "apply_token_bitmask": Kernel(token_bitmask.apply_token_bitmask, token_bitmask.apply_token_bitmask_reference),
    "apply_penalties": Kernel(penalties.apply_penalties, penalties.apply_penalties_reference),
    "apply_top_k": Kernel(top_k.apply_top_k, top_k.apply_top_k_reference),
    "apply_top_p": Kernel(top_p.apply_top_p, top_p.apply_top_p_reference),
    "apply_top_k_top_p": Kernel(top_k_top_p.apply_top_k_top_p, top_k_top_p.apply_top_k_top_p_reference),
    "apply_min_p": Kernel(min_p.apply_min_p, min_p.apply_min_p_reference),
    "sample_top_k_top_p": Kernel(sample.sample_top_k_top_p, sample.sample_top_k_top_p_reference),
    "draw_seeded": Kernel(gumbel.draw_seeded, gumbel.draw_seeded_reference),
    "argmax": Kernel(argmax.argmax, argmax.argmax_reference),
}
REGISTERED: dict[str, Kernel] = {}


def register_kernel(name: str, kernel: Kernel) -> None:
    """Let ``kernel`` compute the operation ``name`` in models that are built from now on; the last one counts. Mutates.

    Raises ``ValueError`` for an operation that no model asks for.
    """
    if name not in BUILT_IN:
        raise ValueError(f"there is no operation {name!r}; the engine asks for {', '.join(BUILT_IN)}")
    REGISTERED[name] = kernel


class KernelSet:
    """The chosen function of every operation, as an attribute of its name: ``kernels.rms_norm(x, weight, eps)``."""

    def __init__(self, functions: dict[str, Function]) -> None:
        """Hold ``functions``, one for each operation."""
        self.functions = functions

    def __getattr__(self, name: str) -> Function:
        """Return the function of the operation ``name``."""
        try:
            return self.functions[name]
        except KeyError:
            raise AttributeError(f"there is no operation {name!r}") from None


def choose_kernels(device: torch.device, dtype: torch.dtype, batch_invariant: bool = False) -> KernelSet:
    """Choose kernel or reference for every operation; warn once for each reason why some have no kernel here.

    A warning names its operations, separated by ", ", and the fault. A registered kernel that cannot run is replaced by
    its own reference. Raises ``ValueError``, naming operation and fault, if ``batch_invariant`` would be broken by a
    reference that is used.
    """
    chosen: dict[str, Function] = {}
    left_out: dict[str, list[str]] = defaultdict(list)
    for name, kernel in {**BUILT_IN, **REGISTERED}.items():
        fault = kernel.fault(device, dtype)
        chosen[name] = kernel.launch if fault is None else kernel.reference
        if fault is None:
            continue
        if batch_invariant and not kernel.is_invariant_reference:
            raise ValueError(
                f"batch_invariant=True with compute='triton' needs the kernel of {name}, which cannot run: {fault}; "
                "or choose compute='reference', which is invariant on CPUs"
            )
        left_out[fault].append(name)
    for fault, names in left_out.items():  # the same text every time, so Python shows it once
        warnings.warn(f"computed by torch and not by a kernel: {', '.join(names)}: {fault}", stacklevel=3)
    return KernelSet(chosen)
