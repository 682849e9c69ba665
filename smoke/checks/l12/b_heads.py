"""The checks of layers by heads (L12.B): what a rank keeps, and that ranks in turn compute the whole. No model.

Owns: layers of whole numbers, an attention that shows which heads met, and products of whole matrices.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from smoke.checks.l12.a_parts import attempt, whole_numbers
from smoke.framework.cases import DTYPES
from smoke.framework.check import Registry, Values
from smoke.framework.compare import bitwise, close

REGISTRY = Registry()
KV = ((4, 1), (4, 2), (4, 4), (2, 4), (2, 8), (1, 3), (1, 1), (8, 2), (3, 2), (2, 3), (6, 4), (4, 6))  # heads, ranks
# query heads, key-value heads, head dim, ranks
HEADS = ((4, 2, 3, 2), (8, 2, 2, 4), (8, 4, 2, 2), (6, 6, 2, 3), (4, 1, 5, 4), (6, 3, 2, 1), (8, 2, 3, 8), (9, 3, 1, 3))
NOT_SHARED = ((6, 2, 2, 4), (6, 6, 2, 4), (6, 2, 2, 3))
COLUMNS, OUTS = 8, 24  # OUTS: a multiple of all numbers of ranks
MLPS = ((12, 1), (12, 2), (24, 4), (6, 3), (8, 8))  # inner features, ranks


def kv_probe(seed: int) -> Values:
    """Ask for every rank's key-value heads."""
    from mini_engine.processes.halves import kv_share

    values: Values = {}
    for heads, size in KV:
        for rank in range(size):
            own = attempt(partial(kv_share, heads, rank, size))
            kept = list(range(heads)[own]) if isinstance(own, slice) else str(own)
            values[f"{heads} key-value heads, rank {rank} of {size}"] = kept
    return values


