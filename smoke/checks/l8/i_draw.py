"""The checks of L8.H about edges and sums, and of L8.I: both cuts in one launch, and a draw from what they leave.

Owns: vectors on which engines differ, the order of top-k and top-p, and numbers from 0 to 1 whose token is known.
"""

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from smoke.checks.l4 import spec_distribution as spec
from smoke.checks.l8.guard import ON_GPU, apart, with_signs
from smoke.checks.l8.h_filters import BLOCK, LIKELY, MASS_ONE, plain, small_blocks, tied
from smoke.framework.cases import random_tensor
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences
from smoke.framework.prepared import prepared

REGISTRY = Registry()
BANNED = -math.inf
LAST = 1.0 - 2.0**-53  # the largest number below 1


def left_of(row: Tensor) -> list[int]:
    """Return the ids that are not banned."""
    return [int(token) for token in (row > BANNED).nonzero()[:, 0]]


# Edges --------------------------------------------------------------------------------------------------------------

# Equal logits weigh exactly the same, so a mass can be exactly p: number of equals, p, how many stay.
EQUALS = ((4, 0.0, 1), (4, 0.25, 1), (4, 0.3, 2), (8, 0.5, 4), (8, 0.51, 5), (128, 0.75, 96), (2, 0.5 + 2.0**-42, 2))
UNITS = 2.0**40 + 198  # the mass of ``LIKELY``
LIGHT = torch.cat((torch.zeros(1, 1), torch.full((1, 40), -27.3)), dim=1)  # 2**40 units and 40 times one
LADDER = (0.5, 0.25, 0.125, 0.125)


def near_limits(seed: int) -> tuple[Tensor, Tensor]:
    """Return rows of a 0 and the ten float32 numbers around log(min-p), and their min-p [32].

    Just above 1/2 half of the distance to the number below is the largest share of min-p, and logarithms lie close.
    """
    drawn = random_tensor(32, seed=seed).abs()
    min_p = torch.where(torch.arange(32) < 8, drawn.clamp(1e-6, 0.99), 0.5 + drawn.clamp(max=3.0) / 40)
    near = min_p.double().log().float()[:, None].view(torch.int32) + torch.arange(-5, 5, dtype=torch.int32)
    return torch.cat((torch.zeros(32, 1), near.view(torch.float32)), dim=1), min_p


def edges_probe(seed: int) -> Values:
    """Cut exactly at the edges."""
    from mini_engine.kernels import min_p, top_k, top_p

    values: Values = {}
    with small_blocks(top_k, top_p, min_p):
        for equal, p, _ in EQUALS:
            row = torch.full((1, equal + 30), BANNED)
            row[0, 20 : 20 + equal] = -1.5
            values[f"{equal} equals, p {p}"] = left_of(
                top_p.apply_top_p(row, torch.tensor([p], dtype=torch.float64))[0]
            )
        share = torch.tensor([(UNITS - 47.5) / UNITS], dtype=torch.float64)
        values["all but 47.5 of 2**40 + 198 units"] = left_of(top_p.apply_top_p(LIKELY[None], share)[0])
        share = torch.tensor([1 - 20.5 / (2.0**40 + 40)], dtype=torch.float64)
        values["all but 20.5 of 2**40 + 40 units"] = left_of(top_p.apply_top_p(LIGHT, share)[0])
        far = torch.tensor([[0.0, -200.0, -20000.0]])
        one = torch.ones(1, dtype=torch.float64)
        values["no mass, p 1"] = left_of(top_p.apply_top_p(far, one)[0])
        values["no mass, min-p 0"] = left_of(min_p.apply_min_p(far, torch.zeros(1))[0])
        values["two equals, k 1"] = left_of(
            top_k.apply_top_k(torch.tensor([[0.4, 0.4, 0.1, 0.1]]).log(), torch.tensor([1]))[0]
        )
        for limit in (1.0, 0.5, 0.25):
            for name, number in (("", limit), (" and a little more", limit * (1 + 2**-23))):
                rows = torch.tensor([LADDER, LADDER[::-1]]).log()
                kept = min_p.apply_min_p(rows, torch.full((2,), number))
                values[f"min-p {limit}{name}"] = [left_of(row) for row in kept]
        values["min-p around the limit"] = min_p.apply_min_p(*near_limits(seed)) > BANNED
    return values


