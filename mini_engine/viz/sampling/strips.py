"""Pictures of texts whose tokens are coloured by kind."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from mini_engine.viz.figure import (
    COLORS,
    HATCHES,
    MONO,
    Figure,
    add_box,
    bar_look,
    canvas,
    legend_below,
    one_by_one,
    plural,
    style,
    write,
)

CHARACTERS = 104  # of one line of a strip, in a font whose characters are equally wide
STRIP_LINE = 0.27  # inches of a line of tokens
STRIP_GAP = 0.36  # inches of the heading above a strip
RANKS = {"rank 1": 1, "rank 2 to 5": 5, "rank 6 to 20": 20, "rank above 20": math.inf}


@dataclass(frozen=True)
class Strip:
    """A heading and tokens, each of some kind."""

    heading: str
    names: Sequence[str]
    kinds: Sequence[str]

    @property
    def height(self) -> float:
        """Inches that it takes, its heading included."""
        return STRIP_GAP + STRIP_LINE * len(wrap(self.names))


@style()
def token_strips(strips: Sequence[Strip], kinds: Sequence[str]) -> Figure:
    """Draw texts as rows of token boxes, coloured and hatched by kind. ``kinds``: all of them, for the legend."""
    height = sum(strip.height for strip in strips)
    figure = canvas(height + 0.45)
    draw_strips(figure.subplots(), strips, kinds, height)
    legend_below(figure, *kind_legend(kinds), ncols=len(kinds))
    sentences = [
        f"{strip.heading}: " + ", ".join(f"{strip.kinds.count(kind)} {kind}" for kind in kinds) + "."
        for strip in strips
    ]
    every = [kind for strip in strips for kind in strip.kinds]
    counts = one_by_one("Tokens of each kind", {kind: every.count(kind) for kind in kinds})
    return Figure(figure, " ".join([counts, *sentences]))


def wrap(names: Sequence[str]) -> list[list[int]]:
    """Break tokens into lines of at most ``CHARACTERS`` characters -> the indices of each line."""
    lines: list[list[int]] = [[]]
    for index, name in enumerate(names):
        if lines[-1] and sum(len(names[i]) for i in lines[-1]) + len(name) > CHARACTERS:
            lines.append([])
        lines[-1].append(index)
    return lines


def draw_strips(axes: Axes, strips: Sequence[Strip], kinds: Sequence[str], height: float, size: float = 11) -> None:
    """Draw strips one below the other on axes of ``height`` inches. ``size``: of the font of the headings."""
    axes.set(xlim=(0, CHARACTERS), ylim=(height, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    top = 0.0
    for strip in strips:
        axes.text(0, top + STRIP_GAP / 2, strip.heading, fontsize=size, va="center")
        draw_strip(axes, strip, kinds, top + STRIP_GAP)
        top += strip.height


def draw_strip(axes: Axes, strip: Strip, kinds: Sequence[str], top: float) -> None:
    """Draw the boxes of one strip downwards from ``top``, in inches. A token is as wide as it has characters."""
    for number, line in enumerate(wrap(strip.names)):
        left = 0
        height = top + number * STRIP_LINE
        for index in line:
            name = strip.names[index]
            kind = kinds.index(strip.kinds[index])
            look = {"facecolor": COLORS[kind], "hatch": HATCHES[kind], "edgecolor": "white", "alpha": 0.45}
            add_box(axes, left + 0.06, height, len(name) - 0.12, STRIP_LINE * 0.88, linewidth=0, **look)
            write(axes, left + len(name) / 2, height + STRIP_LINE * 0.44, name, family=MONO, gid="token")
            left += len(name)


def kind_legend(kinds: Sequence[str]) -> list[Patch]:
    """Return one patch per kind."""
    return [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", alpha=0.7, label=kind)
        for kind, color, hatch in zip(kinds, COLORS, HATCHES, strict=False)
    ]


def rank_kind(rank: int) -> str:
    """Name the class of a rank."""
    return next(name for name, last in RANKS.items() if rank <= last)


@style()
def surprise_chart(names: Sequence[str], logprobs: Sequence[float], ranks: Sequence[int]) -> Figure:
    """Draw a text whose tokens are coloured by rank, and below it how unlikely each of them was, in bits.

    ``logprobs``: natural logarithms, before any filter; ``ranks``: 1 is the likeliest.
    """
    strip = Strip("The text; the colour says the token's rank", names, [rank_kind(rank) for rank in ranks])
    figure = canvas(strip.height + 4.0)
    text, bars = figure.subplots(2, 1, height_ratios=(strip.height, 3.4))
    draw_strips(text, [strip], list(RANKS), strip.height, size=12)
    bits = -np.array(logprobs) / math.log(2)
    at = np.arange(len(names))
    for kind, name in enumerate(RANKS):
        own = np.array([rank_kind(rank) == name for rank in ranks])
        bars.bar(at[own], bits[own], 0.8, **bar_look(kind))
    bars.set_xticks(at, names, rotation=90)
    bars.set(xlabel="token", ylabel="surprise (bits)", xlim=(-0.7, len(names) - 0.3))
    bars.set_title("How unlikely each token was: 0 bits is certain, 1 bit one of two, 5 bits one of 32")
    bars.grid(axis="y")
    legend_below(figure, *kind_legend(list(RANKS)), ncols=len(RANKS))
    first = sum(rank == 1 for rank in ranks)
    rarest = int(bits.argmax())
    return Figure(
        figure,
        f"{first} of {plural(len(names), 'token')} were the likeliest. The text costs {bits.sum():.1f} bits in all, "
        f"{bits.mean():.2f} a token. The least expected is {names[rarest]!r} with {bits[rarest]:.1f} bits, rank "
        f"{ranks[rarest]}.",
    )
