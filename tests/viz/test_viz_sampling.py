"""L4's measurements agree with other ways to compute them, and L4's figures hold the data they are given."""

import math
import time
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch

from mini_engine.sampler.trace import SamplingTrace
from mini_engine.viz import sampling
from mini_engine.viz.figure import Figure, style
from mini_engine.viz.sampling.measure import Draws, MixedRow
from tests.support.figures import check_drawn, check_figures, columns_of

V = 40
LOGITS = torch.randn(V, generator=torch.Generator().manual_seed(3)) * 2.5
NAMES = ["␣a", "␣fox", "$x$", ".", "⏎"]


def softmax(values: list[float]) -> list[float]:
    weights = [math.exp(value) for value in values]
    return [weight / sum(weights) for weight in weights]


def cut(probs: list[float], ids: set[int]) -> list[float]:
    """Keep ``ids`` and scale what is left to a mass of 1."""
    mass = sum(probs[i] for i in ids)
    return [p / mass if i in ids else 0.0 for i, p in enumerate(probs)]


def by_size(probs: list[float]) -> list[int]:
    return sorted(range(len(probs)), key=lambda i: (-probs[i], i))


def top_k(probs: list[float], k: int) -> set[int]:
    return set(by_size(probs)[:k])


def top_p(probs: list[float], p: float) -> set[int]:
    order = by_size(probs)
    before = [0.0, *accumulate(probs[i] for i in order)]
    return {i for i, mass in zip(order, before, strict=False) if mass < p and probs[i] > 0}


def heated(temperature: float) -> list[float]:
    return softmax([value / temperature for value in LOGITS.tolist()])


# ------------------------------------------------------------------------------------------------------- measurements


def test_temperature_sweep_and_entropy():
    rows = sampling.sweep_temperature(LOGITS, [0.5, 1.0, 4.0])
    for row, temperature in zip(rows, (0.5, 1.0, 4.0), strict=True):
        assert row.tolist() == pytest.approx(heated(temperature))
    probs = heated(1.0)
    assert float(sampling.entropy_bits(rows)[1]) == pytest.approx(-sum(p * math.log2(p) for p in probs))
    assert sampling.entropy_bits(torch.tensor([[0.25] * 4, [1.0, 0, 0, 0]])).tolist() == pytest.approx([2.0, 0.0])


def test_filters_in_any_order_agree_with_sets_computed_by_hand():
    heat = {"temperature": 1.5}
    k = {"top_k": 12}
    p = {"top_p": 0.8}
    hot, own = heated(1.5), heated(1.0)
    first = cut(hot, top_k(hot, 12))
    joint = cut(hot, top_k(hot, 12) & top_p(hot, 0.8))
    for order, expected in (
        ([heat, k, p], cut(first, top_p(first, 0.8))),
        ([heat, p, k], joint),
        ([heat, k | p], joint),
        ([k, heat, p], cut(first, top_p(first, 0.8))),
        ([p, heat], cut(hot, top_p(own, 0.8))),
        ([{"min_p": 0.2}], cut(own, {i for i, share in enumerate(own) if share >= 0.2 * max(own)})),
    ):
        assert sampling.apply_in_order(LOGITS, order).tolist() == pytest.approx(expected, rel=1e-4), order
    assert joint != pytest.approx(cut(first, top_p(first, 0.8)), rel=1e-4), "the orders differ here"


def test_binomial_band_by_exact_sums():
    low, high = sampling.measure.binomial_band(torch.tensor([0.3, 0.0, 1.0, 0.02]), 50, level=0.9)
    for p, least, most in zip((0.3, 0.02), low[[0, 3]].tolist(), high[[0, 3]].tolist(), strict=True):
        below = [0.0, *accumulate(math.comb(50, k) * p**k * (1 - p) ** (50 - k) for k in range(51))]
        assert below[least] < 0.05 <= below[least + 1], "fewer than the least come in less than 5 % of all cases"
        assert below[most] < 0.95 <= below[most + 1] + 1e-12
    assert (int(low[1]), int(high[1])) == (0, 0)
    assert (int(low[2]), int(high[2])) == (50, 50)


