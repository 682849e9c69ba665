"""L7: all tokens of a vocabulary walked through an automaton at once.

Tokens that begin alike share their first steps. The trie is kept level by level, as arrays, so that a step of the walk
is one look-up for all nodes of a level: 467,000 nodes for a vocabulary of 152,000 take 2 ms instead of 20.

    "a" "ab" "abc" "b"        level 0:  a  b        level 1:  ab       level 2:  abc
                              tokens:   a  b                  ab                 abc
"""

from copy import copy
from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mini_engine.grammar.automata.automaton import DEAD, Table

Ids = NDArray[np.int64]
FULL_ABOVE = 0.25  # share of live nodes above which it is faster to follow all than to pick them out


@dataclass(frozen=True)
class Level:
    """The nodes of one depth. ``parents``, ``last_bytes`` [n]: the node above, and the byte that leads from it to here.

    ``token_ids`` [t]: the tokens that end here, at the nodes ``token_nodes`` [t].
    """

    parents: Ids
    last_bytes: NDArray[np.uint8]
    token_ids: Ids
    token_nodes: Ids


class TokenTrie:
    """The trie of a list of byte strings; empty ones are in no node, so no automaton ever reaches them."""

    def __init__(self, token_bytes: tuple[bytes, ...]) -> None:
        """Build the levels: a fifth of a second for a large vocabulary."""
        self.vocab_size = len(token_bytes)
        self.levels: list[Level] = []
        spelled = sorted((text, token) for token, text in enumerate(token_bytes) if text)
        tokens = np.array([token for _, token in spelled], dtype=np.int64)
        lengths = np.array([len(text) for text, _ in spelled], dtype=np.int64)
        data = np.frombuffer(b"".join(text for text, _ in spelled), dtype=np.uint8)
        starts = np.cumsum(lengths) - lengths  # of every token in the data
        nodes = np.zeros(len(tokens), dtype=np.int64)  # of every token, in the level above
        while len(tokens):
            depth = len(self.levels)
            keys, nodes = np.unique(nodes * 256 + data[starts + depth], return_inverse=True)
            ends = lengths == depth + 1
            last_bytes = (keys % 256).astype(np.uint8)
            self.levels.append(Level(keys // 256, last_bytes, tokens[ends], nodes[ends]))
            tokens, lengths, starts, nodes = (part[~ends] for part in (tokens, lengths, starts, nodes))

    def merged(self, transitions: Table) -> Self:
        """Return the trie as one automaton sees it: ``allowed`` says the same with that table, by way of fewer nodes.

        Bytes that no state tells apart lead to one node, and those that every state refuses to none: where ``[a-z]+``
        is all that matters, every word of five letters is one path. For a large vocabulary it takes 1 to 30 ms and up
        to 5 MB, once for a grammar, and each walk takes 1 to 3 ms less.
        """
        examples, kinds = byte_kinds(transitions)
        twin = copy(self)
        twin.levels = []
        place = np.zeros(1, dtype=np.int64)  # of every node of the level above: its number in the twin, or DEAD
        for level in self.levels:
            above, kind = place[level.parents], kinds[level.last_bytes]
            alive = np.flatnonzero((above != DEAD) & (kind != DEAD))
            if not len(alive):
                break
            found, number = distinct(above[alive] * len(examples) + kind[alive])
            place = np.full(len(level.parents), DEAD)
            place[alive] = number
            nodes = place[level.token_nodes]
            ends = nodes != DEAD
            last_bytes = examples[found % len(examples)]
            twin.levels.append(Level(found // len(examples), last_bytes, level.token_ids[ends], nodes[ends]))
        return twin

    def allowed(self, transitions: Table, state: int) -> NDArray[np.bool_]:
        """Return which tokens lead from ``state`` to a state that is not dead -> [V]. ``transitions`` [S, 256]."""
        allowed = np.zeros(self.vocab_size, dtype=np.bool_)
        states = transitions[state][self.levels[0].last_bytes] if self.levels else np.zeros(0, dtype=np.int32)
        for level, below in zip_longest(self.levels, self.levels[1:]):
            live = states != DEAD
            allowed[level.token_ids] = live[level.token_nodes]
            if below is None or not live.any():
                break
            states = follow(transitions, states, live, below)
        return allowed


def byte_kinds(transitions: Table) -> tuple[NDArray[np.uint8], Ids]:
    """Sort the bytes into kinds that no state of ``transitions`` [S, 256] tells apart.

    Returns the first byte of every kind [K], and the kind of every byte [256]: ``DEAD`` if all states refuse it.
    """
    columns = np.ascontiguousarray(transitions.T)
    known = {np.full_like(columns[0], DEAD).tobytes(): DEAD}
    kinds = [known.setdefault(column.tobytes(), len(known) - 1) for column in columns]
    examples = [kinds.index(kind) for kind in range(len(known) - 1)]
    return np.array(examples, dtype=np.uint8), np.array(kinds)


def distinct(keys: Ids) -> tuple[Ids, NDArray[np.int32]]:
    """Return the different ``keys`` in order, and where among them each key stands: ``np.unique`` without sorting.

    ``keys`` [n] are at least 0, n at least 1.
    """
    is_key = np.zeros(keys.max() + 1, dtype=np.bool_)
    is_key[keys] = True
    found = np.flatnonzero(is_key).astype(np.int64)
    places = np.empty(len(is_key), dtype=np.int32)
    places[found] = np.arange(len(found))
    return found, places[keys]


def follow(transitions: Table, states: Table, live: NDArray[np.bool_], below: Level) -> Table:
    """Take every live node of a level to its children -> their states, in the order of ``below``."""
    flat = transitions.reshape(-1)
    if np.count_nonzero(live) > FULL_ABOVE * len(live):
        index = states.take(below.parents) * 256 + below.last_bytes
        after: Table = flat.take(index)
        after[index < 0] = DEAD  # a dead parent's index is negative and reads the last row
        return after
    after = np.full(len(below.parents), DEAD, dtype=np.int32)
    children = np.flatnonzero(live.take(below.parents))
    after[children] = flat.take(states.take(below.parents[children]) * 256 + below.last_bytes[children])
    return after
