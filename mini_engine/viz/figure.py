"""What every figure of the course has in common: the style, and the text beside the picture.

Owns: fonts, colours, hatches and the ``Figure`` value. Must not know: what is drawn.

Nothing is told by colour alone: each series has a hatch or a marker of its own and a label beside it. Figures are
built without ``pyplot``, so no figure is kept alive or shown twice by a notebook.
"""

import base64
import html
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.colors import to_hex
from matplotlib.figure import Figure as Canvas

COLORS = tuple(map(to_hex, mpl.color_sequences["petroff10"]))  # Petroff, 2021: ten colours that all eyes tell apart
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo", "+++", "---", "OO", "**")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
GRAY, FAINT = "#5a5a5a", "#d9d9d9"
WIDTH = 9.5  # inches: a notebook column at 100 pixels an inch

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
    "text.parse_math": False,  # a token may well be a dollar sign
}


@dataclass(frozen=True, repr=False)
class Figure:
    """A picture and one paragraph that says what it shows. A notebook displays both; ``print`` says the paragraph."""

    figure: Canvas
    summary: str

    def png(self, dpi: int = 144) -> bytes:
        """Return the picture as a PNG file."""
        buffer = io.BytesIO()
        with style():
            self.figure.savefig(buffer, format="png", dpi=dpi)
        return buffer.getvalue()

    def save(self, file: Path, dpi: int = 144) -> None:
        """Write the picture to ``file`` as PNG."""
        file.write_bytes(self.png(dpi))

    def _repr_html_(self) -> str:
        """Return the picture with the summary beneath it and as the text for screen readers."""
        text, data = html.escape(self.summary), base64.b64encode(self.png()).decode()
        width = round(self.figure.get_figwidth() * 100)
        return f'<img width="{width}" alt="{text}" src="data:image/png;base64,{data}"/><p>{text}</p>'

    def __repr__(self) -> str:
        """Return the summary."""
        return self.summary


@contextmanager
def style() -> Iterator[None]:
    """Draw in the course's style inside this context; also works as a decorator."""
    with mpl.rc_context(STYLE):
        yield


def canvas(height: float, width: float = WIDTH) -> Canvas:
    """Return an empty figure, in inches, that keeps labels inside its edges."""
    return Canvas(figsize=(width, height), layout="constrained")


def plural(count: int, noun: str) -> str:
    """Return "1 row" or "2 rows"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
