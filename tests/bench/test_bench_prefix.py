"""The benchmark of the radix cache: its loads, its arithmetic, and one short run through the command."""

import json
import random

import pytest
from typer.testing import CliRunner

from mini_engine.bench.prefix import LOADS, OFF, ON, Served, TreeFigures, chain, goals, make_rows, measure_tree
from mini_engine.cli.app import app


def drawer(seed):
    source = random.Random(seed)
    return lambda size: source.choices(range(1000), k=size)


def test_loads_are_what_their_names_say():
    loads = {name: make(drawer(0)) for name, make in LOADS.items()}
    (shared,) = loads["shared"]
    assert len(shared) == 64
    assert all(turn.own[:512] == shared[0].own[:512] and 16 <= len(turn.own) - 512 <= 32 for turn in shared)
    assert [len(wave) for wave in loads["chat"]] == [8] * 4
    assert [turn.parent for turn in loads["chat"][2]] == list(range(8))
    assert [len(wave) for wave in loads["tree"]] == [1, 3, 9, 27]
    assert [turn.parent for turn in loads["tree"][2]] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    (shots,) = loads["few-shot"]
    assert len({tuple(turn.own[:384]) for turn in shots}) == 4
    (alone,) = loads["unshared"]
    assert len({tuple(turn.own[:16]) for turn in alone}) == len(alone)


def test_rows_are_medians_of_ratios_within_a_round():
    def round_(off, on, wait_off, wait_on):
        return {
            OFF: Served(off, 100, [wait_off] * 3, 10, None, 0),
            ON: Served(on, 100, [wait_on, wait_on, 9 * wait_on], 10, 0.5, 2),
        }

    rows = make_rows("shared", [round_(8, 2, 4, 1), round_(80, 10, 40, 4), round_(6, 1, 6, 2)])
    assert [(row.speedup, row.ttft_speedup) for row in rows] == [(1, 1), (6, 4)]
    assert (rows[1].output_tokens_per_s, rows[1].ttft_p50) == (50, 2)
    assert (rows[1].hit_rate, rows[1].evicted) == (0.5, 2)
    tree = TreeFigures(99, 0, 0, 0, 0, 0)
    assert [reached for _, _, reached in goals("0.6b", "bfloat16", rows, tree)] == [True, True, False]
    assert len(goals("tiny", "float32", rows, tree)) == 1


def test_the_plain_peer_of_the_tree_finds_what_it_was_given():
    known = {}
    numbers = iter(range(1, 100))
    last = chain(known, list(range(64)), lambda: next(numbers))
    assert (last, chain(known, list(range(64)))) == (4, 4)
    assert chain(known, [*range(40), 7, *range(41, 64)]) == 2
    assert chain(known, list(range(30))) == 1


def test_the_tree_is_measured_at_its_size():
    figures = measure_tree(seed=1, repeats=2)
    assert min(figures.match, figures.insert, figures.evict, figures.peer_match) > 0
    assert 0 < figures.bytes_per_token < 100


@pytest.mark.slow
def test_a_short_run_reports_every_system():
    arguments = [*"bench prefix --compute compiled --load tree --rounds 1 --system".split(), ON, "--system", OFF]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert [(row["load"], row["system"]) for row in report["rows"]] == [("tree", OFF), ("tree", ON)]
    assert report["rows"][0]["hit_rate"] is None
    # Every thought finds its parent's prompt and answer: all but what a page cuts off and the newest tokens.
    assert report["rows"][1]["hit_rate"] > 0.8
