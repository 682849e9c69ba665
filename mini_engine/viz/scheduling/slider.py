"""A slider over budgets of rows, with the times of a simulated load below it."""

from collections.abc import Mapping

import ipywidgets  # type: ignore[import-untyped]

from mini_engine.viz.columns import Column
from mini_engine.viz.scheduling.simulation import LoadPoint
from mini_engine.viz.sliders import column_slider

TIMES = {
    "ttft_mean": "to the first token, mean",
    "ttft_p99": "to the first token, p99",
    "tpot_mean": "between tokens, mean",
}


def budget_slider(points: Mapping[int, LoadPoint], first: int) -> ipywidgets.VBox:
    """Return a slider over ``max_tokens_per_step`` and, below it, three times of the load with this budget.

    ``points``: budget -> its times; ``first``: the budget to begin with. A bar is a share of the longest time that any
    budget gives.
    """
    longest = [max(getattr(point, field) for point in points.values()) for field in TIMES]
    columns = {}
    for budget, point in points.items():
        seconds = [getattr(point, field) for field in TIMES]
        shares = [100 * own / most for own, most in zip(seconds, longest, strict=True)]
        words = [f"{1e3 * own:,.1f} ms" for own in seconds]
        columns[budget] = Column(f"At most {budget} rows in a step", shares, [0.0] * len(shares), words)
    legend = ["time, as a share of the longest with any budget"]
    return column_slider("max_tokens_per_step", first, list(TIMES.values()), columns, legend)
