"""L4 in pictures: distributions stage by stage, orders, counts of draws, penalties, tokens with a colour each.

Owns: drawings. Must not know: models, requests, how anything was measured (``sampling``).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray
from torch import Tensor

from mini_engine.sampler.trace import Stage
from mini_engine.viz.figure import COLORS, FAINT, GRAY, HATCHES, LINES, MARKERS, Figure, canvas, plural, style
from mini_engine.viz.sampling import Draws, MixedRow, binomial_band, chi_square, entropy_bits

PANELS_PER_LINE = 3
REMOVED: dict[str, Any] = {"color": "white", "hatch": "////", "edgecolor": "#a0a0a0"}
CHARACTERS = 104  # of one line of a strip, in a font whose characters are equally wide
STRIP_LINE, STRIP_GAP = 0.27, 0.36  # inches: a line of tokens, and the heading above a strip
ROOT_TICKS = (0, 1, 4, 10, 20, 40, 60, 80)  # percent, for a square-root scale
RANKS = {"rank 1": 1, "rank 2 to 5": 5, "rank 6 to 20": 20, "rank above 20": math.inf}


@style()
def stage_bars(stages: Sequence[Stage], token_ids: Sequence[int], names: Sequence[str]) -> Figure:
    """Draw one panel per stage: what it leaves of some tokens and of all others, and hatched what it takes away.

    ``token_ids``: the tokens to draw, top to bottom; ``names``: their texts.
    """
    lines = -(-len(stages) // PANELS_PER_LINE)
    figure = canvas((0.2 * len(names) + 1.25) * lines + 0.6)
    grid = figure.subplots(lines, PANELS_PER_LINE, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(stages) :]:
        axes.set_axis_off()
    before = [stages[0], *stages]
    pairs = [(shares_of(now.probs, token_ids), shares_of(was.probs * (now.probs == 0), token_ids))
             for now, was in zip(stages, before, strict=False)]  # fmt: skip
    top = max(float((share + taken).max()) for share, taken in pairs)
    for index, (axes, stage, (share, taken)) in enumerate(zip(grid.flat, stages, pairs, strict=False)):
        at = np.arange(len(share))
        axes.barh(at, share, 0.8, color=COLORS[0])
        ends = axes.barh(at, taken, 0.8, left=share, linewidth=[0.8 * (mass > 0) for mass in taken], **REMOVED)
        axes.bar_label(ends, [percent(value) if value else "" for value in share], padding=3, fontsize=10)
        cut = f", {1 - stage.kept:.1%} cut" if stage.kept < 1 - 1e-9 else ""
        axes.set_title(f"{index}. {stage.name}{cut}\n{stage.support} tokens, {stage.entropy:.2f} bits", fontsize=11)
        axes.set(xlim=(0, 1.22 * top), ylim=(len(share) - 0.4, -0.6))
        if index >= len(stages) - PANELS_PER_LINE:
            axes.set_xlabel("probability (%)")
    grid[0, 0].set_yticks(np.arange(len(names) + 1), [*names, "all others"])
    figure.legend(handles=[Patch(color=COLORS[0], label="still possible"),
                           Patch(facecolor="white", edgecolor="#a0a0a0", hatch="////", label="removed by this stage")],
                  loc="outside lower center", ncols=2)  # fmt: skip
    return Figure(figure, " ".join(stage_sentence(stage, token_ids, names) for stage in stages))


def shares_of(probs: Tensor, token_ids: Sequence[int]) -> NDArray[np.float64]:
    """Return the masses of the tokens and of all others together in ``probs`` [V], in percent."""
    others = probs.index_fill(0, torch.tensor(token_ids), 0.0).sum()
    return 100 * np.array([*probs[list(token_ids)].tolist(), float(others)])


def stage_sentence(stage: Stage, token_ids: Sequence[int], names: Sequence[str]) -> str:
    """Say the numbers of one panel."""
    token, probability = stage.top[0]
    name = repr(names[list(token_ids).index(token)]) if token in token_ids else f"token {token}"
    cut = f", {1 - stage.kept:.1%} of the mass cut" if stage.kept < 1 - 1e-9 else ""
    return (
        f"{stage.name.capitalize()}: {plural(stage.support, 'token')}, {stage.entropy:.2f} bits{cut}; the likeliest is "
        f"{name} with {probability:.1%}."
    )


def percent(share: float) -> str:
    """Write a share given in percent with the digits that it needs."""
    return f"{share:.1f}" if share >= 0.05 else "< 0.1"


@style()
def survivors_chart(counts: Mapping[str, Sequence[int]], entropies: Sequence[float], taken: Sequence[str]) -> Figure:
    """Draw, along a text, how open every step was and how many tokens each filter leaves it. ``taken``: its tokens."""
    figure = canvas(6.4)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    at = np.arange(len(taken))
    top.bar(at, entropies, 0.8, color=COLORS[0])
    top.set(ylabel="entropy (bits)", title="How open every step was")
    for index, (name, numbers) in enumerate(counts.items()):
        bottom.plot(at, numbers, marker=MARKERS[index], linestyle=LINES[index], color=COLORS[index], label=name,
                    linewidth=1, markersize=6 - index)  # fmt: skip
    bottom.set_yscale("log", base=2)
    bottom.yaxis.set_major_formatter("{x:.0f}")
    bottom.set(ylabel="tokens left", xlabel="taken token, step by step", xlim=(-0.7, len(taken) - 0.3))
    bottom.set_title("How many tokens each filter leaves")
    bottom.set_xticks(at, taken, rotation=90)
    for axes in (top, bottom):
        axes.grid(axis="y")
    figure.legend(loc="outside lower center", ncols=len(counts))
    sentences = [
        f"{name} leaves {min(numbers)} to {max(numbers)} tokens, {sum(n == 1 for n in numbers)} times a single one."
        for name, numbers in counts.items()
    ]
    return Figure(figure, f"{plural(len(taken), 'step')}. " + " ".join(sentences))


@style()
def temperature_sweep(
    temperatures: Sequence[float], probs: Tensor, token_ids: Sequence[int], names: Sequence[str]
) -> Figure:
    """Draw some tokens' shares as layers, and the entropy, over the temperature. ``probs`` [S, V]: a row for each."""
    figure = canvas(5.6)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    shown = 100 * probs[:, list(token_ids)].T  # [K, S]
    bottoms = np.zeros(len(temperatures))
    looks = [*zip(COLORS[: len(names)], HATCHES, strict=False), ("white", "||")]
    for share, name, (color, hatch) in zip([*shown, 100 - shown.sum(0)], [*names, "all others"], looks, strict=True):
        layer = bottoms + np.asarray(share)
        top.fill_between(temperatures, bottoms, layer, facecolor=color, hatch=hatch, linewidth=0.5, label=name,
                         edgecolor="white" if color != "white" else FAINT)  # fmt: skip
        bottoms = layer
    top.set(ylabel="probability (%)", ylim=(0, 100), xlim=(min(temperatures), max(temperatures)))
    top.set_title("Who has the probability at which temperature")
    entropies = entropy_bits(probs)
    bottom.plot(temperatures, entropies, color=COLORS[0], marker=MARKERS[0], markersize=4)
    bottom.axhline(math.log2(probs.shape[1]), color=GRAY, linestyle=":", linewidth=1.2)
    bottom.annotate(f"all {probs.shape[1]} tokens alike", (min(temperatures), math.log2(probs.shape[1])), (6, -5),
                    textcoords="offset points", va="top", fontsize=10)  # fmt: skip
    bottom.set(ylabel="entropy (bits)", xlabel="temperature (a factor without unit)", ylim=(0, None))
    for axes in (top, bottom):
        axes.axvline(1, color="black", linestyle="--", linewidth=1.2)
    figure.legend(loc="outside right center", reverse=True)
    sentences = [
        f"At temperature {temperatures[row]:g}: {names[0]!r} has {float(probs[row, token_ids[0]]):.1%}, "
        f"the entropy is {float(entropies[row]):.2f} bits."
        for row in (0, int(np.abs(np.array(temperatures) - 1).argmin()), len(temperatures) - 1)
    ]
    return Figure(figure, " ".join(sentences))


