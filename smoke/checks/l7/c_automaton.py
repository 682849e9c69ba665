"""The checks of automata: from a tree to states (L7.C).

Owns: automata made by hand, and the verdict on a table, which is walked here and not by the candidate. The trees are in
``tree_cases.py``. No model.
"""

import random
from collections.abc import Callable
from typing import Any

import torch

from smoke.checks.l7.spec_regular import (
    DEAD,
    Rows,
    Tree,
    either,
    has_text,
    leads_to_end,
    matches,
    reachable,
    run,
    seq,
    text,
    texts,
    times,
    write,
)
from smoke.checks.l7.tree_cases import HARD, A, B, dead_ends, drawn, loops, pieces, repeats, wide
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences

REGISTRY = Registry()
LIMIT = 2000
MOST_PARTS = 100_000  # of a graph; what is built here has at most 10,000
Trees = Callable[[int], list[Tree]]


# A candidate's automaton ----------------------------------------------------------------------------------------------


def node_of(tree: Tree) -> Any:
    """Return the engine's tree."""
    from mini_engine.grammar.automata.syntax import Chars, Choice, Concat, Repeat

    kind, *rest = tree
    if kind == "chars":
        return Chars(rest[0])
    if kind == "repeat":
        return Repeat(node_of(rest[0]), *rest[1:])
    return (Concat if kind == "concat" else Choice)(tuple(map(node_of, rest)))


def tables(table: Any, accepting: Any, classes: Any) -> Values:
    """Return an automaton as plain values."""
    return {
        "table": torch.tensor([[int(after) for after in row] for row in table], dtype=torch.int32),
        "accepting": [bool(accepts) for accepts in accepting],
        "dtypes": f"{table.dtype} and {accepting.dtype}",
        "classes": [int(number) for number in classes],
    }


def build(tree: Tree, limit: int = LIMIT) -> Values:
    """Build the candidate's automaton, equal states not merged, or tell which error it raised."""
    from mini_engine.grammar.automata.automaton import Nfa, byte_classes, determinise
    from mini_engine.grammar.base import GrammarError

    class CopiesOfNothingError(GrammarError):
        """So many parts were added, and no limit of states was met."""

    class CountingNfa(Nfa):
        """Counts its parts: a copy of the empty text adds no state, so that no limit of states ends the copying."""

        num_parts = 0

        def add(self, node: Any, start: int) -> int:
            self.num_parts += 1
            if self.num_parts > MOST_PARTS:
                raise CopiesOfNothingError
            return super().add(node, start)

    try:
        nfa = CountingNfa(limit)
        begin = nfa.state()
        end = nfa.add(node_of(tree), begin)
        classes = byte_classes(nfa)
        return tables(*determinise(nfa, begin, end, classes), classes)
    except GrammarError as error:
        return {"error": type(error).__name__}


def build_probe(trees: Trees) -> Callable[[int], Values]:
    """Return a probe that builds trees."""
    return lambda seed: {write(tree): build(tree) for tree in trees(seed)}


def rows_of(values: Values) -> Rows:
    """Return the table with a column per byte."""
    table = values["table"].tolist()
    return [[row[number] for number in values["classes"]] for row in table]


def form_faults(values: Values, name: str) -> list[Failure]:
    """Ask for a table whose entries are states, and classes that are its columns."""
    if "error" in values:
        return [Failure(name, "", "an automaton", values["error"])]
    table = values["table"]
    size = len(values["accepting"])
    columns = table.shape[1] if table.dim() == 2 else -1
    if table.dim() != 2 or len(table) != size or not size:
        return [Failure(name, "table", f"[{size}, classes]", str(list(table.shape)))]
    if values["dtypes"] != "int32 and bool":
        return [Failure(name, "dtypes of the table and of who accepts", "int32 and bool", values["dtypes"])]
    if columns <= max(values["classes"]) or not bool(((table >= DEAD) & (table < size)).all()):
        return [
            Failure(name, "table", f"states from {DEAD} to {size - 1}, a column per class", str(table.tolist())[:200])
        ]
    return []


def language_faults(values: Values, tree: Tree, alphabet: str, longest: int) -> list[Failure]:
    """Read every short text, and return the first one about which the automaton errs."""
    name = write(tree)
    faults = form_faults(values, name)
    if faults:
        return faults
    rows = rows_of(values)
    accepting = values["accepting"]
    words = {True: "it matches", False: "it does not match"}
    for string, expected in texts(tree, alphabet, longest):
        state = run(rows, string.encode())
        got = state != DEAD and accepting[state]
        if got != expected:
            return [Failure(name, f"the text {string!r}", words[expected], words[got])]
    return []


