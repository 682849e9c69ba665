"""The checks of L8.A to L8.C: bitmask, norm, activation and rotation, one program for each few rows.

Owns: shapes that are not multiples of a block, strides of every kind, numbers at the edge of what a dtype holds.
Kernels run in Triton's interpreter, on CPU tensors. Attention is in ``e_attention.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smoke.checks.l7.spec_regular import bits_of
from smoke.checks.l8.guard import FAR, ON_GPU, Guard, bits, guarded
from smoke.checks.l8.spec_kernels import DTYPES, draw, draw_bits, near, norm, rotation, rounded_alike, silu_product
from smoke.framework.check import Failure, Registry, Values
from smoke.framework.compare import bitwise, differences

REGISTRY = Registry()
NOISE = 3.25  # around tensors that are written in place: no operation leaves it as it is

# L8.A ---------------------------------------------------------------------------------------------------------------

VOCABULARIES = (1, 31, 32, 33, 64, 100, 2048, 2049)  # around one word, around the words of one program


@dataclass(frozen=True)
class Masking:
    """Logits, masks and the rows that the masks belong to; ``gap`` numbers lie between two rows of each.

    ``is_far``: a kernel finds the rows of both 2**30 numbers apart.
    """

    logits: Tensor
    mask: Tensor
    rows: list[int] | None = None
    gap: int = 0
    is_far: bool = False


Maskings = Callable[[int], dict[str, Masking]]


def draw_mask(rows: int, vocab_size: int, seed: int) -> Tensor:
    """Draw words, a third of which allow nothing and a third everything; bits past the vocabulary are drawn as well."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, -(-vocab_size // 32))
    words = torch.randint(-(2**31), 2**31, shape, generator=generator)
    kind = torch.randint(0, 3, shape, generator=generator)
    return torch.where(kind == 0, 0, torch.where(kind == 1, -1, words)).to(torch.int32)


