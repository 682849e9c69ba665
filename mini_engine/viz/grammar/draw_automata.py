"""Pictures of automata: states as circles, edges as arrows, forced edges in bold."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyArrowPatch
from matplotlib.path import Path

from mini_engine.viz.figure import (
    COLORS,
    FAINT,
    MONO,
    WIDTH,
    Figure,
    Look,
    canvas,
    legend_below,
    one_by_one,
    plural,
    stacked,
    style,
    text_ground,
    write,
)
from mini_engine.viz.grammar.automata import Arrow, Diagram

# All lengths are in inches.
RADIUS = 0.17  # of a state
LINE = 0.5  # from one line to the next
LEAST_GAP = 0.4  # around a label, from one column to the next
LETTER = 0.095  # width of a character
MARGIN = 0.32
LOOP = 0.3  # height of an arrow from a state to itself
HEAD = 0.15  # from the end of an arrow to its label
ABOVE = 0.13  # of the label of a forced arrow over its line
INSIDE = WIDTH - 0.3
MOST_STRETCH = 1.7  # factor by which the gaps of a narrow automaton grow
Point = tuple[float, float]


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
    grid = stacked(figure, len(drawn), height_ratios=heights)
    for axes, (title, picture) in zip(grid, drawn.items(), strict=True):
        picture.draw(axes)
        axes.set_title(title)
    legend_below(
        figure,
        Line2D([], [], color="black", linewidth=1),
        Line2D([], [], color=COLORS[0], linewidth=3),
        ring(13, "white"),
        (ring(13, FAINT), ring(9, FAINT)),
        labels=["an edge: one of these bytes", "forced: nothing else may come", "a state", "accepting"],
        handler_map={tuple: HandlerTuple(ndivide=1)},
        ncols=4,
    )
    states = one_by_one("States", {title: len(own.places) for title, own in panels.items()})
    return Figure(figure, " ".join([states, *(automaton_sentence(title, own) for title, own in panels.items())]))


def ring(size: float, color: str) -> Line2D:
    """Return a circle for a legend."""
    return Line2D([], [], linestyle="", marker="o", markersize=size, markerfacecolor=color, markeredgecolor="black")


def automaton_sentence(title: str, own: Diagram) -> str:
    """Say how large an automaton is, and which of its edges are forced."""
    forced = [repr(arrow.label) for arrow in own.arrows if arrow.is_forced]
    chains = f"{len(forced)} of them forced: {', '.join(forced)}" if forced else "none of them forced"
    return (
        f"{title}: {plural(len(own.places), 'state')}, {len(own.accepting)} accepting; "
        f"{plural(len(own.arrows), 'edge')}, {chains}."
    )


class AutomatonPicture:
    """One diagram in inches: its columns are as far apart as the labels between them need."""

    def __init__(self, own: Diagram) -> None:
        """Find the place of every column and the height of everything."""
        self.own = own
        gaps = [LEAST_GAP] * (own.num_columns - 1)
        for arrow, way in zip(own.arrows, own.ways, strict=True):
            if way:
                column = way[0][0]  # the label stands on the first piece
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
        look: Look = {"color": "black", "mutation_scale": 9, "shrinkA": 0, "shrinkB": 0, "gid": "start"}
        axes.add_patch(FancyArrowPatch((x - RADIUS - MARGIN, y), (x - RADIUS, y), arrowstyle="-|>", **look))
        for state, place in self.own.places.items():
            self.draw_state(axes, state, self.spot(place))

    def draw_state(self, axes: Axes, state: int, center: Point) -> None:
        """Draw a circle with its number, two circles if it accepts."""
        accepts = state in self.own.accepting
        fill, name = (FAINT, "accepting") if accepts else ("white", "state")
        look: Look = {"edgecolor": "black", "zorder": 3}
        axes.add_patch(Circle(center, RADIUS, facecolor=fill, linewidth=1.2, gid=name, **look))
        if accepts:
            axes.add_patch(Circle(center, RADIUS - 0.035, fill=False, linewidth=1.0, **look))
        write(axes, *center, f"{state}", gid="number", zorder=4)

    def draw_ahead(self, axes: Axes, arrow: Arrow, way: Sequence[tuple[int, float]]) -> None:
        """Draw an arrow to the right, in bends that leave and arrive level."""
        points = [self.spot(place) for place in way]
        points[0] = (points[0][0] + RADIUS, points[0][1])
        points[-1] = (points[-1][0] - RADIUS, points[-1][1])
        corners = [points[0]]
        codes = [Path.MOVETO]
        for (left, y), (right, next_y) in pairwise(points):
            middle = (left + right) / 2
            corners += [(middle, y), (middle, next_y), (right, next_y)]
            codes += [Path.CURVE4] * 3
        self.stroke(axes, arrow, Path(corners, codes))
        self.write_label(axes, arrow, self.label_spot(arrow, way, points[:2]))

    def label_spot(self, arrow: Arrow, way: Sequence[tuple[int, float]], ends: Sequence[Point]) -> Point:
        """Return where the label stands on the first piece of a way: at the end where fewer ways meet.

        ``ends`` of the piece, in inches.
        """
        (left, y), (right, next_y) = ends
        leaving = sum(bool(own) and own[0] == way[0] for own in self.own.ways)
        arriving = sum(way[1] in own for own in self.own.ways if own and own[0] != way[1])
        side = min(HEAD + LETTER * len(arrow.label) / 2, (right - left) / 2)
        x = right - side if leaving > arriving else left + side if leaving < arriving else (left + right) / 2
        above = ABOVE if arrow.is_forced and y == next_y else 0.0
        t = np.linspace(0, 1)
        done = np.interp((x - left) / (right - left), 1.5 * t * (1 - t) + t**3, 3 * t**2 - 2 * t**3)  # the bend
        return x, y + float(done) * (next_y - y) - above

    def draw_loop(self, axes: Axes, arrow: Arrow) -> None:
        """Draw an arrow from a state to itself, above it."""
        x, y = self.spot(self.own.places[arrow.source])
        high = y - RADIUS - 1.25 * LOOP
        wide = 0.22
        low = y - RADIUS + 0.03
        corners = [(x - 0.09, low), (x - wide, high), (x + wide, high), (x + 0.09, low)]
        self.stroke(axes, arrow, Path(corners, [Path.MOVETO] + [Path.CURVE4] * 3))
        self.write_label(axes, arrow, (x, y - RADIUS - LOOP + 0.02))

    def draw_back(self, axes: Axes, arrow: Arrow, depth: float) -> None:
        """Draw an arrow that leads back, below everything."""
        (right, y), (left, end) = (self.spot(self.own.places[state]) for state in (arrow.source, arrow.target))
        down = [(right, y + RADIUS), (right, depth), (right - 0.15, depth), (right - 0.4, depth)]
        up = [(left + 0.4, depth), (left + 0.15, depth), (left, depth), (left, end + RADIUS)]
        codes = [Path.MOVETO, *[Path.CURVE4] * 3, Path.LINETO, *[Path.CURVE4] * 3]
        self.stroke(axes, arrow, Path(down + up, codes))
        self.write_label(axes, arrow, ((left + right) / 2, depth))

    def stroke(self, axes: Axes, arrow: Arrow, path: Path) -> None:
        """Draw the line of an arrow: bold if it is forced."""
        look: Look = {"color": "black", "linewidth": 1.0, "mutation_scale": 10, "gid": "edge"}
        if arrow.is_forced:
            look = {"color": COLORS[0], "linewidth": 2.8, "mutation_scale": 14, "gid": "forced"}
        ends: Look = {"capstyle": "butt", "joinstyle": "miter"}
        axes.add_patch(FancyArrowPatch(path=path, arrowstyle="-|>", fill=True, **look, **ends))

    def write_label(self, axes: Axes, arrow: Arrow, center: Point) -> None:
        """Write the label of an arrow on its line."""
        look: Look = {"fontsize": 11, "family": MONO, "weight": "bold" if arrow.is_forced else "normal"}
        write(axes, *center, arrow.label, gid="label", zorder=2, bbox=text_ground(0.6), **look)
