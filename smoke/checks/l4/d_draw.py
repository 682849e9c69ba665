"""The checks of L4.D: the hash, the noise and the two draws.

Owns: probes that call ``mini_engine.sampler.draw`` and what they must give: the words of MurmurHash3, the ids of a walk
over the distribution, and counts that fit the probabilities. Needs no other lesson.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from smoke.checks.l4 import spec_distribution as spec
from smoke.framework.cases import random_tensor
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, close, differences, remember
from smoke.framework.prepared import prepared

REGISTRY = Registry()
BANNED = spec.BANNED
MEMORY = "the largest tensor that is made for 64 rows of 8,192 tokens"
MOST_BYTES = 4 * 8 * (1 << 16)  # four times what CHUNK numbers take
TOP = spec.WORD  # the largest hash

# (seed, position, token id) -> hash, as the package mmh3 computes them.
KNOWN: dict[tuple[int, int, int], int] = {
    (42, 0, 0): 1868632036,
    (42, 0, 1): 1791484015,
    (43, 0, 0): 1668824596,
    (42, 7, 151935): 2377481450,
    (0, 0, 0): 2167721464,
    (-1, 5, 3): 2679508119,
    (2**63 - 1, 100, 32000): 1168555603,
    (12345678901234, 4096, 50256): 3310812723,
    (6469398791980356130, 7371, 248146): TOP,
}


def triples(seed: int) -> list[tuple[int, int, int]]:
    """Draw triples: seeds of either sign that use both words, and some that differ in one part only."""
    rng = random.Random(f"triples {seed}")
    wide = [(rng.randrange(-(2**63), 2**63), rng.randrange(2**20), rng.randrange(2**18)) for _ in range(200)]
    return [*wide, (5, 9, 13), (9, 5, 13), (13, 9, 5), (5, 13, 9), (5 + 2**32, 9, 13), (5 - 2**63, 9, 13), (-5, 9, 13)]


def columns(rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the columns of a table as int64 tensors."""
    return [torch.tensor(column) for column in zip(*rows, strict=True)]


def hash_probe(seed: int) -> Values:
    """Hash the known triples, drawn ones, and drawn ones laid out in two dimensions; stir words one at a time."""
    from mini_engine.sampler.draw import mix, murmur3

    rng = random.Random(f"words {seed}")
    states, words = columns([(rng.randrange(2**32), rng.randrange(2**32)) for _ in range(50)])
    grid = [column[:200].reshape(20, 10) for column in columns(triples(seed))]
    return {
        "known triples": murmur3(*columns(list(KNOWN))),
        "drawn triples": murmur3(*columns(triples(seed))),
        "drawn triples [20, 10]": murmur3(*grid),
        "one word stirred in": mix(states, words),
    }


def hash_spec(seed: int) -> Values:
    """Hash one triple at a time."""
    rng = random.Random(f"words {seed}")
    drawn = torch.tensor([spec.hashed(*triple) for triple in triples(seed)])
    return {
        "known triples": torch.tensor(list(KNOWN.values())),
        "drawn triples": drawn,
        "drawn triples [20, 10]": drawn[:200].reshape(20, 10),
        "one word stirred in": torch.tensor(
            [spec.stirred(rng.randrange(2**32), rng.randrange(2**32)) for _ in range(50)]
        ),
    }


REGISTRY.add(
    "L4.D.hash",
    "Seed, position and token id are hashed as MurmurHash3 does, seeds as 64 bits without a sign.",
    hash_probe,
    bitwise(hash_spec),
)

EDGES = (0, 1, 2, 1 << 16, 1 << 31, TOP - 2, TOP - 1, TOP)


def noise_hashes(seed: int) -> list[int]:
    """Return hashes at both ends and between."""
    rng = random.Random(f"hashes {seed}")
    return [*EDGES, *(rng.randrange(2**32) for _ in range(100))]


def noise_probe(seed: int) -> Values:
    """Turn hashes into noise."""
    from mini_engine.sampler.draw import gumbel

    noise = gumbel(torch.tensor(noise_hashes(seed)))
    return {"noise": noise, "dtype": str(noise.dtype)}


