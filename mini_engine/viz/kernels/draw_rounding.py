"""Pictures of rounding errors, and of a softmax that is corrected tile by tile."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from mini_engine.viz.figure import (
    COLORS,
    FAINT,
    GRAY,
    MARKERS,
    PALE,
    Figure,
    Look,
    bar_look,
    canvas,
    dots,
    legend_below,
    line_look,
    one_by_one,
    plural,
    style,
    text_ground,
)
from mini_engine.viz.kernels.rounding import TileStep

OUTPUT_ROUNDING = 2.0**-9  # relative error of a result that is stored in bfloat16


@style()
def error_chart(errors: Mapping[str, Mapping[str, Sequence[float]]], blocks: Sequence[int]) -> Figure:
    """Draw the error of operations against the block size, a line per dtype of the running sums.

    ``errors``: operation -> dtype -> relative error for each of ``blocks``.
    """
    lines = -(-len(errors) // 2)
    figure = canvas(2.6 * lines + 0.6)
    grid = figure.subplots(lines, 2, sharex=True, sharey=True, squeeze=False).flat
    for axes, (title, curves) in zip(grid, errors.items(), strict=False):
        for index, (name, values) in enumerate(curves.items()):
            axes.plot(blocks, values, **line_look(index), label=f"summed in {name}")
        axes.axhline(OUTPUT_ROUNDING, color=GRAY, linestyle=":", linewidth=1.4, label="rounding a result to bfloat16")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(blocks, [str(block) for block in blocks])
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:.0e}")
        axes.set(title=title, xlabel="numbers in a block", ylabel="relative error")
        axes.grid()
        axes.label_outer()
    legend_below(figure, *axes.get_legend_handles_labels()[0], ncols=3)
    largest: dict[str, float] = {}
    for curves in errors.values():
        for name, values in curves.items():
            largest[name] = max(largest.get(name, 0.0), *values)
    words = "Largest relative error, measured here, of sums in"
    first = one_by_one(words, {name: f"{error:.1e}" for name, error in largest.items()})
    return Figure(figure, " ".join([first, *(error_sentence(title, own, blocks) for title, own in errors.items())]))


def error_sentence(title: str, curves: Mapping[str, Sequence[float]], blocks: Sequence[int]) -> str:
    """Say the ends of every line of one panel."""
    found = "; ".join(
        f"in {name} {values[0]:.1e} with blocks of {blocks[0]} and {values[-1]:.1e} with {blocks[-1]}"
        for name, values in curves.items()
    )
    return f"{title}: {found}."


@style()
def softmax_walk(scores: Sequence[float], steps: Sequence[TileStep], title: str) -> Figure:
    """Draw an online softmax over one row of scores: the largest so far and the sum so far, tile by tile.

    ``steps``: of ``rounding.online_softmax`` over that one row. A new largest score rescales the sum.
    """
    tile = -(-len(scores) // len(steps))
    edges = [min(len(scores), tile * number) for number in range(len(steps) + 1)]
    tops = [float(step.top) for step in steps]
    raised = [number for number in range(1, len(steps)) if tops[number] > tops[number - 1]]
    figure = canvas(6.2)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    dots(top, range(len(scores)), scores, ".", 4, COLORS[0], label="a score")
    top.step(edges, [tops[0], *tops], where="pre", color="black", linewidth=1.6, label="the largest so far")
    for number in raised:
        place = int(np.argmax(np.equal(scores, tops[number])))
        dots(top, place, tops[number], MARKERS[2], 8, COLORS[2], gid="raised")
    top.plot([], [], linestyle="", marker=MARKERS[2], markersize=8, color=COLORS[2], label="a new largest")
    top.set(ylabel="score", title=title)
    draw_sums(bottom, steps, np.array(edges), raised)
    bottom.set(xlabel=f"place in the row, tiles of {tile}", xlim=(0, len(scores)))
    for axes in (top, bottom):
        axes.vlines(edges[1:-1], 0, 1, transform=axes.get_xaxis_transform(), color=FAINT, linewidth=1, zorder=0)
        axes.grid(axis="y")
    handles = [*top.get_legend_handles_labels()[0], *bottom.get_legend_handles_labels()[0]]
    legend_below(figure, *handles, ncols=5)
    rescaled = "no later tile has a larger score than the first"
    if raised:
        factors = ", ".join(f"{float(steps[number].keep):.2g} at tile {number}" for number in raised)
        rescaled = f"{plural(len(raised), 'time')} a new largest score rescales the sum, by {factors}"
    return Figure(
        figure,
        f"{title}: {len(scores)} scores in {plural(len(steps), 'tile')} of {tile}; {rescaled}. At the end the largest "
        f"is {tops[-1]:.4g} and the sum {float(steps[-1].total):.4g}.",
    )


def draw_sums(axes: Axes, steps: Sequence[TileStep], edges: np.ndarray, raised: Sequence[int]) -> None:
    """Draw the running sum after each tile: what is kept of the sum before, and what the tile adds.

    ``edges``: where the tiles begin, and where the last one ends. ``raised``: the tiles that rescale the sum.
    """
    totals = [float(step.total) for step in steps]
    kept = np.array([before * float(step.keep) for before, step in zip([0.0, *totals[:-1]], steps, strict=True)])
    added = [float(step.added) for step in steps]
    starts = edges[:-1]
    widths = np.diff(edges)
    box: Look = {"align": "edge", "linewidth": 1.5}
    axes.bar(starts, kept, widths, color=PALE, edgecolor="white", label="kept of the sum before", gid="kept", **box)
    axes.bar(starts, added, widths, bottom=kept, **bar_look(1), label="added by this tile", gid="added", **box)
    above = 0.0
    for number in raised:
        ground = max(totals[number : number + 2])  # a factor may reach over the next bar
        near = number - 1 in raised  # then it stands over the factor before
        above = max(ground, above + 0.12 * max(totals) if near else 0.0) + 0.03 * max(totals)
        factor = f"× {float(steps[number].keep):.2g}"
        axes.text(starts[number], above, factor, fontsize=10, gid="rescaled", bbox=text_ground(1))
    axes.set(ylabel="running sum", ylim=(0, max(1.25 * max(totals), above + 0.15 * max(totals))))
    axes.set_title("The sum of exp(score − largest so far); written: what a new largest score leaves of it")
