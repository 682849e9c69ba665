"""What L6's figures show agrees with trees and runs by hand and with brute force; the figures draw what is given."""

import random
from itertools import pairwise

import pytest
from matplotlib.patches import Rectangle

from mini_engine.attention.allocator import pages_needed
from mini_engine.bench import reuse
from mini_engine.checkpoint import TINY_MODEL
from mini_engine.config import EngineConfig
from mini_engine.llm import load_driver
from mini_engine.outputs import RequestOutput, StepOutput
from mini_engine.radix_cache import RadixCache
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.request import RequestTimes
from mini_engine.viz import prefixes
from mini_engine.viz.figure import Figure
from mini_engine.viz.prefixes.draw import HitCurves
from mini_engine.viz.prefixes.measure import Cell, Served, Visit
from mini_engine.viz.prefixes.tree import Box, Edge, Film, Frame
from mini_engine.viz.scheduling.measure import Run
from tests.support.figures import check_drawn, check_figures, checked_texts, texts


def small_film() -> Film:
    """Pages of 2 letters: grow, cut and hang, lock, evict a leaf and the tail of another."""
    cache = RadixCache(page_size=2)
    film = Film(cache)
    cache.insert(list(b"aabbcc"), [0, 1, 2])
    film.shoot("one")
    cache.insert(list(b"aaddeeff"), [9, 3, 4, 5])
    film.shoot("two")
    hit = cache.match(list(b"aabb"))
    cache.lock(hit)
    film.shoot("lock")
    assert cache.evict(3) == [2, 4, 5]
    film.shoot("evict")
    cache.insert(list(b"xx"), [7])
    film.shoot("other")
    return film


FILM = small_film()


def served(name, times, steps, pages, pool=12) -> Served:
    """``times``: seconds to the first token; ``steps``: chunks of each step; ``pages``: named, in use, kept."""
    log = [
        StepOutput(i, float(i), {}, [], chunks, {}, [], running, 0, 0, 0) for i, (running, chunks) in enumerate(steps)
    ]
    outputs = {
        key: RequestOutput(key, [0] * 10, [1], times=RequestTimes(1.0, tokens=[1.0 + own]))
        for key, own in zip("pqr", times, strict=True)
    }
    run = Run(name, log, outputs, dict(zip("pqr", "abc", strict=True)), EngineConfig(page_size=4), pool)
    return Served(run, *map(list, zip(*pages, strict=True)), None)


COLD = served(
    "cold",
    (0.010, 0.020, 0.090),
    [(3, [("p", 0, 10), ("q", 0, 10)]), (1, [("r", 0, 10), ("p", 10, 1)])],
    [(9, 9, 0), (3, 3, 0)],
)
WARM = served(
    "warm",
    (0.010, 0.012, 0.014),
    [(1, [("p", 0, 10)]), (3, [("q", 8, 2), ("r", 8, 2), ("p", 10, 1)]), (0, [("q", 10, 1)])],
    [(3, 3, 0), (9, 5, 1), (0, 0, 4)],
)
CURVES = {
    "low": HitCurves((4, 8, 12), {"lpm": (0.5, 0.5, 0.5), "fcfs": (0.1, 0.3, 0.5)}, 0.5, 11),
    "high": HitCurves((4, 8), {"lpm": (0.8, 0.8), "fcfs": (0.0, 0.2)}, 0.8, 40),
}
PROMPTS = [[1, 1, 2, 2, 9], [1, 1, 3], [1, 1, 2, 2, 8]]
VISITS = [[Visit(0, 0), Visit(2, 4), Visit(1, 2)], [Visit(0, 0), Visit(1, 2), Visit(2, 2)]]
KINDS = {"1": "first", "f": "found", "a": "again"}


def cells(*visits: str) -> list[Cell]:
    """A mark for each line of pages that a visit needs."""
    return [
        Cell(visit, line, KINDS[mark])
        for visit, marks in enumerate(visits)
        for line, mark in enumerate(marks)
        if mark in KINDS
    ]


