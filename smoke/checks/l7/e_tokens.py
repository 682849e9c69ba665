"""The checks of the walk of all tokens at once (L7.E).

Owns: vocabularies and tables of transitions; the verdict walks token by token. No automaton is built, no mask packed.
"""

import random
from typing import Any

import torch

from smoke.checks.l7.spec_regular import DEAD, Rows, run, table_of, table_of_words
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences
from smoke.framework.prepared import prepared

REGISTRY = Registry()
Walk = tuple[list[bytes], Rows]

DIGITS = "0123456789"
NUMBERS = table_of([{DIGITS: 1}, {DIGITS: 1, ",": 2}, {DIGITS: 1}])  # [0-9]+(,[0-9]+)*
SPELLINGS = b"7|71|,|7,|,7|12,34,5|,,|12,|a||7a|7||0|9|  |12,34,5".split(b"|")


@prepared
def small_walks(seed: int) -> dict[str, Walk]:
    """Return vocabularies that can be read, among them none at all."""
    words = table_of_words(["yes", "no", "été", "10 €", "naïve"])[0]
    parts = [
        word.encode() for word in ("y", "ye", "yes", "es", "s", "n", "no", "o", "é", "ét", "té", "t", "10", " €", "€")
    ]
    halves = [
        b"\xc3",
        b"\xa9",
        b"\xc3\xa9t\xc3",
        b"\xe2",
        b"\xe2\x82",
        b"\x82\xac",
        b"\xac",
        b"na\xc3",
        b"\xafve",
        b"\xff",
    ]
    twisted = table_of([{"a": 1, "b": 2}, {"a": 0}, {(0, 255): 2}])
    return {
        "numbers": (SPELLINGS, NUMBERS),
        "words": (parts, words),
        "parts of characters": ([*halves, *parts], words),
        "no tokens": ([], NUMBERS),
        "only empty ones": ([b"", b"", b""], NUMBERS),
        "one token": ([b"7,7"], NUMBERS),
        "one token that may never come": ([b"x"], NUMBERS),
        "one byte": ([b"7"], NUMBERS),
        "equal tokens": ([b"7"] * 40, NUMBERS),
        "the last state takes all": ([b"a", b"ab", b"aa", b"aab", b"b", b"bx", b"bxy", b"c", b"cb", b"cbb"], twisted),
        "all single bytes": ([bytes([byte]) for byte in range(256)], twisted),
        "bytes 0 and 255": (
            [b"\x00", b"\xff", b"\x00\xff", b"\xff\x00", b"\x00\x00"],
            table_of([{0: 1, 255: 2}, {255: 1}, {0: 0, 255: 2}]),
        ),
    }


def drawn_walks(seed: int) -> dict[str, Walk]:
    """Draw vocabularies and tables, from one in which hardly anything may come to one in which all may."""
    walks: dict[str, Walk] = {}
    for share in (0.02, 0.1, 0.25, 0.5, 0.9, 1.0):
        for letters, longest, count in ((4, 9, 300), (40, 4, 500), (256, 3, 400)):
            rng = random.Random(f"walks {seed} {share} {letters}")
            alphabet = rng.sample(range(256), letters)
            tokens = [bytes(rng.choices(alphabet, k=rng.randint(0, longest))) for _ in range(count)]
            rows = [[rng.randrange(5) if rng.random() < share else DEAD for _ in range(256)] for _ in range(4)]
            walks[f"{share:.0%} of the bytes may come, {letters} letters, {count} tokens"] = (
                tokens,
                [*rows, [rng.randrange(5) for _ in range(256)]],
            )
    return walks


