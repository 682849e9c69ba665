"""The checks of the keys of L8.G and of L8.H: where a filter cuts a row, found without a sort.

Owns: rows with equals, bans and both zeros, parameters that no rounding can carry across an edge, and what the specs of
L4 keep. Every kernel runs with blocks that are smaller than its rows.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smoke.checks.l4 import spec_distribution as spec
from smoke.checks.l8.guard import ON_GPU, apart, guarded, set_for_now, with_signs
from smoke.framework.cases import random_tensor
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences
from smoke.framework.prepared import prepared

REGISTRY = Registry()
BANNED = -math.inf
BLOCK = 64
WIDTHS = (1, 65, 150)
MASS_ONE = 2.0**40  # of the likeliest token
LARGEST = 3.4028234663852886e38


def plain(rows: int, width: int, seed: int) -> Tensor:
    """Draw rows without equals, shifted so that no row has its largest logit near 0."""
    return random_tensor(rows, width, seed=seed) * 2 + torch.arange(-3, 3 * rows - 3, 3).float()[:, None]


def tied(rows: int, width: int, seed: int) -> Tensor:
    """Draw rows with many equals, both zeros and bans among them; one token of each at least is allowed."""
    x = (random_tensor(rows, width, seed=seed) * 2).round() / 2
    x = x.masked_fill(random_tensor(rows, width, seed=seed + 1) > 1.2, BANNED)
    x[:, width // 2] = 1.0
    return x


def inputs(seed: int, rows: int) -> dict[str, Tensor]:
    """Return rows of every width, without and with equals, and some with one token in different places."""
    found = {}
    for width in WIDTHS:
        found[f"{width} columns"] = plain(rows, width, seed + width)
        found[f"{width} columns, equals"] = tied(rows, width, seed + width + 7)
    lone = torch.full((rows, 130), BANNED)
    lone[range(rows), [(0, 64, 65, 129)[row % 4] for row in range(rows)]] = -3.0
    return {**found, "one token alone": lone}


@contextmanager
def small_blocks(*modules: Any) -> Iterator[Any]:
    """Cut rows into blocks of 64, and poison what is allocated."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(set_for_now(module, BLOCK=BLOCK))
        yield stack.enter_context(guarded(math.nan))


def run(op: Any, name: str, rows: dict[str, Tensor], given: Callable[[str], Sequence[Tensor]]) -> Values:
    """Filter every case in rows that lie apart among larger logits, then one row alone, and none."""
    filter_rows = getattr(op, name)
    values = Values()
    with small_blocks(op) as guard:
        for case, logits in rows.items():
            values[case] = with_signs(filter_rows(apart(logits, 1000.0), *given(case)))
        case, logits = list(rows.items())[-2]
        one = [part[3:4] for part in given(case)]
        values["a row alone"] = with_signs(filter_rows(logits[3:4], *one))
        values["no rows"] = list(filter_rows(logits[:0], *(part[:0] for part in one)).shape)
        values[ON_GPU] = guard.faults()
    return values


def want(rows: dict[str, Tensor], keep: Callable[[str, int, list[float]], Sequence[int]]) -> Values:
    """Ban in every row what the spec does not keep."""
    kept = {case: logits.clone() for case, logits in rows.items()}
    for case, logits in rows.items():
        for index, row in enumerate(logits.tolist()):
            mask = torch.ones(len(row), dtype=torch.bool)
            mask[list(keep(case, index, row))] = False
            kept[case][index, mask] = BANNED
    last = list(kept.values())[-2]
    return {
        **{case: with_signs(logits) for case, logits in kept.items()},
        "a row alone": with_signs(last[3:4]),
        "no rows": [0, last.shape[1]],
        ON_GPU: [],
    }


# Keys, masses, cuts -------------------------------------------------------------------------------------------------

NEGATIVE = (-math.inf, -LARGEST, -1.5, -1e-38, -1e-45, -0.0)
POSITIVE = (0.0, 1e-45, 1e-38, 1.0, 1.0000001, 1.5, 2.0, 3.5, LARGEST, math.inf)
NUMBERS = NEGATIVE + POSITIVE


def numbers_of(seed: int) -> Tensor:
    """Return 128 numbers of every size."""
    drawn = random_tensor(112, seed=seed) * 10.0 ** torch.arange(112).sub(56).div(2)
    return torch.cat((torch.tensor(NUMBERS), drawn))