def spelling_faults(values: Values, tree: Tree, rng: random.Random, walks: int = 60) -> list[Failure]:
    """Walk at random: whatever is accepted is UTF-8, and matches."""
    rows = rows_of(values)
    accepting = values["accepting"]
    for _ in range(walks):
        data = b""
        state = 0
        for _ in range(12):
            if accepting[state]:
                string = data.decode(errors="replace")
                if string.encode() != data or not matches(tree, string):
                    return [Failure(write(tree), "accepted bytes", "a text that matches", repr(data))]
            live = [byte for byte in range(256) if rows[state][byte] != DEAD]
            if not live:
                break
            byte = rng.choice(live)
            data = data + bytes([byte])
            state = rows[state][byte]
    return []


def trimmed_faults(values: Values, name: str) -> list[Failure]:
    """Ask that every state is reached, and leads to an accepting one."""
    rows = rows_of(values)
    accepting = values["accepting"]
    failures = []
    lost = [state for state, leads in enumerate(leads_to_end(rows, accepting)) if not leads]
    if lost:
        failures.append(Failure(name, "states without a way to an accepting one", "none", f"states {lost}"))
    unreached = sorted(set(range(len(rows))) - reachable(rows))
    if unreached:
        failures.append(Failure(name, "states that no text leads to", "none", f"states {unreached}"))
    return failures


def language_verdict(trees: Trees, alphabet: str, longest: int) -> Callable[[int, Values], list[Failure]]:
    """Return a verdict on every tree's automaton; a tree without any text must have been refused."""

    def verdict(seed: int, got: Values) -> list[Failure]:
        failures: list[Failure] = []
        rng = random.Random(f"walks {seed}")
        for tree in trees(seed):
            values = got[write(tree)]
            if not has_text(tree):
                failures += differences(
                    {"error": "GrammarError"}, values, None, f"{write(tree)}, which matches no text"
                )
                continue
            faults = language_faults(values, tree, alphabet, longest)
            failures += faults or spelling_faults(values, tree, rng) + trimmed_faults(values, write(tree))
        return failures[:6]

    return verdict


# L7.C ---------------------------------------------------------------------------------------------------------------


Graph = list[list[int]]


def skip_graphs(seed: int) -> dict[str, Graph]:
    """Return which states lead where without a byte: chains, circles, and drawn ones."""
    rng = random.Random(f"skips {seed}")
    graphs: dict[str, Graph] = {
        "no skips": [[], [], []],
        "a chain": [[1], [2], [3], []],
        "a circle": [[1], [2], [0], [0]],
        "to itself": [[0], [1, 0]],
        "two ways": [[1, 2], [3], [3], []],
        "circles that touch": [[1], [2, 3], [0], [4], [3]],
        "a chain of 3000": [[state + 1] for state in range(2999)] + [[]],
    }
    for number in range(20):
        size = rng.choice([3, 6, 12])
        graphs[f"drawn {number}"] = [rng.sample(range(size), rng.choice([0, 1, 1, 2])) for _ in range(size)]
    return graphs


def asked_states(graph: Graph) -> list[int]:
    """Return the states whose closure is asked for: all but those in the middle of a long chain."""
    return [state for state in range(len(graph)) if state < 20 or state >= len(graph) - 3]


def closure_probe(seed: int) -> Values:
    """Ask for closures, and for one again after a skip was added."""
    from mini_engine.grammar.automata.automaton import Nfa

    values: Values = {}
    for name, graph in skip_graphs(seed).items():
        nfa = Nfa(LIMIT, [[] for _ in graph], [list(after) for after in graph])
        values[name] = [sorted(int(after) for after in nfa.closure(state)) for state in asked_states(graph)]
        values[f"{name}, as it was"] = nfa.skips == graph
        after = nfa.join([0])
        values[f"{name}, and a skip from 0 to {after}"] = sorted(int(each) for each in nfa.closure(0))
    return values


def closure_spec(seed: int) -> Values:
    """Go around until nothing is new."""
    values: Values = {}
    for name, graph in skip_graphs(seed).items():
        found = [reached(graph, state) for state in asked_states(graph)]
        values[name] = found
        values[f"{name}, as it was"] = True
        values[f"{name}, and a skip from 0 to {len(graph)}"] = [*found[0], len(graph)]
    return values


