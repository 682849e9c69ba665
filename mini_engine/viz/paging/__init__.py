"""Lesson 2: pages, slots and masks of a ragged batch, and what padding would cost."""

from mini_engine.viz.paging.draw import bits_table, mask_alignment, packed_mask, padding_cost, page_map, slot_map
from mini_engine.viz.paging.measure import measure_padding, run_together, with_page_size
from mini_engine.viz.paging.slider import page_size_slider
