"""The checks of L8.G and L8.J: the largest logit, the seeded draw and the penalties, each as a kernel.

Owns: rows that lie apart in poisoned memory, and what the specs of L4 choose from them. Every kernel runs with blocks
that are smaller than its rows.
"""

import math
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smoke.checks.l4 import spec_distribution as spec
from smoke.checks.l4.d_draw import EDGES, KNOWN, extreme_rows, triples
from smoke.checks.l8.guard import ON_GPU, apart, bits, followed_by, gaps_of, guarded, set_for_now, with_signs
from smoke.framework.cases import random_tensor
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, close, differences
from smoke.framework.prepared import prepared

REGISTRY = Registry()
BANNED = -math.inf
BLOCK = 64  # of columns, for a probe: rows of a few blocks stay small
WIDTHS = (1, 2, 63, 64, 65, 150)


# Argmax -------------------------------------------------------------------------------------------------------------


def plain_rows(seed: int) -> dict[str, Tensor]:
    """Return rows of every width, negative ones among them: the largest is nowhere a zero of the padding."""
    rows = {}
    for width in WIDTHS:
        x = random_tensor(3, width, seed=seed + width) - torch.tensor([[0.0], [9.0], [3.0]])
        rows[f"{width} columns"] = x
        rows[f"{width} columns, float16"] = x.half()
    return rows


def odd_rows() -> dict[str, Tensor]:
    """Return rows of 200 with equals within a block and across blocks, both zeros, infinities and NaN."""
    x = random_tensor(1, 200, seed=5).abs().neg().expand(11, 200).clone()
    x[0, [70, 71, 150]] = 2.0
    x[1, [5, 199]] = 2.0
    x[2, [60, 130]] = torch.tensor([-0.0, 0.0])
    x[3, [60, 130]] = torch.tensor([0.0, -0.0])
    x[4] = 5.0
    x[5] = BANNED
    x[6] = BANNED
    x[6, 199] = -3.4e38
    x[7, [150, 180]] = math.inf
    x[8, [140, 170]] = math.nan
    x[8, 3] = math.inf
    x[9, 130] = -math.nan  # with the bit of the sign
    x[10, [64, 127, 128]] = 0.5
    names = (
        "equals in two blocks",
        "equals far apart",
        "-0.0 before 0.0",
        "0.0 before -0.0",
        "all equal",
        "all banned",
        "one token, at the end",
        "two infinities",
        "NaN after infinity",
        "NaN with a sign",
        "equals at a border",
    )
    return {name: x[row : row + 1].clone() for row, name in enumerate(names)}


def largest_of(op: Any, rows: Tensor) -> Values:
    """Run the kernel over rows that lie apart, among numbers larger than all of theirs."""
    with guarded(math.nan) as guard:
        values, ids = op.argmax(guard.stretch("the logits", apart(rows, 1000.0)))
    return {"values": values, "ids": ids, ON_GPU: guard.faults()}


def first_largest(row: list[float]) -> int:
    """Return the first NaN; if there is none, the first of the largest."""
    return next((i for i, x in enumerate(row) if math.isnan(x)), row.index(max(row)))


def largest_by_hand(rows: Tensor) -> Values:
    """Choose row by row."""
    ids = [first_largest(row) for row in rows.tolist()]
    return {
        "values": rows[range(len(ids)), ids].float(),
        "ids": torch.tensor(ids),
        ON_GPU: [],
    }


def argmax_probe(seed: int) -> Values:
    """Find the largest of plain rows."""
    import mini_engine.kernels.argmax as op

    with set_for_now(op, BLOCK=BLOCK):
        values = {name: largest_of(op, rows) for name, rows in plain_rows(seed).items()}
        none = op.argmax(torch.zeros(0, 8))
    return {**values, "no rows": [list(part.shape) for part in none]}


def argmax_spec(seed: int) -> Values:
    """Choose."""
    return {**{name: largest_by_hand(rows) for name, rows in plain_rows(seed).items()}, "no rows": [[0], [0]]}


