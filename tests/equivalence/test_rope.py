"""Rotary embeddings that a checkpoint scales: frequencies, logits and decoding have the bits of transformers."""

import copy
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from mini_engine.attention.dense import DenseAttention, sdpa_attention
from mini_engine.checkpoint import load_config
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.llm import build_model, load_model, make_driver, make_engine
from mini_engine.model import Qwen3, rotary_frequencies
from mini_engine.rope import scaled_frequencies
from mini_engine.sampler.params import SamplingParams
from tests.conftest import random_checkpoint
from tests.support.shapes import SHAPES, peer, peer_logits, teacher_forced, weights_of

Parameters = dict[str, Any]
TRAINED = 64  # positions; the models of tests.support.shapes have 512
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": TRAINED}
SCALINGS: dict[str, Parameters] = {
    "linear, 2": {"rope_type": "linear", "factor": 2.0},
    "linear, 3.7": {"rope_type": "linear", "factor": 3.7},
    "dynamic, 4": {"rope_type": "dynamic", "factor": 4.0},
    "llama3, 8": LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": TRAINED},
    "llama3, 2": LLAMA3 | {"factor": 2.0, "original_max_position_embeddings": TRAINED, "high_freq_factor": 1.5},
    "yarn, 4": YARN | {"factor": 4.0},
    "yarn, 8, wide ramp": YARN | {"factor": 8.0, "beta_fast": 8, "beta_slow": 0.25, "truncate": False},
    "yarn, 4, own factor": YARN | {"factor": 4.0, "attention_factor": 0.8},
    "yarn, 4, mscale": YARN | {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
}
NAMES = list(SCALINGS)
IDS = torch.randint(0, 96, (150,), generator=torch.Generator().manual_seed(2)).tolist()
PROMPT = 130  # longer than TRAINED; 20 more tokens are decoded


def scaled(name: str, theta: float = 1e4) -> tuple[tuple[str, Any], ...]:
    return tuple((SCALINGS[name] | {"rope_theta": theta}).items())


def whole(model: Qwen3, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor(ids), torch.arange(len(ids)), DenseAttention(sdpa_attention))


def peer_whole(model: Qwen3ForCausalLM, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def near(got: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


# ------------------------------------------------------------------------------------------------------- frequencies

OPTIONAL: dict[str, list[Parameters]] = {
    "linear": [{}],
    "llama3": [{"low_freq_factor": low, "high_freq_factor": high} for low, high in ((1.0, 4.0), (1, 2), (0.5, 1.5))],
    "yarn": [
        {},
        {"beta_fast": 16, "beta_slow": 2.5},
        {"beta_fast": 1.0, "beta_slow": 1.0},
        {"truncate": False},
        {"truncate": False, "beta_fast": 1.0, "beta_slow": 1.0},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"mscale": 0.7},
        {"attention_factor": 0.8},
    ],
}


@pytest.mark.parametrize("kind", OPTIONAL)
@pytest.mark.parametrize("head_dim", [20, 128])
@pytest.mark.parametrize("theta", [1e4, 1_000_000])
def test_frequencies_and_factor_are_those_of_transformers(kind: str, head_dim: int, theta: float) -> None:
    """In the form of transformers 5 and in that of 4, with the positions of the training stated or not."""
    shape = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "vocab_size": 99,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
    }
    originals: list[Parameters] = [{}]
    if kind in ("llama3", "yarn"):
        originals += [{"original_max_position_embeddings": count} for count in (64, 8192)]
    for extra, original, factor in product(OPTIONAL[kind], originals, (1.0, 1.1, 32.0)):
        own = {"factor": factor, **original, **extra}
        for raw in (
            {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **own}},
            {"rope_scaling": {"type": kind, **own}, "rope_theta": theta},
        ):
            theirs = Qwen3RotaryEmbedding(Qwen3Config(**copy.deepcopy(shape | raw)))
            frequencies, attention_factor = scaled_frequencies(
                ModelConfig.from_hf({"model_type": "qwen3", **shape, **raw})
            )
            assert torch.equal(frequencies, theirs.inv_freq), own
            assert attention_factor == theirs.attention_scaling, own


