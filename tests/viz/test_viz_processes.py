"""What L12's figures show agrees with counting by hand, and its fleet with sums on paper and texts side by side."""

import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from mini_engine.checkpoint import TINY_MODEL, load_config
from mini_engine.processes.routing import Node
from mini_engine.router.simulation import Limits, Session, Turn
from mini_engine.viz import processes
from mini_engine.viz.figure import Figure
from mini_engine.viz.kernels.work import QWEN3_0_6B
from mini_engine.viz.processes import draw, fleet
from mini_engine.viz.processes.fleet import Outcome
from mini_engine.viz.processes.parts import Band, Exchange, Network
from tests.support.figures import check_drawn, check_figures

BANDS = {
    "q, k": [Band("q", 0, 30, (0,)), Band("q", 30, 30, (1,)), Band("k", 60, 20, (0, 1))],
    "o": [Band("o", 0, 25, (0,)), Band("o", 25, 25, (1,))],
}
LAYERS = {
    1: {"gather": Exchange(0, 0.0), "sum": Exchange(0, 0.0)},
    2: {"gather": Exchange(4, 5000.0), "sum": Exchange(2, 2500.0)},
}
OUTCOMES = {1: Outcome(0.5, 3, [0, 2]), 4: Outcome(0.75, 6, [5, 1])}


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return {
        "split_chart": processes.split_chart(BANDS, 2),
        "rounding_chart": processes.rounding_chart({"gather": {1: 0.0, 2: 0.0}, "sum": {1: 0.0, 2: 0.25}}),
        "exchange_chart": processes.exchange_chart(LAYERS),
        "speed_chart": processes.speed_chart({"near": {1: 0.01, 2: 0.005}, "far": {1: 0.01, 2: 0.02}}),
        "fleet_chart": processes.fleet_chart({"match": OUTCOMES, "in turns": OUTCOMES}),
        "belief_chart": processes.belief_chart({"told": OUTCOMES[1], "not told": OUTCOMES[4]}),
    }


def test_every_figure_is_tested_and_readable(figures):
    check_figures(figures, draw)


