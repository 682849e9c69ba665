"""The checks of L4.B and L4.C: temperature, top-k, top-p, min-p and the joint order.

Owns: probes that call ``mini_engine.sampler.filters`` and what they must give: exact support sets, and the caller's
own bits for every token that stays and in every row whose option is off. Needs no other lesson.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smoke.checks.l4 import spec_distribution as spec
from smoke.framework.cases import random_tensor
from smoke.framework.check import Failure, Probe, Registry, Values, Verdict
from smoke.framework.compare import bitwise, differences, remember
from smoke.framework.prepared import prepared

REGISTRY = Registry()
BANNED = spec.BANNED
SCALED = 1e-5  # how far a divided logit may be off
PARAMETER_DTYPES = {"k": torch.int64, "p": torch.float64, "min_p": torch.float32}

Keep = Callable[..., "Collection[int] | None"]  # a row and its parameters -> the ids that stay, None if it is off


@dataclass(frozen=True)
class FilterCase:
    """Logits [R, V] and one value per row of each parameter of a filter, in the order of its arguments."""

    logits: Tensor
    parameters: dict[str, list[Any]]

    def arguments(self, rows: slice = slice(None)) -> list[Tensor]:
        """Return the tensors of the parameters."""
        return [torch.tensor(v[rows], dtype=PARAMETER_DTYPES[name]) for name, v in self.parameters.items()]

    def of_row(self, row: int) -> list[Any]:
        """Return one row's parameters."""
        return [values[row] for values in self.parameters.values()]


Cases = Callable[[int], dict[str, FilterCase]]


def filter_probe(function: str, cases: Cases) -> Probe:
    """Return a probe that filters every case at once and row by row, and shows what became of the caller's tensor."""

    def probe(seed: int) -> Values:
        from mini_engine.sampler import filters

        values: Values = {}
        for name, case in cases(seed).items():
            logits = case.logits.clone()
            together = getattr(filters, function)(logits, *case.arguments())
            rows = [slice(row, row + 1) for row in range(len(logits))]
            alone = [getattr(filters, function)(logits[row].clone(), *case.arguments(row)) for row in rows]
            values[name] = {"filtered": together, "row by row": torch.cat(alone), "the caller's logits": logits}
        return values

    return probe


def filter_verdict(cases: Cases, keep: Keep) -> Verdict:
    """Return a verdict that asks every row for the ids that ``keep`` names, alone and among its neighbours."""

    def kept(seed: int) -> Values:
        return {
            name: [keep(row, *case.of_row(i)) for i, row in enumerate(case.logits.tolist())]
            for name, case in cases(seed).items()
        }

    expected = remember(kept)

    def verdict(seed: int, got: Values) -> list[Failure]:
        failures: list[Failure] = []
        for name, case in cases(seed).items():
            answer = got[name]
            failures += row_failures(name, case, expected(seed)[name], answer["filtered"])
            failures += differences(answer["filtered"], answer["row by row"], None, f"{name}: each row alone")
            failures += differences(case.logits, answer["the caller's logits"], None, f"{name}: the caller's logits")
        return failures

    return verdict


def row_failures(name: str, case: FilterCase, kept: list[Collection[int] | None], got: Any) -> list[Failure]:
    """Compare row by row: the caller's bits where the filter is off or a token stays, and which tokens stay."""
    if not isinstance(got, Tensor) or got.shape != case.logits.shape:
        return differences(case.logits, got, None, name)
    failures: list[Failure] = []
    for index, (ids, before, after) in enumerate(zip(kept, case.logits, got, strict=True)):
        parameters = ", ".join(f"{key} {values[index]:.6g}" for key, values in case.parameters.items())
        where = f"{name}, row {index}, {parameters}"
        if ids is None:
            failures += differences(before, after, None, f"{where} (off)")
            continue
        allowed = sorted(token for token in ids if before[token] > BANNED)
        support = (after > BANNED).nonzero()[:, 0].tolist()
        if support != allowed or bool(after.isnan().any()):
            failures.append(Failure(where, "ids that can still come", few(allowed), few(support)))
            continue
        want = torch.tensor(spec.only(before.tolist(), allowed))
        failures += differences(want, after, None, f"{where}: logits")
    return failures


