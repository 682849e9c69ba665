"""What the kernels of lesson 8 do, recorded while they run in Triton's interpreter.

Triton reads ``TRITON_INTERPRET`` once, when it is imported. So Triton is imported inside functions, and
``interpret_kernels`` must be called first.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from unittest import mock

import torch
from torch import Tensor

from mini_engine.attention.metadata import AttentionMetadata
from mini_engine.viz.kernels.work import PROCESSORS, DecodeLaunch, Roof

SWITCH = "TRITON_INTERPRET"
COPY_BYTES = 64 << 20
PRODUCT_SIZE = 1024
REPEATS = 5
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 2, 16, 16  # of the attention whose bits are compared
OUTSIDE, KEPT, ALONE, TOGETHER = range(4)  # what the kernel does with a place of a masked block


def interpret_kernels() -> None:
    """Let this process run kernels in Triton's interpreter, on CPU tensors. Mutates the environment.

    Raises ``ValueError`` if Triton has already been imported without it, because it then compiles for GPUs.
    """
    if os.environ.get(SWITCH) != "1" and "triton" in sys.modules:
        raise ValueError(f"Triton was imported before {SWITCH}=1 was set; restart the kernel and run this cell first")
    os.environ[SWITCH] = "1"


def device() -> torch.device:
    """Return where kernels run in this process."""
    from mini_engine.kernels.launch import INTERPRETED

    return torch.device("cpu" if INTERPRETED else "cuda")


def measure_roof() -> Roof:
    """Measure the bandwidth of a copy and the rate of a float32 product on this CPU, with the threads of torch."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    a = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE)
    target, product = torch.empty_like(source), torch.empty_like(a)
    copied, multiplied = [], []
    for _ in range(REPEATS):
        start = perf_counter()
        target.copy_(source)
        middle = perf_counter()
        torch.mm(a, a, out=product)
        copied.append(middle - start)
        multiplied.append(perf_counter() - middle)
    return Roof("this machine (measured)", 2 * COPY_BYTES / median(copied), 2 * PRODUCT_SIZE**3 / median(multiplied))


def engine_launch(batch: int, context: int) -> DecodeLaunch:
    """Return the launch with the split size that the engine chooses for Qwen3-0.6B on a GPU of ``PROCESSORS``."""
    from mini_engine.kernels.split_attention import choose_split_size

    heads = DecodeLaunch.num_kv_heads
    return DecodeLaunch(batch, context, choose_split_size(context, batch, heads, PROCESSORS))


# ------------------------------------------------------------------------------------------------------ bits in batches


@dataclass(frozen=True)
class Divergence:
    """The output of one decoding row in batches of ``batches`` sequences, compared with the row alone.

    ``ulps`` [B, Hq * D] int64: how many float32 numbers each element is away; ``split_sizes``: keys of a split.
    """

    title: str
    batches: tuple[int, ...]
    split_sizes: tuple[int, ...]
    ulps: Tensor


def batch_divergence(
    batches: Sequence[int] = (1, 2, 3, 4, 5), context: int = 384, processors: int = 1, seed: int = 0
) -> list[Divergence]:
    """Attend for one row in batches of several sizes, all sequences of ``context`` keys, with the engine's kernels.

    The first result has the split sizes that ``choose_split_size`` chooses for each batch and ``processors``, the
    second has the fixed size. With one processor, small batches show what large batches show with 132.
    """
    from mini_engine.kernels.split_attention import INVARIANT_SPLIT, choose_split_size

    sizes = tuple(choose_split_size(context, batch, KV_HEADS, processors) for batch in batches)
    fixed = (INVARIANT_SPLIT,) * len(batches)
    found = []
    for title, own in (("Splits chosen for each batch", sizes), ("A fixed split", fixed)):
        rows = [first_row(batch, context, size, seed) for batch, size in zip(batches, own, strict=True)]
        found.append(Divergence(title, tuple(batches), own, torch.stack([ulps_apart(row, rows[0]) for row in rows])))
    return found


