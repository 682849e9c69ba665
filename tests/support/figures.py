"""What tests read from a figure: its texts, titles, legends and bars."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import ModuleType

from matplotlib.patches import Rectangle
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


def check_figures(figures: dict[str, Figure], *modules: ModuleType) -> None:
    """Assert that ``figures`` are all that ``modules`` draw, and what holds of every figure.

    Texts are large enough, inside, and apart; no two series differ by colour alone.
    """
    assert figure_functions(*modules) == set(figures)
    for name, figure in figures.items():
        for text in checked_texts(figure, more=titles_of(figure)):
            assert "mathdefault" not in text.get_text(), f"{name}: set a LogFormatter, the style draws no formulas"
        check_titles_and_legends(name, figure)
        for axes in figure.figure.axes:
            check_series(name, axes)


def check_drawn(figures: dict[str, Figure], drawn: Mapping[str, tuple[Sequence[float], str]]) -> None:
    """Assert that each figure has bars of these lengths or points with these coordinates, and says these words."""
    for name, (numbers, words) in drawn.items():
        own = [number for axes in figures[name].figure.axes for number in numbers_of(axes)]
        for number in numbers:
            assert any(math.isclose(number, each, rel_tol=1e-4, abs_tol=1e-9) for each in own), (name, number)
        assert words in figures[name].summary


def numbers_of(axes) -> list[float]:
    """The widths and heights of bars and the coordinates of points."""
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    found = [number for bar in bars for number in (bar.get_width(), bar.get_height())]
    return found + [float(number) for line in axes.lines for number in (*line.get_xdata(), *line.get_ydata())]


def check_titles_and_legends(name: str, figure: Figure) -> None:
    """Assert that no title touches its neighbour and that legends lie inside the picture."""
    canvas = figure.figure
    boxes = [axes._left_title.get_window_extent() for axes in canvas.axes if axes._left_title.get_text()]
    for left, right in pairwise(boxes):
        assert left.x1 + 4 < right.x0 or left.y0 > right.y1 or left.x0 >= right.x0, name
    for legend in canvas.legends:
        assert legend.get_window_extent().x0 >= 0, name
        assert legend.get_window_extent().x1 <= canvas.get_figwidth() * canvas.dpi, name


def check_series(name: str, axes) -> None:
    """Assert that lines differ in marker or dashes, and that bars of one hatch differ in grey."""
    lines = [line for line in axes.lines if not line.get_label().startswith("_")]
    assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == len(lines), name
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_fill()]
    looks = sorted({(patch.get_hatch() or "", gray(patch.get_facecolor())) for patch in bars})
    for (hatch, one), (other_hatch, other) in pairwise(looks):
        assert hatch != other_hatch or other - one > 0.08, (name, looks)


def gray(color) -> float:
    red, green, blue = color[:3]
    return 0.299 * red + 0.587 * green + 0.114 * blue


def titles_of(figure: Figure) -> list[Text]:
    """Return the titles of a figure's axes."""
    titles = [title for axes in figure.figure.axes for title in (axes.title, axes._left_title)]
    return [title for title in titles if title.get_text()]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.figure.findobj(Text) if text.get_text()]
