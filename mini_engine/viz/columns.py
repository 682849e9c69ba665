"""Columns of bars, drawn in a figure or written as HTML. A notebook shows HTML anew in no time when a slider moves."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from torch import Tensor

from mini_engine.viz.figure import COLORS, REMOVED

OTHERS = "all others"
BAR = 9.0  # em, of 100 percent in HTML
LEFT = f"background:{COLORS[0]}"
HATCHED = (
    "background:repeating-linear-gradient(135deg,#808080 0 1px,transparent 1px 5px);box-shadow:inset 0 0 0 1px #808080"
)


@dataclass(frozen=True)
class Column:
    """A bar for every line, in percent: what is ``left`` of it, then what is ``removed``, then a word at its end."""

    heading: str
    left: Sequence[float]
    removed: Sequence[float]
    words: Sequence[str]


def shares_of(probs: Tensor, token_ids: Sequence[int]) -> list[float]:
    """Return the masses of the tokens and of all others together in ``probs`` [V], in percent."""
    others = probs.index_fill(0, torch.tensor(token_ids), 0.0).sum()
    return [100 * share for share in (*probs[list(token_ids)].tolist(), float(others))]


def percent(share: float) -> str:
    """Write a share given in percent with the digits that it needs."""
    return f"{share:.1f}" if share >= 0.05 else "< 0.1"


def draw_column(axes: Axes, column: Column) -> None:
    """Draw the bars from top to bottom under the heading."""
    at = range(len(column.left))
    axes.barh(at, column.left, 0.8, color=COLORS[0])
    edges = [0.8 * (mass > 0) for mass in column.removed]
    ends = axes.barh(at, column.removed, 0.8, left=column.left, linewidth=edges, **REMOVED)
    axes.bar_label(ends, column.words, padding=3, fontsize=10)
    axes.set_title(column.heading, fontsize=11)
    axes.set_ylim(len(at) - 0.4, -0.6)


def column_key(left: str, removed: str) -> list[Patch]:
    """Return the entries of a legend: what the two parts of a bar mean."""
    return [Patch(color=COLORS[0], label=left), Patch(**REMOVED, label=removed)]


def bar_table(names: Sequence[str], columns: Sequence[Column], legend: Sequence[str]) -> str:
    """Return the columns as HTML, side by side as far as there is room, else one below the other.

    ``names``: of the lines; ``legend``: what the first part of a bar means, and the second if there is one.
    """
    blocks = "".join(bar_block(names, column) for column in columns)
    key = " &emsp; ".join(f"{bar(look, 15)} {part}" for look, part in zip((LEFT, HATCHED), legend, strict=False))
    return f'<div style="display:flex;flex-wrap:wrap;gap:0.8em 1.5em">{blocks}</div>{key}'


def bar_block(names: Sequence[str], column: Column) -> str:
    """Return one column as HTML: below its heading, a line for each name."""
    heading = html.escape(column.heading).replace("\n", "<br>")
    cells = [f'<div style="grid-column:1/-1">{heading}</div>']
    for name, left, removed, word in zip(names, column.left, column.removed, column.words, strict=True):
        cells.append(f"<div>{html.escape(name)}</div>")
        cells.append(f"<div>{bar(LEFT, left)}{bar(HATCHED, removed)} {html.escape(word)}</div>")
    widths = f"max-content minmax({BAR + 2.5}em,max-content)"
    look = f"display:grid;grid-template-columns:{widths};gap:0.2em 1em;align-content:start"
    return f'<div style="{look}">{"".join(cells)}</div>'


def bar(look: str, share: float) -> str:
    """Return a bar of ``share`` percent, or nothing if it has no length."""
    size = f"display:inline-block;height:0.9em;width:{share * BAR / 100:.3f}em"
    return f'<span style="{size};{look}"></span>' if share else ""
