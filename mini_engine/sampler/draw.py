"""L4: drawing one token from each row's distribution, by a number from a generator or by noise from a seed.

Unseeded: one uniform number per row, and the token in whose share of the interval [0, 1) it falls. Seeded: a fixed
noise for every (seed, position, token id), and the token whose logit plus noise is largest (the Gumbel trick). The
second asks nothing of the other rows, of the order of requests or of what was filtered, so a request with a seed gives
the same tokens in any company.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF  # 32 bits; int64 products wrap modulo 2**64, which keeps the low word right
CHUNK = 1 << 16  # logits hashed at a time: the temporaries stay in the cache


def draw_uniform(logits: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution. ``logits`` [R, V], ``uniform`` [R] float64 in [0, 1) -> ids [R].

    Tokens lie side by side in [0, total mass), each as wide as its probability; a banned one has no width and is never
    found. Float64, because in float32 the far end of a long sum loses tokens of probability 1e-8.
    """
    edges = logits.softmax(-1).cumsum(-1, dtype=torch.float64)  # [R, V]: the right edge of each token's share
    return torch.searchsorted(edges, uniform[:, None] * edges[:, -1:], right=True)[:, 0]


def draw_seeded(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Add seeded Gumbel noise and take the largest. ``logits`` [R, V], ``seeds`` and ``positions`` [R] -> ids [R].

    ``argmax(logit + gumbel)`` is distributed as the softmax of the logits (Gumbel, 1954; Maddison et al., 2014), and
    needs no sum over the row. ``positions`` is that of the last input token.
    """
    drawn = [positions[:0]]  # without rows there are no ids
    rows_at_once = max(1, CHUNK // logits.shape[1])
    for start in range(0, len(logits), rows_at_once):
        part = logits[start : start + rows_at_once]
        rows, ids = (part > -torch.inf).nonzero(as_tuple=True)  # only what can be drawn needs noise
        noise = gumbel(murmur3(seeds[start + rows], positions[start + rows], ids))
        scores = torch.full(part.shape, -torch.inf, dtype=torch.float64, device=part.device)
        scores[rows, ids] = part[rows, ids].double() + noise
        drawn.append(scores.argmax(-1))
    return torch.cat(drawn)


def murmur3(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Hash (seed, position, token id) -> int64 in [0, 2**32). All int64 of one shape; seeds are taken as unsigned.

    MurmurHash3_x86_32 (Appleby, 2011) with hash seed 0 over the 16 bytes ``<QII`` = seed, position, token id, as
    SGLang's ``multinomial_with_seed``.
    """
    state = torch.zeros_like(token_ids)
    for word in (seeds & WORD, (seeds >> 32) & WORD, positions & WORD, token_ids & WORD):
        state = mix(state, word)
    state ^= 16  # the number of bytes
    state ^= state >> 16
    state = (state * 0x85EBCA6B) & WORD
    state ^= state >> 13
    state = (state * 0xC2B2AE35) & WORD
    return state ^ (state >> 16)


def mix(state: Tensor, word: Tensor) -> Tensor:
    """Stir one 32-bit word into the hash state."""
    word = (word * 0xCC9E2D51) & WORD
    word = (rotate_left(word, 15) * 0x1B873593) & WORD
    return (rotate_left(state ^ word, 13) * 5 + 0xE6546B64) & WORD


def rotate_left(x: Tensor, bits: int) -> Tensor:
    """Rotate 32-bit words to the left by ``bits``."""
    return ((x << bits) | (x >> (32 - bits))) & WORD


def gumbel(hashes: Tensor) -> Tensor:
    """Turn hashes, taken as uniform numbers in [0, 1], into standard Gumbel noise, float64, always finite.

    The inner logarithm is clamped to lie between the least float64 and -2**-32. Both clamps are needed: a hash of 0 has
    the logarithm minus infinity, and a hash of 2**32 - 1 would give plus infinity without the upper one; added to a
    banned token that is NaN, and argmax takes NaN for the largest.
    """
    logarithm = (hashes.double() / WORD).log().clamp(torch.finfo(torch.float64).min, -(2.0**-32))
    return -(-logarithm).log()