@prepared
def long_walks(seed: int) -> dict[str, Walk]:
    """Return tokens of up to 70 bytes, one of which may come to its end; the others fail at every depth."""
    rng = random.Random(f"long {seed}")
    word = "".join(rng.choices("abcdef", k=70))
    tokens = [word[:end].encode() for end in (1, 2, 9, 33, 69, 70)] + [(word + "a").encode(), word[1:].encode()]
    for place in range(0, 70, 3):
        tokens.append((word[:place] + "-" + word[place + 1 :]).encode())
    crowd = [bytes(rng.choices(b"uvwxyz", k=5)) for _ in range(400)]
    rows, _ = table_of_words([word])
    return {"70 bytes": (tokens, rows), "70 bytes among many that may never come": ([*crowd, *tokens], rows)}


WALKS = {"small": small_walks, "drawn": drawn_walks, "long": long_walks}


def walk_probe(kind: str) -> Any:
    """Return a probe that walks from every state of every table."""

    def probe(seed: int) -> Values:
        import numpy as np

        from mini_engine.grammar.automata.trie import TokenTrie

        values: Values = {}
        for name, (tokens, rows) in WALKS[kind](seed).items():
            trie = TokenTrie(tuple(tokens))
            transitions = np.array(rows, dtype=np.int32)
            found = [trie.allowed(transitions, state) for state in range(len(rows))]
            again = trie.allowed(transitions, 0)
            same = again.tolist() == found[0].tolist()
            again[:] = ~again  # what was given out belongs to the caller
            values[name] = [[int(token) for token in np.flatnonzero(row)] for row in found]
            values[f"{name}, form"] = [list(found[0].shape), str(found[0].dtype)]
            values[f"{name}, again, after the caller wrote into the answer"] = [
                same,
                trie.allowed(transitions, 0).tolist() == found[0].tolist(),
                transitions.tolist() == rows,
            ]
            refusing = trie.allowed(np.full_like(transitions, DEAD), 0)
            values[f"{name}, with another table, in which no byte may come"] = bool(refusing.any())
            # Each of these is gone before the next is made, often in the same memory.
            tables = (np.full((1, 256), after, dtype=np.int32) for after in (0, DEAD, DEAD, 0))
            counts = [int(trie.allowed(table, 0).sum()) for table in tables]
            values[f"{name}, with tables of one state that take all, none, none and all"] = counts
        return values

    return probe


def walk_spec(kind: str) -> Any:
    """Return a spec that walks token by token."""

    def spec(seed: int) -> Values:
        values: Values = {}
        for name, (tokens, rows) in WALKS[kind](seed).items():
            values[name] = [
                [token for token, text in enumerate(tokens) if text and run(rows, text, state) != DEAD]
                for state in range(len(rows))
            ]
            values[f"{name}, form"] = [[len(tokens)], "bool"]
            values[f"{name}, again, after the caller wrote into the answer"] = [True, True, True]
            values[f"{name}, with another table, in which no byte may come"] = False
            spelled = sum(map(bool, tokens))
            takes = [spelled, 0, 0, spelled]
            values[f"{name}, with tables of one state that take all, none, none and all"] = takes
        return values

    return spec


def levels_of(tokens: list[bytes]) -> list[list[bytes]]:
    """Return the beginnings of tokens by length, in order: the nodes of each level."""
    longest = max(map(len, tokens))
    return [sorted({text[:end] for text in tokens if len(text) >= end}) for end in range(1, longest + 1)]


def steps(seed: int) -> dict[str, tuple[list[bytes], Rows, int, list[int]]]:
    """Return vocabularies with a level and the states of its nodes; from one live node to all of them."""
    rng = random.Random(f"steps {seed}")
    cases: dict[str, tuple[list[bytes], Rows, int, list[int]]] = {}
    for number in range(24):
        alphabet = rng.sample(range(256), rng.choice([3, 12]))
        tokens = [bytes(rng.choices(alphabet, k=rng.randint(1, 6))) for _ in range(rng.choice([30, 200]))]
        rows = [[rng.choice([DEAD, 0, 1, 2]) for _ in range(256)] for _ in range(2)]
        rows.append([rng.randrange(3) for _ in range(256)])
        levels = levels_of(tokens)
        depth = rng.randrange(len(levels) - 1)
        share = rng.choice([0.0, 0.1, 0.2, 0.3, 0.6, 1.0])
        states = [rng.randrange(3) if rng.random() < share else DEAD for _ in levels[depth]]
        states[rng.randrange(len(states))] = rng.randrange(3)
        name = f"step {number}, level {depth}, {sum(state != DEAD for state in states)} of {len(states)} nodes live"
        cases[name] = (tokens, rows, depth, states)
    return cases