CELLS = [cells("111", "ff.1", "f...1"), cells("111", "f...1", "fa.1")]


# --------------------------------------------------------------------------------------------- a tree, event by event


def test_trees_of_two_keys_stay_apart():
    cache = RadixCache(page_size=2)
    film = Film(cache)
    for key, page in ((None, 0), ("b", 1)):
        cache.insert(list(b"aa"), [page], key)
        film.shoot("one more")
    assert [(box.row, box.start, box.pages) for box in prefixes.tree.boxes(film.frames)[1]] == [
        (0, 0, (0,)),
        (1, 0, (1,)),
    ]


def test_what_was_evicted_and_came_back_between_two_frames_is_new():
    cache = RadixCache(page_size=2)
    film = Film(cache)
    cache.insert(list(b"aabb"), [0, 1])
    cache.insert(list(b"aacc"), [0, 2])
    film.shoot("before")
    cache.evict(3)
    cache.insert(list(b"aacc"), [5, 6])
    film.shoot("after")
    assert prefixes.tree.boxes(film.frames)[1] == [
        Box(0, 0, None, (5, 6), ("aa", "cc"), "new"),
        Box(1, 1, 0, (1,), ("bb",), "evicted"),
    ], "an edge lies in one line, and what is gone hangs below it"


def random_film(seed: int) -> Film:
    dice = random.Random(seed)
    cache = RadixCache(dice.choice([1, 2]))
    free = iter(range(10_000))
    film = Film(cache)
    hits = []
    for _ in range(25):
        tokens = [97 + dice.randrange(2) for _ in range(dice.randint(1, 9))]
        action = dice.choice(["insert", "insert", "lock", "unlock", "evict"])
        if action == "insert":
            cache.insert(tokens, [next(free) for _ in tokens])
        elif action == "lock":
            hits.append(cache.match(tokens))
            cache.lock(hits[-1])
        elif action == "unlock" and hits:
            cache.unlock(hits.pop())
        else:
            cache.evict(dice.randint(1, 4))
        film.shoot(action)
    return film


@pytest.mark.parametrize("seed", range(5))
def test_boxes_of_random_trees_are_the_tree(seed):
    film = random_film(seed)
    known: dict[int, tuple] = {}
    for frame, boxes in zip(film.frames, prefixes.tree.boxes(film.frames), strict=True):
        nodes = {edge.pages: edge for edge in frame.edges}
        now = {box.pages: box for box in boxes if box.state != "evicted"}
        assert set(now) == set(nodes), "a box for every node"
        for pages, box in now.items():
            edge = nodes[pages]
            assert (box.start, box.locks, box.texts) == (len(edge.path) - 1 - len(pages), edge.locks, edge.texts)
            assert box.state == ("kept" if pages[0] in known else "new")
        held = {page for pages in nodes for page in pages}
        gone = [page for box in boxes if box.state == "evicted" for page in box.pages]
        assert sorted(gone) == sorted(set(known) - held)
        assert all(
            known[page] == box.start + i for box in boxes if box.state == "evicted" for i, page in enumerate(box.pages)
        )
        for one, other in pairwise(boxes):
            assert one.row < other.row or one.start + len(one.pages) <= other.start, "two boxes in one place"
        lines = sorted({box.row for box in boxes})
        assert lines == list(range(len(lines))), "a line is empty"
        for box in boxes:
            ends = {(other.start + len(other.pages), other.row) for other in boxes}
            assert box.parent_row is None if box.start == 0 else (box.start, box.parent_row) in ends
        known = {page: box.start + i for box in now.values() for i, page in enumerate(box.pages)}


# ------------------------------------------------------------------------------------------ one request after the other


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_visits_find_what_the_measured_run_did_not_compute(policy):
    for seed in range(5):
        prompts = reuse.tree_load(prefixes.rng(seed), 4, 20)
        pages = max(pages_needed(len(prompt), 4) for prompt in prompts)
        for room in (pages, 3 * pages, 20 * pages):
            run = reuse.run_load(prompts, 4, policy, num_pages=room)
            made = prefixes.visits(run.chunks)
            assert [visit.prompt for visit in made] == run.order
            assert sorted(run.order) == list(range(20))
            assert sum(len(prompts[visit.prompt]) - visit.found for visit in made) == run.num_computed


