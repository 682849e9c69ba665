"""Lesson 5: runs of many requests, and what the log of an engine tells about them."""

from mini_engine.viz.scheduling.draw import (
    load_chart,
    occupancy_chart,
    places_chart,
    request_gantt,
    rows_chart,
    stream_chart,
)
from mini_engine.viz.scheduling.measure import (
    Arrival,
    idle_share,
    rows_per_step,
    serve,
    stream_lines,
    timeline,
    with_options,
)
from mini_engine.viz.scheduling.simulation import StepCost, capacity, load_point, measure_cost, poisson_jobs, simulate
from mini_engine.viz.scheduling.slider import budget_slider
