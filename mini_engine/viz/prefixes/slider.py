"""A slider over sizes of the pool, with the hit rate of each order below it."""

import ipywidgets  # type: ignore[import-untyped]

from mini_engine.viz.columns import Column
from mini_engine.viz.prefixes.draw import HitCurves
from mini_engine.viz.sliders import column_slider


def pool_slider(curves: HitCurves, first: int) -> ipywidgets.VBox:
    """Return a slider over the sizes of ``curves`` and, below it, the hit rates there. ``first``: where it begins."""
    columns = {}
    for index, size in enumerate(curves.pages):
        found = [100 * rates[index] for rates in curves.rates.values()]
        missing = [max(0.0, 100 * curves.bound - share) for share in found]
        heading = f"{size} pages; the bound is {curves.bound:.1%}"
        columns[size] = Column(heading, found, missing, [f"{share:.1f}" for share in found])
    legend = ["hit rate (%)", "missing to the bound"]
    return column_slider("pages in the pool", first, list(curves.rates), columns, legend)
