from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mini_engine.attention.metadata import BatchInputs, SequenceChunk, pack_batch
from mini_engine.attention.paged import PagedAttention
from mini_engine.attention.pool import KVPool
from mini_engine.config import ModelConfig
from mini_engine.kernels import attention, kv_store, paged_attention, split_attention
from mini_engine.kernels.attention import KernelAttention
from tests.kernels.cases import random, relative_error
from tests.kernels.conftest import DEVICE

CONFIG = ModelConfig(32, 64, 2, 4, 2, 16, 64, 4096, 1e4, 1e-6, True)  # 2 layers, 4 query heads over 2, dim 16
PAGE_SIZE, PAGES = 16, 60
KERNELS = SimpleNamespace(
    store_kv=kv_store.store_kv,
    paged_attention=paged_attention.paged_attention,
    split_attention=split_attention.split_attention,
)
Step = Sequence[tuple[int, int, int]]  # of each sequence: its number, tokens before this step, tokens after it


def pages_of(sequence: int) -> list[int]:
    """Return the twenty pages of sequence 0, 1 or 2, out of order; 7 and 60 have no common factor: none is shared."""
    return [7 * (20 * sequence + i) % PAGES for i in range(20)]


def projections(step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of a step; a token's numbers depend on its sequence and position alone."""
    whole = [
        [random(320, heads, CONFIG.head_dim, seed=10 * s + i) for i, heads in enumerate((4, 2, 2))] for s, *_ in step
    ]
    q, k, v = (torch.cat([x[i][a:b] for x, (_, a, b) in zip(whole, step, strict=True)]) for i in range(3))
    return q, k, v


def pack(step: Step) -> BatchInputs:
    return pack_batch([SequenceChunk([0] * (b - a), a, pages_of(s)) for s, a, b in step], PAGE_SIZE, DEVICE)


def fresh_pool(step: Step = ()) -> KVPool:
    """A pool full of NaN but for what the sequences of ``step`` computed before it."""
    pool = KVPool(CONFIG, PAGES, PAGE_SIZE, torch.float32, DEVICE)
    pool.poison(list(range(PAGES)))
    before = [(s, 0, a) for s, a, _ in step if a]
    if before:
        _, k, v = projections(before)
        for layer in range(CONFIG.num_hidden_layers):
            pool.write(layer, k, v, pack(before).metadata.slot_mapping)
    return pool


def run(step: Step, invariant: bool = False, layer: int = 0) -> Tensor:
    return KernelAttention(fresh_pool(step), pack(step).metadata, KERNELS, 4, invariant)(layer, *projections(step))


MIXED: Step = [(0, 40, 41), (1, 30, 80), (2, 0, 9)]  # decoding, a chunk in the middle of a prompt, a short prompt


@pytest.mark.parametrize("invariant", [False, True])
def test_a_mixed_step_has_the_values_of_the_plain_path(invariant):
    plain = PagedAttention(fresh_pool(MIXED), pack(MIXED).metadata)(1, *projections(MIXED))
    assert relative_error(run(MIXED, invariant, layer=1), plain.double()) <= 4e-6


def test_new_keys_and_values_stay_in_the_pool_of_their_layer():
    pool, metadata, (q, k, v) = fresh_pool(MIXED), pack(MIXED).metadata, projections(MIXED)
    KernelAttention(pool, metadata, KERNELS, 4, False)(1, q, k, v)
    for stored, given in zip(pool.gather(1, metadata.slot_mapping), (k, v), strict=True):
        assert torch.equal(stored, given.transpose(0, 1))
    assert bool(pool.gather(0, metadata.slot_mapping)[0].isnan().all())


def test_invariant_bits_are_those_of_the_sequence_alone():
    """One query as decoding beside others, as decoding alone, and inside a chunk of its prompt. 256 begins a split."""
    chunk = run([(0, 250, 262)], invariant=True)
    assert torch.equal(run([(0, 261, 262)], invariant=True)[0], chunk[-1])
    assert torch.equal(run([(0, 256, 257)], invariant=True)[0], chunk[6])
    beside = run([(1, 0, 3), (0, 252, 262), (2, 60, 61)], invariant=True)
    assert torch.equal(beside[3:13], chunk[-10:])


def test_without_it_the_split_follows_the_batch_and_bits_do_too(monkeypatch):
    """The negative control: were these bits equal, the test above would prove nothing.

    With one processor, since so few keys would be cut as short as possible for many, whatever the batch.
    """
    monkeypatch.setattr(attention, "num_processors", lambda device: 1)
    alone = run([(0, 299, 300)])
    beside = run([(0, 299, 300), (1, 299, 300), (2, 299, 300)])
    assert relative_error(beside[:1], alone.double()) <= 4e-6
    assert not torch.equal(beside[0], alone[0])