def first_row(batch: int, context: int, split_size: int, seed: int) -> Tensor:
    """Return the attention of the first of ``batch`` decoding sequences [Hq * D] float32. Its inputs never change."""
    from mini_engine.kernels import split_attention
    from mini_engine.kernels.query_blocks import cut_queries, whole_sequences

    pages = -(-context // PAGE_SIZE)
    where = device()
    each = [torch.Generator().manual_seed(seed + number) for number in range(batch)]
    q = torch.cat([torch.randn(1, HEADS, HEAD_DIM, generator=own) for own in each])
    slots = pages * PAGE_SIZE
    pool = torch.cat([torch.randn(2, KV_HEADS, slots, HEAD_DIM, generator=own) for own in each], dim=2)
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=where),
        seq_lens_kv=torch.full((batch,), context, dtype=torch.int32, device=where),
        block_table=torch.arange(batch * pages, dtype=torch.int32, device=where).view(batch, pages),
        slot_mapping=torch.zeros(batch, dtype=torch.int64, device=where),  # nothing is stored
        page_size=PAGE_SIZE,
    )
    queries = split_attention.split_queries(HEADS // KV_HEADS, HEAD_DIM, torch.float32)
    blocks = cut_queries(whole_sequences(metadata), queries, where)
    out = torch.full_like(q, torch.nan, device=where)
    keys, values = pool.to(where)
    split_attention.split_attention(q.to(where), keys, values, metadata, blocks, out, split_size)
    return out[0].flatten().cpu()


def ulps_apart(a: Tensor, b: Tensor) -> Tensor:
    """Return how many float32 numbers each element of ``a`` is away from that of ``b`` -> int64."""
    first, second = (
        torch.where(bits < 0, torch.iinfo(torch.int32).min - bits, bits)  # ordered like the numbers
        for bits in (a.view(torch.int32).long(), b.view(torch.int32).long())
    )
    return (first - second).abs()


# --------------------------------------------------------------------------------------------------- passes of a search


@dataclass(frozen=True)
class SearchPass:
    """One pass over a row: the cut lies between ``low`` and ``high``. ``probes``: the numbers that the pass tests.

    ``candidates``: how many different numbers of the row lie in between.
    """

    low: float
    high: float
    probes: tuple[float, ...]
    candidates: int


@dataclass(frozen=True)
class Search:
    """The search of a filter on one row [V]: its passes, the cut that it finds, and the kept tokens, bool [V]."""

    title: str
    row: Tensor
    passes: tuple[SearchPass, ...]
    cut: float
    kept: Tensor


def search_cut(row: Tensor, *, top_k: int | None = None, top_p: float | None = None) -> Search:
    """Record how the kernel of top-k or of top-p cuts a row of logits [V].

    Raises ``ValueError`` unless exactly one of ``top_k`` and ``top_p`` is given, and if kernels are compiled.
    """
    from mini_engine.kernels import top_k as top_k_module
    from mini_engine.kernels import top_p as top_p_module
    from mini_engine.kernels.launch import INTERPRETED

    if not INTERPRETED:
        raise ValueError(f"the passes of a compiled kernel cannot be watched; set {SWITCH}=1 before Triton is imported")
    if (top_k is None) == (top_p is None):
        raise ValueError(f"top_k is {top_k} and top_p {top_p}; give one of both")
    logits = row.float()[None].contiguous()
    with watched_search() as bounds:
        if top_k is not None:
            kept = top_k_module.apply_top_k(logits, torch.tensor([top_k]))[0] > -torch.inf
        else:
            kept = top_p_module.apply_top_p(logits, torch.tensor([top_p], dtype=torch.float64))[0] > -torch.inf
    different = logits[0].unique()
    passes = [
        SearchPass(low, high, tuple(probes[:3]), int(((different >= low) & (different <= high)).sum()))
        for low, high, probes in bounds
    ]
    title = f"top_k = {top_k}" if top_k is not None else f"top_p = {top_p:g}"
    return Search(title, logits[0], tuple(passes), float(logits[0][kept].min()), kept)


@contextmanager
def watched_search() -> Iterator[list[tuple[float, float, list[float]]]]:
    """Record low, high and the probes of every pass of ``threshold.find_cut`` inside this context.

    A pass calls ``order_key`` for low and for high, and then ``number_of`` for its three probes.
    """
    from mini_engine.kernels import threshold

    key_of, number_of = threshold.order_key, threshold.number_of
    asked: list[float] = []
    passes: list[tuple[float, float, list[float]]] = []

    def record_key(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        asked.append(float(x.handle.data.item()))
        if len(asked) % 2 == 0:
            passes.append((asked[-2], asked[-1], []))
        return key_of(x)

    def record_number(key):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        number = number_of(key)
        passes[-1][2].append(float(number.handle.data.item()))
        return number

    with mock.patch.multiple(threshold, order_key=record_key, number_of=record_number):
        yield passes


# --------------------------------------------------------------------------------------------- places of a masked block


@dataclass(frozen=True)
class MaskedBlock:
    """What one program of the bitmask kernel does with its places: ``kinds`` [WORDS, 32], the constants above."""

    kinds: Tensor
    vocab_size: int

    def count(self, kind: int) -> int:
        """Return how many places are of one kind."""
        return int((self.kinds == kind).sum())


def bitmask_block(mask: Tensor, vocab_size: int) -> MaskedBlock:
    """Apply the words of a mask, int32 [words], to a row of ``vocab_size`` logits, and return which places change.

    Raises ``ValueError`` for more words than one program holds.
    """
    from mini_engine.kernels import token_bitmask

    words = token_bitmask.WORDS
    if len(mask) > words:
        raise ValueError(f"the mask has {len(mask)} words, one program holds {words}; pass mask[:{words}]")
    where = device()
    logits = torch.zeros(1, vocab_size, device=where)
    token_bitmask.apply_token_bitmask(logits, mask[None].to(where))
    stored = torch.zeros(words * 32, dtype=torch.bool)
    stored[:vocab_size] = logits[0].cpu() == -torch.inf
    inside = torch.arange(words * 32) < vocab_size
    all_banned = torch.zeros(words, dtype=torch.bool)
    all_banned[: len(mask)] = mask.cpu() == 0
    together = all_banned.repeat_interleave(32)
    kinds = torch.where(stored, torch.where(together, TOGETHER, ALONE), torch.where(inside, KEPT, OUTSIDE))
    return MaskedBlock(kinds.view(words, 32), vocab_size)
