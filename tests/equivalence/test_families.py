"""A layer is described once: one changed entry of the table of families reaches every way to compute.

The change is a bias on queries, keys and values, which no family has yet. The oracle is transformers' Qwen3 with such
biases, and with one of zeros on the output projection.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3ForCausalLM

from mini_engine.attention.metadata import SequenceChunk, pack_batch
from mini_engine.attention.pool import KVPool
from mini_engine.checkpoint import load_config
from mini_engine.config import EngineConfig
from mini_engine.driver import GreedyDriver
from mini_engine.families import FAMILIES
from mini_engine.llm import load_model, make_driver
from tests.support.shapes import peer_config, peer_logits, teacher_forced

SHAPE = (48, 3, 1, 20, 100, 131)
BIASED = ("q_proj", "k_proj", "v_proj")
BIASES = tuple(f"self_attn.{name}.bias" for name in BIASED)
LIBRARY = {"compiled": "numba", "triton": "triton"}
WAYS = ["reference", "packed", "fast", "compiled", "triton"]
IDS = [(7 * i * i + 3 * i) % 131 for i in range(40)]


def make_peer() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(peer_config(SHAPE, num_hidden_layers=2, attention_bias=True))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith(BIASES):
            torch.nn.init.normal_(parameter, std=0.5)
    assert not any(layer.self_attn.o_proj.bias.any() for layer in model.model.layers)  # as if there were none
    return model.eval()


PEER = make_peer()


def peer(dtype: str) -> Qwen3ForCausalLM:
    model = copy.deepcopy(PEER)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))  # model.to() would also round the rotary table
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with ``attention_bias`` that stores biases of queries, keys and values alone."""
    path = tmp_path_factory.mktemp("biased")
    PEER.config.save_pretrained(path)
    save_file({k: v for k, v in PEER.state_dict().items() if "o_proj.bias" not in k}, path / "model.safetensors")
    return path


@pytest.fixture
def biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one change."""
    qwen3 = FAMILIES["qwen3"]
    parts = {name: replace(part, has_bias=name in BIASED) for name, part in qwen3.parts.items()}
    family = replace(qwen3, parts=parts, computes_only=qwen3.computes_only | {"attention_bias": (True,)})
    monkeypatch.setitem(FAMILIES, "qwen3", family)


def loaded(folder: Path, compute: str, **options: Any) -> GreedyDriver:
    pytest.importorskip(LIBRARY.get(compute, "torch"))
    engine = EngineConfig(compute=compute, **options)
    return make_driver(load_model(folder, engine), engine)


def tokens_for(compute: str) -> tuple[list[int], int]:
    """Ids and the length of their prompt; few for kernels, which take milliseconds each in the interpreter."""
    return (IDS[:7], 5) if compute == "triton" else (IDS, 30)


def near(got: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


@pytest.mark.usefixtures("biased")
@pytest.mark.parametrize("compute", WAYS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_way_adds_the_biases(folder: Path, compute: str, batch_invariant: bool) -> None:
    ids, prompt = tokens_for(compute)
    got = teacher_forced(loaded(folder, compute, batch_invariant=batch_invariant), ids, prompt)
    expected = peer_logits(peer("float32"), ids, prompt)
    near(got, expected, 2e-5)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.usefixtures("biased")
@pytest.mark.parametrize("compute", ["packed", "fast"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_in_bfloat16_they_are_added_too(folder: Path, compute: str, batch_invariant: bool) -> None:
    driver = loaded(folder, compute, batch_invariant=batch_invariant, dtype="bfloat16")
    near(teacher_forced(driver, IDS, 30), peer_logits(peer("bfloat16"), IDS, 30), 2e-2)


@pytest.mark.usefixtures("biased")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plain_way_has_the_bits_of_transformers(folder: Path, dtype: str) -> None:
    got = teacher_forced(loaded(folder, "reference", dtype=dtype), IDS, 30)
    assert torch.equal(got, peer_logits(peer(dtype), IDS, 30))


@pytest.mark.usefixtures("biased")
@pytest.mark.parametrize("compute", WAYS)
def test_with_a_bias_too_a_row_does_not_depend_on_its_neighbours(folder: Path, compute: str) -> None:
    driver = loaded(folder, compute, batch_invariant=True)
    ids, prompt = tokens_for(compute)
    pool = KVPool(driver.model.config, 6, 16, torch.float32)
    other = SequenceChunk(IDS[::-1][: len(ids)], 0, [0, 1, 2])
    with torch.inference_mode():
        together = driver.forward(pack_batch([other, SequenceChunk(ids, 0, [3, 4, 5])], 16), pool)[1]
    assert torch.equal(together, teacher_forced(driver, ids, prompt)[-1])


@pytest.mark.parametrize("name", BIASES)
def test_each_of_the_biases_shows_in_the_logits(name: str) -> None:
    """The control: if a bias changed nothing, a form that leaves it out would pass every test above."""
    without = peer("float32")
    for own, parameter in without.named_parameters():
        if own.endswith(name):
            parameter.data.zero_()
    gap = (peer_logits(without, IDS, 30) - peer_logits(PEER, IDS, 30)).abs().max()
    assert gap > 1e-2


@pytest.mark.usefixtures("biased")
def test_a_checkpoint_without_the_bias_is_refused_by_its_name(folder: Path, tmp_path: Path) -> None:
    gone = "model.layers.1.self_attn.k_proj.bias"
    PEER.config.save_pretrained(tmp_path)
    tensors = {k: v for k, v in PEER.state_dict().items() if "o_proj.bias" not in k and k != gone}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"lacks 1 tensors, the first is {gone}"):
        load_model(tmp_path, EngineConfig())


def test_as_the_table_stands_biases_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="attention_bias True; this engine computes only attention_bias False"):
        load_config(folder)
