"""A slider over the columns of a group, with the error and the bytes that belong to it below it."""

from collections.abc import Mapping

import ipywidgets  # type: ignore[import-untyped]

from mini_engine.viz.columns import Column
from mini_engine.viz.quantized.measure import FORMATS, GroupError
from mini_engine.viz.sliders import column_slider


def group_slider(errors: Mapping[int, GroupError], first: int) -> ipywidgets.VBox:
    """Return a slider over the sizes of groups and, below it, the error and the bytes of a weight in 4 bits.

    ``first``: the size to begin with. A bar of bytes is a share of bfloat16's, one of errors of the largest error.
    """
    largest = max(error.error for error in errors.values())
    columns = {}
    for size, own in errors.items():
        shares = [100 * own.error / largest, 100 * own.num_bytes / FORMATS["bfloat16"]]
        words = [f"{100 * own.error:.1f} % of the weights", f"{own.num_bytes:.3f} of {FORMATS['bfloat16']:.0f} bytes"]
        columns[size] = Column(f"Groups of {size} columns", shares, [0.0, 0.0], words)
    return column_slider("columns of a group", first, ["error", "bytes of a weight"], columns, ["in 4 bits"])