# ------------------------------------------------------------------------------------------------------------ logits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_those_of_transformers(name: str, dtype: str) -> None:
    """Whole prompts to the last position, and tokens decoded after one."""
    shape = SHAPES[0]
    engine = EngineConfig(dtype=dtype)
    model = build_model(*weights_of(shape, dtype, scaled(name)), engine)
    for length in (TRAINED, TRAINED + 1, 512):
        ids = [(7 * i * i + 3 * i) % 499 for i in range(length)]
        assert torch.equal(whole(model, ids), peer_whole(peer(shape, dtype, scaled(name)), ids)), f"{length} tokens"
    got = teacher_forced(make_driver(model, engine), IDS, PROMPT)
    assert torch.equal(got, peer_logits(peer(shape, dtype, scaled(name)), IDS, PROMPT))


def test_every_scaling_but_the_dynamic_one_shows_in_the_logits() -> None:
    """The control: models that all computed the same would show nothing above."""
    plain = peer(SHAPES[0], "float32", (("rope_type", "default"), ("rope_theta", 1e4)))
    seen = [peer_whole(plain, IDS)]
    for name in NAMES:
        logits = peer_whole(peer(SHAPES[0], "float32", scaled(name)), IDS)
        assert name.startswith("dynamic") == any(torch.equal(logits, other) for other in seen), name
        seen.append(logits)


@pytest.mark.parametrize("name", ["llama3, 8", "yarn, 4, own factor"])
@pytest.mark.parametrize(
    ("compute", "dtype"),
    [
        ("packed", "float32"),
        ("packed", "bfloat16"),
        ("fast", "float32"),
        ("fast", "bfloat16"),
        ("compiled", "float32"),
        ("compiled", "bfloat16"),
    ],
)
def test_every_way_to_compute_agrees_with_transformers(name: str, compute: str, dtype: str) -> None:
    """To rounding; "packed" in bfloat16 to the bit, as without scaling."""
    pytest.importorskip({"compiled": "numba"}.get(compute, "torch"))
    engine = EngineConfig(dtype=dtype, compute=compute)
    driver = make_driver(build_model(*weights_of(SHAPES[0], dtype, scaled(name)), engine), engine)
    expected = peer_logits(peer(SHAPES[0], dtype, scaled(name)), IDS, PROMPT)
    got = teacher_forced(driver, IDS, PROMPT)
    if (compute, dtype) == ("packed", "bfloat16"):
        assert torch.equal(got, expected)
    # The loops round less than transformers, so most of their distance is its error.
    bound = 3e-2 if compute == "compiled" else 2e-2
    near(got, expected.to(got.dtype), 2e-5 if dtype == "float32" else bound)


def test_kernels_agree_with_transformers() -> None:
    """Few tokens, at late positions: every one of them takes milliseconds in the interpreter."""
    pytest.importorskip("triton")
    rope = scaled("yarn, 4, own factor")
    model = build_model(*weights_of(SHAPES[0], "float32", rope), EngineConfig(compute="triton"))
    ids = torch.tensor(IDS[:3])
    positions = torch.tensor([2, 70, 500])
    with torch.inference_mode():
        got = model(ids, positions, DenseAttention(sdpa_attention))
        theirs = peer(SHAPES[0], "float32", rope)
        expected = theirs(ids[None], position_ids=positions[None], attention_mask=torch.ones(1, 3), use_cache=False)
    near(got, expected.logits[0], 2e-5)


