"""Lesson 3: next-token distributions along a greedy decode, and what a KV cache saves."""

from mini_engine.viz.decoding.draw import cache_cost, crossroads_chart, probability_bars, top_tokens, uncertainty
from mini_engine.viz.decoding.measure import (
    CLOSE_BITS,
    closest_steps,
    contrasting_steps,
    crossroads_texts,
    describe_steps,
    max_entropy_bits,
    measure_decode,
    take_other_way,
)
from mini_engine.viz.decoding.slider import step_slider