def test_chi_square_of_known_tables():
    half = sampling.chi_square(Draws("x", torch.tensor([60, 40])), torch.tensor([0.5, 0.5]))
    assert (half.statistic, half.degrees) == pytest.approx((4.0, 1))
    assert half.p_value == pytest.approx(math.erfc(math.sqrt(4 / 2)))  # one degree: two tails of the normal
    target = torch.tensor([0.5, 0.46, 0.01, 0.01, 0.02, 0.0])
    pooled = sampling.chi_square(Draws("x", torch.tensor([50, 46, 0, 4, 0, 0])), target)
    assert (pooled.statistic, pooled.degrees) == pytest.approx((0.0, 2), abs=1e-5), "three rare tokens are one bin of 4"
    assert sampling.chi_square(Draws("x", torch.tensor([50, 46, 1, 1, 1, 1])), target).p_value == 0.0


def test_kinds_of_thought():
    arguments = {"budget": 2, "start": 90, "end": 91, "newline": 7}
    spent = sampling.thought_kinds([1, 90], [5, 6, 7, 91, 3, 4], arguments)
    assert spent == ["thought", "thought", "forced", "forced", "answer", "answer"]
    assert sampling.thought_kinds([1, 90], [5, 91, 3], arguments) == ["thought", "thought", "answer"]
    assert sampling.thought_kinds([1], [5, 90, 6, 6, 7], arguments) == ["answer", "answer", *["thought"] * 2, "forced"]


def test_a_row_without_bypass_loses_its_tail():
    for likely, row in zip((3, 10), sampling.mix_rows(32_000, (3, 10)), strict=True):
        assert row.kept == 32_000
        assert row.kept_without_bypass == likely
        assert row.excess.tolist()[-1] == pytest.approx(likely * float(np.float32(1 / likely)) - 1, rel=1e-3)
    p = torch.tensor([0.7, 0.4], dtype=torch.float64)
    rows = torch.stack((LOGITS, -LOGITS))
    for made, row, share in zip(sampling.measure.top_p_without_bypass(rows, p), rows, p.tolist(), strict=True):
        kept = top_p(softmax(row.tolist()), share)
        assert {i for i in range(V) if made[i] > -torch.inf} == kept
        assert all(made[i] == row[i] for i in kept)


# ------------------------------------------------------------------------------------------------------------- figures

TARGET = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0, 0.0])
DRAWS = [
    Draws("right", torch.tensor([410, 290, 205, 95, 0, 0])),
    Draws("wrong", torch.tensor([600, 200, 110, 90, 0, 0])),
]
ORDERS = {"one\n(two lines)": torch.tensor([0.6, 0.4, 0.0, 0.0]), "two": torch.tensor([0.5, 0.25, 0.125, 0.125])}
PENALISED = {
    "none": torch.tensor([2.0, -1.0, 4.0, 3.0]),
    "repetition": torch.tensor([2.0, -1.5, 3.0, 2.0]),
    "presence": torch.tensor([2.0, -1.5, 3.5, 2.5]),
}
STRIPS = [
    sampling.Strip("first", NAMES, ["p", "q", "p", "r", "r"]),
    sampling.Strip("second", ["word"] * 40, ["q"] * 40),
]
LOGPROBS = [-math.log(2), -math.log(8), 0.0, -math.log(64), -math.log(1024)]


def stages():
    """A raw distribution, one with a token less, and one with two tokens less."""
    trace = SamplingTrace()
    for name, probs in (
        ("logits", [0.5, 0.2, 0.15, 0.05, 0.06, 0.04]),
        ("top-k", [0.5, 0.3, 0.15, 0.05, 0.0, 0.0]),
        ("top-p", [0.625, 0.375, 0.0, 0.0, 0.0, 0.0]),
    ):
        trace.note(name, torch.tensor([probs]).log())
    return trace.stages(0)


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return {
        "stage_bars": sampling.stage_bars(stages(), [0, 1, 2], NAMES[:3]),
        "survivors_chart": sampling.survivors_chart({"k": [4] * 5, "p": [1, 2, 9, 1, 1]}, [0.1, 1, 3, 0, 0], NAMES),
        "temperature_sweep": sampling.temperature_sweep(
            [0.5, 1.0, 2.0, 3.0], sampling.sweep_temperature(LOGITS[:6], [0.5, 1.0, 2.0, 3.0]), [4, 0], NAMES[:2]
        ),
        "order_table": sampling.order_table(ORDERS, [0, 1, 2], NAMES[:3], "Title"),
        "draw_histogram": sampling.draw_histogram(TARGET, DRAWS, [0, 1, 2, 3], NAMES[:4]),
        "penalty_chart": sampling.penalty_chart(PENALISED, [0, 2], "fox"),
        "token_strips": sampling.token_strips(STRIPS, ["p", "q", "r"]),
        "surprise_chart": sampling.surprise_chart(NAMES, LOGPROBS, [1, 5, 1, 6, 21]),
        "mixing_chart": sampling.mixing_chart(
            [MixedRow(torch.linspace(-1e-8, 1e-9, 50, dtype=torch.float64), 50, 46)] * 2
        ),
    }