def test_pages_by_hand():
    assert prefixes.page_cells(PROMPTS, 2, VISITS) == CELLS


# ------------------------------------------------------------------------------------------------- runs of the engine


def test_served_counts_shared_pages_once():
    driver = load_driver(TINY_MODEL, EngineConfig(batch_invariant=True))
    begin = list(range(100, 120))  # 20 tokens: five pages of 4
    prompts = [[*begin, 5, 6], [*begin, 7], [*begin, 8, 9, 10]]
    params = [SamplingParams(max_new_tokens=length, ignore_eos=True) for length in (3, 4, 3)]
    options = {"max_running_requests": 3, "page_size": 4, "num_pages": 30}
    cold = prefixes.serve_all("cold", driver, prompts, params, **options)
    warm = prefixes.serve_all("warm", driver, prompts, params, **options, prefix_cache="radix", wait_for_prefix=4)
    # All prompts in the first step. The first and the third request end in the third step.
    assert (cold.named, cold.in_use, cold.kept) == ([18, 18, 6, 0], [18, 18, 6, 0], [0, 0, 0, 0])
    assert (cold.num_prompt, cold.num_computed, cold.stats) == (66, 66, None)
    # The first alone; then the others find its 20 tokens, five pages. Each leaves one page more when it ends.
    assert (warm.named, warm.in_use, warm.kept) == ([6, 18, 12, 6, 0], [6, 8, 7, 6, 0], [0, 0, 1, 2, 8])
    assert warm.num_computed == 22 + 1 + 3
    assert warm.stats.num_tokens_hit == 40
    for run in (cold, warm):
        assert len(run.ttft_s) == 3
        assert all(seconds > 0 for seconds in run.ttft_s)
        assert [len(output.token_ids) for output in run.run.outputs.values()] == [3, 4, 3]


# ------------------------------------------------------------------------------------------------------------- figures


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return {
        "tree_film": prefixes.tree_film(FILM.frames),
        "page_map": prefixes.page_map(["lpm", "fcfs"], CELLS),
        "hit_rate_chart": prefixes.hit_rate_chart(CURVES),
        "first_token_chart": prefixes.first_token_chart([COLD, WARM]),
        "memory_chart": prefixes.memory_chart([COLD, WARM]),
    }


def test_every_figure_is_tested_and_readable(figures):
    check_figures(figures, prefixes.draw, prefixes.draw_tree)
    assert all(len(figure.figure.legends) == 1 for figure in figures.values())


def test_figures_draw_and_say_what_they_are_given(figures):
    drawn = {
        "hit_rate_chart": ([50, 10, 30, 80, 20, 11], "fcfs 0.0% with 4 pages, 20.0% with 8."),
        "first_token_chart": (
            [10, 20, 90, 12, 14, 30, 16],
            "warm: 3 requests, the first token after 12 ms (median), 10 to 14 ms; 14 of 30 prompt tokens computed.",
        ),
    }
    check_drawn(figures, drawn)


def rectangles(axes, kind=None):
    return sorted(
        (p.get_x(), p.get_y(), p.get_width())
        for p in axes.patches
        if isinstance(p, Rectangle) and kind in (None, p.get_gid())
    )


def test_film_says_what_changed_and_its_legend_only_what_is_there(figures):
    assert figures["tree_film"].summary == (
        "In the end the tree has 4 nodes, 4 pages held, 2 locked. "
        "1. one: 1 node, 3 pages held; new 'aabbcc'. 2. two: 3 nodes, 6 pages held; new 'ddeeff'. "
        "3. lock: 4 nodes, 6 pages held, 2 locked. 4. evict: 3 nodes, 3 pages held, 2 locked; evicted 'cc', 'eeff'. "
        "5. other: 4 nodes, 4 pages held, 2 locked; new 'xx'."
    )
    labels = [text.get_text() for text in figures["tree_film"].figure.legends[0].get_texts()]
    assert labels == ["new", "was there", "locked", "evicted"]
    first = prefixes.tree_film(FILM.frames[:2]).figure.legends[0]
    assert [text.get_text() for text in first.get_texts()] == ["new", "was there"]


