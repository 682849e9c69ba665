"""The checks of L8.D: keys and values into their slots.

Owns: tensors whose tokens, heads and slots lie apart in any way, and numbers that are no slots.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smoke.checks.l8.guard import ON_GPU, bits, guarded
from smoke.checks.l8.spec_kernels import COPIED, draw_bits
from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise

REGISTRY = Registry()


@dataclass(frozen=True)
class Storing:
    """Keys and values [T, Hkv, D] for ``slots`` of a pool of ``size`` slots; ``apart``: no two strides alike.

    ``is_far``: a kernel finds the tokens, and the heads of the pool, 2**30 numbers apart.
    """

    k: Tensor
    v: Tensor
    pool: Tensor  # [2, Hkv, slots, D]
    slots: list[int]
    apart: bool = False
    is_far: bool = False


Storings = Callable[[int], dict[str, Storing]]


def make_storing(tokens: int, heads: int, dim: int, slots: list[int], size: int, dtype: str, seed: int) -> Storing:
    """Draw bits of every kind."""
    k, v = (draw_bits(tokens, heads, dim, seed=seed + part, dtype=dtype) for part in (1, 2))
    return Storing(k, v, draw_bits(2, heads, size, dim, seed=seed + 3, dtype=dtype), slots)


def stores(seed: int) -> dict[str, Storing]:
    """Return copies of every shape and dtype; 9 heads of 1000 numbers are more than one program takes."""
    shapes = ((1, 1, 32), (5, 2, 20), (3, 8, 64), (4, 3, 128), (2, 9, 1000), (0, 2, 20))
    slots = [7, 0, 9, 4, 2]
    return {
        f"{dtype} [{tokens}, {heads}, {dim}]": make_storing(tokens, heads, dim, slots[:tokens], 11, dtype, seed)
        for tokens, heads, dim in shapes
        for dtype in COPIED
    }


def stores_outside(seed: int) -> dict[str, Storing]:
    """Return numbers that are not slots: before the first, after the last."""
    slots = [-1, -3, 9, 10, 12]
    return {"slots of which only 9 is one": make_storing(len(slots), 2, 20, slots, 10, "float32", seed)}


def stores_far(seed: int) -> dict[str, Storing]:
    """Return slots whose lower halves are those of others, and offsets beyond 2**31."""
    slots = [2**32 + 4, 3 - 2**32, 2**40, 6]
    near_by = make_storing(5, 5, 20, [7, 0, 8, 4, 2], 9, "float32", seed)
    return {
        "slots of which only 6 is one": make_storing(len(slots), 2, 20, slots, 10, "float32", seed),
        "tokens, and heads of the pool, 2**30 numbers apart": replace(near_by, is_far=True),
    }


def stores_apart(seed: int) -> dict[str, Storing]:
    """Return tensors whose tokens, heads and slots lie apart, each in its own way."""
    cases: dict[str, Storing] = {}
    for tokens, heads, dim in ((4, 3, 20), (3, 9, 1000)):
        one = make_storing(tokens, heads, dim, [8, 1, 5, 0][:tokens], 9, "float32", seed)
        cases[f"[{tokens}, {heads}, {dim}]"] = Storing(one.k, one.v, one.pool, one.slots, True)
    return cases


def store_probe(cases: Storings) -> Callable[[int], Values]:
    """Return a probe that stores, every tensor in separate memory."""

    def probe(seed: int) -> Values:
        from mini_engine.kernels.kv_store import store_kv

        values: Values = {}
        for name, case in cases(seed).items():
            gaps = (3, 8, 1, 6) if case.apart else (0, 0, 0, 0)
            tensors = {"k": case.k, "v": case.v, "the keys": case.pool[0], "the values": case.pool[1]}
            with guarded() as guard:
                given = [guard.put(part, tensors[part], gap) for part, gap in zip(tensors, gaps, strict=True)]
                if case.is_far:
                    for part, tensor in zip(tensors, given, strict=True):
                        guard.stretch(part, tensor)
                slots = guard.put("the slots", torch.tensor(case.slots, dtype=torch.int64), margin=1)
                k, v, keys, values_of_pool = given
                store_kv(k, v, keys, values_of_pool, slots)
            values[name] = {
                "bits of the keys": bits(keys),
                "bits of the values": bits(values_of_pool),
                ON_GPU: guard.faults(),
            }
        return values

    return probe


def store_spec(cases: Storings) -> Callable[[int], Values]:
    """Return a spec that copies token by token."""

    def spec(seed: int) -> Values:
        values: Values = {}
        for name, case in cases(seed).items():
            pool = bits(case.pool).clone()
            for token, slot in enumerate(case.slots):
                if 0 <= slot < pool.shape[2]:
                    pool[0, :, slot] = bits(case.k)[token]
                    pool[1, :, slot] = bits(case.v)[token]
            values[name] = {"bits of the keys": pool[0], "bits of the values": pool[1], ON_GPU: []}
        return values

    return spec


STORE_CHECKS: dict[str, tuple[str, Storings]] = {
    "bits": ("Keys and values arrive in their slots with all their bits, and every other slot stays as it is.", stores),
    "outside": ("A token whose slot is negative or beyond the pool is stored nowhere.", stores_outside),
    "int64": (
        "Slots and offsets have 64 bits: 2**32 + 4 is beyond the pool, and heads may lie 2**30 apart.",
        stores_far,
    ),
    "strides": ("Tokens, heads and slots may lie any distance apart, each tensor's in its own way.", stores_apart),
}
for _name, (_proves, _store_cases) in STORE_CHECKS.items():
    REGISTRY.add(f"L8.D.{_name}", _proves, store_probe(_store_cases), bitwise(store_spec(_store_cases)))
