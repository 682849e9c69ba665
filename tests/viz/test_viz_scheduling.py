"""L5's measurements agree with logs written by hand and with brute force, and L5's figures draw what they are given."""

import math
from dataclasses import replace

import pytest

from mini_engine.config import EngineConfig
from mini_engine.outputs import RequestOutput, StepOutput
from mini_engine.scheduler.request import RequestTimes
from mini_engine.viz import scheduling
from mini_engine.viz.figure import Figure
from mini_engine.viz.scheduling.measure import Piece, Run, Stay, StreamLine
from mini_engine.viz.scheduling.simulation import Job, LoadPoint, StepCost
from tests.support.figures import check_drawn, check_figures


def step(number, chunks, copied=(), preempted=(), pages=0, held=0):
    return StepOutput(number, float(number), {}, [], chunks, dict(copied), list(preempted), 0, 0, pages, held)


# p has a prompt of 5 tokens in two chunks; q's prompt of 3 is copied from it later; p is preempted in step 4.
LOG = [
    step(0, [("p", 0, 4)], pages=1, held=4),
    step(1, [("p", 4, 1)], pages=2, held=5),
    step(2, [("p", 5, 1), ("q", 2, 1)], copied={"q": 2}, pages=3, held=9),
    step(3, [("p", 6, 1), ("q", 3, 1)], pages=3, held=11),
    step(4, [("q", 4, 1)], preempted=["p"], pages=2, held=5),
    step(5, [("q", 5, 1), ("p", 0, 4)], pages=2, held=4),
    step(6, [("p", 4, 4)], pages=2, held=8),
    step(7, [("p", 8, 1)], pages=3, held=9),
]
OUTPUTS = {
    "p": RequestOutput("p", [0] * 5, [1] * 5, finish_reason="length", times=RequestTimes(0.0), num_preemptions=1),
    "q": RequestOutput("q", [0] * 3, [1] * 4, finish_reason="stop", times=RequestTimes(0.5)),
    "no": RequestOutput("no", [0] * 3, finish_reason="error"),
}
CONFIG = EngineConfig(max_running_requests=2, max_tokens_per_step=5, page_size=4)
RUN = Run("by hand", LOG, OUTPUTS, {"p": "a", "q": "b", "no": "c"}, CONFIG, num_pages=3)
PIECES = {
    "p": [
        Piece("prompt", 0, 1, 4),
        Piece("prompt", 1, 1, 1),
        Piece("decode", 2, 2, 2),
        Piece("waiting", 4, 1, 0),
        Piece("again", 5, 1, 4),
        Piece("again", 6, 1, 4),
        Piece("decode", 7, 1, 1),
    ],
    "q": [Piece("waiting", 1, 1, 0), Piece("copied", 2, 1, 2), Piece("decode", 3, 3, 3)],
    "no": [],
}
FULL = Run("none waits", LOG[:4], OUTPUTS, RUN.labels, replace(CONFIG, max_tokens_per_step=None), num_pages=4)
CURVES = {  # within a decade, where a logarithmic axis would label its minor ticks, too
    "fcfs": [LoadPoint(1.0, 0.06, 0.1, 0.002), LoadPoint(2.0, 0.5, 0.9, 0.004)],
    "shortest": [LoadPoint(1.0, 0.06, 0.1, 0.002), LoadPoint(2.0, 0.2, 1.5, 0.003)],
}
LINES = [
    StreamLine("Once", "", "Once", "", False),
    StreamLine("␣up", "Once", "", " up", False),
    StreamLine("!", "Once", " ", "up!", True),
]


# ------------------------------------------------------------------------------------------------- what the log tells


def test_timeline_of_a_log_by_hand():
    assert scheduling.timeline(RUN) == PIECES


def test_rows_are_counted_by_what_they_were_for():
    assert scheduling.rows_per_step(RUN) == {
        "decode": [0, 0, 1, 2, 1, 1, 0, 1],
        "prompt": [4, 1, 1, 0, 0, 0, 0, 0],
        "again": [0, 0, 0, 0, 0, 4, 4, 0],
    }


