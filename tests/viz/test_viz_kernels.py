"""What L8's figures show agrees with counted operations, exact fractions, sorts and numpy; figures draw their data."""

import math
import random
import struct
import sys
from dataclasses import asdict
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from mini_engine.bench.kernels import attention as kernels_attention
from mini_engine.bench.kernels import cases as kernels_cases
from mini_engine.bench.kernels import command as bench
from mini_engine.bench.kernels.timer import Sample
from mini_engine.config import ModelConfig
from mini_engine.grammar import masks
from mini_engine.kernels.launch import INTERPRETED
from mini_engine.viz import kernels
from mini_engine.viz.figure import Figure, style
from mini_engine.viz.kernels.measure import ALONE, KEPT, OUTSIDE, TOGETHER, Divergence, MaskedBlock, Search, SearchPass
from mini_engine.viz.kernels.work import H200, DecodeLaunch, Operation, Roof
from tests.support.figures import check_drawn, check_figures

SMALL = ModelConfig(
    vocab_size=70,
    hidden_size=6,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=5,
    max_position_embeddings=64,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
)
SEQUENCES = [(1, 7), (3, 5), (2, 2)]  # new tokens, keys
interpreted = pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel cannot be watched")


# ------------------------------------------------------------------------------------------------- operations and bytes


ROWS = sum(new for new, _ in SEQUENCES)  # 6
PAIRS_SEEN = 7 + (3 + 4 + 5) + (1 + 2)  # of queries and keys


def product(rows: int, depth: int, columns: int) -> tuple[int, int]:
    """Operations of a product, and the bytes of both factors and the result."""
    return 2 * rows * depth * columns, 2 * (rows * depth + columns * depth + rows * columns)


COUNTED = {  # operations, bytes in bfloat16 but for the logits, and how often it runs in a step
    "add_rms_norm": (6 * (6 * 5 + 3), 2 * (4 * 36 + 6), 6),  # add, square, sum, two factors; mean, eps, root of a row
    "q, k, v projection": (*product(6, 6, 8 * 4), 3),
    "rms_norm of q and k": (36 * (4 * 4 + 3), 2 * (2 * 144 + 2 * 4), 3),
    "apply_rotary": (6 * 6 * 2 * 6, 2 * (2 * 144 + 2 * 12), 3),  # six operations turn a pair
    "attention": (PAIRS_SEEN * 4 * 4 * 4, 2 * (2 * 96 + 2 * 14 * 2 * 4), 3),  # two products of 4 numbers, 4 heads
    "output projection": (*product(6, 16, 6), 3),
    "gate, up projection": (*product(6, 6, 10), 3),
    "silu_and_mul": (30 * 5, 2 * 3 * 30, 3),
    "down projection": (*product(6, 5, 6), 3),
    "language model head": (*product(3, 6, 70), 1),
    "sampling": (210 * 3, 4 * 210, 1),
}


@pytest.mark.parametrize("name", COUNTED)
def test_operations_and_bytes_are_those_counted_by_hand(name):
    operation = next(own for own in kernels.step_operations(SMALL, SEQUENCES) if own.name == name)
    assert (operation.num_flops, operation.num_bytes, operation.count) == COUNTED[name]


def test_what_only_copies_has_no_operations():
    copies = {own.name: own for own in kernels.step_operations(SMALL, SEQUENCES) if own.num_flops == 0}
    assert {*copies} | {*COUNTED} == {own.name for own in kernels.step_operations(SMALL, SEQUENCES)}
    store = 2 * 2 * (2 * ROWS * 2 * 4) + 8 * ROWS  # keys and values of 2 heads, read and written; a slot for each row
    assert copies["store_kv"].num_bytes == store
    assert copies["apply_token_bitmask"].num_bytes == 3 * (3 * 4 + 70 * 4)  # no token of 70 is one in 512
    assert copies["store_kv"].intensity == 0


def test_roof_and_least_time():
    roof = Roof("toy", 100.0, 1000.0)
    assert roof.ridge == 10
    assert [roof.attainable(x) for x in (0.5, 10, 20)] == [50, 1000, 1000]
    assert Operation("memory", 100, 200, 3).least_seconds(roof) == pytest.approx(6)
    assert Operation("arithmetic", 4000, 200, 2).least_seconds(roof) == pytest.approx(8)
    assert pytest.approx(206, abs=0.1) == H200.ridge


# ----------------------------------------------------------------------------------------------- programs on processors


def fullest_processor(launch: DecodeLaunch) -> int:
    """Deal the programs out one by one, each to whoever has the fewest."""
    loads = [0] * kernels.work.PROCESSORS
    for _ in range(launch.batch * 8):
        for _ in range(0, launch.context, launch.split_size):
            loads[loads.index(min(loads))] += 1
    return max(loads)