@pytest.mark.parametrize("name", ["llama3, 8", "yarn, 4"])
@pytest.mark.parametrize("compute", ["reference", "packed", "compiled"])
def test_invariant_logits_do_not_depend_on_chunks_or_on_what_was_cached(name: str, compute: str) -> None:
    """A prompt cut at every 7 tokens among others, and the same one again from the radix cache."""
    pytest.importorskip({"compiled": "numba"}.get(compute, "torch"))
    params = SamplingParams(max_new_tokens=4)
    prompts = [IDS[:100], IDS[:80], IDS[3:90], IDS[:100]]
    found = []
    for changes in ({}, {"max_running_requests": 3, "max_tokens_per_step": 7, "prefix_cache": "radix"}):
        engine = EngineConfig(batch_invariant=True, compute=compute, **changes)
        served = make_engine(make_driver(build_model(*weights_of(SHAPES[0], "float32", scaled(name)), engine), engine))
        rows: dict[str, list[Tensor]] = {served.add_request(prompt, params): [] for prompt in prompts}
        while served.has_work:
            for delta in served.step().deltas:
                rows[delta.request_id].append(delta.logits.clone())
        found.append(list(rows.values()))
    for alone, together in zip(*found, strict=True):
        assert len(alone) == 4
        assert all(map(torch.equal, alone, together))


# -------------------------------------------------------------------------------------------------------- checkpoints


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | changes).items() if v != "absent"}))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": "absent", "rope_theta": 7e5},
        {"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0, "rope_theta": 7e5}},
        {"rope_scaling": None, "rope_parameters": {"type": "linear", "factor": 3.0, "rope_theta": 7e5}},
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 7e5}, "rope_theta": 6e5},
        {"rope_parameters": YARN | {"factor": 2.0, "rope_theta": 7e5}, "original_max_position_embeddings": 100},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 7e5, "beta_fast": None}},
    ],
    ids=str,
)
def test_both_forms_of_a_config_are_read_as_transformers_reads_them(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = random_checkpoint(tmp_path / "model")
    edit_config(folder, **changes)
    theirs = Qwen3RotaryEmbedding(AutoConfig.from_pretrained(folder))
    config = load_config(folder)
    assert config.rope_scaling is not None
    assert scaled_frequencies(config)[1] == theirs.attention_scaling
    assert torch.equal(scaled_frequencies(config)[0], theirs.inv_freq)
    got = whole(load_model(folder, EngineConfig()), IDS)
    assert torch.equal(got, peer_whole(Qwen3ForCausalLM.from_pretrained(folder), IDS))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {"type": "default", "rope_theta": 7e5}},
        {"rope_scaling": {"type": "dynamic", "factor": 3.7, "rope_theta": 7e5}},
    ],
    ids=str,
)
def test_where_nothing_is_scaled_there_is_no_scaling(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = random_checkpoint(tmp_path / "model")
    edit_config(folder, **changes)
    config = load_config(folder)
    assert config.rope_scaling is None
    assert config.rope_theta == AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"]


KINDS: dict[str, Parameters] = {
    "absent": {},
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attn_factor": 1.0},
    "llama3": LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 64},
}
THETAS: list[dict[str, float]] = [
    {},
    {"rope_theta": 5e5},
    {"rope_parameters": 6e5},
    {"rope_parameters": 1e4},
    {"rope_scaling": 7e5},
    {"rope_theta": 5e5, "rope_parameters": 6e5},
    {"rope_theta": 5e5, "rope_scaling": 7e5},
    {"rope_parameters": 6e5, "rope_scaling": 7e5},
    {"rope_theta": 5e5, "rope_parameters": 6e5, "rope_scaling": 7e5},
]