def edges_spec(seed: int) -> Values:
    """Count what stays."""
    values: Values = {f"{n} equals, p {p}": list(range(20, 20 + kept)) for n, p, kept in EQUALS}
    values |= {"two equals, k 1": [0], "no mass, p 1": [0, 1, 2], "no mass, min-p 0": [0, 1, 2]}
    values["all but 47.5 of 2**40 + 198 units"] = list(range(77))
    values["all but 20.5 of 2**40 + 40 units"] = list(range(21))
    for limit in (1.0, 0.5, 0.25):
        for name, more in (("", False), (" and a little more", True)):
            values[f"min-p {limit}{name}"] = [
                [i for i, mass in enumerate(row) if mass > limit / 2 or (mass == limit / 2 and not more)]
                for row in (LADDER, LADDER[::-1])
            ]
    rows, min_p = near_limits(seed)
    values["min-p around the limit"] = rows.double().exp().float() >= min_p[:, None]
    return values


REGISTRY.add(
    "L8.H.edges",
    "A mass that just reaches p is enough, equals go by their ids, and a token exactly at min-p stays.",
    edges_probe,
    bitwise(edges_spec),
)


# Sums ---------------------------------------------------------------------------------------------------------------


def above_probe(seed: int) -> Values:
    """Add up masses above a cut and a limit; the row stands before larger logits."""
    from mini_engine.kernels.threshold import mass_above
    from smoke.checks.l8.probes import mass_above_kernel

    values: Values = {}
    for name, row, cut, limit in above_cases(seed):
        mass = torch.full((1,), -1)
        memory = torch.cat((row, torch.full((BLOCK,), 1e30)))
        given = [row.max()[None].clone(), torch.tensor([cut]), torch.tensor([limit], dtype=torch.float64)]
        mass_above_kernel[(1,)](mass_above, memory, *given, mass, len(row), BLOCK)
        values[name] = int(mass[0])
    return values


EXACTLY = "a mass of 2**40 and 99 of 2 units"


def above_cases(seed: int) -> list[tuple[str, Tensor, float, float]]:
    """Return names, rows, cuts and limits."""
    row, equals = plain(1, 150, seed + 40)[0], tied(1, 150, seed + 41)[0]
    return [
        ("the whole row", row, BANNED, BANNED),
        ("above one of its logits", row, sorted(row.tolist())[-9], BANNED),
        ("above equals", equals, 1.0, BANNED),
        ("not far below the peak", row, BANNED, -2.0),
        ("exactly at the limit", equals, BANNED, 1.0 - float(equals.max())),
        ("below the limit by 1e-12", equals, BANNED, 1.0 - float(equals.max()) + 1e-12),
        (EXACTLY, LIKELY, BANNED, BANNED),
        ("above the peak", row, float(row.max()), BANNED),
    ]


def above_verdict(seed: int, got: Values) -> list[Failure]:
    """Add up in float64."""
    failures = []
    for name, row, cut, limit in above_cases(seed):
        peak = float(row.max())
        exact = math.fsum(
            math.exp(x - peak) * MASS_ONE for x in row.tolist() if x > cut and x > BANNED and x - peak >= limit
        )
        bound = exact * 1e-6 + len(row)
        if name == EXACTLY:
            exact = UNITS
            bound = 0.0
        if abs(got[name] - exact) > bound:
            failures.append(Failure(name, "", f"{exact:.0f}", str(got[name])))
    return failures


REGISTRY.add(
    "L8.H.above",
    "The mass above a cut leaves out the cut itself and what lies below the limit; exactly at the limit counts.",
    above_probe,
    above_verdict,
)

# Both cuts ----------------------------------------------------------------------------------------------------------

K = (0, 5, 40, 100, 1, 12, 90)
P = (0.9, 1.0, 0.5, 0.77, 0.3, 0.97, 0.999)


