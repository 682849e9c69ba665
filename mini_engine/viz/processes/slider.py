"""A slider over the share that a match has to exceed, with what becomes of the fleet below it."""

from collections.abc import Mapping

import ipywidgets  # type: ignore[import-untyped]

from mini_engine.viz.columns import Column
from mini_engine.viz.processes.fleet import Outcome
from mini_engine.viz.sliders import column_slider


def share_slider(outcomes: Mapping[float, Outcome], first: float) -> ipywidgets.VBox:
    """Return a slider over shares and, below it, the hit rate and the longest queue of the fleet with each.

    ``first``: the share to begin with. A bar of queues is a share of the longest of all.
    """
    longest = max(outcome.longest_queue for outcome in outcomes.values())
    columns = {}
    for share, own in outcomes.items():
        bars = [100 * own.hit_rate, 100 * own.longest_queue / longest]
        words = [f"{100 * own.hit_rate:.0f} % of the prompt tokens", f"{own.longest_queue} requests"]
        columns[share] = Column(f"A match counts above {share:.0%} of the request", bars, [0.0, 0.0], words)
    return column_slider("share", first, ["from a cache", "longest queue"], columns, ["match"])