def noise_spec(seed: int) -> Values:
    """Take two logarithms of each."""
    noise = torch.tensor([spec.noise(value) for value in noise_hashes(seed)], dtype=torch.float64)
    return {"noise": noise, "dtype": "torch.float64"}


REGISTRY.add(
    "L4.D.noise",
    "The noise of a hash is -log(-log(u)) in float64, and finite for the smallest and the largest hash.",
    noise_probe,
    close(noise_spec, 1e-9),
)


# Seeded -------------------------------------------------------------------------------------------------------------


def seeded_rows(seed: int) -> tuple[Tensor, list[int], list[int]]:
    """Return logits [60, 97] with seeds and positions: equal seeds, equal positions, equal logits, bans, all mixed."""
    rng = random.Random(f"seeded {seed}")
    logits = random_tensor(60, 97, seed=seed + 500) * 2.0
    logits[1:20] = logits[0]  # one distribution, drawn with other seeds and at other positions
    for row in range(20, 40):  # every third row keeps few tokens, as after top-k
        if row % 3 == 0:
            logits[row, torch.randperm(97, generator=torch.Generator().manual_seed(seed + row))[5:]] = BANNED
    seeds = [rng.randrange(-(2**63), 2**63) for _ in range(60)]
    positions = [rng.randrange(5000) for _ in range(60)]
    seeds[5:10] = [seeds[5]] * 5  # one seed at five positions
    positions[10:15] = [positions[10]] * 5  # five seeds at one position
    seeds[15:18] = [7, 7 + 2**32, 7 - 2**63]  # one low word
    positions[15:18] = [11] * 3
    return logits, seeds, positions


def crowd(seed: int) -> tuple[Tensor, list[int], list[int]]:
    """Return logits [140, 2000] of a few allowed tokens each: more numbers than are hashed at a time."""
    rng = random.Random(f"crowd {seed}")
    logits = torch.full((140, 2000), BANNED)
    for row in range(140):
        ids = rng.sample(range(2000), 12)
        logits[row, ids] = torch.tensor([rng.gauss(0, 1) for _ in ids])
    return logits, [rng.randrange(2**40) for _ in range(140)], [rng.randrange(900) for _ in range(140)]


def broad(seed: int) -> tuple[Tensor, list[int], list[int]]:
    """Return logits [3, 70001] of a few allowed tokens each, most of them behind those that are hashed at a time."""
    rng = random.Random(f"broad {seed}")
    logits = torch.full((3, 70001), BANNED)
    for row in range(3):
        ids = rng.sample(range(64000, 70001), 9)
        logits[row, ids] = torch.tensor([rng.gauss(0, 1) for _ in ids])
    return logits, [rng.randrange(2**40) for _ in range(3)], [rng.randrange(900) for _ in range(3)]


def seeded_probe(seed: int) -> Values:
    """Draw together, alone, in reverse order, among rows that were filtered, and for many rows."""
    from mini_engine.sampler.draw import draw_seeded

    logits, seeds, positions = seeded_rows(seed)
    given, others = logits.clone(), logits.clone()
    rows = [torch.tensor(seeds), torch.tensor(positions)]
    together = draw_seeded(given, *rows)
    others[1::2] = others[1::2].masked_fill(others[1::2] < others[1::2].amax(-1, keepdim=True), BANNED)
    many, many_seeds, many_positions = crowd(seed)
    wide, wide_seeds, wide_positions = broad(seed)
    return {
        "together": together,
        "row by row": torch.cat([draw_seeded(logits[i : i + 1], *(r[i : i + 1] for r in rows)) for i in range(60)]),
        "in reverse order": draw_seeded(logits.flip(0), *(r.flip(0) for r in rows)).flip(0),
        "even rows, odd ones filtered": draw_seeded(others, *rows)[::2].clone(),
        "140 rows of 2,000 tokens": draw_seeded(many, torch.tensor(many_seeds), torch.tensor(many_positions)),
        "3 rows of 70,001 tokens": draw_seeded(wide, torch.tensor(wide_seeds), torch.tensor(wide_positions)),
        "no rows": draw_seeded(logits[:0], *(row[:0] for row in rows)),
        "the caller's logits": given,
        MEMORY: most_memory(seed),
    }


