"""Replicas: what the rules that send requests to workers are worth, simulated."""

from mini_engine.viz.routing.draw import route_chart
