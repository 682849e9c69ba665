"""Slow specs in float64, one row at a time, with Python numbers: what the formulas mean, apart from any layout.

Owns: definitions. Must not know: tensors' memory, batches, the engine.
"""

import math

import torch
from torch import Tensor

Row = list[float]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide every row by its root mean square."""
    scale: Row = weight.tolist()
    rows = []
    for row in x.double().flatten(0, -2).tolist():
        rms = math.sqrt(sum(value * value for value in row) / len(row) + eps)
        rows.append([value / rms * factor for value, factor in zip(row, scale, strict=True)])
    return torch.tensor(rows, dtype=torch.float64).reshape(x.shape)


def rotate(row: Row, position: int, theta: float) -> Row:
    """Turn the pairs (i, i + D/2) of one head, as complex numbers."""
    half = len(row) // 2
    turned = list(row)
    for i in range(half):
        angle = position * math.pow(theta, -2 * i / len(row))
        z = complex(row[i], row[i + half]) * complex(math.cos(angle), math.sin(angle))
        turned[i] = z.real
        turned[i + half] = z.imag
    return turned


def attend(query: Row, keys: list[Row], values: list[Row]) -> Row:
    """Let one query of one head see all of ``keys``."""
    scores = [sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(len(query)) for key in keys]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    columns = zip(*values, strict=True)
    return [sum(w * x for w, x in zip(weights, column, strict=True)) / total for column in columns]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with the queries as the last positions. ``q`` [Hq, Tq, D], ``k``, ``v`` [Hkv, Tk, D] -> [Hq, Tq, D]."""
    queries = q.double().tolist()
    keys = k.double().tolist()
    values = v.double().tolist()
    group = len(queries) // len(keys)
    out = []
    for head, head_queries in enumerate(queries):
        head_keys, head_values = keys[head // group], values[head // group]
        ends = range(len(head_keys) - len(head_queries) + 1, len(head_keys) + 1)  # what each query sees
        seen = zip(head_queries, ends, strict=True)
        out.append([attend(query, head_keys[:end], head_values[:end]) for query, end in seen])
    return torch.tensor(out, dtype=torch.float64)


def swiglu(row: Row, gate: list[Row], up: list[Row], down: list[Row]) -> Row:
    """Compute the gated feed-forward of one row."""

    def product(matrix: list[Row], vector: Row) -> Row:
        return [sum(a * b for a, b in zip(line, vector, strict=True)) for line in matrix]

    inner = [g / (1 + math.exp(-g)) * u for g, u in zip(product(gate, row), product(up, row), strict=True)]
    return product(down, inner)
