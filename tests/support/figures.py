"""What tests read from a figure: its texts, titles, legends and bars."""

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import ModuleType

from matplotlib.patches import Rectangle
from matplotlib.text import Text

from mini_engine.viz.columns import BAR
from mini_engine.viz.figure import Figure, style, wrapped


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

    Texts are large enough, inside, apart, and not struck through; no two series differ by colour alone.
    """
    assert figure_functions(*modules) == set(figures)
    for name, figure in figures.items():
        for text in checked_texts(figure, more=titles_of(figure)):
            is_number = re.fullmatch(r"[×\s]*[-−]?\d[\d.,]*\s*%?", text.get_text())
            assert not (is_number and text.get_rotation()), f"{name}: the number {text.get_text()} lies on its side"
            assert "mathdefault" not in text.get_text(), f"{name}: set a LogFormatter, the style draws no formulas"
        check_titles_and_legends(name, figure)
        assert len(re.findall(r"[.!?](?=\s|$)", figure.caption)) == 1, f"{name}: not one sentence: {figure.caption}"
        assert struck_texts(figure.figure) == [], name
        for axes in figure.figure.axes:
            check_series(name, axes)
            check_percent(name, axes)
        if figure.stacks:
            check_stacked(name, figure)


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


def struck_texts(canvas) -> list[str]:
    """The texts inside axes that a line crosses, without a ground of their own that covers the line."""
    found = []
    for axes in canvas.axes:
        lines = [line for line in axes.lines if line.get_visible() and line.get_linestyle() not in ("None", "")]
        paths = [line.get_path().interpolated(1).transformed(line.get_transform()) for line in lines]
        for text in axes.texts:
            ground = text.get_bbox_patch()
            if not text.get_text() or (ground and ground.get_facecolor()[3] >= 0.75):
                continue
            box = text.get_window_extent().padded(-1)
            if any(path.intersects_bbox(box, filled=False) for path in paths):
                found.append(text.get_text())
    return found


def check_titles_and_legends(name: str, figure: Figure) -> None:
    """Assert that no title touches its neighbour and that legends lie inside the picture."""
    canvas = figure.figure
    boxes = [axes._left_title.get_window_extent() for axes in canvas.axes if axes._left_title.get_text()]
    for left, right in pairwise(boxes):
        assert left.x1 + 4 < right.x0 or left.y0 > right.y1 or left.x0 >= right.x0, name
    for legend in canvas.legends:
        assert legend.get_window_extent().x0 >= 0, name
        assert legend.get_window_extent().x1 <= canvas.get_figwidth() * canvas.dpi, name


def check_stacked(name: str, figure: Figure) -> None:
    """Assert that on a phone every panel stands below the one before it, and has all that was written."""
    small = Figure(figure.stacked(), "")
    checked_texts(small, more=titles_of(small))
    boxes = [axes.get_window_extent() for axes in small.figure.axes]
    for upper, lower in pairwise(boxes):
        assert upper.y0 > lower.y1, name
    assert written(small) == written(figure), name


def written(figure: Figure) -> set[str]:
    """The titles, labels, legends and the texts inside axes of a figure, but not the numbers of its axes."""
    canvas = figure.figure
    inside = [text for axes in canvas.axes for text in (*axes.texts, axes.xaxis.label, axes.yaxis.label)]
    keys = [text for legend in canvas.legends for text in legend.get_texts()]
    return {wrapped(text.get_text()) for text in (*titles_of(figure), *inside, *keys)} | {
        wrapped(canvas.get_suptitle())
    }


def check_series(name: str, axes) -> None:
    """Assert that lines differ in marker or dashes, and that bars of one hatch differ in grey."""
    lines = [line for line in axes.lines if not line.get_label().startswith("_")]
    assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == len(lines), name
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_fill()]
    looks = sorted({(patch.get_hatch() or "", gray(patch.get_facecolor())) for patch in bars})
    for (hatch, one), (other_hatch, other) in pairwise(looks):
        assert hatch != other_hatch or other - one > 0.08, (name, looks)


def check_percent(name: str, axes) -> None:
    """Assert that an axis of shares ends at 100 percent, or so little above that 100 is its last number."""
    for axis, spine in ((axes.xaxis, axes.spines.bottom), (axes.yaxis, axes.spines.left)):
        if axis.get_label_text().endswith("(%)"):
            _, end = spine.get_bounds() or sorted(axis.get_view_interval())
            assert end <= 108, f"{name}: the axis goes up to {end} %"


def gray(color) -> float:
    red, green, blue = color[:3]
    return 0.299 * red + 0.587 * green + 0.114 * blue


def titles_of(figure: Figure) -> list[Text]:
    """Return the titles of a figure's axes."""
    titles = [title for axes in figure.figure.axes for title in (axes.title, axes._left_title)]
    return [title for title in titles if title.get_text()]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.figure.findobj(Text) if text.get_text()]


def columns_of(page: str) -> list[tuple[str, list[tuple[str, float, float, str]]]]:
    """Read what ``bar_table`` has written: for each column its heading and its lines.

    A line is a name, the percent that its two bars show, and the word at their end.
    """
    columns = []
    for block in page.split('<div style="grid-column:1/-1">')[1:]:
        heading, _, rest = block.partition("</div>")
        cells = re.findall("<div>(.*?)</div>", rest)
        lines = []
        for name, cell in zip(cells[::2], cells[1::2], strict=True):
            widths = {look: float(em) for em, look in re.findall(r"width:([\d.]+)em;background:(#|repeating)", cell)}
            left, removed = (100 * widths.get(look, 0.0) / BAR for look in ("#", "repeating"))
            lines.append((html.unescape(name), left, removed, html.unescape(re.sub("<.*?>", "", cell)).strip()))
        columns.append((html.unescape(heading), lines))
    return columns