def test_every_figure_is_tested_and_readable(figures):
    check_figures(figures, sampling.draw, sampling.strips)


def test_figures_draw_and_say_what_they_are_given(figures):
    drawn = {
        "survivors_chart": ([0.1, 3, 9], "p leaves 1 to 9 tokens, 3 times a single one."),
        "penalty_chart": (
            [2, 4, 3.5, 0.5],
            "at most. Taken away: repetition: 0.00 at the first",
        ),
        "order_table": ([], "one (two lines): 2 tokens left, '␣a' with 60.0%, 0.97 bits. two: 4 tokens left"),
        "mixing_chart": ([50, 4], "keep 50 of 50 tokens or more. Without it they lose 4 to 4."),
    }
    check_drawn(figures, drawn)


def test_temperature_layers_stack_to_one_hundred(figures):
    top, bottom = figures["temperature_sweep"].figure.axes
    probs = [softmax([x / t for x in LOGITS[:6].tolist()]) for t in (0.5, 1.0, 2.0, 3.0)]
    edges = [layer.get_paths()[0].vertices for layer in top.collections]
    for row, temperature in zip(probs, (0.5, 1.0, 2.0, 3.0), strict=True):
        heights = [sorted(y for x, y in layer if x == temperature) for layer in edges]
        tops = [100 * row[4], 100 * (row[4] + row[0]), 100.0]
        assert [max(ys) for ys in heights] == pytest.approx(tops)
        assert [min(ys) for ys in heights] == pytest.approx([0.0, *tops[:2]], abs=1e-6)
    assert bottom.lines[0].get_ydata().tolist() == pytest.approx([-sum(p * math.log2(p) for p in row) for row in probs])
    assert f"At temperature 1: '␣a' has {probs[1][4]:.1%}" in figures["temperature_sweep"].summary


def test_the_name_of_a_layer_is_inside_it_and_no_colour_argues_with_it(figures):
    top = figures["temperature_sweep"].figure.axes[0]
    with style():
        figures["temperature_sweep"].figure.draw_without_rendering()
    for text in top.texts:
        box = text.get_window_extent()
        corners = top.transData.inverted().transform([(box.x0, box.y0), (box.x1, box.y1)])
        assert any(layer.get_paths()[0].contains_points(corners).all() for layer in top.collections), text
    for layer in top.collections:
        red, green, blue, _ = layer.get_facecolor()[0]
        assert blue >= green >= red, "shades of one blue, or grey"


def test_histogram_marks_what_lies_outside_its_band(figures):
    right, wrong = figures["draw_histogram"].figure.axes
    for axes, draws in zip((right, wrong), DRAWS, strict=True):
        bars = [patch for patch in axes.patches if not patch.get_hatch()]
        assert [bar.get_height() for bar in bars] == pytest.approx([float(c) / 10 for c in draws.counts[:4]])
        (segments,) = [c.get_segments() for c in axes.collections]
        low, high = sampling.measure.binomial_band(TARGET[:4], 1000, 1 - 0.001 / 4)  # four bands share the thousandth
        assert [s[0][1] for s in segments] == pytest.approx([float(x) / 10 for x in low])
        assert [s[1][1] for s in segments] == pytest.approx([float(x) / 10 for x in high])
    assert [p.get_x() + 0.4 for p in right.patches if p.get_hatch()] == []
    assert [p.get_x() + 0.4 for p in wrong.patches if p.get_hatch()] == pytest.approx([0, 1, 2])
    assert "right: 1000 draws, 0 of 4 tokens outside their band, chi-square 1.0 with 3" in (
        figures["draw_histogram"].summary
    )


