"""Pictures of a sampler: distributions stage by stage, orders of stages, counts of draws, penalties."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor

from mini_engine.sampler.trace import Stage
from mini_engine.viz.columns import OTHERS, Column, bar_table, column_key, draw_column, percent, shares_of
from mini_engine.viz.figure import (
    COLORS,
    FAINT,
    GRAY,
    MARKERS,
    PALE,
    REMOVED,
    SOFT,
    Figure,
    add_box,
    bar_look,
    canvas,
    hide_frame,
    legend_below,
    line_look,
    one_by_one,
    percent_axis,
    plural,
    stacked,
    style,
    swatch,
    write,
)
from mini_engine.viz.sampling.measure import Draws, MixedRow, binomial_band, chi_square, entropy_bits

PANELS_PER_LINE = 3
STAGE_KEY = ("still possible", "removed by this stage")
MIN_NAMED = 4.0  # percent: a layer that is thinner has no room for its name
ROOT_TICKS = (0, 1, 4, 10, 20, 40, 60, 80)  # percent, for a square-root scale


@style()
def stage_bars(stages: Sequence[Stage], token_ids: Sequence[int], names: Sequence[str], title: str = "") -> Figure:
    """Draw one panel per stage: what it leaves of some tokens and of all others, and hatched what it removes.

    ``token_ids``: the tokens to draw, top to bottom; ``names``: their texts; ``title``: of which text, with which
    parameters.
    """
    lines = -(-len(stages) // PANELS_PER_LINE)
    figure = canvas((0.2 * len(names) + 1.25) * lines + 0.6 + 0.2 * len(title.splitlines()))
    figure.suptitle(title, fontsize=12)
    grid = figure.subplots(lines, PANELS_PER_LINE, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(stages) :]:
        axes.set_axis_off()
    columns = stage_columns(stages, token_ids)
    top = max(max(np.add(column.left, column.removed)) for column in columns)
    for index, (axes, column) in enumerate(zip(grid.flat, columns, strict=False)):
        draw_column(axes, column)
        percent_axis(axes, 1.22 * top)
        if index >= len(stages) - PANELS_PER_LINE:
            axes.set_xlabel("probability (%)")
    grid[0, 0].set_yticks(range(len(names) + 1), [*names, OTHERS])
    legend_below(figure, *column_key(*STAGE_KEY), ncols=2)
    left = one_by_one("Tokens that each stage leaves", {stage.name: stage.support for stage in stages})
    sentences = [stage_sentence(stage, token_ids, names) for stage in stages]
    return Figure(figure, " ".join([left, *sentences]), stacks=True)


def stage_table(stages: Sequence[Stage], token_ids: Sequence[int], names: Sequence[str]) -> str:
    """Return what ``stage_bars`` draws as HTML, one column per stage."""
    return bar_table([*names, OTHERS], stage_columns(stages, token_ids), STAGE_KEY)


def stage_columns(stages: Sequence[Stage], token_ids: Sequence[int]) -> list[Column]:
    """Measure, for every stage, what it leaves of the tokens and of all others together, and what it removes."""
    columns = []
    for index, (now, was) in enumerate(zip(stages, [stages[0], *stages], strict=False)):
        left = shares_of(now.probs, token_ids)
        removed = shares_of(was.probs * (now.probs == 0), token_ids)
        cut = f", {1 - now.kept:.1%} cut" if now.kept < 1 - 1e-9 else ""
        name = now.name if index else "softmax of the logits"
        heading = f"{index}. {name}{cut}\n{plural(now.support, 'token')}, {now.entropy:.2f} bits"
        columns.append(Column(heading, left, removed, [percent(share) if share else "" for share in left]))
    return columns


def stage_sentence(stage: Stage, token_ids: Sequence[int], names: Sequence[str]) -> str:
    """Say the numbers of one panel."""
    token, probability = stage.top[0]
    name = repr(names[list(token_ids).index(token)]) if token in token_ids else f"token {token}"
    cut = f", {1 - stage.kept:.1%} of the mass cut" if stage.kept < 1 - 1e-9 else ""
    return (
        f"{stage.name.capitalize()}: {plural(stage.support, 'token')}, {stage.entropy:.2f} bits{cut}; the likeliest is "
        f"{name} with {probability:.1%}."
    )


@style()
def survivors_chart(counts: Mapping[str, Sequence[int]], entropies: Sequence[float], taken: Sequence[str]) -> Figure:
    """Draw, along a text, how open every step was and how many tokens each filter leaves.

    ``taken``: the tokens of the text.
    """
    figure = canvas(6.4)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    at = np.arange(len(taken))
    top.bar(at, entropies, 0.8, color=COLORS[0])
    top.set(ylabel="entropy (bits)", title="How open every step was")
    for index, (name, numbers) in enumerate(counts.items()):
        bottom.plot(at, numbers, **line_look(index), label=name, linewidth=1, markersize=6 - index)
    bottom.set_yscale("log", base=2)
    bottom.yaxis.set_major_formatter("{x:.0f}")
    bottom.set(ylabel="tokens left", xlabel="taken token, step by step", xlim=(-0.7, len(taken) - 0.3))
    bottom.set_title("How many tokens each filter leaves")
    bottom.set_xticks(at, taken, rotation=90)
    for axes in (top, bottom):
        axes.grid(axis="y")
    legend_below(figure, ncols=len(counts))
    sentences = [
        f"{name} leaves {min(numbers)} to {max(numbers)} tokens, {sum(n == 1 for n in numbers)} times a single one."
        for name, numbers in counts.items()
    ]
    entropy = f"In {plural(len(taken), 'step')} the entropy is {min(entropies):.2f} to {max(entropies):.2f} bits."
    return Figure(figure, " ".join([entropy, *sentences]))


@style()
def temperature_sweep(
    temperatures: Sequence[float], probs: Tensor, token_ids: Sequence[int], names: Sequence[str]
) -> Figure:
    """Draw the shares of some tokens as layers, and the entropy, over the temperature.

    ``probs`` [S, V]: a row for each temperature.
    """
    figure = canvas(7.0)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    share_layers(top, temperatures, probs[:, list(token_ids)], names)
    entropies = entropy_bits(probs)
    most = math.log2(probs.shape[1])
    bottom.plot(temperatures, entropies, color=COLORS[0], marker=MARKERS[0], markersize=4)
    bottom.axhline(most, color=GRAY, linestyle=":", linewidth=1.2)
    words = f"all {probs.shape[1]} tokens alike"
    place = (min(temperatures), most)
    bottom.annotate(words, place, (6, -5), textcoords="offset points", va="top", fontsize=10)
    bottom.set(ylabel="entropy (bits)", xlabel="temperature (a factor without unit)", ylim=(0, None))
    for axes in (top, bottom):
        axes.axvline(1, color="black", linestyle="--", linewidth=1.2)
    sentences = [
        f"At temperature {temperatures[row]:g}: {names[0]!r} has {float(probs[row, token_ids[0]]):.1%}, "
        f"the entropy is {float(entropies[row]):.2f} bits."
        for row in (0, int(np.abs(np.array(temperatures) - 1).argmin()), len(temperatures) - 1)
    ]
    first, last = (f"{share:.1%}" for share in probs[[0, -1], token_ids[0]].tolist())
    change = f"From the lowest temperature to the highest, {names[0]!r} goes from {first} to {last}."
    return Figure(figure, " ".join([change, *sentences]))


def share_layers(axes: Axes, temperatures: Sequence[float], probs: Tensor, names: Sequence[str]) -> None:
    """Draw the probabilities [S, K] of K tokens as layers, and that of all others on top."""
    shown = 100 * probs.T  # [K, S]
    colors = [*itertools.islice(itertools.cycle((SOFT, PALE)), len(names)), FAINT]  # a token may be a colour's name
    below = np.zeros(len(temperatures))
    at = len(temperatures) // 2  # where the names stand
    for share, name, color in zip([*shown, 100 - shown.sum(0)], [*names, "all others"], colors, strict=True):
        layer = below + np.asarray(share)
        axes.fill_between(temperatures, below, layer, facecolor=color, edgecolor="white", linewidth=1)
        if share[at] > MIN_NAMED:
            write(axes, temperatures[at], (below[at] + layer[at]) / 2, name)
        below = layer
    axes.set(ylabel="probability (%)", ylim=(0, 100), xlim=(min(temperatures), max(temperatures)))
    axes.set_title("How the probability is shared at each temperature")


@style()
def order_table(rows: Mapping[str, Tensor], token_ids: Sequence[int], names: Sequence[str], title: str) -> Figure:
    """Draw one line per order of the stages and one column per token: its probability, or a hatched box if removed.

    ``rows``: name of the order -> probabilities [V]; ``token_ids`` and ``names``: the columns.
    """
    is_cut = any(float(probs[token]) == 0 for probs in rows.values() for token in token_ids)
    figure = canvas(0.42 * len(rows) + 1.35 + 0.35 * is_cut)
    axes = figure.subplots()
    for line, probs in enumerate(rows.values()):
        for column, token in enumerate(token_ids):
            share = 100 * float(probs[token])
            order_cell(axes, column, line, share)
        write(axes, len(token_ids) + 0.6, line + 0.5, f"{int((probs > 0).sum())}")
    axes.set(xlim=(0, len(token_ids) + 1.2), ylim=(len(rows), 0))
    axes.set_xticks(np.arange(len(token_ids)) + 0.4, names, rotation=35, ha="left")
    write(axes, len(token_ids) + 0.6, -0.5, "tokens\nleft")
    axes.set_yticks(np.arange(len(rows)) + 0.5, list(rows))
    axes.xaxis.tick_top()
    hide_frame(axes)
    axes.set_title(title, pad=10)
    if is_cut:
        legend_below(figure, Patch(**REMOVED, label="removed"))
    shares = ", ".join(f"{float(probs[token_ids[0]]):.1%}" for probs in rows.values())
    sentences = [order_sentence(name, probs, token_ids, names) for name, probs in rows.items()]
    return Figure(figure, " ".join([f"{names[0]!r} has {shares}, line by line.", *sentences]))


def order_cell(axes: Axes, column: int, line: int, share: float) -> None:
    """Draw a probability in percent on a ground that is darker the larger it is, or a hatched box for zero."""
    look = {"facecolor": COLORS[0], "alpha": 0.15 + 0.006 * share} if share else REMOVED
    add_box(axes, column + 0.04, line + 0.08, 0.92, 0.84, linewidth=0, **look)
    if share:
        write(axes, column + 0.5, line + 0.5, percent(share))


def order_sentence(name: str, probs: Tensor, token_ids: Sequence[int], names: Sequence[str]) -> str:
    """Say how many tokens an order leaves and what the first column gets."""
    return (
        f"{' '.join(name.split())}: {plural(int((probs > 0).sum()), 'token')} left, {names[0]!r} with "
        f"{float(probs[token_ids[0]]):.1%}, {float(entropy_bits(probs)):.2f} bits."
    )


@style()
def draw_histogram(
    target: Tensor, draws: Sequence[Draws], token_ids: Sequence[int], names: Sequence[str], level: float = 0.999
) -> Figure:
    """Draw how often some tokens came, one panel per way to draw, over the band in which a correct sampler stays.

    The scale is a square root. On it the bands are about equally wide, so that rare tokens can be judged too.

    ``target`` [V]: the distribution that is drawn from. ``level``: how often a
    correct sampler keeps all of these tokens inside their bands, at least.
    """
    figure = canvas(1.75 * len(draws) + 1.2)
    panels = stacked(figure, len(draws), sharex=True, sharey=True)
    at = np.arange(len(names))
    sentences = []
    found = {}
    probs = target[list(token_ids)]
    each = 1 - (1 - level) / len(names)  # so wide a band for each keeps all of them at the level
    wanted = 100 * np.asarray(probs)
    for axes, made in zip(panels, draws, strict=True):
        counts = made.counts[list(token_ids)]
        low, high = binomial_band(probs, made.total, each)
        outside = (counts < low) | (counts > high)
        shares, low_share, high_share = (100 * np.asarray(number) / made.total for number in (counts, low, high))
        axes.bar(at, shares, 0.8, color=COLORS[0])
        axes.bar(at[outside], shares[outside], 0.8, color=COLORS[2], hatch="...", edgecolor="white")
        band = [wanted - low_share, high_share - wanted]
        axes.errorbar(at, wanted, band, fmt="none", ecolor="black", capsize=7, elinewidth=1.4)
        test = chi_square(made, target)
        axes.set_title(f"{made.name}: {int(outside.sum())} of {len(names)} outside, p = {test.p_value:.2g}")
        axes.grid(axis="y")
        axes.set_yscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
        found[made.name] = int(outside.sum())
        sentences.append(
            f"{made.name}: {made.total} draws, {int(outside.sum())} of {len(names)} tokens outside their band, "
            f"chi-square {test.statistic:.1f} with {test.degrees} degrees of freedom, p = {test.p_value:.2g}."
        )
    panels[-1].set_xticks(at, names, rotation=90)
    panels[-1].set(xlabel="token", yticks=ROOT_TICKS, ylim=(0, 1.25 * max(axes.dataLim.y1 for axes in panels)))
    figure.supylabel("share of the draws (%), on a square-root scale", fontsize=11)
    legend_below(
        figure,
        Patch(color=COLORS[0], label="share of the draws"),
        swatch("outside its band", COLORS[2], "..."),
        Line2D([], [], color="black", marker="_", label=f"bands that hold all in {level:.1%} of runs"),
        ncols=3,
    )
    return Figure(figure, " ".join([one_by_one(f"Of {len(names)} tokens outside their band", found), *sentences]))


@style()
def penalty_chart(logits: Mapping[str, Tensor], occurrences: Sequence[int], token: str) -> Figure:
    """Draw the logit of one token under several penalties, and what each penalty takes from it along a text.

    ``logits``: name -> [S], the one without a penalty first; ``occurrences``: the steps at which the token came.
    """
    raw = next(iter(logits.values()))
    figure = canvas(6.4)
    top, bottom = figure.subplots(2, 1)
    at = np.arange(len(occurrences))
    width = 0.84 / len(logits)
    handles: list[tuple[Any, ...]] = []
    for index, (name, values) in enumerate(logits.items()):
        heights = np.asarray(values[list(occurrences)])
        shift = (index - (len(logits) - 1) / 2) * width
        bars = top.bar(at + shift, heights, width * 0.94, **bar_look(index), label=name)
        handles.append((bars,))
        if index:
            look = line_look(index) | {"linestyle": "-", "linewidth": 1.2, "markevery": list(occurrences)}
            handles[-1] += tuple(bottom.plot(raw - values, drawstyle="steps-mid", label=name, **look))
    for step in occurrences:
        bottom.axvline(step, color=FAINT, linewidth=4, zorder=0)
    top.axhline(0, color="black", linewidth=0.8)
    top.set_xticks(at, [f"step {step}\nseen {count}×" for count, step in enumerate(occurrences)])
    top.set(ylabel="logit (nats)", title=f"The logit of {token!r} at the steps at which the text has it")
    bottom.set(ylabel="taken away (nats)", xlabel="step", xlim=(-0.5, len(raw) - 0.5))
    bottom.set_title("How much each penalty takes from it at every step; marked: the steps above")
    joined = {tuple: HandlerTuple(ndivide=None)}  # a bar and its line are one entry
    legend_below(figure, *handles, labels=list(logits), ncols=len(logits), handlelength=4, handler_map=joined)
    most = max(float((raw - values).max()) for values in logits.values())
    sentences = [
        f"{name}: {float((raw - values)[0]):.2f} at the first step, {float((raw - values)[-1]):.2f} at the last, "
        f"{float((raw - values).max()):.2f} at most."
        for name, values in list(logits.items())[1:]
    ]
    return Figure(
        figure,
        f"{token!r} came at {plural(len(occurrences), 'step')} of {len(raw)}, and a penalty takes {most:.2f} nats from "
        f"it at most. Taken away: {' '.join(sentences)}",
    )


@style()
def mixing_chart(rows: Sequence[MixedRow]) -> Figure:
    """Draw the running mass of a row with top_p 1.0, and what filters with and without a bypass leave."""
    size = len(rows[0].excess)
    excess = 1e9 * np.asarray(rows[0].excess)
    figure = canvas(4.6)
    left, right = figure.subplots(1, 2)
    rank = np.arange(1, size + 1)
    left.plot(rank, excess, color="black")
    left.fill_between(rank, 0, excess, where=excess > 0, facecolor=COLORS[2], hatch="...", edgecolor="white")
    left.axhline(0, color=GRAY, linewidth=1.2, linestyle="--")
    left.set(xlim=(1, min(size, 4 * int((excess <= 0).sum() + 1))), ylim=(-3, 1.4 * max(excess.max(), 0.5)))
    left.set(xlabel="tokens so far, likeliest first", ylabel="running mass minus 1 (billionths)")
    left.set_title("Row 0: its mass passes 1 too early")
    at = np.arange(len(rows))
    lost = [row.kept - row.kept_without_bypass for row in rows]
    names = ("the filter skips a row that is off (the engine)", "the filter computes it all the same")
    exact = right.bar(at - 0.2, [size - row.kept for row in rows], 0.4, color=COLORS[0], label=names[0])
    bars = right.bar(at + 0.2, lost, 0.4, color=COLORS[2], hatch="...", edgecolor="white", label=names[1])
    for drawn in (bars, exact):
        right.bar_label(drawn, padding=2, fontsize=10)
    right.set(xticks=at, xlabel="row (top_p = 1.0, its neighbour 0.9)", ylabel="tokens that can no longer come")
    right.set_title("What an option that is off removes")
    right.set_ylim(0, 1.15 * max([*lost, 1]))
    legend_below(figure, exact, bars, ncols=2)
    return Figure(
        figure,
        f"With the bypass {plural(len(rows), 'row')} with top_p = 1.0, each next to a row with 0.9, keep "
        f"{min(row.kept for row in rows)} of {size} tokens or more. Without it they lose {min(lost)} to {max(lost)}. "
        f"The running mass of row 0 goes up to 1 + {float(rows[0].excess.max()):.1e}.",
        stacks=True,
    )