class Largest(TorchFunctionMode):
    """Notes the bytes of the largest tensor that is made; views of ``given`` are not made."""

    def __init__(self, *given: Tensor) -> None:
        """Begin with nothing."""
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.bytes: int = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, and look at what comes out."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self.given:
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result


def most_memory(seed: int) -> int:
    """Draw for 64 rows of 8,192 tokens, none banned -> the bytes of the largest tensor on the way."""
    from mini_engine.sampler.draw import draw_seeded

    logits, counter = random_tensor(64, 8192, seed=seed), torch.arange(64)
    with Largest(logits, counter) as noted:
        draw_seeded(logits, counter, counter)
    largest: int = noted.bytes
    return largest


def seeded_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for the ids of each row alone, and for work in pieces."""
    largest = got[MEMORY]
    failures = differences(SEEDED(seed), {name: got[name] for name in got if name != MEMORY}, None)
    if not largest <= MOST_BYTES:
        note = f"{largest / (64 * 8192):.0f} bytes for every logit of the batch; work on about CHUNK logits at a time"
        failures.append(Failure(MEMORY, "", f"at most {MOST_BYTES:,} bytes", f"{largest:,} bytes", note))
    return failures


def seeded_spec(seed: int) -> Values:
    """Draw row by row."""
    logits, seeds, positions = seeded_rows(seed)
    ids = torch.tensor([spec.seeded(*row) for row in zip(logits.tolist(), seeds, positions, strict=True)])
    many, wide = crowd(seed), broad(seed)
    return {
        "together": ids,
        "row by row": ids,
        "in reverse order": ids,
        "even rows, odd ones filtered": ids[::2].clone(),
        "140 rows of 2,000 tokens": torch.tensor(
            [spec.seeded(*row) for row in zip(many[0].tolist(), many[1], many[2], strict=True)]
        ),
        "3 rows of 70,001 tokens": torch.tensor(
            [spec.seeded(*row) for row in zip(wide[0].tolist(), wide[1], wide[2], strict=True)]
        ),
        "no rows": ids[:0],
        "the caller's logits": logits,
    }


SEEDED = remember(seeded_spec)
REGISTRY.add(
    "L4.D.seeded",
    "A seeded draw depends on the row's logits, its seed and its position, and on nothing else in the batch. It works "
    "on about CHUNK logits at a time.",
    seeded_probe,
    seeded_verdict,
)


@prepared
def extreme_rows() -> dict[str, tuple[list[float], int, int, int]]:
    """Return logits, seed, position and the id to be drawn where a hash is the smallest or the largest.

    The seeds are made by running the hash backwards.
    """
    largest = spec.seed_of_hash(TOP, 8, 1, 77)
    smallest = spec.seed_of_hash(0, 8, 3, 5)
    return {
        "the largest hash falls on a banned token": ([1.0, BANNED, 0.0], largest, 8, -1),
        "the largest hash falls on an unlikely token": ([60.0, 0.0, 0.0, 0.0], largest, 8, 0),
        "the only token has the smallest hash": ([BANNED] * 3 + [0.0, BANNED], smallest, 8, 3),
        "the likelier token has the smallest hash": ([BANNED, 0.0, BANNED, 40.0], smallest, 8, 1),
        "the only token is the least float32": ([BANNED, -3e38, BANNED, BANNED], 42, 6, 1),
        "equals so high that float32 rounds the noise away": ([2.0**28] * 4, 42, 6, 1),
    }


def extremes_probe(seed: int) -> Values:
    """Draw each row."""
    from mini_engine.sampler.draw import draw_seeded

    return {
        name: int(draw_seeded(torch.tensor([row]), torch.tensor([own]), torch.tensor([position]))[0])
        for name, (row, own, position, _) in extreme_rows().items()
    }


def extremes_spec(seed: int) -> Values:
    """Draw from the noise, which must agree with the id that the row was made for."""
    values: Values = {}
    for name, (row, own, position, made_for) in extreme_rows().items():
        values[name] = spec.seeded(row, own, position)
        assert made_for in (-1, values[name]), f"{name}: the case is wrong"
    return values


REGISTRY.add(
    "L4.D.extremes",
    "The smallest and the largest hash give finite noise: no token is forced, forbidden or freed of its ban by it.",
    extremes_probe,
    bitwise(extremes_spec),
)

DRAWS = 20000
FAIR = {4: 23.5, 24: 58.6}  # a fair draw passes these limits of chi-square 9,999 times in 10,000
MASSES = (0.5, 0.2, 0.15, 0.1, 0.05)
SERIES: dict[str, tuple[int, int]] = {  # seeds of draw i: first + step * i; the position counts up if the step is 0
    "seed 42 at 20,000 positions": (42, 0),
    "seed 0 at 20,000 positions": (0, 0),
    "seed -12345678901 at 20,000 positions": (-12345678901, 0),
    "20,000 seeds at one position": (1000, 1),
    "20,000 seeds that differ in the high word": (3, 1 << 32),
}


def statistics_probe(seed: int) -> Values:
    """Draw 20,000 times from one distribution, along positions and along seeds."""
    from mini_engine.sampler.draw import draw_seeded

    logits = torch.tensor(MASSES).log().expand(DRAWS, len(MASSES))
    counter = torch.arange(DRAWS)
    return {
        name: draw_seeded(logits, first + step * counter, counter if step == 0 else torch.full((DRAWS,), 31))
        for name, (first, step) in SERIES.items()
    }


def statistics_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare the counts with the masses, and the counts of neighbouring pairs with their products.

    The seeds are fixed, so a correct draw passes always and not only nearly always.
    """
    row = torch.tensor(MASSES).log().tolist()
    pairs = [a + b for a in row for b in row]
    failures = []
    for name in SERIES:
        ids = got[name].tolist()
        neighbours = [5 * a + b for a, b in zip(ids[::2], ids[1::2], strict=True)]
        for what, drawn, wanted in (("counts", ids, row), ("counts of neighbouring pairs", neighbours, pairs)):
            distance = spec.chi_square(drawn, wanted)
            limit = FAIR[len(wanted) - 1]
            if not distance <= limit:
                failures.append(Failure(name, what, f"chi-square of at most {limit}", f"{distance:.1f}"))
    return failures