def keys_probe(seed: int) -> Values:
    """Map numbers to keys."""
    from mini_engine.kernels.threshold import order_key
    from smoke.checks.l8.probes import key_kernel

    keys = torch.zeros(128, dtype=torch.int64)
    key_kernel[(1,)](order_key, numbers_of(seed), keys, 128)
    return {"keys": keys}


def keys_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask every pair for the order of its numbers."""
    keys = got["keys"].tolist()
    pairs = itertools.combinations(zip(numbers_of(seed).tolist(), keys, strict=True), 2)
    for (a, key_a), (b, key_b) in pairs:
        if (a < b, a > b) != (key_a < key_b, key_a > key_b):
            text = f"{key_a} {'<' if key_a < key_b else '=' if key_a == key_b else '>'} {key_b}"
            return [Failure(f"keys of {a!r} and {b!r}", "", "the order of the numbers", text)]
    beyond = [key for key in keys if not -(2**31) <= key < 2**31]
    return [Failure("keys", "", "integers of 32 bits", str(beyond))] if beyond else []


REGISTRY.add(
    "L8.G.keys",
    "Keys are integers of 32 bits in the order of their numbers, and both zeros have one.",
    keys_probe,
    keys_verdict,
)


def numbers_probe(seed: int) -> Values:
    """Map numbers to keys and back."""
    from mini_engine.kernels.threshold import number_of, order_key
    from smoke.checks.l8.probes import number_kernel

    numbers = torch.full((128,), math.nan)
    number_kernel[(1,)](order_key, number_of, numbers_of(seed), numbers, 128)
    return {"numbers": numbers}


REGISTRY.add(
    "L8.H.numbers",
    "A key leads back to its number.",
    numbers_probe,
    bitwise(lambda seed: {"numbers": numbers_of(seed)}),
)


def mass_rows(seed: int) -> tuple[Tensor, float]:
    """Return 64 logits and their peak."""
    x = -random_tensor(64, seed=seed).abs() * 8
    x[:6] = torch.tensor([0.0, -0.0, BANNED, -27.5, -29.0, -1e-6])
    return x + 3.5, 3.5


def mass_probe(seed: int) -> Values:
    """Weigh logits."""
    from mini_engine.kernels.threshold import mass_of
    from smoke.checks.l8.probes import mass_kernel

    x, peak = mass_rows(seed)
    masses = torch.full((64,), -1, dtype=torch.int64)
    mass_kernel[(1,)](mass_of, x, torch.tensor([peak]), masses, 64)
    return {"masses": masses}


def mass_verdict(seed: int, got: Values) -> list[Failure]:
    """Allow the rounding of float32, and ask for it; the rest of a unit is cut off."""
    x, peak = mass_rows(seed)
    masses = got["masses"].double()
    if not torch.equal(masses.float().double(), masses):
        return [Failure("masses", "", "exponentials of float32, which has 24 bits", str(got["masses"].tolist())[:200])]
    exact = (x.double() - peak).exp() * MASS_ONE
    beyond = got["masses"].double() - exact
    wrong = (beyond > exact * 2.0**-21) | (beyond < -exact * 2.0**-21 - 1)
    if not bool(wrong.any()):
        return []
    place = int(wrong.nonzero()[0])
    return [
        Failure(
            f"a logit {float(x[place]) - peak:.6g} from the peak",
            "",
            f"{exact[place]:.1f}, cut off",
            str(int(got["masses"][place])),
        )
    ]


REGISTRY.add(
    "L8.H.mass",
    "A logit weighs exp(x - peak) in units of 2**-40, as an integer; nothing far below the peak.",
    mass_probe,
    mass_verdict,
)


def cut_rows(seed: int) -> dict[str, Tensor]:
    """Return rows in which a search may go wrong."""
    x = random_tensor(100, seed=seed) * 5
    return {
        "random": x,
        "far above 0": x + 1000.0,
        "negative": -x.abs() - 1,
        "around zero": x * 1e-42,
        "both zeros": torch.where(x > 4, 1.0, torch.where(x > 0, 0.0, torch.where(x > -5, -0.0, -1e-45))),
        "few numbers": x.round(),
        "all equal": torch.full((100,), -7.25),
        "huge": torch.tensor([-3e38, 3e38, 1e-45, 0.0, -1e-45]),
        "with bans": x.masked_fill(x > 3, BANNED),
        "one": x[:1],
        "neighbours": (torch.tensor([2.5]).view(torch.int32) + torch.arange(16, dtype=torch.int32)).view(torch.float32),
    }


def counts_to_find(row: Tensor) -> list[int]:
    """Return how many numbers are to lie at or above the cut: every count of a short row, three of a long one."""
    size = len(row)
    return list(range(1, size + 1)) if size < 20 else [1, size // 2, size]


def mass_targets(row: Tensor) -> list[int]:
    """Return masses that lie in the middle of a token's share, so that float32 cannot carry them across an edge."""
    order = np.sort(row.numpy().astype(np.float64))[::-1]
    masses = np.exp(order - order[0]) * MASS_ONE
    edges = np.concatenate(([0.0], masses.cumsum()))
    middles = [int((a + b) / 2) for a, b in itertools.pairwise(edges) if b - a > edges[-1] * spec.SAFE_MASS]
    return [max(1, middles[round((len(middles) - 1) * share)]) for share in (0.0, 0.3, 1.0)]