@pytest.mark.parametrize("size", [(1, 4096, 4096), (1, 4096, 128), (20, 4096, 4096), (64, 5000, 1408), (3, 100, 64)])
def test_waves_and_share_of_a_launch(size):
    launch = DecodeLaunch(*size)
    waves = fullest_processor(launch)
    assert launch.num_waves == waves
    splits = len(range(0, launch.context, launch.split_size))
    per_key = 2 * 128 * 2  # key and value, 128 numbers of 2 bytes
    partial = 2 * launch.batch * 16 * splits * 129 * 4
    assert launch.num_bytes == launch.batch * 8 * launch.context * per_key
    seconds = waves * min(launch.split_size, launch.context) * per_key / (4.8e12 / 132) + partial / 4.8e12
    assert launch.bandwidth_share == pytest.approx(launch.num_bytes / seconds / 4.8e12)


@pytest.mark.parametrize(("batch", "context"), [(1, 4096), (4, 32_768), (64, 100)])
def test_launches_have_every_number_of_splits_that_whole_tiles_give(batch, context):
    launches = kernels.split_launches(batch, context)
    whole = {len(range(0, context, size)) for size in range(64, context + 64, 64)}
    assert {own.num_splits for own in launches if own.split_size % 64 == 0} == whole
    assert [own.split_size for own in launches if own.split_size % 64] == [32, 16]
    assert all(a.num_splits < b.num_splits for a, b in pairwise(launches))
    assert launches[0].num_splits == 1


def report(sizes: dict[str, float], comparable: bool = True) -> dict:
    rows = [
        asdict(bench.Row("decode", "split_attention", size, 1, 1, 1, 1, 1, 1, share, 0.1, {}, None))
        for size, share in sizes.items()
    ]
    rows.append(asdict(bench.Row("norm", "rms_norm", "64 x 1024", 1, 1, 1, 1, 1, 1, 0.9, 0.0, {}, None)))
    return {"comparable": comparable, "rows": rows}


def test_a_report_of_the_benchmark_is_read():
    """The rows are the benchmark's own, of a made-up time, with the sizes that its cases have."""
    setting = kernels_cases.Setting(
        kernels_cases.SHAPES["0.6b"], kernels_cases.TOY, torch.device("cpu"), torch.bfloat16
    )
    case = kernels_attention.decode_case(setting, 16, 4096)
    row = bench.make_row(case, Sample(1e-4, 1e-4, 1e-4, 1e-5, 10), {}, bench.Limits(4e12, 7e14))
    made = report({"1 x 32768, GQA 2": 0.5}) | {"rows": [asdict(row), *report({"1 x 32768, GQA 2": 0.5})["rows"]]}
    shares = kernels.measured_shares(made)
    assert shares == {(16, 4096): pytest.approx(16 * 4096 * 8 * 512 / 1e-4 / 4e12), (1, 32_768): 0.5}


def test_reports_without_what_is_wanted_are_refused():
    with pytest.raises(ValueError, match="without a GPU"):
        kernels.measured_shares(report({"1 x 4096, GQA 2": 0.5}, comparable=False))
    with pytest.raises(ValueError, match="--parts decode"):
        kernels.measured_shares(report({}))


# ------------------------------------------------------------------------------------------------------ rounded numbers


def rounded(value: Fraction, bits: int) -> Fraction:
    """Round to ``bits`` significant bits, to nearest, ties to even, in exact arithmetic."""
    if value == 0:
        return value
    exponent = math.floor(math.log2(abs(float(value)))) - bits + 1
    unit = Fraction(2) ** exponent
    return round(value / unit) * unit  # Python rounds halves of fractions to even


def tree(numbers: list[Fraction], bits: int) -> Fraction:
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = [rounded(a + b, bits) for a, b in zip(numbers[:half], numbers[half:], strict=True)]
    return numbers[0]


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float32, 24)])
@pytest.mark.parametrize("block", [1, 16, 64])
def test_sums_are_rounded_at_every_addition(dtype, bits, block):
    """The oracle adds fractions and rounds each sum; every bit agrees."""
    dice = random.Random(block)
    numbers = [dice.uniform(-1, 3) for _ in range(64)]
    total = Fraction(0)
    exact = [rounded(Fraction(number), bits) for number in numbers]
    for start in range(0, 64, block):
        total = rounded(total + tree(exact[start : start + block], bits), bits)
    got = kernels.rounding.blocked_sum(torch.tensor([numbers], dtype=torch.float64), block, dtype)
    assert got.tolist() == [float(total)]