def single_bits() -> Tensor:
    """Return 70 masks of 70 tokens; mask i allows token i alone."""
    masks = torch.zeros(70, 3, dtype=torch.int64)
    for token in range(70):
        masks[token, token // 32] = 1 << token % 32
    return torch.where(masks == 2**31, -(2**31), masks).to(torch.int32)


def mask_sizes(seed: int) -> dict[str, Masking]:
    """Return logits of any bits under masks of every size."""
    cases = {
        f"{dtype} [3, {size}]": Masking(
            draw_bits(3, size, seed=seed + size, dtype=dtype), draw_mask(3, size, seed + size)
        )
        for size in VOCABULARIES
        for dtype in DTYPES
    }
    cases["[70, 70], row i allows token i alone"] = Masking(draw(70, 70, seed=seed), single_bits())
    return cases


def mask_rows(seed: int) -> dict[str, Masking]:
    """Return masks for some rows: out of order, one twice, and numbers that are not rows."""
    logits = draw(5, 100, seed=seed)
    mask = draw_mask(3, 100, seed)
    nothing = torch.zeros(4, 4, dtype=torch.int32)
    return {
        "rows 4, 0 and 3": Masking(logits, mask, [4, 0, 3]),
        "rows 1, 2 and 1 again": Masking(logits, mask, [1, 2, 1]),
        "no row": Masking(logits, mask[:0], []),
        "row 1 among numbers that are no rows": Masking(logits, nothing, [-1, 5, 1, -2]),
    }


def mask_far(seed: int) -> dict[str, Masking]:
    """Return numbers whose lower halves are those of rows, and rows whose offsets are beyond 2**31."""
    far = [2**32 + 3, 2 - 2**32, 1]
    logits = draw(5, 100, seed=seed)
    mask = draw_mask(5, 100, seed)
    return {
        "row 1 next to 2**32 + 3": Masking(logits, torch.zeros(3, 4, dtype=torch.int32), far),
        "rows 2**30 apart": Masking(logits, mask, is_far=True),
        "rows 4, 1 and 3, 2**30 apart": Masking(logits, mask[:3], [4, 1, 3], is_far=True),
    }


def mask_memory(seed: int) -> dict[str, Masking]:
    """Return rows that lie apart, and last words that reach beyond the vocabulary."""
    mask = draw_mask(3, 100, seed)
    mask[:, -1] = 0  # bans tokens 96 to 127, of which 4 exist
    return {
        "a last word of which 4 tokens exist": Masking(draw(3, 100, seed=seed), mask),
        "rows apart": Masking(draw(3, 100, seed=seed), mask, gap=3),
        "some rows, apart": Masking(draw(5, 100, seed=seed), mask, [2, 4, 0], gap=40),
        "rows of two programs, apart": Masking(draw(2, 4000, seed=seed), draw_mask(2, 4000, seed + 1), gap=5),
    }


def mask_probe(cases: Maskings) -> Callable[[int], Values]:
    """Return a probe that masks in place, every tensor in separate memory."""

    def probe(seed: int) -> Values:
        from mini_engine.kernels.token_bitmask import apply_token_bitmask

        values: Values = {}
        for name, case in cases(seed).items():
            with guarded() as guard:
                logits = guard.put("the logits", case.logits, case.gap, NOISE)
                guard.unread.add("the logits")
                mask = guard.put("the masks", case.mask, case.gap, 0)
                if case.is_far:
                    guard.stretch("the logits", logits)
                    guard.stretch("the masks", mask)
                rows = (
                    None if case.rows is None else guard.put("rows", torch.tensor(case.rows, dtype=torch.int64), 0, 0)
                )
                apply_token_bitmask(logits, mask, rows)
            values[name] = {"bits of the logits": bits(logits), ON_GPU: guard.faults()}
        return values

    return probe


def mask_spec(cases: Maskings) -> Callable[[int], Values]:
    """Return a spec that bans token by token."""

    def spec(seed: int) -> Values:
        values: Values = {}
        for name, case in cases(seed).items():
            after = bits(case.logits).clone()
            lowest = bits(torch.tensor([-torch.inf], dtype=case.logits.dtype))[0]
            rows = list(range(len(case.mask))) if case.rows is None else case.rows
            for row, words in zip(rows, case.mask.tolist(), strict=True):
                if 0 <= row < len(after):
                    after[row, ~torch.tensor(bits_of(words, after.shape[1]))] = lowest
            values[name] = {"bits of the logits": after, ON_GPU: []}
        return values

    return spec


MASK_CHECKS: dict[str, tuple[str, Maskings]] = {
    "bits": (
        "Banned logits are minus infinity and allowed ones keep their bits, for vocabularies of every size.",
        mask_sizes,
    ),
    "rows": (
        "Each mask goes to the row that is named; a row named twice is banned by both, no row is skipped.",
        mask_rows,
    ),
    "int64": (
        "Row numbers and offsets have 64 bits: 2**32 + 3 is beyond the rows, and rows may lie 2**30 apart.",
        mask_far,
    ),
    "memory": ("Rows may lie any distance apart, and nothing between or after them is written.", mask_memory),
}
for _name, (_proves, _cases) in MASK_CHECKS.items():
    REGISTRY.add(f"L8.A.{_name}", _proves, mask_probe(_cases), bitwise(mask_spec(_cases)))

# L8.B ---------------------------------------------------------------------------------------------------------------

EPS = 1e-6


@dataclass(frozen=True)
class Norming:
    """Rows to norm; with ``residual`` they are added to it first. ``gap`` numbers lie between two rows of each.

    ``is_far``: the kernel finds the rows that are added 2**30 numbers apart.
    """

    x: Tensor
    weight: Tensor
    eps: float = EPS
    residual: Tensor | None = None
    gap: int = 0
    is_far: bool = False

    @property
    def dtype(self) -> str:
        """The dtype's name."""
        return str(self.x.dtype).removeprefix("torch.")

    @property
    def total(self) -> Tensor:
        """What is normed: the sum, rounded to the dtype of the residual."""
        return self.x if self.residual is None else (self.x.double() + self.residual.double()).to(self.residual.dtype)


Normings = Callable[[int], dict[str, Norming]]
ROW_SHAPES = ((1, 1), (3, 20), (5, 96), (2, 128), (7, 1000), (2, 3, 20), (140, 20), (0, 8))


def norm_rows(seed: int) -> dict[str, Norming]:
    """Return rows of every width, loud and quiet; the narrow ones share a tile with hundreds of others."""
    cases: dict[str, Norming] = {}
    for dtype in DTYPES:
        for shape in ROW_SHAPES:
            weight = draw(shape[-1], seed=seed + 1, dtype=dtype)
            cases[f"{dtype} {list(shape)}"] = Norming(draw(*shape, seed=seed, dtype=dtype) * 3, weight)
        weight = draw(96, seed=seed + 1, dtype=dtype)
        cases[f"{dtype}, eps 0.5"] = Norming(draw(4, 96, seed=seed, dtype=dtype), weight, 0.5)
        cases[f"{dtype}, numbers about 0.001"] = Norming(draw(4, 96, seed=seed, dtype=dtype) / 1000, weight)
        cases[f"{dtype}, numbers about 300"] = Norming(draw(4, 96, seed=seed, dtype=dtype) * 300, weight)
        cases[f"{dtype}, zeros"] = Norming(torch.zeros(2, 96, dtype=DTYPES[dtype]), weight)
    return cases


def norm_sums(seed: int) -> dict[str, Norming]:
    """Return rows that are added first; large residuals, so that the rounding of the sum shows in its norm."""
    cases: dict[str, Norming] = {}
    for dtype in DTYPES:
        for rows, width in ((5, 96), (140, 20), (3, 700), (0, 8)):
            x = draw(rows, width, seed=seed, dtype=dtype)
            residual = draw(rows, width, seed=seed + 2, dtype=dtype) * 9
            weight = draw(width, seed=seed + 1, dtype=dtype)
            cases[f"{dtype} [{rows}, {width}]"] = Norming(x, weight, residual=residual)
            cases[f"{dtype} [{rows}, {width}], rows apart"] = Norming(x, weight, residual=residual, gap=rows % 4 + 2)
    x = draw(5, 96, seed=seed, dtype="float16")
    residual = draw(5, 96, seed=seed + 2) * 9
    weight = draw(96, seed=seed + 1)
    cases["float16, residual and weight float32"] = Norming(x, weight, residual=residual)
    cases["rows 2**30 numbers apart"] = Norming(residual, weight, residual=residual[[4, 3, 2, 1, 0]], is_far=True)
    return cases


def norm_memory(seed: int) -> dict[str, Norming]:
    """Return rows that lie apart, as those of a slice of a projection do."""
    cases: dict[str, Norming] = {}
    for rows, width, gap in ((3, 20, 5), (40, 100, 1), (5, 1000, 24), (1, 7, 9)):
        x = draw(rows, width, seed=seed)
        weight = draw(width, seed=seed + 1)
        cases[f"[{rows}, {width}], {gap} numbers between two rows"] = Norming(x, weight, gap=gap)
    return cases


def norm_probe(cases: Normings) -> Callable[[int], Values]:
    """Return a probe that norms, every tensor in separate memory."""

    def probe(seed: int) -> Values:
        from mini_engine.kernels.rms_norm import add_rms_norm, rms_norm

        values: Values = {}
        for name, case in cases(seed).items():
            with guarded() as guard:
                x = guard.put("x", case.x, case.gap)
                weight = guard.put("the weight", case.weight)
                values[name] = {}
                if case.residual is None:
                    out = rms_norm(x, weight, case.eps)
                else:
                    # Other strides than those of x and of the output.
                    residual = guard.put("the residual", case.residual, 2 * case.gap, NOISE)
                    if case.is_far:
                        guard.stretch("x", x)
                        guard.stretch("the residual", residual)
                    out = add_rms_norm(x, residual, weight, case.eps)
                    values[name]["bits of the sum"] = bits(residual)
            values[name] |= {"norm": out, "x is as it was": torch.equal(bits(x), bits(case.x)), ON_GPU: guard.faults()}
        return values

    return probe


def norm_verdict(cases: Normings) -> Callable[[int, Values], list[Failure]]:
    """Return a verdict in float64; the sum is compared to the bit."""

    def verdict(seed: int, got: Values) -> list[Failure]:
        failures: list[Failure] = []
        for name, case in cases(seed).items():
            exact = norm(case.total, case.weight, case.eps, case.dtype)
            mine = dict(got[name])
            # What is rounded twice may come out two neighbours away if float32 rounds the other way first.
            bounds = {"float32": (0.0, 2e-6), "float16": (2.0, 0.0)}[case.dtype]
            found = near(f"{name}, norm", exact, mine.pop("norm"), case.dtype, *bounds)
            expected: Values = {"x is as it was": True, ON_GPU: []}
            if case.residual is not None:
                expected["bits of the sum"] = bits(case.total)
            failures += [*differences(expected, mine, None, name), *found]
        return failures[:8]

    return verdict


def norm_rounding_verdict(seed: int, got: Values) -> list[Failure]:
    """Count the numbers that are not the twice rounded ones."""
    failures: list[Failure] = []
    for name, case in norm_halves(seed).items():
        rounded = norm(case.total, case.weight, case.eps, case.dtype).to(case.x.dtype)
        rule = "the norm is rounded before it is multiplied by the weight, and the sum before it is normed"
        failures += rounded_alike(name, rounded, got[name]["norm"], rule)
    return failures


def norm_halves(seed: int) -> dict[str, Norming]:
    """Return many numbers of 16 bits, added first or not."""
    x = draw(40, 120, seed=seed, dtype="float16")
    weight = draw(120, seed=seed + 1, dtype="float16")
    return {
        "norm": Norming(x, weight),
        "norm, weight float32": Norming(x, draw(120, seed=seed + 1)),
        "norm of a sum": Norming(x, weight, residual=draw(40, 120, seed=seed + 2, dtype="float16") * 9),
    }


def norm_both(guard: Guard, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of ``x``, and that of its sum with ``residual``."""
    from mini_engine.kernels.rms_norm import add_rms_norm, rms_norm

    given, scale = guard.put("x", x), guard.put("the weight", weight)
    total = guard.put("the residual", residual, margin=NOISE)
    return rms_norm(given, scale, EPS), add_rms_norm(given, total, scale, EPS)


def norm_alone_probe(seed: int) -> Values:
    """Norm rows among many, and each alone."""
    values: Values = {}
    for width in (20, 128, 1000):
        x = draw(40, width, seed=seed)
        residual = draw(40, width, seed=seed + 2)
        weight = draw(width, seed=seed + 1)
        with guarded() as guard:
            among = norm_both(guard, x, residual, weight)
            for row in (0, 33, 39):
                alone = norm_both(guard, x[row : row + 1], residual[row : row + 1], weight)
                for name, mine, whole in zip(("", ", added first"), alone, among, strict=True):
                    values[f"row {row} of [40, {width}]{name}"] = torch.equal(mine[0], whole[row])
    return values


def alone_verdict(seed: int, got: Values) -> list[Failure]:
    """All comparisons hold."""
    return [
        Failure(name, "", "the same bits alone and among others", "other bits")
        for name, same in got.items()
        if not same
    ]


REGISTRY.add(
    "L8.B.norm",
    "Every row is divided by its root mean square and multiplied by the weight, to the last places of its dtype.",
    norm_probe(norm_rows),
    norm_verdict(norm_rows),
)
REGISTRY.add(
    "L8.B.sum",
    "The rounded sum stays in the residual, to the bit, and its norm comes back.",
    norm_probe(norm_sums),
    norm_verdict(norm_sums),
)
REGISTRY.add(
    "L8.B.memory",
    "Rows may lie any distance apart; nothing between them is read, and nothing outside the output is written.",
    norm_probe(norm_memory),
    norm_verdict(norm_memory),
)
REGISTRY.add(
    "L8.B.rounding",
    "In 16 bits the sum is rounded before it is normed, and the norm before it is multiplied, as L1 rounds them.",
    norm_probe(norm_halves),
    norm_rounding_verdict,
)
REGISTRY.add("L8.B.alone", "A row has the same bits alone and among others.", norm_alone_probe, alone_verdict)

# L8.C ---------------------------------------------------------------------------------------------------------------

GATES = (-65504.0, -200.0, -90.0, -30.0, -5.0, -0.5, 0.0, 0.5, 20.0, 90.0, 200.0, 65504.0)
SILU_SHAPES = ((1, 1, 0), (3, 20, 7), (5, 96, 0), (2, 1000, 1), (2, 1025, 3), (1, 2100, 0), (0, 20, 0), (3, 0, 0))
ROTARY_SHAPES = ((1, 2, 1, 32), (5, 4, 2, 64), (3, 8, 1, 128), (4, 3, 3, 20), (2, 5, 2, 2), (0, 2, 1, 32))


def silu_rows(seed: int) -> dict[str, tuple[Tensor, int]]:
    """Return gates with what they multiply, and the numbers between two rows; ``FAR`` is what the kernel is told."""
    cases: dict[str, tuple[Tensor, int]] = {}
    for dtype in DTYPES:
        for rows, width, gap in SILU_SHAPES:
            cases[f"{dtype} [{rows}, 2 * {width}], {gap} numbers between two rows"] = (
                draw(rows, 2 * width, seed=seed, dtype=dtype) * 3,
                gap,
            )
        edges = torch.tensor([[gate, 0.5] for gate in GATES], dtype=DTYPES[dtype])
        cases[f"{dtype}, gates {list(GATES)}"] = (edges, 0)
    cases["rows 2**30 numbers apart"] = (draw(5, 2 * 20, seed=seed), FAR)
    return cases


def silu_probe(seed: int) -> Values:
    """Activate, every tensor in separate memory; a row alone, too."""
    from mini_engine.kernels.silu_and_mul import silu_and_mul

    values: Values = {}
    for name, (gate_up, gap) in silu_rows(seed).items():
        with guarded() as guard:
            given = guard.put("gate and up", gate_up, gap % FAR)
            out = silu_and_mul(guard.stretch("gate and up", given) if gap == FAR else given)
            alone = silu_and_mul(guard.put("the last row", gate_up[-1:]))
        same = torch.equal(alone, out[-1:])
        values[name] = {"product": out, ON_GPU: guard.faults(), "the last row alone has the same bits": same}
    return values


def silu_verdict(seed: int, got: Values) -> list[Failure]:
    """Activate in float64."""
    failures: list[Failure] = []
    for name, (gate_up, _) in silu_rows(seed).items():
        mine = dict(got[name])
        dtype = str(gate_up.dtype).removeprefix("torch.")
        exact = silu_product(gate_up)
        product = mine.pop("product")
        found = near(name, exact, product, dtype, 0.0 if dtype == "float32" else 1.0)
        if dtype == "float16" and exact.numel() > 999 and not found:
            found = rounded_alike(name, exact.to(product.dtype), product, "only the product is rounded")
        expected = {ON_GPU: [], "the last row alone has the same bits": True}
        failures += [*differences(expected, mine, None, name), *found]
    return failures[:8]


@dataclass(frozen=True)
class Turning:
    """q, k and v of one projection, ``heads`` [T, Hq + 2 Hkv, D], with ``gap`` numbers between two heads."""

    heads: Tensor
    num_heads: int
    num_kv_heads: int
    angles: Tensor  # cos and sin [2, T, D / 2], in the dtype of the heads or in float32
    gap: int


def turnings(seed: int) -> dict[str, Turning]:
    """Return projections of every shape."""
    cases: dict[str, Turning] = {}
    for dtype in DTYPES:
        for tokens, num_heads, num_kv_heads, dim in ROTARY_SHAPES:
            heads = draw(tokens, num_heads + 2 * num_kv_heads, dim, seed=seed, dtype=dtype)
            angle = draw(tokens, dim // 2, seed=seed + 1) * 3
            angles = torch.stack((angle.cos(), angle.sin())).to(DTYPES[dtype])
            name = f"{dtype}, {tokens} tokens, {num_heads} and {num_kv_heads} heads of {dim}"
            cases[name] = Turning(heads, num_heads, num_kv_heads, angles, dim % 7)
    angle = draw(9, 10, seed=seed + 1) * 3
    heads = draw(9, 5, 20, seed=seed, dtype="float16")
    cases["float16, angles in float32"] = Turning(heads, 3, 1, torch.stack((angle.cos(), angle.sin())), 3)
    return cases


def rotary_probe(seed: int) -> Values:
    """Turn the heads where the projection left them; a token alone, too."""
    from mini_engine.kernels.rotary import apply_rotary

    values: Values = {}
    for name, case in turnings(seed).items():
        bounds = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
        with guarded() as guard:
            heads = guard.put("the heads", case.heads, case.gap, NOISE)
            q, k, v = heads.split(bounds, dim=1)
            # Both numbers of a pair take the same angle, so nothing reads the second half of either table.
            unread = torch.full_like(case.angles, torch.nan)
            cos, sin = torch.cat((case.angles, unread), dim=-1)
            cos, sin = guard.put("cos", cos, 3), guard.put("sin", sin, 4)
            apply_rotary(q, k, cos, sin)
            alone_q, alone_k, _ = guard.put("the last token", case.heads[-1:], 0, NOISE).split(bounds, dim=1)
            apply_rotary(alone_q, alone_k, cos[-1:], sin[-1:])
        same = torch.equal(alone_q, q[-1:]) and torch.equal(alone_k, k[-1:])
        values[name] = {"q": q, "k": k, "v": v, ON_GPU: guard.faults(), "the last token alone has the same bits": same}
    return values


def rotary_verdict(seed: int, got: Values) -> list[Failure]:
    """Turn in float64; values stay."""
    failures: list[Failure] = []
    for name, case in turnings(seed).items():
        mine = dict(got[name])
        dtype = str(case.heads.dtype).removeprefix("torch.")
        q, k, v = case.heads.split((case.num_heads, case.num_kv_heads, case.num_kv_heads), dim=1)
        for part, x in (("q", q), ("k", k)):
            exact = rotation(x, case.angles)
            failures += near(f"{name}, {part}", exact, mine.pop(part), dtype, 0.0 if dtype == "float32" else 1.0)
        expected = {"v": v, ON_GPU: [], "the last token alone has the same bits": True}
        failures += differences(expected, mine, None, name)
    return failures[:8]


REGISTRY.add(
    "L8.C.silu",
    "silu(gate) * up in every width, rounded once; gates of any size give no NaN, and a row has the same bits alone.",
    silu_probe,
    silu_verdict,
)
REGISTRY.add(
    "L8.C.rotary",
    "All heads of q and k are turned in place, whatever their distance; values and what lies between stay as they are.",
    rotary_probe,
    rotary_verdict,
)
