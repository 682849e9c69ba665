"""Sliders over a decode step and its splits, with the share of the bandwidth below them."""

import ipywidgets  # type: ignore[import-untyped]

from mini_engine.viz.columns import Column, bar_table
from mini_engine.viz.figure import plural
from mini_engine.viz.kernels.measure import engine_launch
from mini_engine.viz.kernels.work import PROCESSORS, TILE, DecodeLaunch
from mini_engine.viz.sliders import slider, with_picture

CONTEXTS = tuple(2**power for power in range(10, 16))
SPLITS = tuple(TILE * 2**power for power in range(10))


def split_sliders(batch: int, context: int, split_size: int) -> ipywidgets.VBox:
    """Return three sliders and, below them, the share of the bandwidth of three ways to launch the step.

    They begin at ``batch`` sequences of ``context`` keys, in splits of ``split_size`` keys.
    """
    controls = [
        slider("sequences", batch, min=1, max=PROCESSORS),
        slider("keys of each", context, options=CONTEXTS),
        slider("keys of a split", split_size, options=SPLITS),
    ]

    def draw() -> str:
        batch, context, split_size = (control.value for control in controls)
        launches = {
            "one program for each head": DecodeLaunch(batch, context, context),
            "the splits above": DecodeLaunch(batch, context, min(split_size, context)),
            "the engine's splits": engine_launch(batch, context),
        }
        shares = [100 * own.bandwidth_share for own in launches.values()]
        words = [
            f"{share:.0f} %, {plural(own.num_programs, 'program')}, {plural(own.num_waves, 'wave')}"
            for share, own in zip(shares, launches.values(), strict=True)
        ]
        column = Column(f"{plural(batch, 'sequence')} of {context:,} keys", shares, [0.0] * len(shares), words)
        return bar_table(list(launches), [column], ["share of the bandwidth (%)"])

    return with_picture(controls, draw)
