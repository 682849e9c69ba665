"""A slider over page sizes, with the pages of each sequence below it."""

from collections.abc import Mapping, Sequence

import ipywidgets  # type: ignore[import-untyped]

from mini_engine.attention.allocator import pages_needed
from mini_engine.viz.columns import Column
from mini_engine.viz.figure import plural
from mini_engine.viz.sliders import column_slider


def page_size_slider(lengths: Mapping[str, int], sizes: Sequence[int], first: int) -> ipywidgets.VBox:
    """Return a slider over ``sizes`` and, below it, how many pages each sequence has and how much of them is empty.

    ``lengths``: the tokens of every named sequence; ``first``: the size to begin with, in slots.
    """
    columns = {size: size_column(list(lengths.values()), size) for size in sizes}
    names = [f"{name}: {plural(length, 'token')}" for name, length in lengths.items()]
    legend = ["share of its slots that hold a token", "empty"]
    return column_slider("page size", first, names, columns, legend)


def size_column(lengths: Sequence[int], size: int) -> Column:
    """Count the pages of ``size`` slots of every sequence, and the share of their slots that is filled."""
    pages = [pages_needed(length, size) for length in lengths]
    slots = size * sum(pages)
    filled = [100 * length / (count * size) for length, count in zip(lengths, pages, strict=True)]
    words = [
        f"{plural(count, 'page')}, {count * size - length} empty" for length, count in zip(lengths, pages, strict=True)
    ]
    heading = f"{plural(sum(pages), 'page')}; {slots - sum(lengths)} of {slots} slots are empty"
    return Column(heading, filled, [100 - share for share in filled], words)
