"""Lesson 7: automata, the masks of their states, and what masks do to answers."""

from mini_engine.viz.grammar.automata import bytes_label, diagram
from mini_engine.viz.grammar.draw import backend_chart, mask_picture, mask_table
from mini_engine.viz.grammar.draw_answers import jump_chart, language_chart, mask_chart, shift_chart
from mini_engine.viz.grammar.draw_automata import automaton_chart
from mini_engine.viz.grammar.measure import (
    allowed_tokens,
    answer_with_jumps,
    enumerate_language,
    follow_answer,
    installed_backends,
    state_masks,
    time_backends,
)
from mini_engine.viz.grammar.slider import draw_step, step_slider
