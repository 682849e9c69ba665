"""Sliders: what they show at each place agrees with sums by hand."""

import pytest
import torch

from mini_engine.viz import decoding, forward, kernels, paging, prefixes, programs, scheduling
from mini_engine.viz.decoding.measure import StepDistribution
from mini_engine.viz.forward.measure import ForwardTrace
from mini_engine.viz.scheduling.simulation import LoadPoint
from mini_engine.viz.sliders import slider
from tests.support.figures import columns_of


def only_column(picture):
    ((heading, lines),) = columns_of(picture.value)
    return heading, lines


def test_a_slider_reports_when_it_is_let_go_and_writes_its_whole_name():
    for made in (slider("name", 1, min=0, max=2), slider("name", 0.5, min=0, max=1), slider("name", 4, options=(4, 8))):
        assert made.description == "name"
        assert made.style.description_width == "initial"
        assert not made.continuous_update


def test_head_sliders_show_where_a_token_looks():
    weights = torch.zeros(2, 2, 3, 3)  # layers, heads, queries, keys
    weights[1, 0, 2] = torch.tensor([0.125, 0.625, 0.25])
    weights[0, 1, 1] = torch.tensor([0.75, 0.25, 0.0])
    trace = ForwardTrace([], [], [*weights], torch.zeros(0))
    layer, head, token, picture = forward.head_sliders(trace, ["<a>", "b", "c"], 1, 0).children
    heading, lines = only_column(picture)
    assert heading == "Layer 1, head 0: token 2, c, looks at"
    assert [(name, word) for name, _, _, word in lines] == [
        ("1: b", "62.5"),
        ("2: c", "25.0"),
        ("0: <a>", "12.5"),
        ("all others", "< 0.1"),
    ]
    assert [left for _, left, _, _ in lines] == pytest.approx([62.5, 25, 12.5, 0], abs=0.01)
    layer.value, head.value, token.value = 0, 1, 1
    heading, lines = only_column(picture)
    assert heading == "Layer 0, head 1: token 1, b, looks at"
    assert [name for name, *_ in lines] == ["0: <a>", "1: b", "all others"], "no token sees the future"


def test_page_size_slider_counts_empty_slots():
    control, picture = paging.page_size_slider({"a": 14, "b": 1}, (1, 4, 16), first=4).children
    heading, lines = only_column(picture)
    assert heading == "5 pages; 5 of 20 slots are empty"
    assert lines[0] == ("a: 14 tokens", pytest.approx(87.5), pytest.approx(12.5), "4 pages, 2 empty")
    assert lines[1] == ("b: 1 token", pytest.approx(25), pytest.approx(75), "1 page, 3 empty")
    control.value = 1
    assert only_column(picture)[0] == "15 pages; 0 of 15 slots are empty"


def test_step_slider_shows_the_step_and_its_doubts():
    steps = [StepDistribution([4, 5], [0.5, 0.25], 1.5, 1.0), StepDistribution([5, 4], [0.875, 0.125], 0.5, 2.81)]
    control, picture = decoding.step_slider(steps, [["x", "y"], ["y", "x"]], ["␣x", "y"]).children
    heading, lines = only_column(picture)
    assert heading == "step 0: the beginning →<br>entropy 1.50 bits, top-2 gap 1.00 bits"
    assert [(name, word) for name, _, _, word in lines] == [("x", "50.0"), ("y", "25.0"), ("all others", "25.0")]
    control.value = 1
    heading, lines = only_column(picture)
    assert heading.startswith("step 1: … x →")
    names = ["␣one", "␣day", "␣a", "␣hap", "py", "␣fox"]
    assert decoding.draw.step_title(5, names) == "step 5: … one day a happy →"
    assert decoding.draw.step_title(6, names) == "step 6: … day a happy fox →", "no word is cut"
    assert [left for _, left, _, _ in lines] == pytest.approx([87.5, 12.5, 0], abs=0.01)


def test_budget_slider_compares_with_the_longest_time():
    points = {32: LoadPoint(1.0, 0.5, 2.0, 0.004), 64: LoadPoint(1.0, 0.25, 1.0, 0.008)}
    control, picture = scheduling.budget_slider(points, first=64).children
    heading, lines = only_column(picture)
    assert heading == "At most 64 rows in a step"
    assert [left for _, left, _, _ in lines] == pytest.approx([50, 50, 100], abs=0.01)
    assert [word for *_, word in lines] == ["250.0 ms", "1,000.0 ms", "8.0 ms"]
    control.value = 32
    assert [left for _, left, _, _ in only_column(picture)[1]] == pytest.approx([100, 100, 50], abs=0.01)


def test_pool_slider_shows_what_is_missing_to_the_bound():
    curves = prefixes.HitCurves((8, 16), {"lpm": [0.5, 0.5], "fcfs": [0.125, 0.25]}, 0.5, 20)
    control, picture = prefixes.pool_slider(curves, first=8).children
    assert only_column(picture)[0] == "8 pages; the bound is 50.0%"
    assert only_column(picture)[1][1] == ("fcfs", pytest.approx(12.5), pytest.approx(37.5), "12.5")
    control.value = 16
    assert only_column(picture)[1][1] == ("fcfs", pytest.approx(25), pytest.approx(25), "25.0")


def test_split_sliders_show_programs_and_waves():
    """By hand: 8 heads × 20 sequences are 160 programs on 132 processors, so the second wave is mostly empty."""
    batch, context, split, picture = kernels.split_sliders(20, 8192, 4096).children
    heading, lines = only_column(picture)
    assert heading == "20 sequences of 8,192 keys"
    assert [word for *_, word in lines[:2]] == ["61 %, 160 programs, 2 waves", "81 %, 320 programs, 3 waves"]
    batch.value, context.value, split.value = 1, 1024, 32_768
    _, lines = only_column(picture)
    assert [word for *_, word in lines[:2]] == ["6 %, 8 programs, 1 wave"] * 2


def test_ahead_slider_compares_with_the_largest_count():
    costs = {
        0: {"calls": 4, "prompt_tokens": 200, "new_tokens": 30},
        8: {"calls": 1, "prompt_tokens": 50, "new_tokens": 60},
    }
    control, picture = programs.ahead_slider(costs, first=8).children
    heading, lines = only_column(picture)
    assert heading == "8 tokens ahead"
    assert [(left, word) for _, left, _, word in lines] == [
        (pytest.approx(25), "1"),
        (pytest.approx(25), "50"),
        (pytest.approx(100), "60"),
    ]
    control.value = 0
    assert [word for *_, word in only_column(picture)[1]] == ["4", "200", "30"]