def searched(find_cut: Any, row: Tensor, target: int, by_mass: bool) -> list[float | int]:
    """Search a row that stands before larger logits."""
    from smoke.checks.l8.probes import cut_kernel

    cut = torch.full((1,), math.nan)
    above = torch.full((1,), -1)
    peak = row.max()[None].clone()
    behind = torch.full((BLOCK,), LARGEST)
    logits = torch.cat((row, behind))
    cut_kernel[(1,)](find_cut, logits, peak, torch.tensor([target]), cut, above, len(row), by_mass, BLOCK)
    return [float(cut[0]) + 0.0, int(above[0])]  # minus zero is zero


def count_probe(seed: int) -> Values:
    """Search for the cuts of counts."""
    from mini_engine.kernels.threshold import find_cut

    return {
        f"{name}, {target} of {len(row)}": searched(find_cut, row, target, False)
        for name, row in cut_rows(seed).items()
        for target in counts_to_find(row)
    }


def count_spec(seed: int) -> Values:
    """Sort."""
    values: Values = {}
    for name, row in cut_rows(seed).items():
        order = sorted(row.tolist(), reverse=True)
        for target in counts_to_find(row):
            cut = order[target - 1] + 0.0
            values[f"{name}, {target} of {len(row)}"] = [cut, sum(x > cut for x in order)]
    return values


REGISTRY.add(
    "L8.H.count",
    "The cut of a count is the number that a sort finds at that place, with the count of what lies above it.",
    count_probe,
    bitwise(count_spec),
)


LAST_UNITS = "a mass of 2**40 and 99 of 2 units, a mass of 2**40 + 150: cut and mass above"
LIKELY = torch.cat((torch.full((70,), -27.0), torch.tensor([0.0]), torch.full((29,), -27.0)))  # 2**40 and 99 times 2


def weight_probe(seed: int) -> Values:
    """Search for the cuts of masses; then for one that lies among masses too small for a sum of floats."""
    from mini_engine.kernels.threshold import find_cut

    found = {
        f"{name}, a mass of {target}": searched(find_cut, row, target, True)
        for name, row in cut_rows(seed).items()
        for target in mass_targets(row)
    }
    return {**found, LAST_UNITS: searched(find_cut, LIKELY, 2**40 + 150, True)}


def weight_verdict(seed: int, got: Values) -> list[Failure]:
    """Sort and add up; the cut is exact, the mass above it to the rounding of float32."""
    failures = differences([-27.0, 2**40], got[LAST_UNITS], None, LAST_UNITS)
    for name, row in cut_rows(seed).items():
        order = np.sort(row.numpy().astype(np.float64))[::-1]
        masses = np.exp(order - order[0]) * MASS_ONE
        for target in mass_targets(row):
            case = f"{name}, a mass of {target}"
            cut = float(order[int((masses.cumsum() < target).sum())]) + 0.0
            failures += differences(cut, got[case][0], None, f"{case}, cut")
            above = float(masses[order > cut].sum())
            if abs(got[case][1] - above) > above * 1e-6 + len(order):
                failures.append(Failure(f"{case}, mass above", "", f"{above:.0f}", str(got[case][1])))
    return failures


