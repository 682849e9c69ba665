"""The checks of equal states that are merged (L7.D), and of the whole way from a tree to the smallest automaton.

Owns: automata with many equal states. Trees are in ``tree_cases.py``, the verdict on automata in ``c_automaton.py``. No
model.
"""

import random
from collections.abc import Sequence

from smoke.checks.l7.c_automaton import form_faults, language_faults, node_of, rows_of, tables, trimmed_faults
from smoke.checks.l7.spec_regular import DEAD, Rows, Tree, has_text, leads_to_end, num_classes, told_apart, write
from smoke.checks.l7.tree_cases import drawn, loops, pieces, repeats
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import differences
from smoke.framework.prepared import prepared

REGISTRY = Registry()

Automaton = tuple[Rows, list[bool]]
ONE_EDGE = "597 states that all differ, 289 of them in where their one edge leads alone"


def ordered(rows: Rows, accepting: Sequence[bool]) -> Automaton:
    """Drop what is not reached or leads nowhere, and number the states as they are met."""
    leads = leads_to_end(rows, accepting)
    met = [0]
    for state in met:  # grows on the way
        met += [after for after in dict.fromkeys(rows[state]) if after != DEAD and leads[after] and after not in met]
    number = {state: index for index, state in enumerate(met)}
    return [[number.get(after, DEAD) for after in rows[state]] for state in met], [accepting[state] for state in met]


def draw_automaton(rng: random.Random, size: int, columns: int, copies: int) -> Automaton:
    """Draw an automaton and put several copies in place of each state, so that many are equal."""
    rows = [[rng.choice([DEAD, *range(size)]) for _ in range(columns)] for _ in range(size)]
    ends = [rng.random() < 0.4 for _ in range(size)]
    ends[rng.randrange(size)] = True
    of = [state for state in range(size) for _ in range(rng.randint(1, copies))]
    twins = {state: [index for index, one in enumerate(of) if one == state] for state in range(size)}
    blown = [[DEAD if after == DEAD else rng.choice(twins[after]) for after in rows[state]] for state in of]
    return ordered(blown, [ends[state] for state in of])