def test_film_can_begin_later():
    late = prefixes.tree_film(FILM.frames, since=3)
    assert late.figure.axes[0].get_title(loc="left") == "4. evict\n3 pages held, 2 locked"
    assert len(rectangles(late.figure.axes[0], "evicted")) == 2, "what the frame left out had is known"
    assert ". 4. evict" in late.summary
    assert "3. lock" not in late.summary


def test_film_of_an_empty_tree():
    assert prefixes.tree_film([Frame("nothing", ())]).summary.endswith("1. nothing: 0 nodes, 0 pages held.")


def test_every_text_of_a_film_is_inside_its_page():
    edges = (
        Edge((None, (0,), (1,)), (0, 1), ("a", " was"), 0),
        Edge((None, (2,), (3,)), (2, 3), ("it was very long indeed", "."), 0),
    )
    figure = prefixes.tree_film([Frame("long", edges)])
    checked_texts(figure)
    axes = figure.figure.axes[0]
    assert len(axes.texts) == 8
    boxes = [patch.get_window_extent() for patch in axes.patches]
    inner = [line.get_window_extent().x0 for line in axes.lines if line.get_gid() == "page"]
    for text in axes.texts:
        own = text.get_window_extent()
        assert any(box.x0 < own.x0 and own.x1 < box.x1 and box.y0 < own.y0 and own.y1 < box.y1 for box in boxes), text
        assert not any(own.x0 < edge < own.x1 for edge in inner), text


def test_page_map_draws_a_cell_for_every_page(figures):
    panels = figures["page_map"].figure.axes
    titles = ("lpm: 5 pages computed, 0 again", "fcfs: 5 pages computed, 1 again")
    for axes, cells, title in zip(panels, CELLS, titles, strict=True):
        for kind in ("found", "first", "again"):
            assert rectangles(axes, kind) == sorted((c.visit + 0.5, c.line, 1) for c in cells if c.kind == kind)
        assert axes.get_title(loc="left") == title
        assert (*axes.get_xlim(), *axes.get_ylim()) == (0.5, 3.5, 5, 0)
    assert figures["page_map"].summary.endswith(
        "fcfs: 3 requests; of their pages 5 are computed for the first time, 1 again, 2 are found."
    )


def test_memory_is_stacked_and_beside_it_what_it_would_be(figures):
    cold, warm = figures["memory_chart"].figure.axes
    for axes, own in ((cold, COLD), (warm, WARM)):
        drawn = {patch.get_gid(): patch.get_data() for patch in axes.patches}
        assert drawn["in use"].values.tolist() == own.in_use
        assert drawn["kept"].baseline.tolist() == own.in_use
        assert (drawn["kept"].values - drawn["kept"].baseline).tolist() == own.kept
        assert drawn["named"].values.tolist() == own.named
        assert drawn["named"].edges.tolist() == list(range(len(own.named) + 1))
        (pool,) = [line for line in axes.lines if line.get_gid() == "pool"]
        assert set(pool.get_ydata()) == {12}
    assert warm.get_xlim() == (0, 3)
    assert "warm: 3 steps, at most 3 requests at once" in texts(figures["memory_chart"])
    assert figures["memory_chart"].summary == (
        "Most pages in use: 9 (cold), 5 (warm). "
        "cold: 2 steps, at most 3 requests at once; they have 9 pages at most, and without sharing would need 9; the "
        "pool has 12. warm: 3 steps, at most 3 requests at once; they have 5 pages at most, and without sharing would "
        "need 9; the pool has 12."
    )
