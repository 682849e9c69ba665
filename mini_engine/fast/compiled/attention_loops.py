"""Attention over keys and values where they lie, as loops.

``attend`` takes rows one by one, so no row's bits depend on the others. ``attend_blocks`` takes 64 query rows of a
sequence side by side, as the features of a tile lie: a key, once read, is multiplied with all of them. It adds up in
another order.
"""

import numpy as np
from numba import prange

from mini_engine.fast.compiled.loops import ONE, Floats, Halves, Ints, as_written, exponential, in_lanes, narrow, wide
from mini_engine.fast.compiled.product_loops import TILE, add_up_four, by_threads

Rows = tuple[Ints, Ints, Ints]
Slots = tuple[Ints, Ints]  # as ``find_slots`` returns them

AT_ONCE = 4  # keys that are taken together: their sums do not wait for one another
LEAST = np.float32(-np.inf)


@as_written
def store(k: Floats, v: Halves, keys: Halves, values: Halves, slots: Ints) -> None:
    """Copy ``k`` and ``v`` [T, Hkv, D] into the ``slots`` [T] of ``keys`` and ``values`` [Hkv, all slots, D]."""
    for head in range(k.shape[1]):
        for t in range(k.shape[0]):
            own_key, own_value, key, value = k[t, head], v[t, head], keys[head, slots[t]], values[head, slots[t]]
            for i in range(k.shape[2]):
                key[i] = narrow(own_key[i], keys)
                value[i] = narrow(wide(own_value[i]), values)