def test_a_request_takes_the_lowest_free_place():
    # p leaves place 0 in step 4; in step 5 it comes back to it, for q is still in place 1.
    assert scheduling.measure.stays(RUN) == [Stay("p", 0, 0, 4, 2), Stay("q", 1, 2, 4, 1), Stay("p", 0, 5, 3, 2)]
    assert scheduling.idle_share(RUN) == pytest.approx(5 / 16)


# ------------------------------------------------------------------------------------------------- runs of the engine


# --------------------------------------------------------------------------------------------------- without a model


def test_simulated_times_by_hand():
    cost = StepCost(fixed=1.0, per_row=0.1)
    config = EngineConfig(max_running_requests=2, max_tokens_per_step=3)
    jobs = [Job(0.0, 4, 2), Job(0.5, 1, 2), Job(20.0, 2, 1)]
    first, second, third = scheduling.simulate(jobs, cost, config)
    # 3 rows of the first until 1.3; its last row and the second's only one until 2.5; two decodes until 3.7.
    assert (first.started, second.started) == (0.0, 1.3)
    assert first.tokens == pytest.approx([2.5, 3.7])
    assert second.tokens == pytest.approx([2.5, 3.7])
    assert first.finished == first.tokens[-1]
    assert (third.started, third.tokens) == (20.0, pytest.approx([21.2])), "nothing happens until it comes"
    assert third.tpot_s is None


