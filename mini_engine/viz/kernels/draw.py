"""Pictures of kernels at work: bits in batches, the passes of a search, the places that a mask stores to."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, Normalize
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from mini_engine.viz.figure import (
    COLORS,
    GRAY,
    PALE,
    Figure,
    Look,
    add_box,
    canvas,
    colour_grid,
    dots,
    label_log_axis,
    legend_below,
    one_by_one,
    plural,
    stacked,
    style,
)
from mini_engine.viz.kernels.measure import ALONE, KEPT, OUTSIDE, TOGETHER, Divergence, MaskedBlock, Search

ULP_STEPS = (0, 1, 2, 4, 16, 1 << 40)  # limits between the colours
ULP_NAMES = ("same bits", "1", "2, 3", "4 to 15", "16 or more")
ULP_COLORS = ("#f1f1f1", "#c6dbef", "#6baed6", "#2171b5", "#08306b")
KIND_LOOKS = {  # of a place in a masked block: its name, its ground and its hatch
    TOGETHER: ("banned, stored with all 32 of its word", "#1f4f8f", ""),
    ALONE: ("banned, stored one by one", COLORS[1], "///"),
    KEPT: ("allowed, left alone", "#f1f1f1", ""),
    OUTSIDE: ("no token: masked off", "white", "..."),
}


@style()
def divergence_chart(panels: Sequence[Divergence]) -> Figure:
    """Draw which elements of a row change their bits in which batch, and by how much: a panel per way to split."""
    figure = canvas(sum(0.33 * len(own.batches) + 0.85 for own in panels) + 0.5)
    grid = stacked(figure, len(panels), sharex=True)
    norm = BoundaryNorm(ULP_STEPS, len(ULP_COLORS))
    for axes, own in zip(grid, panels, strict=True):
        lines, width = own.ulps.shape
        colour_grid(axes, own.ulps.numpy(), ULP_COLORS, norm)
        axes.hlines(range(1, lines), 0, width, color="white", linewidth=3)
        axes.vlines(range(1, width), 0, lines, color="white", linewidth=1)
        sizes = zip(own.batches, own.split_sizes, strict=True)
        axes.set_yticks(np.arange(lines) + 0.5, [f"batch of {batch}, splits of {size}" for batch, size in sizes])
        axes.tick_params(axis="both" if axes is not grid[-1] else "y", length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(own.title)
        for line, row in enumerate(own.ulps):
            axes.text(width + 0.8, line + 0.5, f"{int((row > 0).sum())} of {width} differ", va="center", fontsize=10)
    grid[-1].set_xlabel("element of the row's output (heads × head dim)")
    looks = zip(ULP_COLORS, ULP_NAMES, strict=True)
    handles = [Patch(facecolor=color, label=name, edgecolor=GRAY) for color, name in looks]
    legend_below(figure, *handles, title="float32 numbers away from the row alone", ncols=5)
    most = {own.title: int((own.ulps > 0).sum(1).max()) for own in panels}
    first = one_by_one("Elements that differ, at most, measured here", most)
    return Figure(figure, " ".join([first, *map(divergence_sentence, panels)]))


def divergence_sentence(own: Divergence) -> str:
    """Say how many elements differ in each batch, and by how much at most."""
    batches, sizes = ", ".join(map(str, own.batches)), ", ".join(map(str, own.split_sizes))
    counts = ", ".join(str(int((row > 0).sum())) for row in own.ulps)
    return (
        f"{own.title}: in batches of {batches} the splits have {sizes} keys, and {counts} of {own.ulps.shape[1]} "
        f"elements differ from the row alone, by up to {int(own.ulps.max())} numbers."
    )


@style()
def search_chart(search: Search) -> Figure:
    """Draw a search for the cut of a row: the sorted row, the interval of every pass, and the candidates left in it."""
    row = search.row.sort(descending=True).values.numpy()
    figure = canvas(6.4)
    layout: Look = {"height_ratios": (3, 1.2), "width_ratios": (2, 3)}
    (left, right), (blank, counts) = figure.subplots(2, 2, sharex="col", sharey="row", **layout)
    blank.set_axis_off()
    floor = float(row.min()) - 1
    num_kept = int(search.kept.sum())
    left.plot(np.arange(1, len(row) + 1), row, color=COLORS[0], linewidth=2)
    look = {"facecolor": PALE, "hatch": "...", "edgecolor": "white", "gid": "kept"}
    left.fill_between(np.arange(1, num_kept + 1), floor, row[:num_kept], **look)
    left.set_xscale("log")
    label_log_axis(left.xaxis, "{x:.0f}")
    left.tick_params(labelbottom=True)
    left.set(xlabel="rank", ylabel="logit", title=f"The row sorted: {num_kept} of {len(row)} kept", ylim=(floor, None))
    draw_intervals(right, search, floor)
    for axes in (left, right):
        cut = axes.axhline(search.cut, color=COLORS[2], linestyle="--", linewidth=1.4, label="the cut: logits below go")
        axes.grid(axis="y")
    blank.legend(handles=[cut], loc="center")
    draw_candidates(counts, search)
    return Figure(
        figure,
        f"{search.title}, measured here: {plural(len(search.passes), 'pass')} over {len(row)} logits; "
        f"candidates {', '.join(str(own.candidates) for own in search.passes)}; the cut is {search.cut:.5g} and "
        f"{num_kept} are kept.",
    )


def draw_intervals(axes: Axes, search: Search, floor: float) -> None:
    """Draw the interval of every pass as a box, and the numbers that it asks about as marks, above ``floor``."""
    look: Look = {"facecolor": PALE, "edgecolor": COLORS[0], "linewidth": 1.2, "gid": "interval"}
    for number, own in enumerate(search.passes, start=1):
        low = max(own.low, floor)
        add_box(axes, number - 0.32, low, 0.64, own.high - low, **look)
        inside = [probe for probe in own.probes if probe >= floor]
        dots(axes, [number] * len(inside), inside, "_", 14, "black", gid="probe")
    axes.set_title(f"{search.title}: where the cut may lie (marks: probes)")


def draw_candidates(axes: Axes, search: Search) -> None:
    """Draw how many different logits lie in the interval of every pass."""
    numbers = range(1, len(search.passes) + 1)
    bars = axes.bar(numbers, [own.candidates for own in search.passes], 0.64, color=COLORS[0])
    axes.bar_label(bars, padding=2, fontsize=10)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelleft=True)
    axes.set(xlabel="pass over the row", xticks=numbers, xlim=(0.4, len(numbers) + 0.6))
    axes.set(ylabel="candidates", ylim=(0.7, 6 * len(search.row)), title="Different logits in the interval")


@style()
def block_picture(block: MaskedBlock) -> Figure:
    """Draw what one program of the bitmask kernel stores: a column per word of the mask, a line per bit."""
    words, bits = block.kinds.shape
    figure = canvas(5.3)
    axes = figure.subplots()
    kinds = block.kinds.T.numpy()  # [32, WORDS]
    colour_grid(axes, kinds, [KIND_LOOKS[kind][1] for kind in sorted(KIND_LOOKS)], Normalize(-0.5, 3.5))
    for kind in (ALONE, OUTSIDE):
        hatch_places(axes, kinds == kind, KIND_LOOKS[kind][2])
    axes.hlines(range(1, bits), 0, words, color="white", linewidth=0.8)
    axes.vlines(range(1, words), 0, bits, color="white", linewidth=1.6)
    axes.set_xticks([*range(0, words, 8), words])
    axes.set_yticks([*range(0, bits, 8), bits])
    axes.set(xlabel="word of the mask", ylabel="bit of the word")
    axes.set_title(f"One program: {words} words × {bits} bits, {block.vocab_size:,} tokens")
    axes.spines[["top", "right"]].set_visible(True)
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor=GRAY, label=f"{name}: {block.count(kind):,}")
        for kind, (name, color, hatch) in KIND_LOOKS.items()
    ]
    legend_below(figure, *handles, ncols=2)
    return Figure(
        figure,
        f"A block of {block.kinds.numel()} places for {block.vocab_size} tokens. "
        + " ".join(f"{name.capitalize()}: {block.count(kind)}." for kind, (name, _, _) in KIND_LOOKS.items()),
    )


def hatch_places(axes: Axes, chosen: np.ndarray, hatch: str) -> None:
    """Hatch the chosen places [32, WORDS], each run of a column as one box."""
    color = "white" if hatch == "///" else "#b0b0b0"
    for column in range(chosen.shape[1]):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], chosen[:, column].astype(int), [0]))))
        for start, end in edges.reshape(-1, 2).tolist():
            add_box(axes, column, start, 1, end - start, fill=False, hatch=hatch, linewidth=0, edgecolor=color)
