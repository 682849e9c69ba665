import pytest
import torch

from mini_engine.kernels import split_attention as op
from mini_engine.kernels.query_blocks import QueryBlock, cut_queries
from tests.kernels.attention_cases import Batch, make_batch
from tests.kernels.cases import DTYPES, relative_error

DECODE = [(1, 1), (1, 70), (0, 0), (1, 64), (1, 150)]  # queries, keys
RAGGED = [(1, 130), (9, 20), (3, 66)]
SHAPES = [(16, (4, 2), 32), (1, (3, 1), 20), (64, (8, 1), 64), (16, (2, 2), 128)]  # page size, (Hq, Hkv), D
SPLIT = 64


def attend(batch: Batch, split_size: int = SPLIT, sequences: list[int] | None = None) -> torch.Tensor:
    group = batch.q.shape[1] // batch.keys.shape[0]
    blocks = batch.blocks(op.split_queries(group, batch.q.shape[2], batch.q.dtype), sequences)
    out = batch.poisoned()
    op.split_attention(batch.q, batch.keys, batch.values, batch.metadata, blocks, out, split_size)
    return out


@pytest.mark.parametrize(("page_size", "heads", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_decode_row_is_that_of_float64(page_size, heads, dim, dtype):
    batch = make_batch(DECODE, page_size, heads, dim, dtype)
    assert relative_error(attend(batch), batch.exact) <= (2e-6 if dtype == torch.float32 else 1e-2)


def test_more_splits_than_are_merged_at_once():
    """Thirty splits, 16 at once. In some head the largest log-sum-exp is in the second half: the first must be kept."""
    batch = make_batch([(1, 1900), (1, 40)], 16, (4, 1), 16)
    assert relative_error(attend(batch), batch.exact) <= 2e-6


def test_the_reference_has_the_same_signature_and_values():
    batch = make_batch(RAGGED, 16, (4, 2), 32)
    out = batch.poisoned()
    op.split_attention_reference(batch.q, batch.keys, batch.values, batch.metadata, batch.blocks(7), out, SPLIT)
    assert relative_error(out, batch.exact) <= 2e-6


def test_a_row_has_the_same_bits_in_a_batch_and_on_other_pages():
    alone = make_batch([(5, 150)], 16, (4, 2), 32)
    crowd = make_batch([(3, 40), (5, 150), (1, 300)], 64, (4, 2), 32)
    crowd.q[3:8] = alone.q
    assert torch.equal(attend(crowd)[3:8], attend(alone))


def test_pieces_that_fit_the_scratch_change_no_bit(monkeypatch):
    batch = make_batch([(20, 150), (3, 10)], 16, (2, 1), 20)
    whole = attend(batch)
    launches = []
    attend_piece = op.attend_piece
    monkeypatch.setattr(op, "attend_piece", lambda *given: (launches.append(given[4]), attend_piece(*given)))
    monkeypatch.setattr(op, "SCRATCH_BYTES", 2 * 8 * 2 * 3 * 21 * 4)  # two blocks of 8 queries, 2 heads, 3 splits
    assert torch.equal(attend(batch), whole)
    assert [len(piece.blocks) for piece in launches] == [2, 2]


def test_the_scratch_of_a_long_prompt_is_bounded():
    blocks = cut_queries([QueryBlock(0, 0, 32768, 32768)], 8, "cpu")
    per_split = 4 * 16 * 129
    pieces = op.cut_into_pieces(blocks, op.INVARIANT_SPLIT, per_split)
    assert [block for piece in pieces for block in piece.blocks] == blocks.blocks
    for piece in pieces:
        splits = -(-max(block.visible for block in piece.blocks) // op.INVARIANT_SPLIT)
        assert len(piece.blocks) * 8 * splits * per_split <= op.SCRATCH_BYTES
        assert piece.table.tolist() == [list(block) for block in piece.blocks]
