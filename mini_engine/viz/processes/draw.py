"""Pictures of many processes: who keeps which rows, what is rounded, what is exchanged, and how a fleet fares."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from mini_engine.viz.figure import (
    Figure,
    bar_look,
    canvas,
    label_log_axis,
    legend_below,
    line_look,
    one_by_one,
    plural,
    style,
    swatch,
    text_ground,
    write,
)
from mini_engine.viz.processes.fleet import Outcome
from mini_engine.viz.processes.parts import Band, Exchange

BAR = 0.7  # the width of a matrix


@style()
def split_chart(matrices: Mapping[str, Sequence[Band]], size: int) -> Figure:
    """Draw each matrix of a layer from its first row down, in the colours of the ranks that keep its rows."""
    figure = canvas(4.4, width=6.4)
    axes = figure.subplots()
    kept = [0] * size
    for place, own in enumerate(matrices.values()):
        for band in own:
            width = BAR / len(band.ranks)
            for column, rank in enumerate(band.ranks):
                left = place - BAR / 2 + column * width
                axes.bar(left, band.count, width, band.first, align="edge", linewidth=1.2, **bar_look(rank))
                kept[rank] += band.count
        for name in dict.fromkeys(band.name for band in own):
            rows = [band for band in own if band.name == name]
            middle = (rows[0].first + rows[-1].first + rows[-1].count) / 2
            write(axes, place, middle, name, bbox=text_ground(1.5))
    axes.set_xticks(range(len(matrices)), list(matrices))
    axes.tick_params(axis="x", length=0)
    axes.set(ylabel="row of the matrix")
    axes.invert_yaxis()
    looks = [bar_look(rank) for rank in range(size)]
    legend_below(
        figure, *(swatch(f"rank {rank}", look["color"], look["hatch"]) for rank, look in enumerate(looks)), ncols=4
    )
    words = {f"rank {rank}": count for rank, count in enumerate(kept)}
    return Figure(figure, one_by_one(f"Rows of a layer's matrices that each of {plural(size, 'rank')} keeps", words))


@style()
def rounding_chart(shares: Mapping[str, Mapping[int, float]]) -> Figure:
    """Draw how many numbers of a product are not the exact ones, by way and number of ranks."""
    figure = canvas(3.4)
    axes = figure.subplots()
    width = 0.8 / len(shares)
    words = dict[str, str]()
    for index, (way, own) in enumerate(shares.items()):
        at = [place - 0.4 + width * (index + 0.5) for place in range(len(own))]
        numbers = [100 * share for share in own.values()]
        bars = axes.bar(at, numbers, width, label=way, **bar_look(index))
        axes.bar_label(bars, [f"{number:.0f}" for number in numbers], padding=2)
        axes.set_xticks(range(len(own)), [str(size) for size in own])
        words |= {f"{way}, {plural(size, 'rank')}": f"{100 * share:.0f} %" for size, share in own.items()}
    axes.set(xlabel="ranks", ylabel="% of the numbers")
    axes.margins(y=0.15)
    legend_below(figure, *axes.get_legend_handles_labels()[0], ncols=2)
    return Figure(figure, one_by_one("Numbers of a product that differ from the exact one, rounded once", words))


@style()
def exchange_chart(layers: Mapping[int, Mapping[str, Exchange]]) -> Figure:
    """Draw the bytes that a rank receives in a layer for one row, by way and number of ranks."""
    figure = canvas(3.4)
    axes = figure.subplots()
    ways = list(next(iter(layers.values())))
    for index, way in enumerate(ways):
        own = [layer[way] for layer in layers.values()]
        count = max(each.count for each in own)
        sizes = [each.num_bytes / 1000 for each in own]
        axes.plot(range(len(own)), sizes, label=f"{way}: {plural(count, 'exchange')}", **line_look(index))
    axes.set_xticks(range(len(layers)), [str(size) for size in layers])
    axes.set(xlabel="ranks", ylabel="kB a layer and row", ylim=(0, None))
    axes.grid(axis="y")
    legend_below(figure, *axes.get_legend_handles_labels()[0], ncols=2)
    words = by_size(
        "A rank receives in a layer",
        {
            size: {way: f"{each.num_bytes / 1000:.1f} kB" for way, each in layer.items()}
            for size, layer in layers.items()
        },
    )
    return Figure(figure, words)


@style()
def speed_chart(steps: Mapping[str, Mapping[int, float]]) -> Figure:
    """Draw tokens a second by the number of ranks, for each network: its steps' seconds by number of ranks."""
    figure = canvas(3.8)
    axes = figure.subplots()
    sizes = list(next(iter(steps.values())))
    for index, (network, own) in enumerate(steps.items()):
        axes.plot(sizes, [1 / own[size] for size in sizes], label=network, **line_look(index))
    axes.set(xlabel="ranks", ylabel="tokens a second, at most", xscale="log", yscale="log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    label_log_axis(axes.yaxis, "{x:.0f}")
    axes.grid(axis="y")
    legend_below(figure, *axes.get_legend_handles_labels()[0], ncols=3)
    rates = {size: {network: f"{1 / own[size]:.0f}" for network, own in steps.items()} for size in sizes}
    return Figure(figure, by_size("Tokens a second on paper", rates))


def by_size(words: str, values: Mapping[int, Mapping[str, str]]) -> str:
    """Return a sentence for each number of ranks, the largest first."""
    return " ".join(one_by_one(f"{words}, {plural(size, 'rank')}", own) for size, own in [*values.items()][::-1])


@style()
def fleet_chart(outcomes: Mapping[str, Mapping[int, Outcome]]) -> Figure:
    """Draw the hit rate and the longest queue of each rule, by the number of workers."""
    figure = canvas(4.0)
    left, right = figure.subplots(1, 2)
    hits, queues = {}, []
    for index, (rule, found) in enumerate(outcomes.items()):
        lines(left, list(found), [100 * each.hit_rate for each in found.values()], rule, index)
        lines(right, list(found), [each.longest_queue for each in found.values()], rule, index)
        most = max(found)
        hits[rule] = f"{100 * found[most].hit_rate:.0f} %"
        queues.append(f"The longest queue of {rule}: {found[most].longest_queue}.")
    left.set(title="Prompt tokens from a cache", ylabel="%", ylim=(0, 100))
    right.set(title="The longest queue", ylabel="requests", ylim=(0, None))
    legend_below(figure, *left.get_legend_handles_labels()[0], ncols=2)
    first = one_by_one(f"Prompt tokens from a cache with {plural(most, 'worker')}", hits)
    return Figure(figure, " ".join([first, *queues]), stacks=True)


def lines(axes: Axes, sizes: Sequence[int], numbers: Sequence[float], label: str, index: int) -> None:
    """Draw one rule's numbers by the number of workers."""
    axes.plot(range(len(sizes)), numbers, label=label, **line_look(index))
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel("workers")
    axes.grid(axis="y")


@style()
def belief_chart(outcomes: Mapping[str, Outcome]) -> Figure:
    """Draw how many tokens a router believed to be cached that were not, added up over the requests."""
    figure = canvas(3.4)
    axes = figure.subplots()
    words = {}
    for index, (rule, outcome) in enumerate(outcomes.items()):
        total = [0, *accumulate(outcome.mistaken)]
        look = {key: value for key, value in line_look(index).items() if key != "marker"}
        axes.plot(range(len(total)), total, label=rule, **look)
        words[rule] = f"{total[-1]:,}"
    axes.set(xlabel="requests", ylabel="tokens believed by mistake", ylim=(0, None))
    axes.grid(axis="y")
    legend_below(figure, *axes.get_legend_handles_labels()[0], ncols=2)
    return Figure(figure, one_by_one("Tokens that were believed to be cached and were not", words))
