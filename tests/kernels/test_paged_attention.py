import pytest
import torch

from mini_engine.kernels import paged_attention as op
from tests.kernels.attention_cases import Batch, make_batch
from tests.kernels.cases import DTYPES, relative_error

RAGGED = [(1, 1), (1, 70), (5, 5), (0, 0), (40, 130), (3, 64), (0, 9)]  # queries, keys
SHAPES = [(16, (4, 2), 32), (1, (3, 1), 20), (64, (8, 1), 64), (16, (2, 2), 128)]  # page size, (Hq, Hkv), D


def attend(batch: Batch, sequences: list[int] | None = None) -> torch.Tensor:
    group = batch.q.shape[1] // batch.keys.shape[0]
    blocks = batch.blocks(op.paged_queries(group, batch.q.shape[2], batch.q.dtype), sequences)
    out = batch.poisoned()
    op.paged_attention(batch.q, batch.keys, batch.values, batch.metadata, blocks, out)
    return out


@pytest.mark.parametrize(("page_size", "heads", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_is_that_of_float64(page_size, heads, dim, dtype):
    batch = make_batch(RAGGED, page_size, heads, dim, dtype)
    assert relative_error(attend(batch), batch.exact) <= (2e-6 if dtype == torch.float32 else 1e-2)


def test_the_reference_has_the_same_signature_and_values():
    batch = make_batch(RAGGED, 16, (4, 2), 32)
    out = batch.poisoned()
    op.paged_attention_reference(batch.q, batch.keys, batch.values, batch.metadata, batch.blocks(7), out)
    assert relative_error(out, batch.exact) <= 2e-6