REGISTRY.add(
    "L4.D.statistics",
    "Twenty thousand seeded draws come as often as their probabilities say, and neighbours are independent.",
    statistics_probe,
    statistics_verdict,
)


# Unseeded -----------------------------------------------------------------------------------------------------------

PLACES = (0.02, 0.5, 0.98)


@prepared
def uniform_rows(seed: int) -> dict[str, tuple[list[float], list[tuple[float, int]]]]:
    """Return rows of logits with (uniform number, id to be drawn) for points inside every token's share."""
    plain = random_tensor(40, seed=seed + 600).tolist()
    tied = random_tensor(40, seed=seed + 601).round().tolist()
    gaps = [BANNED if token % 3 != 1 else x for token, x in enumerate(plain)]
    rows = {"forty tokens": plain, "forty tokens of few logits": tied, "two thirds banned": gaps}
    points = {name: (row, spec.share_points(row, PLACES)) for name, row in rows.items()}
    points["the ends, where tokens are banned"] = (gaps, [(0.0, 1), (1.0 - 2.0**-53, 37)])
    points["the ends, where none is"] = (plain, [(0.0, 0), (1.0 - 2.0**-53, 39)])
    lone = [BANNED, BANNED, 3.0, BANNED]
    points["one token"] = (lone, [(u, 2) for u in (0.0, 0.3, 1.0 - 2.0**-53)])
    equals = [0.0] * 25 + [BANNED]  # float32 rounds 1/25 down, so these masses sum to less than 1
    ten = [0.0] * 10 + [BANNED]  # float64 sums of 1/10 end below 1, too
    points["ten equals and a banned token"] = (ten, [(0.0, 0), (0.55, 5), (1.0 - 2.0**-53, 9)])
    points["twenty-five equals and a banned token"] = (equals, [(0.0, 0), (0.5, 12), (1.0 - 2.0**-53, 24)])
    unlikely = [0.0, -20.7]  # a mass of 1e-9 at the far end
    points["a mass of one in a billion at the end"] = (unlikely, [(1.0 - 5e-10, 1), (1.0 - 2e-9, 0)])
    points["a mass of one in a billion at the front"] = (unlikely[::-1], [(5e-10, 0), (2e-9, 1)])
    return points