def test_poisson_jobs_have_their_rate_and_their_lengths():
    jobs = scheduling.poisson_jobs(4.0, 2000, (10, 1000), (8, 8))
    gaps = [b.arrival_s - a.arrival_s for a, b in zip([Job(0.0, 1, 1), *jobs], jobs, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=4 / math.sqrt(2000)), "four standard errors of an exponential"
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert spread == pytest.approx(mean, rel=0.15), "an exponential's deviation is its mean"
    assert all(10 <= job.num_prompt <= 1000 and job.num_output == 8 for job in jobs)
    short = sum(job.num_prompt <= 100 for job in jobs) / 2000
    assert short == pytest.approx(0.5, abs=0.05), "log-uniform: half lie below the geometric mean"
    slow = scheduling.poisson_jobs(1.0, 2000, (10, 1000), (8, 8))
    assert [job.arrival_s for job in slow] == pytest.approx([4 * job.arrival_s for job in jobs])
    assert [job.num_prompt for job in slow] == [job.num_prompt for job in jobs]


def test_load_point_and_capacity_by_hand():
    times = [RequestTimes(0.0, tokens=[first, first + 3 * gap]) for first, gap in ((1.0, 0.1), (2.0, 0.3))]
    times.append(RequestTimes(5.0, tokens=[8.0]))
    point = scheduling.load_point(2.0, times)
    assert point.ttft_mean == pytest.approx(2.0)
    assert point.ttft_p99 == pytest.approx(2.98), "between the second and the third, 98 % of the way"
    assert point.tpot_mean == pytest.approx(0.6), "a single token has no gap"
    jobs = [Job(7.0, 3, 1), Job(9.0, 3, 1)]
    assert scheduling.capacity(jobs, StepCost(1.0, 0.5), EngineConfig()) == pytest.approx(2 / 5), "two steps of 2.5 s"


# ------------------------------------------------------------------------------------------------------------- figures


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return {
        "request_gantt": scheduling.request_gantt(RUN),
        "occupancy_chart": scheduling.occupancy_chart([RUN, FULL]),
        "rows_chart": scheduling.rows_chart([RUN, FULL]),
        "places_chart": scheduling.places_chart([RUN, FULL]),
        "load_chart": scheduling.load_chart(CURVES, 1.8),
        "stream_chart": scheduling.stream_chart(LINES, ["up!"]),
    }


def test_every_figure_is_tested_and_readable(figures):
    check_figures(figures, scheduling.draw)


def test_figures_draw_and_say_what_they_are_given(figures):
    drawn = {
        "places_chart": ([3, 8], "9 new tokens in 8 steps, 1.12 a step; 31.2% of the 2 places are idle."),
        "load_chart": ([0.06, 0.9, 4, 1.8], "at 111% of the capacity the first token comes after 200 ms on average"),
    }
    check_drawn(figures, drawn)


def bars(axes, kind=None):
    """(line, left, width) of the bars of one kind, from top to bottom."""
    return sorted(
        (round(p.get_y() + p.get_height() / 2), p.get_x(), p.get_width())
        for p in axes.patches
        if kind is None or p.get_gid() == kind
    )


def test_the_sizes_of_chunks_stand_upright_before_the_bars(figures):
    (axes,) = figures["request_gantt"].figure.axes
    assert len(axes.texts) == 0
    assert axes.get_yticklabels()[0].get_text() == "a: 4, 1, 4, 4", "its prompt, and all again after it was sent back"
    assert {label.get_rotation() for label in axes.get_yticklabels()} == {0}


def test_a_long_run_is_drawn_to_its_end():
    long = replace(RUN, log=[*LOG, *(step(i, [("p", i, 1)]) for i in range(9, 70))])
    (axes,) = scheduling.request_gantt(long).figure.axes
    assert bars(axes, "decode")[1] == (0, 7, 62)


def test_the_legend_names_what_is_drawn_and_nothing_else(figures):
    shown = {text.get_text() for text in figures["request_gantt"].figure.legends[0].get_texts()}
    assert {"computed again", "prompt copied from its sibling", "preempted", "end"} < shown
    plain = scheduling.request_gantt(replace(FULL, log=LOG[:2], outputs={"p": OUTPUTS["p"]}))
    assert [t.get_text() for t in plain.figure.legends[0].get_texts()] == ["prompt (tokens: at the left)", "end"]


def test_occupancy_is_that_of_every_step(figures):
    top, bottom = figures["occupancy_chart"].figure.axes
    waste, held, outline = (patch.get_data() for patch in top.patches)
    assert held.values.tolist() == [4, 5, 9, 11, 5, 4, 8, 9]
    assert waste.baseline.tolist() == held.values.tolist()
    assert waste.values.tolist() == outline.values.tolist() == [4, 8, 12, 12, 8, 8, 8, 12]
    assert outline.edges.tolist() == list(range(9))
    pool, back = top.lines
    assert set(pool.get_ydata()) == {12}
    assert (list(back.get_xdata()), list(back.get_ydata())) == ([4], [12])
    assert set(bottom.lines[0].get_ydata()) == {16}
    assert list(bottom.lines[1].get_xdata()) == []
    assert figures["occupancy_chart"].summary.startswith(
        "Pages in use, on average: 2.2 of 3 (by hand), 2.2 of 4 (none waits). "
        "by hand: 8 steps, on average 2.2 of 3 pages in use, at most 3; 23.6% of the slots in them are empty; 1 time "
        "a request was preempted."
    )
    assert "none waits: 4 steps, on average 2.2 of 4 pages" in figures["occupancy_chart"].summary


def test_rows_are_stacked_under_the_budget(figures):
    top, bottom = figures["rows_chart"].figure.axes
    decode, prompt, again = top.containers
    assert [bar.get_height() for bar in decode] == [0, 0, 1, 2, 1, 1, 0, 1]
    assert [(bar.get_y(), bar.get_height()) for bar in prompt][:3] == [(0, 4), (0, 1), (1, 1)]
    assert [(bar.get_y(), bar.get_height()) for bar in again][5:7] == [(1, 4), (0, 4)]
    assert [bar.get_x() + 0.45 for bar in decode] == pytest.approx([i + 0.5 for i in range(8)])
    assert [set(line.get_ydata()) for line in top.lines] == [{5}]
    assert list(bottom.lines) == [], "no budget, no line"
    assert "by hand: 8 steps with 20 rows (6 decode, 6 prompt, 8 again); the largest step has 5, on average they " in (
        figures["rows_chart"].summary
    )


def test_stream_chart_marks_what_is_shown_held_back_and_cut(figures):
    (axes,) = figures["stream_chart"].figure.axes
    assert bars(axes, "new") == [(0, 0, 4), (2, 4, 1)]
    assert bars(axes, "held") == [(1, 4, 3)]
    assert bars(axes, "cut") == [(2, 5, 3)]
    for row, text in enumerate(("Once", "Once up", "Once up!")):
        letters = sorted((t.get_position()[0], t.get_text()) for t in axes.texts if t.get_position()[1] == row)
        assert letters == [(i + 0.5, letter) for i, letter in enumerate(text)]
    assert figures["stream_chart"].summary == (
        "After 1 of 3 tokens text is held back, 3 characters at most. Shown in the end: 'Once '."
    )