REGISTRY.add(
    "L8.G.argmax",
    "The largest logit of every row and its id, whatever the width, the dtype and what lies between the rows.",
    argmax_probe,
    bitwise(argmax_spec),
)


def ties_probe(seed: int) -> Values:
    """Find the largest of odd rows, one by one and together."""
    import mini_engine.kernels.argmax as op

    rows = odd_rows()
    with set_for_now(op, BLOCK=BLOCK):
        values, ids = op.argmax(torch.cat(list(rows.values())))
    return {name: tie_values(values[row : row + 1], ids[row : row + 1]) for row, name in enumerate(rows)}


def tie_values(value: Tensor, token: Tensor) -> list[Any]:
    """Return a value [1] with its id [1], and whether it is the zero with a sign."""
    return [value, int(token[0]), with_signs(value)["minus zeros"]]


def ties_spec(seed: int) -> Values:
    """Choose."""
    found = {name: largest_by_hand(row) for name, row in odd_rows().items()}
    return {name: tie_values(best["values"], best["ids"]) for name, best in found.items()}


REGISTRY.add(
    "L8.G.ties",
    "Among equals the lowest id wins, also across blocks and between both zeros; NaN wins over everything.",
    ties_probe,
    bitwise(ties_spec),
)


# The seeded draw ----------------------------------------------------------------------------------------------------


def hash_probe(seed: int) -> Values:
    """Hash the known triples and drawn ones."""
    import mini_engine.kernels.gumbel as op

    with set_for_now(op, BLOCK=256), guarded(math.nan) as guard:
        known, drawn = (
            op.hash_tokens(*(torch.tensor(column) for column in zip(*rows, strict=True)))
            for rows in (list(KNOWN), triples(seed))
        )
    return {"known triples": known, "drawn triples": drawn, ON_GPU: guard.faults()}


def hash_spec(seed: int) -> Values:
    """Hash one triple at a time."""
    return {
        "known triples": torch.tensor(list(KNOWN.values())),
        "drawn triples": torch.tensor([spec.hashed(*triple) for triple in triples(seed)]),
        ON_GPU: [],
    }


REGISTRY.add(
    "L8.G.hash",
    "Seed, position and token id are hashed as MurmurHash3 does, in 32-bit words that wrap and shift without a sign.",
    hash_probe,
    bitwise(hash_spec),
)


def noise_hashes(seed: int) -> list[int]:
    """Return 64 hashes, the smallest and the largest among them."""
    rng = random.Random(f"noise {seed}")
    return [*EDGES, *(rng.randrange(2**32) for _ in range(64 - len(EDGES)))]


def noise_probe(seed: int) -> Values:
    """Turn hashes into noise."""
    from mini_engine.kernels.gumbel import gumbel
    from smoke.checks.l8.probes import noise_kernel

    hashes = noise_hashes(seed)
    noise = torch.full((len(hashes),), math.nan, dtype=torch.float64)
    noise_kernel[(1,)](gumbel, torch.tensor(hashes), noise, len(hashes))
    return {"noise": noise}


def noise_spec(seed: int) -> Values:
    """Take two logarithms of each."""
    return {"noise": torch.tensor([spec.noise(value) for value in noise_hashes(seed)], dtype=torch.float64)}


REGISTRY.add(
    "L8.G.noise",
    "The noise of a hash is -log(-log(u)) in float64, and finite for the smallest and the largest hash.",
    noise_probe,
    close(noise_spec, 1e-12),
)


