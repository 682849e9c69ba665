"""Pictures of rounded weights: levels, errors by the size of groups, distance by layer, bytes and speed, a roofline."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import NullFormatter, NullLocator
from torch import Tensor

from mini_engine.viz.figure import (
    COLORS,
    FAINT,
    GRAY,
    MARKERS,
    Figure,
    canvas,
    dots,
    legend_below,
    line_look,
    one_by_one,
    plural,
    stacked,
    style,
    text_ground,
)
from mini_engine.viz.kernels.work import Roof
from mini_engine.viz.quantized.measure import GroupError, Product


@style()
def level_chart(row: Tensor, ways: Mapping[str, tuple[Tensor, Sequence[Sequence[float]]]]) -> Figure:
    """Draw the numbers of a row [1, K] among the values that each way can store, and where they move.

    ``ways``: title -> the rounded values [K], and the levels of each group of columns, from left to right.
    """
    figure = canvas(2.9 * len(ways) + 0.5, width=6.4)
    panels = stacked(figure, len(ways), sharex=True, sharey=True)
    exact = row[0].tolist()
    errors = {}
    for axes, (title, (values, groups)) in zip(panels, ways.items(), strict=True):
        width = len(exact) / len(groups)
        for group, levels in enumerate(groups):
            axes.hlines(levels, group * width - 0.5, (group + 1) * width - 0.5, color=FAINT, linewidth=1, zorder=0)
            if group:
                axes.axvline(group * width - 0.5, color=GRAY, linestyle=":", linewidth=1.2)
        axes.vlines(range(len(exact)), exact, values.tolist(), color=COLORS[1], linewidth=1.6, zorder=1)
        dots(axes, range(len(exact)), exact, MARKERS[0], 4, COLORS[0], label="weight")
        dots(axes, range(len(exact)), values.tolist(), MARKERS[1], 3, COLORS[1], label="what its id stands for")
        axes.set(title=title, ylabel="value")
        errors[title] = f"{float((values - row[0]).square().mean().sqrt()):.4f}"
    panels[-1].set_xlabel("column of the row")
    legend_below(figure, *panels[0].get_legend_handles_labels()[0], ncols=2)
    first = one_by_one(f"Root mean square error of {plural(len(exact), 'weight')} in 4 bits", errors)
    return Figure(figure, first)


@style()
def error_chart(errors: Mapping[int, GroupError]) -> Figure:
    """Draw the error of 4 bits and the bytes of a weight, by the columns of a group."""
    figure = canvas(3.4)
    left, right = figure.subplots(1, 2)
    at, names = range(len(errors)), [str(size) for size in errors]
    shares = [100 * error.error for error in errors.values()]
    sizes = [error.num_bytes for error in errors.values()]
    for axes, numbers, label, index in ((left, shares, "error (% of the weights)", 0), (right, sizes, "bytes", 1)):
        axes.plot(at, numbers, **line_look(index))
        axes.set_xticks(at, names)
        axes.set(xlabel="columns of a group", ylabel=label, ylim=(0, 1.2 * max(numbers)))
        axes.grid(axis="y")
    left.set_title("Error of a weight")
    right.set_title("Bytes of a weight")
    words = {f"groups of {size}": f"{100 * error.error:.1f} %" for size, error in errors.items()}
    sentences = [f"In groups of {size} a weight has {error.num_bytes:.3f} bytes." for size, error in errors.items()]
    return Figure(figure, " ".join([one_by_one("Error of 4 bits", words), *sentences]), stacks=True)


@style()
def kl_chart(distances: Mapping[str, float]) -> Figure:
    """Draw how far distributions move, in nats, if each part of a model is rounded alone."""
    figure = canvas(0.42 * len(distances) + 1.0)
    axes = figure.subplots()
    own = list(distances.values())
    bars = axes.barh(range(len(own)), own, 0.7, color=[COLORS[0]] * (len(own) - 1) + [COLORS[1]])
    axes.bar_label(bars, [f"{value:.4f}" for value in own], padding=3)
    axes.set_yticks(range(len(own)), list(distances))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="KL divergence (nats)", xlim=(0, 1.15 * max(own)))
    return Figure(
        figure, one_by_one("KL divergence in nats", {part: f"{value:.4f}" for part, value in distances.items()})
    )


@style()
def speed_chart(steps: Mapping[str, Product], rates: Sequence[float]) -> Figure:
    """Draw the most tokens a second that memory of ``rates`` bytes a second allows, by the bytes that a step reads."""
    figure = canvas(3.8)
    axes = figure.subplots()
    ends = [step.num_bytes for step in steps.values()]
    at = np.linspace(0.6 * min(ends), 1.15 * max(ends), 80)
    for index, rate in enumerate(rates):
        look = {key: value for key, value in line_look(index).items() if key != "marker"}
        axes.plot(at / 1e6, rate / at, label=f"memory of {rate / 1e9:.0f} GB/s", **look)
    for index, (title, step) in enumerate(steps.items()):
        for rate in rates:
            label = title if rate == rates[0] else None
            dots(axes, [step.num_bytes / 1e6], [rate / step.num_bytes], MARKERS[index], 8, "black", label=label)
    axes.set(xlabel="MB of weights that a step reads", ylabel="most tokens a second", ylim=(0, None))
    axes.grid(axis="y")
    legend_below(figure, *axes.get_legend_handles_labels()[0], ncols=3)
    words = {title: f"{step.num_bytes / 1e6:,.0f} MB" for title, step in steps.items()}
    sentences = [
        f"{title}, {rate / 1e9:.0f} GB/s: at most {rate / step.num_bytes:.0f} tokens a second."
        for title, step in steps.items()
        for rate in rates
    ]
    return Figure(figure, " ".join([one_by_one("A step reads", words), *sentences]))


@style()
def roof_chart(steps: Mapping[str, Product], roof: Roof) -> Figure:
    """Draw what limits the products of each step: its operations for each byte, under the roof of a machine."""
    figure = canvas(3.9)
    axes = figure.subplots()
    spots = [step.intensity for step in steps.values()]
    ends = np.array([0.5 * min(spots), roof.ridge, 3 * max(*spots, roof.ridge)])
    axes.plot(ends, [roof.attainable(x) / 1e9 for x in ends], color="black", linewidth=1.6, label=roof.name)
    axes.axvline(roof.ridge, color=GRAY, linestyle=":", linewidth=1.2)
    for index, (title, step) in enumerate(steps.items()):
        reached = roof.attainable(step.intensity) / 1e9
        dots(axes, [step.intensity], [reached], MARKERS[index], 9, COLORS[index], label=title)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    heights = sorted({round(roof.attainable(spot) / 1e9) for spot in spots})
    axes.set_yticks(heights, [str(height) for height in heights])
    axes.set(xlabel="operations for each byte of weights", ylabel="most GFLOP/s")
    axes.text(0.02, 0.95, "memory limits", transform=axes.transAxes, va="top", bbox=text_ground(1.5))
    axes.text(0.98, 0.05, "arithmetic limits", transform=axes.transAxes, ha="right", bbox=text_ground(1.5))
    legend_below(figure, *axes.get_legend_handles_labels()[0], ncols=3)
    words = {title: f"{step.intensity:.3g}" for title, step in steps.items()}
    sentences = []
    for title, step in steps.items():
        side, least = ("memory" if step.intensity < roof.ridge else "arithmetic"), seconds(step, roof)
        sentences.append(f"{title}: {side} limits it, and it takes at least {1e3 * least:.1f} ms.")
    return Figure(figure, " ".join([one_by_one("Operations for each byte", words), *sentences]))


def seconds(step: Product, roof: Roof) -> float:
    """Return the least seconds of a step's products."""
    return 2 * step.rows * step.num_weights / roof.attainable(step.intensity)
