"""The benchmark of the router: its loads, and one short run through the command."""

import json
from dataclasses import asdict

from typer.testing import CliRunner

from mini_engine.bench.replicas import LOADS, measure_costs, simulate
from mini_engine.cli.app import app
from mini_engine.router.simulation import Costs

COSTS = Costs(step=6e-4, token=5e-5, row=3e-4)


def test_loads_are_what_their_names_say():
    chats = LOADS["chat"](3, 60, COSTS, 0)
    assert [len(session.turns) for session in chats] == [6] * 30
    assert len({tuple(session.turns[0].own[:128]) for session in chats}) == 1
    assert len({tuple(session.turns[0].own[:176]) for session in chats}) == 30
    assert all(turn.pause_s > 0 and len(turn.own) == 48 for session in chats for turn in session.turns[1:])
    asked = LOADS["few-shot"](3, 60, COSTS, 0)
    assert len(asked) == 180
    assert 20 < len({tuple(session.turns[0].own[:384]) for session in asked}) <= 96
    assert len({tuple(session.turns[0].own) for session in asked}) == 180
    for load in (chats, asked):
        arrivals = [session.arrival_s for session in load]
        assert arrivals == sorted(arrivals)
    # What a worker does for a question without a cache: as many a second keep it busy.
    seconds = 408 * COSTS.token + 16 * (COSTS.row + COSTS.step / 4)
    assert 0.8 < asked[-1].arrival_s / (60 * seconds) < 1.25


def test_costs_are_those_of_steps():
    costs, error = measure_costs(seed=0, requests=8, rounds=1)
    assert min(costs.step, costs.token, costs.row) >= 0 < costs.token
    assert 0 < error < 1


def test_command_simulates_with_the_given_costs():
    options = "--workers 2 --requests 24 --rule prefix --seed 3 --costs 6e-4 5e-5 3e-4".split()
    result = CliRunner().invoke(app, ["bench", "route", *options])
    assert result.exit_code == 0, result.output
    assert "hit rate of two workers over one engine with both pools" in result.stdout
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["costs"] == asdict(COSTS)
    assert report["rows"] == [asdict(simulate(load, "prefix", 2, 24, COSTS, 3)) for load in LOADS]
    assert all(0 < row["hit_rate"] < 1 and 0 < row["ttft_p50"] <= row["ttft_p99"] for row in report["rows"])


def test_command_refuses_an_unknown_rule():
    result = CliRunner().invoke(app, ["bench", "route", "--rule", "longest"])
    assert result.exit_code == 2
    assert "longest" in result.output