def seeded_rows(seed: int) -> tuple[Tensor, list[int], list[int]]:
    """Return logits [9, 130], seeds and positions: rows alike with other seeds and positions, filtered rows, one id.

    In the rows 3 and 4 whole blocks are empty, as after top-k; row 5 has one token; rows 6 to 8 have a seed in common.
    """
    rng = random.Random(f"seeded {seed}")
    logits = random_tensor(9, 130, seed=seed + 900) * 2.0
    logits[0] -= 1000.0  # far below 0, and not empty
    logits[1:3] = logits[0]
    for row in (3, 4):
        logits[row, torch.randperm(130, generator=torch.Generator().manual_seed(seed + row))[3:]] = BANNED
    logits[5] = BANNED
    logits[5, 129] = -50.0
    seeds = [rng.randrange(-(2**63), 2**63) for _ in range(9)]
    positions = [rng.randrange(5000) for _ in range(9)]
    seeds[1] = seeds[0]
    positions[2] = positions[0]  # the row 0 with another position, and with another seed
    seeds[6:] = [7, 7 + 2**32, 7 - 2**63]
    positions[6:] = [11, 11, 11]  # one low word
    return logits, seeds, positions


def draw_probe(seed: int) -> Values:
    """Draw together, in rows that lie apart, in reverse order and alone."""
    import mini_engine.kernels.gumbel as op

    logits, *rest = seeded_rows(seed)
    seeds, positions = (torch.tensor(column) for column in rest)
    with set_for_now(op, BLOCK=BLOCK), guarded(math.nan) as guard:
        together = op.draw_seeded(guard.stretch("the logits", apart(logits, 1000.0)), seeds, positions)
        backwards = op.draw_seeded(logits.flip(0), seeds.flip(0), positions.flip(0)).flip(0)
        alone = [op.draw_seeded(*(part[i : i + 1] for part in (logits, seeds, positions))) for i in (0, 4, 8)]
        none = op.draw_seeded(logits[:0], seeds[:0], positions[:0])
        narrow = [op.draw_seeded(logits[:2, :width].contiguous(), seeds[:2], positions[:2]) for width in (1, 65)]
    return {
        "together": together,
        "in reverse order": backwards,
        "rows 0, 4 and 8 alone": torch.cat(alone),
        "no rows": list(none.shape),
        "1 and 65 columns": torch.cat(narrow),
        ON_GPU: guard.faults(),
    }


def draw_spec(seed: int) -> Values:
    """Draw row by row."""
    logits, seeds, positions = seeded_rows(seed)
    ids = torch.tensor([spec.seeded(*row) for row in zip(logits.tolist(), seeds, positions, strict=True)])
    narrow = [
        spec.seeded(logits[row, :width].tolist(), seeds[row], positions[row]) for width in (1, 65) for row in (0, 1)
    ]
    return {
        "together": ids,
        "in reverse order": ids,
        "rows 0, 4 and 8 alone": ids[[0, 4, 8]],
        "no rows": [0],
        "1 and 65 columns": torch.tensor(narrow),
        ON_GPU: [],
    }


REGISTRY.add(
    "L8.G.draw",
    "A seeded draw gives the token of the specs, from its logits, seed and position alone, also after a filter.",
    draw_probe,
    bitwise(draw_spec),
)


@prepared
def odd_draws() -> dict[str, tuple[list[float], int, int, int]]:
    """Return rows, seeds and positions: with extreme hashes, and with two scores that only float64 tells apart."""
    for own in range(1000):
        first, second = (spec.noise(spec.hashed(own, 8, token)) for token in (0, 1))
        row = torch.tensor([1000.0, 1000.0 + first - second])
        scores = row + torch.tensor([first, second])
        if row[1].item() + second > 1000.0 + first and scores[1] <= scores[0]:
            return {**extreme_rows(), "two scores that are equal in float32": (row.tolist(), own, 8, 1)}
    raise AssertionError("no seed has such scores")


