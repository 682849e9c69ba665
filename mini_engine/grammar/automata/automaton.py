"""L7: from a tree to the smallest deterministic automaton over bytes.

    tree ──► Nfa (Thompson: a fragment per node) ──► subset construction ──► equal states merged ──► Dfa

Bytes that no edge tells apart are one class, so the tables have a column per class (usually 5 to 40) and not 256.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from mini_engine.grammar.automata.syntax import Chars, Choice, Concat, Node, Ranges, Repeat
from mini_engine.grammar.automata.utf8 import ByteRange, byte_sequences
from mini_engine.grammar.base import GrammarError, TooManyStatesError

DEAD = -1
START = 0
NFA_PER_DFA = 16  # an automaton whose pieces are so many times the limit would not fit afterwards either
MEMBERS_PER_DFA = 64  # of the sets of states on the way, in the mean
Table = NDArray[np.int32]


@dataclass(frozen=True)
class Dfa:
    """``transitions`` [S, 256]: the state after a byte, ``DEAD`` if none; ``accepting`` [S]. It begins in state 0.

    From every state an accepting one can be reached, so whatever is not ``DEAD`` can still become a whole text.
    """

    transitions: Table
    accepting: NDArray[np.bool_]

    @property
    def num_states(self) -> int:
        """States, without the dead one."""
        return len(self.accepting)

    def run(self, data: bytes, state: int = START) -> int:
        """Return the state after ``data``, ``DEAD`` if there is none."""
        for byte in data:
            if state == DEAD:
                return DEAD
            state = int(self.transitions[state, byte])
        return state

    def matches(self, text: str) -> bool:
        """Whether ``text`` is in the language."""
        state = self.run(text.encode())
        return state != DEAD and bool(self.accepting[state])


@cache
def bytes_of_ranges(ranges: Ranges) -> tuple[tuple[ByteRange, ...], ...]:
    """Return how the characters of a set are spelled in bytes; a repeat asks for the same set again and again."""
    return tuple(byte_sequences(ranges))


@dataclass
class Nfa:
    """States with edges over byte ranges and edges over nothing; state 0 is the start."""

    limit: int
    edges: list[list[tuple[ByteRange, int]]] = field(default_factory=list)
    skips: list[list[int]] = field(default_factory=list)
    members: int = 0

    def state(self) -> int:
        """Add a state. Raises ``TooManyStatesError`` above the limit. Mutates."""
        if len(self.edges) >= self.limit * NFA_PER_DFA:
            raise TooManyStatesError(self.limit)
        self.edges.append([])
        self.skips.append([])
        return len(self.edges) - 1

    def add(self, node: Node, start: int) -> int:
        """Add what matches ``node`` from state ``start`` on, and return the state behind it. Mutates."""
        match node:
            case Chars(ranges):
                return self.add_chars(bytes_of_ranges(ranges), start)
            case Concat(parts):
                for part in parts:
                    start = self.add(part, start)
                return start
            case Choice(options):
                ends = [self.add(option, start) for option in options]
                return self.join(ends)
            case Repeat():
                return self.add_repeat(node, start)

    def join(self, ends: Iterable[int]) -> int:
        """Return a new state that every one of ``ends`` leads to. Mutates."""
        after = self.state()
        for end in ends:
            self.skips[end].append(after)
        return after

    def add_repeat(self, node: Repeat, start: int) -> int:
        """Add copies: those that must be there, then a loop, or copies that may end at any point. Mutates."""
        for _ in range(node.least):
            before = start
            start = self.add(node.node, start)
            if start == before:  # nothing but the empty text: so are the copies that are left
                return start
        if node.most is None:
            loop = self.join([start])  # a state of its own, or the loop would also belong to what comes before
            self.skips[self.add(node.node, loop)].append(loop)
            return self.join([loop])
        ends = [start]
        for _ in range(node.most - node.least):
            ends.append(self.add(node.node, ends[-1]))
            if ends[-1] == ends[-2]:
                break
        return self.join(ends)

    def add_chars(self, sequences: Iterable[tuple[ByteRange, ...]], start: int) -> int:
        """Add one character; sequences that end alike share their last states. Mutates."""
        after = self.state()
        behind: dict[tuple[ByteRange, ...], int] = {(): after}
        for sequence in sequences:
            for cut in range(len(sequence), 0, -1):
                rest = sequence[cut:]
                tail = sequence[cut - 1 :]
                if cut == 1:
                    self.edges[start].append((sequence[0], behind[rest]))
                elif tail not in behind:
                    behind[tail] = self.state()
                    self.edges[behind[tail]].append((sequence[cut - 1], behind[rest]))
        return after

    def closure(self, state: int) -> frozenset[int]:
        """Return the states that ``state`` leads to without a byte, itself included."""
        seen = {state}
        todo = [state]
        while todo:
            for after in self.skips[todo.pop()]:
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return frozenset(seen)

    def count(self, members: int) -> None:
        """Count members of sets of states. Raises ``TooManyStatesError`` above the limit. Mutates."""
        self.members += members
        if self.members > self.limit * MEMBERS_PER_DFA:
            raise TooManyStatesError(self.limit)

    def leading_to(self, end: int) -> set[int]:
        """Return the states from which ``end`` can be reached: all others only lead into dead ends."""
        before: list[list[int]] = [[] for _ in self.edges]
        for state, (edges, skips) in enumerate(zip(self.edges, self.skips, strict=True)):
            for after in [*skips, *(target for _, target in edges)]:
                before[after].append(state)
        seen = {end}
        todo = [end]
        while todo:
            new = [state for state in before[todo.pop()] if state not in seen]
            seen.update(new)
            todo += new
        return seen


def compile_node(node: Node, max_states: int = 20_000) -> Dfa:
    """Return the smallest automaton of a tree.

    Raises ``TooManyStatesError`` for more than ``max_states`` before they are merged, or for sets that are too large,
    and ``GrammarError`` for a language without any text.
    """
    nfa = Nfa(max_states)
    begin = nfa.state()
    end = nfa.add(node, begin)
    classes = byte_classes(nfa)
    table, accepting = minimise(*determinise(nfa, begin, end, classes))
    return Dfa(np.ascontiguousarray(table[:, classes]), accepting)


def byte_classes(nfa: Nfa) -> NDArray[np.int64]:
    """Return the class of every byte [256]: no edge distinguishes the bytes between two ends of ranges."""
    ranges = {byte_range for edges in nfa.edges for byte_range, _ in edges}
    cuts = sorted({0, 256} | {first for first, _ in ranges} | {last + 1 for _, last in ranges})
    return np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))


def determinise(nfa: Nfa, begin: int, end: int, classes: NDArray[np.int64]) -> tuple[Table, NDArray[np.bool_]]:
    """Build the automaton whose states are sets of ``nfa``'s: where it could be after the same bytes.

    Returns the transitions [S, C] by class of byte and which states accept. Raises as ``compile_node`` does.
    """
    useful = nfa.leading_to(end)
    if begin not in useful:
        raise GrammarError("the grammar matches no text at all; loosen it")
    # Of a set, only states that read a byte, and the end, make a difference.
    matter = frozenset(state for state in useful if nfa.edges[state] or state == end)

    @cache
    def reached(state: int) -> frozenset[int]:
        found = nfa.closure(state)
        nfa.count(len(found))
        return found & matter

    sets: list[frozenset[int]] = []
    number: dict[frozenset[int], int] = {frozenset(): DEAD}

    @cache  # a range of bytes leads to the same few targets by every byte
    def number_of(targets: frozenset[int]) -> int:
        members = frozenset(chain.from_iterable(map(reached, targets)))
        if members not in number:
            number[members] = len(sets)
            sets.append(members)
        return number[members]

    number_of(frozenset({begin}))
    columns = classes.tolist()
    rows = []
    for members in sets:  # grows on the way
        after: dict[int, list[int]] = defaultdict(list)
        for (first, last), target in (edge for state in members for edge in nfa.edges[state]):
            for column in range(columns[first], columns[last] + 1):
                after[column].append(target)
        row = [DEAD] * (columns[-1] + 1)
        for column, targets in after.items():
            row[column] = number_of(frozenset(targets))
        rows.append(row)
        nfa.count(len(members))  # (a?){1,5000} has few sets, but each of thousands
        if len(sets) > nfa.limit:
            raise TooManyStatesError(nfa.limit)
    return np.array(rows, dtype=np.int32), np.array([end in members for members in sets])


def minimise(table: Table, accepting: NDArray[np.bool_]) -> tuple[Table, NDArray[np.bool_]]:
    """Merge states that no text tells apart. ``table`` [S, C] -> [S', C], again with 0 as its start.

    States begin in two blocks, accepting or not; a block is split while the same byte leads into different blocks
    (Moore, 1956). The smaller part gets the new number, and only what leads to it is looked at again: a state changes
    its number at most log2(S) times, and a chain of S states takes S steps instead of S * S (Hopcroft, 1971).
    """
    blocks = np.append(accepting, DEAD).astype(np.int32)  # of every state; index -1, of a dead edge, reads the DEAD
    members = [set(np.flatnonzero(accepting == kind).tolist()) for kind in (False, True)]
    sources = sources_of(table)
    suspects = list(range(len(table)))
    while suspects:
        parts = defaultdict(list)
        for state, signature in zip(suspects, blocks[table[suspects]], strict=True):
            parts[int(blocks[state]), signature.tobytes()].append(state)
        changed: list[int] = []
        for part in parts.values():
            number = blocks[part[0]]
            members[number].difference_update(part)
            smaller, members[number] = sorted((members[number], set(part)), key=len)
            if smaller:
                blocks[list(smaller)] = len(members)
                members.append(smaller)
                changed += smaller
        suspects = list({source for state in changed for source in sources[state]})
    _, first, split = np.unique(blocks[:-1], return_index=True, return_inverse=True)
    order = np.argsort(first)  # blocks in the order of their first state, so that the start stays 0
    rank = np.append(np.argsort(order), DEAD).astype(np.int32)
    chosen = first[order]
    return rank[np.append(split, DEAD)[table[chosen]]], accepting[chosen]


def sources_of(table: Table) -> list[list[int]]:
    """Return the states that lead to each state."""
    num_states = len(table)
    targets = np.where(table == DEAD, num_states, table).astype(np.int64)
    pairs = np.unique(targets * num_states + np.arange(num_states)[:, None])  # each source once, by target
    ends = np.searchsorted(pairs, np.arange(num_states + 1) * num_states)
    sources: list[int] = (pairs % num_states).tolist()
    return [sources[begin:end] for begin, end in pairwise(ends.tolist())]
