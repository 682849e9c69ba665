"""The style of all figures, ``Figure`` (a picture and its summary), and small drawing helpers.

Colour is never the only sign: every series also has its own hatch or marker, and a label. Figures are built without
``pyplot``, so a notebook neither keeps them alive nor shows them twice.
"""

import base64
import html
import io
import pickle
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import ListedColormap, Normalize, to_hex
from matplotlib.figure import Figure as Canvas
from matplotlib.gridspec import GridSpec
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogFormatter

COLORS = tuple(map(to_hex, mpl.color_sequences["petroff10"]))  # Petroff, 2021: chosen for colour-blind readers
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo", "+++", "---", "OO", "**")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
GRAY = "#5a5a5a"
FAINT = "#d9d9d9"
PALE = "#b9d3f2"
SOFT = "#86b6f0"
MONO = "DejaVu Sans Mono"  # a font whose characters are equally wide
Look = dict[str, Any]  # keyword arguments of a drawing function

REMOVED: Look = {"facecolor": "white", "hatch": "////", "edgecolor": "#a0a0a0"}
WIDTH = 9.5  # inches: a notebook column at 100 pixels an inch
PHONE_WIDTH = 4.2  # inches: a phone, whose text is then about as large
PHONE_LINE = 40  # characters of a title that fit there
PHONE = "(max-width: 600px)"
LEAST_WIDTH = 640  # pixels of a picture that does not stack: its smallest text has 9 then
SENTENCE_END = re.compile(r"(?<=\.)\s+")

STYLE: Any = {  # matplotlib types this as one literal of all its parameter names, which differ by version
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "grid.color": "#e3e3e3",
    "hatch.linewidth": 0.7,
    "figure.facecolor": "white",
    "text.parse_math": False,  # a token may be a dollar sign
}


@dataclass(frozen=True, repr=False)
class Figure:
    """A picture and one paragraph that says what it shows.

    A notebook displays the picture and the paragraph's first sentence; ``print`` writes the paragraph.

    ``stacks``: the panels stand side by side, and below each other on a phone. A picture that does not stack is moved
    sideways there.
    """

    figure: Canvas
    summary: str
    stacks: bool = False

    @property
    def caption(self) -> str:
        """The first sentence of the summary."""
        return SENTENCE_END.split(self.summary, maxsplit=1)[0]

    def png(self, dpi: int = 144) -> bytes:
        """Return the picture as a PNG file."""
        return draw_png(self.figure, dpi)

    def save(self, file: Path, dpi: int = 144) -> None:
        """Write the picture to ``file`` as PNG."""
        file.write_bytes(self.png(dpi))

    def stacked(self) -> Canvas:
        """Return a copy of the picture for a phone."""
        copy: Canvas = pickle.loads(pickle.dumps(self.figure))
        with style():
            stack_panels(copy)
        return copy

    def _repr_html_(self) -> str:
        """Return the picture with its caption beneath it, and the summary as the text for screen readers."""
        text, caption = html.escape(self.summary), html.escape(self.caption)
        width = round(self.figure.get_figwidth() * 100)
        least = "" if self.stacks else f' style="min-width:{min(width, LEAST_WIDTH)}px"'
        picture = f'<img width="{width}"{least} alt="{text}" src="{data_url(self.png())}"/>'
        if self.stacks:
            small = f'<source media="{PHONE}" srcset="{data_url(draw_png(self.stacked()))}"/>'
            picture = f"<picture>{small}{picture}</picture>"
        return f'<div style="overflow-x:auto">{picture}</div><p>{caption}</p>'

    def __repr__(self) -> str:
        """Return the summary."""
        return self.summary


def draw_png(figure: Canvas, dpi: int = 144) -> bytes:
    """Return ``figure`` as a PNG file."""
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def data_url(png: bytes) -> str:
    """Return an address that is the picture itself."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def stack_panels(figure: Canvas) -> None:
    """Put the panels of ``figure`` below each other, each with its own labels. Mutates ``figure``."""
    panels = [axes for axes in figure.axes if axes.axison]
    for blank in set(figure.axes) - set(panels):
        blank.remove()
    first, last = panels[0], panels[-1]
    spec = first.get_subplotspec()
    assert spec is not None, "made by subplots"
    height = figure.get_figheight() / spec.get_gridspec().nrows
    figure.set_size_inches(PHONE_WIDTH, height * len(panels))
    grid = GridSpec(len(panels), 1, figure=figure)
    for place, axes in enumerate(panels):
        axes.set_subplotspec(grid[place])
        axes.tick_params(labelleft=True, labelbottom=True)
        axes.set_ylabel(axes.get_ylabel() or first.get_ylabel())
        axes.set_xlabel(axes.get_xlabel() or last.get_xlabel())
        title = axes.get_title("left")
        axes.set_title(wrapped(title), loc="left", fontsize=11)
    if title := figure.get_suptitle():
        figure.suptitle(wrapped(title), fontsize=11)
    for legend in figure.legends:
        labels = [text.get_text() for text in legend.get_texts()]
        handles = [handle for handle in legend.legend_handles if handle is not None]
        legend.remove()
        figure.legend(handles, labels, loc="outside lower center")


def wrapped(text: str) -> str:
    """Break each line of a title where a phone ends."""
    return "\n".join(textwrap.fill(line, PHONE_LINE) for line in text.splitlines())


@contextmanager
def style() -> Iterator[None]:
    """Draw in the course's style inside this context; also works as a decorator."""
    with mpl.rc_context(STYLE):
        yield