def kv_spec(seed: int) -> Values:
    """Let every rank have the heads that its query heads see, where there are as many of these as ranks times heads."""
    values: Values = {}
    for heads, size in KV:
        for rank in range(size):
            seen = sorted({query // size for query in range(heads * size) if query // heads == rank})
            refused = heads % size and size % heads
            values[f"{heads} key-value heads, rank {rank} of {size}"] = "ValueError" if refused else seen
    return values


REGISTRY.add(
    "L12.B.kv",
    "Key-value heads are shared like others; where there are fewer than ranks, neighbouring ranks keep the same one.",
    kv_probe,
    bitwise(kv_spec),
)


def stacks(seed: int) -> dict[str, tuple[Tensor, tuple[int, int, int, int]]]:
    """Return stacks [q; k; v] of different numbers, with their heads."""
    found = {}
    for dtype, kind in DTYPES.items():
        for heads, kv_heads, width, size in HEADS:
            stack = whole_numbers(seed, ((heads + 2 * kv_heads) * width, COLUMNS), 99).to(kind)
            found[f"{dtype}, {heads} query and {kv_heads} key-value heads of {width}, {size} ranks"] = (
                stack,
                (heads, kv_heads, width, size),
            )
    return found


def kept(name: str, parts: list[Tensor]) -> Values:
    """Return what the parts hold and how much, then overwrite them: a stack that they are views of would show it."""
    held = [part.untyped_storage().nbytes() for part in parts]
    values: Values = {name: [part.clone() for part in parts], f"{name}, bytes that the parts hold in memory": held}
    for part in parts:
        part.zero_()
    return values


def qkv_probe(seed: int) -> Values:
    """Ask for every rank's part of every stack."""
    from mini_engine.processes.halves import keep_qkv

    values: Values = {}
    for name, (stack, (heads, kv_heads, _, size)) in stacks(seed).items():
        parts = [keep_qkv(stack, rank, size, heads, kv_heads) for rank in range(size)]
        values |= kept(name, parts)
        values[f"{name}, the stack after its parts were overwritten"] = stack
    for heads, kv_heads, width, size in NOT_SHARED:
        stack = torch.ones((heads + 2 * kv_heads) * width, COLUMNS)
        found = attempt(partial(keep_qkv, stack, 0, size, heads, kv_heads))
        values[f"{heads} query and {kv_heads} key-value heads, {size} ranks"] = str(found)
    return values


def qkv_spec(seed: int) -> Values:
    """Go through the rank's query heads, and the key-value heads that they see, row by row."""
    values: Values = {}
    for name, (stack, (heads, kv_heads, width, size)) in stacks(seed).items():
        parts = []
        for rank in range(size):
            queries = [head for head in range(heads) if head * size // heads == rank]
            seen = sorted({head * kv_heads // heads for head in queries})
            first = {"q": 0, "k": heads, "v": heads + kv_heads}
            order = [first["q"] + head for head in queries]
            order += [first[kind] + head for kind in "kv" for head in seen]
            parts.append(stack[[head * width + row for head in order for row in range(width)]])
        values[name] = parts
        held = [part.numel() * part.element_size() for part in parts]
        values[f"{name}, bytes that the parts hold in memory"] = held
        values[f"{name}, the stack after its parts were overwritten"] = stack
    for heads, kv_heads, _, size in NOT_SHARED:
        values[f"{heads} query and {kv_heads} key-value heads, {size} ranks"] = "ValueError"
    return values


REGISTRY.add(
    "L12.B.qkv",
    "Of the stack [q; k; v] a rank keeps its query heads and the key and value heads that these see, and nothing else "
    "in memory; heads that ranks cannot share are a ValueError.",
    qkv_probe,
    bitwise(qkv_spec),
)


def gate_up_probe(seed: int) -> Values:
    """Ask for every rank's part of stacks [gate; up]."""
    from mini_engine.processes.halves import keep_gate_up

    values: Values = {}
    for inner, size in MLPS:
        stack = whole_numbers(seed + inner, (2 * inner, COLUMNS), 99)
        parts = [keep_gate_up(stack, rank, size) for rank in range(size)]
        name = f"gate and up of {inner} features, {size} ranks"
        values |= kept(name, parts)
        values[f"{name}, the stack after its parts were overwritten"] = stack
    values["gate and up of 6 features, 4 ranks"] = str(attempt(partial(keep_gate_up, torch.ones(12, 4), 0, 4)))
    return values


def gate_up_spec(seed: int) -> Values:
    """Take the same rows of both halves."""
    values: Values = {}
    for inner, size in MLPS:
        stack = whole_numbers(seed + inner, (2 * inner, COLUMNS), 99)
        own = [[row for row in range(inner) if row * size // inner == rank] for rank in range(size)]
        parts = [stack[[*rows, *(inner + row for row in rows)]] for rows in own]
        name = f"gate and up of {inner} features, {size} ranks"
        values[name] = parts
        held = [part.numel() * part.element_size() for part in parts]
        values[f"{name}, bytes that the parts hold in memory"] = held
        values[f"{name}, the stack after its parts were overwritten"] = stack
    return values | {"gate and up of 6 features, 4 ranks": "ValueError"}


REGISTRY.add(
    "L12.B.gate_up",
    "Of the stack [gate; up] a rank keeps the same rows of each, in memory of its own: first gate, then up.",
    gate_up_probe,
    bitwise(gate_up_spec),
)


def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Stand in for attention: whole numbers that show which heads met, and which was key and which value."""
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    return q * k.sign() + 3 * v


def attention_inputs(seed: int, case: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rows, the stack [q; k; v] and o."""
    heads, kv_heads, width, _ = case
    x = whole_numbers(seed, (5, COLUMNS), 4)
    stack = whole_numbers(seed + 1, ((heads + 2 * kv_heads) * width, COLUMNS), 4)
    return x, stack, whole_numbers(seed + 2, (OUTS * case[3], heads * width), 4)


def attention_probe(seed: int) -> Values:
    """Compute with ranks in turn, and note the shapes that attention saw."""
    from mini_engine.processes.halves import attention_of_ranks

    values: Values = {}
    for case in HEADS:
        heads, kv_heads, _, size = case
        given = attention_inputs(seed, case)
        shapes: list[Any] = []

        def attend(q: Tensor, k: Tensor, v: Tensor, shapes: list[Any] = shapes) -> Tensor:
            """Note what came."""
            shapes.append([list(each.shape) for each in (q, k, v)])
            return mixed(q, k, v)

        name = f"heads, key-value heads, head dim, ranks: {case}"
        values[name] = attention_of_ranks(*given, size, heads, kv_heads, attend)
        values[f"{name}, shapes of q, k and v by rank"] = shapes
        values[f"{name}, what was given afterwards"] = list(given)
    return values


def attention_spec(seed: int) -> Values:
    """Compute the whole at once, in float64."""
    values: Values = {}
    for case in HEADS:
        heads, kv_heads, width, size = case
        given = attention_inputs(seed, case)
        x, stack, o = (each.double() for each in given)
        sizes = [heads, kv_heads, kv_heads]
        out = mixed(*(x @ stack.T).unflatten(-1, (-1, width)).split(sizes, dim=1))
        name = f"heads, key-value heads, head dim, ranks: {case}"
        values[name] = (out.flatten(1) @ o.T).float()
        own = max(kv_heads // size, 1)
        shapes = [[5, heads // size, width], [5, own, width], [5, own, width]]
        values[f"{name}, shapes of q, k and v by rank"] = [shapes] * size
        values[f"{name}, what was given afterwards"] = list(given)
    return values


REGISTRY.add(
    "L12.B.attention",
    "Ranks in turn, each with its own heads, give what the whole attention adds to a layer, to the bit: sums of whole "
    "numbers, for as many key-value heads as ranks, more and fewer.",
    attention_probe,
    bitwise(attention_spec),
)


def mlp_inputs(seed: int, inner: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rows, the stack [gate; up] and down."""
    generator = torch.Generator().manual_seed(seed + inner)
    draw = partial(torch.randn, generator=generator)
    return draw(7, COLUMNS), draw(2 * inner, COLUMNS), draw(5 * size, inner)


def mlp_probe(seed: int) -> Values:
    """Compute with ranks in turn."""
    from mini_engine.processes.halves import mlp_of_ranks

    values: Values = {}
    for inner, size in MLPS:
        given = mlp_inputs(seed, inner, size)
        before = [each.clone() for each in given]
        values[f"{inner} features, {size} ranks"] = mlp_of_ranks(*given, size)
        same = all(torch.equal(*pair) for pair in zip(given, before, strict=True))
        values[f"{inner} features, {size} ranks, what was given is as it was"] = same
    return values


def mlp_spec(seed: int) -> Values:
    """Compute the whole at once, in float64."""
    values: Values = {}
    for inner, size in MLPS:
        x, stack, down = (each.double() for each in mlp_inputs(seed, inner, size))
        gate, up = x @ stack[:inner].T, x @ stack[inner:].T
        values[f"{inner} features, {size} ranks"] = (gate / (1 + (-gate).exp()) * up) @ down.T
        values[f"{inner} features, {size} ranks, what was given is as it was"] = True
    return values


REGISTRY.add(
    "L12.B.mlp",
    "Ranks in turn, each with its own rows of gate and up, give what the whole MLP adds to a layer.",
    mlp_probe,
    close(mlp_spec, 2e-5),
)
