"""L6 in pictures: a tree that grows and is cut, what orders reach of the bound, times and pages with and without.

Owns: drawings. Must not know: trees, engines, how anything was measured (``caching``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from mini_engine.viz.caching import Box, Cell, CellKind, Frame, Served, boxes
from mini_engine.viz.figure import COLORS, FAINT, GRAY, LINES, MARKERS, Figure, canvas, plural, style
from mini_engine.viz.scheduling import LOOKS
from mini_engine.viz.tokens import visible

FRAMES_PER_LINE = 3
GAP = 0.12  # between a box and the next, in pages
BOX_HEIGHT = 0.74
ROW_HEIGHT, TITLE_HEIGHT = 0.44, 0.72  # inches: a line of boxes, and the two lines above a picture
FILLS = {"kept": "#dbe9fb", "new": "#86b6f0", "evicted": "white"}
CELLS: dict[CellKind, tuple[str, str, str]] = {
    "found": ("#e4e4e4", "", "found in the cache"),
    "first": (LOOKS["prompt"][0], "///", "computed for the first time"),
    "again": (LOOKS["again"][0], "xxx", "computed again"),
}


@style()
def tree_film(frames: Sequence[Frame], since: int = 0) -> Figure:
    """Draw the tree after each event. A box is a node, as wide as it has pages: their text, and their numbers.

    ``since``: leave out that many frames at the beginning.
    """
    drawn = boxes(frames)[since:]
    told = list(zip(range(since + 1, len(frames) + 1), frames[since:], drawn, strict=True))
    tallest = [max((box.row for own in drawn[i : i + FRAMES_PER_LINE] for box in own), default=0) + 1
               for i in range(0, len(drawn), FRAMES_PER_LINE)]  # fmt: skip
    figure = canvas(sum(ROW_HEIGHT * rows + TITLE_HEIGHT for rows in tallest) + 0.5)
    grid = figure.subplots(len(tallest), FRAMES_PER_LINE, squeeze=False, sharex=True, height_ratios=tallest)
    widest = max((box.start + len(box.pages) for own in drawn for box in own), default=1)
    for index, axes in enumerate(grid.flat):
        axes.set_axis_off()
        axes.set(xlim=(-GAP, widest + GAP), ylim=(tallest[index // FRAMES_PER_LINE] - 0.5, -0.5))
        if index < len(told):
            number, frame, own = told[index]
            draw_tree(axes, own)
            axes.set_title(f"{number}. {frame.caption}\n{counts(own)}", fontsize=10)
    every = [box for own in drawn for box in own]
    states = {box.state for box in every} | ({"locked"} if any(box.locks for box in every) else set())
    figure.legend(handles=[patch for state, patch in film_legend().items() if state in states],
                  loc="outside lower center", ncols=4)  # fmt: skip
    return Figure(figure, " ".join(film_sentence(number, frame, own) for number, frame, own in told))


def film_legend() -> dict[str, Patch]:
    """Return what the looks of a box mean."""
    return {
        "new": Patch(facecolor=FILLS["new"], edgecolor=GRAY, label="new"),
        "kept": Patch(facecolor=FILLS["kept"], edgecolor=GRAY, label="was there"),
        "locked": Patch(facecolor="white", edgecolor="black", linewidth=2.6, label="locked"),
        "evicted": Patch(facecolor="white", edgecolor=GRAY, linestyle="--", label="evicted (struck through)"),
    }


def counts(drawn: Sequence[Box]) -> str:
    """Say how many pages the tree holds and how many are locked."""
    held = sum(len(box.pages) for box in drawn if box.state != "evicted")
    locked = sum(len(box.pages) for box in drawn if box.locks)
    return f"{plural(held, 'page')} held, {locked} locked"


def film_sentence(number: int, frame: Frame, drawn: Sequence[Box]) -> str:
    """Say what an event changed."""
    changes = [
        f"{state} {', '.join(repr(''.join(box.texts)) for box in own)}"
        for state in ("new", "evicted") if (own := [box for box in drawn if box.state == state])
    ]  # fmt: skip
    nodes = plural(sum(box.state != "evicted" for box in drawn), "node")
    return f"{number}. {frame.caption}: {nodes}, {counts(drawn)}{''.join(f'; {change}' for change in changes)}."


def draw_tree(axes: Axes, drawn: Sequence[Box]) -> None:
    """Draw boxes, and lines from each to what it hangs from; roots are a bar at the left edge."""
    tops = [box.row for box in drawn if box.parent_row is None]
    if tops:
        axes.plot([0, 0], [min(tops) - 0.3, max(tops) + 0.3], color="black", linewidth=2.6, gid="root")
    for box in drawn:
        above = box.row if box.parent_row is None else box.parent_row
        look = "--" if box.state == "evicted" else "-"
        axes.plot([box.start, box.start, box.start + GAP / 2], [above, box.row, box.row], color=GRAY, linewidth=1.2,
                  linestyle=look, zorder=0, gid="branch")  # fmt: skip
        if above == box.row and box.start:
            axes.plot([box.start - GAP / 2, box.start], [above, above], color=GRAY, linewidth=1.2, zorder=0)
        draw_box(axes, box)


def draw_box(axes: Axes, box: Box) -> None:
    """Draw one node: its pages side by side, each with its text and, below it, its number."""
    left, right = box.start + GAP / 2, box.start + len(box.pages) - GAP / 2
    gone, low, high = box.state == "evicted", box.row - BOX_HEIGHT / 2, box.row + BOX_HEIGHT / 2
    axes.add_patch(Rectangle(
        (left, low), right - left, BOX_HEIGHT, facecolor=FILLS[box.state], edgecolor="black" if box.locks else GRAY,
        linewidth=2.6 if box.locks else 1.0, linestyle="--" if gone else "-", gid=box.state,
    ))  # fmt: skip
    if gone:
        axes.plot([left, right], [low, high], color="#8a8a8a", linewidth=1.2, gid="struck")
        axes.plot([left, right], [high, low], color="#8a8a8a", linewidth=1.2, gid="struck")
    for index, (page, text) in enumerate(zip(box.pages, box.texts, strict=True)):
        middle = box.start + index + 0.5
        if index:
            axes.plot([middle - 0.5] * 2, [low, high], color=GRAY, linewidth=0.7, linestyle=":", gid="page")
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.6} if gone else None
        for shift, word, family in ((-0.17, visible(text), "DejaVu Sans Mono"), (0.19, f"{page}", None)):
            axes.text(middle, box.row + shift, word, ha="center", va="center", fontsize=10, gid="text", family=family,
                      color=GRAY if gone or family is None else "black", bbox=ground)  # fmt: skip


@style()
def page_map(names: Sequence[str], runs: Sequence[Sequence[Cell]]) -> Figure:
    """Draw one panel per run: a column per request in the order of admission, a line per page of the tree."""
    lines, visits = (max(getattr(cell, part) for cells in runs for cell in cells) + 1 for part in ("line", "visit"))
    figure = canvas(min(0.1 * lines, 6.0) + 1.5)
    panels = figure.subplots(1, len(runs), sharex=True, sharey=True, squeeze=False)[0]
    for axes, name, cells in zip(panels, names, runs, strict=True):
        for cell in cells:
            color, hatch, _ = CELLS[cell.kind]
            axes.add_patch(Rectangle((cell.visit + 0.5, cell.line), 1, 1, facecolor=color, hatch=hatch,
                                     edgecolor="white", linewidth=0.5, gid=cell.kind))  # fmt: skip
        axes.set(xlim=(0.5, visits + 0.5), ylim=(lines, 0), xlabel="request, in the order of admission")
        axes.set_title(f"{name}: {kind_count(cells, 'first')} pages computed, {kind_count(cells, 'again')} again")
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        axes.grid(axis="y")
    panels[0].set_ylabel("page of the tree")
    figure.legend(handles=[Patch(facecolor=color, hatch=hatch, edgecolor="white", label=words)
                           for color, hatch, words in CELLS.values()], loc="outside lower center", ncols=3)  # fmt: skip
    return Figure(figure, " ".join(
        f"{name}: {visits} requests; of their pages {kind_count(cells, 'first')} are computed for the first time, "
        f"{kind_count(cells, 'again')} again, {kind_count(cells, 'found')} are found."
        for name, cells in zip(names, runs, strict=True)
    ))  # fmt: skip


def kind_count(cells: Sequence[Cell], kind: CellKind) -> int:
    """Return how many pages were of a kind."""
    return sum(cell.kind == kind for cell in cells)


@dataclass(frozen=True)
class HitCurves:
    """Hit rates, from 0 to 1, over pools of ``pages``; ``bound``: no order has more; ``tree``: all pages to keep."""

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
            axes.plot(curves.pages, [100 * rate for rate in rates], color=COLORS[index], linestyle=LINES[index],
                      marker=MARKERS[index], markersize=11 - 2.3 * index, markerfacecolor="none",
                      markeredgewidth=1.6, label=name)  # fmt: skip
        axes.set(xlabel="pages in the pool", ylim=(0, 106 * max(own.bound for own in panels.values())))
        axes.set_title(title, fontsize=11)
        axes.grid()
    grid[0].set_ylabel("hit rate (%)")
    handles, labels = grid[0].get_legend_handles_labels()
    handles.append(Line2D([], [], color="black", linestyle="--", linewidth=1.4))
    labels.append("the bound")
    if any(curves.tree <= max(curves.pages) for curves in panels.values()):
        handles.append(Line2D([], [], color=GRAY, linestyle=":", linewidth=1.6))
        labels.append("room for the whole tree")
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return Figure(figure, " ".join(curves_sentence(title, curves) for title, curves in panels.items()))


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
    """Draw the time to the first token of every request of each run, and the rows of prompts that the runs computed."""
    figure = canvas(0.62 * len(served) + 1.7)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    sentences = []
    for line, own in enumerate(served):
        times = [1e3 * seconds for seconds in own.ttft_s]
        middle, spread = median(times), 0.3 * (np.arange(len(times)) / max(len(times) - 1, 1) - 0.5)
        left.plot(times, line + 0.08 + spread, linestyle="", marker=MARKERS[0], color=COLORS[0], markersize=6,
                  alpha=0.8, gid="request")  # fmt: skip
        left.plot([middle] * 2, [line - 0.2, line + 0.36], color="black", linewidth=2.4, gid="median")
        left.text(middle, line - 0.23, f"{middle:.0f} ms", ha="center", va="bottom", fontsize=10)
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
    right.set(xlabel="prompt tokens", xlim=(0, 1.08 * max(own.num_prompt for own in served)))
    left.set_title("Every request, and the median")
    right.set_title("What had to be computed")
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
    figure.legend(handles=[
        Line2D([], [], linestyle="", marker="o", color=COLORS[0], label="a request"),
        Line2D([], [], color="black", linewidth=2.4, label="median"),
        Patch(facecolor=CELLS["first"][0], hatch=CELLS["first"][1], edgecolor="white", label="computed"),
        Patch(facecolor=CELLS["found"][0], hatch=CELLS["found"][1], edgecolor="white", label="found in the cache"),
    ], loc="outside lower center", ncols=4)  # fmt: skip
    return Figure(figure, " ".join(sentences))


@style()
def memory_chart(served: Sequence[Served]) -> Figure:
    """Draw for each run the pages of running requests, what they would need alone, and what the cache keeps."""
    figure = canvas(2.2 * len(served) + 1.0)
    panels = figure.subplots(len(served), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, own in zip(panels, served, strict=True):
        edges = np.arange(len(own.in_use) + 1)
        axes.stairs(np.add(own.in_use, own.kept), edges, baseline=own.in_use, fill=True, facecolor=FAINT, hatch="...",
                    edgecolor="#8a8a8a", linewidth=0, gid="kept")  # fmt: skip
        axes.stairs(own.in_use, edges, fill=True, facecolor=FILLS["new"], linewidth=0, gid="in use")
        axes.stairs(own.named, edges, baseline=None, color="black", linewidth=1.6, gid="named")
        axes.axhline(own.run.num_pages, color="black", linestyle="--", linewidth=1.4, gid="pool")
        running = [step.num_running for step in own.run.log]
        at_once = f"{plural(len(running), 'step')}, at most {plural(max(running), 'request')} at once"
        axes.set(ylabel="pages", title=f"{own.run.name}: {at_once}")
        axes.grid(axis="y")
    panels[-1].set(xlabel="step", xlim=(0, max(len(own.in_use) for own in served)), ylim=(0, None))
    panels[-1].xaxis.set_major_locator(MaxNLocator(12, integer=True))
    figure.legend(handles=[
        Patch(facecolor=FILLS["new"], label="pages of running requests"),
        Patch(facecolor=FAINT, hatch="...", edgecolor="#8a8a8a", label="kept by the cache, could be evicted"),
        Line2D([], [], color="black", linewidth=1.6, label="what they would be without sharing"),
        Line2D([], [], color="black", linestyle="--", label="the pool"),
    ], loc="outside lower center", ncols=2)  # fmt: skip
    return Figure(figure, " ".join(memory_sentence(own) for own in served))


def memory_sentence(served: Served) -> str:
    """Say how many pages the requests had at most, and what they would have needed."""
    running = [step.num_running for step in served.run.log]
    return (
        f"{served.run.name}: {plural(len(running), 'step')}, at most {plural(max(running), 'request')} at once; they "
        f"have {plural(max(served.in_use), 'page')} at most, and without sharing would need {max(served.named)}; the "
        f"pool has {served.run.num_pages}."
    )
