"""Every family has the bits of transformers in the plain way, and its values in all others.

The shapes of a family are drawn at random, in the family's own manner: numbers of heads, sizes of heads, tied or not,
biases, kinds of rotary embedding. Norms and biases are random too, so that one that is left out shows.
"""

import random
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from mini_engine.attention.dense import DenseAttention, sdpa_attention
from mini_engine.attention.metadata import SequenceChunk, pack_batch
from mini_engine.attention.pool import KVPool
from mini_engine.checkpoint import experts_in
from mini_engine.cli.quantize import write
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.driver import GreedyDriver
from mini_engine.families import EMBEDDING, FAMILIES, HEAD
from mini_engine.fast.quantized import dequantize_int4, dequantize_int8, quantize_int4, quantize_int8
from mini_engine.llm import build_model, load_driver, load_model, make_driver, make_engine
from mini_engine.sampler.params import SamplingParams
from mini_engine.server.attention import attention_of_last
from mini_engine.viz.forward.measure import trace_forward
from tests.conftest import skip_without_bfloat16
from tests.support.shapes import peer_logits, teacher_forced

DENSE = {"num_local_experts": 0, "layer_types": ["attention"] * 2, "mamba_n_heads": 2}  # Granite 4 without its others
CONFIGS: dict[str, Any] = {
    "qwen3": Qwen3Config,
    "qwen2": Qwen2Config,
    "llama": LlamaConfig,
    "smollm3": SmolLM3Config,
    "mistral": MistralConfig,
    "ministral": MinistralConfig,
    "olmo2": Olmo2Config,
    "olmo3": Olmo3Config,
    "granite": GraniteConfig,
    "granitemoehybrid": partial(GraniteMoeHybridConfig, num_hidden_layers=2, **DENSE),
    "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
}
SLIDING = "sliding_attention"  # of layer_types
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DRAWS = 6
LENGTHS = (1, 2, 7, 33, 130, 300)  # of prompts
SPARSE = [("qwen3_moe", 3), ("mixtral", 2)]  # family, number of the draw
LIBRARY = {"compiled": "numba", "triton": "triton"}
WAYS = ["reference", "packed", "fast", "compiled", "triton"]
IDS = [(7 * i * i + 3 * i) % 131 for i in range(304)]


