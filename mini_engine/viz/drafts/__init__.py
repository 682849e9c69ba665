"""Lesson 10: what drafts gave in each step, how often guesses are right, and two ways to verify them."""

from mini_engine.viz.drafts.draw import chance_chart, guess_chart, rows_chart, step_chart
from mini_engine.viz.drafts.measure import NO_GUESSES, count_guesses, drafted_steps, steps_with, verified
from mini_engine.viz.drafts.slider import length_slider