def both_ids(row: list[float], k: int, p: float, joint: bool) -> list[int]:
    """Keep what top-k and top-p keep, one after the other or side by side."""
    if joint:
        return sorted(set(spec.top_k_ids(row, k)) & set(spec.top_p_ids(row, p)))
    left = spec.only(row, spec.top_k_ids(row, k))
    return [token for token in spec.top_p_ids(left, p) if left[token] > BANNED]


@prepared
def safe_p(row: list[float], k: int, p: float, joint: bool) -> float:
    """Return a p near the wanted one, not at an edge of the distribution that it judges."""
    return p if p == 1 else spec.p_near(row if joint else spec.only(row, spec.top_k_ids(row, k)), p)


@dataclass(frozen=True)
class Both:
    """Rows with their k and p."""

    rows: Tensor
    k: list[int]
    p: list[float]


@prepared
def both_cases(seed: int, joint: bool) -> dict[str, Both]:
    """Return rows with and without equals, and the vectors on which engines differ."""
    cases = {}
    for name, rows in (
        ("one column", plain(7, 1, seed)),
        ("100 columns", plain(7, 100, seed + 1)),
        ("equals", tied(7, 100, seed + 2)),
    ):
        p = [safe_p(row, k, p, joint) for row, k, p in zip(rows.tolist(), K, P, strict=True)]
        cases[name] = Both(rows, list(K), p)
    one = torch.tensor([[0.5, 0.2, 0.15, 0.15]]).log()
    cases["top-p of what top-k left, or of all"] = Both(one, [2], [0.6])
    down = torch.tensor([[0.4, 0.15, 0.15, 0.15, 0.1, 0.05]]).log()
    cases["top-p ends further down, after one of its equals"] = Both(down, [3], [0.92])
    cases["eight equals"] = Both(torch.zeros(4, 8), [6, 2, 7, 0], [0.25, 0.9, 1.0, 0.75])
    return cases


def both_probe(seed: int) -> Values:
    """Cut twice."""
    import mini_engine.kernels.top_k_top_p as op

    values: Values = {}
    cases = {joint: both_cases(seed, joint) for joint in (False, True)}
    with small_blocks(op) as guard:
        for joint, own in cases.items():
            for name, case in own.items():
                given = torch.tensor(case.k), torch.tensor(case.p, dtype=torch.float64)
                kept = op.apply_top_k_top_p(apart(case.rows, 1000.0), *given, joint)
                values[f"{name}, joint {joint}"] = with_signs(kept)
        values["no rows"] = list(op.apply_top_k_top_p(torch.zeros(0, 5), given[0][:0], given[1][:0]).shape)
        values[ON_GPU] = guard.faults()
    return values


def both_spec(seed: int) -> Values:
    """Walk."""
    values: Values = {}
    for joint in (False, True):
        for name, case in both_cases(seed, joint).items():
            rows = [
                spec.only(row, both_ids(row, k, p, joint))
                for row, k, p in zip(case.rows.tolist(), case.k, case.p, strict=True)
            ]
            values[f"{name}, joint {joint}"] = with_signs(torch.tensor(rows))
    return {**values, "no rows": [0, 5], ON_GPU: []}


REGISTRY.add(
    "L8.I.both",
    "Top-p judges what top-k left, or the whole row where both are judged jointly; of equals the stricter cut counts.",
    both_probe,
    bitwise(both_spec),
)


# The draw -----------------------------------------------------------------------------------------------------------

MIN_P = (0.0, 0.1, 0.0, 0.05, 0.5, 0.2, 1.0)
FAR_APART = "filters, rows 2**30 numbers apart"
SAFE = 1e-4  # of the whole mass: a point in the middle of such a share is its token's in float32, too