def reached(graph: Graph, state: int) -> list[int]:
    """Return the states that skips lead to from one."""
    seen, new = {state}, {state}
    while new:
        new = {after for one in new for after in graph[one]} - seen
        seen |= new
    return sorted(seen)


Edges = list[list[tuple[tuple[int, int], int]]]


def hand_made(seed: int) -> dict[str, tuple[Edges, Graph]]:
    """Return edges over bytes and skips of automata that no tree would give; the last state is the end."""
    rng = random.Random(f"automata {seed}")
    found: dict[str, tuple[Edges, Graph]] = {
        "nothing but a skip": ([[], []], [[1], []]),
        "no way to the end": ([[((97, 97), 0)], []], [[], []]),
        "two ranges that overlap": ([[((97, 100), 1), ((99, 102), 0)], []], [[], []]),
        "all bytes": ([[((0, 255), 1)], [((0, 0), 0), ((255, 255), 1)]], [[], []]),
        "a circle of skips with edges": ([[((97, 97), 1)], [], [((98, 98), 3)], []], [[1], [2], [0], []]),
        "the end goes on": ([[((97, 97), 1)], [((98, 98), 0)]], [[], []]),
    }
    for number in range(40):
        size = rng.choice([2, 4, 6])
        edges: Edges = [[] for _ in range(size)]
        for _ in range(rng.choice([size, 2 * size])):
            first, last = sorted(rng.choices(range(97, 103), k=2))
            edges[rng.randrange(size)].append(((first, last), rng.randrange(size)))
        skips = [rng.sample(range(size), rng.choice([0, 0, 0, 1, 2])) for _ in range(size)]
        found[f"drawn {number}"] = (edges, skips)
    return found


def sets_probe(seed: int) -> Values:
    """Make them deterministic."""
    from mini_engine.grammar.automata.automaton import Nfa, byte_classes, determinise
    from mini_engine.grammar.base import GrammarError

    values: Values = {}
    for name, (edges, skips) in hand_made(seed).items():
        nfa = Nfa(LIMIT, [list(leads) for leads in edges], [list(after) for after in skips])
        classes = byte_classes(nfa)
        values[f"{name}, classes"] = [int(number) for number in classes]
        try:
            values[name] = tables(*determinise(nfa, 0, len(edges) - 1, classes), classes)
        except GrammarError as error:
            values[name] = {"error": type(error).__name__}
    return values


def follow(edges: Edges, skips: Graph, byte: int | None, states: set[int]) -> set[int]:
    """Return where an automaton may be that was in ``states`` before a byte; ``None`` is no byte at all."""
    if byte is not None:
        states = {after for state in states for (first, last), after in edges[state] if first <= byte <= last}
    while True:
        wider = states | {after for state in states for after in skips[state]}
        if wider == states:
            return states
        states = wider


def sets_verdict(seed: int, got: Values) -> list[Failure]:
    """Follow all states at once through every short byte string, and the table with them."""
    failures: list[Failure] = []
    for name, (edges, skips) in hand_made(seed).items():
        values = got[name]
        words = f"{name}: edges {edges}, skips {skips}"
        if not leads_on(edges, skips):
            failures += differences({"error": "GrammarError"}, values, None, f"{words}, without any text")
            continue
        faults = form_faults(values, words) or pair_faults(edges, skips, values, words)
        failures += faults or trimmed_faults(values, words)
    return failures[:6]


def leads_on(edges: Edges, skips: Graph) -> bool:
    """Whether the last state can be reached from the first."""
    seen = {0}
    for _ in edges:
        seen |= {after for state in seen for after in [*skips[state], *(target for _, target in edges[state])]}
    return len(edges) - 1 in seen


def pair_faults(edges: Edges, skips: Graph, values: Values, words: str) -> list[Failure]:
    """Return the first byte string about which a table and the sets of states differ."""
    rows = rows_of(values)
    accepting = values["accepting"]
    end = len(edges) - 1
    waiting = [(b"", follow(edges, skips, None, {0}), 0)]
    for data, states, state in waiting:  # grows on the way
        got = state != DEAD and accepting[state]
        if got != (end in states):
            return [Failure(words, f"after {data!r}", f"it may be in {sorted(states)}", f"accepted: {got}")]
        for byte in b"abcdef\x00\xff" if len(data) < 4 and (states or state != DEAD) else b"":
            after = DEAD if state == DEAD else rows[state][byte]
            waiting.append((data + bytes([byte]), follow(edges, skips, byte, states), after))
    return []