REGISTRY.add(
    "L8.H.weight",
    "The cut of a mass is the number at or above which the row first weighs as much.",
    weight_probe,
    weight_verdict,
)


# Filters ------------------------------------------------------------------------------------------------------------


def counts_of(width: int) -> Tensor:
    """Return top-k of six rows: off, one, some, all but one, all, more than all."""
    return torch.tensor([0, 1, max(width // 3, 1), width - 1, width, width + 5])


def top_k_probe(seed: int) -> Values:
    """Keep the k largest."""
    import mini_engine.kernels.top_k as op

    rows = inputs(seed, 6)
    values = run(op, "apply_top_k", rows, lambda case: [counts_of(rows[case].shape[1])])
    return values | {LARGE: left_by_large_k(op.apply_top_k(large_row(seed), torch.tensor([LARGE_K])))}


LARGE_K = 1040
LARGE = "k above 1024: ids that stay of 1100"


def large_row(seed: int) -> Tensor:
    """Return a row of 1100 logits without equals."""
    return plain(1, 1100, seed)


def left_by_large_k(rows: Tensor) -> list[int]:
    """Return the ids that are not banned."""
    return [int(token) for token in (rows[0] > BANNED).nonzero()[:, 0]]


def top_k_spec(seed: int) -> Values:
    """Sort."""
    rows = inputs(seed, 6)
    values = want(rows, lambda case, index, row: spec.top_k_ids(row, int(counts_of(len(row))[index])))
    return values | {LARGE: sorted(spec.top_k_ids(large_row(seed)[0].tolist(), LARGE_K))}


REGISTRY.add(
    "L8.H.top_k",
    "Exactly k stay with their bits, the lowest ids among equals; no k, and one beyond the row, leave it as it is.",
    top_k_probe,
    bitwise(top_k_spec),
)

SHARES = (0.5, 1e-9, 0.9, 0.37, 0.999, 1.0)


@prepared
def shares_of(rows: Tensor) -> Tensor:
    """Return top-p of six rows, none of them at an edge between two tokens."""
    near = [p if p == 1 else spec.p_near(row, p) for row, p in zip(rows.tolist(), SHARES, strict=True)]
    return torch.tensor(near, dtype=torch.float64)


def top_p_probe(seed: int) -> Values:
    """Keep nuclei."""
    import mini_engine.kernels.top_p as op

    rows = inputs(seed, 6)
    shares = {case: shares_of(own) for case, own in rows.items()}
    return run(op, "apply_top_p", rows, lambda case: [shares[case]])


def top_p_spec(seed: int) -> Values:
    """Walk down from the likeliest token."""
    rows = inputs(seed, 6)
    return want(rows, lambda case, index, row: spec.top_p_ids(row, float(shares_of(rows[case])[index])))


REGISTRY.add(
    "L8.H.top_p",
    "A token stays while the mass before it is below p, the lowest ids first among equals; p of 1 keeps every bit.",
    top_p_probe,
    bitwise(top_p_spec),
)

LIMITS = (0.0, 1e-6, 0.05, 0.3, 0.9, 1.0)


@prepared
def limits_of(rows: Tensor) -> Tensor:
    """Return min-p of six rows."""
    near = [x if x in (0, 1) else spec.share_near(row, x) for row, x in zip(rows.tolist(), LIMITS, strict=True)]
    return torch.tensor(near)


def min_p_probe(seed: int) -> Values:
    """Drop the unlikely."""
    import mini_engine.kernels.min_p as op

    rows = inputs(seed, 6)
    limits = {case: limits_of(own) for case, own in rows.items()}
    return run(op, "apply_min_p", rows, lambda case: [limits[case]])


def min_p_spec(seed: int) -> Values:
    """Ask every token for its odds."""
    rows = inputs(seed, 6)
    return want(rows, lambda case, index, row: spec.min_p_ids(row, float(limits_of(rows[case])[index])))


REGISTRY.add(
    "L8.H.min_p",
    "A token stays if it is at least min-p times as likely as the likeliest; 0 keeps every bit.",
    min_p_probe,
    bitwise(min_p_spec),
)
