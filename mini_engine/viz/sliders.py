"""A picture that is redrawn when a slider moves.

A notebook does not need them: without a reader, it shows the picture of their first positions.
"""

from collections.abc import Callable, Sequence

import ipywidgets  # type: ignore[import-untyped]


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
