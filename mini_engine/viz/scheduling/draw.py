"""Pictures of runs of many requests: what each did in which step, pages in use, times under load, a stream."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from mini_engine.viz.figure import (
    COLORS,
    GRAY,
    MONO,
    SOFT,
    Figure,
    Look,
    canvas,
    dot_key,
    dots,
    legend_below,
    line_look,
    one_by_one,
    plural,
    stacked,
    style,
    swatch,
    text_ground,
    write,
)
from mini_engine.viz.scheduling.measure import Piece, Run, StreamLine, idle_share, rows_per_step, stays, timeline
from mini_engine.viz.scheduling.simulation import LoadPoint

# Kind -> fill, hatch, words. The fills also differ in lightness, for a print in grey.
LOOKS = {
    "waiting": ("white", "", "waits, or left out of the step"),
    "prompt": (SOFT, "", "prompt (tokens: at the left)"),
    "copied": ("#e8cf6e", "...", "prompt copied from its sibling"),
    "again": ("#d9603b", "xxx", "computed again"),
    "decode": ("#3d4f70", "///", "decodes, a token a step"),
}
IDLE: Look = {"facecolor": "#ececec", "hatch": "\\\\\\", "edgecolor": "#bdbdbd"}
TEXTS: dict[str, Look] = {  # of a stream
    "new": {"facecolor": SOFT, "edgecolor": "white", "label": "shown now"},
    "held": {"facecolor": "#f0c9a0", "hatch": "///", "edgecolor": "white", "label": "held back"},
    "cut": IDLE | {"label": "never shown: the stop string, and what follows it"},
}
LINE_HEIGHT = 0.31  # inches of one request or place
CHARACTERS = 88  # of one line of a stream, at least; in a font whose characters are equally wide


@style()
def request_gantt(run: Run) -> Figure:
    """Draw one line per request: when it waited, which chunks of its prompt were computed, when it decoded."""
    pieces = timeline(run)
    figure = canvas(LINE_HEIGHT * len(pieces) + 1.7)
    axes = figure.subplots()
    preempted = [(index, name) for index, step in enumerate(run.log) for name in step.preempted]
    for line, (request_id, own) in enumerate(pieces.items()):
        for piece in own:
            draw_piece(axes, line, piece.kind, piece.step, piece.length)
        if own:
            dots(axes, own[-1].step + own[-1].length, line, "|", 15, "black", markeredgewidth=2.6)
        sent_back = [index for index, name in preempted if name == request_id]
        dots(axes, sent_back, [line] * len(sent_back), "v", 8, "black")
    step_axes(axes, len(run.log), [f"{run.labels[name]}: {chunk_sizes(own)}" for name, own in pieces.items()])
    axes.set(ylabel="request: its chunks", title=run.name)
    used = {piece.kind for own in pieces.values() for piece in own}
    handles: list[Patch | Line2D] = [piece_key(kind) for kind in LOOKS if kind in used]
    handles.append(dot_key("|", 12, "black", "end", markeredgewidth=2.6))
    if preempted:
        handles.append(dot_key("v", 8, "black", "preempted"))
    legend_below(figure, *handles, ncols=4)
    return Figure(figure, gantt_summary(run))


def chunk_sizes(pieces: Sequence[Piece]) -> str:
    """Write how many prompt tokens came in each chunk, in the order of the steps."""
    return ", ".join(str(piece.tokens) for piece in pieces if piece.kind not in ("waiting", "decode"))


def gantt_summary(run: Run) -> str:
    """Say of every request how long it waited, in how many chunks its prompt came, and how it ended."""
    sentences = []
    longest = 0
    for request_id, pieces in timeline(run).items():
        chunks = [piece.tokens for piece in pieces if piece.kind == "prompt"]
        copied = sum(piece.tokens for piece in pieces if piece.kind == "copied")
        output = run.outputs[request_id]
        waited = sum(piece.length for piece in pieces if piece.kind == "waiting")
        longest = max(longest, waited)
        sentences.append(
            f"{run.labels[request_id]}: waits {plural(waited, 'step')}, "
            + (f"prompt in chunks of {', '.join(map(str, chunks))}, " if chunks else "")
            + (f"copies {plural(copied, 'token')}, " if copied else "")
            + (f"preempted {plural(output.num_preemptions, 'time')}, " if output.num_preemptions else "")
            + f"{plural(len(output.token_ids), 'token')}, ends by {output.finish_reason}."
        )
    requests, steps = plural(len(sentences), "request"), plural(len(run.log), "step")
    return f"{requests} share {steps}, and the longest wait is {plural(longest, 'step')}. {' '.join(sentences)}"


def draw_piece(axes: Axes, line: int, kind: str, start: int, length: int) -> None:
    """Draw one bar of a line. Waiting is a thin dotted line, because nothing is computed."""
    if kind == "waiting":
        axes.plot([start, start + length], [line, line], color=GRAY, linewidth=1.4, linestyle=":", gid="waiting")
        return
    color, hatch, _ = LOOKS[kind]
    axes.barh(line, length, 0.78, left=start, color=color, hatch=hatch, edgecolor="white", linewidth=1.2, gid=kind)


def piece_key(kind: str) -> Patch | Line2D:
    """Return the legend entry of a kind of piece."""
    color, hatch, words = LOOKS[kind]
    if kind == "waiting":
        return Line2D([], [], color=GRAY, linewidth=1.4, linestyle=":", label=words)
    return swatch(words, color, hatch)


def cell_text(axes: Axes, x: float, y: float, text: str, on_hatch: bool = True, **look: Any) -> None:
    """Write into a bar. ``on_hatch``: on a white ground, which keeps the text readable."""
    write(axes, x, y, text, bbox=text_ground(1) if on_hatch else None, gid="cell", **look)


def step_axes(axes: Axes, num_steps: int, labels: Sequence[str]) -> None:
    """Set up a chart with a line for each label, downwards, over steps."""
    axes.set(xlim=(-0.3, num_steps + 0.5), ylim=(len(labels) - 0.4, -0.6), xlabel="step")
    axes.set_yticks(range(len(labels)), labels)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


@style()
def occupancy_chart(runs: Sequence[Run]) -> Figure:
    """Draw the KV pool after every step of each run: slots with a token, empty slots of used pages, and the limit."""
    figure = canvas(2.3 * len(runs) + 1.0)
    panels = stacked(figure, len(runs), sharex=True)
    empty: Look = {"facecolor": COLORS[1], "hatch": "xxx", "edgecolor": "white"}
    for axes, run in zip(panels, runs, strict=True):
        size = run.config.page_size
        edges = np.arange(len(run.log) + 1)
        held = [step.num_tokens_held for step in run.log]
        used = [step.num_pages_used * size for step in run.log]
        axes.stairs(used, edges, baseline=held, fill=True, linewidth=0, **empty)
        axes.stairs(held, edges, fill=True, facecolor=SOFT, linewidth=0)
        axes.stairs(used, edges, color="black", linewidth=1.4, baseline=None)
        axes.axhline(run.num_pages * size, color="black", linestyle="--", linewidth=1.4)
        back = [index for index, step in enumerate(run.log) if step.preempted]
        dots(axes, back, [run.num_pages * size] * len(back), "v", 8, "black")
        axes.set(ylabel="tokens", title=run.name, ylim=(0, 1.12 * run.num_pages * size))
        axes.grid(axis="y")
    panels[-1].set(xlabel="step", xlim=(0, max(len(run.log) for run in runs)))
    panels[-1].xaxis.set_major_locator(MaxNLocator(12, integer=True))
    handles: list[Patch | Line2D] = [
        Patch(facecolor=SOFT, label="filled by tokens"),
        Patch(**empty, label="taken and empty: the waste"),
        Patch(facecolor="white", edgecolor=GRAY, label="free"),
        Line2D([], [], color="black", linestyle="--", label="the pool"),
    ]
    if any(step.preempted for run in runs for step in run.log):
        handles.append(dot_key("v", 8, "black", "preempted"))
    legend_below(figure, *handles, ncols=5)
    pages = {run.name: f"{np.mean([step.num_pages_used for step in run.log]):.1f} of {run.num_pages}" for run in runs}
    first = one_by_one("Pages in use, on average", pages)
    return Figure(figure, " ".join([first, *map(occupancy_sentence, runs)]))


def occupancy_sentence(run: Run) -> str:
    """Say how full the pool was, and how much of what was taken was empty."""
    used = [step.num_pages_used for step in run.log]
    taken = sum(used) * run.config.page_size
    waste = 1 - sum(step.num_tokens_held for step in run.log) / max(taken, 1)
    return (
        f"{run.name}: {plural(len(run.log), 'step')}, on average {np.mean(used):.1f} of {run.num_pages} pages in use, "
        f"at most {max(used)}; {waste:.1%} of the slots in them are empty; "
        f"{plural(sum(len(step.preempted) for step in run.log), 'time')} a request was preempted."
    )


@style()
def rows_chart(runs: Sequence[Run]) -> Figure:
    """Draw the rows of every step of each run by purpose, and the budget if there is one."""
    figure = canvas(2.2 * len(runs) + 1.0)
    panels = stacked(figure, len(runs), sharex=True, sharey=True)
    words = {"decode": "decodes", "prompt": "prompts", "again": "computed again"}
    tables = [rows_per_step(run) for run in runs]
    seen = [kind for kind in words if any(any(table[kind]) for table in tables)]
    for axes, run, table in zip(panels, runs, tables, strict=True):
        at = np.arange(len(run.log)) + 0.5
        below = np.zeros(len(run.log))
        for kind in seen:
            color, hatch, _ = LOOKS[kind]
            axes.bar(at, table[kind], 0.9, bottom=below, color=color, hatch=hatch, edgecolor="white", linewidth=0.3)
            below += table[kind]
        if run.config.max_tokens_per_step is not None:
            axes.axhline(run.config.max_tokens_per_step, color="black", linestyle="--", linewidth=1.4)
        axes.set(ylabel="rows", title=run.name)
        axes.grid(axis="y")
    panels[-1].set(xlabel="step", xlim=(0, max(len(run.log) for run in runs)))
    panels[-1].xaxis.set_major_locator(MaxNLocator(12, integer=True))
    budget = Line2D([], [], color="black", linestyle="--", label="budget (max_tokens_per_step)")
    legend_below(figure, *[swatch(words[kind], *LOOKS[kind][:2]) for kind in seen], budget, ncols=4)
    largest = {
        run.name: max(map(sum, zip(*table.values(), strict=True))) for run, table in zip(runs, tables, strict=True)
    }
    return Figure(figure, " ".join([one_by_one("Rows of the largest step", largest), *map(rows_sentence, runs)]))


def rows_sentence(run: Run) -> str:
    """Say how large the steps were, and what their rows were for."""
    table = rows_per_step(run)
    rows = np.array(list(table.values())).sum(0)
    parts = ", ".join(f"{sum(numbers)} {kind}" for kind, numbers in table.items())
    return (
        f"{run.name}: {plural(len(rows), 'step')} with {int(rows.sum())} rows ({parts}); the largest step has "
        f"{int(rows.max())}, on average they have {rows.mean():.1f}."
    )


@style()
def places_chart(runs: Sequence[Run]) -> Figure:
    """Draw the places of a batch over the steps of each run: which request had each, and when it was idle."""
    counts = [run.config.max_running_requests for run in runs]
    figure = canvas(LINE_HEIGHT * sum(counts) + 0.62 * len(runs) + 1.0)
    panels = stacked(figure, len(runs), sharex=True, height_ratios=[count + 0.1 for count in counts])
    longest = max(len(run.log) for run in runs)
    for axes, run, places in zip(panels, runs, counts, strict=True):
        axes.barh(range(places), len(run.log), 0.78, linewidth=0.8, **IDLE)
        for stay in stays(run):
            draw_piece(axes, stay.place, "prompt", stay.step, stay.prompt)
            draw_piece(axes, stay.place, "decode", stay.step + stay.prompt, stay.length - stay.prompt)
            cell_text(axes, stay.step + stay.length / 2, stay.place, run.labels[stay.request_id])
        step_axes(axes, longest, [str(place) for place in range(places)])
        axes.set(ylabel="place", xlabel="")
        axes.set_title(f"{run.name}: {len(run.log)} steps, {idle_share(run):.0%} of the places idle")
    panels[-1].set_xlabel("step")
    idle = Patch(**IDLE, label="empty")
    legend_below(figure, swatch("prompt", *LOOKS["prompt"][:2]), swatch("decodes", *LOOKS["decode"][:2]), idle, ncols=3)
    first = one_by_one("Places that are idle", {run.name: f"{idle_share(run):.0%}" for run in runs})
    return Figure(figure, " ".join([first, *map(places_sentence, runs)]))


def places_sentence(run: Run) -> str:
    """Say how long a run took and how much of it was idle."""
    tokens = sum(len(output.token_ids) for output in run.outputs.values())
    return (
        f"{run.name}: {plural(len(run.outputs), 'request')} with {tokens} new tokens in "
        f"{plural(len(run.log), 'step')}, {tokens / len(run.log):.2f} a step; {idle_share(run):.1%} of the "
        f"{run.config.max_running_requests} places are idle."
    )


@style()
def load_chart(curves: Mapping[str, Sequence[LoadPoint]], capacity: float) -> Figure:
    """Draw times over the rate of arrivals, a line for each policy. ``capacity``: requests a second at full load."""
    figure = canvas(4.4)
    panels = figure.subplots(1, 3)
    looks = {
        "ttft_mean": "to the first token: mean (s)",
        "ttft_p99": "to the first token: p99 (s)",
        "tpot_mean": "between tokens: mean (ms)",
    }
    for axes, (field, label) in zip(panels, looks.items(), strict=True):
        for index, (name, points) in enumerate(curves.items()):
            values = [getattr(point, field) * (1e3 if field == "tpot_mean" else 1) for point in points]
            look = line_look(index) | {"markersize": 7 - 1.2 * index}
            axes.plot([point.rate for point in points], values, label=name, **look)
        axes.axvline(capacity, color=GRAY, linestyle=":", linewidth=1.6)
        axes.set_title(label, fontsize=11)
        axes.set_xlabel("requests a second")
        axes.grid()
    for axes in panels[:2]:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    panels[2].set_ylim(0, None)
    limit = Line2D([], [], color=GRAY, linestyle=":", linewidth=1.6, label="what the engine can do")
    legend_below(figure, *panels[0].get_legend_handles_labels()[0], limit, ncols=len(curves) + 1)
    slowest = {name: f"{points[-1].ttft_mean * 1e3:.0f} ms" for name, points in curves.items()}
    first = one_by_one("Mean time to the first token at the highest rate", slowest)
    sentences = [load_sentence(name, points, capacity) for name, points in curves.items()]
    return Figure(figure, " ".join([first, *sentences]), stacks=True)


def load_sentence(name: str, points: Sequence[LoadPoint], capacity: float) -> str:
    """Say the times at the lowest and at the highest rate."""
    ends = [
        f"at {point.rate / capacity:.0%} of the capacity the first token comes after {point.ttft_mean * 1e3:.0f} ms on "
        f"average and 99 of 100 after {point.ttft_p99 * 1e3:.0f} ms, then one every {point.tpot_mean * 1e3:.1f} ms"
        for point in (points[0], points[-1])
    ]
    return f"{name}: {'; '.join(ends)}."


@style()
def stream_chart(lines: Sequence[StreamLine], stops: Sequence[str]) -> Figure:
    """Draw a stream token by token: the text shown before, what this token shows, and what ``stops`` hold back."""
    figure = canvas(LINE_HEIGHT * len(lines) + 1.4)
    axes = figure.subplots()
    pad = max(len(line.token) for line in lines)
    for row, line in enumerate(lines):
        left = len(line.before)
        mono(axes, 0, row, line.before, GRAY)
        for text, kind in ((line.new, "new"), (line.held, "cut" if line.cut else "held")):
            if text:
                axes.barh(row, len(text), 0.8, left=left, linewidth=0.8, gid=kind, **TEXTS[kind])
                mono(axes, left, row, text, "black")
            left += len(text)
    width = max(len(line.before + line.new + line.held) for line in lines)
    axes.set(xlim=(0, max(width + 1, CHARACTERS - pad)), ylim=(len(lines) - 0.4, -0.6), xticks=[])
    axes.set_yticks(range(len(lines)), [line.token for line in lines], family=MONO)
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    axes.set(ylabel="token", title=f"The text after each token; stop: {', '.join(map(repr, stops))}")
    legend_below(figure, *[Patch(**look) for look in TEXTS.values()], ncols=3)
    text = lines[-1].before + lines[-1].new
    held = [line for line in lines if line.held and not line.cut]
    return Figure(
        figure,
        f"After {len(held)} of {plural(len(lines), 'token')} text is held back, "
        f"{max((len(line.held) for line in held), default=0)} characters at most. Shown in the end: {text!r}.",
    )


def mono(axes: Axes, left: float, row: int, text: str, color: str) -> None:
    """Write text one character per unit of the axis, with line breaks made visible."""
    for index, character in enumerate(text.replace("\n", "⏎")):
        write(axes, left + index + 0.5, row, character, color=color, family=MONO, gid="character")
