"""Pictures of masks, and of what they cost in each backend."""

from collections.abc import Sequence
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray
from torch import Tensor

from mini_engine.grammar.masks import BITS, pack_allowed
from mini_engine.viz.figure import (
    COLORS,
    GRAY,
    MARKERS,
    MONO,
    Figure,
    add_box,
    canvas,
    colour_grid,
    dots,
    hide_frame,
    label_log_axis,
    legend_below,
    line_look,
    one_by_one,
    plural,
    style,
    write,
)
from mini_engine.viz.grammar.measure import Timing

ALLOWED, BANNED = "#1f4f8f", "#f1f1f1"
MARKS = {b" ": "␣", b'"': '"', b"0": "0", b"a": "a", b"m": "m", b"\x80": "80"}  # first bytes that get a tick
PARTS = {
    "Compile": ("milliseconds", 1e3),
    "A mask, first visit": ("microseconds", 1e6),
    "A mask, second visit": ("microseconds", 1e6),
}


@style()
def mask_table(masks: Tensor, names: Sequence[str], forced: Sequence[str]) -> Figure:
    """Draw the masks of a few states bit by bit, the highest bit first, and as the integers that they are stored in.

    ``masks`` [S, V] bool; ``names`` of the V <= 32 tokens; ``forced``: the text that must follow in each state.
    """
    num_states, size = masks.shape
    assert size <= BITS, "a row of one word"
    words = pack_allowed(masks)[:, 0].tolist()
    figure = canvas(0.36 * num_states + 1.5)
    axes = figure.subplots()
    for state in range(num_states):
        for token in range(size):
            draw_bit(axes, size - 1 - token, state, bool(masks[state, token]))
        for shift, word in ((1.0, f"{words[state]}"), (2.4, forced[state] or "–")):
            write(axes, size + shift, state + 0.5, word, fontsize=11, family=MONO, gid="word")
    axes.set(xlim=(0, size + 3.2), ylim=(num_states, 0), ylabel="state")
    labels = [f"{token}: {name}" for token, name in enumerate(names)][::-1]
    axes.set_xticks(np.arange(size) + 0.4, labels, rotation=35, ha="left")
    for shift, heading in ((1.0, "as an\nint32"), (2.4, "forces\nnext")):
        write(axes, size + shift, -0.6, heading)
    axes.set_yticks(np.arange(num_states) + 0.5, [f"{state}" for state in range(num_states)])
    axes.xaxis.tick_top()
    hide_frame(axes)
    axes.set_title("One bit per token, token 0 on the right", pad=10)
    sentences = [
        f"State {state}: {', '.join(repr(names[token]) for token in row.nonzero()[:, 0].tolist())}; the word is "
        f"{words[state]}."
        for state, row in enumerate(masks)
    ]
    least, most = (int(number) for number in masks.sum(1).aminmax())
    first = f"The masks of {plural(num_states, 'state')} allow {least} to {most} of {plural(size, 'token')}."
    return Figure(figure, " ".join([first, *sentences]))


def draw_bit(axes: Axes, column: int, line: int, is_allowed: bool) -> None:
    """Draw one bit of a mask: white and bold on dark if it allows its token."""
    name, fill = ("allowed", ALLOWED) if is_allowed else ("banned", BANNED)
    ink = {"color": "white", "weight": "bold"} if is_allowed else {"color": GRAY}
    add_box(axes, column + 0.04, line + 0.06, 0.92, 0.88, facecolor=fill, gid=name)
    write(axes, column + 0.5, line + 0.5, f"{int(is_allowed)}", gid="bit", **ink)


