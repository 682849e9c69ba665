"""Automata as diagrams: labels of their edges, forced chains joined, and a place for every state.

The layout is a plain form of Sugiyama's (1981). A state stands one column to the right of the last state before it. An
edge over several columns gets a place in each of them. Columns are sorted by the mean place of their neighbours. Edges
that lead back are drawn below everything.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mini_engine.grammar.automata.automaton import DEAD, START, Dfa

SWEEPS = 12  # enough for graphs of this size
ASCII = range(128)
MANY = 64  # a set of more ASCII bytes is described by what is missing
Spot = tuple[int, float]  # column, line


@dataclass(frozen=True)
class Arrow:
    """An edge. ``data``: the sets of bytes that it reads, in order. ``is_forced``: nothing else is allowed here."""

    source: int
    target: int
    data: tuple[frozenset[int], ...]
    is_forced: bool

    @property
    def label(self) -> str:
        """What it reads, as text: ``0-9``, ``né``, ``C3``."""
        if len(self.data) == 1:
            return byte_set_label(self.data[0])
        return bytes_label(bytes(next(iter(one)) for one in self.data))


@dataclass(frozen=True)
class Diagram:
    """States and edges with their places.

    ``ways``: the places that each arrow passes, its ends included; empty for one that leads back.
    """

    accepting: frozenset[int]
    arrows: tuple[Arrow, ...]
    places: Mapping[int, Spot]
    ways: tuple[tuple[Spot, ...], ...]

    @property
    def num_columns(self) -> int:
        """Columns of states."""
        return 1 + max(column for column, _ in self.places.values())

    @property
    def num_forced(self) -> int:
        """Arrows that are forced."""
        return sum(arrow.is_forced for arrow in self.arrows)


def diagram(dfa: Dfa, compressed: bool = False) -> Diagram:
    """Return the diagram of an automaton. ``compressed``: chains of forced bytes become one arrow."""
    arrows = arrows_of(dfa)
    if compressed:
        arrows = join_chains(arrows)
    columns = columns_of(arrows)
    places, ways = place(arrows, columns)
    accepting = frozenset(np.flatnonzero(dfa.accepting).tolist()) & places.keys()
    return Diagram(accepting, tuple(arrows), places, tuple(ways))


def arrows_of(dfa: Dfa) -> list[Arrow]:
    """Return one arrow per pair of states, with all bytes that lead from one to the other."""
    arrows = []
    for state, row in enumerate(dfa.transitions):
        targets: dict[int, set[int]] = defaultdict(set)
        for byte in np.flatnonzero(row != DEAD).tolist():
            targets[int(row[byte])].add(byte)
        forced = not dfa.accepting[state] and sum(map(len, targets.values())) == 1
        arrows += [Arrow(state, target, (frozenset(own),), forced) for target, own in targets.items()]
    return arrows


def join_chains(arrows: Sequence[Arrow]) -> list[Arrow]:
    """Join forced arrows that follow each other. A state stays if it has a choice, or another edge leads to it."""
    leading_in: dict[int, list[Arrow]] = defaultdict(list)
    for arrow in arrows:
        leading_in[arrow.target].append(arrow)
    out = {arrow.source: arrow for arrow in arrows if arrow.is_forced}
    inner = {state for state in out if state != START and [own.is_forced for own in leading_in[state]] == [True]}
    joined = []
    for arrow in arrows:
        if arrow.source in inner:
            continue
        data = list(arrow.data)
        target = arrow.target
        while arrow.is_forced and target in inner:
            data += out[target].data
            target = out[target].target
        joined.append(Arrow(arrow.source, target, tuple(data), arrow.is_forced))
    return joined


# ---------------------------------------------------------------------------------------------------------------- words


def bytes_label(data: bytes) -> str:
    """Write bytes as characters, those of a broken character as two hexadecimal digits each: ``é":``, ``A9 ":``."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        split = next(i for i in range(1, len(data) + 1) if i == len(data) or data[i] < 0x80)
        rest = bytes_label(data[split:]) if split < len(data) else ""
        return " ".join([*(byte_label(byte) for byte in data[:split]), *([rest] if rest else [])])
    return "".join(character_label(character) for character in text)


def byte_label(byte: int) -> str:
    """Write one byte: a character, or two hexadecimal digits."""
    return character_label(chr(byte)) if byte < 0x80 else f"{byte:02X}"


def character_label(character: str) -> str:
    """Write one character so that it can be seen."""
    return "␣" if character == " " else character if character.isprintable() else f"{ord(character):02X}"


def byte_set_label(members: frozenset[int]) -> str:
    """Write a set of bytes as ranges, and most of ASCII by what is missing: ``ASCII but "``."""
    low = members & set(ASCII)
    high = members - set(ASCII)
    parts = [range_label(*run) for run in runs(low)]
    if len(low) > MANY:
        missing = [range_label(*run) for run in runs(set(ASCII) - low)]
        parts = ["ASCII" + (" but " if missing else "") + " ".join(missing)]
    return " ".join(parts + [range_label(*run) for run in runs(high)])