def classes_verdict(seed: int, got: Values) -> list[Failure]:
    """End a class exactly where a range begins or has ended."""
    failures: list[Failure] = []
    for name, (edges, _) in hand_made(seed).items():
        ranges = [pair for leads in edges for pair, _ in leads]
        number = 0
        expected = []
        for byte in range(256):
            if byte and any(byte in (first, last + 1) for first, last in ranges):
                number += 1
            expected.append(number)
        failures += differences(
            expected, got[f"{name}, classes"], None, f"{name}, ranges {sorted(set(ranges))}, classes"
        )
    return failures[:4]


def limit_cases() -> dict[str, tuple[Tree, int, str]]:
    """Return trees with a limit and what is raised; a text of n characters needs n + 1 states."""
    some = either(A, B)
    far = "TooManyStatesError"
    many = 200
    circles = either(*[times(times(A, length, length), 0) for length in (10, 11) for _ in range(100)])
    skips = either(*[times(text(""), 0)] * 50)
    return {
        "6 characters, 7 states": (text("abcdef"), 7, ""),
        "6 characters, 6 states": (text("abcdef"), 6, far),
        "1 state": (times(A, 0), 2, ""),
        "2 characters, 1 state": (text("ab"), 1, far),
        "the 12th from the end": (seq(times(some, 0), A, times(some, 12, 12)), 500, far),
        "1000 copies": (times(A, 1000, 1000), many, far),
        "ten million copies": (times(A, 0, 10**7), 50, far),
        "copies of copies": (times(times(times(A, 99, 99), 99, 99), 99, 99), 300, far),
        "ten million times nothing": (times(text(""), 10**7, 10**7), 1, ""),
        "up to ten million times nothing": (times(text(""), 0, 10**7), 1, ""),
        "200 copies, 201 states": (times(A, many, many), 201, ""),
        "200 copies, 200 states": (times(A, many, many), many, far),
        "110 sets of 200 members each": (circles, many, far),
        "100 closures of 100 members each": (seq(either(*[A] * 100), skips), 20, far),
    }


def limit_probe(seed: int) -> Values:
    """Build under limits."""
    return {name: build(tree, limit).get("error", "") for name, (tree, limit, _) in limit_cases().items()}


REGISTRY.add(
    "L7.C.closure",
    "The closure of a state is itself and all that skips lead to, around circles and along 3000 states.",
    closure_probe,
    bitwise(closure_spec),
)
REGISTRY.add(
    "L7.C.classes",
    "Two neighbouring bytes are in different classes exactly where a range of an edge begins or has ended.",
    sets_probe,
    classes_verdict,
)
REGISTRY.add(
    "L7.C.sets",
    "The deterministic automaton is after any bytes in the set of all states that the other one can be in.",
    sets_probe,
    sets_verdict,
)
REGISTRY.add(
    "L7.C.pieces",
    "Characters, sequences and choices, empty ones too, accept exactly the texts that match.",
    build_probe(pieces),
    language_verdict(pieces, "abc", 5),
)
REGISTRY.add(
    "L7.C.repeats",
    "A repeat matches every number of times within its bounds and no other, also of what may be empty.",
    build_probe(repeats),
    language_verdict(repeats, "abc", 6),
)
REGISTRY.add(
    "L7.C.loops",
    "Loops stay apart from what comes before, next to and after them, and work inside each other.",
    build_probe(loops),
    language_verdict(loops, "abc", 6),
)
REGISTRY.add(
    "L7.C.drawn",
    "Sixty drawn trees, nested four deep, accept exactly the texts that match.",
    build_probe(drawn),
    language_verdict(drawn, "abc", 5),
)
REGISTRY.add(
    "L7.C.wide",
    "Characters of two to four bytes are read whole: nothing but UTF-8 of texts that match is accepted.",
    build_probe(wide),
    language_verdict(wide, HARD, 3),
)
REGISTRY.add(
    "L7.C.dead_ends",
    "No state is a dead end, so any byte that is allowed can still become a text; a tree without any text is refused.",
    build_probe(dead_ends),
    language_verdict(dead_ends, "abc", 4),
)
REGISTRY.add(
    "L7.C.limit",
    "An automaton of as many states as allowed is built, one of more is refused, and soon enough.",
    limit_probe,
    bitwise(lambda seed: {name: error for name, (_, _, error) in limit_cases().items()}),
)
