"""Lesson 12: what ranks keep and exchange, and what becomes of a fleet by the rule that sends requests."""

from mini_engine.viz.processes.draw import (
    belief_chart,
    exchange_chart,
    fleet_chart,
    rounding_chart,
    speed_chart,
    split_chart,
)
from mini_engine.viz.processes.fleet import MATCH, RULES, SILENT, Outcome, chats, endless, simulate
from mini_engine.viz.processes.parts import (
    GATHER,
    SUM,
    Band,
    Exchange,
    Network,
    differing,
    exchanges,
    kept_bands,
    step_seconds,
)
from mini_engine.viz.processes.slider import share_slider