def extremes_probe(seed: int) -> Values:
    """Draw where a hash is the smallest or the largest; then a row of equals, and one without any token."""
    import mini_engine.kernels.gumbel as op

    values: Values = {
        name: int(op.draw_seeded(torch.tensor([row]), torch.tensor([own]), torch.tensor([position]))[0])
        for name, (row, own, position, _) in odd_draws().items()
    }
    given = torch.full((1, 150), BANNED), torch.tensor([3]), torch.tensor([4])
    with set_for_now(op, BLOCK=BLOCK):
        values["a row without tokens, 0 where nothing is loaded"] = int(op.draw_seeded(*given)[0])
        with guarded():
            values["a row without tokens, NaN where nothing is loaded"] = int(op.draw_seeded(*given)[0])
    return values


def extremes_spec(seed: int) -> Values:
    """Draw from the noise."""
    drawn = {name: spec.seeded(row, own, position) for name, (row, own, position, _) in odd_draws().items()}
    return {**drawn, **{f"a row without tokens, {other} where nothing is loaded": 0 for other in ("0", "NaN")}}


REGISTRY.add(
    "L8.G.extremes",
    "The smallest and the largest hash give finite noise: no token is forced, forbidden or freed of its ban by it; "
    "scores are compared in float64.",
    extremes_probe,
    bitwise(extremes_spec),
)

DRAWS = 50
FAIR = 18.4  # of 2 degrees of freedom: a fair draw passes 9,999 times in 10,000
MASSES = (0.55, 0.3, 0.15)


def statistics_probe(seed: int) -> Values:
    """Draw from one distribution along positions, and along seeds."""
    import mini_engine.kernels.gumbel as op

    logits = torch.tensor(MASSES).log().repeat(DRAWS, 1)
    counter = torch.arange(DRAWS)
    return {
        "positions of seed 42": op.draw_seeded(logits, torch.full((DRAWS,), 42), counter),
        "seeds at one position": op.draw_seeded(logits, counter, torch.full((DRAWS,), 31)),
    }


def statistics_verdict(seed: int, got: Values) -> list[Failure]:
    """Compare counts with masses. The seeds are fixed, so a right draw passes always."""
    failures = []
    for name, ids in got.items():
        distance = spec.chi_square(ids.tolist(), torch.tensor(MASSES).log().tolist())
        if not distance <= FAIR:
            failures.append(Failure(name, "counts", f"chi-square of at most {FAIR}", f"{distance:.1f}"))
    return failures + differences(2, len(got), None, "series")


REGISTRY.add(
    "L8.G.statistics",
    "Seeded draws come as often as their probabilities say, along positions and along seeds.",
    statistics_probe,
    statistics_verdict,
)


# Penalties ----------------------------------------------------------------------------------------------------------

# Repetition, frequency, presence of six rows; the last is off.
STRENGTHS = ((1.3, 0.37, 0.71), (0.7, -0.4, 0.0), (1.0, 0.1, 0.0), (1.0, 0.0, -1.3), (1.9, 0.0, 0.0), (1.0, 0.0, 0.0))
NAMES = ("rows", "token_ids", "counts", "repetition", "frequency", "presence")
OFTEN = (128.0, 257.0, 300.0, 40_000.0, 70_000.0)  # counts beyond 7, 8, 15 and 16 bits
BEHIND = (0, 0, 9, 7.0, 7.0, 7.0)  # what a thread without an entry would read: it would change the first logit