@style()
def mask_picture(masks: Tensor, spellings: Sequence[bytes], visited: Sequence[int]) -> Figure:
    """Draw all masks of an automaton as one picture: a line per state, a column per token in the order of its bytes.

    ``masks`` [S, V] bool; tokens without bytes stand on the right. ``visited``: the states of an answer, in order.
    """
    num_states, size = masks.shape
    order = sorted(range(size), key=lambda token: (not spellings[token], spellings[token], token))
    counts = masks.sum(1).numpy()
    figure = canvas(min(0.085 * num_states, 6.0) + 1.6)
    picture, bars = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    colour_grid(picture, widened(masks[:, order].numpy()), ["white", ALLOWED])
    firsts = [spellings[token][:1] for token in order]
    marks = [mark for mark in MARKS if mark in firsts]
    picture.set_xticks([firsts.index(mark) for mark in marks], [MARKS[mark] for mark in marks])
    picture.set(xlabel="tokens, in the order of their bytes; ticks: where a first byte begins", ylabel="state")
    picture.set_title(f"{num_states} states × {size} tokens: dark is allowed")
    bars.barh(np.arange(num_states) + 0.5, counts, 0.8, color=COLORS[0], gid="count")
    left = np.full(len(visited), 0.75)
    lines = np.array(visited) + 0.5
    dots(bars, left, lines, MARKERS[9], 6, "black", label="visited by the answer", gid="visited", clip_on=False)
    bars.set_xscale("log")
    bars.set(xlim=(0.6, 2 * size), xlabel="tokens allowed", title="How many")
    label_log_axis(bars.xaxis, "{x:.0f}")
    for axes in (picture, bars):
        axes.spines[["top", "right"]].set_visible(axes is picture)
    legend_below(figure)
    distinct = len(masks.unique(dim=0))
    return Figure(
        figure,
        f"{plural(num_states, 'state')}, {plural(distinct, 'different mask')}. {masks.float().mean():.1%} of the "
        f"{masks.numel()} bits are set; {plural(int((counts == 1).sum()), 'state')} with a single token, the widest "
        f"with {counts.max()}. An answer visits {len(set(visited))} of them in {len(visited)} steps.",
    )


def widened(allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return ``allowed`` [S, V] with marks wide enough to be seen: in a large vocabulary a column is under a pixel."""
    shown = allowed.copy()
    for shift in range(1, 1 + allowed.shape[1] // 250):
        shown[:, shift:] |= allowed[:, :-shift]
    return shown


@style()
def backend_chart(timings: Sequence[Timing]) -> Figure:
    """Draw what grammars cost in each backend: to compile, to fill a mask for the first time, and to fill it again."""
    grammars, backends = (list(dict.fromkeys(getattr(t, part) for t in timings)) for part in ("grammar", "backend"))
    figure = canvas(0.22 * len(grammars) * (len(backends) + 1) + 1.5)
    grid = figure.subplots(1, 3, sharey=True)
    grid[2].sharex(grid[1])
    for axes, (part, (unit, factor)) in zip(grid, PARTS.items(), strict=True):
        for index, backend in enumerate(backends):
            own = [timing for timing in timings if timing.backend == backend]
            lines = [grammars.index(timing.grammar) * (len(backends) + 1) + index for timing in own]
            spans = [factor * np.array(times_of(timing, part)) for timing in own]
            middles = np.array([median(span) for span in spans])
            ends = [middles - [min(span) for span in spans], [max(span) for span in spans] - middles]
            look = line_look(index) | {"linestyle": "", "markersize": 7, "elinewidth": 1.2}
            axes.errorbar(middles, lines, xerr=ends, label=backend, **look)
        axes.set_xscale("log")
        label_log_axis(axes.xaxis, "{x:g}")
        axes.set(title=part, xlabel=unit if part == "Compile" else f"{unit}\n(median, least to most)")
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
    middle = (len(backends) - 1) / 2
    grid[0].set_yticks([i * (len(backends) + 1) + middle for i in range(len(grammars))], grammars)
    grid[0].set_ylim(len(grammars) * (len(backends) + 1) - 1, -1)
    legend_below(figure, *grid[0].get_legend_handles_labels()[0], ncols=len(backends))
    slowest = {
        backend: f"{1e3 * max(timing.compile_s for timing in timings if timing.backend == backend):.1f} ms"
        for backend in backends
    }
    first = one_by_one("Longest time to compile, measured here", slowest)
    return Figure(figure, " ".join([first, *map(timing_sentence, timings)]))


def times_of(timing: Timing, part: str) -> Sequence[float]:
    """Return the seconds that the panel ``part`` draws."""
    return {"Compile": [timing.compile_s], "A mask, first visit": timing.first}.get(part, timing.again)


def timing_sentence(timing: Timing) -> str:
    """Say the times of one grammar in one backend."""
    first, most, again = (1e6 * seconds for seconds in (median(timing.first), max(timing.first), median(timing.again)))
    return (
        f"{timing.grammar} in {timing.backend}: compile {1e3 * timing.compile_s:.1f} ms, a mask {first:.1f} µs at "
        f"first (at most {most:.0f}), {again:.1f} µs again."
    )
