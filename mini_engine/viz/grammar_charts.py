"""L7 in pictures: what masks do to distributions and to texts, and what jumps save.

Owns: drawings. Must not know: engines, grammars, how anything was measured (``grammar_runs``).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mini_engine.viz.drawing import (
    STRIP_GAP,
    STRIP_LINE,
    Strip,
    draw_strip,
    kind_legend,
    percent,
    strip_axes,
    wrap,
)
from mini_engine.viz.figure import COLORS, GRAY, HATCHES, LINES, MARKERS, Figure, canvas, plural, style
from mini_engine.viz.grammar_runs import Jumps, Language, MaskedStep

KINDS = ("sampled", "forced")
CUT: dict[str, Any] = {"facecolor": "white", "hatch": "////", "edgecolor": "#a0a0a0"}


@style()
def mask_chart(steps: Sequence[MaskedStep], taken: Sequence[str], wishes: Sequence[str]) -> Figure:
    """Draw, along an answer, how many tokens may come and how much of the model's probability they have.

    ``taken``: the tokens' texts; ``wishes``: those that the model alone would have taken.
    """
    figure = canvas(6.4)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    at, kept = np.arange(len(steps)), np.array([100 * step.kept for step in steps])
    counts = [step.num_allowed for step in steps]
    top.bar(at, counts, 0.8, color=COLORS[0])
    top.set_yscale("log")
    top.yaxis.set_major_formatter("{x:.0f}")
    top.set(ylabel="tokens allowed", ylim=(0.7, 2 * len(steps[0].allowed)))
    top.set_title(f"How many of {len(steps[0].allowed)} tokens may come")
    bottom.bar(at, kept, 0.8, color="#b9d3f2", gid="kept")
    bottom.bar(at, 100 - kept, 0.8, bottom=kept, linewidth=0.8, gid="cut", **CUT)
    for index, (name, side, color) in enumerate((("before", "before", "black"), ("after", "after", COLORS[2]))):
        shares = [100 * float(getattr(step, side)[step.token_id]) for step in steps]
        bottom.plot(at, shares, linestyle="", marker=MARKERS[index], color=color, markersize=9 - 3 * index,
                    markerfacecolor="white" if index == 0 else color, label=name)  # fmt: skip
    against = [i for i, step in enumerate(steps) if step.wish != step.token_id]
    for step in against:
        bottom.text(step, 104, wishes[step], rotation=90, ha="center", va="bottom", fontsize=10, gid="wish")
    longest = max([len(wishes[step]) for step in against], default=0)
    bottom.set(ylabel="probability (%)", xlabel="taken token, step by step", ylim=(-3, 106 + 5.5 * longest))
    bottom.set(yticks=range(0, 101, 20), xlim=(-0.7, len(steps) - 0.3))
    above = "; above: what the model wanted" if against else ""
    bottom.set_title(f"How much of the model's probability is allowed{above}")
    bottom.set_xticks(at, taken, rotation=90)
    for axes in (top, bottom):
        axes.grid(axis="y")
    figure.legend(handles=[
        Patch(facecolor="#b9d3f2", label="allowed"), Patch(**CUT, label="banned"),
        Line2D([], [], linestyle="", marker=MARKERS[0], color="black", markerfacecolor="white", markersize=9,
               label="taken token, before the mask"),
        Line2D([], [], linestyle="", marker=MARKERS[1], color=COLORS[2], markersize=6, label="and after it"),
    ], loc="outside lower center", ncols=4)  # fmt: skip
    least = int(kept.argmin())
    return Figure(
        figure,
        f"{plural(len(steps), 'step')}, {min(counts)} to {max(counts)} tokens allowed, "
        f"{sum(count == 1 for count in counts)} times a single one. At {plural(len(against), 'step')} the model wanted "
        f"another token. The least mass is allowed at step {least}: {steps[least].kept:.2g}, where it wanted "
        f"{wishes[least]!r} and {taken[least]!r} is taken.",
    )


@style()
def shift_chart(answers: Mapping[str, tuple[Sequence[MaskedStep], Sequence[str]]]) -> Figure:
    """Draw how far every mask moved the model's distribution, one panel per answer: its steps, and its tokens."""
    figure = canvas(2.5 * len(answers) + 0.3)
    grid = figure.subplots(len(answers), 1, sharey=True, squeeze=False)[:, 0]
    sentences = []
    for axes, (title, (steps, taken)) in zip(grid, answers.items(), strict=True):
        bits = [step.divergence_bits for step in steps]
        bars = axes.bar(range(len(bits)), bits, 0.8, color=COLORS[0])
        axes.bar_label(bars, [f"{value:.1f}" if value >= 0.05 else "" for value in bits], padding=2, fontsize=10)
        axes.set_xticks(range(len(bits)), taken, rotation=90)
        axes.set(ylabel="divergence (bits)", xlim=(-0.7, len(bits) - 0.3))
        axes.set_title(f"{title}: {sum(bits):.3g} bits in all")
        axes.grid(axis="y")
        far = int(np.argmax(bits))
        sentences.append(
            f"{title}: {plural(len(bits), 'step')}, {sum(bits):.3g} bits in all, {sum(bit > 1 for bit in bits)} above "
            f"1 bit; most at step {far} ({taken[far]!r}) with {bits[far]:.3g} bits, a total variation distance of "
            f"{steps[far].distance:.3f}."
        )
    grid[-1].set_xlabel("taken token, step by step")
    top = max(step.divergence_bits for steps, _ in answers.values() for step in steps)
    grid[0].set_ylim(0, 1.18 * max(top, 1.0))
    return Figure(figure, " ".join(sentences))