def follow_probe(seed: int) -> Values:
    """Take single steps."""
    import numpy as np

    from mini_engine.grammar.automata.trie import TokenTrie, follow

    values: Values = {}
    for name, (tokens, rows, depth, given) in steps(seed).items():
        levels = TokenTrie(tuple(tokens)).levels
        states = np.array(given, dtype=np.int32)
        transitions = np.array(rows, dtype=np.int32)
        after = follow(transitions, states, states != DEAD, levels[depth + 1])
        values[name] = [int(state) for state in after]
        values[f"{name}, dtype"] = str(after.dtype)
        values[f"{name}, given"] = states.tolist() == given and transitions.tolist() == rows
    return values


def follow_spec(seed: int) -> Values:
    """Ask every node of the next level for the one above it."""
    values: Values = {}
    for name, (tokens, rows, depth, states) in steps(seed).items():
        levels = levels_of(tokens)
        above = dict(zip(levels[depth], states, strict=True))
        values[name] = [run(rows, node[-1:], above[node[:-1]]) for node in levels[depth + 1]]
        values[f"{name}, dtype"] = "int32"
        values[f"{name}, given"] = True
    return values


def sizes_probe(seed: int) -> Values:
    """Walk through a large vocabulary from states in which few, half and all tokens may come."""
    import numpy as np

    from mini_engine.grammar.automata.trie import TokenTrie

    tokens, rows = large_walk(seed)
    trie = TokenTrie(tuple(tokens))
    transitions = np.array(rows, dtype=np.int32)
    return {f"state {state}": torch.from_numpy(trie.allowed(transitions, state).copy()) for state in range(len(rows))}


@prepared
def large_walk(seed: int) -> Walk:
    """Return 20,000 tokens, and states in which a letter, an alphabet, half of the bytes and every byte may come."""
    rng = random.Random(f"large {seed}")
    letters = b"etaoinshrdlu ETAOIN.,0123456789"
    tokens = [bytes(rng.choices(letters, k=rng.randint(1, 8))) for _ in range(20_000)]
    return tokens, table_of([{"e": 1}, {"etaoin": 2}, {(0, 0x40): 2, "e": 3}, {(0, 255): 3}])


def sizes_verdict(seed: int, got: Values) -> list[Failure]:
    """Walk token by token."""
    tokens, rows = large_walk(seed)
    failures: list[Failure] = []
    for state in range(len(rows)):
        expected = torch.tensor([run(rows, text, state) != DEAD for text in tokens])
        failures += differences(expected, got[f"state {state}"], None, f"20,000 tokens, state {state}")
    return failures


REGISTRY.add(
    "L7.E.tokens",
    "Tokens may come exactly if their bytes lead to a live state: several characters, half of one, equal ones, none.",
    walk_probe("small"),
    bitwise(walk_spec("small")),
)
REGISTRY.add(
    "L7.E.drawn",
    "Drawn vocabularies walk as token by token, whether hardly any byte may come or every one.",
    walk_probe("drawn"),
    bitwise(walk_spec("drawn")),
)
REGISTRY.add(
    "L7.E.long",
    "Tokens of up to 70 bytes are followed to their ends, and no further than they may be.",
    walk_probe("long"),
    bitwise(walk_spec("long")),
)
REGISTRY.add(
    "L7.E.follow",
    "One step takes the children of live nodes to their states and leaves those of dead nodes dead.",
    follow_probe,
    bitwise(follow_spec),
)
REGISTRY.add(
    "L7.E.sizes",
    "A vocabulary of 20,000 tokens walks as token by token, from states that allow few of them and all of them.",
    sizes_probe,
    sizes_verdict,
)
