"""Pictures of a ragged batch: where its tokens lie, what they may see, and what padding would cost.

A sequence has a letter as its name; the token at position 5 of sequence "a" is "a5".
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor

from mini_engine.attention.dense import causal_mask
from mini_engine.attention.metadata import BatchInputs
from mini_engine.viz.difference import Difference
from mini_engine.viz.figure import (
    COLORS,
    FAINT,
    GRAY,
    HATCHES,
    Figure,
    add_box,
    bar_look,
    canvas,
    dot_key,
    hide_frame,
    legend_below,
    one_by_one,
    plural,
    style,
    text_ground,
    write,
)
from mini_engine.viz.paging.measure import BatchCost

PAGES_PER_LINE = 5
LEVEL_KEYS = 30  # the names of more keys stand upright


def letter(index: int) -> str:
    """Name sequence 0 "a", sequence 1 "b" and so on."""
    return chr(ord("a") + index)


def box(axes: Axes, left: float, bottom: float, text: str, color: str = "white", hatch: str = "") -> None:
    """Draw one slot as a unit box with a label that stays readable over the hatch."""
    add_box(axes, left, bottom, 1, 1, facecolor=color, alpha=0.6, hatch=hatch, edgecolor="white", linewidth=0)
    add_box(axes, left, bottom, 1, 1, fill=False, edgecolor=FAINT, linewidth=0.8)
    if text:
        write(axes, left + 0.5, bottom + 0.5, text, bbox=text_ground(0.8, 0.75))


def bare(axes: Axes, width: float, height: float) -> None:
    """Set the limits and hide ticks and frame."""
    axes.set(xlim=(-0.3, width + 0.3), ylim=(-0.3, height + 0.3), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


@style()
def page_map(pages: Mapping[str, Sequence[int]], lengths: Mapping[str, int], num_pages: int, page_size: int) -> Figure:
    """Draw the pool page by page, with the token in each slot.

    ``pages``: the pages of every named sequence, in order; ``lengths``: its tokens in the cache.
    """
    lines = -(-num_pages // PAGES_PER_LINE)
    figure = canvas(0.85 * lines + 0.9)
    axes = figure.subplots()
    owners = {page: (name, index) for name, own in pages.items() for index, page in enumerate(own)}
    for page in range(num_pages):
        left = (page % PAGES_PER_LINE) * (page_size + 0.6)
        bottom = (lines - 1 - page // PAGES_PER_LINE) * 1.9
        name, index = owners.get(page, ("", 0))
        axes.text(left, bottom + 1.12, f"page {page}" + ("" if name else " (free)"), fontsize=10)
        for offset in range(page_size):
            position = index * page_size + offset
            if name and position < lengths[name]:
                place = list(pages).index(name)
                box(axes, left + offset, bottom, f"{name}{position}", COLORS[place], HATCHES[place])
            else:
                box(axes, left + offset, bottom, "")
        edge = {"edgecolor": "black", "linestyle": "-"} if name else {"edgecolor": GRAY, "linestyle": ":"}
        add_box(axes, left, bottom, page_size, 1, fill=False, linewidth=1.4, **edge)
    bare(axes, PAGES_PER_LINE * (page_size + 0.6) - 0.6, lines * 1.9 - 0.4)
    axes.set_title(f"The KV pool: {num_pages} pages of {page_size} slots; empty boxes hold no token")
    return Figure(figure, page_summary(pages, lengths, num_pages, page_size))


def page_summary(pages: Mapping[str, Sequence[int]], lengths: Mapping[str, int], num_pages: int, page_size: int) -> str:
    """Say who owns which pages and how many slots are empty inside owned pages."""
    owned = sum(len(own) for own in pages.values())
    empty = owned * page_size - sum(lengths[name] for name in pages)
    parts = "; ".join(
        f"{name} has {lengths[name]} tokens in pages {', '.join(map(str, own))}" for name, own in pages.items()
    )
    return (
        f"{parts}. {plural(num_pages - owned, 'page')} of {num_pages} are free. {plural(empty, 'slot')} of the "
        f"{owned * page_size} in owned pages are empty, always in a sequence's last page, fewer than {page_size} each."
    )


@style()
def slot_map(batch: BatchInputs) -> Figure:
    """Draw the packed rows of a step above the pages they touch, with a line from each row to its slot."""
    size = batch.metadata.page_size
    slots = batch.metadata.slot_mapping.tolist()
    touched = sorted({slot // size for slot in slots})
    lefts = {page: order * (size + 0.6) for order, page in enumerate(touched)}
    width = max(len(slots), len(touched) * (size + 0.6) - 0.6)
    indent = (width - len(slots)) / 2
    figure = canvas(4.5)
    axes = figure.subplots()
    for page, left in lefts.items():
        for offset in range(size):
            box(axes, left + offset, 0, str(page * size + offset))
        axes.text(left + size / 2, -0.35, f"page {page}", ha="center", va="top", fontsize=10)
    for row, (slot, owner, position) in enumerate(zip(slots, row_owners(batch), batch.positions.tolist(), strict=True)):
        target = lefts[slot // size] + slot % size
        box(axes, indent + row, 4, f"{letter(owner)}{position}", COLORS[owner], HATCHES[owner])
        box(axes, target, 0, str(slot), COLORS[owner], HATCHES[owner])
        axes.plot([indent + row + 0.5, target + 0.5], [4, 1], color=COLORS[owner], linewidth=2)
        axes.text(indent + row + 0.5, 5.15, str(row), ha="center", fontsize=10, color=GRAY)
    bounds = batch.metadata.cu_seqlens_q.tolist()
    for bound in bounds:
        axes.plot([indent + bound] * 2, [3.7, 6.0], color="black", linewidth=1.6)
        axes.text(indent + bound, 6.1, str(bound), ha="center", fontsize=11, fontweight="bold")
    names = ("slot_mapping: the number in the box that a line leads to", "token", "packed row", "cu_seqlens_q")
    for height, text in zip((-1.5, 4.35, 5.15, 6.1), names, strict=True):
        axes.text(0, height, text, fontsize=11)
    bare(axes, width, 7)
    axes.set_ylim(-1.9, 7.0)
    axes.set_title("Every packed row and the slot that its key and value are written to")
    mapping = ", ".join(f"row {r} to slot {s}" for r, s in enumerate(slots))
    return Figure(
        figure,
        f"cu_seqlens_q is {bounds}: {plural(len(bounds) - 1, 'sequence')} in {plural(len(slots), 'packed row')}. "
        f"slot_mapping: {mapping}. A slot is page * {size} + offset in the page.",
    )


def row_owners(batch: BatchInputs) -> list[int]:
    """Return for each packed row the index of its sequence."""
    return [index for index, (start, end) in enumerate(batch.metadata.query_ranges) for _ in range(start, end)]


@style()
def packed_mask(batch: BatchInputs) -> Figure:
    """Draw which keys every packed row may see: one bottom-right aligned block per sequence, nothing between them."""
    meta = batch.metadata
    lengths = meta.seq_lens_kv.tolist()
    columns = [f"{letter(n)}{p}" for n, length in enumerate(lengths) for p in range(length)]
    named = zip(row_owners(batch), batch.positions.tolist(), strict=True)
    rows = [f"{row}: {letter(n)}{p}" for row, (n, p) in enumerate(named)]
    figure = canvas(0.27 * len(rows) + 1.9)
    axes = figure.subplots()
    left = visible = 0
    for index, ((start, end), length) in enumerate(zip(meta.query_ranges, lengths, strict=True)):
        mask = causal_mask(end - start, length)
        visible += int(mask.sum())
        mask_cells(axes, mask, left, start, index)
        add_box(axes, left, start, length, end - start, fill=False, edgecolor="black", linewidth=1.6)
        left += length
    axes.set(xlim=(0, left), ylim=(len(rows), 0), xlabel="key", ylabel="packed row: its query")
    axes.set_xticks(np.arange(left) + 0.5, columns, rotation=90 if left > LEVEL_KEYS else 0)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
    axes.set_title("Who sees whom in a packed step")
    legend_below(figure, *mask_legend(), ncols=3)
    inside = sum((end - start) * length for (start, end), length in zip(meta.query_ranges, lengths, strict=True))
    total = len(rows) * left
    return Figure(
        figure,
        f"{len(rows)} packed rows against {left} keys are {total} pairs, and {total - inside} of them join different "
        f"sequences and are never computed. Of the other {inside}, {visible} are seen and {inside - visible} are "
        "future. The last row of every sequence sees all of its keys.",
    )


def mask_cells(axes: Axes, mask: Tensor, left: int, top: int, index: int) -> None:
    """Draw one mask with its upper left corner at (left, top): a dot where True, a hatched box where False."""
    for i, row in enumerate(mask.tolist()):
        for j, sees in enumerate(row):
            fill, hatch = (to_rgba(COLORS[index], 0.6), "") if sees else ("#f2f2f2", "////")
            add_box(axes, left + j, top + i, 1, 1, facecolor=fill, hatch=hatch, edgecolor="#b0b0b0", linewidth=0.5)
            if sees:
                axes.plot(left + j + 0.5, top + i + 0.5, marker="o", markersize=4, color="black")


def mask_legend() -> list[Patch | Line2D]:
    """Return the three kinds of cell."""
    return [
        dot_key("o", 4, "black", "seen"),
        Patch(facecolor="#f2f2f2", edgecolor="#b0b0b0", hatch="////", label="in the future: masked"),
        Patch(facecolor="white", edgecolor="#b0b0b0", label="of another sequence: not computed"),
    ]


@style()
def mask_alignment(q_len: int, kv_len: int) -> Figure:
    """Draw the mask of a chunk, and next to it the wrong one that ``is_causal=True`` of torch gives (top-left)."""
    right = causal_mask(q_len, kv_len)
    wrong = torch.ones(q_len, kv_len, dtype=torch.bool).tril()
    figure = canvas(0.3 * q_len + 2.1)
    pair = figure.subplots(1, 2)
    first = kv_len - q_len
    titles = ("bottom-right: the engine", "top-left: is_causal=True of torch")
    for axes, mask, title in zip(pair, (right, wrong), titles, strict=True):
        mask_cells(axes, mask, 0, 0, 0)
        axes.set(xlim=(0, kv_len), ylim=(q_len, 0), title=title, xlabel="key position", ylabel="query position")
        axes.set_xticks(np.arange(kv_len) + 0.5, range(kv_len))
        axes.set_yticks(np.arange(q_len) + 0.5, range(first, kv_len))
        axes.set_aspect("equal")
    legend_below(figure, *mask_legend()[:2], ncols=2)
    return Figure(
        figure,
        f"Aligned bottom-right, the first of {q_len} new tokens (position {first}) "
        f"sees {int(right[0].sum())} keys and the last sees all {int(right[-1].sum())}. Aligned top-left, they see "
        f"{int(wrong[0].sum())} and {int(wrong[-1].sum())}: "
        + ("the same." if q_len == kv_len else f"{int((right & ~wrong).sum())} of {int(right.sum())} pairs are lost."),
        stacks=True,
    )


@style()
def padding_cost(costs: Sequence[BatchCost]) -> Figure:
    """Draw, for several batches, what packing costs as a share of what padding to the longest would cost."""
    measures = {
        "rows through the\nprojections": "rows",
        "query-key\nscores": "scores",
        "KV slots\nheld": "slots",
        "measured\ntime": "seconds",
    }
    figure = canvas(4.6)
    axes = figure.subplots()
    width = 0.8 / len(costs)
    at = np.arange(len(measures))
    for index, cost in enumerate(costs):
        shares = [100 * getattr(cost.packed, field) / getattr(cost.padded, field) for field in measures.values()]
        shift = (index - (len(costs) - 1) / 2) * width
        bars = axes.bar(at + shift, shares, width * 0.94, **bar_look(index), label=cost.name)
        axes.bar_label(bars, fmt="%.0f %%", padding=3, fontsize=10, bbox=text_ground(1))  # over the dashed line
    axes.axhline(100, color="black", linestyle="--", linewidth=1.2, label="padded to the longest")
    axes.margins(y=0.1)
    axes.set_xticks(at, list(measures))
    axes.set(ylabel="cost of packing (% of padding)")
    axes.set_title("What packing costs where padding costs 100 %")
    axes.grid(axis="y")
    legend_below(figure, ncols=len(costs) + 1)
    rows = {cost.name: f"{cost.packed.rows / cost.padded.rows:.0%}" for cost in costs}
    first = one_by_one("Rows that packing computes, of those that padding computes", rows)
    return Figure(figure, " ".join([first, *map(cost_sentence, costs)]))


def cost_sentence(cost: BatchCost) -> str:
    """Say the numbers behind one group of bars."""
    packed, padded = cost.packed, cost.padded
    return (
        f"{cost.name}: {packed.rows} rows instead of {padded.rows}, {packed.scores} scores instead of {padded.scores}, "
        f"{packed.slots} slots instead of {padded.slots}, {packed.seconds * 1e3:.1f} ms instead of "
        f"{padded.seconds * 1e3:.1f} ms (measured here)."
    )


@style()
def bits_table(table: Mapping[str, Sequence[Difference]]) -> Figure:
    """Draw in how many rows the logits of one request differ between two ways to run it.

    ``table``: for every engine configuration, a column, the same comparisons.
    """
    ways = [difference.name for difference in next(iter(table.values()))]
    figure = canvas(0.52 * len(ways) + 1.3)
    axes = figure.subplots()
    for column, differences in enumerate(table.values()):
        for row, difference in enumerate(differences):
            text = "same bits"
            if difference.rows_differing:
                look = {"facecolor": COLORS[1], "hatch": HATCHES[1], "edgecolor": "white", "alpha": 0.55}
                add_box(axes, column, row, 1, 1, linewidth=0, **look)
                text = f"{difference.rows_differing} of {difference.rows} differ"
            write(axes, column + 0.5, row + 0.5, text, fontsize=10.5, bbox=text_ground(1.5, 0.8))
    axes.set(xlim=(0, len(table)), ylim=(len(ways), 0))
    axes.set_xticks(np.arange(len(table)) + 0.5, list(table))
    axes.set_yticks(np.arange(len(ways)) + 0.5, ways)
    axes.xaxis.tick_top()
    hide_frame(axes)
    axes.set_title("One request, run in two ways: how many rows of its logits differ", pad=12)
    for line in range(len(ways) + 1):
        axes.axhline(line, color=FAINT, linewidth=1)
    sentences = [
        f"{' '.join(name.split())}: "
        + "; ".join(f"{' '.join(d.name.split())}, {d.rows_differing} of {d.rows} rows differ" for d in differences)
        + "."
        for name, differences in table.items()
    ]
    cells = [difference for differences in table.values() for difference in differences]
    same = sum(not difference.rows_differing for difference in cells)
    return Figure(figure, " ".join([f"Measured here: {same} of {len(cells)} runs keep all bits.", *sentences]))
