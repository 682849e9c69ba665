"""The checks of what a router believes that a worker holds (L12.C): a set of beginnings, after every operation.

Owns: operations on a tree, and the same on a plain set of tuples.
"""

import random
from collections.abc import Sequence
from typing import Any

from smoke.framework.check import Registry, Values, noting
from smoke.framework.compare import bitwise

REGISTRY = Registry()
RUNS, STEPS = 30, 14
LATE = 3  # tokens that are asked beyond what was inserted
Operation = tuple[str, list[int], int]  # what is done, with which tokens, and for `dropped` from which length on


def drawn_tokens(rng: random.Random) -> list[int]:
    """Draw a few tokens of a small vocabulary, so that beginnings are shared."""
    return [rng.choice([0, 0, 1, 2]) for _ in range(rng.choice([0, 1, 2, 3, 5, 8]))]


def operations(seed: int, run: int) -> list[Operation]:
    """Draw what happens to a tree: insertions, and drops of what was inserted, of a part of it, or of more."""
    rng = random.Random(f"tree {seed} {run}")
    seen: list[list[int]] = [[]]
    steps: list[Operation] = []
    for _ in range(STEPS):
        if rng.random() < 0.55:
            tokens = rng.choice(seen)[: rng.randint(0, 6)] + drawn_tokens(rng)
            seen.append(tokens)
            steps.append(("insert", tokens, 0))
        else:
            tokens = list(rng.choice(seen)) + drawn_tokens(rng) * rng.choice([0, 0, 1])
            steps.append(("dropped", tokens, rng.randint(0, len(tokens))))
    return steps


def questions(steps: Sequence[Operation], rng: random.Random) -> list[list[int]]:
    """Return texts to look up: all that were named, what goes on behind them, and others."""
    named = [list(tokens) for _, tokens, _ in steps]
    longer = [tokens + [rng.randint(0, 3) for _ in range(LATE)] for tokens in named[:5]]
    return [[], *named, *longer, [9, 9], [0, 9, 0]]


def tree_probe(seed: int) -> Values:
    """Do everything on two trees, of which the second is told half of it; look everything up after each step."""
    from mini_engine.processes.routing import Tree

    values: Values = {}
    for run in range(RUNS):
        steps = operations(seed, run)
        asked = questions(steps, random.Random(f"asked {seed} {run}"))
        trees = Tree(), Tree()
        with noting() as done:
            for number, (kind, tokens, length) in enumerate(steps):
                kept = tuple(tokens) if run % 2 else list(tokens)
                done.append(f"{kind} {tokens}" + (f" from {length} on" if kind == "dropped" else ""))
                for tree in trees if number % 2 else trees[:1]:
                    tree.insert(kept) if kind == "insert" else tree.dropped(kept, length)
                values[f"run {run}, after {done[-1]}, step {number}"] = [
                    [int(tree.match(text)) for text in asked] for tree in trees
                ]
                values[f"run {run}, step {number}, the tokens afterwards"] = list(kept)
    return values


def apply(held: set[tuple[int, ...]], operation: Operation) -> None:
    """Do the same to a set of beginnings. Mutates."""
    kind, tokens, length = operation
    if kind == "insert":
        held.update(tuple(tokens[:count]) for count in range(len(tokens) + 1))
    elif length < len(tokens):
        gone = tuple(tokens[: length + 1])
        held -= {each for each in held if each[: length + 1] == gone}


def longest(held: set[tuple[int, ...]], text: Sequence[int]) -> int:
    """Return how many tokens of ``text`` are a beginning that is held."""
    return max(count for count in range(len(text) + 1) if count == 0 or tuple(text[:count]) in held)


def tree_spec(seed: int) -> Values:
    """Look everything up in sets."""
    values: Values = {}
    for run in range(RUNS):
        steps = operations(seed, run)
        asked = questions(steps, random.Random(f"asked {seed} {run}"))
        sets: tuple[Any, ...] = (set(), set())
        for number, step in enumerate(steps):
            kind, tokens, length = step
            for held in sets if number % 2 else sets[:1]:
                apply(held, step)
            words = f"{kind} {tokens}" + (f" from {length} on" if kind == "dropped" else "")
            values[f"run {run}, after {words}, step {number}"] = [
                [longest(held, text) for text in asked] for held in sets
            ]
            values[f"run {run}, step {number}, the tokens afterwards"] = list(tokens)
    return values


REGISTRY.add(
    "L12.C.tree",
    "After every insertion and every drop a tree finds the longest beginning of any text that a plain set of all "
    "beginnings finds; two trees know nothing of each other.",
    tree_probe,
    bitwise(tree_spec),
)
