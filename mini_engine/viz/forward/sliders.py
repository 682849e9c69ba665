"""Sliders over layers, heads and tokens, with what the chosen token looks at below them."""

from collections.abc import Sequence

import ipywidgets  # type: ignore[import-untyped]

from mini_engine.viz.columns import OTHERS, Column, bar_table, percent, shares_of
from mini_engine.viz.forward.measure import ForwardTrace
from mini_engine.viz.sliders import slider, with_picture

NUM_SHOWN = 6  # tokens that get most of the attention


def head_sliders(trace: ForwardTrace, tokens: Sequence[str], layer: int, head: int) -> ipywidgets.VBox:
    """Return three sliders and, below them, the tokens at which a token looks most.

    They begin at ``layer`` and ``head`` and at the last of ``tokens``, the names of all tokens.
    """
    last = len(tokens) - 1
    controls = [
        slider("layer", layer, min=0, max=len(trace.weights) - 1),
        slider("head", head, min=0, max=len(trace.weights[0]) - 1),
        slider("token", last, min=0, max=last),
    ]

    def draw() -> str:
        layer, head, query = (control.value for control in controls)
        weights = trace.weights[layer][head][query].double()
        seen = weights[: query + 1].sort(descending=True, stable=True).indices[:NUM_SHOWN].tolist()
        shares = shares_of(weights, seen)
        names = [f"{position}: {tokens[position]}" for position in seen]
        heading = f"Layer {layer}, head {head}: token {query}, {tokens[query]}, looks at"
        column = Column(heading, shares, [0.0] * len(shares), [percent(share) for share in shares])
        return bar_table([*names, OTHERS], [column], ["attention weight (%)"])

    return with_picture(controls, draw)
