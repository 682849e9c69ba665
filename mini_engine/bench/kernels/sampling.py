"""The sampling cases of ``bench kernels``: filters and draws, compared with a sort.

Float masses are rounded. So a token at the edge of a nucleus may be cut by one side and kept by the other, and a number
at the edge between two tokens may draw either. A cut may therefore differ in one token of a row, and a draw by ``EDGE``
of the mass.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mini_engine.bench.kernels.cases import Case, Function, Inputs, Setting
from mini_engine.kernels import argmax, gumbel, min_p, penalties, sample, top_k, top_p
from mini_engine.kernels import top_k_top_p as joint

SORT = "sort"
SORT_GOAL = (SORT, 3.0)
SORT_GOAL_ROWS = 64
K = 50
P = 0.9
MIN_P = 0.05
SEEN = 512  # tokens of a request that penalties apply to
EDGE = 1e-4
OFF = 2.0  # of p: the rounded sum of all masses may be a little above 1


def sort_filter(logits: Tensor, k: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Cut as most samplers in torch do -> sorted logits [R, V], -inf where cut, and their ids [R, V].

    ``k`` [R] and ``p`` [R] differ from row to row in a server; V and ``OFF`` are off.
    """
    values, ids = logits.sort(-1, descending=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    values = values.masked_fill(rank >= k[:, None], -torch.inf)
    probs = values.softmax(-1)
    before = probs.cumsum(-1) - probs
    return values.masked_fill(before >= p[:, None].float(), -torch.inf), ids


def sort_cut(logits: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """Cut by a sort, and scatter the kept logits to their places. [R, V] -> [R, V]."""
    values, ids = sort_filter(logits, k, p)
    return torch.empty_like(logits).scatter_(-1, ids, values)


def sort_draw(logits: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """Cut by a sort and draw. [R, V] -> ids [R]."""
    values, ids = sort_filter(logits, k, p)
    return ids.gather(-1, values.softmax(-1).multinomial(1))[:, 0]


def same_cut(got: Tensor, expected: Tensor, _inputs: Inputs) -> str | None:
    """Return what is wrong, or ``None`` if the same logits are kept, except for one token of a row."""
    both = (got > -torch.inf) & (expected > -torch.inf)
    apart = ((got > -torch.inf) != (expected > -torch.inf)).sum(-1).max()
    if not torch.equal(got[both], expected[both]):
        return "a logit that stays is changed"
    return None if apart <= 1 else f"{int(apart)} tokens of a row are cut by one and not by the other"


def same_draw(got: Tensor, _expected: Tensor, inputs: Inputs) -> str | None:
    """Return what is wrong, or ``None`` if the number of each row lies within the share of its drawn token."""
    logits, k, p, least, uniform = inputs
    cut = joint.apply_top_k_top_p_reference(logits, k, p)
    edges = min_p.apply_min_p_reference(cut, least).double().softmax(-1).cumsum(-1)  # [R, V]
    right = edges.gather(-1, got[:, None])[:, 0]
    left = torch.where(got > 0, edges.gather(-1, (got - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    wrong = (uniform < left - EDGE) | (uniform > right + EDGE)
    return f"{int(wrong.sum())} rows drew a token outside whose share their number lies" if wrong.any() else None


def sampling_cases(setting: Setting) -> Iterator[Case]:
    """Yield every operation on rows of logits."""
    for rows in setting.sizes.sampled_rows:
        yield from filter_cases(setting, rows)
        yield from draw_cases(setting, rows)
        yield penalties_case(setting, rows)


def sampling_case(
    size: str, make: Callable[[int], Inputs], pair: tuple[Function, Function], num_bytes: int, **more: Any
) -> Case:
    """Return the case of a kernel and its reference. ``more``: of ``Case``."""
    kernel, reference = pair
    return Case("sampling", kernel.__name__, size, make, kernel, reference, num_bytes, **more)


def make_logits(setting: Setting, rows: int, seed: int) -> Tensor:
    """Draw logits with a spread of 3, about as peaked as those of a small model."""
    return setting.normal(seed, rows, setting.shape.vocab, dtype=torch.float32) * 3


def filter_cases(setting: Setting, rows: int) -> Iterator[Case]:
    """Yield the filters: logits read and written."""
    vocab = setting.shape.vocab
    device = setting.device
    k = torch.full((rows,), min(K, vocab // 2), device=device)
    p = torch.full((rows,), P, dtype=torch.float64, device=device)
    least = torch.full((rows,), MIN_P, device=device)
    all_k, all_p = torch.full_like(k, vocab), torch.full_like(p, OFF)
    goal = SORT_GOAL if rows == SORT_GOAL_ROWS else None
    forms: list[tuple[Function, Function, tuple[Tensor, ...], Function | None]] = [
        (top_k.apply_top_k, top_k.apply_top_k_reference, (k,), lambda x, _: sort_cut(x, k, all_p)),
        (top_p.apply_top_p, top_p.apply_top_p_reference, (p,), lambda x, _: sort_cut(x, all_k, p)),
        (joint.apply_top_k_top_p, joint.apply_top_k_top_p_reference, (k, p), lambda x, *_: sort_cut(x, k, p)),
        (min_p.apply_min_p, min_p.apply_min_p_reference, (least,), None),
    ]
    num_bytes = 2 * rows * vocab * torch.float32.itemsize
    for kernel, reference, parameters, by_sort in forms:

        def make(seed: int, parameters: tuple[Tensor, ...] = parameters) -> Inputs:
            return make_logits(setting, rows, seed), *parameters

        more = {"peers": {SORT: by_sort}, "goal": goal} if by_sort else {}
        yield sampling_case(f"{rows} x {vocab}", make, (kernel, reference), num_bytes, check=same_cut, **more)


def draw_cases(setting: Setting, rows: int) -> Iterator[Case]:
    """Yield the operations that return token ids: logits read."""
    vocab = setting.shape.vocab
    device = setting.device
    num_bytes = rows * setting.shape.vocab * torch.float32.itemsize
    k = torch.full((rows,), min(K, vocab // 2), device=device)
    p = torch.full((rows,), P, dtype=torch.float64, device=device)
    least = torch.zeros(rows, device=device)  # off
    positions = torch.arange(rows, device=device)

    def make_draw(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        uniform = torch.rand(rows, generator=generator, dtype=torch.float64, device=device)
        return make_logits(setting, rows, seed), k, p, least, uniform

    def make_seeded(seed: int) -> Inputs:
        return make_logits(setting, rows, seed), positions + seed, positions

    def make_greedy(seed: int) -> Inputs:
        return (make_logits(setting, rows, seed),)

    size = f"{rows} x {vocab}"
    more = {"peers": {SORT: lambda x, k, p, *_: sort_draw(x, k, p)}, "check": same_draw}
    goal = SORT_GOAL if rows == SORT_GOAL_ROWS else None
    drawn = sample.sample_top_k_top_p, sample.sample_top_k_top_p_reference
    yield sampling_case(size, make_draw, drawn, num_bytes, goal=goal, **more)
    yield sampling_case(size, make_seeded, (gumbel.draw_seeded, gumbel.draw_seeded_reference), num_bytes)
    yield sampling_case(size, make_greedy, (argmax.argmax, argmax.argmax_reference), num_bytes)


def penalties_case(setting: Setting, rows: int) -> Case:
    """Penalise ``SEEN`` tokens of each row: their logits read and written, six numbers read for each."""
    vocab = setting.shape.vocab
    device = setting.device
    seen = min(SEEN, vocab // 2)

    def make(seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.cat([torch.randperm(vocab, generator=generator)[:seen] for _ in range(rows)])
        counts = torch.randint(0, 4, (rows * seen,), generator=generator).float()
        strengths = (torch.full((rows * seen,), value, device=device) for value in (1.1, 0.2, 0.1))
        entries = torch.arange(rows).repeat_interleave(seen), tokens, counts
        return make_logits(setting, rows, seed), *(each.to(device) for each in entries), *strengths

    per_entry = 2 * torch.float32.itemsize + 2 * torch.int64.itemsize + 4 * torch.float32.itemsize
    pair = penalties.apply_penalties, penalties.apply_penalties_reference
    return sampling_case(f"{rows} x {seen} of {vocab}", make, pair, rows * seen * per_entry, in_place=True)
