"""L8 in pictures: rounding errors of sums, bits in batches, softmax tile by tile, a search, the places of a mask.

Owns: drawings. Must not know: Triton, how anything was computed (``kernels_numbers``, ``kernels_runs``).
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import NullLocator

from mini_engine.viz.figure import COLORS, FAINT, GRAY, HATCHES, LINES, MARKERS, Figure, canvas, plural, style
from mini_engine.viz.kernels_numbers import TileStep
from mini_engine.viz.kernels_runs import ALONE, KEPT, OUTSIDE, TOGETHER, Divergence, MaskedBlock, Search

OUTPUT_ROUNDING = 2.0**-9  # of a result that is stored in bfloat16: half the distance of two of its numbers
ULP_STEPS = (0, 1, 2, 4, 16, 1 << 40)  # from which on a darker colour
ULP_NAMES = ("same bits", "1", "2, 3", "4 to 15", "16 or more")
ULP_COLORS = ("#f1f1f1", "#c6dbef", "#6baed6", "#2171b5", "#08306b")
KIND_LOOKS = {  # of a place in a masked block: its name, its ground and its hatch
    TOGETHER: ("banned, stored with all 32 of its word", "#1f4f8f", ""),
    ALONE: ("banned, stored one by one", COLORS[1], "///"),
    KEPT: ("allowed, left alone", "#f1f1f1", ""),
    OUTSIDE: ("no token: masked off", "white", "..."),
}


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
            axes.plot(blocks, values, marker=MARKERS[index], linestyle=LINES[index], color=COLORS[index],
                      label=f"summed in {name}")  # fmt: skip
        axes.axhline(OUTPUT_ROUNDING, color=GRAY, linestyle=":", linewidth=1.4, label="rounding a result to bfloat16")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(blocks, [str(block) for block in blocks])
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:.0e}")
        axes.set(title=title, xlabel="numbers in a block", ylabel="relative error")
        axes.grid()
        axes.label_outer()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return Figure(figure, " ".join(error_sentence(title, own, blocks) for title, own in errors.items()))


def error_sentence(title: str, curves: Mapping[str, Sequence[float]], blocks: Sequence[int]) -> str:
    """Say the ends of every line of one panel."""
    found = "; ".join(
        f"in {name} {values[0]:.1e} with blocks of {blocks[0]} and {values[-1]:.1e} with {blocks[-1]}"
        for name, values in curves.items()
    )
    return f"{title}: {found}."


@style()
def divergence_chart(panels: Sequence[Divergence]) -> Figure:
    """Draw which elements of a row change their bits in which batch, and how far: a panel per way of splitting."""
    figure = canvas(sum(0.33 * len(own.batches) + 0.85 for own in panels) + 0.5)
    grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    colors = ListedColormap(ULP_COLORS)
    for axes, own in zip(grid, panels, strict=True):
        lines, width = own.ulps.shape
        axes.imshow(own.ulps.numpy(), cmap=colors, norm=BoundaryNorm(ULP_STEPS, colors.N), aspect="auto",
                    interpolation="nearest", extent=(0, width, lines, 0))  # fmt: skip
        axes.hlines(range(1, lines), 0, width, color="white", linewidth=3)
        axes.vlines(range(1, width), 0, lines, color="white", linewidth=1)
        axes.set_yticks(np.arange(lines) + 0.5, [
            f"batch of {batch}, splits of {size}" for batch, size in zip(own.batches, own.split_sizes, strict=True)
        ])  # fmt: skip
        axes.tick_params(axis="both" if axes is not grid[-1] else "y", length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(own.title)
        for line, row in enumerate(own.ulps):
            axes.text(width + 0.8, line + 0.5, f"{int((row > 0).sum())} of {width} differ", va="center", fontsize=10)
    grid[-1].set_xlabel("element of the row's output (heads × head dim)")
    figure.legend(handles=[Patch(facecolor=color, label=name, edgecolor=GRAY) for color, name in
                           zip(ULP_COLORS, ULP_NAMES, strict=True)],
                  title="float32 numbers away from the row alone", loc="outside lower center", ncols=5)  # fmt: skip
    return Figure(figure, " ".join(
        f"{own.title}: in batches of {', '.join(map(str, own.batches))} the splits have "
        f"{', '.join(map(str, own.split_sizes))} keys, and {', '.join(str(int((row > 0).sum())) for row in own.ulps)} "
        f"of {own.ulps.shape[1]} elements differ from the row alone, by up to {int(own.ulps.max())} numbers."
        for own in panels
    ))  # fmt: skip


@style()
def softmax_walk(scores: Sequence[float], steps: Sequence[TileStep], title: str) -> Figure:
    """Draw an online softmax over one row of scores: the largest so far and the sum so far, tile by tile.

    ``steps``: of ``kernels_numbers.online_softmax`` over that one row. A new largest score rescales the sum.
    """
    tile = -(-len(scores) // len(steps))
    ends = [min(len(scores), tile * (number + 1)) for number in range(len(steps))]
    tops, keeps, added, totals = ([float(getattr(step, part)) for step in steps]
                                  for part in ("top", "keep", "added", "total"))  # fmt: skip
    figure = canvas(6.2)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    top.plot(range(len(scores)), scores, linestyle="", marker=".", color=COLORS[0], markersize=4, label="a score")
    top.step([0, *ends], [tops[0], *tops], where="pre", color="black", linewidth=1.6, label="the largest so far")
    raised = [number for number in range(1, len(steps)) if tops[number] > tops[number - 1]]
    for number in raised:
        top.plot(int(np.argmax(np.equal(scores, tops[number]))), tops[number], marker=MARKERS[2], color=COLORS[2],
                 markersize=8, gid="raised")  # fmt: skip
    starts, before = np.array([0, *ends[:-1]]), [0.0, *totals[:-1]]
    kept = np.array([old * keep for old, keep in zip(before, keeps, strict=True)])
    widths = np.array(ends) - starts
    box = {"align": "edge", "edgecolor": "white", "linewidth": 1.5}
    bottom.bar(starts, kept, widths, color="#b9d3f2", label="kept of the sum before", gid="kept", **box)
    bottom.bar(starts, added, widths, bottom=kept, color=COLORS[1], hatch=HATCHES[1], label="added by this tile",
               gid="added", **box)  # fmt: skip
    for number in raised:
        bottom.text(starts[number] + widths[number] / 2, totals[number] + 0.03 * max(totals),
                    f"× {keeps[number]:.2g}", ha="center", fontsize=10, rotation=90, gid="rescaled")  # fmt: skip
    for axes in (top, bottom):
        axes.vlines(ends[:-1], 0, 1, transform=axes.get_xaxis_transform(), color=FAINT, linewidth=1, zorder=0)
        axes.grid(axis="y")
    top.set(ylabel="score", title=title)
    bottom.set(xlabel=f"place in the row, tiles of {tile}", ylabel="running sum",
               xlim=(0, len(scores)), ylim=(0, 1.5 * max(totals)))  # fmt: skip
    bottom.set_title("The sum of exp(score − largest so far); written: what a new largest score leaves of it")
    handles = [*top.get_legend_handles_labels()[0], *bottom.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    factors = ", ".join(f"{keeps[number]:.2g} at tile {number}" for number in raised)
    rescaled = f"{plural(len(raised), 'time')} a new largest score rescales the sum, by {factors}" if raised else (
        "no later tile has a larger score than the first"
    )  # fmt: skip
    return Figure(
        figure,
        f"{title}: {len(scores)} scores in {plural(len(steps), 'tile')} of {tile}; {rescaled}. At the end the largest "
        f"is {tops[-1]:.4g} and the sum {totals[-1]:.4g}.",
    )


@style()
def search_chart(search: Search) -> Figure:
    """Draw a search for the cut of a row: the sorted row, the interval of every pass, and the candidates left in it."""
    row = search.row.sort(descending=True).values.numpy()
    figure = canvas(6.4)
    (left, right), (blank, counts) = figure.subplots(
        2, 2, sharex="col", sharey="row", height_ratios=(3, 1.2), width_ratios=(2, 3)
    )
    blank.set_axis_off()
    floor = float(row.min()) - 1
    numbers, few = range(1, len(search.passes) + 1), int(search.kept.sum())
    left.plot(np.arange(1, len(row) + 1), row, color=COLORS[0], linewidth=2)
    left.fill_between(np.arange(1, few + 1), floor, row[:few], facecolor="#b9d3f2", hatch="...",
                      edgecolor="white", gid="kept")  # fmt: skip
    left.set_xscale("log")
    left.xaxis.set_major_formatter("{x:.0f}")
    left.tick_params(labelbottom=True)
    left.set(xlabel="rank", ylabel="logit", title=f"The row sorted: {few} of {len(row)} kept", ylim=(floor, None))
    for number, own in zip(numbers, search.passes, strict=True):
        low = max(own.low, floor)
        right.add_patch(Rectangle((number - 0.32, low), 0.64, own.high - low, facecolor="#b9d3f2", gid="interval",
                                  edgecolor=COLORS[0], linewidth=1.2))  # fmt: skip
        inside = [probe for probe in own.probes if probe >= floor]
        right.plot([number] * len(inside), inside, linestyle="", marker="_", markersize=14, color="black", gid="probe")
    for axes in (left, right):
        axes.axhline(search.cut, color=COLORS[2], linestyle="--", linewidth=1.4)
        axes.grid(axis="y")
    right.set(title=f"{search.title}: where the cut may lie (marks: probes)")
    bars = counts.bar(numbers, [own.candidates for own in search.passes], 0.64, color=COLORS[0])
    counts.bar_label(bars, padding=2, fontsize=10)
    counts.set_yscale("log")
    counts.yaxis.set_major_formatter("{x:.0f}")
    counts.yaxis.set_minor_locator(NullLocator())
    counts.tick_params(labelleft=True)
    counts.set(xlabel="pass over the row", xticks=numbers, ylabel="candidates", xlim=(0.4, len(numbers) + 0.6),
               ylim=(0.7, 6 * len(row)))  # fmt: skip
    counts.set_title("Different logits in the interval")
    return Figure(
        figure,
        f"{search.title}: {plural(len(numbers), 'pass').replace('passs', 'passes')} over {len(row)} logits; "
        f"candidates {', '.join(str(own.candidates) for own in search.passes)}; the cut is {search.cut:.5g} and "
        f"{few} are kept.",
    )


@style()
def block_picture(block: MaskedBlock) -> Figure:
    """Draw one program of the bitmask kernel: a column per word of the mask, a line per bit, what is stored where."""
    words, bits = block.kinds.shape
    figure = canvas(5.3)
    axes = figure.subplots()
    kinds = block.kinds.T.numpy()  # [32, WORDS]
    order = sorted(KIND_LOOKS)
    axes.imshow(kinds, cmap=ListedColormap([KIND_LOOKS[kind][1] for kind in order]), vmin=-0.5, vmax=3.5,
                aspect="auto", interpolation="nearest", extent=(0, words, bits, 0))  # fmt: skip
    for kind in (ALONE, OUTSIDE):
        hatch_places(axes, kinds == kind, KIND_LOOKS[kind][2])
    axes.hlines(range(1, bits), 0, words, color="white", linewidth=0.8)
    axes.vlines(range(1, words), 0, bits, color="white", linewidth=1.6)
    axes.set_xticks([*range(0, words, 8), words])
    axes.set_yticks([*range(0, bits, 8), bits])
    axes.set(xlabel="word of the mask", ylabel="bit of the word")
    axes.set_title(f"One program: {words} words × {bits} bits, {block.vocab_size:,} tokens")
    axes.spines[["top", "right"]].set_visible(True)
    figure.legend(handles=[
        Patch(facecolor=color, hatch=hatch, edgecolor=GRAY, label=f"{name}: {block.count(kind):,}")
        for kind, (name, color, hatch) in KIND_LOOKS.items()
    ], loc="outside lower center", ncols=2)  # fmt: skip
    return Figure(figure, f"A block of {block.kinds.numel()} places for {block.vocab_size} tokens. " + " ".join(
        f"{name.capitalize()}: {block.count(kind)}." for kind, (name, _, _) in KIND_LOOKS.items()
    ))  # fmt: skip


def hatch_places(axes: Axes, chosen: np.ndarray, hatch: str) -> None:
    """Hatch the chosen places [32, WORDS], each run of a column as one box."""
    for column in range(chosen.shape[1]):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], chosen[:, column].astype(int), [0]))))
        for start, end in edges.reshape(-1, 2).tolist():
            axes.add_patch(Rectangle((column, start), 1, end - start, fill=False, hatch=hatch, linewidth=0,
                                     edgecolor="white" if hatch == "///" else "#b0b0b0"))  # fmt: skip
