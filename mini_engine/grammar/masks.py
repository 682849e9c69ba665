"""L7: the two forms of a vocabulary mask, from one to the other, and onto the logits.

    boolean  [N, V]             True is BANNED     (SGLang's outlines backend)
    bitmask  [N, ceil(V / 32)]  bit 1 is ALLOWED   int32, token t is bit t % 32 of word t // 32, lowest bit first

The polarities are opposite. A bitmask takes an eighth of the memory, 32 times less than a float bias: 19 KB a row at
V = 151,936. Its words are signed: bit 31 is the sign, so a word that allows token 31 is negative.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

BITS = 32


def num_words(vocab_size: int) -> int:
    """Return how many 32-bit words hold one bit per token."""
    return -(-vocab_size // BITS)


def allocate_bitmask(batch_size: int, vocab_size: int, device: str = "cpu") -> Tensor:
    """Return a bitmask that allows everything: int32 [N, ceil(V / 32)]; minus one is all ones."""
    return torch.full((batch_size, num_words(vocab_size)), -1, dtype=torch.int32, device=device)


def pack_allowed(allowed: Tensor) -> Tensor:
    """Pack booleans, True is allowed, into a bitmask; bits past the last token are 0. ``[..., V]`` -> ``[..., W]``."""
    padding = num_words(allowed.shape[-1]) * BITS - allowed.shape[-1]
    bits: Tensor = torch.nn.functional.pad(allowed.to(torch.int32), (0, padding)).unflatten(-1, (-1, BITS))
    # 1 << 31 is the most negative int32. A sum of different powers of two never carries, so it is exact.
    return (bits << torch.arange(BITS, dtype=torch.int32, device=bits.device)).sum(-1, dtype=torch.int32)


def unpack_allowed(mask: Tensor, vocab_size: int) -> Tensor:
    """Return the booleans, True is allowed, of the first ``vocab_size`` bits. ``[..., W]`` -> ``[..., V]``."""
    shifts = torch.arange(BITS, dtype=torch.int32, device=mask.device)
    # The shift drags copies of the sign in from the left; & 1 looks at one bit and drops them.
    bits: Tensor = (mask[..., None] >> shifts) & 1
    return bits.bool().flatten(-2)[..., :vocab_size]


def set_allowed(mask: Tensor, row: int, token_ids: Iterable[int], is_allowed: bool) -> None:
    """Allow or ban tokens in one row of a mask of either form, on the CPU. Mutates ``mask``."""
    if mask.dtype == torch.bool:
        mask[row, list(token_ids)] = not is_allowed
        return
    words = mask[row].numpy().view(np.uint32)  # a view: without a sign every bit is alike
    for token in token_ids:
        bit = np.uint32(1 << token % BITS)
        words[token // BITS] = words[token // BITS] | bit if is_allowed else words[token // BITS] & ~bit


def bitmask_of(banned: Tensor) -> Tensor:
    """Turn a boolean mask, True is banned, into a bitmask. ``[..., V]`` -> ``[..., W]``."""
    return pack_allowed(~banned)


def banned_of(mask: Tensor, vocab_size: int) -> Tensor:
    """Turn a bitmask into a boolean mask, True is banned. ``[..., W]`` -> ``[..., V]``."""
    return ~unpack_allowed(mask, vocab_size)


def apply_bitmask(logits: Tensor, mask: Tensor) -> None:
    """Write minus infinity where the bit is 0. ``logits`` [N, V], ``mask`` int32 [N, ceil(V / 32)]. Mutates logits.

    A padded head has more columns than the tokenizer has ids: the mask must cover them all. Another shape or dtype is
    refused before anything is written.
    """
    rows, vocab_size = logits.shape
    expected = (rows, num_words(vocab_size))
    assert mask.dtype == torch.int32, f"a bitmask is int32, this one is {mask.dtype}"
    assert mask.shape == expected, f"the bitmask is {tuple(mask.shape)}, logits {tuple(logits.shape)} need {expected}"
    logits.masked_fill_(banned_of(mask, vocab_size), -torch.inf)


def apply_bitmask_on_cpu(logits: Tensor, mask: Tensor) -> None:
    """Do what ``apply_bitmask`` does, to the bit, with an eighth of its temporary memory. Mutates ``logits``.

    Fresh memory is what a mask costs on a CPU: 16 rows of a large vocabulary need 27 MB above and 3 MB here.
    """
    octets = (~mask).numpy().view(np.uint8)  # the lowest byte of a word first, on every CPU that torch runs on
    banned = np.unpackbits(octets, axis=-1, count=logits.shape[1], bitorder="little").view(np.bool_)
    logits.masked_fill_(torch.from_numpy(banned), -torch.inf)


def apply_banned(logits: Tensor, banned: Tensor) -> None:
    """Write minus infinity where ``banned`` is True. Both [N, V]; anything else is refused. Mutates ``logits``."""
    assert banned.dtype == torch.bool, f"a boolean mask is bool, this one is {banned.dtype}"
    assert banned.shape == logits.shape, f"the mask is {tuple(banned.shape)}, the logits are {tuple(logits.shape)}"
    logits.masked_fill_(banned, -torch.inf)
