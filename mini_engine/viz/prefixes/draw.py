"""Pictures of a prefix cache: pages found and computed, hit rates, and the time and memory that it saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mini_engine.viz.figure import (
    COLORS,
    FAINT,
    GRAY,
    MARKERS,
    SOFT,
    Figure,
    Look,
    add_box,
    canvas,
    dots,
    legend_below,
    line_look,
    one_by_one,
    plural,
    stacked,
    style,
    swatch,
)
from mini_engine.viz.prefixes.measure import Cell, CellKind, Served
from mini_engine.viz.scheduling.draw import LOOKS

CELLS: dict[CellKind, tuple[str, str, str]] = {
    "found": ("#e4e4e4", "", "found in the cache"),
    "first": (LOOKS["prompt"][0], "///", "computed for the first time"),
    "again": (LOOKS["again"][0], "xxx", "computed again"),
}


@style()
def page_map(names: Sequence[str], runs: Sequence[Sequence[Cell]]) -> Figure:
    """Draw one panel per run: a column per request in the order of admission, a line per page of the tree."""
    lines, visits = (max(getattr(cell, part) for cells in runs for cell in cells) + 1 for part in ("line", "visit"))
    figure = canvas(min(0.1 * lines, 6.0) + 1.5)
    panels = figure.subplots(1, len(runs), sharex=True, sharey=True, squeeze=False)[0]
    for axes, name, cells in zip(panels, names, runs, strict=True):
        for cell in cells:
            color, hatch, _ = CELLS[cell.kind]
            look = {"facecolor": color, "hatch": hatch, "edgecolor": "white", "gid": cell.kind}
            add_box(axes, cell.visit + 0.5, cell.line, 1, 1, linewidth=0.5, **look)
        axes.set(xlim=(0.5, visits + 0.5), ylim=(lines, 0), xlabel="request, in the order of admission")
        axes.set_title(f"{name}: {kind_count(cells, 'first')} pages computed, {kind_count(cells, 'again')} again")
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        axes.grid(axis="y")
    panels[0].set_ylabel("page of the tree")
    legend_below(figure, *[swatch(words, color, hatch) for color, hatch, words in CELLS.values()], ncols=3)
    again = {name: kind_count(cells, "again") for name, cells in zip(names, runs, strict=True)}
    sentences = [
        f"{name}: {visits} requests; of their pages {kind_count(cells, 'first')} are computed for the first time, "
        f"{kind_count(cells, 'again')} again, {kind_count(cells, 'found')} are found."
        for name, cells in zip(names, runs, strict=True)
    ]
    return Figure(figure, " ".join([one_by_one("Pages computed again", again), *sentences]))


def kind_count(cells: Sequence[Cell], kind: CellKind) -> int:
    """Return how many pages were of a kind."""
    return sum(cell.kind == kind for cell in cells)


@dataclass(frozen=True)
class HitCurves:
    """Hit rates, from 0 to 1, over pools of ``pages`` pages.

    ``rates``: of each order of admission. ``bound``: the most that any order can reach. ``tree``: pages of the whole
    tree.
    """

    pages: Sequence[int]
    rates: Mapping[str, Sequence[float]]
    bound: float
    tree: int


@style()
def hit_rate_chart(panels: Mapping[str, HitCurves]) -> Figure:
    """Draw one panel per load: the hit rate of each order over the size of the pool, and the bound above all."""
    figure = canvas(4.4)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, curves) in zip(grid, panels.items(), strict=True):
        axes.axhline(100 * curves.bound, color="black", linestyle="--", linewidth=1.4, gid="bound")
        if curves.tree <= max(curves.pages):
            axes.axvline(curves.tree, color=GRAY, linestyle=":", linewidth=1.6, gid="tree")
        for index, (name, rates) in enumerate(curves.rates.items()):
            look = line_look(index) | {
                "markersize": 11 - 2.3 * index,
                "markerfacecolor": "none",
                "markeredgewidth": 1.6,
            }
            axes.plot(curves.pages, [100 * rate for rate in rates], label=name, **look)
        axes.set(xlabel="pages in the pool", ylim=(0, 106 * max(own.bound for own in panels.values())))
        axes.set_title(title, fontsize=11)
        axes.grid()
    grid[0].set_ylabel("hit rate (%)")
    handles, _ = grid[0].get_legend_handles_labels()
    handles.append(Line2D([], [], color="black", linestyle="--", linewidth=1.4, label="the bound"))
    if any(curves.tree <= max(curves.pages) for curves in panels.values()):
        handles.append(Line2D([], [], color=GRAY, linestyle=":", linewidth=1.6, label="room for the whole tree"))
    legend_below(figure, *handles, ncols=len(handles))
    bounds = {title: f"{curves.bound:.1%}" for title, curves in panels.items()}
    sentences = [curves_sentence(title, curves) for title, curves in panels.items()]
    return Figure(figure, " ".join([one_by_one("The best hit rate of any order", bounds), *sentences]), stacks=True)


def curves_sentence(title: str, curves: HitCurves) -> str:
    """Say the rates in the smallest pool, and from which size on an order reaches the bound."""
    parts = []
    for name, rates in curves.rates.items():
        there = [size for size, rate in zip(curves.pages, rates, strict=True) if rate > curves.bound - 5e-4]
        end = f"the bound from {there[0]} on" if there else f"{rates[-1]:.1%} with {curves.pages[-1]}"
        parts.append(f"{name} {rates[0]:.1%} with {curves.pages[0]} pages, {end}")
    return f"{title}: bound {curves.bound:.1%}; {'; '.join(parts)}."


@style()
def first_token_chart(served: Sequence[Served]) -> Figure:
    """Draw the time to the first token of every request of each run, and how much of the prompts was computed."""
    figure = canvas(0.62 * len(served) + 1.7)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    sentences = []
    for line, own in enumerate(served):
        times = [1e3 * seconds for seconds in own.ttft_s]
        middle = median(times)
        draw_times(left, line, times)
        found = own.num_prompt - own.num_computed
        rows: dict[CellKind, tuple[int, int]] = {"first": (0, own.num_computed), "found": (own.num_computed, found)}
        for kind, (start, width) in rows.items():
            color, hatch, _ = CELLS[kind]
            right.barh(line, width, 0.6, left=start, color=color, hatch=hatch, edgecolor="white", gid=kind)
        right.text(own.num_computed, line - 0.33, f"{own.num_computed}", ha="center", va="bottom", fontsize=10)
        sentences.append(
            f"{own.run.name}: {plural(len(times), 'request')}, the first token after {middle:.0f} ms (median), "
            f"{min(times):.0f} to {max(times):.0f} ms; {own.num_computed} of {own.num_prompt} prompt tokens computed."
        )
    left.set_yticks(range(len(served)), [own.run.name for own in served])
    left.set(ylim=(len(served) - 0.45, -0.65), xlim=(0, None), xlabel="time to the first token (ms)")
    left.set_title("Every request, and the median")
    right.set(xlabel="prompt tokens", xlim=(0, 1.08 * max(own.num_prompt for own in served)))
    right.set_title("What had to be computed")
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
    legend_below(
        figure,
        Line2D([], [], linestyle="", marker="o", color=COLORS[0], label="a request"),
        Line2D([], [], color="black", linewidth=2.4, label="median"),
        swatch("computed", *CELLS["first"][:2]),
        swatch("found in the cache", *CELLS["found"][:2]),
        ncols=4,
    )
    medians = {own.run.name: f"{1e3 * median(own.ttft_s):.0f} ms" for own in served}
    first = one_by_one("Median time to the first token, measured here", medians)
    return Figure(figure, " ".join([first, *sentences]))


def draw_times(axes: Axes, line: int, times: Sequence[float]) -> None:
    """Draw one line of dots, spread a little so that equal ones can be seen, and their median. In milliseconds."""
    middle = median(times)
    spread = 0.3 * (np.arange(len(times)) / max(len(times) - 1, 1) - 0.5)
    dots(axes, times, line + 0.08 + spread, MARKERS[0], 6, COLORS[0], alpha=0.8, gid="request")
    axes.plot([middle] * 2, [line - 0.2, line + 0.36], color="black", linewidth=2.4, gid="median")
    axes.text(middle, line - 0.23, f"{middle:.0f} ms", ha="center", va="bottom", fontsize=10)


@style()
def memory_chart(served: Sequence[Served]) -> Figure:
    """Draw for each run the pages of running requests, what they would need alone, and what the cache keeps."""
    figure = canvas(2.2 * len(served) + 1.0)
    panels = stacked(figure, len(served), sharex=True, sharey=True)
    kept_look: Look = {"facecolor": FAINT, "hatch": "...", "edgecolor": "#8a8a8a"}
    for axes, own in zip(panels, served, strict=True):
        edges = np.arange(len(own.in_use) + 1)
        both = np.add(own.in_use, own.kept)
        axes.stairs(both, edges, baseline=own.in_use, fill=True, linewidth=0, gid="kept", **kept_look)
        axes.stairs(own.in_use, edges, fill=True, facecolor=SOFT, linewidth=0, gid="in use")
        axes.stairs(own.named, edges, baseline=None, color="black", linewidth=1.6, gid="named")
        axes.axhline(own.run.num_pages, color="black", linestyle="--", linewidth=1.4, gid="pool")
        running = [step.num_running for step in own.run.log]
        at_once = f"{plural(len(running), 'step')}, at most {plural(max(running), 'request')} at once"
        axes.set(ylabel="pages", title=f"{own.run.name}: {at_once}")
        axes.grid(axis="y")
    panels[-1].set(xlabel="step", xlim=(0, max(len(own.in_use) for own in served)), ylim=(0, None))
    panels[-1].xaxis.set_major_locator(MaxNLocator(12, integer=True))
    legend_below(
        figure,
        Patch(facecolor=SOFT, label="pages of running requests"),
        Patch(**kept_look, label="kept by the cache, could be evicted"),
        Line2D([], [], color="black", linewidth=1.6, label="what they would be without sharing"),
        Line2D([], [], color="black", linestyle="--", label="the pool"),
        ncols=2,
    )
    most = {own.run.name: max(own.in_use) for own in served}
    return Figure(figure, " ".join([one_by_one("Most pages in use", most), *map(memory_sentence, served)]))


def memory_sentence(served: Served) -> str:
    """Say how many pages the requests had at most, and what they would have needed."""
    running = [step.num_running for step in served.run.log]
    return (
        f"{served.run.name}: {plural(len(running), 'step')}, at most {plural(max(running), 'request')} at once; they "
        f"have {plural(max(served.in_use), 'page')} at most, and without sharing would need {max(served.named)}; the "
        f"pool has {served.run.num_pages}."
    )