@style()
def order_table(rows: Mapping[str, Tensor], token_ids: Sequence[int], names: Sequence[str], title: str) -> Figure:
    """Draw one line per order of the stages and one column per token: its probability, or a hatched box if removed.

    ``rows``: name of the order -> probabilities [V]; ``token_ids`` and ``names``: the columns.
    """
    figure = canvas(0.42 * len(rows) + 1.35)
    axes = figure.subplots()
    for line, probs in enumerate(rows.values()):
        for column, token in enumerate(token_ids):
            share = 100 * float(probs[token])
            order_cell(axes, column, line, share)
        axes.text(len(token_ids) + 0.6, line + 0.5, f"{int((probs > 0).sum())}", ha="center", va="center", fontsize=10)
    axes.set(xlim=(0, len(token_ids) + 1.2), ylim=(len(rows), 0))
    axes.set_xticks([*np.arange(len(token_ids)) + 0.5, len(token_ids) + 0.6], [*names, "tokens\nleft"])
    axes.set_yticks(np.arange(len(rows)) + 0.5, list(rows))
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(title, pad=10)
    return Figure(figure, " ".join(order_sentence(name, probs, token_ids, names) for name, probs in rows.items()))


def order_cell(axes: Axes, column: int, line: int, share: float) -> None:
    """Draw one probability in percent, on a ground that is the deeper the likelier, or a hatched box for none."""
    box: dict[str, Any] = {"xy": (column + 0.04, line + 0.08), "width": 0.92, "height": 0.84, "linewidth": 0}
    if share == 0:
        axes.add_patch(Rectangle(facecolor="white", hatch="////", **box | {"edgecolor": "#a0a0a0"}))
        return
    axes.add_patch(Rectangle(facecolor=COLORS[0], alpha=0.15 + 0.006 * share, **box))
    axes.text(column + 0.5, line + 0.5, percent(share), ha="center", va="center", fontsize=10)


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
    """Draw how often some tokens came, one panel per way to draw, over the band in which a right sampler stays.

    On a square-root scale: there the bands are about equally wide, so a rare token is judged as well as a common one.

    ``target`` [V]: the distribution that is drawn from. ``level``: of the binomial band, for each token alone.
    """
    figure = canvas(1.75 * len(draws) + 1.2)
    panels = figure.subplots(len(draws), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    at, sentences = np.arange(len(names)), []
    probs = target[list(token_ids)]
    wanted = 100 * np.asarray(probs)
    for axes, made in zip(panels, draws, strict=True):
        counts = made.counts[list(token_ids)]
        low, high = binomial_band(probs, made.total, level)
        outside = (counts < low) | (counts > high)
        shares, low_share, high_share = (100 * np.asarray(number) / made.total for number in (counts, low, high))
        axes.bar(at, shares, 0.8, color=COLORS[0])
        axes.bar(at[outside], shares[outside], 0.8, color=COLORS[2], hatch="...", edgecolor="white")
        axes.errorbar(at, wanted, [wanted - low_share, high_share - wanted], fmt="none", ecolor="black",
                      capsize=7, elinewidth=1.4)  # fmt: skip
        test = chi_square(made, target)
        axes.set_title(f"{made.name}: {int(outside.sum())} of {len(names)} outside, p = {test.p_value:.2g}")
        axes.grid(axis="y")
        axes.set_yscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
        sentences.append(
            f"{made.name}: {made.total} draws, {int(outside.sum())} of {len(names)} tokens outside their band, "
            f"chi-square {test.statistic:.1f} with {test.degrees} degrees of freedom, p = {test.p_value:.2g}."
        )
    panels[-1].set_xticks(at, names, rotation=90)
    panels[-1].set(xlabel="token", yticks=ROOT_TICKS, ylim=(0, 1.25 * max(axes.dataLim.y1 for axes in panels)))
    figure.supylabel("share of the draws (%), on a square-root scale", fontsize=11)
    figure.legend(handles=[Patch(color=COLORS[0], label="share of the draws"),
                           Patch(facecolor=COLORS[2], hatch="...", edgecolor="white", label="outside its band"),
                           Line2D([], [], color="black", marker="_", label=f"band of {level:.1%} around the target")],
                  loc="outside lower center", ncols=3)  # fmt: skip
    return Figure(figure, " ".join(sentences))


@style()
def penalty_chart(logits: Mapping[str, Tensor], occurrences: Sequence[int], token: str) -> Figure:
    """Draw one token's logit where it came under several penalties, and what each takes from it along the text.

    ``logits``: name -> [S], the one without a penalty first; ``occurrences``: the steps at which the token came.
    """
    raw = next(iter(logits.values()))
    figure = canvas(6.4)
    top, bottom = figure.subplots(2, 1)
    at, width = np.arange(len(occurrences)), 0.84 / len(logits)
    handles: list[Any] = []
    for index, (name, values) in enumerate(logits.items()):
        heights = np.asarray(values[list(occurrences)])
        bars = top.bar(at + (index - (len(logits) - 1) / 2) * width, heights, width * 0.94, color=COLORS[index],
                       hatch=HATCHES[index], edgecolor="white", label=name)  # fmt: skip
        lines = bottom.plot(raw - values, color=COLORS[index], linestyle=LINES[index], label=name, linewidth=1.4,
                            marker=MARKERS[index], markevery=(2 * index, 9), markersize=6) if index else []  # fmt: skip
        handles.append((bars, *lines))
    for step in occurrences:
        bottom.axvline(step, color=FAINT, linewidth=4, zorder=0)
    top.axhline(0, color="black", linewidth=0.8)
    top.set_xticks(at, [f"step {step}\nseen {count}×" for count, step in enumerate(occurrences)])
    top.set(ylabel="logit (nats)", title=f"The logit of {token!r} at the steps at which the text has it")
    bottom.set(ylabel="taken away (nats)", xlabel="step", xlim=(-0.5, len(raw) - 0.5))
    bottom.set_title("How much each penalty takes from it at every step; gray: the steps above")
    figure.legend(handles, list(logits), loc="outside lower center", ncols=len(logits), handlelength=4,
                  handler_map={tuple: HandlerTuple(ndivide=None)})  # fmt: skip
    sentences = [
        f"{name}: {float((raw - values)[0]):.2f} at the first step, {float((raw - values)[-1]):.2f} at the last, "
        f"{float((raw - values).max()):.2f} at most."
        for name, values in list(logits.items())[1:]
    ]
    return Figure(
        figure,
        f"{token!r} came at {plural(len(occurrences), 'step')} of {len(raw)}. Taken away: " + " ".join(sentences),
    )


@dataclass(frozen=True)
class Strip:
    """A heading and tokens, each of some kind."""

    heading: str
    names: Sequence[str]
    kinds: Sequence[str]


@style()
def token_strips(strips: Sequence[Strip], kinds: Sequence[str]) -> Figure:
    """Draw texts as rows of token boxes, coloured and hatched by kind. ``kinds``: all of them, for the legend."""
    heights = [STRIP_GAP + STRIP_LINE * len(wrap(strip.names)) for strip in strips]
    figure = canvas(sum(heights) + 0.45)
    axes = figure.subplots()
    top = 0.0
    for strip, height in zip(strips, heights, strict=True):
        axes.text(0, top + STRIP_GAP / 2, strip.heading, fontsize=11, va="center")
        draw_strip(axes, strip, kinds, top + STRIP_GAP)
        top += height
    strip_axes(axes, top)
    figure.legend(handles=kind_legend(kinds), loc="outside lower center", ncols=len(kinds))
    sentences = [
        f"{strip.heading}: " + ", ".join(f"{strip.kinds.count(kind)} {kind}" for kind in kinds) + "."
        for strip in strips
    ]
    return Figure(figure, "Tokens of each kind. " + " ".join(sentences))


def wrap(names: Sequence[str]) -> list[list[int]]:
    """Break tokens into lines of at most ``CHARACTERS`` characters -> the indices of each line."""
    lines: list[list[int]] = [[]]
    for index, name in enumerate(names):
        if lines[-1] and sum(len(names[i]) for i in lines[-1]) + len(name) > CHARACTERS:
            lines.append([])
        lines[-1].append(index)
    return lines


def draw_strip(axes: Axes, strip: Strip, kinds: Sequence[str], top: float) -> None:
    """Draw the boxes of one strip downwards from ``top``, in inches; a token is as wide as it has characters."""
    for number, line in enumerate(wrap(strip.names)):
        left, height = 0, top + number * STRIP_LINE
        for index in line:
            name, kind = strip.names[index], kinds.index(strip.kinds[index])
            axes.add_patch(Rectangle((left + 0.06, height), len(name) - 0.12, STRIP_LINE * 0.88,
                                     alpha=0.45, facecolor=COLORS[kind], hatch=HATCHES[kind], edgecolor="white",
                                     linewidth=0))  # fmt: skip
            axes.text(left + len(name) / 2, height + STRIP_LINE * 0.44, name, ha="center", va="center", fontsize=10,
                      family="DejaVu Sans Mono", gid="token")  # fmt: skip
            left += len(name)


def strip_axes(axes: Axes, height: float) -> None:
    """Set limits and drop ticks and frame: the boxes are their own scale."""
    axes.set(xlim=(0, CHARACTERS), ylim=(height, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def kind_legend(kinds: Sequence[str]) -> list[Patch]:
    """Return one patch per kind."""
    return [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", alpha=0.7, label=kind)
        for kind, color, hatch in zip(kinds, COLORS, HATCHES, strict=False)
    ]


def rank_kind(rank: int) -> str:
    """Name the class of a rank."""
    return next(name for name, last in RANKS.items() if rank <= last)


@style()
def surprise_chart(names: Sequence[str], logprobs: Sequence[float], ranks: Sequence[int]) -> Figure:
    """Draw a text whose tokens are coloured by their rank, and below it how unlikely each of them was, in bits.

    ``logprobs``: natural logarithms, before any filter; ``ranks``: 1 is the likeliest.
    """
    strip = Strip("The text; the colour says the token's rank", names, [rank_kind(rank) for rank in ranks])
    height = STRIP_GAP + STRIP_LINE * len(wrap(names))
    figure = canvas(height + 4.0)
    text, bars = figure.subplots(2, 1, height_ratios=(height, 3.4))
    text.text(0, STRIP_GAP / 2, strip.heading, fontsize=12, va="center")
    draw_strip(text, strip, list(RANKS), STRIP_GAP)
    strip_axes(text, height)
    bits = -np.array(logprobs) / math.log(2)
    at = np.arange(len(names))
    for kind, name in enumerate(RANKS):
        own = np.array([rank_kind(rank) == name for rank in ranks])
        bars.bar(at[own], bits[own], 0.8, color=COLORS[kind], hatch=HATCHES[kind], edgecolor="white")
    bars.set_xticks(at, names, rotation=90)
    bars.set(xlabel="token", ylabel="surprise (bits)", xlim=(-0.7, len(names) - 0.3))
    bars.set_title("How unlikely each token was: 0 bits is certain, 1 bit one of two, 5 bits one of 32")
    bars.grid(axis="y")
    figure.legend(handles=kind_legend(list(RANKS)), loc="outside lower center", ncols=len(RANKS))
    first, rarest = sum(rank == 1 for rank in ranks), int(bits.argmax())
    return Figure(
        figure,
        f"{first} of {plural(len(names), 'token')} were the likeliest. The text costs {bits.sum():.1f} bits in all, "
        f"{bits.mean():.2f} a token. The least expected is {names[rarest]!r} with {bits[rarest]:.1f} bits, rank "
        f"{ranks[rarest]}.",
    )


@style()
def mixing_chart(rows: Sequence[MixedRow]) -> Figure:
    """Draw the running mass of a row with top_p 1.0 in float32, and what filters with and without a bypass leave."""
    size, excess = len(rows[0].excess), 1e6 * np.asarray(rows[0].excess)
    figure = canvas(4.6)
    left, right = figure.subplots(1, 2)
    rank = np.arange(1, size + 1)
    left.plot(rank, excess, color="black")
    left.fill_between(rank, 0, excess, where=excess > 0, facecolor=COLORS[2], hatch="...", edgecolor="white")
    left.axhline(0, color=GRAY, linewidth=1.2, linestyle="--")
    left.set(xlim=(int((excess < -3).sum()), size), ylim=(-3, 1.4 * max(excess.max(), 0.5)))
    left.set(xlabel="tokens so far, likeliest first", ylabel="running mass minus 1 (millionths)")
    left.set_title("Row 0: its float32 sum passes 1 too early")
    at, lost = np.arange(len(rows)), [row.kept - row.kept_without_bypass for row in rows]
    bars = right.bar(at + 0.2, lost, 0.4, color=COLORS[2], hatch="...", edgecolor="white", label="without the bypass")
    exact = right.bar(at - 0.2, [size - row.kept for row in rows], 0.4, color=COLORS[0], label="with it (the engine)")
    right.bar_label(bars, padding=2, fontsize=10)
    right.bar_label(exact, padding=2, fontsize=10)
    right.set(xticks=at, xlabel="row (top_p = 1.0, its neighbour 0.9)", ylabel="tokens that can no longer come")
    right.set_title("What an option that is off removes")
    right.set_ylim(0, 1.15 * max([*lost, 1]))
    figure.legend(handles=[exact, bars], loc="outside lower center", ncols=2)
    return Figure(
        figure,
        f"{plural(len(rows), 'row')} of {size} tokens with top_p = 1.0, each beside a row with 0.9. With the bypass "
        f"they keep {min(row.kept for row in rows)} tokens or more; without it they lose {min(lost)} to {max(lost)}. "
        f"The running mass of row 0 goes up to 1 + {float(rows[0].excess.max()):.1e}.",
    )
