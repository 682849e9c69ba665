"""Pictures of what limits each operation, and of how a decode step fills a GPU."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator

from mini_engine.viz.figure import (
    COLORS,
    FAINT,
    GRAY,
    LINES,
    MARKERS,
    Figure,
    Look,
    add_box,
    canvas,
    dot_key,
    dots,
    legend_below,
    one_by_one,
    plural,
    stacked,
    style,
    text_ground,
    write,
)
from mini_engine.viz.kernels.work import H200, PROCESSORS, DecodeLaunch, Operation, Roof

NOTHING = 0.22  # operations per byte: where 0 is drawn on a log scale
EDGE, WIDEST = 0.3, 4000.0  # operations per byte: the ends of that scale
GOAL = 75  # percent of the bandwidth that decode attention should reach
POWERS = "number of splits of each sequence"


@style()
def roofline(steps: Mapping[str, Sequence[Operation]], roofs: Sequence[Roof] = (H200,)) -> Figure:
    """Draw what limits each operation of some steps: its intensity, under the roof of each device.

    ``steps``: title -> the operations of a step, the same ones in each. The operations stand on the first of ``roofs``,
    whose least times are written to the right, in microseconds.
    """
    names = [operation.name for operation in next(iter(steps.values()))]
    figure = canvas(0.32 * len(names) + 4.7)
    layout: Look = {"height_ratios": (3.2, 0.32 * len(names)), "width_ratios": (7, 1.1 * len(steps))}
    (top, blank), (bottom, times) = figure.subplots(2, 2, sharex="col", sharey="row", **layout)
    draw_roofs(top, roofs)
    middle = (len(steps) - 1) / 2
    for index, (title, operations) in enumerate(steps.items()):
        spots = [max(operation.intensity, NOTHING) for operation in operations]
        look: Look = {"marker": MARKERS[index], "size": 7, "color": COLORS[index], "gid": title}
        rising = [spot for spot in spots if spot > NOTHING]
        heights = [roofs[0].attainable(spot) / 1e12 for spot in rising]
        dots(top, rising, heights, markerfacecolor="none", **look)
        dots(bottom, spots, np.arange(len(names)) + 0.24 * (index - middle), label=title, **look)
        times.text(index + 0.9, -0.8, title.replace(", ", "\n"), ha="right", va="bottom", fontsize=10)
        for line, operation in enumerate(operations):
            least = f"{1e6 * operation.least_seconds(roofs[0]):,.1f}"
            times.text(index + 0.9, line, least, ha="right", va="center", fontsize=10, gid=title)
    bottom.set_yticks(range(len(names)), names)
    bottom.set(ylim=(len(names) - 0.5, -0.5), xlim=(NOTHING / 1.25, WIDEST))
    bottom.set_xlabel("floating-point operations per byte read or written")
    bottom.set_xticks([NOTHING, *10.0 ** np.arange(4)], ["0", "1", "10", "100", "1000"])
    bottom.xaxis.set_minor_formatter(NullFormatter())
    bottom.set_title("Every operation (0 per byte: it only copies)")
    for axes in (blank, times):
        axes.set_axis_off()
    times.set(xlim=(0, len(steps)))
    times.set_title("Least time in µs", pad=38)
    for axes in (top, bottom):
        axes.axvline(EDGE, color=FAINT, linewidth=1)
        axes.axvline(roofs[0].ridge, color=GRAY, linestyle=":", linewidth=1.2)
        axes.grid(axis="y")
    legend_below(figure, *bottom.get_legend_handles_labels()[0], ncols=len(steps))
    times_of = {
        title: f"{1e3 * sum(operation.least_seconds(roofs[0]) for operation in own):.2f} ms"
        for title, own in steps.items()
    }
    first = one_by_one(f"Least time on {roofs[0].name}", times_of)
    return Figure(figure, " ".join([first, *(step_sentence(title, own, roofs[0]) for title, own in steps.items())]))


def draw_roofs(axes: Axes, roofs: Sequence[Roof]) -> None:
    """Draw one roof per device, its name along the flat part."""
    for index, roof in enumerate(roofs):
        ends = (EDGE, roof.ridge, WIDEST)
        line: Look = {"color": GRAY if index else "black", "linestyle": LINES[index], "linewidth": 1.6, "gid": "roof"}
        axes.plot(ends, [roof.attainable(x) / 1e12 for x in ends], label=roof.name, **line)
        words = f"{roof.name}\n{rate(roof.bytes_per_s, 'B/s')}, {rate(roof.flops_per_s, 'FLOP/s')}"
        corner: Look = {"ha": "right", "va": "top", "fontsize": 10, "bbox": text_ground(1.5)}
        axes.annotate(words, (WIDEST, roof.flops_per_s / 1e12), (0, -9), textcoords="offset points", **corner)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelbottom=False)
    axes.set(ylabel="most TFLOP/s", ylim=(None, 3 * max(roof.flops_per_s for roof in roofs) / 1e12))
    axes.set_title(f"Left of the dotted line ({roofs[0].ridge:.0f} per byte) memory limits, right of it arithmetic")


def rate(value: float, unit: str) -> str:
    """Write a rate with the prefix that it needs: 4.8e12 becomes "4.8 TB/s"."""
    prefix, factor = next((p, f) for p, f in (("T", 1e12), ("G", 1e9), ("M", 1e6)) if value >= f or p == "M")
    return f"{value / factor:.3g} {prefix}{unit}"


def step_sentence(title: str, operations: Sequence[Operation], roof: Roof) -> str:
    """Say how many operations are limited by memory, and which takes longest."""
    slow = max(operations, key=lambda operation: operation.least_seconds(roof))
    total = sum(operation.least_seconds(roof) for operation in operations)
    memory = sum(operation.intensity < roof.ridge for operation in operations)
    return (
        f"{title}: {memory} of {plural(len(operations), 'operation')} are limited by memory; at least "
        f"{1e3 * total:.2f} ms on {roof.name}, {slow.least_seconds(roof) / total:.0%} of it {slow.name} with "
        f"{slow.intensity:.3g} operations per byte."
    )


@style()
def split_scaling(
    curves: Mapping[tuple[int, int], Sequence[DecodeLaunch]],
    chosen: Mapping[tuple[int, int], DecodeLaunch],
    measured: Mapping[tuple[int, int], float] | None = None,
) -> Figure:
    """Draw the share of the bandwidth that decode attention can reach, by the number of splits: a panel per context.

    ``curves``: (batch, context) -> launches with a rising number of splits. ``chosen``: the launch of the engine.
    ``measured``: its share on a GPU, read by ``work.measured_shares``.
    """
    contexts = list(dict.fromkeys(context for _, context in curves))
    batches = list(dict.fromkeys(batch for batch, _ in curves))
    figure = canvas(4.4)
    grid = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
    for axes, context in zip(grid, contexts, strict=True):
        for index, batch in enumerate(batches):
            key = batch, context
            draw_splits(axes, index, curves[key], chosen[key], (measured or {}).get(key))
        axes.axhline(GOAL, color=GRAY, linestyle=":", linewidth=1.2)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(xlabel=POWERS, title=f"{context:,} keys")
        axes.grid()
    grid[0].set(ylabel="share of the bandwidth (%)", ylim=(0, 104))
    grid[0].annotate(f"goal: {GOAL} %", (1, GOAL), (2, 3), textcoords="offset points", fontsize=10)
    look: Look = {"markerfacecolor": "white", "markersize": 8, "markeredgewidth": 2}
    handles = [
        Line2D([], [], color=color, marker=marker, label=plural(batch, "sequence"), **look | {"linestyle": line})
        for batch, color, marker, line in zip(batches, COLORS, MARKERS, LINES, strict=False)
    ]
    handles.append(Line2D([], [], color=GRAY, linestyle="", marker="o", label="the engine's choice", **look))
    if measured:
        handles.append(dot_key("o", 9, GRAY, "measured"))
    legend_below(figure, *handles, ncols=3 if measured else 5)
    sentences = [split_sentence(curves[key], chosen[key], (measured or {}).get(key)) for key in curves]
    shares = [own.bandwidth_share for own in chosen.values()]
    first = f"The engine's number of splits can reach {min(shares):.0%} to {max(shares):.0%} of the bandwidth."
    return Figure(figure, " ".join([first, *sentences]), stacks=True)


def draw_splits(
    axes: Axes, index: int, launches: Sequence[DecodeLaunch], chosen: DecodeLaunch, measured: float | None
) -> None:
    """Draw the curve of one batch, with a ring at the choice of the engine and a dot at its measured share."""
    color, marker = COLORS[index], MARKERS[index]
    x = [own.num_splits for own in launches]
    y = [100 * own.bandwidth_share for own in launches]
    axes.plot(x, y, linestyle=LINES[index], color=color, gid=f"{launches[0].batch}")
    ring: Look = {"markerfacecolor": "none", "markeredgewidth": 2, "gid": "chosen"}
    dots(axes, chosen.num_splits, 100 * chosen.bandwidth_share, marker, 13 - 2 * index, color, **ring)
    if measured is not None:
        dots(axes, chosen.num_splits, 100 * measured, marker, 9, color, gid="measured")


def split_sentence(launches: Sequence[DecodeLaunch], chosen: DecodeLaunch, measured: float | None) -> str:
    """Say what one sequence per program reaches, and what the engine's splits reach."""
    whole = launches[0]
    found = "" if measured is None else f", measured {measured:.0%}"
    return (
        f"{plural(whole.batch, 'sequence')} of {whole.context} keys: {plural(whole.num_programs, 'program')} without "
        f"splits, at most {whole.bandwidth_share:.0%} of the bandwidth; {chosen.num_splits} splits of "
        f"{chosen.split_size}: {plural(chosen.num_programs, 'program')}, at most {chosen.bandwidth_share:.0%}{found}."
    )


