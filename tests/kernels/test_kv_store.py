import pytest
import torch
from torch import Tensor

from mini_engine.kernels import kv_store as op
from tests.kernels.cases import (
    bits,
    random_bits,
)
from tests.kernels.conftest import DEVICE

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
]  # a copy computes nothing, so the interpreter can do bfloat16 too
FUNCTIONS = [op.store_kv, op.store_kv_reference]


def slots_of(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


def store_by_hand(x: Tensor, pool: Tensor, slots: list[int]) -> Tensor:
    """Copy token by token -> the bits of the pool afterwards."""
    after = bits(pool).clone()
    for token, slot in enumerate(slots):
        after[:, slot] = bits(x)[token]
    return after


@pytest.mark.parametrize("store", FUNCTIONS)
@pytest.mark.parametrize("shape", [(1, 1, 32), (5, 2, 20), (3, 8, 64), (4, 3, 128), (2, 3, 2000)])  # tokens, Hkv, D
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_arrive_in_their_slots_and_nowhere_else(shape, dtype, store):
    tokens, heads, width = shape
    k, v = random_bits(*shape, dtype=dtype, seed=1), random_bits(*shape, dtype=dtype, seed=2)
    keys, values = random_bits(2, heads, 11, width, dtype=dtype, seed=3)
    slots = [7, 0, 9, 4, 2][:tokens]
    wanted = store_by_hand(k, keys, slots), store_by_hand(v, values, slots)
    store(k, v, keys, values, slots_of(*slots))
    assert torch.equal(bits(keys), wanted[0])
    assert torch.equal(bits(values), wanted[1])


@pytest.mark.parametrize("store", FUNCTIONS)
def test_slots_outside_the_pool_write_nothing(store):
    """The pool is a window of other memory, so that a write beside it shows and does not crash."""
    memory = random_bits(2, 2, 20, 20, dtype=torch.float32, seed=3)
    keys, values = memory[:, :, 5:15]
    k, v = (random_bits(6, 2, 20, dtype=torch.float32, seed=seed) for seed in (1, 2))
    wanted = bits(memory).clone()
    wanted[0, :, 5 + 9] = bits(k)[2]
    wanted[1, :, 5 + 9] = bits(v)[2]
    store(k, v, keys, values, slots_of(-1, -3, 9, 10, 12, 2**40))
    assert torch.equal(bits(memory), wanted)


@pytest.mark.compiled
def test_slots_beyond_two_to_the_31_numbers_are_reached():
    keys, values = (torch.zeros(1, 2**24 + 3, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    k, v = (random_bits(1, 1, 128, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    op.store_kv(k, v, keys, values, slots_of(2**24 + 2))
    assert torch.equal(bits(keys[0, -1]), bits(k[0, 0]))
    assert torch.equal(bits(values[0, -1]), bits(v[0, 0]))
    assert not bool(keys[0, :-1].any())