def test_strips_hold_every_token_in_its_kind_and_order(figures):
    (axes,) = figures["token_strips"].figure.axes
    words = sorted((t.get_position()[1], t.get_position()[0], t.get_text()) for t in axes.texts if t.get_gid())
    assert [word for _, _, word in words] == [*NAMES, *["word"] * 40]
    assert [patch.get_hatch() for patch in axes.patches] == ["", "///", "", "...", "...", *["///"] * 40]
    assert len({y for y, _, _ in words}) == 3, "160 characters take two lines"
    canvas = figures["token_strips"].figure
    with style():
        canvas.draw_without_rendering()
    for text, patch in zip([t for t in axes.texts if t.get_gid()], axes.patches, strict=True):
        inner, outer = text.get_window_extent(), patch.get_window_extent()
        assert outer.x0 - 2 <= inner.x0, text
        assert inner.x1 <= outer.x1 + 2, text
    for left, right in pairwise(patch.get_bbox() for patch in axes.patches):
        assert left.x1 < right.x0 or right.y0 > left.y0, "boxes of one line stand beside each other"
    assert "first: 2 p, 1 q, 2 r. second: 0 p, 40 q, 0 r." in figures["token_strips"].summary


def test_surprise_is_in_bits_and_coloured_by_rank(figures):
    text, bars = figures["surprise_chart"].figure.axes
    heights = sorted((patch.get_x(), patch.get_height()) for patch in bars.patches)
    assert [height for _, height in heights] == pytest.approx([1, 3, 0, 6, 10])
    assert [patch.get_hatch() for patch in text.patches] == ["", "///", "", "...", "xxx"]
    for axes in (text, bars):
        placed = sorted(axes.patches, key=lambda patch: patch.get_x())
        assert [patch.get_hatch() for patch in placed] == ["", "///", "", "...", "xxx"]
    assert figures["surprise_chart"].summary == (
        "2 of 5 tokens were the likeliest. The text costs 20.0 bits in all, 4.00 a token. The least expected is '⏎' "
        "with 10.0 bits, rank 21."
    )
    kinds = [sampling.strips.rank_kind(rank).split()[-1] for rank in (1, 2, 5, 6, 20, 21, 1024)]
    assert kinds == ["1", "5", "5", "20", "20", "20", "20"]


# ------------------------------------------------------------------------------------------------------------- sliders


def test_moving_a_slider_draws_the_stages_at_its_new_position():
    ids = sampling.likeliest(LOGITS, 3)
    *controls, picture = sampling.stage_sliders(LOGITS, [1], ids, NAMES[:3]).children
    by_name = {widget.description: widget for widget in controls}
    assert list(by_name) == ["repetition_penalty", "temperature", "top_k", "top_p", "min_p"]
    for name, off in (("repetition_penalty", 1.0), ("min_p", 0.0), ("top_p", 1.0)):
        by_name[name].value = off
    for name, value, temperature, count in (("top_k", 2, 0.8, 2), ("temperature", 3.0, 3.0, 2), ("top_k", 0, 3.0, V)):
        by_name[name].value = value
        hot = heated(temperature)
        last = cut(hot, top_k(hot, count))
        shares = [100 * last[token] for token in ids]
        shares.append(100 - sum(shares))
        heading, lines = columns_of(picture.value)[-1]
        assert f"{count} tokens, " in heading
        assert [name for name, *_ in lines] == [*NAMES[:3], "all others"]
        assert [left for _, left, _, _ in lines] == pytest.approx(shares, abs=0.02)
        assert [float(word or 0) for *_, word in lines] == pytest.approx(shares, abs=0.06)


def test_the_slider_of_a_penalty_lowers_what_the_text_has():
    token = sampling.likeliest(LOGITS, 1)[0]
    *controls, picture = sampling.stage_sliders(LOGITS, [token], [token], NAMES[:1]).children
    controls[0].value = 2.0
    logits = LOGITS.tolist()
    assert logits[token] > 0
    logits[token] /= 2
    _, _, (heading, ((_, share, _, _), _)) = [None, *columns_of(picture.value)[:2]]
    assert heading.startswith("1. penalties")
    assert share == pytest.approx(100 * softmax(logits)[token], abs=0.02)


@pytest.mark.parametrize("end", [0, 1])
def test_every_end_of_every_slider_is_a_valid_parameter(end):
    *controls, picture = sampling.stage_sliders(LOGITS, [1], [0, 1], NAMES[:2]).children
    for widget in controls:
        widget.value = (widget.min, widget.max)[end]
    assert "0. softmax of the logits" in picture.value


def test_a_move_of_a_slider_takes_no_time():
    """At most 0.2 s of processor time. It takes 0.003 s; a figure of matplotlib would take 0.6 s."""
    control, *_ = sampling.stage_sliders(LOGITS, [1], list(range(12)), [f"token {i}" for i in range(12)]).children
    start = time.process_time()
    control.value = 2.0
    assert time.process_time() - start < 0.2