@style()
def program_table(panels: Mapping[str, Sequence[DecodeLaunch]]) -> Figure:
    """Draw tables of programs, the bytes that each reads, and waves: a line per batch, a column per context.

    ``panels``: title -> launches. The larger the share of the bandwidth, the darker a cell.
    """
    some = next(iter(panels.values()))
    batches, contexts = (list(dict.fromkeys(getattr(own, part) for own in some)) for part in ("batch", "context"))
    figure = canvas(0.6 * len(batches) * len(panels) + 0.62 * len(panels) + 0.65)
    figure.supxlabel("programs × bytes that each reads, waves, share of the bandwidth", fontsize=11)
    grid = stacked(figure, len(panels), sharex=True)
    for axes, (title, launches) in zip(grid, panels.items(), strict=True):
        for own in launches:
            draw_cell(axes, contexts.index(own.context), batches.index(own.batch), own)
        axes.set(xlim=(0, len(contexts)), ylim=(len(batches), 0), title=title)
        axes.set_xticks(np.arange(len(contexts)) + 0.5, [f"{context:,} keys" for context in contexts])
        axes.set_yticks(np.arange(len(batches)) + 0.5, [plural(batch, "sequence") for batch in batches])
        axes.tick_params(length=0, labelbottom=True)
        axes.spines[:].set_visible(False)
    least = {title: f"{min(own.bandwidth_share for own in launches):.0%}" for title, launches in panels.items()}
    first = one_by_one("Least share of the bandwidth", least)
    return Figure(figure, " ".join([first, *(table_sentence(title, own) for title, own in panels.items())]))


