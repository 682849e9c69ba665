"""Pictures of drafts: steps with what came and what was refused, guesses by length, rows of a step, chances."""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from transformers import PreTrainedTokenizerBase

from mini_engine.outputs import StepOutput
from mini_engine.viz.drafts.measure import NO_GUESSES, DraftedStep, GuessCount, Verified
from mini_engine.viz.figure import (
    GRAY,
    MONO,
    Figure,
    Look,
    bar_look,
    canvas,
    hide_frame,
    legend_below,
    one_by_one,
    percent_axis,
    plural,
    stacked,
    style,
    write,
)
from mini_engine.viz.tokens import token_names

LOOKS: dict[str, Look] = {  # the live page has the same two colours for drafted tokens
    "own": {"facecolor": "white", "edgecolor": GRAY, "label": "came without a draft"},
    "right": {"facecolor": "#8fd3bd", "edgecolor": "white", "label": "drafted, and came"},
    "refused": {"facecolor": "#f3bf98", "hatch": "///", "edgecolor": "white", "label": "drafted, and refused"},
}
LINE_HEIGHT = 0.31  # inches of one step
CHARACTERS = 36  # of one line of steps, at least; in a font whose characters are equally wide


@style()
def step_chart(steps: Sequence[DraftedStep], tokenizer: PreTrainedTokenizerBase) -> Figure:
    """Draw a line for each step: drafted tokens that came, the token that came behind them, and what was refused."""
    figure = canvas(LINE_HEIGHT * len(steps) + 1.2, width=6.4)
    axes = figure.subplots()
    ends = []
    for line, step in enumerate(steps):
        left = 0.0
        right = step.num_right
        parts = {"right": step.came[:right], "own": step.came[right:], "refused": step.draft[right:]}
        for kind, ids in parts.items():
            left += 1.5 * (kind == "refused")
            for name in token_names(tokenizer, ids):
                width = len(name) + 1
                axes.barh(line, width, 0.8, left=left, linewidth=1, gid=kind, **LOOKS[kind])
                write(axes, left + width / 2, line, name, family=MONO)
                left += width
        ends.append(left)
    axes.set(xlim=(-0.3, max(*ends, CHARACTERS) + 0.5), ylim=(len(steps) - 0.4, -0.6), xticks=[], ylabel="step")
    axes.set_yticks(range(len(steps)), [str(number) for number in range(1, len(steps) + 1)])
    hide_frame(axes)
    legend_below(figure, *[Patch(**look) for look in LOOKS.values()], ncols=3)
    return Figure(figure, step_summary(steps))


def step_summary(steps: Sequence[DraftedStep]) -> str:
    """Say how many tokens came in how many steps, and what became of the drafts."""
    tokens = sum(len(step.came) for step in steps)
    drafted = sum(len(step.draft) for step in steps)
    right = sum(step.num_right for step in steps)
    best = max(range(len(steps)), key=lambda place: len(steps[place].came))
    return (
        f"{plural(len(steps), 'step')} give {plural(tokens, 'token')}, and {right} of {drafted} drafted ones came. "
        f"A step gives {tokens / len(steps):.2f} tokens. Step {best + 1} gives the most: {len(steps[best].came)}."
    )


@style()
def guess_chart(counts: Mapping[str, Mapping[str, GuessCount]]) -> Figure:
    """Draw, for each kind of text, how many tokens are guessed by each length of n-gram, and how many rightly.

    ``counts``: name of a length -> kind of text -> its count.
    """
    kinds = list(next(iter(counts.values())))
    height = 0.8 / len(counts)
    figure = canvas(0.25 * len(counts) * len(kinds) + 1.3)
    panels = figure.subplots(1, 2, sharey=True)
    for index, (name, own) in enumerate(counts.items()):
        at = np.arange(len(kinds)) + (index - (len(counts) - 1) / 2) * height
        shares = [
            [100 * own[kind].guessed / own[kind].total for kind in kinds],
            [100 * own[kind].right / max(own[kind].guessed, 1) for kind in kinds],
        ]
        for axes, share in zip(panels, shares, strict=True):
            bars = axes.barh(at, share, height, label=name, **bar_look(index))
            axes.bar_label(bars, [f"{number:.0f}" for number in share], padding=3)
    for axes, label in zip(panels, ("tokens that are guessed (%)", "of these, right (%)"), strict=True):
        percent_axis(axes, 112)
        axes.set_xlabel(label)
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(kinds)), kinds)
    panels[0].invert_yaxis()
    legend_below(figure, *panels[0].get_legend_handles_labels()[0], ncols=len(counts))
    every = {name: sum(own.values(), NO_GUESSES) for name, own in counts.items()}
    first = one_by_one(
        "Right guesses by the tokens that are looked up",
        {name: f"{count.right / max(count.guessed, 1):.0%}" for name, count in every.items()},
    )
    sentences = [
        f"{kind}, {name}: {own[kind].guessed} of {own[kind].total} tokens are guessed, {own[kind].right} rightly."
        for name, own in counts.items()
        for kind in kinds
    ]
    return Figure(figure, " ".join([first, *sentences]), stacks=True)


