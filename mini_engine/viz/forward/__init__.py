"""Lesson 1: what a forward pass computes, and where bits are lost."""

from mini_engine.viz.forward.draw import (
    attention_map,
    attention_overview,
    difference_chart,
    error_growth,
    residual_sizes,
)
from mini_engine.viz.forward.measure import RowByRow, error_curve, fused_norms, strongest_head, trace_forward
from mini_engine.viz.forward.sliders import head_sliders
