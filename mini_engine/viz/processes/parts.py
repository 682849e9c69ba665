"""What ranks keep, what a sum of parts rounds, what exchanges cost: by the lesson's own functions, and by counting."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_engine.config import ModelConfig
from mini_engine.processes.halves import column_part, gathered, keep_gate_up, keep_qkv, row_part, summed

GATHER, SUM = "gather", "sum"
WAYS = (GATHER, SUM)


@dataclass(frozen=True)
class Band:
    """Rows of a matrix that belong together: its name, the first row, how many, and the ranks that keep them."""

    name: str
    first: int
    count: int
    ranks: tuple[int, ...]


def kept_bands(config: ModelConfig, size: int) -> dict[str, list[Band]]:
    """Return for each matrix of a layer its bands from top to bottom, as the lesson's functions cut it."""
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    inner, hidden = config.intermediate_size, config.hidden_size
    sizes = {
        "q, k, v": {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width},
        "o": {"o": hidden},
        "gate, up": {"gate": inner, "up": inner},
        "down": {"down": hidden},
    }
    found = {}
    for matrix, parts in sizes.items():
        rows = torch.arange(sum(parts.values()))[:, None]
        owners: list[list[int]] = [[] for _ in rows]
        for rank in range(size):
            for row in part_of(matrix, rows, rank, size, heads, kv_heads).flatten().tolist():
                owners[row].append(rank)
        names = [name for name, count in parts.items() for _ in range(count)]
        found[matrix] = bands(names, [tuple(ranks) for ranks in owners])
    return found


def part_of(matrix: str, rows: Tensor, rank: int, size: int, heads: int, kv_heads: int) -> Tensor:
    """Return the rows of a matrix that a rank keeps."""
    if matrix == "q, k, v":
        return keep_qkv(rows, rank, size, heads, kv_heads)
    return keep_gate_up(rows, rank, size) if matrix == "gate, up" else row_part(rows, rank, size)


def bands(names: Sequence[str], owners: Sequence[tuple[int, ...]]) -> list[Band]:
    """Join neighbouring rows of one name and the same ranks."""
    found: list[Band] = []
    for row, key in enumerate(zip(names, owners, strict=True)):
        last = found[-1] if found else None
        if last and (last.name, last.ranks) == key:
            found[-1] = Band(last.name, last.first, last.count + 1, last.ranks)
        else:
            found.append(Band(key[0], row, 1, key[1]))
    return found


def differing(sizes: Sequence[int], rows: int = 64, columns: int = 1024) -> dict[str, dict[int, float]]:
    """Return by way and number of ranks which share of a product's numbers is not the exact one, rounded once.

    Whole numbers in bfloat16, whose sums are exact in float32: what differs was rounded between the ranks.
    """
    dice = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-9, 10, (rows, columns), generator=dice).bfloat16() for _ in range(2))
    exact = (x.double() @ weight.double().T).bfloat16()
    found: dict[str, dict[int, float]] = {way: {} for way in WAYS}
    for size in sizes:
        ranks = range(size)
        products = {
            GATHER: gathered(x, [row_part(weight, rank, size) for rank in ranks]),
            SUM: summed(x, [column_part(weight, rank, size) for rank in ranks]),
        }
        for way, product in products.items():
            found[way][size] = float((product != exact).double().mean())
    return found


@dataclass(frozen=True)
class Exchange:
    """What a rank does in a layer for each row of a step: how many exchanges, and the bytes that it receives."""

    count: int
    num_bytes: float


def exchanges(config: ModelConfig, size: int, itemsize: int = 2) -> dict[str, Exchange]:
    """Count the exchanges of a layer, by way. A sum goes around a ring once for the parts and once for the results."""
    hidden, inner = config.hidden_size, config.intermediate_size
    gathers = [config.num_attention_heads * config.head_dim, hidden, inner, hidden]
    share = itemsize * (size - 1) / size
    few = size > 1
    return {
        GATHER: Exchange(len(gathers) * few, share * sum(gathers)),
        SUM: Exchange(2 * few, share * 2 * 2 * hidden),
    }


@dataclass(frozen=True)
class Network:
    """A way from rank to rank: seconds that an exchange takes at least, and bytes a second."""

    name: str
    latency: float
    rate: float


def step_seconds(config: ModelConfig, size: int, network: Network, memory: float, way: str = GATHER) -> float:
    """Return how long a decode step of one row takes at least: reading a rank's weights, and all exchanges.

    On paper: bfloat16, ``memory`` bytes a second for each rank, nothing at the same time.
    """
    numbers = sum(torch.Size(shape).numel() for shape in config.weight_shapes().values())
    layer = exchanges(config, size)[way]
    per_layer = layer.count * network.latency + layer.num_bytes / network.rate
    return 2 * numbers / size / memory + config.num_hidden_layers * per_layer
