"""A launcher refuses what its kernel would read at wrong addresses, before anything is written."""

from typing import Any

import pytest
import torch

from mini_engine.kernels import (
    argmax,
    gumbel,
    kv_store,
    matmul,
    paged_attention,
    penalties,
    rms_norm,
    rotary,
    sample,
    silu_and_mul,
    split_attention,
    threshold,
    token_bitmask,
)
from tests.kernels.attention_cases import make_batch
from tests.kernels.cases import random
from tests.kernels.conftest import DEVICE
from tests.kernels.filter_cases import floats, ints

X = random(3, 20)
HALF = random(3, 20).half()
WEIGHT = random(8, 20)
HEADS, POOL, SLOTS = random(3, 2, 20), random(2, 9, 20), ints(1, 2, 3)
MASK = torch.zeros(3, 1, dtype=torch.int32, device=DEVICE)
ENTRIES = [ints(0, 1), ints(4, 5), *(floats(1.0, 1.0, dtype=torch.float32) for _ in range(4))]
TURNED = [random(3, 2, 32), random(3, 1, 32), random(3, 32), random(3, 32)]
OFF = [ints(0, 0, 0), floats(1.0, 1.0, 1.0), floats(0.0, 0.0, 0.0, dtype=torch.float32)]


def attention(splits: int | None = None, **changes: Any) -> None:
    """Attend with one query; ``changes`` replace arguments."""
    batch = make_batch([(1, 20)], 16, (4, 2), 16)
    arguments = {"q": batch.q, "keys": batch.keys, "values": batch.values, "metadata": batch.metadata}
    arguments |= {"blocks": batch.blocks(4), "out": batch.poisoned(), **changes}
    if splits is None:
        paged_attention.paged_attention(**arguments)
    else:
        split_attention.split_attention(**arguments, split_size=splits)


REFUSED = {
    "argmax of nothing": (lambda: argmax.argmax(X[:, :0]), "0 columns"),
    "filter, shape": (lambda: threshold.check_rows(X, k=SLOTS[:2]), "k has the shape"),
    "filter, dtype": (lambda: threshold.check_rows(X, k=SLOTS.float()), "k is torch.float32"),
    "filter of halves": (lambda: threshold.check_rows(HALF, k=SLOTS), "float"),
    "sample": (lambda: sample.sample_top_k_top_p(X, *OFF, OFF[2]), r"uniform is torch\.float32"),
    "seeds": (lambda: gumbel.draw_seeded(X, SLOTS.float(), SLOTS), r"seeds is torch\.float32"),
    "store, tokens": (lambda: kv_store.store_kv(HEADS, HEADS[:2], POOL, POOL, SLOTS), r"v has the shape \[2, 2, 20\]"),
    "store, pools": (lambda: kv_store.store_kv(HEADS, HEADS, POOL, POOL[:, 1:], SLOTS), "values has the shape"),
    "store, slots": (lambda: kv_store.store_kv(HEADS, HEADS, POOL, POOL, SLOTS.int()), "slot_mapping is torch.int32"),
    "product, shape": (lambda: matmul.invariant_matmul(X, random(8, 21)), r"weight has the shape \[8, 21\]"),
    "product, dtype": (lambda: matmul.invariant_matmul(X, WEIGHT.half()), "weight torch.float16"),
    "norm": (lambda: rms_norm.rms_norm(X, random(21), 1e-6), r"weight has the shape \[21\]"),
    "activation": (lambda: silu_and_mul.silu_and_mul(random(3, 7)), "has 7 columns"),
    "rotation, table": (lambda: rotary.apply_rotary(*TURNED[:3], random(3, 16)), r"sin has the shape \[3, 16\]"),
    "mask, words": (lambda: token_bitmask.apply_token_bitmask(X, MASK[:2]), r"mask has the shape \[2, 1\]"),
    "mask, rows": (lambda: token_bitmask.apply_token_bitmask(X, MASK, SLOTS[:1]), r"rows has the shape \[1\]"),
    "mask of integers": (lambda: token_bitmask.apply_token_bitmask(X.int(), MASK), "logits torch.int32"),
    "penalties, rows": (lambda: penalties.apply_penalties(X, ENTRIES[2], *ENTRIES[1:]), "rows is torch.float32"),
    "attention, heads": (lambda: attention(q=random(1, 3, 16), out=random(1, 3, 16)), "3 query heads do not share 2"),
    "attention, out": (lambda: attention(out=random(1, 2, 16)), "out has the shape"),
    "attention, dtype": (lambda: attention(keys=random(2, 81, 16).half()), "give all three the pool's dtype"),
    "attention, blocks": (
        lambda: attention(blocks=make_batch([(1, 20)], 16, (4, 2), 16).blocks(1000)),
        "blocks of 1000 queries do not fit",
    ),
    "fewer keys than queries": (
        lambda: make_batch([(1, 5), (9, 5)], 16, (4, 2), 16).blocks(4),
        "has 9 queries and 5 keys",
    ),
    "splits": (lambda: attention(33), "split_size is 33; it must be a multiple of 32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_kernel_cannot_read_is_refused(name: str) -> None:
    launch, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        launch()
    assert not any(tensor.isinf().any() for tensor in (X, POOL))
