"""Lesson 8: what limits a kernel, how it rounds, and what it does inside. Importing this does not import Triton."""

from mini_engine.viz.kernels.draw import block_picture, divergence_chart, search_chart
from mini_engine.viz.kernels.draw_rounding import error_chart, softmax_walk
from mini_engine.viz.kernels.draw_work import program_table, roofline, split_scaling
from mini_engine.viz.kernels.measure import (
    ALONE,
    OUTSIDE,
    TOGETHER,
    batch_divergence,
    bitmask_block,
    engine_launch,
    interpret_kernels,
    measure_roof,
    search_cut,
)
from mini_engine.viz.kernels.rounding import BLOCKS, accumulation_errors, online_softmax
from mini_engine.viz.kernels.sliders import split_sliders
from mini_engine.viz.kernels.work import (
    H200,
    QWEN3_0_6B,
    DecodeLaunch,
    measured_shares,
    split_launches,
    step_operations,
)
