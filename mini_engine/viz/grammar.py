"""L7 in pictures: automata, the masks of their states, and what the compilers cost.

Owns: drawings. Must not know: layouts (``grammar_automata``), how anything was measured (``grammar_runs``).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle
from matplotlib.path import Path
from torch import Tensor

from mini_engine.grammar.masks import BITS, pack_allowed
from mini_engine.viz.figure import COLORS, FAINT, GRAY, MARKERS, WIDTH, Figure, canvas, plural, style
from mini_engine.viz.grammar_automata import Arrow, Diagram
from mini_engine.viz.grammar_runs import Timing

RADIUS = 0.17  # inches, as is everything in the picture of an automaton
LINE, LEAST_GAP, LETTER = 0.5, 0.4, 0.095  # between lines; beside a label; of one character
MOST_STRETCH = 1.7  # of the gaps, in an automaton that is narrower than the page
MARGIN, LOOP, ABOVE = 0.32, 0.3, 0.13
INSIDE = WIDTH - 0.3
ALLOWED, BANNED = "#1f4f8f", "#f1f1f1"
MARKS = {b" ": "␣", b'"': '"', b"0": "0", b"a": "a", b"m": "m", b"\x80": "80"}  # first bytes that get a tick
PARTS = {"Compile": ("milliseconds", 1e3), "A mask, first visit": ("microseconds", 1e6),
         "A mask, second visit": ("microseconds", 1e6)}  # fmt: skip
Point = tuple[float, float]


# ------------------------------------------------------------------------------------------------------------- automata


@style()
def automaton_chart(panels: Mapping[str, Diagram]) -> Figure:
    """Draw automata one above the other, each with its title. Raises ``ValueError`` for one that is too wide."""
    drawn = {title: AutomatonPicture(own) for title, own in panels.items()}
    for title, picture in drawn.items():
        if picture.width > INSIDE:
            raise ValueError(
                f"the automaton {title!r} would be {picture.width:.1f} inches wide, above {INSIDE:.1f}; draw it "
                "compressed, or take a shorter grammar"
            )
    heights = [picture.height for picture in drawn.values()]
    figure = canvas(sum(heights) + 0.42 * len(drawn) + 0.45)
    grid = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, picture) in zip(grid, drawn.items(), strict=True):
        picture.draw(axes)
        axes.set_title(title)
    figure.legend(handles=[
        Line2D([], [], color="black", linewidth=1),
        Line2D([], [], color=COLORS[0], linewidth=3),
        ring(13, "white"), (ring(13, FAINT), ring(9, FAINT)),
    ], labels=["an edge: one of these bytes", "forced: nothing else may come", "a state", "accepting"],
        handler_map={tuple: HandlerTuple(ndivide=1)}, loc="outside lower center", ncols=4)  # fmt: skip
    return Figure(figure, " ".join(automaton_sentence(title, own) for title, own in panels.items()))


def ring(size: float, color: str) -> Line2D:
    """Return a circle for a legend."""
    return Line2D([], [], linestyle="", marker="o", markersize=size, markerfacecolor=color, markeredgecolor="black")


def automaton_sentence(title: str, own: Diagram) -> str:
    """Say how large an automaton is, and what it forces."""
    forced = [repr(arrow.label) for arrow in own.arrows if arrow.is_forced]
    chains = f"{len(forced)} of them forced: {', '.join(forced)}" if forced else "none of them forced"
    return (
        f"{title}: {plural(len(own.places), 'state')}, {len(own.accepting)} accepting; "
        f"{plural(len(own.arrows), 'edge')}, {chains}."
    )


class AutomatonPicture:
    """One diagram on paper, in inches: columns as far apart as their labels need."""

    def __init__(self, own: Diagram) -> None:
        """Find the place of every column and the height of everything."""
        self.own = own
        gaps = [LEAST_GAP] * (own.num_columns - 1)
        for arrow, way in zip(own.arrows, own.ways, strict=True):
            if way:
                column = label_segment(way)[0][0]
                gaps[column] = max(gaps[column], LEAST_GAP + LETTER * len(arrow.label))
        loops = [arrow for arrow in own.arrows if arrow.source == arrow.target]
        last = max([len(a.label) for a in loops if own.places[a.source][0] == own.num_columns - 1], default=0)
        ends = 2 * RADIUS * own.num_columns + MARGIN + max(MARGIN, LETTER * last / 2)
        stretch = max(1.0, min(MOST_STRETCH, (INSIDE - ends) / max(sum(gaps), 1e-9)))
        self.columns = [MARGIN + RADIUS]
        for gap in gaps:
            self.columns.append(self.columns[-1] + stretch * gap + 2 * RADIUS)
        self.width = ends + stretch * sum(gaps)
        lines = [line for _, line in own.places.values()] + [line for way in own.ways for _, line in way]
        self.top = -MARGIN / 2 - RADIUS - LOOP * any(own.places[a.source][1] < 0.75 for a in loops)
        self.bottom = max(lines) * LINE + RADIUS + MARGIN / 2
        self.num_back = sum(not way and a.source != a.target for a, way in zip(own.arrows, own.ways, strict=True))
        self.height = self.bottom + 0.4 * self.num_back - self.top

    def spot(self, place: tuple[int, float]) -> Point:
        """Return where a place is, in inches."""
        return self.columns[place[0]], place[1] * LINE

    def draw(self, axes: Axes) -> None:
        """Draw arrows, their labels, and the states over them."""
        axes.set_axis_off()
        axes.set(xlim=(0, INSIDE), ylim=(self.top + self.height, self.top))
        axes.set_aspect("equal", anchor="NW")
        backs = 0
        for arrow, way in zip(self.own.arrows, self.own.ways, strict=True):
            if way:
                self.draw_ahead(axes, arrow, way)
            elif arrow.source == arrow.target:
                self.draw_loop(axes, arrow)
            else:
                backs += 1
                self.draw_back(axes, arrow, self.bottom + 0.4 * backs - 0.2)
        x, y = self.spot(self.own.places[0])
        axes.add_patch(FancyArrowPatch((x - RADIUS - MARGIN, y), (x - RADIUS, y), arrowstyle="-|>", mutation_scale=9,
                                       color="black", shrinkA=0, shrinkB=0, gid="start"))  # fmt: skip
        for state, place in self.own.places.items():
            self.draw_state(axes, state, self.spot(place))

    def draw_state(self, axes: Axes, state: int, center: Point) -> None:
        """Draw a circle with its number, two circles if it accepts."""
        accepts = state in self.own.accepting
        axes.add_patch(Circle(center, RADIUS, facecolor=FAINT if accepts else "white", edgecolor="black",
                              linewidth=1.2, gid="accepting" if accepts else "state", zorder=3))  # fmt: skip
        if accepts:
            axes.add_patch(Circle(center, RADIUS - 0.035, fill=False, edgecolor="black", linewidth=1.0, zorder=3))
        axes.text(*center, f"{state}", ha="center", va="center", fontsize=10, gid="number", zorder=4)

    def draw_ahead(self, axes: Axes, arrow: Arrow, way: Sequence[tuple[int, float]]) -> None:
        """Draw an arrow to the right, in bends that leave and arrive level."""
        points = [self.spot(place) for place in way]
        points[0], points[-1] = (points[0][0] + RADIUS, points[0][1]), (points[-1][0] - RADIUS, points[-1][1])
        corners, codes = [points[0]], [Path.MOVETO]
        for (left, y), (right, next_y) in pairwise(points):
            middle = (left + right) / 2
            corners += [(middle, y), (middle, next_y), (right, next_y)]
            codes += [Path.CURVE4] * 3
        self.stroke(axes, arrow, Path(corners, codes))
        one, other = label_segment(way)
        left, right = self.spot(one)[0], self.spot(other)[0]
        y, next_y = self.spot(one)[1], self.spot(other)[1]
        above = ABOVE if arrow.is_forced and y == next_y else 0.0
        self.write(axes, arrow, ((left + right) / 2, (y + next_y) / 2 - above))

    def draw_loop(self, axes: Axes, arrow: Arrow) -> None:
        """Draw an arrow from a state to itself, above it."""
        x, y = self.spot(self.own.places[arrow.source])
        high, wide = y - RADIUS - 1.25 * LOOP, 0.22
        path = Path([(x - 0.09, y - RADIUS + 0.03), (x - wide, high), (x + wide, high), (x + 0.09, y - RADIUS + 0.03)],
                    [Path.MOVETO] + [Path.CURVE4] * 3)  # fmt: skip
        self.stroke(axes, arrow, path)
        self.write(axes, arrow, (x, y - RADIUS - LOOP + 0.02))

    def draw_back(self, axes: Axes, arrow: Arrow, depth: float) -> None:
        """Draw an arrow that leads back, below everything."""
        (right, y), (left, end) = (self.spot(self.own.places[state]) for state in (arrow.source, arrow.target))
        path = Path([(right, y + RADIUS), (right, depth), (right - 0.15, depth), (right - 0.4, depth),
                     (left + 0.4, depth), (left + 0.15, depth), (left, depth), (left, end + RADIUS)],
                    [Path.MOVETO, *[Path.CURVE4] * 3, Path.LINETO, *[Path.CURVE4] * 3])  # fmt: skip
        self.stroke(axes, arrow, path)
        self.write(axes, arrow, ((left + right) / 2, depth))

    def stroke(self, axes: Axes, arrow: Arrow, path: Path) -> None:
        """Draw the line of an arrow: bold if it is forced."""
        axes.add_patch(FancyArrowPatch(
            path=path, arrowstyle="-|>", mutation_scale=14 if arrow.is_forced else 10, fill=True,
            color=COLORS[0] if arrow.is_forced else "black", linewidth=2.8 if arrow.is_forced else 1.0,
            capstyle="butt", joinstyle="miter", gid="forced" if arrow.is_forced else "edge",
        ))  # fmt: skip

    def write(self, axes: Axes, arrow: Arrow, center: Point) -> None:
        """Write the label of an arrow on its line."""
        axes.text(*center, arrow.label, ha="center", va="center", fontsize=11, family="DejaVu Sans Mono", gid="label",
                  weight="bold" if arrow.is_forced else "normal", zorder=2,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # fmt: skip


def label_segment(way: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], tuple[int, float]]:
    """Return the piece of a way on which its label stands: the first, where ways have parted the least is next."""
    return way[0], way[1]


# ---------------------------------------------------------------------------------------------------------------- masks


@style()
def mask_table(masks: Tensor, names: Sequence[str], forced: Sequence[str]) -> Figure:
    """Draw the masks of a few states bit by bit, highest first, and as the numbers that the words are.

    ``masks`` [S, V] bool; ``names`` of the V <= 32 tokens; ``forced``: what each state forces, as text.
    """
    num_states, size = masks.shape
    assert size <= BITS, "a row of one word"
    words = pack_allowed(masks)[:, 0].tolist()
    figure = canvas(0.36 * num_states + 1.5)
    axes = figure.subplots()
    for state in range(num_states):
        for token in range(size):
            column, is_allowed = size - 1 - token, bool(masks[state, token])
            name, fill, ink = ("allowed", ALLOWED, "white") if is_allowed else ("banned", BANNED, GRAY)
            axes.add_patch(Rectangle((column + 0.04, state + 0.06), 0.92, 0.88, facecolor=fill, gid=name))
            axes.text(column + 0.5, state + 0.5, f"{int(is_allowed)}", ha="center", va="center", fontsize=10,
                      color=ink, weight="bold" if is_allowed else "normal", gid="bit")  # fmt: skip
        for shift, word in ((1.0, f"{words[state]}"), (2.4, forced[state] or "–")):
            axes.text(size + shift, state + 0.5, word, ha="center", va="center", fontsize=11, gid="word",
                      family="DejaVu Sans Mono")  # fmt: skip
    axes.set(xlim=(0, size + 3.2), ylim=(num_states, 0), ylabel="state")
    labels = [f"{name}\n{token}" for token, name in enumerate(names)][::-1]
    axes.set_xticks([*np.arange(size) + 0.5, size + 1.0, size + 2.4], [*labels, "as an\nint32", "forces\nnext"])
    axes.set_yticks(np.arange(num_states) + 0.5, [f"{state}" for state in range(num_states)])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("One bit per token, token 0 on the right", pad=10)
    sentences = [
        f"State {state}: {', '.join(repr(names[token]) for token in row.nonzero()[:, 0].tolist())}; the word is "
        f"{words[state]}."
        for state, row in enumerate(masks)
    ]
    return Figure(figure, f"{plural(num_states, 'state')} and {plural(size, 'token')}. " + " ".join(sentences))


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
    picture.imshow(masks[:, order].numpy(), cmap=ListedColormap(["white", ALLOWED]), aspect="auto",
                   interpolation="nearest", extent=(0, size, num_states, 0))  # fmt: skip
    firsts = [spellings[token][:1] for token in order]
    marks = [mark for mark in MARKS if mark in firsts]
    picture.set_xticks([firsts.index(mark) for mark in marks], [MARKS[mark] for mark in marks])
    picture.set(xlabel="tokens, in the order of their bytes; ticks: where a first byte begins", ylabel="state")
    picture.set_title(f"{num_states} states × {size} tokens: dark is allowed")
    bars.barh(np.arange(num_states) + 0.5, counts, 0.8, color=COLORS[0], gid="count")
    bars.plot(np.full(len(visited), 0.75), np.array(visited) + 0.5, linestyle="", marker=MARKERS[9], color="black",
              markersize=6, label="visited by the answer", gid="visited", clip_on=False)  # fmt: skip
    bars.set_xscale("log")
    bars.set(xlim=(0.6, 2 * size), xlabel="tokens allowed", title="How many")
    bars.xaxis.set_major_formatter("{x:.0f}")
    for axes in (picture, bars):
        axes.spines[["top", "right"]].set_visible(axes is picture)
    figure.legend(loc="outside lower center")
    distinct = len(masks.unique(dim=0))
    return Figure(
        figure,
        f"{plural(num_states, 'state')}, {plural(distinct, 'different mask')}. {masks.float().mean():.1%} of the "
        f"{masks.numel()} bits are set; {plural(int((counts == 1).sum()), 'state')} with a single token, the widest "
        f"with {counts.max()}. An answer visits {len(set(visited))} of them in {len(visited)} steps.",
    )


# ------------------------------------------------------------------------------------------------------------- backends


@style()
def backend_chart(timings: Sequence[Timing]) -> Figure:
    """Draw what grammars cost in each backend: compiling, a mask the first time, a mask again. Log scales."""
    grammars, backends = (list(dict.fromkeys(getattr(t, part) for t in timings)) for part in ("grammar", "backend"))
    figure = canvas(0.22 * len(grammars) * (len(backends) + 1) + 1.5)
    grid = figure.subplots(1, 3, sharey=True)
    grid[2].sharex(grid[1])
    for axes, (part, (unit, factor)) in zip(grid, PARTS.items(), strict=True):
        for index, backend in enumerate(backends):
            own = [timing for timing in timings if timing.backend == backend]
            lines = [grammars.index(timing.grammar) * (len(backends) + 1) + index for timing in own]
            spans = [[factor * seconds for seconds in times_of(timing, part)] for timing in own]
            middles = [median(span) for span in spans]
            ends = [[middle - min(span) for middle, span in zip(middles, spans, strict=True)],
                    [max(span) - middle for middle, span in zip(middles, spans, strict=True)]]  # fmt: skip
            axes.errorbar(middles, lines, xerr=ends, linestyle="", marker=MARKERS[index], markersize=7,
                          color=COLORS[index], elinewidth=1.2, label=backend)  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(title=part, xlabel=unit if part == "Compile" else f"{unit}\n(median, least to most)")
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
    middle = (len(backends) - 1) / 2
    grid[0].set_yticks([i * (len(backends) + 1) + middle for i in range(len(grammars))], grammars)
    grid[0].set_ylim(len(grammars) * (len(backends) + 1) - 1, -1)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(backends))
    return Figure(figure, "On this machine. " + " ".join(timing_sentence(timing) for timing in timings))


def times_of(timing: Timing, part: str) -> Sequence[float]:
    """Return the seconds that a panel draws."""
    return {"Compile": [timing.compile_s], "A mask, first visit": timing.first}.get(part, timing.again)


def timing_sentence(timing: Timing) -> str:
    """Say the times of one grammar in one backend."""
    first, most, again = (1e6 * seconds for seconds in (median(timing.first), max(timing.first), median(timing.again)))
    return (
        f"{timing.grammar} in {timing.backend}: compile {1e3 * timing.compile_s:.1f} ms, a mask {first:.1f} µs at "
        f"first (at most {most:.0f}), {again:.1f} µs again."
    )