@style()
def before_after(step: MaskedStep, token_ids: Sequence[int], names: Sequence[str], title: str) -> Figure:
    """Draw some tokens' probabilities at one step before the mask and after it, and that of all others together."""
    figure = canvas(0.34 * len(names) + 2.0)
    left, right = figure.subplots(1, 2, sharey=True, sharex=True)
    at = np.arange(len(names) + 1)
    for index, (axes, probs, word) in enumerate(((left, step.before, "Before"), (right, step.after, "After"))):
        own = probs[list(token_ids)]
        shares = 100 * np.array([*own.tolist(), max(0.0, 1 - float(own.sum()))])
        colors = [COLORS[0] if step.allowed[token] else "white" for token in token_ids] + [GRAY]
        bars = axes.barh(at, shares, 0.75, color=colors, edgecolor="#a0a0a0", linewidth=0.8)
        for bar, token in zip(bars, token_ids, strict=False):
            bar.set_hatch("" if step.allowed[token] else "////")
        bars[-1].set_hatch("...")
        words = ["banned" if index and bar.get_hatch() == "////" else percent(share) if share > 1e-9 else "0"
                 for share, bar in zip(shares, bars, strict=True)]  # fmt: skip
        axes.bar_label(bars, words, padding=3, fontsize=10)
        count = step.num_allowed if index else len(step.allowed)
        axes.set(title=f"{word} the mask: {plural(count, 'token')}", xlabel="probability (%)")
    left.set_yticks(at, [*names, "all others"])
    left.set(xlim=(0, 118), ylim=(len(names) + 0.5, -0.5), xticks=[0, 25, 50, 75, 100])
    figure.suptitle(title, fontsize=12)
    figure.legend(handles=[Patch(facecolor=COLORS[0], edgecolor="#a0a0a0", label="allowed"),
                           Patch(**CUT, label="banned"),
                           Patch(facecolor=GRAY, hatch="...", edgecolor="#a0a0a0", label="all others")],
                  loc="outside lower center", ncols=3)  # fmt: skip
    chosen = list(token_ids).index(step.token_id) if step.token_id in token_ids else None
    taken = (
        ""
        if chosen is None
        else (
            f" Taken is {names[chosen]!r}, from {float(step.before[step.token_id]):.2g} to "
            f"{float(step.after[step.token_id]):.2g}."
        )
    )
    return Figure(
        figure,
        f"{title}: {plural(step.num_allowed, 'token')} of {len(step.allowed)} may come and have {step.kept:.2g} of the "
        f"probability; the mask moves the distribution by {step.divergence_bits:.1f} bits.{taken}",
    )


