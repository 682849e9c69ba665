"""The benchmark of one request beside llama.cpp: with a stand-in, and with itself where it is installed."""

import json
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner, Result

from mini_engine.bench import forward, llama_cpp
from mini_engine.bench.forward import PEER, System, Timing, make_row, measure, stored_bytes, weight_bytes
from mini_engine.cli.app import app
from tests.support.shapes import SHAPES, peer

RUN = "--prompt 9 --new-tokens 6 --rounds 1 --system off --system packed --peer llama.cpp".split()
real = pytest.mark.skipif(
    find_spec("xllamacpp") is None or find_spec("gguf") is None, reason="needs xllamacpp and gguf"
)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "forward", *arguments], env={"COLUMNS": "160"})


def one_layer(family: str) -> PreTrainedModel:
    """A random model with one key-value head to two query heads; the expert models have 4 experts, of which 2 count."""
    shape = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 32}
    shape |= {"num_key_value_heads": 2, "intermediate_size": 96, "initializer_range": 0.15}
    torch.manual_seed(1)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape))
    if family == "qwen3":
        return peer(SHAPES[0], "float32")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, tie_word_embeddings=True))


class Fields:
    """Takes any ``add_…`` of a writer."""

    def __init__(self, file: Path, family: str) -> None:
        self.file, self.fields, self.kinds = file, {"family": family}, dict[str, str]()

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.fields.__setitem__(name, given)

    def add_tensor(self, name: str, numbers: np.ndarray, raw_dtype: str) -> None:
        self.kinds[name] = raw_dtype

    def write_tensors_to_file(self) -> None:
        self.file.write_text(json.dumps(self.kinds))


