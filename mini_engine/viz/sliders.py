"""A picture that is redrawn when a slider moves.

A notebook does not need them: without a reader, it shows the picture of their first positions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets  # type: ignore[import-untyped]

from mini_engine.viz.columns import Column, bar_table


def slider(name: str, first: Any, **options: Any) -> ipywidgets.Widget:
    """Return a slider at ``first`` with its whole name before it. It reports its place when it is let go.

    ``options``: ``min``, ``max`` and ``step`` of whole numbers or, if ``first`` is a float, of floats; or ``options``,
    the values in their order.
    """
    numbers = ipywidgets.FloatSlider if isinstance(first, float) else ipywidgets.IntSlider
    kind = ipywidgets.SelectionSlider if "options" in options else numbers
    look = {"description": name, "style": {"description_width": "initial"}, "continuous_update": False}
    return kind(value=first, **look, **options)


def column_slider(
    name: str, first: Any, lines: Sequence[str], columns: Mapping[Any, Column], legend: Sequence[str]
) -> ipywidgets.VBox:
    """Return a slider over the keys of ``columns`` and, below it, the bars that belong to its place.

    ``first``: the key to begin with; ``lines``: the name of each bar; ``legend``: see ``bar_table``.
    """
    control = slider(name, first, options=list(columns))
    return with_picture([control], lambda: bar_table(lines, [columns[control.value]], legend))


def with_picture(sliders: Sequence[ipywidgets.Widget], draw: Callable[[], str]) -> ipywidgets.VBox:
    """Return the sliders and, below them, the HTML that ``draw`` makes now and whenever one of them moves.

    The picture is not an ``ipywidgets.Output``. nbclient sends the kernel everything that such a widget holds; it can
    then miss the end of the cell and wait for ever (https://github.com/jupyter/nbclient/issues/312).
    """
    picture = ipywidgets.HTML()

    def redraw(change: object = None) -> None:
        picture.value = draw()

    for widget in sliders:
        widget.observe(redraw, names="value")
    redraw()
    return ipywidgets.VBox([*sliders, picture])