def draw_cell(axes: Axes, column: int, line: int, own: DecodeLaunch) -> None:
    """Write one launch on a ground that is darker the larger its share of the bandwidth."""
    share = own.bandwidth_share
    add_box(axes, column + 0.02, line + 0.05, 0.96, 0.9, linewidth=0, facecolor=COLORS[0], alpha=0.06 + 0.34 * share)
    programs = f"{own.num_programs:,} × {size(own.bytes_per_program)}"
    write(axes, column + 0.5, line + 0.5, f"{programs}\n{plural(own.num_waves, 'wave')}, {share:.0%}")


def size(num_bytes: int) -> str:
    """Write a number of bytes: 65536 becomes "64 KiB"."""
    return f"{num_bytes / 2**20:.3g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:g} KiB"


def table_sentence(title: str, launches: Sequence[DecodeLaunch]) -> str:
    """Say the extremes of one panel."""
    least, most = (choose(launches, key=lambda own: own.bandwidth_share) for choose in (min, max))
    idle = sum(own.num_programs < PROCESSORS for own in launches)
    return (
        f"{title}: in {idle} of {len(launches)} cases fewer programs than {PROCESSORS} processors; from "
        f"{least.bandwidth_share:.0%} of the bandwidth ({plural(least.batch, 'sequence')} of {least.context} keys, "
        f"{plural(least.num_programs, 'program')}) to {most.bandwidth_share:.0%}."
    )
