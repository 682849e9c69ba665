"""The figure of the rules that send requests to workers shows its report, and the docs show the figure of today."""

import json
import runpy
from pathlib import Path

import pytest
from PIL import Image

from mini_engine.bench.replicas import simulate
from mini_engine.router.simulation import Costs
from mini_engine.viz import routing
from tests.support.figures import check_figures

DOCS = Path(__file__).resolve().parents[2] / "docs"
REPORT = json.loads((DOCS / "pictures" / "replicas.json").read_text(encoding="utf-8"))


def test_every_figure_is_tested_and_readable():
    check_figures({"route_chart": routing.route_chart(REPORT)}, routing.draw)


def test_lines_are_the_rows_of_the_report():
    panels = routing.route_chart(REPORT).figure.axes
    assert [axes.get_title("left").split(":")[0] for axes in panels] == ["chat"] * 3 + ["few-shot"] * 3
    for axes, (field, scale) in zip(
        panels, [("hit_rate", 100), ("ttft_p99", 1000), ("longest_queue", 1)] * 2, strict=True
    ):
        load = axes.get_title("left").split(":")[0]
        assert len(axes.get_lines()) == 5
        for line in axes.get_lines():
            own = [row for row in REPORT["rows"] if (row["load"], row["rule"]) == (load, line.get_label())]
            assert list(line.get_xdata()) == [row["workers"] for row in own] == [2, 4, 8, 16, 32, 64, 128, 256]
            assert list(line.get_ydata()) == pytest.approx([row[field] * scale for row in own])


def test_the_picture_of_the_benchmarks_is_the_figure_of_today():
    figure = runpy.run_path(str(DOCS / "draw_pictures.py"))["replicas"]()
    assert Image.open(DOCS / "pictures" / "replicas.png").info["Description"] == figure.summary
    for load, workers, rule in (("chat", 2, "prefix"), ("few-shot", 4, "prefix"), ("few-shot", 2, "round robin")):
        kept = next(r for r in REPORT["rows"] if (r["load"], r["workers"], r["rule"]) == (load, workers, rule))
        row = simulate(load, rule, workers, REPORT["requests"], Costs(**REPORT["costs"]), REPORT["seed"])
        assert row.hit_rate == pytest.approx(kept["hit_rate"], abs=0.01), "run `mini-engine bench route`"


def test_the_table_of_the_benchmarks_is_that_of_the_figure():
    text = (DOCS / "BENCHMARKS.md").read_text(encoding="utf-8")
    section = text.split("## Replicas: where a request goes (simulated)")[1].split("\n## ")[0]
    for row in REPORT["rows"]:
        if row["workers"] in {2, 16, 256}:
            values = (f"{row['hit_rate']:.0%}", f"{row['ttft_p50'] * 1e3:.1f}", f"{row['ttft_p99'] * 1e3:.1f}")
            cells = [row["load"], row["workers"], row["rule"], *values, row["longest_queue"], f"{row['busy']:.0%}"]
            assert f"| {' | '.join(map(str, cells))} |" in section
