"""What the kernels of L8 must compute, in float64 and one number after the other, and how far a result may be from it.

Owns: inputs of attention, exact results, and the words about the first number that is too far away. Must not know: the
engine, Triton.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from smoke.framework.check import Failure, Plain
from smoke.framework.compare import number, place_of, shorten

DTYPES = {"float32": torch.float32, "float16": torch.float16}  # the interpreter holds bfloat16 wrongly
COPIED = {**DTYPES, "float64": torch.float64}  # what a copy must not convert
MOST_OTHERS = 0.01  # of the numbers may be rounded otherwise: float32 and float64 hardly ever disagree about that


def draw(*shape: int, seed: int, dtype: str = "float32") -> Tensor:
    """Draw normal numbers: no two alike and no symmetry, so that a wrong index shows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DTYPES[dtype])


def draw_bits(*shape: int, seed: int, dtype: str = "float32") -> Tensor:
    """Draw any bits: infinities, subnormals and NaN of every payload among them."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[COPIED[dtype].itemsize]
    limits = torch.iinfo(integers)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(limits.min, limits.max, shape, generator=generator, dtype=torch.int64)
    return drawn.to(integers).view(COPIED[dtype])


# How far away ---------------------------------------------------------------------------------------------------------


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighbouring numbers of ``dtype`` at each of ``x`` (float64)."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.double()).exponent - 1
    return (info.eps * torch.exp2(exponent.double())).clamp(min=info.smallest_normal * info.eps)


def near(case: str, exact: Tensor, got: Plain, dtype: str, ulps: float = 0.0, relative: float = 2e-6) -> list[Failure]:
    """Accept ``got`` of ``dtype`` at most ``ulps`` of its neighbours, and ``relative`` of its row, from ``exact``.

    ``exact`` [..., H] float64; ``relative`` is of the largest exact number of the row. NaN and infinities are too far;
    what is about float32's least normal number may as well be 0.
    """
    kind = DTYPES[dtype]
    if not isinstance(got, Tensor):
        return [Failure(case, "", f"a tensor {list(exact.shape)}", shorten(got))]
    if got.shape != exact.shape or got.dtype != kind:
        return [Failure(case, "shape and dtype", f"{list(exact.shape)}, {kind}", f"{list(got.shape)}, {got.dtype}")]
    if not exact.numel():
        return []
    rounded = exact.to(kind).double()
    bound = ulps * spacing(exact, kind) + relative * exact.abs().amax(-1, keepdim=True)
    bound += torch.finfo(torch.float32).smallest_normal * 4
    gap = (got.double() - rounded).abs()
    worst = float((gap / exact.abs().amax(-1, keepdim=True).clamp(min=1e-30)).nan_to_num(torch.inf).max())
    return first_wrong(case, rounded, got, gap <= bound, f"by up to {worst:.3g} of their row's largest")


def first_wrong(case: str, exact: Tensor, got: Tensor, is_near: Tensor, how_far: str) -> list[Failure]:
    """Name the first number that is not near, and how many there are. All of one shape; a NaN is near to nothing."""
    wrong = ~is_near
    if not bool(wrong.any()):
        return []
    index = tuple(wrong.nonzero()[0].tolist())
    note = f"{int(wrong.sum())} of {wrong.numel()} numbers are too far away, {how_far}"
    return [Failure(case, place_of(index), number(exact[index]), number(got[index]), note)]


def rounded_alike(case: str, rounded: Tensor, got: Tensor, rule: str) -> list[Failure]:
    """Accept ``got`` if hardly any number is not the one of ``rounded``; ``rule`` says what is rounded, and when."""
    share = float((got != rounded).double().mean())
    if share <= MOST_OTHERS:
        return []
    return [Failure(case, "numbers rounded otherwise", f"hardly any: {rule}", f"{share:.0%}")]


# Row by row -----------------------------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor, eps: float, dtype: str) -> Tensor:
    """Norm each row of ``x`` [..., H]: rounded to ``dtype`` before the weight, as L1 does. float64."""
    wide = x.double()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return weight.double() * normed.to(DTYPES[dtype]).double()


def silu_product(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of ``gate_up`` [T, 2 F]. float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1.0 + torch.exp(-gate)) * up


def rotation(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of ``x`` [T, heads, D] by ``angles`` = (cos, sin) [2, T, D/2]. float64.

    A rotation is a product of complex numbers.
    """
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.complex(*angles[:, :, None].double())
    return torch.cat((turned.real, turned.imag), dim=-1)


# Attention ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sequences:
    """A step of several sequences: ``lengths`` are the queries and the keys of each.

    ``growth``: the last key is so much longer than the first, so that later keys weigh more. ``offset``: is added to
    the values.
    """

    lengths: tuple[tuple[int, int], ...]
    page_size: int
    heads: tuple[int, int]  # query heads, key-value heads
    dim: int
    dtype: str = "float32"
    growth: float = 0.0
    offset: float = 0.0

    @property
    def bounds(self) -> list[int]:
        """Where each sequence's rows begin among the packed rows, and where the last one's end."""
        return list(accumulate((queries for queries, _ in self.lengths), initial=0))

    def drawn(self, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return q [queries, Hq, D], k and v [Hkv, keys, D] of each; they depend on its lengths, not on its company."""
        (num_heads, num_kv_heads) = self.heads
        found = []
        for queries, keys in self.lengths:
            stretch = 1 + self.growth * torch.linspace(0, 1, keys)[:, None]
            own = random.Random(f"{seed} {queries} {keys}").randrange(2**40)
            found.append(
                (
                    draw(queries, num_heads, self.dim, seed=own, dtype=self.dtype),
                    draw(num_kv_heads, keys, self.dim, seed=own + 1, dtype=self.dtype) * stretch.to(DTYPES[self.dtype]),
                    draw(num_kv_heads, keys, self.dim, seed=own + 2, dtype=self.dtype) + self.offset,
                )
            )
        return found

    def pages(self, seed: int) -> list[list[int]]:
        """Return the pages of each sequence, in no order; some belong to none."""
        counts = [-(-keys // self.page_size) for _, keys in self.lengths]
        free = list(range(sum(counts) + 3))
        random.Random(f"pages {seed}").shuffle(free)
        return [free[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


def attend(q: Tensor, key: Tensor, value: Tensor, factor: float = 1.0) -> Tensor:
    """Attend, one query and one head at a time. ``q`` [n, Hq, D], ``key``, ``value`` [Hkv, L, D] -> [n, Hq, D] float64.

    The last query sees all keys, and every one before it one fewer. ``factor``: of all scores.
    """
    out = torch.zeros(q.shape, dtype=torch.float64)
    before = key.shape[1] - len(q)
    group = q.shape[1] // key.shape[0]
    for index in range(len(q)):
        for head in range(q.shape[1]):
            seen = key[head // group, : before + index + 1].double()
            scores = (seen * q[index, head].double()).sum(1) * factor / q.shape[2] ** 0.5
            weights = torch.softmax(scores, 0)
            out[index, head] = weights @ value[head // group, : before + index + 1].double()
    return out


def attend_all(drawn: Sequence[tuple[Tensor, Tensor, Tensor]], factor: float = 1.0) -> Tensor:
    """Attend for every sequence -> [T, Hq, D] float64, packed. ``factor``: of all scores."""
    return torch.cat([attend(*one, factor) for one in drawn])


def rows_of(case: Sequences, chosen: Sequence[int]) -> list[int]:
    """Return the packed rows of the chosen sequences."""
    ranges = list(pairwise(case.bounds))
    return [row for index in chosen for row in range(*ranges[index])]
