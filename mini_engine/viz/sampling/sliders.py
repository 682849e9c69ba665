"""Sliders for five sampling parameters, with the stages of one distribution below them."""

from collections.abc import Sequence

import ipywidgets  # type: ignore[import-untyped]
from torch import Tensor

from mini_engine.sampler.params import SamplingParams
from mini_engine.viz.sampling.draw import stage_table
from mini_engine.viz.sampling.measure import trace_row
from mini_engine.viz.sliders import slider, with_picture

# name of a parameter -> (least, largest, step, first position)
RANGES: dict[str, tuple[float, float, float, float]] = {
    "repetition_penalty": (1.0, 2.0, 0.05, 1.05),
    "temperature": (0.1, 3.0, 0.1, 0.8),
    "top_k": (0, 40, 1, 8),
    "top_p": (0.05, 1.0, 0.05, 0.8),
    "min_p": (0.0, 0.5, 0.02, 0.2),
}


def stage_sliders(
    logits: Tensor, prompt_ids: Sequence[int], token_ids: Sequence[int], names: Sequence[str]
) -> ipywidgets.VBox:
    """Return a slider for each of ``RANGES`` and, below them, the stages of ``logits`` [V], as in ``stage_bars``."""
    sliders = {
        name: slider(name, first, min=least, max=most, step=step) for name, (least, most, step, first) in RANGES.items()
    }

    def draw() -> str:
        params = SamplingParams(**{name: widget.value for name, widget in sliders.items()})
        return stage_table(trace_row(logits, params, prompt_ids), token_ids, names)

    return with_picture(list(sliders.values()), draw)