def test_figures_draw_and_say_what_they_are_given(figures):
    drawn = {
        "split_chart": ([30, 20, 25], "2 ranks keeps: 75 (rank 0), 75 (rank 1)."),
        "rounding_chart": ([25], "0 % (gather, 2 ranks), 0 % (sum, 1 rank), 25 % (sum, 2 ranks)."),
        "exchange_chart": ([5, 2.5], "A rank receives in a layer, 2 ranks: 5.0 kB (gather), 2.5 kB (sum). A rank"),
        "speed_chart": ([100, 200, 50], "Tokens a second on paper, 2 ranks: 200 (near), 50 (far). Tokens"),
        "fleet_chart": (
            [50, 75, 3, 6],
            "with 4 workers: 75 % (match), 75 % (in turns). The longest queue of match: 6.",
        ),
        "belief_chart": ([0, 2, 5, 6], "2 (told), 6 (not told)."),
    }
    check_drawn(figures, drawn)


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_keep_the_rows_of_their_heads(size):
    config = load_config(TINY_MODEL)
    for name, bands in processes.kept_bands(config, size).items():
        rows = [row for band in bands for row in range(band.first, band.first + band.count)]
        assert rows == list(range(len(rows))), name
        kept = [sum(band.count for band in bands if rank in band.ranks) for rank in range(size)]
        assert kept == [len(rows) // size] * size
    stack = processes.kept_bands(config, size)["q, k, v"]
    assert [band.name for band in stack] == [name for name in "qkv" for _ in range(size)]


def test_key_value_heads_are_kept_by_neighbours_where_they_are_few():
    values = [band for band in processes.kept_bands(QWEN3_0_6B, 16)["q, k, v"] if band.name == "v"]
    assert [band.ranks for band in values] == [(2 * head, 2 * head + 1) for head in range(8)]


def test_a_sum_of_one_part_is_the_product_and_a_gather_always():
    found = processes.differing((1, 2), rows=8, columns=256)
    assert found["gather"] == {1: 0.0, 2: 0.0}
    assert found["sum"][1] == 0.0
    assert found["sum"][2] > 0.05


def test_exchanges_and_steps_are_counted():
    layer = processes.exchanges(QWEN3_0_6B, 4)
    assert layer == {
        "gather": Exchange(4, 2 * 3 * (2048 + 1024 + 3072 + 1024) / 4),
        "sum": Exchange(2, 2 * 3 * 2 * 2048 / 4),
    }
    weights = sum(torch.Size(shape).numel() for shape in QWEN3_0_6B.weight_shapes().values())
    exchange = 28 * (4 * 1e-3 + layer["gather"].num_bytes / 1e6)
    seconds = processes.step_seconds(QWEN3_0_6B, 4, Network("n", 1e-3, 1e6), memory=1e9)
    assert math.isclose(seconds, 2 * weights / 4 / 1e9 + exchange)
    assert processes.step_seconds(QWEN3_0_6B, 1, Network("n", 1e-3, 1e6), memory=1e9) == 2 * weights / 1e9


def whole(sessions: list[Session]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Each prompt with what will be answered, in the order of time if every answer is there at once."""
    timed = []
    for session in sessions:
        text, when = (), session.arrival_s
        for place, turn in enumerate(session.turns):
            when += turn.pause_s if place else 0.0
            prompt = (*text, *turn.own)
            text = (*prompt, *turn.answer)
            timed.append((when, prompt, text))
    return {prompt: text for _, prompt, text in sorted(timed)}


def common(text: Sequence[int], other: Sequence[int]) -> int:
    return max(length for length in range(len(text) + 1) if text[:length] == other[:length])


def test_an_endless_cache_finds_the_longest_beginning_of_all_earlier_texts():
    chats = processes.chats(40, seed=3, gap_s=0.3)
    texts = whole(chats)
    found = [
        max((common(own, other) for other in list(texts.values())[:place]), default=0)
        for place, own in enumerate(texts)
    ]
    assert processes.endless(chats) == sum(found) / sum(map(len, texts))


def test_rules_fare_as_their_names_say():
    chats = processes.chats(40, seed=3, gap_s=0.3)
    found = {rule: processes.simulate(chats, rule, 3, pool=10**6) for rule in (*processes.RULES, processes.SILENT)}
    for outcome in found.values():
        assert len(outcome.mistaken) == sum(len(session.turns) for session in chats)
    bound = processes.endless(chats)
    assert all(0.95 * bound < found[rule].hit_rate <= bound for rule in (processes.MATCH, "hashing"))
    assert all(found[rule].hit_rate < 0.8 * bound for rule in ("two choices", "round robin"))
    assert found[processes.SILENT] == found[processes.MATCH], "nothing was dropped"
    assert processes.simulate(chats, processes.MATCH, 3, pool=10**6, share=1.0).hit_rate < 0.9 * bound
    alone = [processes.simulate(chats, rule, 1, pool=600) for rule in processes.RULES]
    assert len({(outcome.hit_rate, outcome.longest_queue) for outcome in alone}) == 1


def test_what_was_believed_and_not_found_is_counted():
    early = [Session(when, [Turn([1] * 200, [0])]) for when in (0.0, 0.1, 99.0)]  # the second while the first computes
    assert processes.simulate(early, processes.MATCH, 1, pool=1000).mistaken == [0, 199, 0]
    again = [Session(100.0 * place, [Turn([token] * 50, [0])]) for place, token in enumerate([1, 2, 1])]
    assert processes.simulate(again, processes.MATCH, 1, pool=70).mistaken == [0, 0, 0]
    assert processes.simulate(again, processes.SILENT, 1, pool=70).mistaken == [0, 0, 50 - 1 - 19]  # 70 less 51 stayed
    assert processes.simulate(again, "round robin", 1, pool=70).mistaken == [0, 0, 0]


def test_who_is_told_believes_what_the_workers_hold():
    rule = fleet.Match(share=0.5, is_told=True)
    served = fleet.Fleet(rule, 3, fleet.COSTS, Limits(400, 4, 128))
    chats = processes.chats(60, seed=5, gap_s=0.3)
    served.run(chats)
    assert rule.queues == {"w000": 0, "w001": 0, "w002": 0}
    for name, worker in served.workers.items():
        assert worker.cache.num_tokens == 400
        assert sum(1 for _ in nodes(rule.trees[name].root)) == 400
        for text in whole(chats).values():
            assert rule.trees[name].match(text) == worker.cache.match(text)


def nodes(node: Node) -> Iterator[Node]:
    for child in node.values():
        yield child
        yield from nodes(child)


def test_the_slider_shows_what_its_share_gives():
    box = processes.share_slider({0.25: OUTCOMES[1], 0.5: OUTCOMES[4]}, first=0.25)
    control, picture = box.children
    assert "50 % of the prompt tokens" in picture.value
    control.value = 0.5
    assert "6 requests" in picture.value
    assert "above 50% of the request" in picture.value