@style()
def jump_chart(runs: Sequence[Jumps], names: Sequence[Sequence[str]]) -> Figure:
    """Draw each answer with its forced tokens marked, and below how long it was after each forward pass."""
    strips = [
        Strip(f"{run.name}: {plural(run.num_passes, 'forward pass').replace('passs', 'passes')}", own,
              [KINDS[forced] for forced in run.forced])
        for run, own in zip(runs, names, strict=True)
    ]  # fmt: skip
    height = sum(STRIP_GAP + STRIP_LINE * len(wrap(strip.names)) for strip in strips)
    figure = canvas(height + 3.7)
    text, below = figure.subplots(2, 1, height_ratios=(height + 0.15, 3.0))
    top = 0.0
    for strip in strips:
        text.text(0, top + STRIP_GAP / 2, strip.heading, fontsize=11, va="center")
        draw_strip(text, strip, KINDS, top + STRIP_GAP)
        top += STRIP_GAP + STRIP_LINE * len(wrap(strip.names))
    strip_axes(text, height + 0.15)
    lines = []
    for index, run in enumerate(runs):
        passes = range(1, run.num_passes + 1)
        lines += below.step(passes, run.lengths, where="post", marker=MARKERS[index], linestyle=LINES[index],
                            color=("black", COLORS[2], GRAY)[index % 3], markersize=6, label=run.name)  # fmt: skip
    below.set(xlabel="forward passes, the prompt's included", ylabel="tokens of the answer", ylim=(0, None))
    below.set_title("How long the answer is after each forward pass")
    below.grid()
    figure.legend(handles=[*kind_legend(KINDS), *lines], loc="outside lower center", ncols=2 + len(runs))
    return Figure(figure, " ".join(
        f"{run.name}: {plural(len(run.forced), 'token')}, {sum(run.forced)} of them forced, in {run.num_passes} "
        f"forward passes with {plural(run.num_rows, 'row')}: {run.output.text!r}."
        for run in runs
    ))  # fmt: skip


@style()
def language_chart(panels: Mapping[str, Language]) -> Figure:
    """Draw how often each text of a small language is the answer: if every step is masked, and by the model itself."""
    figure = canvas(0.62 * max(len(own.texts) for own in panels.values()) + 1.9)
    grid = figure.subplots(1, len(panels), sharex=True, squeeze=False)[0]
    for axes, (title, own) in zip(grid, panels.items(), strict=True):
        at = np.arange(len(own.texts))
        looks = (("conditioned", own.conditioned, 0), ("masked", own.masked, 1))
        for name, shares, index in looks:
            values = [100 * share for share in shares]
            bars = axes.barh(at + 0.4 * index - 0.2, values, 0.38, color=COLORS[index], hatch=HATCHES[index],
                             edgecolor="white", label=name)  # fmt: skip
            axes.bar_label(bars, [percent(value) for value in values], padding=3, fontsize=10)
        axes.set_yticks(at, [repr(text) for text in own.texts])
        axes.set(xlim=(0, 120), xticks=[0, 25, 50, 75, 100], ylim=(len(at) - 0.45, -0.55))
        axes.set_xlabel("share of the answers (%)")
        axes.set_title(f"{title}\nmass of the language: {own.mass:.1g}", fontsize=11)
    figure.legend(handles=[
        Patch(facecolor=COLORS[0], label="the model's answers that are in the language"),
        Patch(facecolor=COLORS[1], hatch=HATCHES[1], edgecolor="white", label="every step masked"),
    ], loc="outside lower center", ncols=2)  # fmt: skip
    return Figure(figure, " ".join(language_sentence(title, own) for title, own in panels.items()))


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