@dataclass(frozen=True)
class Draws:
    """Rows with everything that the launch takes, and the ids to be drawn."""

    rows: Tensor
    k: list[int]
    p: list[float]
    min_p: list[float]
    uniform: list[float]
    ids: list[int]

    def given(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the parameters as tensors."""
        return (
            torch.tensor(self.k),
            torch.tensor(self.p, dtype=torch.float64),
            torch.tensor(self.min_p),
            torch.tensor(self.uniform, dtype=torch.float64),
        )


@prepared
def filtered_draws(seed: int, joint: bool, equals: bool) -> Draws:
    """Return seven rows, each with filters of its own, and a point in the middle of one of its tokens' shares."""
    rng = random.Random(f"draw {seed} {joint} {equals}")
    rows = (tied if equals else plain)(7, 100, seed + 5 + equals)
    p = []
    min_p = []
    uniform = []
    ids = []
    for row, k, wanted, limit in zip(rows.tolist(), K, P, MIN_P, strict=True):
        p.append(safe_p(row, k, wanted, joint))
        row = spec.only(row, both_ids(row, k, p[-1], joint))  # noqa: PLW2901
        min_p.append(limit if limit in (0.0, 1.0) else safe_limit(row, limit))
        row = spec.only(row, spec.min_p_ids(row, min_p[-1]))  # noqa: PLW2901
        masses = spec.probabilities(row)
        point, token = rng.choice([pair for pair in spec.share_points(row, [0.5]) if masses[pair[1]] > SAFE])
        uniform.append(point)
        ids.append(token)
    return Draws(rows, list(K), p, min_p, uniform, ids)


def safe_limit(row: list[float], wanted: float) -> float:
    """Return a min-p near the wanted one; the one token of a row has no neighbours to lie between."""
    return spec.share_near(row, wanted) if len(set(spec.weights(row))) > 2 else wanted


def unfiltered(rows: Tensor, uniform: list[float], ids: list[int], k: int = 0) -> Draws:
    """Return draws without filters, but for one k."""
    count = len(rows)
    return Draws(rows, [k] * count, [1.0] * count, [0.0] * count, uniform, ids)


def equals_in_blocks() -> Draws:
    """Return a row of five equals, of which the first three stay, and a larger one; each in turn is to be drawn."""
    row = torch.full((4, 256), BANNED)
    row[:, [10, 20, 74, 138, 148]] = 0.0
    row[:, 200] = 1.0
    total = 3 + math.e
    shares = [0.5 / total, 2.5 / total, 3.1 / total, (total - 0.1) / total]
    return unfiltered(row, shares, [10, 74, 200, 200], 4)


def draw_cases(seed: int) -> dict[str, tuple[Draws, bool]]:
    """Return draws, and whether their filters are judged jointly."""
    cases = {
        FAR_APART: (filtered_draws(seed, False, False), False),
        "filters, equals": (filtered_draws(seed, False, True), False),
        "filters, joint, equals": (filtered_draws(seed, True, True), True),
    }
    banned = torch.full((3, 200), BANNED)
    banned[:, 70:140:2] = random_tensor(3, 35, seed=seed + 8)
    cases["both ends of the interval"] = (unfiltered(banned, [0.0, LAST, 1.0], [70, 138, 138]), False)
    lone = torch.full((3, 129), BANNED)
    lone[range(3), [0, 65, 128]] = -3.0
    cases["one token alone"] = (unfiltered(lone, [0.0, 0.5, LAST], [0, 65, 128]), False)
    equals = unfiltered(torch.zeros(4, 128), [0.005, 0.635, 0.645, 0.995], [0, 63, 64, 99], 100)
    cases["128 equals, of which 100 stay"] = (equals, False)
    late = torch.zeros(2, 128)
    late[:, 120] = 1.0
    total = 69 + math.e
    shares = [68.5 / total, (69 + math.e / 2) / total]
    cases["a larger one after equals that go"] = (unfiltered(late, shares, [68, 120], 70), False)
    few = torch.tensor([[0.0, 0.0, 1.0, 0.0]]).repeat(3, 1)  # the largest stays, and the first equal
    cases["equals before and after a larger one"] = (unfiltered(few, [0.1, 0.5, 0.95], [0, 2, 2], 2), False)
    small = unfiltered(LIKELY.repeat(2, 1), [20.5 / UNITS, (UNITS - 36.5) / UNITS], [10, 81])
    cases["a share of 2 in 2**40 + 198"] = (small, False)
    cases["the last share is one unit"] = (unfiltered(LIGHT, [LAST], [40]), False)
    cases["equals in four blocks"] = (equals_in_blocks(), False)
    unlikely = torch.tensor([[-5.0, -5.0, -5.0, 0.0, 0.0]]).repeat(3, 1)  # min-p drops what is at top-k's cut
    edges = [0.0, 0.5 - 2.0**-42, LAST]
    cases["a cut below min-p"] = (Draws(unlikely, [4] * 3, [1.0] * 3, [0.2] * 3, edges, [3, 3, 4]), False)
    at_limit = torch.tensor([[0.0, math.log(0.25)]])  # below the logarithm by its rounding, at min-p by that of exp
    cases["a token exactly at min-p"] = (Draws(at_limit, [0], [1.0], [0.25], [0.9], [1]), False)
    return cases


def draw_probe(seed: int) -> Values:
    """Draw every case, in rows that lie apart."""
    import mini_engine.kernels.sample as op

    values: Values = {}
    with small_blocks(op) as guard:
        for name, (draws, joint) in draw_cases(seed).items():
            rows = apart(draws.rows, 1000.0)
            if name == FAR_APART:
                guard.stretch("the logits", rows)
            values[name] = op.sample_top_k_top_p(rows, *draws.given(), joint=joint)
        values[ON_GPU] = guard.faults()
    return values


def draw_spec(seed: int) -> Values:
    """Return the ids that the points were made for."""
    ids = {name: torch.tensor(draws.ids) for name, (draws, _) in draw_cases(seed).items()}
    return {**ids, ON_GPU: []}


REGISTRY.add(
    "L8.I.draw",
    "The drawn token is the one in whose share of what the filters leave the number falls, in the order of ids.",
    draw_probe,
    bitwise(draw_spec),
)

GRID = 24
STAIRS = (2.0, 1.5, BANNED, 1.5, 0.7, 0.0, -1.0, 1.5, BANNED)


def shares_probe(seed: int) -> Values:
    """Draw with evenly spaced numbers, one after the other in many rows, and some of them alone in larger blocks."""
    import mini_engine.kernels.sample as op

    stairs = Draws(
        torch.tensor(STAIRS).repeat(GRID, 1),
        [5] * GRID,
        [0.9] * GRID,
        [0.1] * GRID,
        [(place + 0.5) / GRID for place in range(GRID)],
        [],
    )
    drawn = op.sample_top_k_top_p(stairs.rows, *stairs.given())
    draws = filtered_draws(seed, False, True)
    k, p, min_p, uniform = draws.given()
    one = [
        op.sample_top_k_top_p(draws.rows[i : i + 1], k[i : i + 1], p[i : i + 1], min_p[i : i + 1], uniform[i : i + 1])
        for i in (1, 3)
    ]
    none = op.sample_top_k_top_p(draws.rows[:0], k[:0], p[:0], min_p[:0], uniform[:0])
    return {"drawn": drawn, "rows 1 and 3 alone": torch.cat(one), "no rows": list(none.shape)}


def shares_verdict(seed: int, got: Values) -> list[Failure]:
    """Every share is hit as often as it is wide, to one; ids rise with the numbers; a row does not know the others."""
    ids = filtered_draws(seed, False, True).ids
    failures = differences(torch.tensor([ids[1], ids[3]]), got["rows 1 and 3 alone"], None, "rows 1 and 3 alone")
    failures += differences([0], got["no rows"], None, "no rows")
    row = list(STAIRS)
    drawn = got["drawn"].tolist()
    row = spec.only(row, both_ids(row, 5, 0.9, False))
    masses = spec.probabilities(spec.only(row, spec.min_p_ids(row, 0.1)))
    for token, mass in enumerate(masses):
        count = drawn.count(token)
        if abs(count - mass * GRID) > 1 or (mass == 0 and count):
            failures.append(Failure(f"token {token}", "", f"{mass * GRID:.1f} times of {GRID}", f"{count} times"))
    return failures + differences(sorted(drawn), drawn, None, "ids of rising numbers")


REGISTRY.add(
    "L8.I.shares",
    "Over evenly spaced numbers each token comes as often as its probability says, alone as among other rows.",
    shares_probe,
    shares_verdict,
)
