"""L8: new keys and values into their slots of the pool: ``KVPool.write`` for both at once.

A copy, so the bits must arrive unchanged. The slots are read on the device: nothing waits for the CPU to know them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.launch import block_shape, check_last_contiguous, check_shape


@triton.jit
def store_kv_kernel(
    k,
    v,
    keys,
    values,
    slot_mapping,
    heads,
    width,
    slots,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    keys_head_stride,
    keys_slot_stride,
    values_head_stride,
    values_slot_stride,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy ``HEADS`` heads of one token to its slot. ``k_stride`` and ``v_stride`` lead from one token to the next."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)  # int64
    # A slot outside the pool is padding or a fault; either way its address is not memory of the pool.
    if (slot >= 0) & (slot < slots):
        head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]  # [HEADS, 1]
        column = tl.arange(0, COLUMNS)[None, :]  # [1, COLUMNS]
        mask = (head < heads) & (column < width)
        key = tl.load(k + token * k_stride + head * k_head_stride + column, mask=mask)  # [HEADS, COLUMNS]
        value = tl.load(v + token * v_stride + head * v_head_stride + column, mask=mask)
        tl.store(keys + head * keys_head_stride + slot * keys_slot_stride + column, key, mask=mask)
        tl.store(values + head * values_head_stride + slot * values_slot_stride + column, value, mask=mask)


def store_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """Copy ``k`` and ``v`` [T, Hkv, D] to ``keys`` and ``values`` [Hkv, slots, D] at ``slot_mapping`` [T] int64.

    Mutates ``keys`` and ``values``; every other slot stays as it is. A negative slot is padding, as in vLLM: its token
    is stored nowhere. A token whose slot lies beyond the pool is not stored either: a GPU would write to that address
    and corrupt another tensor. There is no error for it, because an error would have to wait for the device. So slots
    must come from the allocator. Two tokens must not share a slot: which of them stays is not defined.

    Tokens, heads and slots may lie any distance apart. Raises ``ValueError`` for shapes that do not fit together, for
    dtypes that differ (a copy does not convert) and for gaps between the numbers of one head.
    """
    check_shape("k", k, None, None, None)
    tokens, heads, width = k.shape
    check_shape("v", v, tokens, heads, width)
    check_shape("keys", keys, heads, None, width)
    check_shape("values", values, heads, keys.shape[1], width)
    check_shape("slot_mapping", slot_mapping, tokens)
    check_last_contiguous(k=k, v=v, keys=keys, values=values, slot_mapping=slot_mapping)
    check_dtypes(k, v, keys, values, slot_mapping)
    if k.numel():
        block_heads, columns = block_shape(width)
        block_heads = min(block_heads, triton.next_power_of_2(heads))
        store_kv_kernel[(tokens, triton.cdiv(heads, block_heads))](
            k,
            v,
            keys,
            values,
            slot_mapping,
            heads,
            width,
            keys.shape[1],
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            HEADS=block_heads,
            COLUMNS=columns,
        )


def check_dtypes(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """Raise ``ValueError`` unless the first four have one dtype and the slots are int64."""
    for name, tensor in (("k", k), ("v", v), ("values", values)):
        if tensor.dtype != keys.dtype:
            raise ValueError(f"{name} is {tensor.dtype} and the pool {keys.dtype}; a copy does not convert, cast first")
    if slot_mapping.dtype != torch.int64:
        raise ValueError(f"slot_mapping is {slot_mapping.dtype}; it must be int64, a pool can have 2**31 numbers")


def store_kv_reference(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """Do what ``store_kv`` does, in torch. Mutates ``keys`` and ``values``."""
    stored = (slot_mapping >= 0) & (slot_mapping < keys.shape[1])  # [T]
    keys[:, slot_mapping[stored]] = k[stored].transpose(0, 1)
    values[:, slot_mapping[stored]] = v[stored].transpose(0, 1)
