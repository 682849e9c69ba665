"""A slider over the steps of a decode, with the likeliest tokens of the step below it."""

from collections.abc import Sequence

import ipywidgets  # type: ignore[import-untyped]

from mini_engine.viz.columns import OTHERS, Column, bar_table, percent
from mini_engine.viz.decoding.draw import step_title
from mini_engine.viz.decoding.measure import StepDistribution
from mini_engine.viz.sliders import slider, with_picture


def step_slider(
    distributions: Sequence[StepDistribution], names: Sequence[Sequence[str]], context: Sequence[str], first: int = 0
) -> ipywidgets.VBox:
    """Return a slider over the steps and, below it, what ``top_tokens`` draws of the step, and the two doubts.

    ``names``: the texts of every step's likeliest tokens; ``context``: the texts of the tokens that were taken;
    ``first``: the step to begin with.
    """
    step = slider("step", first, min=0, max=len(distributions) - 1)

    def draw() -> str:
        own = distributions[step.value]
        shares = [100 * share for share in own.probabilities]
        shares.append(max(0.0, 100 - sum(shares)))
        doubts = f"entropy {own.entropy_bits:.2f} bits, top-2 gap {own.gap_bits:.2f} bits"
        heading = f"{step_title(step.value, context)}\n{doubts}"
        column = Column(heading, shares, [0.0] * len(shares), [percent(share) for share in shares])
        return bar_table([*names[step.value], OTHERS], [column], ["probability (%)"])

    return with_picture([step], draw)