@pytest.mark.parametrize("thetas", THETAS, ids=str)
def test_a_theta_in_any_place_is_read_as_transformers_reads_it(tmp_path: Path, thetas: dict[str, float]) -> None:
    """Or it is refused: where transformers computes with its own 10000, though the file says another or none."""
    folder = random_checkpoint(tmp_path / "model")
    for scaling, parameters in product(KINDS, KINDS):
        changes: dict[str, Any] = {"rope_theta": thetas.get("rope_theta", "absent")}
        for place, form in (("rope_scaling", KINDS[scaling]), ("rope_parameters", KINDS[parameters])):
            changes[place] = form | ({"rope_theta": thetas[place]} if place in thetas else {}) or "absent"
        edit_config(folder, **changes)
        theirs = AutoConfig.from_pretrained(folder)
        rotary = Qwen3RotaryEmbedding(theirs)
        unread = scaling != "absent" and thetas == {"rope_parameters": 6e5}
        if unread or not thetas:
            assert theirs.rope_parameters["rope_theta"] == 1e4
            message = "lacks rope_theta" if not thetas else "rope_parameters with rope_theta 600000.0; .* 10000.0; move"
            with pytest.raises(ValueError, match=message):
                load_config(folder)
            continue
        config = load_config(folder)
        assert config.rope_theta == theirs.rope_parameters["rope_theta"], changes
        plain = rotary_frequencies(config.head_dim, config.rope_theta), 1.0
        frequencies, factor = scaled_frequencies(config) if config.rope_scaling else plain
        assert torch.equal(frequencies, rotary.inv_freq), changes
        assert factor == rotary.attention_scaling, changes


@pytest.mark.parametrize("extra", [{}, {"attention_factor": 0.8}, {"mscale": 1.0, "mscale_all_dim": 0.5}], ids=str)
def test_an_attn_factor_is_refused_with_what_computes_the_same(tmp_path: Path, extra: Parameters) -> None:
    """The first remedy computes what transformers computes with ``attn_factor``, the second is their product."""
    folder = random_checkpoint(tmp_path / "model")
    given = YARN | {"factor": 4.0, "rope_theta": 1e6} | extra
    edit_config(folder, rope_parameters=given | {"attn_factor": 0.8782488562869419})
    theirs = Qwen3RotaryEmbedding(AutoConfig.from_pretrained(folder))
    with pytest.raises(ValueError, match=r"attn_factor 0\.87.*transformers does not read") as caught:
        load_config(folder)
    same, product = map(float, re.findall(r"attention_factor ([\d.]+)", str(caught.value)))
    assert same == theirs.attention_scaling
    assert product == pytest.approx(same * 0.8782488562869419)
    edit_config(folder, rope_parameters=given | {"attention_factor": same})
    frequencies, factor = scaled_frequencies(load_config(folder))
    assert torch.equal(frequencies, theirs.inv_freq)
    assert factor == theirs.attention_scaling


def test_a_dynamic_model_takes_no_more_than_its_positions() -> None:
    """Beyond them transformers changes the frequencies with every token, while the keys in its cache keep the old."""
    config, weights = weights_of(SHAPES[0], "float32", scaled("dynamic, 4"))
    driver = make_driver(build_model(config, weights, EngineConfig()), EngineConfig())
    with pytest.raises(ValueError, match="need 513 positions, the model has 512"):
        driver.generate([0] * 512, 1)


REFUSED: list[tuple[Parameters, str]] = [
    ({"rope_type": "longrope", "factor": 2.0}, "rope type 'longrope'.* only the rope types default, linear, .*llama3"),
    ({"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"rope_type": "linear"}, "'linear' without factor"),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "'llama3' without high_freq_factor"),
    (LLAMA3 | {"factor": 8.0, "low_freq_factor": 4.0}, "high_freq_factor 4.0 and low_freq_factor 4.0"),
    (
        {"rope_type": "default", "factor": 2.0},
        "factor 2.0, which transformers does not read .* 'default'; remove",
    ),
    (YARN | {"factor": 2.0, "finetuned": True}, "finetuned True, .*; remove it to compute what transformers computes"),
    ({"rope_type": "linear", "factor": 0}, "rope_parameters.factor is 0; input should be greater than 0"),
    ({"rope_type": "yarn", "factor": 2.0, "truncate": None}, "rope_parameters.truncate is None"),
    ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "rope_theta is 1.0; .* above 1"),
]


@pytest.mark.parametrize(("parameters", "message"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, parameters: Parameters, message: str) -> None:
    folder = random_checkpoint(tmp_path / "model")
    edit_config(folder, rope_parameters={"rope_theta": 1e6} | parameters)
    with pytest.raises(ValueError, match=message):
        load_config(folder)