def runs(members: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last number of every run of neighbours, in order."""
    found: list[tuple[int, int]] = []
    for member in sorted(members):
        if found and found[-1][1] == member - 1:
            found[-1] = (found[-1][0], member)
        else:
            found.append((member, member))
    return found


def range_label(first: int, last: int) -> str:
    """Write a range of bytes."""
    between = "" if last - first < 2 else "-"
    return byte_label(first) if first == last else f"{byte_label(first)}{between or ' '}{byte_label(last)}"


# --------------------------------------------------------------------------------------------------------------- places


def columns_of(arrows: Sequence[Arrow]) -> dict[int, int]:
    """Return the column of every state: the length of the longest path from the start without edges that lead back."""
    after: dict[int, list[int]] = defaultdict(list)
    for arrow in arrows:
        after[arrow.source].append(arrow.target)
    order: list[int] = []
    path: list[int] = []
    back: set[tuple[int, int]] = set()

    def visit(state: int) -> None:
        path.append(state)
        for target in after[state]:
            if target in path:
                back.add((state, target))
            elif target not in order:
                visit(target)
        order.append(path.pop())

    visit(START)
    columns = dict.fromkeys(reversed(order), 0)
    for state in columns:  # every state comes after those that lead to it
        for target in after[state]:
            if (state, target) not in back:
                columns[target] = max(columns[target], columns[state] + 1)
    return columns


def place(arrows: Sequence[Arrow], columns: Mapping[int, int]) -> tuple[dict[int, Spot], list[tuple[Spot, ...]]]:
    """Give every state, and every arrow that passes a column, a line in it -> places of states, ways of arrows."""
    layers: list[list[tuple[int, int]]] = [[] for _ in range(max(columns.values()) + 1)]  # (state, -1) or (-1, arrow)
    for state, column in columns.items():
        layers[column].append((state, -1))
    near: dict[tuple[tuple[int, int], int], list[tuple[int, int]]] = defaultdict(list)  # (node, column) -> neighbours
    chains = []
    for number, arrow in enumerate(arrows):
        first, last = columns[arrow.source], columns[arrow.target]
        passed = [(-1, number)] * (last - first - 1)
        chain = [(arrow.source, -1), *passed, (arrow.target, -1)]
        for column in range(first + 1, last):
            layers[column].append((-1, number))
        for column in range(first, last):
            one = chain[column - first]
            other = chain[column - first + 1]
            near[one, column].append(other)
            near[other, column + 1].append(one)
        chains.append([(first + i, node) for i, node in enumerate(chain)] if last > first else [])
    lines = {(column, node): float(i) for column, layer in enumerate(layers) for i, node in enumerate(layer)}
    sort_layers(layers, near, lines)
    spots = {key: (key[0], line) for key, line in lines.items()}
    places = {state: spots[column, (state, -1)] for state, column in columns.items()}
    return places, [tuple(spots[key] for key in chain) for chain in chains]


def sort_layers(
    layers: list[list[tuple[int, int]]],
    near: Mapping[tuple[tuple[int, int], int], list[tuple[int, int]]],
    lines: dict[tuple[int, tuple[int, int]], float],
) -> None:
    """Sort every layer by the mean line of its neighbours, then move it close to them. Mutates ``lines``."""
    rounds = [*range(len(layers)), *reversed(range(len(layers)))]
    for sweep in range(2 * SWEEPS):
        for column in rounds:
            wanted = {}
            for node in layers[column]:
                around = [
                    lines[side, other]
                    for other in near.get((node, column), [])
                    for side in (column - 1, column + 1)
                    if (side, other) in lines
                ]
                wanted[node] = sum(around) / len(around) if around else lines[column, node]
            if sweep < SWEEPS:
                layers[column].sort(key=wanted.__getitem__)
            for node, line in zip(layers[column], spread([wanted[n] for n in layers[column]]), strict=True):
                lines[column, node] = line
    lowest = min(lines.values())
    for key, line in lines.items():
        lines[key] = round(line - lowest, 2)  # nearly straight ways become straight


def spread(wanted: Sequence[float]) -> list[float]:
    """Return the lines nearest to ``wanted`` that keep its order and are at least 1 apart."""
    blocks: list[tuple[float, int]] = []  # mean of wanted - index, and how many share it
    for index, line in enumerate(wanted):
        mean = line - index
        count = 1
        while blocks and blocks[-1][0] > mean:
            before, many = blocks.pop()
            mean = (mean * count + before * many) / (count + many)
            count += many
        blocks.append((mean, count))
    flat = [mean for mean, count in blocks for _ in range(count)]
    return [mean + index for index, mean in enumerate(flat)]