# ----------------------------------------------------------------------------------------------------- kernels that run


def test_the_interpreter_is_chosen_before_triton_is_imported(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "triton", object())
    with pytest.raises(ValueError, match="restart the kernel"):
        kernels.interpret_kernels()


def test_ulps_count_the_numbers_in_between():
    a = np.float32([1.0, -1.0, 0.0, 2.0, 3.0])
    b = a.copy()
    for _ in range(3):
        b = np.nextafter(b, np.float32(-10), dtype=np.float32)
    assert kernels.measure.ulps_apart(torch.from_numpy(a), torch.from_numpy(b)).tolist() == [3] * 5
    assert kernels.measure.ulps_apart(torch.tensor([0.0]), torch.tensor([-0.0])).tolist() == [0]


def row_of(seed: int, width: int = 300) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed)) * 3


def key(number: float) -> int:
    """The place of a float32 in their order."""
    bits = struct.unpack("<i", struct.pack("<f", number + 0.0))[0]
    return bits if bits >= 0 else bits ^ 0x7FFFFFFF


@interpreted
@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_k": 250}, {"top_p": 0.1}, {"top_p": 0.97}])
def test_a_search_closes_on_the_cut_that_a_sort_finds(options):
    row = row_of(0)
    ordered = row.double().sort(descending=True).values
    if "top_k" in options:
        kept = options["top_k"]
    else:
        probs = ordered.softmax(-1)
        kept = int((probs.cumsum(-1) - probs < options["top_p"]).sum())
    search = kernels.search_cut(row, **options)
    assert int(search.kept.sum()) == kept
    assert search.cut == float(ordered[kept - 1]) == float(row[search.kept].min())
    assert 1 <= len(search.passes) <= 16
    for own in search.passes:
        assert own.low <= search.cut <= own.high
        assert own.low < own.high
        quarters = [key(own.low) + (n * (key(own.high) - key(own.low)) + 3) // 4 for n in (1, 3)]
        assert [key(own.probes[0]), key(own.probes[2])] == quarters
        assert own.candidates == sum(own.low <= number <= own.high for number in row.tolist())
    for wide, narrow in pairwise(search.passes):
        edges = [wide.low, *wide.probes, math.nextafter(wide.high, math.inf)]
        part = sum(narrow.low >= edge for edge in edges)
        assert narrow.high < edges[part], "one of the four parts, and no more"


def test_searches_that_cannot_be_are_refused():
    wanted = "give one of both" if INTERPRETED else "TRITON_INTERPRET=1"
    for options in ({}, {"top_k": 3, "top_p": 0.5}):
        with pytest.raises(ValueError, match=wanted):
            kernels.search_cut(row_of(0), **options)


def test_places_of_a_block_are_what_the_mask_says():
    allowed = torch.zeros(1, 300, dtype=torch.bool)
    allowed[0, [1, 40, 41, 299]] = True
    allowed[0, 96:160] = True
    block = kernels.bitmask_block(masks.pack_allowed(allowed)[0], 300)
    bits = allowed[0].tolist() + [None] * (2048 - 300)
    for place, (kind, bit) in enumerate(zip(block.kinds.flatten().tolist(), bits, strict=True)):
        word = [other for other in bits[place // 32 * 32 : place // 32 * 32 + 32] if other is not None]
        wanted = OUTSIDE if bit is None else KEPT if bit else ALONE if any(word) else TOGETHER
        assert kind == wanted, place
    assert [block.count(kind) for kind in (KEPT, OUTSIDE)] == [68, 1748]
    with pytest.raises(ValueError, match=r"65 words.*mask\[:64\]"):
        kernels.bitmask_block(torch.zeros(65, dtype=torch.int32), 2080)


# -------------------------------------------------------------------------------------------------------------- figures

STEPS = {
    "decode, 1 × 4096": kernels.step_operations(kernels.work.QWEN3_0_6B, [(1, 4096)]),
    "decode, 64 × 4096": kernels.step_operations(kernels.work.QWEN3_0_6B, [(1, 4096)] * 64),
    "prefill, 1 × 2048": kernels.step_operations(kernels.work.QWEN3_0_6B, [(2048, 2048)]),
}
ROOFS = [H200, Roof("this machine (measured)", 9e9, 4e10)]
PAIRS = [(batch, context) for context in (4096, 32_768) for batch in (1, 4, 16, 64)]
CURVES = {own: kernels.split_launches(*own) for own in PAIRS}
CHOSEN = {own: kernels.engine_launch(*own) for own in PAIRS}
TABLES = {
    "Whole": [DecodeLaunch(batch, context, context) for batch in (1, 20) for context in (4096, 8192)],
    "Split": [kernels.engine_launch(batch, context) for batch in (1, 20) for context in (4096, 8192)],
}
ERRORS = {name: {"float32": [1e-6, 2e-7, 1e-8], "bfloat16": [0.5, 0.02, 0.003]} for name in ("A", "B", "C")}
ULPS = [
    Divergence("Chosen", (1, 4), (128, 64), torch.tensor([[0, 0, 0, 0, 0], [0, 1, 3, 15, 200]])),
    Divergence("Fixed", (1, 4), (64, 64), torch.zeros(2, 5, dtype=torch.int64)),
]
SCORES = [0.0, 1.0, 3.0, -2.0, 2.0, 2.5, 4.0]
SEARCH = Search(
    "top_k = 2",
    torch.tensor([3.0, -1.0, 2.0, 0.0]),
    (
        SearchPass(-math.inf, 3.0, (-1e9, 0.0, 1.0), 4),
        SearchPass(1.0, 3.0, (1.5, 2.0, 2.5), 2),
        SearchPass(2.0, 2.4, (2.1, 2.2, 2.3), 1),
    ),
    2.0,
    torch.tensor([True, False, True, False]),
)
BLOCK = MaskedBlock(torch.tensor([[TOGETHER] * 32, [ALONE, KEPT] * 16, [ALONE] * 3 + [OUTSIDE] * 29]), 67)


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    walk = list(kernels.online_softmax(torch.tensor([[*SCORES, -math.inf]], dtype=torch.float64), 2))
    return {
        "roofline": kernels.roofline(STEPS, ROOFS),
        "split_scaling": kernels.split_scaling(CURVES, CHOSEN, {(1, 4096): 0.5, (64, 32_768): 0.82}),
        "program_table": kernels.program_table(TABLES),
        "error_chart": kernels.error_chart(ERRORS, [1, 16, 256]),
        "divergence_chart": kernels.divergence_chart(ULPS),
        "softmax_walk": kernels.softmax_walk(SCORES, walk, "Walk"),
        "search_chart": kernels.search_chart(SEARCH),
        "block_picture": kernels.block_picture(BLOCK),
    }


def test_every_figure_is_tested_and_readable(figures):
    check_figures(figures, kernels.draw, kernels.draw_rounding, kernels.draw_work)


def test_figures_draw_and_say_what_they_are_given(figures):
    drawn = {
        "roofline": ([H200.ridge, 989, 0.04], "prefill, 1 × 2048: 8 of 13 operations are limited by memory"),
        "divergence_chart": ([], "0, 4 of 5 elements differ from the row alone, by up to 200 numbers."),
        "split_scaling": ([50, 82], "8 programs without splits, at most 6% of the bandwidth; 32 splits of 128: 256 "),
        "program_table": ([], "Whole: in 2 of 4 cases fewer programs than 132 processors"),
        "error_chart": (
            [1e-6, 2e-7, 0.02],
            "A: in float32 1.0e-06 with blocks of 1 and 1.0e-08 with 256",
        ),
        "search_chart": (
            [5, 2, 0.4, 4, 1],
            "measured here: 3 passes over 4 logits; candidates 4, 2, 1; the cut is 2 and 2 are kept.",
        ),
    }
    check_drawn(figures, drawn)


def test_texts_of_the_roofline_do_not_overlap(figures):
    canvas = figures["roofline"].figure
    with style():
        canvas.draw_without_rendering()
    boxes = [text.get_window_extent() for axes in canvas.axes for text in axes.texts]
    for index, one in enumerate(boxes):
        assert not any(one.overlaps(other) for other in boxes[index + 1 :])


def test_block_picture_draws_every_place(figures):
    (axes,) = figures["block_picture"].figure.axes
    assert axes.images[0].get_array().tolist() == BLOCK.kinds.T.tolist()
    hatched = {"///": torch.zeros(32, 3, dtype=torch.bool), "...": torch.zeros(32, 3, dtype=torch.bool)}
    for box in axes.patches:
        start, column = round(box.get_y()), round(box.get_x())
        hatched[box.get_hatch()][start : start + round(box.get_height()), column] = True
    assert torch.equal(hatched["///"], BLOCK.kinds.T == ALONE)
    assert torch.equal(hatched["..."], BLOCK.kinds.T == OUTSIDE)
    assert figures["block_picture"].summary == (
        "A block of 96 places for 67 tokens. Banned, stored with all 32 of its word: 32. "
        "Banned, stored one by one: 19. Allowed, left alone: 16. No token: masked off: 29."
    )