def draw(family: str, number: int) -> Any:
    """Return the configuration of transformers for one random model of a family."""
    drawn = random.Random(f"{family} {number}")
    kv_heads = drawn.choice([1, 2, 3])
    heads = kv_heads * drawn.choice([1, 2, 4])
    size = drawn.choice([16, 24, 32])  # of a head
    hidden = heads * size
    changes: dict[str, Any] = {}
    if family in ("llama", "mistral", "qwen3") and drawn.random() < 0.5:
        changes["head_dim"], hidden = size, drawn.choice([48, 80])
    elif family in ("qwen3", "ministral"):
        changes["head_dim"] = size
    if family == "llama":
        changes |= {"attention_bias": number % 2 == 1, "mlp_bias": number % 3 == 1}
        if number >= 3:
            changes["rope_parameters"] = {"rope_theta": 5e5, "original_max_position_embeddings": 64, **LLAMA3}
    if family == "smollm3":
        changes |= {"pad_token_id": 0, "eos_token_id": 5, "attention_bias": number % 2 == 1}
        changes |= [{"no_rope_layers": [0, 1]}, {"no_rope_layers": [1, 0]}, {"no_rope_layer_interval": 2}][number % 3]
    if family == "mistral":
        changes["sliding_window"] = [None, 512, 400][number % 3]
    if family == "ministral":
        kinds = ["full_attention", SLIDING]
        changes |= {"sliding_window": 320 + number, "layer_types": [None, kinds, kinds[:1] * 2][number % 3]}
    if family in ("qwen3_moe", "mixtral"):
        changes |= {"num_local_experts": 5 + number, "num_experts_per_tok": 1 + number % 4}
    if family == "mixtral":
        changes["sliding_window"] = [None, 400][number % 2]
    if family == "qwen3_moe":
        changes |= {
            "head_dim": size,
            "moe_intermediate_size": drawn.choice([20, 36]),
            "norm_topk_prob": number % 2 == 1,
        }
        changes["attention_bias"] = number % 3 == 1
    if family == "granite":
        changes["mlp_bias"] = number % 3 == 1
    if family == "granitemoehybrid":
        changes["shared_intermediate_size"] = drawn.choice([40, 72])
        changes["position_embedding_type"] = ["rope", "nope", None][number % 3]
    if family.startswith("granite"):
        changes |= {"attention_bias": number % 2 == 1, "embedding_multiplier": 12.0}
        changes |= {"attention_multiplier": [1 / size, 0.3, 1][number % 3], "residual_multiplier": 0.22}
        changes["logits_scaling"] = [1, 8.0, 6.3][number // 2]
    if family in ("olmo2", "olmo3"):
        changes |= {"pad_token_id": 0, "eos_token_id": 5, "attention_bias": number % 2 == 1}
    if family == "olmo3":
        changes |= {"sliding_window": 320 + number, "layer_types": [None, [SLIDING, "full_attention"]][number % 2]}
        plain = {"rope_type": "default", "rope_theta": 5e5}
        if number >= 2:
            changes["rope_parameters"] = {"full_attention": plain | YARN, SLIDING: plain}
    return CONFIGS[family](
        vocab_size=131,
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=drawn.choice([60, 100]),
        max_position_embeddings=512,
        tie_word_embeddings=drawn.random() < 0.5,
        initializer_range=0.15,
        **changes,
    )


@cache
def peer(family: str, number: int, dtype: str) -> Any:
    """Return the model of transformers: its norms and biases are random, its tensors in memory of their own.

    Its experts run one after the other, which is not the default there.
    """
    torch.manual_seed(number)
    model = AutoModelForCausalLM.from_config(draw(family, number), experts_implementation="eager")
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
        parameter.data = parameter.data.to(getattr(torch, dtype)).clone()  # model.to() would round the rotary table
    return model.eval()


def loaded(family: str, number: int, compute: str = "reference", **options: Any) -> GreedyDriver:
    """Return a driver over the weights of the peer."""
    if compute not in FAMILIES[family].ways:
        pytest.skip(f"{compute} does not compute {family}")
    if compute in LIBRARY:
        pytest.importorskip(LIBRARY[compute])
    model = peer(family, number, options.get("dtype", "float32"))
    config = ModelConfig.from_hf(model.config.to_dict())
    state = model.state_dict().items()
    weights = {own: tensor[at].clone() for name, tensor in state for own, at in experts_in(config, name).items()}
    weights = {name: weights[name] for name in config.weight_shapes()}
    engine = EngineConfig(compute=compute, **options)  # type: ignore[arg-type]
    return make_driver(build_model(config, weights, engine), engine)


def tokens_for(compute: str) -> tuple[list[int], int]:
    """Return ids and the length of their prompt. A step of kernels takes some milliseconds in the interpreter."""
    return (IDS[:7], 5) if compute == "triton" else (IDS[:40], 30)


def near(got: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def test_every_family_is_drawn() -> None:
    assert list(CONFIGS) == list(FAMILIES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("number", range(DRAWS))
@pytest.mark.parametrize("family", CONFIGS)
def test_the_plain_way_has_the_bits_of_transformers(family: str, number: int, dtype: str) -> None:
    """Of prompts of any length, and of three tokens that are decoded after each over what was kept."""
    driver = loaded(family, number, dtype=dtype)
    for length in LENGTHS:
        ids = IDS[: length + 3]
        expected = peer_logits(peer(family, number, dtype), ids, length)
        assert torch.equal(teacher_forced(driver, ids, length), expected), length


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("compute", WAYS)
@pytest.mark.parametrize(
    ("family", "number"),
    [
        ("qwen2", 0),
        ("llama", 1),
        ("llama", 4),
        ("smollm3", 1),
        ("mistral", 1),
        ("olmo2", 1),
        ("olmo3", 2),
        ("granite", 4),
        ("granitemoehybrid", 4),
        *SPARSE,
    ],
)
def test_every_way_computes_a_family(family: str, number: int, compute: str, batch_invariant: bool) -> None:
    ids, prompt = tokens_for(compute)
    got = teacher_forced(loaded(family, number, compute, batch_invariant=batch_invariant), ids, prompt)
    expected = peer_logits(peer(family, number, "float32"), ids, prompt)
    near(got, expected, 2e-5)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("compute", ["packed", "fast", "compiled"])
@pytest.mark.parametrize(
    "family",
    ["qwen2", "llama", "smollm3", "mistral", "olmo2", "olmo3", "granite", "granitemoehybrid", "qwen3_moe", "mixtral"],
)
def test_in_bfloat16_too(family: str, compute: str, batch_invariant: bool) -> None:
    skip_without_bfloat16("bfloat16")
    driver = loaded(family, 1, compute, batch_invariant=batch_invariant, dtype="bfloat16")
    got, expected = teacher_forced(driver, IDS[:40], 30), peer_logits(peer(family, 1, "bfloat16"), IDS[:40], 30)
    near(got, expected.to(got.dtype), 3e-2)
    if compute == "packed" and not batch_invariant:
        assert torch.equal(got, expected), "a bias is added before the product is rounded"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compute", WAYS)
@pytest.mark.parametrize(
    ("family", "number"), [("qwen2", 0), ("llama", 1), ("smollm3", 0), ("mistral", 1), ("olmo3", 2), *SPARSE]
)
def test_a_row_does_not_depend_on_its_neighbours(family: str, number: int, compute: str, dtype: str) -> None:
    if compute == "triton" and dtype != "float32":
        pytest.skip("kernels have tests of their own")
    skip_without_bfloat16(dtype)
    driver = loaded(family, number, compute, batch_invariant=True, dtype=dtype)
    ids, prompt = tokens_for(compute)
    pool = KVPool(driver.model.config, 6, 16, driver.model.embedding.dtype)
    other = SequenceChunk(IDS[60 : 60 + len(ids)], 0, [0, 1, 2])
    with torch.inference_mode():
        together = driver.forward(pack_batch([other, SequenceChunk(ids, 0, [3, 4, 5])], 16), pool)[1]
    assert torch.equal(together, teacher_forced(driver, ids, prompt)[-1])


@pytest.mark.parametrize(
    ("family", "compute"),
    [
        ("llama", "reference"),
        ("qwen2", "packed"),
        ("mistral", "fast"),
        ("llama", "compiled"),
        ("olmo3", "fast"),
        ("granite", "reference"),
        ("qwen3_moe", "packed"),
        ("mixtral", "reference"),
    ],
)
def test_batches_chunks_preemption_and_a_cache_change_no_bit(family: str, compute: str) -> None:
    prompts = [IDS[:24] + IDS[50 + 3 * n : 55 + 4 * n] for n in range(6)]
    asked = [SamplingParams(max_new_tokens=20, temperature=0.8, seed=n, logprobs=0) for n in range(6)]
    alone = make_engine(loaded(family, 1, compute, batch_invariant=True)).generate(prompts, asked)  # type: ignore[arg-type]
    busy = make_engine(
        loaded(  # type: ignore[arg-type]
            family,
            1,
            compute,
            batch_invariant=True,
            page_size=4,
            max_running_requests=6,
            max_tokens_per_step=19,
            preemption=True,
            num_pages=34,
            prefix_cache="radix",
        )
    )
    for (one,), (other,) in zip(alone, busy.generate(prompts, asked), strict=True):
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    steps = busy.log
    assert sum(len(step.preempted) for step in steps) > 0
    assert max(len(step.chunks) for step in steps) > 3
    assert busy.scheduler.cache.stats.num_tokens_hit > 0  # type: ignore[attr-defined]


def rounded(name: str, weight: Tensor, kind: str) -> Tensor:
    """What quantized weights stand for. The table, the head and routers have 8 bits; norms and biases stay."""
    if weight.dim() < 2:
        return weight
    if weight.dim() == 3:
        return torch.stack([rounded(name, each, kind) for each in weight])  # transformers keeps experts in a stack
    padded = F.pad(weight, (0, -weight.shape[1] % 32))
    if kind == "int8" or name in (EMBEDDING, HEAD) or name.endswith(".gate.weight"):
        return dequantize_int8(*quantize_int8(padded))[:, : weight.shape[1]]
    return dequantize_int4(*quantize_int4(padded))[:, : weight.shape[1]]


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", CONFIGS)
def test_quantized_weights_compute_what_transformers_computes_with_rounded_ones(family: str, kind: str) -> None:
    """By two draws of a family, and by every way; under ``batch_invariant`` to the bit beside a neighbour, too."""
    for number, compute in ((0, "reference"), (1, "fast"), (1, "compiled")):
        if compute not in FAMILIES[family].ways or (compute in LIBRARY and find_spec(LIBRARY[compute]) is None):
            continue
        own = peer(family, number, "float32")
        other = deepcopy(own)
        other.load_state_dict({name: rounded(name, weight, kind) for name, weight in own.state_dict().items()})
        expected = peer_logits(other, IDS[:33], 30)
        driver = loaded(family, number, compute, quantize=kind)
        near(teacher_forced(driver, IDS[:33], 30), expected, 3e-5)
        driver = loaded(family, number, compute, quantize=kind, batch_invariant=True)
        alone = teacher_forced(driver, IDS[:33], 30)
        near(alone, expected, 3e-5)
        pool = KVPool(driver.model.config, 6, 16, driver.model.embedding.dtype)
        neighbour = SequenceChunk(IDS[60:80], 0, [0, 1])
        with torch.inference_mode():
            together = driver.forward(pack_batch([neighbour, SequenceChunk(IDS[:33], 0, [3, 4, 5])], 16), pool)[1]
        assert torch.equal(together, alone[-1])


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_folder_of_rounded_weights_has_the_bits_of_rounding_them_on_load(
    family: str, kind: str, tmp_path: Path
) -> None:
    source, folder = tmp_path / "source", tmp_path / "rounded"
    peer(family, 1, "float32").save_pretrained(source)
    write(source, folder, EngineConfig(quantize=kind))  # type: ignore[arg-type]
    for compute in ("reference", "fast"):  # the second stacks matrices
        expected = load_driver(source, EngineConfig(compute=compute, quantize=kind))  # type: ignore[arg-type]
        got = load_driver(folder, EngineConfig(compute=compute))  # type: ignore[arg-type]
        assert torch.equal(teacher_forced(got, IDS[:33], 30), teacher_forced(expected, IDS[:33], 30))


def test_a_trace_computes_what_the_model_computes() -> None:
    driver = loaded("llama", 1)
    trace = trace_forward(driver.model, IDS[:9], DenseAttention(sdpa_attention))
    assert torch.equal(
        trace.logits, driver.model(torch.tensor(IDS[:9]), torch.arange(9), DenseAttention(sdpa_attention))
    )


def test_no_trace_is_made_of_other_scores() -> None:
    with pytest.raises(ValueError, match=r"multiplies scores by 0\.3, and a record knows"):
        trace_forward(loaded("granite", 1).model, IDS[:9])


def test_the_page_shows_what_a_token_looked_at_with_scores_of_another_factor() -> None:
    model = peer("granite", 4, "float32")
    model.set_attn_implementation("eager")
    seen = model(torch.tensor([IDS[:9]]), output_attentions=True).attentions[1][0, :, -1].mean(0)  # of [1, Hq, T, T]
    model.set_attn_implementation("sdpa")
    shown = torch.tensor(attention_of_last(loaded("granite", 4).model, IDS[:9], 1))
    torch.testing.assert_close(shown, seen, rtol=0, atol=1e-6)
    assert float(seen.detach().max()) < 0.9  # a factor shows in it


@pytest.mark.parametrize(("family", "number"), [("qwen2", 0), ("llama", 1)])
def test_each_bias_shows_in_the_logits(family: str, number: int) -> None:
    """The control: if a bias changed nothing, a form that leaves it out would pass every test above."""
    expected = peer_logits(peer(family, number, "float32"), IDS[:40], 30)
    names = {name.split(".", 3)[3] for name in peer(family, number, "float32").state_dict() if name.endswith(".bias")}
    assert len(names) == {"qwen2": 3, "llama": 7}[family]
    for name in names:
        driver = loaded(family, number)
        weights = {key: value.clone() for key, value in peer(family, number, "float32").state_dict().items()}
        weights |= {key: torch.zeros_like(value) for key, value in weights.items() if key.endswith(name)}
        model = build_model(driver.model.config, weights, EngineConfig())
        gap = (teacher_forced(make_driver(model, EngineConfig()), IDS[:40], 30) - expected).abs().max()
        assert gap > 1e-3, name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of Qwen2 as ``save_pretrained`` writes it."""
    peer("qwen2", 0, "float32").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("is_original", [True, False])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_checkpoint_that_transformers_saved_is_loaded(tmp_path: Path, family: str, is_original: bool) -> None:
    """In the format of the models that were published, or as transformers 5 holds it: with stacks of experts."""
    peer(family, 2, "float32").save_pretrained(tmp_path, save_original_format=is_original)
    expected = peer_logits(peer(family, 2, "float32"), IDS[:40], 30)
    assert torch.equal(teacher_forced(load_driver(tmp_path), IDS[:40], 30), expected)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("layers.1.mlp.experts.down_proj", lambda stack: stack[:-1], r"has shape \(6, .* config.json asks for \(7, "),
        ("layers.0.mlp.experts.gate_up_proj", lambda stack: stack[:, :-2], "gate_up_proj has shape"),
        ("layers.7.mlp.experts.down_proj", None, "holds an unknown tensor model.layers.7.mlp.experts.down_proj"),
    ],
)
def test_a_stack_of_experts_that_does_not_fit_is_refused(tmp_path: Path, name: str, change: Any, words: str) -> None:
    peer("mixtral", 2, "float32").save_pretrained(tmp_path, save_original_format=False)
    file, name = tmp_path / "model.safetensors", f"model.{name}"
    tensors = load_file(file)
    tensors[name] = change(tensors[name]).contiguous() if change else torch.ones(7, 2, 2)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=words):
        load_model(tmp_path, EngineConfig())


def test_more_experts_for_a_token_than_there_are_is_refused() -> None:
    raw = CONFIGS["qwen3_moe"]().to_dict() | {"num_experts": 4}  # the field's name in files of transformers 4
    with pytest.raises(ValueError, match="num_experts_per_tok is 8 and num_experts 4"):
        ModelConfig.from_hf(raw)


def test_a_checkpoint_without_a_bias_is_refused_by_its_name(folder: Path) -> None:
    gone = "model.layers.1.self_attn.k_proj.bias"
    tensors = {name: tensor.clone() for name, tensor in peer("qwen2", 0, "float32").state_dict().items()}
    tied = ["lm_head.weight"] if peer("qwen2", 0, "float32").config.tie_word_embeddings else []
    save_file({k: v for k, v in tensors.items() if k not in (gone, *tied)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"lacks 1 tensors, the first is {gone}"):
        load_model(folder, EngineConfig())


def test_frequencies_that_old_checkpoints_store_are_left_alone(folder: Path) -> None:
    before = teacher_forced(load_driver(folder), IDS[:10], 7)
    tensors = {name: tensor.clone() for name, tensor in peer("qwen2", 0, "float32").state_dict().items()}
    tied = ["lm_head.weight"] if peer("qwen2", 0, "float32").config.tie_word_embeddings else []
    tensors = {name: tensor for name, tensor in tensors.items() if name not in tied}
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, folder / "model.safetensors")
    assert torch.equal(teacher_forced(load_driver(folder), IDS[:10], 7), before)


def test_a_window_is_the_end_of_a_request_and_the_error_says_why() -> None:
    driver = loaded("mistral", 2)
    assert driver.model.config.max_position_embeddings == 400
    with pytest.raises(ValueError, match=r"need 401 positions; this model attends to the newest 400 alone"):
        driver.stream(IDS, SamplingParams(max_new_tokens=401 - len(IDS)))  # type: ignore[attr-defined]
    raw = CONFIGS["ministral"](num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]).to_dict()
    assert ModelConfig.from_hf(raw).max_position_embeddings == 4096
    assert ModelConfig.from_hf(raw | {"layer_types": ["full_attention"] * 2}).sliding_window is None
    raw = CONFIGS["mistral"](sliding_window=None).to_dict()
    assert ModelConfig.from_hf(raw).sliding_window is None
    del raw["sliding_window"]  # then transformers takes 4096
    assert ModelConfig.from_hf(raw).max_position_embeddings == 4096


@pytest.mark.parametrize("family", CONFIGS)
def test_fields_that_are_not_there_are_those_of_transformers(family: str) -> None:
    """The file of a checkpoint may leave out what its class has as a default."""
    full = CONFIGS[family]().to_dict()
    left_out = {
        "head_dim",
        "num_key_value_heads",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "no_rope_layers",
    }
    short = {key: value for key, value in full.items() if key not in left_out}
    read, whole = ModelConfig.from_hf(short), ModelConfig.from_hf(full)
    assert read == whole


@pytest.mark.parametrize("rope", [{}, LLAMA3 | {"original_max_position_embeddings": 64}, YARN])
@pytest.mark.parametrize("family", CONFIGS)
def test_both_layouts_of_the_rotary_embedding_are_read(family: str, rope: dict[str, Any]) -> None:
    """transformers 5 writes one mapping, or one for each kind of layer; transformers 4 wrote the base beside it."""
    full = {"rope_type": "default", "rope_theta": 5e5}
    nested = {"full_attention": full | rope, SLIDING: full}
    raw = CONFIGS[family](rope_parameters=nested if family == "olmo3" else full | rope).to_dict()
    older = {key: value for key, value in raw.items() if key != "rope_parameters"}
    older |= {"rope_theta": 5e5, "rope_scaling": rope or None}
    assert ModelConfig.from_hf(older) == ModelConfig.from_hf(raw)
    assert CONFIGS[family](**older).rope_parameters == raw["rope_parameters"]  # as transformers reads it


def test_what_a_family_does_not_compute_is_refused() -> None:
    for family, change, words in [
        ("qwen3", {"attention_bias": True}, "attention_bias True; this engine computes only attention_bias False"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"attention_bias": "false"}, "attention_bias is 'false'"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "2 no_rope_layers and num_hidden_layers 36"),
        ("gemma", {}, "this engine runs models of 'qwen3', 'qwen2', 'llama', "),
        ("mistral", {"layer_types": ["sliding_attention"] * 32}, "layer_types 'sliding_attention'"),
        ("ministral", {"sliding_window": None}, "layer_types 'sliding_attention'"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("granitemoehybrid", {"num_local_experts": 8}, "num_local_experts 8; this engine computes only num_local_expe"),
        ("granitemoehybrid", {"layer_types": ["attention", "mamba"]}, "layer_types 'mamba'; this engine computes only"),
    ]:
        raw = CONFIGS.get(family, LlamaConfig)().to_dict() | {"model_type": family} | change
        with pytest.raises(ValueError, match=words):
            ModelConfig.from_hf(raw)


def test_a_way_that_does_not_have_a_family_is_refused_by_name() -> None:
    config = ModelConfig.from_hf(draw("smollm3", 0).to_dict())
    with pytest.raises(ValueError, match="compute is 'compiled', which does not compute the family 'smollm3'; choose"):
        build_model(config, {}, EngineConfig(compute="compiled"))


@pytest.mark.parametrize(
    ("family", "number", "layers"),
    [("smollm3", 0, "unrotated_layers"), ("granitemoehybrid", 4, "unrotated_layers"), ("olmo3", 2, "unscaled_layers")],
)
def test_layers_without_rotation_or_its_scaling_show_in_the_logits(family: str, number: int, layers: str) -> None:
    """The control: if it changed nothing, a form that treats all layers alike would pass every test above."""
    driver = loaded(family, number)
    expected = teacher_forced(driver, IDS[:40], 30)
    assert getattr(driver.model.config, layers)
    driver.model.config = replace(driver.model.config, **{layers: ()})
    assert (teacher_forced(driver, IDS[:40], 30) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("sliding", [None, YARN | {"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 1e4}])
def test_a_rotary_embedding_of_the_window_that_is_another_one_is_refused(sliding: Any) -> None:
    raw = CONFIGS["olmo3"]().to_dict()
    raw["rope_parameters"] = raw["rope_parameters"] | {SLIDING: sliding}
    with pytest.raises(ValueError, match=r"computes only {'rope_type': 'default', 'rope_theta': 500000\.0} there"):
        ModelConfig.from_hf(raw)