@style()
def rows_chart(logs: Mapping[str, Sequence[StepOutput]], limit: int) -> Figure:
    """Draw the rows of each step of several runs: those of the scheduler, drafts that came, and drafts for nothing.

    ``limit``: the number of rows up to which drafts fill a step. Steps with a prompt are left out.
    """
    figure = canvas(1.9 * len(logs) + 1.0)
    panels = stacked(figure, len(logs), sharex=True, sharey=True)
    sentences, shares = [], {}
    for axes, (name, log) in zip(panels, logs.items(), strict=True):
        decodes = [step for step in log if all(rows == 1 for *_, rows in step.chunks)]
        own = np.array([len(step.chunks) for step in decodes])
        right = np.array([sum(step.accepted.values()) for step in decodes])
        refused = np.array([sum(step.drafted.values()) for step in decodes]) - right
        at = np.arange(len(decodes)) + 0.5
        below = np.zeros(len(decodes))
        for kind, rows in (("own", own), ("right", right), ("refused", refused)):
            axes.bar(at, rows, 0.9, bottom=below, linewidth=0.3, gid=kind, **LOOKS[kind])
            below += rows
        axes.axhline(limit, color="black", linestyle="--", linewidth=1.4)
        axes.set(ylabel="rows", title=name)
        axes.grid(axis="y")
        tokens = int(own.sum() + right.sum())
        shares[name] = f"{tokens / own.sum():.2f}"
        sentences.append(
            f"{name}: {plural(len(decodes), 'step')} with {int(own.sum())} rows of their own, {int(right.sum())} "
            f"drafted rows that came and {int(refused.sum())} for nothing."
        )
    panels[-1].set(xlabel="step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(12, integer=True))
    line = Line2D([], [], color="black", linestyle="--", label="limit (max_draft_rows)")
    legend_below(figure, *[Patch(**look) for look in LOOKS.values()], line, ncols=4)
    return Figure(figure, " ".join([one_by_one("Tokens that a request gets in a step", shares), *sentences]))


@style()
def chance_chart(weights: Sequence[int], runs: Mapping[str, Verified]) -> Figure:
    """Draw how often each token came in each run, beside the chance that the model's ``weights`` give it."""
    figure = canvas(3.4)
    axes = figure.subplots()
    width = 0.8 / (len(runs) + 1)
    tokens = np.arange(len(weights))
    shares = {"the model's chance": [100 * own / sum(weights) for own in weights]}
    shares |= {name: [100 * count / run.num_draws for count in run.counts] for name, run in runs.items()}
    for index, (name, share) in enumerate(shares.items()):
        axes.bar(tokens + (index - len(runs) / 2) * width, share, width, label=name, **bar_look(index))
    axes.set(xlabel="token", ylabel="draws (%)", xticks=tokens)
    axes.set_ylim(0, 1.1 * max(chain(*shares.values())))
    axes.grid(axis="y")
    legend_below(figure, ncols=3)
    accepted = {name: f"{run.num_right / run.num_draws:.0%}" for name, run in runs.items()}
    sentences = [
        f"{name}: {', '.join(str(count) for count in run.counts)}; chi-square {run.chi_square(weights):.1f}."
        for name, run in runs.items()
    ]
    return Figure(figure, " ".join([one_by_one("Drafts that are right", accepted), *sentences]))
