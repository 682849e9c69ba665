import numpy as np
import pytest
import torch
from torch import Tensor

from mini_engine.grammar import masks
from mini_engine.kernels import token_bitmask as op
from tests.kernels.cases import bits, random_bits
from tests.kernels.conftest import DEVICE

DTYPES = [torch.float32, torch.float16, torch.bfloat16]  # nothing is computed, so the interpreter can do bfloat16 too
SIZES = [1, 31, 32, 33, 64, 100, 1000, 2048, 2049]
FUNCTIONS = [op.apply_token_bitmask, op.apply_token_bitmask_reference]


def random_mask(rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Draw words; about a third allows nothing, a third everything, and bits past the vocabulary are random too."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, masks.num_words(vocab_size))
    words = torch.randint(-(2**31), 2**31, shape, generator=generator)
    kind = torch.randint(0, 3, shape, generator=generator)
    words = torch.where(kind == 0, 0, torch.where(kind == 1, -1, words))
    return words.to(torch.int32).to(DEVICE)


def mask_by_hand(logits: Tensor, mask: Tensor, rows: list[int]) -> Tensor:
    """Apply the masks with numpy -> the bits of the logits afterwards."""
    octets = mask.cpu().numpy().astype("<i4").view(np.uint8)
    allowed = np.unpackbits(octets, axis=-1, count=logits.shape[1], bitorder="little").astype(bool)
    after = bits(logits).clone()
    minus_infinity = bits(torch.tensor([-torch.inf], dtype=logits.dtype, device=DEVICE))[0]
    for row, one in zip(rows, allowed, strict=True):
        after[row, torch.from_numpy(~one).to(DEVICE)] = minus_infinity
    return after


@pytest.mark.parametrize("apply", FUNCTIONS)
@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_banned_logits_are_minus_infinity_and_the_others_keep_their_bits(vocab_size, dtype, apply):
    logits = random_bits(3, vocab_size, dtype=dtype)
    mask = random_mask(3, vocab_size)
    wanted = mask_by_hand(logits, mask, [0, 1, 2])
    apply(logits, mask)
    assert torch.equal(bits(logits), wanted)


@pytest.mark.parametrize("apply", FUNCTIONS)
def test_masks_go_to_the_rows_that_are_named(apply):
    logits = random_bits(5, 100, dtype=torch.float32)
    mask = random_mask(3, 100)
    wanted = mask_by_hand(logits, mask, [4, 0, 3])
    apply(logits, mask, torch.tensor([4, 0, 3], device=DEVICE))
    assert torch.equal(bits(logits), wanted)


@pytest.mark.parametrize("apply", FUNCTIONS)
def test_numbers_that_are_no_rows_write_nothing(apply):
    """The logits are a window of other memory, so that a write beside them shows and does not crash."""
    memory = torch.zeros(7, 100, device=DEVICE)
    mask = torch.zeros(4, 4, dtype=torch.int32, device=DEVICE)
    apply(memory[2:5], mask, torch.tensor([-1, 3, 1, 2**40], device=DEVICE))
    assert memory.isinf().any(-1).tolist() == [False, False, False, True, False, False, False]


@pytest.mark.compiled
@pytest.mark.parametrize("vocab_size", [151_936, 151_669])
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_vocabularies_in_many_rows(vocab_size, dtype):
    logits = random_bits(64, vocab_size, dtype=dtype)
    mask = random_mask(64, vocab_size)
    wanted = mask_by_hand(logits, mask, list(range(64)))
    op.apply_token_bitmask(logits, mask)
    assert torch.equal(bits(logits), wanted)
