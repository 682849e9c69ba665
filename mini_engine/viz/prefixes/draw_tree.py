"""Pictures of the tree of a prefix cache, one for each event."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from mini_engine.viz.figure import (
    GRAY,
    MONO,
    SOFT,
    Figure,
    Look,
    add_box,
    canvas,
    legend_below,
    plural,
    style,
    write,
)
from mini_engine.viz.prefixes.tree import Box, Frame, boxes
from mini_engine.viz.tokens import visible

GAP = 0.12  # between a box and the next, in pages
PADDING = 2  # characters that a page is wider than its text
BOX_HEIGHT = 0.74
ROW_HEIGHT = 0.44  # inches of a line of boxes
TITLE_HEIGHT = 0.72  # inches of the two lines above a picture
FILLS = {"kept": "#dbe9fb", "new": SOFT, "evicted": "white"}


@style()
def tree_film(frames: Sequence[Frame], since: int = 0, columns: int = 3) -> Figure:
    """Draw the tree after each event. A box is a node; it shows the text and the number of each of its pages.

    ``since``: how many frames to leave out at the beginning. ``columns``: how many trees stand side by side.
    """
    drawn = boxes(frames)[since:]
    shown = list(zip(range(since + 1, len(frames) + 1), frames[since:], drawn, strict=True))
    tallest = [
        max((box.row for own in drawn[i : i + columns] for box in own), default=0) + 1
        for i in range(0, len(drawn), columns)
    ]
    figure = canvas(sum(ROW_HEIGHT * rows + TITLE_HEIGHT for rows in tallest) + 0.7)
    grid = figure.subplots(len(tallest), columns, squeeze=False, sharex=True, height_ratios=tallest)
    edges = page_edges([box for own in drawn for box in own])
    for index, axes in enumerate(grid.flat):
        axes.set_axis_off()
        axes.set(xlim=(-GAP, edges[-1] + GAP), ylim=(tallest[index // columns] - 0.5, -0.5))
        if index < len(shown):
            number, frame, own = shown[index]
            draw_tree(axes, own, edges)
            axes.set_title(f"{number}. {frame.caption}\n{counts(own)}", fontsize=10)
    every = [box for own in drawn for box in own]
    states = {box.state for box in every} | ({"locked"} if any(box.locks for box in every) else set())
    handles = [patch for state, patch in film_legend().items() if state in states]
    if handles:
        legend_below(figure, *handles, ncols=4, title="a box is a node, the numbers are its pages")
    end = f"In the end the tree has {nodes(drawn[-1])}, {counts(drawn[-1])}."
    return Figure(figure, " ".join([end, *(film_sentence(number, frame, own) for number, frame, own in shown)]))


def page_edges(drawn: Sequence[Box]) -> list[float]:
    """Return where the first, second, ... page after the root begins and the last one ends, in pages.

    A place is as wide as the longest text in it; an average one has width 1.
    """
    widths = [1] * max((box.start + len(box.pages) for box in drawn), default=1)
    for box in drawn:
        for place, text in enumerate(box.texts, box.start):
            widths[place] = max(widths[place], len(visible(text)) + PADDING)
    return [0.0, *(len(widths) * end / sum(widths) for end in accumulate(widths))]


def film_legend() -> dict[str, Patch]:
    """Return what the looks of a box mean."""
    return {
        "new": Patch(facecolor=FILLS["new"], edgecolor=GRAY, label="new"),
        "kept": Patch(facecolor=FILLS["kept"], edgecolor=GRAY, label="was there"),
        "locked": Patch(facecolor="white", edgecolor="black", linewidth=2.6, label="locked"),
        "evicted": Patch(facecolor="white", edgecolor=GRAY, linestyle="--", label="evicted"),
    }


def counts(drawn: Sequence[Box]) -> str:
    """Say how many pages the tree holds and, if any are locked, how many."""
    held = sum(len(box.pages) for box in drawn if box.state != "evicted")
    locked = sum(len(box.pages) for box in drawn if box.locks)
    return f"{plural(held, 'page')} held" + (f", {locked} locked" if locked else "")


def nodes(drawn: Sequence[Box]) -> str:
    """Say how many nodes the tree has."""
    return plural(sum(box.state != "evicted" for box in drawn), "node")


def film_sentence(number: int, frame: Frame, drawn: Sequence[Box]) -> str:
    """Say what an event changed."""
    changes = [
        f"{state} {', '.join(repr(''.join(box.texts)) for box in own)}"
        for state in ("new", "evicted")
        if (own := [box for box in drawn if box.state == state])
    ]
    return f"{number}. {frame.caption}: {nodes(drawn)}, {counts(drawn)}{''.join(f'; {change}' for change in changes)}."


def draw_tree(axes: Axes, drawn: Sequence[Box], edges: Sequence[float]) -> None:
    """Draw boxes, and a line from each to its parent. The roots are a bar at the left edge. ``edges``: of the pages."""
    tops = [box.row for box in drawn if box.parent_row is None]
    if tops:
        axes.plot([0, 0], [min(tops) - 0.3, max(tops) + 0.3], color="black", linewidth=2.6, gid="root")
    look: Look = {"color": GRAY, "linewidth": 1.2, "zorder": 0}
    for box in drawn:
        above = box.row if box.parent_row is None else box.parent_row
        left = edges[box.start]
        x = [left, left, left + GAP / 2]
        y = [above, box.row, box.row]
        axes.plot(x, y, linestyle="--" if box.state == "evicted" else "-", gid="branch", **look)
        if above == box.row and box.start:
            axes.plot([left - GAP / 2, left], [above, above], **look)
        draw_box(axes, box, edges[box.start : box.start + len(box.pages) + 1])


def draw_box(axes: Axes, box: Box, edges: Sequence[float]) -> None:
    """Draw one node: its pages side by side, each with its text and, below it, its number."""
    left = edges[0] + GAP / 2
    right = edges[-1] - GAP / 2
    low = box.row - BOX_HEIGHT / 2
    high = box.row + BOX_HEIGHT / 2
    gone = box.state == "evicted"
    edge = {"edgecolor": "black", "linewidth": 2.6} if box.locks else {"edgecolor": GRAY, "linewidth": 1.0}
    look = {"facecolor": FILLS[box.state], "linestyle": "--" if gone else "-"} | edge
    add_box(axes, left, low, right - left, BOX_HEIGHT, gid=box.state, **look)
    for place in edges[1:-1]:
        axes.plot([place] * 2, [low, high], color=GRAY, linewidth=0.7, linestyle=":", gid="page")
    for page, text, (start, end) in zip(box.pages, box.texts, pairwise(edges), strict=True):
        middle = (max(start, left) + min(end, right)) / 2
        write(axes, middle, box.row - 0.17, visible(text), family=MONO, color=GRAY if gone else "black", gid="text")
        write(axes, middle, box.row + 0.19, f"{page}", color=GRAY, gid="text")
