"""A slider over the length of drafts, with the steps and rows that texts then take below it."""

from collections.abc import Mapping, Sequence

import ipywidgets  # type: ignore[import-untyped]

from mini_engine.viz.columns import Column
from mini_engine.viz.drafts.measure import DraftedStep
from mini_engine.viz.sliders import column_slider


def length_slider(texts: Mapping[str, Mapping[int, Sequence[DraftedStep]]], first: int) -> ipywidgets.VBox:
    """Return a slider over the tokens of a draft and, below it, for each kind of text the tokens that a step gives.

    ``texts``: kind -> tokens of a draft -> its steps; ``first``: the length to begin with. A bar is a share of all rows
    that are computed: those whose token came, then those that were refused.
    """
    columns = {}
    for most in next(iter(texts.values())):
        came, refused, words = [], [], []
        for lengths in texts.values():
            steps = lengths[most]
            tokens = sum(len(step.came) for step in steps)
            rows = sum(1 + len(step.draft) for step in steps)
            came.append(100 * tokens / rows)
            refused.append(100 * (rows - tokens) / rows)
            words.append(f"{tokens / len(steps):.2f} tokens a step, {rows / tokens:.2f} rows a token")
        columns[most] = Column(f"Drafts of {most} tokens", came, refused, words)
    return column_slider(
        "tokens in a draft", first, list(texts), columns, ["rows whose token came", "rows for nothing"]
    )