@as_written
def rows_of_short(bounds: Ints, lengths: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Return the packed rows of sequences with up to ``most`` queries, their sequences and the keys that they see.

    ``bounds`` [N + 1] as ``cu_seqlens_q``, ``lengths`` [N] as ``seq_lens_kv`` -> three [R].
    """
    rows, owners, visible = np.empty((3, bounds[-1]), np.int64)
    count = 0
    for n in range(lengths.shape[0]):
        first = bounds[n]
        end = bounds[n + 1]
        for row in range(first, end if end - first <= most else first):
            rows[count] = row
            owners[count] = n
            visible[count] = lengths[n] - (end - 1 - row)
            count += 1
    return rows[:count], owners[:count], visible[:count]


@as_written
def find_slots(pages: Ints, page_size: int, lengths: Ints) -> tuple[Ints, Ints]:
    """Return the slots of every sequence's keys, one sequence after the other, and where each begins.

    They are those of ``AttentionMetadata.kv_slots``, without torch's calls for every sequence of every step.
    ``pages`` [N, most pages], ``lengths`` [N] -> [sum of lengths], [N].
    """
    starts = np.cumsum(lengths) - lengths
    slots = np.empty(lengths.sum(), np.uintp)  # unsigned, so that no loop asks whether one is negative
    for n in range(lengths.shape[0]):
        own = slots[starts[n] : starts[n] + lengths[n]]
        for page in range((lengths[n] + page_size - 1) // page_size):
            part = own[page * page_size : (page + 1) * page_size]
            for i in range(part.shape[0]):
                part[i] = pages[n, page] * page_size + i
    return slots, starts


@as_written
def attend(
    q: Floats, keys: Halves, values: Halves, some: Rows, slots: Slots, out: Floats, threads: int, share: int
) -> None:
    """Attend for some rows of a step and one share of the heads, reading keys and values where they lie.

    ``q`` and ``out`` [T, Hq, D]; ``keys`` and ``values`` [Hkv, all slots, D]; ``some`` as ``rows_of_short`` returns
    them. Mutates their rows of ``out``.
    """
    rows, owners, lengths = some
    group = q.shape[1] // keys.shape[0]  # query heads that share a key-value head
    weights = np.empty((group, lengths.max() + AT_ONCE if len(lengths) else 0), np.float32)
    # Heads are outside, so that the rows of one sequence find its keys in the CPU's cache.
    for head in range(keys.shape[0] * share // threads, keys.shape[0] * (share + 1) // threads):
        mine = slice(head * group, (head + 1) * group)
        for r in range(rows.shape[0]):
            seen = slots[0][slots[1][owners[r]] : slots[1][owners[r]] + lengths[r]]
            score(q[rows[r], mine], keys[head], seen, weights)
            for g in range(group):
                softmax(weights[g], lengths[r])
            mix(weights, values[head], seen, out[rows[r], mine])


@by_threads
def attend_shared(q: Floats, keys: Halves, values: Halves, some: Rows, slots: Slots, out: Floats, threads: int) -> None:
    """Compute ``attend`` on several threads."""
    for share in prange(threads):
        attend(q, keys, values, some, slots, out, threads, share)


@as_written
def at_once(slots: Ints, i: int) -> tuple[int, int, int, int]:
    """Return ``AT_ONCE`` slots from number ``i`` on; the last one stands for those that are missing."""
    last = slots.shape[0] - 1
    return slots[i], slots[min(i + 1, last)], slots[min(i + 2, last)], slots[min(i + 3, last)]


@in_lanes
def score(q: Floats, keys: Halves, slots: Ints, scores: Floats) -> None:
    """Write the scaled products of ``q`` [group, D] with the keys of ``slots`` [n] into ``scores`` [group, n, …]."""
    scale = ONE / np.sqrt(np.float32(q.shape[1]))
    for i in range(0, slots.shape[0], AT_ONCE):
        n0, n1, n2, n3 = at_once(slots, i)
        k0, k1, k2, k3 = keys[n0], keys[n1], keys[n2], keys[n3]
        for g in range(q.shape[0]):
            s0 = s1 = s2 = s3 = np.float32(0)
            for d in range(q.shape[1]):
                s0 += q[g, d] * wide(k0[d])
                s1 += q[g, d] * wide(k1[d])
                s2 += q[g, d] * wide(k2[d])
                s3 += q[g, d] * wide(k3[d])
            for n, total in enumerate((s0, s1, s2, s3)):
                scores[g, i + n] = total * scale


@in_lanes
def softmax(scores: Floats, length: int) -> None:
    """Turn the first ``length`` of ``scores`` into probabilities, and what pads into 0, in place."""
    largest = scores[0]
    total = np.float32(0)
    for i in range(length):
        largest = max(largest, scores[i])
    for i in range(length):
        scores[i] = exponential(scores[i] - largest)
        total += scores[i]
    share = ONE / total
    for i in range(length):
        scores[i] *= share
    scores[length : length + AT_ONCE] = 0


@in_lanes
def mix(weights: Floats, values: Halves, slots: Ints, out: Floats) -> None:
    """Write the sums of ``weights`` [group, n, …] times the values of ``slots`` [n] into ``out`` [group, D]."""
    out[:] = 0
    for i in range(0, slots.shape[0], AT_ONCE):
        n0, n1, n2, n3 = at_once(slots, i)
        v0, v1, v2, v3 = values[n0], values[n1], values[n2], values[n3]
        for g in range(out.shape[0]):
            w0 = weights[g, i]
            w1 = weights[g, i + 1]
            w2 = weights[g, i + 2]
            w3 = weights[g, i + 3]
            for d in range(out.shape[1]):
                out[g, d] += w0 * wide(v0[d]) + w1 * wide(v1[d]) + w2 * wide(v2[d]) + w3 * wide(v3[d])


@as_written
def attend_blocks(
    q: Floats, keys: Halves, values: Halves, some: Rows, slots: Slots, out: Floats, threads: int, share: int
) -> None:
    """Attend for all rows of some sequences and one share of the heads. Mutates these rows of ``out``.

    ``q``, ``out``, ``keys`` and ``values`` as in ``attend``; ``some``: the numbers of the sequences, and of all N where
    their rows begin [N + 1] and their keys [N].
    """
    sequences, bounds, lengths = some
    group = q.shape[1] // keys.shape[0]
    for head in range(keys.shape[0] * share // threads, keys.shape[0] * (share + 1) // threads):
        mine = slice(head * group, (head + 1) * group)
        for n in sequences:
            rows = slice(bounds[n], bounds[n + 1])
            seen = slots[0][slots[1][n] : slots[1][n] + lengths[n]]
            attend_sequence(q[rows, mine], keys[head], values[head], seen, out[rows, mine])


@by_threads
def attend_blocks_shared(
    q: Floats, keys: Halves, values: Halves, some: Rows, slots: Slots, out: Floats, threads: int
) -> None:
    """Compute ``attend_blocks`` on several threads."""
    for share in prange(threads):
        attend_blocks(q, keys, values, some, slots, out, threads, share)


@as_written
def attend_sequence(q: Floats, keys: Halves, values: Halves, slots: Ints, out: Floats) -> None:
    """Attend for the last positions of a sequence with one key-value head, block by block.

    ``q`` and ``out`` [n, group, D]; ``keys`` and ``values`` [all slots, D]; ``slots`` [L], which the last row sees.
    """
    group, dim = q.shape[1], q.shape[2]
    scale = ONE / np.sqrt(np.float32(dim))
    block = TILE // group  # positions
    turned, found = np.zeros((dim, TILE), np.float32), np.empty((TILE, dim), np.float32)
    weights = np.empty((slots.shape[0] + AT_ONCE, TILE), np.float32)
    visible, shares = np.ones(TILE, np.int64), np.empty(TILE, np.float32)
    for first in range(0, q.shape[0], block):
        count = min(block, q.shape[0] - first)
        seen = slots[: slots.shape[0] - (q.shape[0] - first - count)]
        for row in range(count * group):
            visible[row] = seen.shape[0] - (count - 1 - row // group)
            for i in range(dim):
                turned[i, row] = q[first + row // group, row % group, i] * scale
        score_block(turned, keys, seen, weights)
        softmax_block(weights[: seen.shape[0]], visible, shares)
        weights[seen.shape[0] : seen.shape[0] + AT_ONCE] = 0
        mix(weights.T, values, seen, found)
        for row in range(count * group):
            for i in range(dim):
                out[first + row // group, row % group, i] = found[row, i] * shares[row]


@as_written
def score_block(turned: Floats, keys: Halves, slots: Ints, scores: Floats) -> None:
    """Write the products of the keys of ``slots`` [L] with queries, ``turned`` [D, 64], into ``scores`` [L + 4, 64]."""
    four = np.empty(AT_ONCE * turned.shape[0], np.float32)
    for i in range(0, slots.shape[0], AT_ONCE):
        n0, n1, n2, n3 = at_once(slots, i)
        k0, k1, k2, k3 = keys[n0], keys[n1], keys[n2], keys[n3]
        for d in range(turned.shape[0]):
            four[4 * d] = wide(k0[d])
            four[4 * d + 1] = wide(k1[d])
            four[4 * d + 2] = wide(k2[d])
            four[4 * d + 3] = wide(k3[d])
        add_up_four(four, turned, scores[i : i + AT_ONCE].reshape(-1))


@as_written
def softmax_block(scores: Floats, visible: Ints, shares: Floats) -> None:
    """Turn ``scores`` [L, 64] of the first ``visible`` [64] keys into weights, others into 0, and write 1 / their sums.

    ``shares`` [64].
    """
    largest, totals = np.full(TILE, LEAST, np.float32), np.zeros(TILE, np.float32)
    for i in range(scores.shape[0]):
        for n in range(TILE):
            scores[i, n] = scores[i, n] if i < visible[n] else LEAST
            largest[n] = max(largest[n], scores[i, n])
    for i in range(scores.shape[0]):
        for n in range(TILE):
            scores[i, n] = exponential(scores[i, n] - largest[n])
            totals[n] += scores[i, n]
    for n in range(TILE):
        shares[n] = ONE / totals[n]
