"""Specs of L4's distributions: filters, draws, the hash and log-probabilities, one row at a time, in Python numbers.

Owns: what each parameter means for one row of logits. Must not know: batches, the engine. Every row is a list of
float32 logits read as float64, minus infinity for a banned token.
"""

import itertools
import math
import struct
from collections.abc import Collection, Sequence

Row = list[float]
WORD = 0xFFFFFFFF
BANNED = -math.inf
SAFE_MASS = 4e-5  # a limit in the middle of a token of this mass is 20 float32 roundings away from both ends


def weights(row: Row) -> Row:
    """Return every token's odds against the likeliest one."""
    top = max(row)
    return [math.exp(x - top) for x in row]


def probabilities(row: Row) -> Row:
    """Return the softmax."""
    odds = weights(row)
    total = math.fsum(odds)
    return [x / total for x in odds]


def ranking(row: Row) -> list[int]:
    """Return all ids, the likeliest first, the lowest id first among equals."""
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


def only(row: Row, keep: Collection[int]) -> Row:
    """Ban every token that is not in ``keep``."""
    kept = set(keep)
    return [x if token in kept else BANNED for token, x in enumerate(row)]


def top_k_ids(row: Row, k: int) -> list[int]:
    """Return the ids that top-k keeps; 0 keeps all."""
    return ranking(row)[:k] if k else list(range(len(row)))


def top_p_ids(row: Row, p: float) -> list[int]:
    """Walk from the likeliest token down and stop as soon as the mass that was walked over reaches p."""
    if p == 1:
        return list(range(len(row)))
    masses = probabilities(row)
    kept = []
    walked = 0.0
    for token in ranking(row):
        if walked >= p:
            break
        kept.append(token)
        walked += masses[token]
    return kept


def min_p_ids(row: Row, share: float) -> list[int]:
    """Return the tokens whose odds against the likeliest one are at least ``share``."""
    return [token for token, odds in enumerate(weights(row)) if odds >= share]


def p_near(row: Row, wanted: float) -> float:
    """Return ``wanted``, or the nearest p that no rounding can carry across a token's edge.

    It then lies in the middle of the share of a token that is not tiny, so float32 and float64 must keep the same set.
    """
    masses = probabilities(row)
    left = 0.0
    edges = []
    middles = []
    for token in ranking(row):
        if masses[token] >= SAFE_MASS:
            middles.append(left + masses[token] / 2)
        left += masses[token]
        edges.append(left)
    if all(abs(edge - wanted) >= SAFE_MASS / 2 for edge in edges):
        return wanted
    return min(middles, key=lambda middle: abs(middle - wanted))


def share_near(row: Row, wanted: float) -> float:
    """Return ``wanted``, or if some token's odds are nearly that, a min-p in the middle between two tokens' odds."""
    odds = sorted(set(weights(row)))
    if all(abs(x - wanted) > 1e-3 * wanted for x in odds):
        return wanted
    middles = [(low + high) / 2 for low, high in itertools.pairwise(odds) if high - low > 1e-2 * high]
    return min(middles, key=lambda middle: abs(middle - wanted))


# The draws ----------------------------------------------------------------------------------------------------------


def inverse(row: Row, uniform: float) -> int:
    """Return the token in whose share of [0, 1) the number falls."""
    left = uniform
    masses = probabilities(row)
    for token, mass in enumerate(masses):
        if left < mass:
            return token
        left -= mass
    return max(token for token, mass in enumerate(masses) if mass > 0)


def share_points(row: Row, places: Sequence[float]) -> list[tuple[float, int]]:
    """Return (uniform, id) for points at these places, 0 to 1, inside every token's share of [0, 1)."""
    points = []
    left = 0.0
    for token, mass in enumerate(probabilities(row)):
        if mass > 0:
            points += [(left + mass * place, token) for place in places]
        left += mass
    return points


def rotated(x: int, bits: int) -> int:
    """Rotate a 32-bit word to the left."""
    text = f"{x:032b}"
    return int(text[bits:] + text[:bits], 2)


def stirred(state: int, word: int) -> int:
    """Stir one word into the state of MurmurHash3."""
    word = rotated(word * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
    return (rotated(state ^ word, 13) * 5 + 0xE6546B64) & WORD


def hashed(seed: int, position: int, token: int) -> int:
    """MurmurHash3_x86_32 of the 16 bytes of seed, position and token id, little end first."""
    data = struct.pack("<QII", seed % 2**64, position, token)
    state = 0
    for word in struct.unpack("<4I", data):
        state = stirred(state, word)
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state = (state ^ (state >> shift)) * factor & WORD
    return state


def unstirred(state: int, word: int) -> int:
    """Return the state that ``stirred`` turned into ``state`` with this word."""
    before = rotated((state - 0xE6546B64) * pow(5, -1, 2**32) & WORD, 32 - 13)
    return before ^ (rotated(word * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD)


def seed_of_hash(target: int, position: int, token: int, high: int = 0) -> int:
    """Run the hash backwards: return the seed with this high word for which ``hashed`` gives ``target``."""
    state = target
    for shift, factor in ((16, 1), (13, 0xC2B2AE35), (16, 0x85EBCA6B)):
        state = state * pow(factor, -1, 2**32) & WORD
        state ^= (state >> shift) ^ (state >> 2 * shift)  # undoes x ^ (x >> shift): 3 * shift is more than 32 bits
    state ^= 16
    for word in (token, position, high):
        state = unstirred(state, word)
    mixed = unstirred(state, 0)  # what the low word became: stirred into a state of 0
    low = rotated(mixed * pow(0x1B873593, -1, 2**32) & WORD, 32 - 15) * pow(0xCC9E2D51, -1, 2**32) & WORD
    seed = high << 32 | low
    assert hashed(seed, position, token) == target, "the hash was run backwards wrongly"
    return seed - 2**64 if seed >= 2**63 else seed


def noise(value: int) -> float:
    """Return the Gumbel noise of a hash, finite at both ends."""
    logarithm = math.log(value / WORD) if value else -1.7976931348623157e308
    return -math.log(-min(logarithm, -(2.0**-32)))


def seeded(row: Row, seed: int, position: int) -> int:
    """Return the allowed token with the largest sum of logit and noise."""
    allowed = [token for token, x in enumerate(row) if x > BANNED]
    return max(allowed, key=lambda token: row[token] + noise(hashed(seed, position, token)))


def chi_square(ids: Sequence[int], row: Row) -> float:
    """Return the distance of the drawn ids' counts from the softmax; infinite if a banned token was drawn."""
    total = 0.0
    for token, mass in enumerate(probabilities(row)):
        count = sum(1 for drawn in ids if drawn == token)
        if mass == 0 and count:
            return math.inf
        if mass > 0:
            total += (count - len(ids) * mass) ** 2 / (len(ids) * mass)
    return total


# Log-probabilities --------------------------------------------------------------------------------------------------


def report(logprobs: Row, token: int, count: int) -> list[list[float | int]]:
    """Return [id, log-probability, rank] of the chosen token and of the ``count`` likeliest; -1 means all."""
    order = ranking(logprobs)
    best = order if count == -1 else order[:count]
    return [[t, logprobs[t], order.index(t) + 1] for t in [token, *best]]


def log_softmax(row: Row) -> Row:
    """Return the natural logarithms of the softmax."""
    top = max(row)
    total = math.log(math.fsum(math.exp(x - top) for x in row))
    return [x - top - total for x in row]
