"""Pictures of what masks do to distributions and to texts, and of what jumps save."""

import html
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from mini_engine.viz.columns import OTHERS, Column, bar_table, column_key, draw_column, percent, shares_of
from mini_engine.viz.figure import (
    COLORS,
    GRAY,
    HATCHES,
    MARKERS,
    PALE,
    REMOVED,
    Figure,
    bar_look,
    canvas,
    dot_key,
    dots,
    label_log_axis,
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
from mini_engine.viz.grammar.measure import Jumps, Language, MaskedStep
from mini_engine.viz.sampling.strips import Strip, draw_strips, kind_legend

KINDS = ("sampled", "forced")
ALLOWED = "allowed"
BANNED = "banned"
LEAST_SHOWN = 0.05  # bits: a bar that is shorter has no number


@style()
def mask_chart(steps: Sequence[MaskedStep], taken: Sequence[str], preferred: Sequence[str]) -> Figure:
    """Draw, along an answer, how many tokens are allowed and how much of the model's probability they have.

    ``taken``: the texts of its tokens; ``preferred``: of those that the model alone would have taken.
    """
    figure = canvas(6.4)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    counts = [step.num_allowed for step in steps]
    size = len(steps[0].allowed)
    top.bar(range(len(steps)), counts, 0.8, color=COLORS[0])
    top.set_yscale("log")
    label_log_axis(top.yaxis, "{x:.0f}")
    top.set(ylabel="tokens allowed", ylim=(0.7, 2 * size), title=f"How many of {size} tokens may come")
    draw_kept(bottom, steps)
    against = [i for i, step in enumerate(steps) if step.preferred != step.token_id]
    for step in against:
        bottom.text(step, 104, preferred[step], rotation=90, ha="center", va="bottom", fontsize=10, gid="preferred")
    longest = max([len(preferred[step]) for step in against], default=0)
    bottom.set(ylabel="probability (%)", xlabel="taken token, step by step", ylim=(-3, 106 + 5.5 * longest))
    bottom.set(yticks=range(0, 101, 20), xlim=(-0.7, len(steps) - 0.3))
    bottom.spines.left.set_bounds(0, 100)  # the rest is for the words above
    above = "; above: what the model wanted" if against else ""
    bottom.set_title(f"How much of the model's probability is allowed{above}")
    bottom.set_xticks(range(len(steps)), taken, rotation=90)
    for axes in (top, bottom):
        axes.grid(axis="y")
    legend_below(
        figure,
        Patch(facecolor=PALE, label="allowed"),
        Patch(**REMOVED, label="banned"),
        dot_key(MARKERS[0], 9, "black", "taken token, before the mask", markerfacecolor="white"),
        dot_key(MARKERS[1], 6, COLORS[2], "and after it"),
        ncols=4,
    )
    least = min(range(len(steps)), key=lambda i: steps[i].kept)
    return Figure(
        figure,
        f"{plural(len(steps), 'step')}, {min(counts)} to {max(counts)} tokens allowed, "
        f"{sum(count == 1 for count in counts)} times a single one. At {plural(len(against), 'step')} the model wanted "
        f"another token. The least mass is allowed at step {least}: {steps[least].kept:.2g}, where it wanted "
        f"{preferred[least]!r} and {taken[least]!r} is taken.",
    )


def draw_kept(axes: Axes, steps: Sequence[MaskedStep]) -> None:
    """Draw, for every step, how much probability is allowed, and the share of the taken token before and after."""
    at = np.arange(len(steps))
    kept = np.array([100 * step.kept for step in steps])
    axes.bar(at, kept, 0.8, color=PALE, gid="kept")
    axes.bar(at, 100 - kept, 0.8, bottom=kept, linewidth=0.8, gid="cut", **REMOVED)
    before = [100 * float(step.before[step.token_id]) for step in steps]
    after = [100 * float(step.after[step.token_id]) for step in steps]
    dots(axes, at - 0.22, before, MARKERS[0], 8, "black", markerfacecolor="white", label="before")
    dots(axes, at + 0.22, after, MARKERS[1], 6, COLORS[2], label="after")


@style()
def shift_chart(answers: Mapping[str, tuple[Sequence[MaskedStep], Sequence[str]]]) -> Figure:
    """Draw how far every mask moved the distribution of the model: one panel per answer.

    ``answers``: title -> the steps of an answer and the texts of its tokens.
    """
    figure = canvas(2.5 * len(answers) + 0.3)
    grid = stacked(figure, len(answers), sharey=True)
    top = max(step.divergence_bits for steps, _ in answers.values() for step in steps)
    sentences = []
    for axes, (title, (steps, taken)) in zip(grid, answers.items(), strict=True):
        bits = [step.divergence_bits for step in steps]
        bars = axes.bar(range(len(bits)), bits, 0.8, color=COLORS[0])
        axes.bar_label(bars, [f"{value:.1f}" if value >= LEAST_SHOWN else "" for value in bits], padding=2, fontsize=10)
        axes.set_xticks(range(len(bits)), taken, rotation=90)
        axes.set(ylabel="divergence (bits)", xlim=(-0.7, len(bits) - 0.3))
        axes.set_title(f"{title}: {sum(bits):.3g} bits in all")
        if max(bits) < LEAST_SHOWN:
            write(axes, len(bits) / 2, max(top, 1.0) / 2, f"below {LEAST_SHOWN} bits at every step", fontsize=11)
        axes.grid(axis="y")
        far = int(np.argmax(bits))
        sentences.append(
            f"{title}: {plural(len(bits), 'step')}, {sum(bits):.3g} bits in all, {sum(bit > 1 for bit in bits)} above "
            f"1 bit; most at step {far} ({taken[far]!r}) with {bits[far]:.3g} bits, a total variation distance of "
            f"{steps[far].distance:.3f}."
        )
    grid[-1].set_xlabel("taken token, step by step")
    grid[0].set_ylim(0, 1.18 * max(top, 1.0))
    moved = {title: f"{sum(step.divergence_bits for step in steps):.3g}" for title, (steps, _) in answers.items()}
    return Figure(figure, " ".join([one_by_one("Bits by which the masks move an answer", moved), *sentences]))


@style()
def before_after(step: MaskedStep, token_ids: Sequence[int], names: Sequence[str], title: str) -> Figure:
    """Draw the probabilities of some tokens, and of all others together, at one step before and after the mask."""
    figure = canvas(0.34 * len(names) + 2.0)
    panels = figure.subplots(1, 2, sharey=True, sharex=True)
    for axes, column in zip(panels, mask_columns(step, token_ids), strict=True):
        draw_column(axes, column)
        axes.set_xlabel("probability (%)")
        percent_axis(axes, 118)
    panels[0].set_yticks(range(len(names) + 1), [*names, OTHERS])
    figure.suptitle(title, fontsize=12)
    legend_below(figure, *column_key(ALLOWED, BANNED), ncols=2)
    taken = ""
    if step.token_id in token_ids:
        before, after = float(step.before[step.token_id]), float(step.after[step.token_id])
        taken = f" Taken is {names[list(token_ids).index(step.token_id)]!r}, from {before:.2g} to {after:.2g}."
    return Figure(
        figure,
        f"{title}: {plural(step.num_allowed, 'token')} of {len(step.allowed)} may come and have {step.kept:.2g} of the "
        f"probability; the mask moves the distribution by {step.divergence_bits:.1f} bits.{taken}",
        stacks=True,
    )


def step_table(step: MaskedStep, token_ids: Sequence[int], names: Sequence[str], title: str) -> str:
    """Return what ``before_after`` draws as HTML."""
    return f"<b>{html.escape(title)}</b>" + bar_table(
        [*names, OTHERS], mask_columns(step, token_ids), (ALLOWED, BANNED)
    )


def mask_columns(step: MaskedStep, token_ids: Sequence[int]) -> list[Column]:
    """Measure the tokens and all others together, before the mask and after it."""
    before, after = step.before, step.after
    allowed = shares_of(before * step.allowed, token_ids)
    banned = shares_of(before * ~step.allowed, token_ids)
    left = shares_of(after, token_ids)
    whole = [share_word(sum(shares)) for shares in zip(allowed, banned, strict=True)]
    masked = [share_word(share) for share in left]
    for line, token in enumerate(token_ids):
        masked[line] = masked[line] if step.allowed[token] else BANNED
    return [
        Column(f"Before the mask: {plural(len(step.allowed), 'token')}", allowed, banned, whole),
        Column(f"After the mask: {plural(step.num_allowed, 'token')}", left, [0.0] * len(left), masked),
    ]


def share_word(share: float) -> str:
    """Write a share given in percent; rounding may leave something of nothing."""
    return percent(share) if share > 1e-9 else "0"


@style()
def jump_chart(runs: Sequence[Jumps], names: Sequence[Sequence[str]]) -> Figure:
    """Draw each answer with its forced tokens marked, and below its length after each forward pass."""
    strips = []
    for run, own in zip(runs, names, strict=True):
        heading = f"{run.name}: {plural(run.num_passes, 'forward pass')}"
        strips.append(Strip(heading, own, [KINDS[forced] for forced in run.forced]))
    height = sum(strip.height for strip in strips)
    figure = canvas(height + 3.7)
    text, below = figure.subplots(2, 1, height_ratios=(height + 0.15, 3.0))
    draw_strips(text, strips, KINDS, height + 0.15)
    lines = []
    for index, run in enumerate(runs):
        look = line_look(index) | {"color": ("black", COLORS[2], GRAY)[index % 3], "markersize": 5 + 2 * index}
        look |= {"markerfacecolor": "none"} if index else {}  # where two lines meet, both are seen
        lines += below.step(range(1, run.num_passes + 1), run.lengths, where="post", label=run.name, **look)
    below.set(xlabel="forward passes, the prompt's included", ylabel="tokens of the answer", ylim=(0, None))
    below.set_title("How long the answer is after each forward pass")
    below.grid()
    legend_below(figure, *kind_legend(KINDS), *lines, ncols=2 + len(runs))
    sentences = [
        f"{run.name}: {plural(len(run.forced), 'token')}, {sum(run.forced)} of them forced, in {run.num_passes} "
        f"forward passes with {plural(run.num_rows, 'row')}: {run.output.text!r}."
        for run in runs
    ]
    passes = one_by_one("Forward passes", {run.name: run.num_passes for run in runs})
    return Figure(figure, " ".join([passes, *sentences]))


@style()
def language_chart(panels: Mapping[str, Language]) -> Figure:
    """Draw how often each text of a small language is the answer, with every step masked and without masks."""
    figure = canvas(0.62 * max(len(own.texts) for own in panels.values()) + 1.9)
    grid = figure.subplots(1, len(panels), sharex=True, squeeze=False)[0]
    for axes, (title, own) in zip(grid, panels.items(), strict=True):
        at = np.arange(len(own.texts))
        for index, name in enumerate(("conditioned", "masked")):
            values = [100 * share for share in getattr(own, name)]
            bars = axes.barh(at + 0.4 * index - 0.2, values, 0.38, **bar_look(index), label=name)
            axes.bar_label(bars, [percent(value) for value in values], padding=3, fontsize=10)
        axes.set_yticks(at, [repr(text) for text in own.texts])
        axes.set_ylim(len(at) - 0.45, -0.55)
        percent_axis(axes, 120)
        axes.set_xlabel("share of the answers (%)")
        axes.set_title(f"{title}\nmass of the language: {own.mass:.1g}", fontsize=11)
    legend_below(
        figure,
        Patch(facecolor=COLORS[0], label="the model's answers that are in the language"),
        swatch("every step masked", COLORS[1], HATCHES[1]),
        ncols=2,
    )
    distances = {title: f"{own.distance:.2f}" for title, own in panels.items()}
    first = one_by_one("Distance between the two ways to answer", distances)
    sentences = [language_sentence(title, own) for title, own in panels.items()]
    return Figure(figure, " ".join([first, *sentences]), stacks=True)


def language_sentence(title: str, own: Language) -> str:
    """Say both distributions."""
    pairs = ", ".join(
        f"{text!r} {one:.1%} and {other:.1%}"
        for text, one, other in zip(own.texts, own.conditioned, own.masked, strict=True)
    )
    return (
        f"{' '.join(title.split())}: the model gives the language {own.mass:.1g} of its probability. Conditioned and "
        f"masked: {pairs}; distance {own.distance:.2f}. Masked greedy decoding says {own.greedy!r}."
    )
