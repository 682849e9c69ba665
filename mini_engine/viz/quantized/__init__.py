"""Lesson 11: what rounding does to weights, how much an answer notices, and what a step then reads."""

from mini_engine.viz.quantized.draw import error_chart, kl_chart, level_chart, roof_chart, speed_chart
from mini_engine.viz.quantized.measure import (
    FORMATS,
    GroupError,
    Product,
    group_errors,
    kl_by_part,
    row_of,
    row_values,
    step_bytes,
)
from mini_engine.viz.quantized.slider import group_slider
