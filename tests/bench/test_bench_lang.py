"""The benchmark of programs: its peer does the same work, and a short run reports every program."""

import json

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from mini_engine.bench import lang as bench
from mini_engine.checkpoint import TINY_MODEL
from mini_engine.cli.app import app
from mini_engine.config import EngineConfig
from mini_engine.llm import LLM
from tests.support.engines import _one_thread  # noqa: F401  a fixture


@pytest.mark.parametrize("program", [each for each in bench.SHARING if each is not bench.json_record])
def test_the_peer_writes_and_chooses_the_same_in_as_many_calls(program):
    peer = bench.Transformers(AutoModelForCausalLM.from_pretrained(TINY_MODEL))
    own = bench.InProcess(LLM(config=EngineConfig()))
    texts = [program.run("Mila", "fox", backend=backend).text for backend in (peer, own)]
    assert texts[0] == texts[1]
    assert (peer.stats["calls"], peer.stats["prompt_tokens"]) == (own.stats["calls"], own.stats["prompt_tokens"])


@pytest.mark.slow
def test_a_short_run_reports_programs_with_and_without_a_peer(monkeypatch):
    monkeypatch.setattr(bench, "SHARING", (bench.few_shot, bench.json_record))
    monkeypatch.setattr(bench, "OWN_ROUNDS", 1)
    result = CliRunner().invoke(app, ["bench", "lang", "--programs", "2", "--rounds", "1"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    shared = {row["program"]: row for row in rows if row["system"] == bench.SHARED}
    alone = {row["program"]: row for row in rows if row["system"] == bench.ALONE}
    assert set(shared) == {"few_shot", "json_record", "nothing_shared"}
    assert all(shared[name]["computed"] < alone[name]["computed"] for name in alone)
    assert all(row["computed"] == row["prompt_tokens"] for row in rows if row["system"] != bench.SHARED)
