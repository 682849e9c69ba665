"""Pictures of a greedy decode: the distribution of every step, close calls, and what a KV cache saves."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from mini_engine.viz.decoding.measure import CLOSE_BITS, Crossroads, StepCost, StepDistribution
from mini_engine.viz.figure import (
    COLORS,
    FAINT,
    GRAY,
    HATCHES,
    MARKERS,
    Figure,
    Look,
    bar_look,
    canvas,
    dots,
    legend_below,
    line_look,
    one_by_one,
    percent_axis,
    plural,
    style,
    swatch,
)

PANELS_PER_LINE = 3
TITLE_LENGTH = 18  # characters of the text before a step
SURE_BITS = 0.5  # below this entropy a step is called nearly certain


@style()
def top_tokens(
    distributions: Sequence[StepDistribution],
    names: Sequence[Sequence[str]],
    steps: Sequence[int],
    context: Sequence[str],
) -> Figure:
    """Draw the likeliest tokens of some steps as bars.

    ``names``: the texts of every step's likeliest tokens; ``context``: the texts of the tokens that were taken.
    """
    lines = -(-len(steps) // PANELS_PER_LINE)
    figure = canvas(2.35 * lines + 0.35)
    grid = figure.subplots(lines, PANELS_PER_LINE, squeeze=False)
    for axes in grid.flat[len(steps) :]:
        axes.set_axis_off()
    for axes, step in zip(grid.flat, steps, strict=False):
        token_bars(axes, distributions[step], names[step])
        axes.set_title(step_title(step, context), fontsize=11)
        if step in steps[-PANELS_PER_LINE:]:
            axes.set_xlabel("probability (%)")
    keys = [swatch(name, COLORS[kind], HATCHES[kind]) for kind, name in enumerate(("taken", "not taken"))]
    legend_below(figure, *keys, ncols=2)
    sentences = [
        f"Step {step}: {names[step][0]!r} with {distributions[step].probabilities[0]:.1%}, then {names[step][1]!r} "
        f"with {distributions[step].probabilities[1]:.1%}; entropy {distributions[step].entropy_bits:.2f} bits."
        for step in steps
    ]
    first = {f"step {step}": f"{distributions[step].probabilities[0]:.1%}" for step in steps}
    shares = one_by_one("The likeliest token has", first)
    return Figure(figure, " ".join([shares, *sentences]), stacks=True)


def step_title(step: int, context: Sequence[str]) -> str:
    """Name a step by its number and by the last whole words of the tokens that were taken before it."""
    text = "".join(context[:step]).replace("␣", " ")
    before = text[-TITLE_LENGTH:]
    if before != text:
        before = before[max(before.find(" ", 0, -1), 0) :]
    return f"step {step}: {'…' + before if before else 'the beginning'} →"


def token_bars(axes: Axes, distribution: StepDistribution, names: Sequence[str]) -> None:
    """Draw one step: the taken token plain on top, the others hatched, the probability at the end of each bar."""
    shares = 100 * np.array(distribution.probabilities)
    at = np.arange(len(shares))
    hatches = [HATCHES[0]] + [HATCHES[1]] * (len(shares) - 1)
    colors = [COLORS[0]] + [COLORS[1]] * (len(shares) - 1)
    bars = axes.barh(at, shares, 0.75, color=colors, hatch=hatches, edgecolor="white")
    axes.bar_label(bars, [f"{share:.1f}" if share >= 0.1 else "< 0.1" for share in shares], padding=3, fontsize=10)
    axes.set_yticks(at, names)
    axes.set_ylim(len(shares) - 0.5, -0.5)
    percent_axis(axes, 125, (0, 50, 100))


@style()
def probability_bars(distributions: Sequence[StepDistribution], taken: Sequence[str]) -> Figure:
    """Draw every step as a stacked bar: the taken token, the runner-up, the next ones, and all others."""
    table = np.array([d.probabilities for d in distributions])  # [steps, k]
    k = table.shape[1]
    parts = [table[:, 0], table[:, 1], table[:, 2:].sum(1), 1 - table.sum(1)]
    labels = ["taken", "runner-up", f"places 3 to {k}", "all other tokens"]
    figure = canvas(4.3)
    axes = figure.subplots()
    at = np.arange(len(table))
    bottom = np.zeros(len(table))
    looks = [(color, hatch, "white") for color, hatch in zip(COLORS[:3], HATCHES[:3], strict=True)]
    for part, label, (color, hatch, edge) in zip(parts, labels, [*looks, ("white", "", FAINT)], strict=True):
        look: Look = {"color": color, "hatch": hatch, "edgecolor": edge, "linewidth": 0.5}
        axes.bar(at, 100 * part, 0.85, bottom=bottom, label=label, **look)
        bottom += 100 * part
    token_axis(axes, taken)
    axes.set(ylabel="probability (%)", ylim=(0, 100))
    axes.set_title("Who shared the probability at every step")
    legend_below(figure, ncols=4)
    sure = int((table[:, 0] > 0.9).sum())
    return Figure(
        figure,
        f"In {sure} of {plural(len(table), 'step')} the taken token had more than 90 % of the probability; its mean is "
        f"{table[:, 0].mean():.0%}, the runner-up's {table[:, 1].mean():.0%}. The lowest taken probability is "
        f"{table[:, 0].min():.0%}, at step {int(table[:, 0].argmin())} ({taken[int(table[:, 0].argmin())]!r}).",
    )


def token_axis(axes: Axes, taken: Sequence[str]) -> None:
    """Label the horizontal axis with the tokens that were taken."""
    axes.set_xticks(range(len(taken)), taken, rotation=90)
    axes.set(xlabel="taken token, step by step", xlim=(-0.7, len(taken) - 0.3))


@style()
def uncertainty(distributions: Sequence[StepDistribution], taken: Sequence[str]) -> Figure:
    """Draw entropy and top-2 gap of every step, one above the other, with the close calls marked."""
    entropy = np.array([d.entropy_bits for d in distributions])
    gap = np.array([d.gap_bits for d in distributions])
    close = np.flatnonzero(gap < CLOSE_BITS)
    figure = canvas(6.2)
    top, bottom = figure.subplots(2, 1, sharex=True)
    at = np.arange(len(entropy))
    top.bar(at, entropy, 0.8, color=COLORS[0])
    top.set(
        ylabel="entropy (bits)",
        title="How open the choice was: 0 bits is certain, 1 bit a fair coin, 2 bits a choice of four",
    )
    bottom.bar(at, gap, 0.8, color=COLORS[3], hatch=HATCHES[1], edgecolor="white")
    bottom.bar(close, gap[close], 0.8, color=COLORS[2])
    words = f"close call: gap under {CLOSE_BITS:g} bit, less than twice as likely"
    dots(bottom, close, gap[close] + 0.6, MARKERS[4], 7, COLORS[2], label=words)
    bottom.axhline(CLOSE_BITS, color=GRAY, linewidth=1, linestyle="--")
    bottom.set(
        ylabel="top-2 gap (bits)",
        title="How many times likelier the winner was than the runner-up: 1 bit is twice, 10 bits is 1024 times",
    )
    if len(close):
        legend_below(figure)
    token_axis(bottom, taken)
    for axes in (top, bottom):
        axes.grid(axis="y")
        axes.title.set_fontsize(11)
    most_open, closest = int(entropy.argmax()), int(gap.argmin())
    calls = "1 step is a close call" if len(close) == 1 else f"{len(close)} steps are close calls"
    return Figure(
        figure,
        f"Mean entropy {entropy.mean():.2f} bits; {int((entropy < SURE_BITS).sum())} of {plural(len(entropy), 'step')} "
        f"are below {SURE_BITS} bits. The most open is step {most_open} ({taken[most_open]!r}) with "
        f"{entropy[most_open]:.2f} bits. {calls} with a gap under {CLOSE_BITS:g} bit; the smallest gap is "
        f"{gap[closest]:.3f} bits at step {closest} ({taken[closest]!r}).",
    )


@style()
def crossroads_chart(crossroads: Sequence[Crossroads], texts: Sequence[tuple[str, str, str]]) -> Figure:
    """Draw close calls as pairs of bars, each with the text that followed. ``texts``: before, taken, other."""
    figure = canvas(1.15 * len(crossroads) + 1.3)
    axes = figure.subplots()
    ticks = []
    for index, (fork, (before, taken, other)) in enumerate(zip(crossroads, texts, strict=True)):
        rows = ((0.0, taken, "taken"), (0.42, other, "nearly"))
        for kind, (shift, text, word) in enumerate(rows):
            share = fork.probabilities[kind]
            axes.barh(index + shift, 100 * share, 0.38, **bar_look(kind))
            words = f"{share:.1%} {word}: {text} …"
            axes.text(100 * share + 1, index + shift, words, va="center", fontsize=10.5)
        ticks.append(f"step {fork.step}, gap {fork.gap_bits:.3f} bits\n…{before}")
    axes.set_yticks(np.arange(len(crossroads)) + 0.21, ticks)
    axes.set(ylim=(len(crossroads) - 0.35, -0.4), xlabel="probability (%)")
    percent_axis(axes, 150)
    axes.set_title("Where greedy nearly went another way, and what it would have said")
    sentences = [
        f"Step {fork.step}, after {before!r}: taken {taken!r} ({fork.probabilities[0]:.1%}), nearly {other!r} "
        f"({fork.probabilities[1]:.1%}), gap {fork.gap_bits:.3f} bits."
        for fork, (before, taken, other) in zip(crossroads, texts, strict=True)
    ]
    least = min(fork.gap_bits for fork in crossroads)
    close = f"At {plural(len(crossroads), 'step')} two tokens nearly tie; the least gap is {least:.3f} bits."
    return Figure(figure, " ".join([close, *sentences]))


@style()
def cache_cost(cached: Sequence[StepCost], recomputed: Sequence[StepCost]) -> Figure:
    """Draw what every step costs with a KV cache and without: tokens fed to the model, and measured time."""
    figure = canvas(4.5)
    left, right = figure.subplots(1, 2)
    runs = {"KV cache": cached, "recompute": recomputed}
    for kind, (name, costs) in enumerate(runs.items()):
        look = line_look(kind) | {"markevery": max(1, len(costs) // 8), "label": name}
        left.plot([cost.tokens for cost in costs], **look)
        right.plot([1e3 * cost.seconds for cost in costs], **look)
    left.set(ylabel="tokens fed to the model", xlabel="step", title="Work per step", ylim=(0, None))
    right.set(ylabel="time (ms, best of several runs)", xlabel="step", title="Time per step", ylim=(0, None))
    for axes in (left, right):
        axes.grid(axis="y")
    legend_below(figure, *left.get_lines(), ncols=2)
    sums = {name: (sum(c.tokens for c in costs), sum(c.seconds for c in costs)) for name, costs in runs.items()}
    (tokens, seconds), (more_tokens, more_seconds) = sums["KV cache"], sums["recompute"]
    return Figure(
        figure,
        f"{plural(len(cached), 'step')}: with a KV cache {tokens} tokens are fed in {seconds * 1e3:.0f} ms, without "
        f"one {more_tokens} in {more_seconds * 1e3:.0f} ms: {more_tokens / tokens:.1f} times the work and "
        f"{more_seconds / seconds:.1f} times the time (measured here). Step 0 is the prompt, the same in both.",
        stacks=True,
    )
