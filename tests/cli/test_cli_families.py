"""``families``: every family that runs, and what a folder says of itself."""

import json

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from mini_engine.checkpoint import TINY_MODEL
from mini_engine.cli.app import app
from mini_engine.families import FAMILIES


def run(*words):
    return CliRunner().invoke(app, ["families", *map(str, words)])


def test_every_family_is_listed():
    shown = run().stdout
    for name, family in FAMILIES.items():
        assert f"{name} " in shown
        assert family.models in shown
        assert family.differs in shown


def test_a_folder_runs_or_says_why_not(tmp_path):
    assert "runs: a qwen3 of " in run(TINY_MODEL).stdout
    raw = LlamaConfig(attention_bias=True, max_position_embeddings=512).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert (
        f"{tmp_path} runs: a llama with biases of 32 layers, hidden size 4096, 512 positions\n" == run(tmp_path).stdout
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [({"model_type": "gemma"}, "model_type 'gemma'"), ({"quantization_config": {"bits": 4}}, "quantization_config")],
)
def test_a_folder_that_does_not_run_is_refused_with_the_reason(tmp_path, change, words):
    (tmp_path / "config.json").write_text(json.dumps(LlamaConfig().to_dict() | change))
    result = run(tmp_path)
    assert result.exit_code == 2
    assert words in result.stderr
