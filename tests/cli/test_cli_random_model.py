"""``random-model`` writes a folder that transformers and the engine load. A small shape stands in for the 1.2 GB."""

from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

from mini_engine import LLM
from mini_engine.cli import random_model as command
from mini_engine.cli.app import app
from tests.conftest import random_checkpoint


def small(shape, folder, seed):
    """Write a checkpoint of a few kilobytes in the place of ``make_checkpoint``."""
    assert (shape, seed) == ("0.6b", 3)
    random_checkpoint(folder, vocab_size=2000)


def test_the_folder_has_weights_and_a_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "make_checkpoint", small)
    folder = tmp_path / "model"
    result = CliRunner().invoke(app, ["random-model", str(folder), "--seed", "3"])
    assert result.exit_code == 0, result.output
    assert AutoConfig.from_pretrained(folder).vocab_size == 2000
    assert AutoTokenizer.from_pretrained(folder)("Once").input_ids
    (answer,) = LLM(folder).generate(["Once"], progress=False)
    assert answer.error is None


def test_a_folder_with_files_is_refused(tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    result = CliRunner().invoke(app, ["random-model", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not empty" in result.stderr
    assert (tmp_path / "kept.txt").read_text() == "mine"