def canvas(height: float, width: float = WIDTH) -> Canvas:
    """Return an empty figure, in inches, that keeps labels inside its edges."""
    return Canvas(figsize=(width, height), layout="constrained")


def bar_look(index: int) -> Look:
    """Return the colour and the hatch of series ``index`` in a chart of bars."""
    return {"color": COLORS[index], "hatch": HATCHES[index], "edgecolor": "white"}


def line_look(index: int) -> Look:
    """Return the colour, the dashes and the marker of series ``index`` in a chart of lines."""
    return {"color": COLORS[index], "linestyle": LINES[index % len(LINES)], "marker": MARKERS[index]}


def legend_below(figure: Canvas, *handles: Any, **options: Any) -> None:
    """Put a legend of ``handles`` below all axes; without any, of everything that has a label."""
    figure.legend(handles=handles or None, loc="outside lower center", **options)


def hide_frame(axes: Axes) -> None:
    """Hide the frame and the tick marks; labels stay."""
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def label_log_axis(axis: Axis, numbers: str) -> None:
    """Label a logarithmic axis with plain ``numbers``, also the ticks of a short one between powers of ten."""
    axis.set_major_formatter(numbers)
    axis.set_minor_formatter(LogFormatter())  # matplotlib's own writes formulas, which the style does not draw


def percent_axis(axes: Axes, limit: float, ticks: Sequence[float] = (0, 25, 50, 75, 100)) -> None:
    """Let the x axis of shares end at 100 percent at most; what is beyond, up to ``limit``, is for words."""
    axes.set_xlim(0, limit)
    if limit > ticks[-1]:
        axes.set_xticks(ticks)
        axes.spines.bottom.set_bounds(0, ticks[-1])


def text_ground(pad: float, alpha: float = 1.0) -> Look:
    """Return the ``bbox`` of a text that must stay readable over a hatch or a line."""
    return {"facecolor": "white", "edgecolor": "none", "pad": pad, "alpha": alpha}


def swatch(label: str, color: str, hatch: str) -> Patch:
    """Return a legend entry for an area."""
    return Patch(facecolor=color, hatch=hatch, edgecolor="white", label=label)


def add_box(axes: Axes, left: float, bottom: float, width: float, height: float, **look: Any) -> None:
    """Draw a rectangle."""
    axes.add_patch(Rectangle((left, bottom), width, height, **look))


def write(axes: Axes, x: float, y: float, text: str, **look: Any) -> None:
    """Write a small text with its centre at (x, y)."""
    axes.text(x, y, text, ha="center", va="center", **{"fontsize": 10} | look)


def stacked(figure: Canvas, count: int, **options: Any) -> Sequence[Axes]:
    """Return ``count`` axes, one below the other."""
    axes: Sequence[Axes] = figure.subplots(count, 1, squeeze=False, **options)[:, 0]
    return axes


def colour_grid(axes: Axes, table: Any, colors: Sequence[str], norm: Normalize | None = None) -> None:
    """Draw a table as an image: cell (i, j) spans x from j to j + 1 and y from i to i + 1, downwards."""
    height, width = table.shape
    shown = ListedColormap(list(colors))
    axes.imshow(table, cmap=shown, norm=norm, aspect="auto", interpolation="nearest", extent=(0, width, height, 0))


def dots(axes: Axes, x: Any, y: Any, marker: str, size: float, color: str, **look: Any) -> Sequence[Line2D]:
    """Draw a marker at every point, without lines between them."""
    return axes.plot(x, y, linestyle="", marker=marker, markersize=size, color=color, **look)


def dot_key(marker: str, size: float, color: str, label: str, **look: Any) -> Line2D:
    """Return a legend entry for such markers."""
    return Line2D([], [], linestyle="", marker=marker, markersize=size, color=color, label=label, **look)


def plural(count: int, noun: str) -> str:
    """Return "1 row" or "2 rows"."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{ending}"


def one_by_one(words: str, values: Mapping[str, object]) -> str:
    """Return a sentence that gives a value for each name: "Pages computed again: 12 (off), 0 (on)."."""
    pairs = [f"{value} ({' '.join(name.split())})" for name, value in values.items()]
    return f"{words}: {', '.join(pairs)}."
