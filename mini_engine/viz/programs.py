"""Lesson 9: the scores of a choice, and what a program's calls cost."""

from collections.abc import Mapping, Sequence

import ipywidgets  # type: ignore[import-untyped]

from mini_engine.lang import Answer
from mini_engine.lang.choices import best_choice
from mini_engine.viz.columns import Column
from mini_engine.viz.figure import (
    FAINT,
    GRAY,
    SOFT,
    Figure,
    bar_look,
    canvas,
    hide_frame,
    legend_below,
    one_by_one,
    plural,
    style,
    text_ground,
    write,
)
from mini_engine.viz.sliders import column_slider
from mini_engine.viz.tokens import visible

METHODS = {
    "mean": "mean log-probability",
    "greedy": "tokens among the best",
    "unconditional": "mean, less without the prompt",
}

COUNTS = {"calls": "calls", "prompt_tokens": "tokens read, in prompts", "new_tokens": "tokens written"}


@style()
def score_chart(choices: Sequence[str], answer: Answer) -> Figure:
    """Draw what each method gives to each choice. The best choice of a method has the darker bar."""
    figure = canvas(0.34 * len(choices) + 1.1)
    panels = figure.subplots(1, len(METHODS), sharey=True)
    sentences = []
    for axes, (method, title) in zip(panels, METHODS.items(), strict=True):
        scores = answer.scores[method]
        best = best_choice(scores)
        bars = axes.barh(range(len(choices)), scores, color=[SOFT if i == best else FAINT for i in range(len(choices))])
        labels = [f"{score:.2f}" + (" ← best" if i == best else "") for i, score in enumerate(scores)]
        axes.bar_label(bars, labels, padding=3, color="black", label_type="edge")
        axes.axvline(0, color=GRAY, linewidth=1)
        axes.margins(x=0.75)
        axes.set_title(f"{method}:\n{title}", fontsize=11)
        axes.set_xticks([])
        hide_frame(axes)
        sentences.append(f"{method}: {', '.join(f'{c!r} {s:.2f}' for c, s in zip(choices, scores, strict=True))}")
    panels[0].set_yticks(range(len(choices)), [visible(choice) for choice in choices])
    panels[0].invert_yaxis()
    best_ones = {method: repr(choices[best_choice(answer.scores[method])]) for method in METHODS}
    first = one_by_one("The best choice by each method", best_ones)
    return Figure(figure, f"{first} A higher score is better. {'. '.join(sentences)}.")


def ahead_slider(costs: Mapping[int, Mapping[str, int]], first: int) -> ipywidgets.VBox:
    """Return a slider over tokens written ahead and, below it, what the program then costs.

    ``costs``: ``num_api_spec_tokens`` -> the counts of a run; ``first``: the number to begin with. A bar is a share of
    the largest count of all runs.
    """
    most = [max(stats[key] for stats in costs.values()) for key in COUNTS]
    columns = {}
    for ahead, stats in costs.items():
        counts = [stats[key] for key in COUNTS]
        shares = [100 * count / largest for count, largest in zip(counts, most, strict=True)]
        columns[ahead] = Column(f"{ahead} tokens ahead", shares, [0.0] * len(shares), [str(count) for count in counts])
    legend = ["count, as a share of the largest of all runs"]
    return column_slider("tokens written ahead", first, list(COUNTS.values()), columns, legend)


@style()
def cost_chart(runs: Mapping[str, Mapping[str, int]]) -> Figure:
    """Draw what the calls of each run cost: how many there are, and the tokens that they read and write."""
    figure = canvas(0.5 * len(runs) + 1.4)
    calls, tokens = figure.subplots(1, 2, sharey=True, width_ratios=[1, 3])
    places = range(len(runs))
    bars = calls.barh(places, [stats["calls"] for stats in runs.values()], color=SOFT)
    calls.bar_label(bars, padding=3)
    calls.margins(x=0.3)
    left = [0] * len(runs)
    for index, (key, label) in enumerate({"prompt_tokens": "read, in prompts", "new_tokens": "written"}.items()):
        counts = [stats[key] for stats in runs.values()]
        tokens.barh(places, counts, left=left, label=label, **bar_look(index))
        left = [a + b for a, b in zip(left, counts, strict=True)]
        for place, (end, count) in enumerate(zip(left, counts, strict=True)):
            write(tokens, end - count / 2, place, str(count), bbox=text_ground(1.5))
    for axes, title in ((calls, "calls"), (tokens, "tokens")):
        axes.set_title(title)
        axes.set_xticks([])
        hide_frame(axes)
    calls.set_yticks(places, list(runs))
    calls.invert_yaxis()
    legend_below(figure, ncols=2)
    sentences = [
        f"{name}: {plural(stats['calls'], 'call')}, {stats['prompt_tokens']} tokens read, {stats['new_tokens']} written"
        for name, stats in runs.items()
    ]
    first = one_by_one("Calls", {name: stats["calls"] for name, stats in runs.items()})
    return Figure(figure, f"{first} {'. '.join(sentences)}.")
