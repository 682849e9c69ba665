"""What tests read from a figure: its texts, titles, legends and bars."""

from collections.abc import Iterable
from itertools import pairwise
from types import ModuleType

from matplotlib.text import Text

from mini_engine.viz.figure import Figure, style


def bar_lengths(axes, *, horizontal: bool) -> list[float]:
    return [bar.get_width() if horizontal else bar.get_height() for box in axes.containers for bar in box.patches]


def drawn_texts(canvas) -> list[Text]:
    """All texts but those of hidden axes and of ticks outside the limits, which matplotlib keeps and does not draw."""
    hidden = set()
    for axes in canvas.axes:
        if not axes.axison:
            hidden |= set(axes.findobj(Text))
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = axis.get_major_ticks() + axis.get_minor_ticks()
            hidden |= {label for tick in ticks if not low <= tick.get_loc() <= high for label in tick.findobj(Text)}
    return [text for text in canvas.findobj(Text) if text.get_text() and text.get_visible() and text not in hidden]


def checked_texts(figure: Figure, more: Iterable[Text] = ()) -> list[Text]:
    """Return the texts of a figure and ``more``, having checked that each is large enough and inside the figure."""
    canvas = figure.figure
    with style():
        canvas.draw_without_rendering()
    width, height = canvas.get_size_inches() * canvas.dpi
    found = [*drawn_texts(canvas), *more]
    for text in found:
        assert text.get_fontsize() >= 10, text
        box = text.get_window_extent()
        assert box.x0 >= -1, text
        assert box.y0 >= -1, text
        assert box.x1 <= width + 1, text
        assert box.y1 <= height + 1, text
    return found


def figure_functions(*modules: ModuleType) -> set[str]:
    """Return the names of all functions of ``modules`` that return a figure."""
    parts = [item for module in modules for item in vars(module).items()]
    return {name for name, value in parts if getattr(value, "__annotations__", {}).get("return") is Figure}


def check_titles_and_legends(figure: Figure) -> None:
    """Assert that no title touches its neighbour and that legends lie inside the picture."""
    canvas = figure.figure
    with style():
        canvas.draw_without_rendering()
    boxes = [axes._left_title.get_window_extent() for axes in canvas.axes if axes._left_title.get_text()]
    for left, right in pairwise(boxes):
        assert left.x1 + 4 < right.x0 or left.y0 > right.y1 or left.x0 >= right.x0
    for legend in canvas.legends:
        assert legend.get_window_extent().x0 >= 0
        assert legend.get_window_extent().x1 <= canvas.get_figwidth() * canvas.dpi


def titles_of(figure: Figure) -> list[Text]:
    """Return the titles of a figure's axes."""
    titles = [title for axes in figure.figure.axes for title in (axes.title, axes._left_title)]
    return [title for title in titles if title.get_text()]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.figure.findobj(Text) if text.get_text()]
