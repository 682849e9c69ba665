"""Lesson 6: the tree of a prefix cache, its hit rates, and the time and pages that it saves."""

from mini_engine.viz.prefixes.draw import HitCurves, first_token_chart, hit_rate_chart, memory_chart, page_map
from mini_engine.viz.prefixes.draw_tree import tree_film
from mini_engine.viz.prefixes.measure import eviction_loads, page_cells, rng, serve_all, visits
from mini_engine.viz.prefixes.slider import pool_slider
from mini_engine.viz.prefixes.tree import Film
