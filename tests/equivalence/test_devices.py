"""What runs on a GPU, on one that is not there: no operation mixes devices, and the answers are those of a CPU.

The oracle is the same engine with ``device="cpu"``: both compute on the CPU here, so tokens must be equal.
"""

import importlib
import json
from contextlib import nullcontext

import pytest
import torch

from mini_engine.checkpoint import TINY_MODEL, load_tokenizer
from mini_engine.config import EngineConfig
from mini_engine.llm import build_model, load_driver, make_driver, make_engine
from mini_engine.sampler.params import SamplingParams
from smoke.framework.pretend_gpu import PretendGpu, device_of
from tests.support.shapes import ONE_LAYER

SCHEMA = json.dumps({"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]})
PARAMS = {
    "greedy": SamplingParams(max_new_tokens=6),
    "seeded": SamplingParams(max_new_tokens=6, temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=3),
    "unseeded": SamplingParams(max_new_tokens=6, temperature=0.9, top_p=0.9),
    "penalised": SamplingParams(
        max_new_tokens=8,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.2,
        min_new_tokens=3,
    ),
    "biased": SamplingParams(
        max_new_tokens=6,
        logit_bias={40: 5.0, 41: -3.0},
        bad_words=[[17], [3, 4]],
        stop_token_ids=[9],
    ),
    "allowed": SamplingParams(max_new_tokens=6, allowed_token_ids=[40, 41, 42]),
    "reported": SamplingParams(max_new_tokens=6, logprobs=3, prompt_logprobs=2, temperature=0.8, seed=5),
    "grammar": SamplingParams(max_new_tokens=12, json_schema=SCHEMA),
    "two": SamplingParams(max_new_tokens=5, n=2, best_of=3, temperature=1.0, seed=6, logprobs=1),
}
KERNEL_PARAMS = [
    SamplingParams(max_new_tokens=2),
    SamplingParams(max_new_tokens=2, temperature=1.3, top_k=9, top_p=0.8, seed=1),
    SamplingParams(max_new_tokens=2, temperature=0.9, min_p=0.1),
    SamplingParams(max_new_tokens=2, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, logprobs=2),
]
OPTIONS = {
    **{"max_tokens_per_step": 7, "preemption": True, "num_pages": 20, "max_running_requests": 4},
    **{"prefix_cache": "radix", "wait_for_prefix": 8},
}


def run(device: str) -> list[list[list[int]]]:
    with PretendGpu() if device == "cuda" else nullcontext():
        config = EngineConfig(device=device, grammar_backend="fsm", page_size=8, **OPTIONS)
        tokenizer = load_tokenizer(TINY_MODEL)
        engine = make_engine(load_driver(engine=config), tokenizer.backend_tokenizer)
        engine.driver.sampler.generator.manual_seed(5)
        if device == "cuda":
            assert all(
                device_of(tensor).type == "cuda" for tensor in (*engine.worker.pool.keys, engine.driver.model.embedding)
            )
        prompts = [tokenizer.encode(f"Once there was an owl named {name}") for name in ("Mila", "Mila", "Tom")]
        answers = engine.generate([prompts[i % 3] for i in range(len(PARAMS))], list(PARAMS.values()))
        engine.close()
    assert [each.error for samples in answers for each in samples] == [None] * sum(map(len, answers))
    return [[each.token_ids for each in samples] for samples in answers]


def test_an_engine_on_a_gpu_mixes_no_devices():
    assert run("cuda") == run("cpu")


def run_kernels(device: str, params: list[SamplingParams]) -> list[list[int]]:
    with PretendGpu() if device == "cuda" else nullcontext():
        generator = torch.Generator().manual_seed(0)
        weights = {
            name: (torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)).to(device)
            for name, shape in ONE_LAYER.weight_shapes().items()
        }
        config = EngineConfig(device=device, compute="triton", page_size=4, max_running_requests=8)
        engine = make_engine(make_driver(build_model(ONE_LAYER, weights, config), config, frozenset({60})))
        engine.driver.sampler.generator.manual_seed(5)
        answers = engine.generate([[3, 5, 7, 9, 2, i] for i in range(len(params))], params)
    assert [each.error for samples in answers for each in samples] == [None] * len(params)
    return [samples[0].token_ids for samples in answers]


@pytest.mark.slow
def test_an_engine_over_kernels_on_a_gpu_mixes_no_devices(monkeypatch):
    """Interpreted on both sides: the launchers around the kernels are what is looked at."""
    interpreted_bench()
    monkeypatch.setattr("mini_engine.kernels.attention.num_processors", lambda device: 1)
    monkeypatch.setattr("mini_engine.llm.free_memory", lambda device: 1 << 30)
    assert run_kernels("cuda", KERNEL_PARAMS) == run_kernels("cpu", KERNEL_PARAMS)


def interpreted_bench():
    """The benchmark's modules and its toy setting on a GPU; skips where kernels do not run interpreted."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if not importlib.import_module("mini_engine.kernels.launch").INTERPRETED:
        pytest.skip("kernels are compiled here: there is a GPU, which needs no pretence")
    bench, cases, engine = (
        importlib.import_module(f"mini_engine.bench.{name}")
        for name in ("kernels.command", "kernels.cases", "kernels.engine")
    )
    shape = cases.SHAPES["toy"]
    device = torch.device("cuda")
    return bench, engine, cases.Setting(shape, cases.TOY, device, torch.float32, compiled=False)


def test_kernels_for_a_second_gpu_make_it_the_current_one(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for device in ("cpu", "cuda", "cuda:1"):
        weights = {name: torch.zeros(shape) for name, shape in ONE_LAYER.weight_shapes().items()}
        build_model(ONE_LAYER, weights, EngineConfig(compute="triton", device=device))
    assert current == [torch.device("cuda:1")]


@pytest.mark.slow
def test_the_benchmark_of_kernels_on_a_gpu_mixes_no_devices():
    bench, _, setting = interpreted_bench()
    with PretendGpu():
        run = bench.Bench(bench.HostTimer(), None, seed=0)
        rows = list(bench.run_cases(run, [part for part in bench.PARTS if part != bench.ENGINE], setting))
    assert (run.failed, run.unavailable) == ({}, {})
    assert {row.part for row in rows} == set(bench.CASES)


@pytest.mark.slow
def test_the_benchmark_of_engines_on_a_gpu_mixes_no_devices():
    _, engine, setting = interpreted_bench()
    with PretendGpu():
        rows = list(engine.measure_engine("toy", setting, seed=0))
    assert [(row.system, row.same_ids) for row in rows] == [("transformers", 1.0), ("reference", 1.0), ("triton", 1.0)]


def test_what_serves_on_a_gpu_is_for_gpus():
    for compute in ("packed", "fast", "compiled"):
        with pytest.raises(ValueError, match=f"compute='{compute}' is for CPUs and the device is 'cuda:1'"):
            EngineConfig(device="cuda:1", compute=compute)
    with PretendGpu():
        engine = make_engine(load_driver(engine=EngineConfig.serving(device="cuda", num_pages=40)))
        answers = engine.generate([[5, 6, 7], [8, 9, 10, 11]], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert [len(samples[0].token_ids) for samples in answers] == [4, 4]


def test_the_pretence_notices_what_a_gpu_would_refuse():
    with PretendGpu():
        here = torch.arange(3)
        there = torch.arange(3, device="cuda")
        assert (there + 1).device.type == "cuda"
        assert there[here].device.type == "cuda"
        assert there.to("cpu").device.type == "cpu"
        assert (there * torch.tensor(2)).tolist() == [0, 2, 4]
        for wrong in (lambda: here + there, lambda: here[there], lambda: torch.cat((here, there)), there.numpy):
            with pytest.raises((RuntimeError, TypeError), match="cuda"):
                wrong()
        with pytest.raises(RuntimeError, match="same device"):
            there[here] = here
        there[:] = here
        assert there.tolist() == [0, 1, 2]