def few(ids: list[int]) -> str:
    """Print the first ids of a long list and how many there are."""
    return str(ids) if len(ids) <= 12 else f"{len(ids)} ids: {ids[:6]} … {ids[-3:]}"


HEIGHTS = (-3000.0, 2000.0, 0.0, 700.0)  # exp of the distance between two rows is 0 or infinity, also in float64


def rows_at_heights(size: int, seed: int) -> Tensor:
    """Draw rows [4, V] that lie far apart, as they do after small temperatures."""
    return random_tensor(len(HEIGHTS), size, seed=seed + 7) + torch.tensor(HEIGHTS)[:, None]


def mixed_rows(size: int, seed: int) -> Tensor:
    """Draw rows [8, V] that are hard in different ways: steep, flat, negative, tied, half banned."""
    rows = random_tensor(8, size, seed=seed + 400)
    rows[0] *= 3.0
    rows[1, size // 3] = 30.0  # one token has nearly all the mass
    rows[2] = rows[2] * 2.0 - 40.0  # no logit is positive
    rows[3] = (rows[3] * 2.0).round() / 2.0  # ties at every height
    rows[4] = 0.25  # all the same
    rows[5, torch.arange(size) % 2 == 1] = BANNED
    rows[6] *= 8.0
    rows[7, [size // 2, 4, size - 1]] = 6.0  # three of equal height at the top
    return rows


# L4.B ---------------------------------------------------------------------------------------------------------------

TEMPERATURES = (0.7, 1.0, 0.1, 2.0, 1e-6, 0.01, 10.0, 1.3)


def temperature_probe(seed: int) -> Values:
    """Scale eight rows by eight temperatures, together and alone."""
    from mini_engine.sampler.filters import apply_temperature

    logits = mixed_rows(60, seed)
    temperature = torch.tensor(TEMPERATURES)
    given = logits.clone()
    alone = [apply_temperature(given[row : row + 1].clone(), temperature[row : row + 1]) for row in range(8)]
    return {
        "scaled": apply_temperature(given, temperature),
        "row by row": torch.cat(alone),
        "the caller's logits": given,
    }


def temperature_verdict(seed: int, got: Values) -> list[Failure]:
    """Divide every number by its row's temperature; a banned token stays banned."""
    logits = mixed_rows(60, seed)
    given = torch.tensor(TEMPERATURES).tolist()  # as float32
    rows = [[x / t for x in row] for row, t in zip(logits.tolist(), given, strict=True)]
    failures = []
    for index, row in enumerate(rows):
        want = torch.tensor(row)
        have = got["scaled"][index]
        where = f"row {index}, temperature {TEMPERATURES[index]}"
        failures += differences(want > BANNED, have > BANNED, None, f"{where}: tokens that can come")
        failures += differences(want.nan_to_num(neginf=0.0), have.nan_to_num(neginf=0.0), SCALED, where)
    failures += differences(got["scaled"], got["row by row"], None, "each row alone")
    return failures + differences(logits, got["the caller's logits"], None, "the caller's logits")


REGISTRY.add(
    "L4.B.temperature",
    "Every row is divided by its own temperature, in a new tensor.",
    temperature_probe,
    temperature_verdict,
)

LARGEST_COUNTS = (1, 2, 3, 7, 25, 50, 59, 60, 90)
BANNED_ROW = 5  # of ``mixed_rows``


def largest_cases(seed: int) -> dict[str, tuple[Tensor, int]]:
    """Return logits and counts; the order among banned tokens is only asked for where all are returned."""
    rows = mixed_rows(60, seed)
    finite = rows[[row for row in range(8) if row != BANNED_ROW]]
    few_values = random_tensor(5, 60, seed=seed + 1).round()  # about seven different ones
    return {f"{count} of 60": (rows if count <= 30 or count >= 60 else finite, count) for count in LARGEST_COUNTS} | {
        f"{count} of 60, few values": (few_values, count) for count in LARGEST_COUNTS
    }


def largest_probe(seed: int) -> Values:
    """Ask for the largest logits."""
    from mini_engine.sampler.filters import largest

    values: Values = {}
    for name, (logits, count) in largest_cases(seed).items():
        found, ids = largest(logits, count)
        values[name] = {"values": found, "ids": ids}
    row = mixed_rows(60, seed)[BANNED_ROW:][:1]
    found, ids = largest(row, 50)
    values["50 of 60, half of them banned"] = {"values": found, "ids of the allowed": ids[:, :30]}
    return values


def largest_spec(seed: int) -> Values:
    """Rank every row."""
    values: Values = {}
    for name, (logits, count) in largest_cases(seed).items():
        ids = torch.tensor([spec.ranking(row)[:count] for row in logits.tolist()])
        values[name] = {"values": logits.gather(-1, ids), "ids": ids}
    row = mixed_rows(60, seed)[BANNED_ROW]
    order = torch.tensor([spec.ranking(row.tolist())[:50]])
    values["50 of 60, half of them banned"] = {"values": row[order], "ids of the allowed": order[:, :30]}
    return values


REGISTRY.add(
    "L4.B.largest",
    "The largest logits of each row come in falling order, the lowest id first among equals; banned ones come last.",
    largest_probe,
    bitwise(largest_spec),
)


def top_k_keep(row: spec.Row, k: int) -> Collection[int] | None:
    """Say which ids stay."""
    return None if k == 0 or k >= len(row) else spec.top_k_ids(row, k)


KS = (1, 2, 3, 50, 300, 500, 0, 200)  # of 300 tokens


def top_k_cases(seed: int) -> dict[str, FilterCase]:
    """Pair every row with every k; the largest k in the batch is once below V and once above."""
    rows = mixed_rows(300, seed)
    cases = {f"k turned by {turn}": FilterCase(rows, {"k": [*KS[turn:], *KS[:turn]]}) for turn in range(len(KS))}
    cases["k of 1,500 and of 2,000"] = FilterCase(random_tensor(2, 4000, seed=seed + 3), {"k": [1500, 2000]})
    cases["no k above 5"] = FilterCase(rows, {"k": [1, 5, 0, 2, 3, 4, 1, 2]})
    cases["k 2 for all"] = FilterCase(rows, {"k": [2] * 8})
    return cases


def tie_cases(seed: int) -> dict[str, FilterCase]:
    """Put ties at the k-th place: whole rows of equals, pairs, equals scattered between others."""
    logs = {
        "0.4 0.4 0.1 0.1": [0.4, 0.4, 0.1, 0.1],
        "four of 0.25": [0.25] * 4,
        "0.1 0.4 0.1 0.4": [0.1, 0.4, 0.1, 0.4],
    }
    cases = {
        name: FilterCase(torch.tensor(masses).log().expand(4, 4).clone(), {"k": [1, 2, 3, 0]})
        for name, masses in logs.items()
    }
    scattered = torch.full((6, 200), -1.0)
    scattered[:, 7::31] = 2.0  # 7, 38, 69, 100, 131, 162, 193
    scattered[:, 150] = 3.0
    cases["seven equals after the first"] = FilterCase(scattered, {"k": [1, 2, 4, 7, 8, 9]})
    cases["all equal"] = FilterCase(torch.zeros(5, 200), {"k": [1, 63, 64, 199, 0]})
    cases["all equal at a million"] = FilterCase(torch.full((3, 200), 1e6), {"k": [1, 63, 199]})
    cases["nearly equal"] = FilterCase(torch.arange(200).expand(3, 200) * 1e-15, {"k": [1, 63, 199]})
    return cases


REGISTRY.add(
    "L4.B.top_k",
    "Exactly the k likeliest tokens of each row can still come, each row by its own k.",
    filter_probe("apply_top_k", top_k_cases),
    filter_verdict(top_k_cases, top_k_keep),
)
REGISTRY.add(
    "L4.B.ties",
    "Among equals at the k-th place the lowest ids stay, and no more than k.",
    filter_probe("apply_top_k", tie_cases),
    filter_verdict(tie_cases, top_k_keep),
)


def off_k_cases(seed: int) -> dict[str, FilterCase]:
    """Put rows with k 0 and k from V on between others, and alone."""
    rows = mixed_rows(130, seed)
    wide = random_tensor(4, 32000, seed=seed + 2)
    return {
        "all off": FilterCase(rows, {"k": [0] * 8}),
        "k 0 between others": FilterCase(rows, {"k": [0, 3, 0, 1, 0, 2, 0, 0]}),
        "k of V and more between others": FilterCase(rows, {"k": [130, 3, 131, 129, 500, 2, 1 << 29, 130]}),
        "32,000 tokens": FilterCase(wide, {"k": [0, 50, 32000, 40000]}),
    }


def off_k_probe(seed: int) -> Values:
    """Filter, and look at what ``where_on`` and ``keep_largest`` do to the tensor that they are given."""
    from mini_engine.sampler.filters import cut_top_k, keep_largest, where_on

    rows = mixed_rows(60, seed)
    given = rows.clone()
    counts = torch.full((8,), 3)
    keep_largest(given, counts, rows.topk(4).values)
    unchanged = bool(torch.equal(given, rows))
    same = where_on(given, torch.zeros(8, dtype=torch.bool), cut_top_k, counts) is given
    return {
        **filter_probe("apply_top_k", off_k_cases)(seed),
        "where_on returns the tensor itself if no row is on": same,
        "keep_largest leaves the caller's logits": unchanged,
    }


OFF_K_VERDICT = filter_verdict(off_k_cases, top_k_keep)


def off_k_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for the caller's bits and for the caller's tensor."""
    names = ("where_on returns the tensor itself if no row is on", "keep_largest leaves the caller's logits")
    return OFF_K_VERDICT(seed, got) + [f for name in names for f in differences(True, got[name], None, name)]


REGISTRY.add(
    "L4.B.off",
    "A row with k 0, or with a k from the vocabulary's size on, keeps its bits whatever its neighbours ask for.",
    off_k_probe,
    off_k_verdict,
)


# L4.C ---------------------------------------------------------------------------------------------------------------


def top_p_keep(row: spec.Row, p: float) -> Collection[int] | None:
    """Say which ids stay."""
    return None if p == 1 else spec.top_p_ids(row, p)


def min_p_keep(row: spec.Row, share: float) -> Collection[int] | None:
    """Say which ids stay."""
    return None if share == 0 else spec.min_p_ids(row, share)


PS = (0.1, 0.5, 0.6, 0.9, 0.95, 0.99, 1.0, 0.3)


@prepared
def near(rows: Tensor, wanted: list[float]) -> list[float]:
    """Move every p away from the edges of its row; 1 stays 1."""
    return [p if p == 1 else spec.p_near(row, p) for row, p in zip(rows.tolist(), wanted, strict=True)]


def top_p_cases(seed: int) -> dict[str, FilterCase]:
    """Pair every row with every p."""
    rows = mixed_rows(150, seed)
    turned = [[*PS[turn:], *PS[:turn]] for turn in range(len(PS))]
    cases = {f"p turned by {turn}": FilterCase(rows, {"p": near(rows, ps)}) for turn, ps in enumerate(turned)}
    apart = rows_at_heights(150, seed)
    return {**cases, "rows far apart": FilterCase(apart, {"p": near(apart, [0.6, 0.9, 0.5, 0.8])})}


def boundary_cases(seed: int) -> dict[str, FilterCase]:
    """Make masses that every format holds exactly, with p on the edge between two tokens and next to it."""
    four = torch.zeros(6, 4)
    scattered = torch.full((6, 40), -200.0)
    scattered[:, 3::5] = 1.5  # eight equals: 3, 8, 13, … 38
    above, below = 0.5 + 2.0**-40, 0.5 - 2.0**-40  # p is float64
    wide = torch.zeros(6, 4096)
    edges = [count / 4096 for count in (64, 255, 256, 257, 2048, 4095)]
    return {
        "four equals": FilterCase(four, {"p": [0.5, 0.25, 0.75, above, below, 1.0]}),
        "four equals, in every other row all of them": FilterCase(four, {"p": [0.9, 0.5, 0.9, 0.25, 0.9, 0.75]}),
        "eight equals between impossible tokens": FilterCase(scattered, {"p": [0.5, 0.125, 0.875, above, below, 0.25]}),
        "4,096 equals": FilterCase(wide, {"p": edges}),
        "a lone token": FilterCase(torch.tensor([[BANNED, 2.0, BANNED]]).expand(3, 3).clone(), {"p": [0.1, 0.9, 1.0]}),
        "a top token of mass 1": FilterCase(
            torch.tensor([[0.0, 200.0, 0.0]]).expand(2, 3).clone(), {"p": [0.01, 0.99]}
        ),
    }


def wide_cases(seed: int) -> dict[str, FilterCase]:
    """Make nuclei of a few, some hundred and some thousand tokens in one batch, so that a shortened sort shows."""
    rows = random_tensor(6, 3000, seed=seed + 3) * torch.tensor([6.0, 2.0, 1.0, 0.5, 0.1, 4.0])[:, None]
    wanted = [0.9, 0.9, 0.6, 0.95, 0.9, 0.5]
    tied = random_tensor(3, 3000, seed=seed + 4).round()
    return {
        "3,000 tokens": FilterCase(rows, {"p": near(rows, wanted)}),
        "3,000 tokens of seven different logits": FilterCase(tied, {"p": near(tied, [0.2, 0.7, 0.9])}),
    }


def off_p_cases(seed: int) -> dict[str, FilterCase]:
    """Put rows with p 1 among others, whose rounded masses add up to more than 1."""
    rows = mixed_rows(130, seed)
    wide = random_tensor(5, 32000, seed=seed + 5) * 2.0
    return {
        "all off": FilterCase(rows, {"p": [1.0] * 8}),
        "p 1 between others": FilterCase(rows, {"p": near(rows, [1.0, 0.5, 1.0, 0.9, 1.0, 0.5, 1.0, 1.0])}),
        "32,000 tokens": FilterCase(wide, {"p": near(wide, [1.0, 0.5, 1.0, 0.8, 1.0])}),
    }


for check_id, proves, top_p_set in (
    ("L4.C.top_p", "Each row keeps the likeliest tokens until their mass reaches its own p.", top_p_cases),
    (
        "L4.C.boundary",
        "A token stays exactly if the mass before it is below p; of equals the highest ids go first.",
        boundary_cases,
    ),
    ("L4.C.wide", "The nucleus is found whole, be it three tokens or thousands.", wide_cases),
    ("L4.C.off", "A row with p 1 keeps its bits among rows with a smaller p, also at 32,000 tokens.", off_p_cases),
):
    REGISTRY.add(check_id, proves, filter_probe("apply_top_p", top_p_set), filter_verdict(top_p_set, top_p_keep))


@prepared
def min_p_cases(seed: int) -> dict[str, FilterCase]:
    """Pair rows with shares, some rows off; a share of 1 keeps the likeliest token and its equals."""
    rows = mixed_rows(150, seed)
    cases = {}
    for turn in range(0, 8, 2):
        wanted = [0.05, 0.0, 0.5, 0.1, 0.9, 0.02, 0.0, 0.3]
        wanted = wanted[turn:] + wanted[:turn]
        shares = [m and spec.share_near(row, m) for row, m in zip(rows.tolist(), wanted, strict=True)]
        cases[f"shares turned by {turn}"] = FilterCase(rows, {"min_p": shares})
    cases["all off"] = FilterCase(rows, {"min_p": [0.0] * 8})
    cases["a share of 1"] = FilterCase(rows, {"min_p": [1.0] * 8})
    apart = rows_at_heights(150, seed)
    shares = [spec.share_near(row, 0.2) for row in apart.tolist()]
    cases["rows far apart"] = FilterCase(apart, {"min_p": shares})
    wide = random_tensor(3, 32000, seed=seed + 6) * 2.0
    shares = [0.0, spec.share_near(wide[1].tolist(), 0.02), 0.0]
    cases["32,000 tokens"] = FilterCase(wide, {"min_p": shares})
    return cases


REGISTRY.add(
    "L4.C.min_p",
    "A token stays if it is at least min_p times as likely as the likeliest; one exactly at the limit stays.",
    filter_probe("apply_min_p", min_p_cases),
    filter_verdict(min_p_cases, min_p_keep),
)


def joint_keep(row: spec.Row, k: int, p: float) -> Collection[int] | None:
    """Say which ids both filters keep, each judging the whole row."""
    if top_k_keep(row, k) is None and p == 1:
        return None
    return set(spec.top_k_ids(row, k)) & set(top_p_keep(row, p) or range(len(row)))


def vector(masses: list[float], rows: int) -> Tensor:
    """Return these masses as logits, ``rows`` times."""
    return torch.tensor(masses).log().expand(rows, len(masses)).clone()


def joint_cases(seed: int) -> dict[str, FilterCase]:
    """Pair k with p, each of them off in some rows."""
    rows = mixed_rows(80, seed)
    example = vector([0.5, 0.2, 0.15, 0.15], 6)
    wanted = [0.6, 0.9, 1.0, 0.5, 0.3, 1.0, 0.95, 0.6]
    wide = random_tensor(2, 32000, seed=seed + 8) * 2.0
    above_one = torch.full((4, 40), -40.0)
    above_one[:, 5:15] = 0.0
    return {
        "0.5 0.2 0.15 0.15": FilterCase(example, {"k": [2, 2, 3, 0, 0, 9], "p": [0.6, 1.0, 0.6, 0.6, 1.0, 0.8]}),
        "no row has k": FilterCase(example, {"k": [0] * 6, "p": [0.6, 1.0, 0.6, 0.6, 1.0, 0.8]}),
        "no row has p": FilterCase(example, {"k": [2, 0, 3, 0, 0, 9], "p": [1.0] * 6}),
        "ten of 0.1, whose float32 sum is above 1": FilterCase(
            above_one, {"k": [0, 12, 8, 0], "p": [0.45, 1.0, 1.0, 1.0]}
        ),
        "32,000 tokens": FilterCase(wide, {"k": [0, 50], "p": near(wide, [1.0, 0.9])}),
        "eight rows": FilterCase(rows, {"k": [3, 50, 2, 0, 40, 0, 1, 80], "p": near(rows, wanted)}),
    }


@prepared
def after_k_cases(seed: int) -> dict[str, FilterCase]:
    """Pair k with p as ``joint_cases`` does, with p kept off the edges of what top-k leaves."""
    rows = mixed_rows(80, seed)
    example = vector([0.5, 0.2, 0.15, 0.15], 5)
    ks = [3, 50, 2, 0, 40, 0, 1, 80]
    wanted = [0.6, 0.9, 1.0, 0.5, 0.3, 1.0, 0.95, 0.6]
    left = [spec.only(row, spec.top_k_ids(row, k)) for row, k in zip(rows.tolist(), ks, strict=True)]
    return {
        "0.5 0.2 0.15 0.15": FilterCase(example, {"k": [2, 2, 3, 0, 9], "p": [0.6, 1.0, 0.6, 0.6, 0.8]}),
        "eight rows": FilterCase(rows, {"k": ks, "p": near(torch.tensor(left), wanted)}),
    }


def joint_probe(seed: int) -> Values:
    """Filter jointly, and one after the other."""
    from mini_engine.sampler.filters import apply_top_k, apply_top_p

    joint = filter_probe("apply_joint", joint_cases)(seed)
    in_turn: Values = {}
    for name, case in after_k_cases(seed).items():
        k, p = case.arguments()
        in_turn[name] = apply_top_p(apply_top_k(case.logits.clone(), k), p)
    return {"jointly": joint, "top-k first": in_turn}


JOINT_VERDICT = filter_verdict(joint_cases, joint_keep)


def joint_verdict(seed: int, got: Values) -> list[Failure]:
    """Ask for both sets; they differ where top-k leaves less mass than p."""
    failures = JOINT_VERDICT(seed, got["jointly"])
    for name, case in after_k_cases(seed).items():
        kept: list[Collection[int] | None] = []
        for row, (k, p) in zip(case.logits.tolist(), zip(*case.parameters.values(), strict=True), strict=True):
            left = spec.only(row, spec.top_k_ids(row, k))
            kept.append(None if joint_keep(row, k, p) is None else top_p_keep(left, p) or spec.top_k_ids(row, k))
        failures += row_failures(f"{name}, top-k first", case, kept, got["top-k first"][name])
    return failures


REGISTRY.add(
    "L4.C.joint",
    "Jointly, top-p judges the whole distribution; after top-k it judges what top-k left, and keeps fewer.",
    joint_probe,
    joint_verdict,
)