def penalty_logits(seed: int, width: int) -> Tensor:
    """Draw logits [6, V] of both signs, zeros and bans among them."""
    logits = random_tensor(len(STRENGTHS), width, seed=seed + width) * 7
    logits[:, width // 2] = BANNED
    logits[:, 0] = -0.0
    return logits


def entries(seed: int, width: int) -> list[Tensor]:
    """Return the entries of 2 V places, no pair twice, in no order, in memory with a trap after."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(len(STRENGTHS) * width, generator=generator)[: 2 * width]
    rows = places // width
    token_ids = places % width
    counts = torch.randint(0, 5, (len(places),), generator=generator).float()
    counts[::7] = torch.tensor(OFTEN)[torch.arange(len(counts[::7])) % len(OFTEN)]
    counts[token_ids == 0] = 0.0  # where the logit is -0.0: 0 times a negative strength is -0.0, too
    columns = [rows, token_ids, counts, *torch.tensor(STRENGTHS)[rows].T.contiguous()]
    return [followed_by(column, behind) for column, behind in zip(columns, BEHIND, strict=True)]


def penalised(logits: Tensor, given: list[Tensor]) -> Tensor:
    """Do the arithmetic in float32, one rounded operation at a time."""
    out = logits.numpy().copy()
    columns = [column.numpy() for column in given]
    for row, token, count, repeat, often, ever in zip(*columns, strict=True):
        x = out[row, token]
        if repeat != 1:
            x = x / repeat if x > 0 else x * repeat
        if often != 0:
            x = x - often * count
        if ever != 0:
            x = x - ever * np.float32(count > 0)
        out[row, token] = x
    return torch.from_numpy(out)


def penalties_probe(seed: int) -> Values:
    """Penalise rows of every width, in memory of their own and apart."""
    import mini_engine.kernels.penalties as op

    values: Values = {}
    with set_for_now(op, BLOCK=BLOCK):
        for width in (1, 50, 300):
            logits = penalty_logits(seed, width)
            given = entries(seed, width)
            lying_apart = apart(logits)
            op.apply_penalties(logits, *given)
            with guarded() as guard:
                kept = [
                    guard.put(name, part, margin=behind)
                    for name, part, behind in zip(NAMES, given, BEHIND, strict=True)
                ]
                op.apply_penalties(guard.stretch("the logits", lying_apart), *kept)
            values[f"{width} columns, {ON_GPU}"] = guard.faults()
            values[f"{width} columns"] = with_signs(logits)
            values[f"{width} columns, rows apart"] = with_signs(lying_apart)
            values[f"{width} columns, the gaps"] = bool(gaps_of(lying_apart).isnan().all())
    return values


def penalties_spec(seed: int) -> Values:
    """Penalise entry by entry."""
    values: Values = {}
    for width in (1, 50, 300):
        want = with_signs(penalised(penalty_logits(seed, width), entries(seed, width)))
        values |= {f"{width} columns": want, f"{width} columns, rows apart": want, f"{width} columns, the gaps": True}
        values[f"{width} columns, {ON_GPU}"] = []
    return values


REGISTRY.add(
    "L8.J.bits",
    "Every entry has the bits of repetition, frequency and presence in this order, and no other logit changes.",
    penalties_probe,
    bitwise(penalties_spec),
)

ODD = (-0.0, 1e-42, math.nan, BANNED, math.inf)
SIGNALLING = (0x7F800001, -0x7FFFFF)  # NaN that any arithmetic changes, even a division by 1


def odd_logits() -> Tensor:
    """Return logits [1, 7] that arithmetic may change."""
    return torch.cat((torch.tensor(ODD), torch.tensor(SIGNALLING, dtype=torch.int32).view(torch.float32)))[None]


def off_probe(seed: int) -> Values:
    """Penalise odd logits with strengths that are off, and without entries at all."""
    import mini_engine.kernels.penalties as op

    logits = odd_logits()
    other = random_tensor(2, 9, seed=seed)
    count = logits.shape[1]
    numbers = [torch.full((count,), x) for x in (3.0, 1.0, 0.0, 0.0)]
    with np.errstate(invalid="ignore"):
        op.apply_penalties(logits, torch.zeros(count, dtype=torch.int64), torch.arange(count), *numbers)
    nothing = torch.zeros(0)
    op.apply_penalties(other, nothing.long(), nothing.long(), *[nothing] * 4)
    return {"off": bits(logits), "no entries": with_signs(other)}


def off_spec(seed: int) -> Values:
    """Change nothing."""
    return {"off": bits(odd_logits()), "no entries": with_signs(random_tensor(2, 9, seed=seed))}


REGISTRY.add(
    "L8.J.off", "A strength that is off keeps the bits of the logit, whatever it is.", off_probe, bitwise(off_spec)
)