def uniform_probe(seed: int) -> Values:
    """Draw each row at all its points in one batch; then all first points in one batch of different rows."""
    from mini_engine.sampler.draw import draw_uniform

    values: Values = {}
    for name, (row, points) in uniform_rows(seed).items():
        logits = torch.tensor(row).expand(len(points), len(row)).clone()
        values[name] = draw_uniform(logits, torch.tensor([u for u, _ in points], dtype=torch.float64))
        values[f"{name}: the caller's logits"] = bool(torch.equal(logits, torch.tensor(row).expand(logits.shape)))
    logits, numbers, _ = different_rows(seed)
    values["different rows"] = draw_uniform(logits, numbers)
    values["row by row"] = torch.cat([draw_uniform(logits[i : i + 1], numbers[i : i + 1]) for i in range(3)])
    return values


def different_rows(seed: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return logits [3, 40], a number for each, and the ids."""
    rows = list(uniform_rows(seed).values())[:3]
    points = [points[len(points) // 3 + index] for index, (_, points) in enumerate(rows)]
    numbers = torch.tensor([u for u, _ in points], dtype=torch.float64)
    return torch.tensor([row for row, _ in rows]), numbers, [token for _, token in points]


def uniform_spec(seed: int) -> Values:
    """Return the ids that the points were made for, which the walk must find too."""
    values: Values = {}
    for name, (row, points) in uniform_rows(seed).items():
        assert all(spec.inverse(row, u) == token for u, token in points), f"{name}: the case is wrong"
        values[name] = torch.tensor([token for _, token in points])
        values[f"{name}: the caller's logits"] = True
    values["different rows"] = values["row by row"] = torch.tensor(different_rows(seed)[2])
    return values


REGISTRY.add(
    "L4.D.uniform",
    "A number from 0 to 1 finds the token in whose share it lies, never a banned one, and unlikely ones too.",
    uniform_probe,
    bitwise(uniform_spec),
)

GRID = 20000


def grid_probe(seed: int) -> Values:
    """Draw with 20,000 evenly spaced numbers, from a small and from a large distribution."""
    from mini_engine.sampler.draw import draw_uniform

    numbers = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    small = torch.tensor(MASSES).log().expand(GRID, len(MASSES))
    large = random_tensor(2000, seed=seed + 602)
    return {"five tokens": draw_uniform(small, numbers), "2,000 tokens": counts_of(large, numbers[::10])}


def counts_of(row: Tensor, numbers: Tensor) -> Any:
    """Draw from one row, a few numbers at a time, so that no tensor is large."""
    from mini_engine.sampler.draw import draw_uniform

    return torch.cat([draw_uniform(row.expand(len(part), -1), part) for part in numbers.split(100)])


def grid_verdict(seed: int, got: Values) -> list[Failure]:
    """Every token comes as often as points of the grid lie in its share: its mass times the points, within one."""
    failures = []
    rows = {"five tokens": torch.tensor(MASSES).log(), "2,000 tokens": random_tensor(2000, seed=seed + 602)}
    for name, row in rows.items():
        ids = got[name]
        masses = spec.probabilities(row.tolist())
        counts = ids.bincount(minlength=len(masses)).tolist()
        for token, (count, mass) in enumerate(zip(counts, masses, strict=True)):
            if abs(count - mass * len(ids)) > 1.01:
                failures.append(Failure(name, f"token {token}", f"{mass * len(ids):.1f} times", f"{count} times"))
                break
        failures += differences(len(masses), len(counts), None, f"{name}: number of token ids")
    return failures


REGISTRY.add(
    "L4.D.grid",
    "Over evenly spaced numbers each token comes as often as its probability says.",
    grid_probe,
    grid_verdict,
)
