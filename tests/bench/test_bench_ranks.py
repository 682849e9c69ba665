"""The benchmark of ranks: its paper model counts the bytes that are exchanged, and the command runs."""

import json

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from mini_engine.bench.ranks import received
from mini_engine.cli.app import app
from mini_engine.config import EngineConfig
from mini_engine.llm import make_driver
from tests.ranks.test_split import shape_of, weights_of
from tests.support.ranks import ThreadRanks, at_each_rank, part_of
from tests.support.shapes import teacher_forced


def test_the_paper_model_counts_what_the_layers_receive() -> None:
    config, engine, size, rows = shape_of("qwen3"), EngineConfig(batch_invariant=True), 4, 9

    class Counted(ThreadRanks):
        num_bytes = 0

        def stack(self, x: Tensor) -> Tensor:
            self.num_bytes += (size - 1) * x.nbytes
            return super().stack(x)

    def count(ranks: ThreadRanks) -> int:
        counted = Counted(ranks.board, ranks.rank)
        model = part_of(config, weights_of(config, "float32"), engine, counted)
        counted.num_bytes = 0
        teacher_forced(make_driver(model, engine), list(range(rows)), rows)
        return counted.num_bytes - (size - 1) * rows * config.hidden_size * 4  # the table of embeddings

    counts, _ = at_each_rank(size, count)
    assert counts == [received(config, size, "gather", rows, torch.float32.itemsize)] * size


@pytest.mark.slow
def test_the_command_measures_both_modes() -> None:
    result = CliRunner().invoke(
        app, ["bench", "ranks", "--shape", "tiny", "--rows", "1", "--rounds", "1", "--dtype", "float32"]
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    measured = [row for row in rows if row["refused"] is None]
    assert [(row["ranks"], row["mode"]) for row in rows] == [(1, "-"), (2, "gather"), (2, "sum")]
    assert [row["exchanges"] for row in measured if row["mode"] == "sum"] == [2 * 5 + 4]
    assert all(0 <= row["exchange_s"] < row["step_s"] for row in measured)
