"""Lesson 4: what each stage of a sampler does to a distribution, and how often each token comes."""

from mini_engine.viz.sampling.draw import (
    draw_histogram,
    mixing_chart,
    order_table,
    penalty_chart,
    stage_bars,
    survivors_chart,
    temperature_sweep,
)
from mini_engine.viz.sampling.measure import (
    apply_in_order,
    chi_square,
    count_survivors,
    draw_many,
    draw_old_hash,
    entropy_bits,
    likeliest,
    mix_rows,
    next_logits,
    penalised_logits,
    sweep_temperature,
    think_arguments,
    think_ids,
    thought_kinds,
    trace_row,
)
from mini_engine.viz.sampling.sliders import stage_sliders
from mini_engine.viz.sampling.strips import Strip, surprise_chart, token_strips