class Names(dict[str, str]):
    """Each name stands for itself."""

    def __missing__(self, name: str) -> str:
        return name


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put modules that only count in the place of both packages; return the requests that the server gets."""
    requests: list[Any] = []

    class Server:
        def __init__(self, params: Any) -> None:
            self.kinds = json.loads(Path(params.model.path).read_text())
            assert (params.n_ctx, params.cpuparams.n_threads) == (15, torch.get_num_threads())

        def handle_completions(self, request: dict[str, Any], callback: Any) -> None:
            requests.append((self.kinds["model.embed_tokens.weight"], request))
            for text in [*map(str, range(100, 100 + request["n_predict"])), ""]:
                callback({"choices": [{"text": text}]})

    threads = SimpleNamespace
    params = lambda: SimpleNamespace(model=threads(), cpuparams=threads(), cpuparams_batch=threads())  # noqa: E731
    known = {"Server": Server, "CommonParams": params, "get_system_info": lambda: "CPU : AVX2 = 1 ", "__version__": "7"}
    gguf = {
        "GGUFWriter": Fields,
        "MODEL_ARCH": Names(),
        "MODEL_ARCH_NAMES": Names(),
        "GGMLQuantizationType": Names(),
        "get_tensor_name_map": lambda *_: SimpleNamespace(get_name=lambda name: name),
        "quants": SimpleNamespace(quantize=lambda numbers, kind: numbers),
    }
    monkeypatch.setitem(sys.modules, "xllamacpp", SimpleNamespace(**known))
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace(**gguf))
    monkeypatch.setattr(llama_cpp, "find_spec", lambda name: name)
    monkeypatch.setattr(llama_cpp, "serve_apart", llama_cpp.LlamaCpp)  # another process would have the true modules
    return requests


def test_without_the_packages_the_peer_is_refused_and_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "find_spec", lambda name: None)
    result = invoke(*RUN)
    assert result.exit_code == 2
    assert "--peer llama.cpp needs xllamacpp and gguf; pip install 'mini-engine[peers]'" in result.stderr
    monkeypatch.setattr(llama_cpp, "find_spec", lambda name: None if name == "gguf" else name)
    assert "needs gguf; pip" in invoke(*RUN).stderr


def test_another_peer_and_another_system_are_refused() -> None:
    assert "peer 'vllm' is not one of llama.cpp" in invoke("--peer", "vllm").stderr
    assert "system 'fastest' is not one of off, packed" in invoke("--system", "fastest").stderr


def test_every_format_takes_its_turn_and_ours_are_compared_with_their_own(fake: list[Any]) -> None:
    result = invoke("--workload", "tiny bfloat16", *RUN)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    rows = {row["system"]: row for row in report["rows"]}
    formats = ["llama.cpp BF16", "llama.cpp Q8_0", "llama.cpp Q4_0"]
    assert list(rows) == ["transformers", "off", "packed", *formats]
    assert report["machine"]["llama.cpp"] == "xllamacpp 7, CPU : AVX2 = 1"
    assert "--peer llama.cpp" in report["command"]
    for figure in ("prefill", "decode"):
        speed, field = f"{figure}_tokens_per_s", f"{figure}_ratio_to_llama_cpp"
        assert rows["off"][field] == pytest.approx(rows["off"][speed] / rows["llama.cpp BF16"][speed])
        assert [rows[name][field] for name in ("transformers", *formats)] == [None] * 4
    table = result.stdout.splitlines()[2:-1]
    assert "decode × llama.cpp" in table[0]
    assert len(table) == 7
    # Two rounds, in each a short request before the one that counts, and in all the same prompt.
    kinds, requests = zip(*fake, strict=True)
    assert kinds == ("BF16", "BF16", "Q8_0", "Q8_0", "Q4_0", "Q4_0") * 2
    assert [request["n_predict"] for request in requests] == [2, 6] * 6
    assert all(request["prompt"] == requests[0]["prompt"] for request in requests)


def test_a_refused_request_and_a_lost_token_are_errors(fake: list[Any], tmp_path: Path) -> None:
    llama_cpp.write_gguf(one_layer("llama"), tmp_path / "file", "F32")
    server = llama_cpp.LlamaCpp(tmp_path / "file", 15, torch.get_num_threads())
    assert server.generate([1, 2], 3)[2] == [100, 101, 102]
    server.server.handle_completions = lambda request, callback: callback({"error": {"message": "too long"}})
    with pytest.raises(RuntimeError, match=r"refused a request of 2 \+ 3 tokens.*too long"):
        server.generate([1, 2], 3)
    server.server.handle_completions = lambda request, callback: callback({"choices": [{"text": "7"}]})
    with pytest.raises(RuntimeError, match="gave 1 of 3 tokens"):
        server.generate([1, 2], 3)


def test_norms_and_routers_are_not_rounded_and_what_a_step_reads_is_counted(fake: list[Any], tmp_path: Path) -> None:
    model = one_layer("qwen3_moe")
    read = llama_cpp.write_gguf(model, tmp_path / "file", "Q4_0")
    kinds = json.loads((tmp_path / "file").read_text())
    layer = "model.layers.0."
    plain = {name.removeprefix(layer) for name, kind in kinds.items() if kind == "F32"}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight"}
    assert plain == norms | {"self_attn.q_norm.weight", "self_attn.k_norm.weight", "mlp.gate.weight"}
    experts = {name for name in kinds if "experts" in name}
    assert experts == {f"{layer}mlp.experts.{name}_proj.weight" for name in ("gate", "up", "down")}
    experts_numel = 3 * 4 * 32 * 64  # of which a token meets half
    assert read == 4 * (sum(parameter.numel() for parameter in model.parameters()) - experts_numel / 2)
    assert read == weight_bytes(model)
    untied = one_layer("llama")
    numel = sum(parameter.numel() for parameter in untied.parameters()) - 97 * 64  # the table is looked up
    assert weight_bytes(untied) == llama_cpp.write_gguf(untied, tmp_path / "file", "F32") == 4 * numel


def test_a_ratio_is_taken_within_a_round_and_the_roofline_is_of_the_bandwidth_of_its_run() -> None:
    def run(decode: float, bandwidth: float) -> Timing:
        return Timing(10 * decode, decode, [1], bandwidth)

    slow_minutes = [run(10, 1000), run(2, 100), run(20, 1000)]
    others = [run(20, 1000), run(1, 100), run(10, 1000)]
    runs = {PEER: others, "off": slow_minutes, "llama.cpp F32": [replace(run(5, 0)) for _ in range(3)]}
    row = make_row("tiny float32", "off", 10, runs, "llama.cpp F32")
    assert (row.decode_tokens_per_s, row.decode_ratio, row.prefill_ratio) == (10, 2, 2)
    assert row.roofline == pytest.approx(0.2)  # of 0.1, 0.2 and 0.2
    assert row.decode_ratio_to_llama_cpp == 2
    assert make_row("tiny float32", "off", 10, runs, "llama.cpp BF16").decode_ratio_to_llama_cpp is None


def test_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "READ_ELEMENTS", 1024)
    numbers = iter(range(100))
    system = System(lambda prompt, new_tokens: Timing(1.0, float(next(numbers)), []), 1)
    runs = measure({"a": system}, [1], 4, 2)["a"]
    assert [run.decode for run in runs] == [3, 5]  # the even ones are the short requests
    assert all(run.bandwidth > 0 for run in runs)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_stored_bytes_are_those_of_ids_and_scales(quantize: str) -> None:
    weight = torch.zeros(64, 128, dtype=torch.bfloat16)
    per_group = {"int8": 64 * 128 + 64 * 2, "int4": 64 * 128 // 2 + 2 * 64 * 4 * 2}
    assert stored_bytes("model.layers.0.self_attn.q_proj.weight", weight, quantize) == per_group[quantize]
    assert stored_bytes("model.embed_tokens.weight", weight, quantize) == per_group["int8"]
    assert stored_bytes("model.norm.weight", weight[0], quantize) == 128 * 2


@real
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_llama_cpp_generates_what_transformers_does(family: str, tmp_path: Path) -> None:
    model = one_layer(family)
    llama_cpp.write_gguf(model, tmp_path / "model.gguf", "F32")
    prompt = torch.randint(3, model.config.vocab_size, (1, 20), generator=torch.Generator().manual_seed(0))
    out = model.generate(prompt, do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)
    server = llama_cpp.serve_apart(tmp_path / "model.gguf", 40, 2)
    before = time.perf_counter()
    began, times, ids = server.generate(prompt[0].tolist(), 12)
    assert ids == out[0, 20:].tolist()
    moments = [before, began, *times, time.perf_counter()]  # one clock for both processes
    assert moments == sorted(moments)
    with pytest.raises(RuntimeError, match="refused a request of 300"):
        server.generate([5] * 300, 2)
