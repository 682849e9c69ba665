"""Pictures of a forward pass: sizes, attention weights, and where two runs begin to differ."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from torch import Tensor

from mini_engine.viz.difference import Difference
from mini_engine.viz.figure import (
    COLORS,
    FAINT,
    GRAY,
    HATCHES,
    MARKERS,
    Figure,
    Look,
    add_box,
    canvas,
    dots,
    label_log_axis,
    legend_below,
    line_look,
    plural,
    style,
)
from mini_engine.viz.forward.measure import ErrorCurve, ForwardTrace, root_mean_square

ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-9}  # relative error of rounding one number to the nearest
ZERO = 1e-9  # where a difference of exactly 0 is drawn on a logarithmic axis


@style()
def residual_sizes(trace: ForwardTrace, tokens: Sequence[str]) -> Figure:
    """Draw the size of the residual stream after every block and the size of what every block added."""
    stages = trace.stages
    stream = np.stack([root_mean_square(x).numpy() for x in trace.residual])  # [stages, T]
    added = np.stack([root_mean_square(x).numpy() for x in trace.updates])  # [stages - 1, T]
    figure = canvas(5.0)
    axes = figure.subplots()
    at = np.arange(len(stages))
    axes.fill_between(
        at, stream.min(1), stream.max(1), color=COLORS[0], alpha=0.2, zorder=3, label="residual stream, all tokens"
    )
    axes.plot(at, np.median(stream, 1), color=COLORS[0], marker="o", zorder=4, label="residual stream, median token")
    words = "added by {}, median token"
    for first, name in enumerate(("attention", "MLP")):
        heights = np.median(added, 1)[first::2]
        look: Look = {"label": words.format(name), "markeredgecolor": "white", "zorder": 5}  # over line and area
        dots(axes, at[1 + first :: 2], heights, MARKERS[1 + first], 10, COLORS[1 + first], **look)
    axes.set(yscale="log", xlabel="place in the model", ylabel="root mean square of a token (log scale)")
    label_log_axis(axes.yaxis, "{x:g}")
    axes.set_xticks(at, stages, rotation=45, ha="right")
    axes.set_title("The residual stream: every block adds to it")
    axes.grid(axis="y")
    legend_below(figure, ncols=2)
    return Figure(figure, residual_summary(stages, stream, added, tokens))


def residual_summary(stages: Sequence[str], stream: np.ndarray, added: np.ndarray, tokens: Sequence[str]) -> str:
    """Say what ``residual_sizes`` shows. ``stream`` [stages, T], ``added`` [stages - 1, T]."""
    median = np.median(stream, 1)
    largest = int(np.median(added, 1).argmax())
    token = int(stream[-1].argmax())
    return (
        f"The median token enters layer 0 with a root mean square of {median[0]:.2f} and leaves the last block with "
        f"{median[-1]:.1f}, {median[-1] / median[0]:.0f} times as much. The block that adds most is "
        f"{stages[largest + 1]} (median {np.median(added[largest]):.1f}). The largest token at the end is "
        f"{tokens[token]!r} at position {token} with {stream[-1, token]:.1f}."
    )


@style()
def attention_overview(trace: ForwardTrace) -> Figure:
    """Draw the attention weights of every head of every layer as small pictures, query by key."""
    layers = len(trace.weights)
    heads = trace.weights[0].shape[0]
    figure = canvas(1.42 * layers + 0.9)
    grid = figure.subplots(layers, heads, squeeze=False)
    for layer, row in enumerate(grid):
        for head, axes in enumerate(row):
            axes.imshow(seen(trace.weights[layer][head]), cmap="cividis", norm=PowerNorm(0.5, 0, 1))
            axes.set(xticks=[], yticks=[])
            if layer == 0:
                axes.set_title(f"head {head}", fontsize=11, loc="center")
        row[0].set_ylabel(f"layer {layer}")
    bar = figure.colorbar(grid[0, 0].images[0], ax=grid, shrink=0.6, aspect=30)
    bar.set_label("attention weight (square-root scale)")
    figure.supxlabel("key: the token looked at, the first one left", fontsize=11)
    figure.supylabel("query: the token that looks, the first one on top", fontsize=11)
    return Figure(figure, overview_summary(trace))


def overview_summary(trace: ForwardTrace) -> str:
    """Say which head is the most and which the least focused."""
    focus = np.stack([w.float().max(-1).values.mean(-1).numpy() for w in trace.weights])  # [L, Hq] mean largest weight
    most, least = np.unravel_index(focus.argmax(), focus.shape), np.unravel_index(focus.argmin(), focus.shape)
    count = focus.size
    return (
        f"Of {count} heads in {plural(len(focus), 'layer')}, the most focused head is layer {most[0]} head {most[1]}: "
        f"on average a token gives {focus[most]:.0%} of its attention to one token. The least focused is layer "
        f"{least[0]} head {least[1]} with {focus[least]:.0%}. White is the future, which no token may see."
    )


def seen(weights: Tensor) -> np.ndarray:
    """Return [T, T] weights with the future masked out, so that a hidden key has no colour of the scale."""
    table = weights.float().numpy()
    return np.ma.masked_array(table, mask=np.triu(np.ones_like(table, dtype=bool), 1))


@style()
def attention_map(weights: Tensor, tokens: Sequence[str], title: str) -> Figure:
    """Draw the [T, T] attention weights of one head with its tokens, and say where the last token looks."""
    count = len(tokens)
    figure = canvas(max(4.0, 0.165 * count + 1.5))
    axes = figure.subplots()
    image = axes.imshow(seen(weights), cmap="cividis", vmin=0, vmax=1)
    axes.set_facecolor("white")
    axes.set_xticks(range(count), tokens, rotation=90)
    axes.set_yticks(range(count), tokens)
    axes.set(xlabel="key: the token looked at", ylabel="query: the token that looks", title=title)
    best = int(weights[-1].argmax())
    add_box(axes, best - 0.5, count - 1.5, 1, 1, fill=False, edgecolor=COLORS[2], linewidth=2.5)
    words = f"last token looks at {tokens[best]}: {float(weights[-1, best]):.0%}"
    arrow = {"arrowstyle": "->", "color": COLORS[2], "linewidth": 1.5}
    axes.annotate(words, (best, count - 1.5), (count * 0.42, count * 0.2), fontsize=11, arrowprops=arrow)
    bar = figure.colorbar(image, ax=axes, shrink=0.7)
    bar.set_label("attention weight (each row sums to 1)")
    top = weights[-1].float().topk(min(3, count))
    places = ", ".join(
        f"{tokens[i]!r} at position {i} ({w:.0%})"
        for w, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)
    )
    return Figure(figure, f"The last of {count} tokens, {tokens[-1]!r}, looks at {places}. {title}.")


@style()
def error_growth(curves: Sequence[ErrorCurve], stages: Sequence[str]) -> Figure:
    """Draw how the difference of two computations grows from block to block; identical ones lie on the bottom line."""
    figure = canvas(4.8)
    axes = figure.subplots()
    for index, curve in enumerate(curves):
        values = [max(error, ZERO) for error in curve.errors]
        axes.plot(
            values, **line_look(index), markersize=10 - 1.5 * index, label=curve.name
        )  # all are seen where lines meet
    for name, size in ROUNDING.items():
        axes.axhline(size, color=GRAY, linewidth=1, linestyle=(0, (1, 2)))
        axes.text(len(stages) - 0.7, size, f"one rounding\nto {name}", color=GRAY, va="center", fontsize=10)
    axes.set(yscale="log", xlabel="place in the model", ylabel="relative difference (log scale)")
    axes.set_xticks(range(len(stages)), stages, rotation=45, ha="right")
    axes.set_ylim(ZERO / 2, 1)
    ticks = [ZERO, 1e-8, 1e-6, 1e-4, 1e-2, 1]
    axes.set_yticks(ticks, ["0: same bits", "1e-8", "1e-6", "1e-4", "0.01", "1"])
    axes.minorticks_off()
    axes.set_title("Where the difference starts and how it grows")
    axes.grid(axis="y")
    legend_below(figure, ncols=2)
    least, most = (pick(curve.errors[-1] for curve in curves) for pick in (min, max))
    ends = f"Measured here: at the end the relative differences are {least:.1e} to {most:.1e}."
    return Figure(figure, " ".join([ends, *(curve_sentence(curve, stages) for curve in curves)]))


def curve_sentence(curve: ErrorCurve, stages: Sequence[str]) -> str:
    """Say where one curve leaves zero and where it ends."""
    first = next((i for i, error in enumerate(curve.errors) if error > 0), None)
    if first is None:
        return f"{curve.name}: the same bits everywhere."
    return f"{curve.name}: first differs after {stages[first]}."


@style()
def difference_chart(differences: Sequence[Difference], title: str) -> Figure:
    """Draw the largest logit difference of every comparison as a bar, and write how many rows and choices change."""
    figure = canvas(0.52 * len(differences) + 1.5)
    axes = figure.subplots()
    at = np.arange(len(differences))[::-1]
    for place, difference in zip(at, differences, strict=True):
        difference_bar(axes, float(place), difference)
    axes.set_yticks(at, [difference.name for difference in differences])
    axes.set(xscale="log", xlabel="largest difference of a logit (log scale)", xlim=(ZERO, 3e5), title=title)
    axes.set_xticks([ZERO * 1.6, 1e-8, 1e-6, 1e-4, 1e-2, 1], ["0", "1e-8", "1e-6", "1e-4", "0.01", "1"])
    axes.minorticks_off()
    axes.grid(axis="x")
    sentences = [
        f"{d.name}: the same bits in all {plural(d.rows, 'row')}."
        if not d.rows_differing
        else f"{d.name}: {d.rows_differing} of {plural(d.rows, 'row')} differ, by {d.largest:.1e} at most, and "
        f"{plural(d.choices_changed, 'greedy choice')} changed."
        for d in differences
    ]
    differing = sum(d.rows_differing > 0 for d in differences)
    first = f"Measured here: bits differ in {differing} of {plural(len(differences), 'comparison')}."
    return Figure(figure, " ".join([first, *sentences]))


def difference_bar(axes: Axes, place: float, difference: Difference) -> None:
    """Draw one bar with its label; a difference of zero gets a mark instead of a bar."""
    if not difference.rows_differing:
        axes.plot([ZERO * 1.6], [place], marker="D", color=COLORS[0], clip_on=False)
        axes.text(ZERO * 4, place, "0: the same bits in every row", va="center", fontsize=10)
        return
    axes.barh(place, difference.largest, 0.6, left=ZERO, color=COLORS[1], hatch=HATCHES[1], edgecolor=FAINT)
    label = (
        f"{difference.largest:.2g}: {difference.rows_differing} of {difference.rows} rows differ,\n"
        f"{plural(difference.choices_changed, 'choice')} changed"
    )
    axes.text(difference.largest * 1.6, place, label, va="center", fontsize=10)