def numbers_that_differ(most: int) -> Automaton:
    """Return an automaton in which state n of 1 to ``most`` reads the bits of n, so that no two are equal."""
    end = most + 1
    rows = [[n // 2 or DEAD, end if n % 2 else DEAD, n - 1 or DEAD] for n in range(1, end)]
    return [[DEAD, DEAD, most], *rows, [DEAD] * 3], [*[False] * end, True]


def one_edge_each(width: int) -> Automaton:
    """Return an automaton of two times ``width`` ** 2 states and few more, and no two are equal.

    Half of them differ in nothing but the state that their one edge leads to, and these read the bits of their numbers.
    """
    count = width * width
    targets, end = 1 + width + count, 1 + width + 2 * count
    root = list(range(1, 1 + width))
    middle = [[1 + width + n for n in range(first, first + width)] for first in range(0, count, width)]
    sources = [[targets + n, *[DEAD] * (width - 1)] for n in range(count)]
    bits = [[end if (n + 1) >> bit & 1 else DEAD for bit in range(width)] for n in range(count)]
    return [root, *middle, *sources, *bits, [DEAD] * width], [*[False] * end, True]


@prepared
def to_merge(seed: int) -> dict[str, Automaton]:
    """Return automata: made by hand, chains whose states only a long text tells apart, and drawn ones."""
    rng = random.Random(f"merge {seed}")
    cases: dict[str, Automaton] = {
        "one state": ([[0, DEAD]], [True]),
        "one state, no edge": ([[DEAD, DEAD]], [True]),
        "all alike": ([[1, 2], [2, 0], [0, 1]], [True] * 3),
        "all accept, one has less": ([[1, 2], [2, DEAD], [0, 1]], [True] * 3),
        "an edge that is missing": ([[1, 2], [3, 3], [3, DEAD], [DEAD, DEAD]], [False, False, False, True]),
        "an edge that is missing, where others lead on": (
            [[1, 2], [3, 4], [3, -1], [-1, -1], [3, 5], [3, 6], [3, 4]],
            [*[False] * 3, True, *[False] * 3],
        ),
        "the start accepts": ([[1], [2], [1]], [True, False, True]),
        "the start does not": ([[1], [0]], [False, True]),
        "twins after a choice": ([[1, 2], [3, -1], [4, -1], [-1, -1], [-1, -1]], [False, False, False, True, True]),
        "three accept in two ways, and four of the others differ": (
            [[1, 2], [3, 4], [-1, -1], [0, 5], [0, 5], [6, 7], [1, 2], [0, 7]],
            [True, True, True, False, False, False, True, False],
        ),
        "many alike accept, and each of the few others differs": (
            [[1, 2, DEAD], [3, DEAD, 4], [DEAD, 5, 6], *[[DEAD] * 3] * 4],
            [*[False] * 3, *[True] * 4],
        ),
        "twins that lead to each other": ([[1, 2], [2, 3], [1, 3], [DEAD, DEAD]], [False, False, False, True]),
    }
    # States 1 and 2 differ in what column 69 leads to, states 3 and 4 in what column 0 does, and 6 is a twin of 1.
    edges = [{0: 1, 1: 2, 2: 6}, {69: 3}, {69: 4}, {0: 5, 69: 5}, {0: 3, 69: 5}, {}, {69: 3}]
    many = [[leads.get(column, DEAD) for column in range(70)] for leads in edges]
    cases["70 columns, of which the first and the last tell states apart"] = (many, [state == 5 for state in range(7)])
    cases["302 states, and all of them differ"] = numbers_that_differ(300)
    cases[ONE_EDGE] = one_edge_each(17)
    for length in (5, 30):
        chain = [[state + 1, DEAD] for state in range(length)] + [[DEAD, DEAD]]
        cases[f"a chain of {length}"] = (chain, [False] * length + [True])
        circle = [[(state + 1) % (2 * length)] for state in range(2 * length)]
        cases[f"a circle of {2 * length} that repeats"] = (circle, [state % length == 0 for state in range(2 * length)])
    for number in range(25):
        cases[f"drawn {number}"] = draw_automaton(
            rng, rng.choice([1, 2, 4, 7]), rng.choice([1, 2, 3]), rng.choice([1, 3, 5])
        )
    return cases


def merge_probe(seed: int) -> Values:
    """Merge, and look whether what was given is as it was."""
    import numpy as np

    from mini_engine.grammar.automata.automaton import minimise

    values: Values = {}
    for name, (rows, ends) in to_merge(seed).items():
        given = np.array(rows, dtype=np.int32)
        accepting = np.array(ends, dtype=np.bool_)
        values[name] = tables(*minimise(given, accepting), range(len(rows[0])))
        values[f"{name}, given"] = given.tolist() == rows and accepting.tolist() == ends
    return values


def pair_fault(old: Automaton, new: Automaton) -> str:
    """Walk through both at once, and return the columns of a text about which they differ; empty if there is none."""
    seen = {(0, 0)}
    waiting = [(0, 0, "")]
    for left, right, path in waiting:  # grows on the way
        ends = [state != DEAD and automaton[1][state] for state, automaton in ((left, old), (right, new))]
        if ends[0] != ends[1] or (left == DEAD) != (right == DEAD):
            return path or "the empty text"
        for column in range(len(old[0][0])) if left != DEAD else ():
            after = old[0][left][column], new[0][right][column]
            if after not in seen:
                seen.add(after)
                waiting.append((*after, f"{path} {column}"))
    return ""


def same_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for the same language from state 0 on, of what was given and what came."""
    failures: list[Failure] = []
    for name, old in to_merge(seed).items():
        faults = form_faults(got[name], name)
        new = (rows_of(got[name]), got[name]["accepting"])
        path = "" if faults else pair_fault(old, new)
        if path:
            faults = [Failure(name, f"bytes of the classes {path}", "the same as before", f"{new[0]}, {new[1]}"[:200])]
        failures += faults + differences(True, got[f"{name}, given"], None, f"{name}, what was given is unchanged")
    return failures[:6]


def smallest_verdict(seed: int, got: Values) -> list[Failure]:
    """Count the states that are told apart, pair by pair. Of the largest automaton the number is known."""
    failures: list[Failure] = []
    for name, (rows, ends) in to_merge(seed).items():
        count = len(rows) if name == ONE_EDGE else num_classes(rows, ends)
        failures += differences(count, len(got[name]["accepting"]), None, f"{name}, states")
    return failures[:6]


def whole_trees(seed: int) -> list[Tree]:
    """Return trees of every kind that have a text."""
    trees = [*pieces(seed)[::3], *repeats(seed)[::5], *loops(seed)[::3], *drawn(seed)[::6]]
    return [tree for tree in {write(tree): tree for tree in trees}.values() if has_text(tree)]


def compile_probe(seed: int) -> Values:
    """Go the whole way."""
    from mini_engine.grammar.automata.automaton import compile_node

    values: Values = {}
    for tree in whole_trees(seed):
        dfa = compile_node(node_of(tree))
        values[write(tree)] = tables(dfa.transitions, dfa.accepting, range(256))
    return values


def compile_verdict(seed: int, got: Values) -> list[Failure]:
    """Read short texts, and look for two states that nothing tells apart."""
    failures: list[Failure] = []
    for tree in whole_trees(seed):
        name = write(tree)
        values = got[write(tree)]
        faults = language_faults(values, tree, "abc", 5) or trimmed_faults(values, name)
        if not faults:
            columns = [list(column) for column in dict.fromkeys(zip(*rows_of(values), strict=True))]
            apart = told_apart([list(row) for row in zip(*columns, strict=True)], values["accepting"])
            equal = [(a, b) for a in range(len(apart)) for b in range(a) if not apart[a][b]]
            faults = [Failure(name, "states that no text tells apart", "none", str(equal))] if equal else []
        failures += faults
    return failures[:6]


REGISTRY.add(
    "L7.D.same",
    "Merging changes no text's verdict, whatever stands in the table, and the start is state 0 again.",
    merge_probe,
    same_verdict,
)
REGISTRY.add(
    "L7.D.smallest",
    "As many states are left as texts tell apart, not one more, also when only a long text does.",
    merge_probe,
    smallest_verdict,
)
REGISTRY.add(
    "L7.D.compile",
    "A compiled tree accepts exactly its texts, with a column for every byte and no two states that are equal.",
    compile_probe,
    compile_verdict,
    needs=("L7.C",),
)
