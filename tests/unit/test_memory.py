"""How much memory is free, and what an engine does with it: the size of its KV pool and the longest request."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig, Qwen3Config

from mini_engine import LLM, EngineConfig, SamplingParams, device
from mini_engine.attention.pool import KVPool
from mini_engine.bench.machine import RANDOM, peak_rss
from mini_engine.checkpoint import TINY_MODEL, load_config
from mini_engine.families import EMBEDDING
from mini_engine.llm import load_driver, make_engine

TINY = load_config(TINY_MODEL)
SLOT = sum(tensor.numel() * 4 for pool in [KVPool(TINY, 1, 1, torch.float32)] for tensor in pool.keys + pool.values)
SLOT //= 2  # that pool has a slot of zeros, too
FOUR = SamplingParams(max_new_tokens=4, ignore_eos=True)


@pytest.fixture(autouse=True)
def _no_cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(device, "OWN_CGROUP", tmp_path / "own")


def have(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    """Pretend that of 1 TiB so many bytes are available."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**40, available=available))


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def long_model(folder: Path) -> Path:
    """The embedded model with as many positions as new checkpoints have."""
    shutil.copytree(TINY_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 262_144}))
    return folder


# ---- what is free ----


def test_what_is_available_counts_and_not_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 5000)
    assert device.free_memory("cpu") == 5000


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ({"memory__max": 9000, "memory__current": 4000}, {}, 5300),
        ({"memory__max": "max", "memory__current": 4000}, {"memory__max": 7000, "memory__current": 6000}, 1300),
        ({"memory__max": 9000, "memory__current": 4000}, {"memory__max": 7000, "memory__current": 6000}, 1300),
        ({"memory__max": 3000, "memory__current": 4000}, {}, 0),
        ({"memory__max": "max", "memory__current": 4000}, {}, 8000),
        ({}, {}, 8000),
    ],
)
def test_a_cgroup_and_those_around_it_limit_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: dict[str, Any], limits: dict[str, Any], expected: int
) -> None:
    """Pages of files, which the kernel gives back, are free."""
    have(monkeypatch, 8000)
    stat = "anon 1\nactive_file 100\ninactive_file 200\nfile 999"
    write(tmp_path, own="0::/outer/inner")
    write(tmp_path / "cgroup" / "outer" / "inner", **own, memory__stat=stat)
    write(tmp_path / "cgroup" / "outer", **limits, memory__stat=stat)
    assert device.free_memory("cpu") == expected


def test_a_cgroup_of_version_1_limits_it_as_the_host_and_as_its_container_see_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    have(monkeypatch, 8000)
    write(tmp_path, own="12:cpu,cpuacct:/job\n4:memory:/job\n0::/")
    files = {"memory__usage_in_bytes": 400, "memory__stat": "inactive_file 7\ntotal_inactive_file 50"}
    top = tmp_path / "cgroup" / "memory"
    write(top, memory__limit_in_bytes=2**63 - 4096, **files)
    write(top / "job", memory__limit_in_bytes=1000, **files)
    assert device.free_memory("cpu") == 650
    shutil.rmtree(top / "job")
    assert device.free_memory("cpu") == 8000
    write(top, memory__limit_in_bytes=2000, **files)
    assert device.free_memory("cpu") == 1650


# ---- the pool ----


def test_a_pool_that_does_not_fit_is_refused_and_the_advice_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 100 * 16 * SLOT + 5)
    with pytest.raises(ValueError, match=r"^a KV pool of 101 pages of 16 .* at most 100 pages \(num_pages\), or for"):
        KVPool(TINY, 101, 16, torch.float32)
    assert KVPool(TINY, 100, 16, torch.float32).num_pages == 100


def test_a_limit_of_the_container_counts_for_the_pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    have(monkeypatch, 2**40)
    write(tmp_path, own="0::/")
    write(tmp_path / "cgroup", memory__max=2**20 + 7 * SLOT, memory__current=2**20, memory__stat="anon 5")
    with pytest.raises(ValueError, match="at most 7 pages"):
        KVPool(TINY, 8, 1, torch.float32)


# ---- the longest request ----


def test_a_long_checkpoint_runs_with_the_positions_that_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Room for 3000 positions of 262,144, a tenth of which is left free: 168 whole pages."""
    folder = long_model(tmp_path / "model")
    expected = load_driver(TINY_MODEL).generate([5, 6, 7], 4).token_ids
    have(monkeypatch, 3000 * SLOT)
    told = (
        r"the KV pool has 168 pages \(num_pages\), and a request at most 2688 of .* 262144 positions \(max_model_len\)"
    )
    with pytest.warns(UserWarning, match=told):
        llm = LLM(folder, compute="reference", max_running_requests=2)
    assert (llm.engine.worker.pool.num_pages, llm.engine.driver.config.max_model_len) == (168, 2688)
    right, wrong = llm.generate([[5, 6, 7], [5] * 2688], FOUR)
    assert right.token_ids == expected
    assert wrong.error == (
        "a prompt of 2688 tokens and max_new_tokens=4 need 2692 positions, and max_model_len is 2688; shorten the "
        "prompt, ask for fewer tokens or raise max_model_len"
    )


@pytest.mark.parametrize(
    ("options", "pages", "most"),
    [
        ({"max_model_len": 1000}, 168, 1000),  # the pool of three requests shrinks, the length stays
        ({"max_model_len": 800}, 150, 800),  # fits as it is
        ({"num_pages": 10}, 10, None),
    ],
)
def test_what_is_given_is_kept(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, options: Any, pages: int, most: int | None
) -> None:
    have(monkeypatch, 3000 * SLOT)
    engine = make_engine(load_driver(engine=EngineConfig(max_running_requests=3, **options)))
    assert (engine.worker.pool.num_pages, engine.driver.config.max_model_len) == (pages, most)
    assert len(recwarn) == (pages == 168)


def test_a_length_that_does_not_fit_is_refused_with_both_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 500 * SLOT)
    with pytest.raises(ValueError, match=r"at most 31 pages \(num_pages\), or for fewer positions \(max_model_len\)"):
        make_engine(load_driver(engine=EngineConfig(max_model_len=600)))


def test_nothing_changes_where_all_fits(recwarn: pytest.WarningsRecorder) -> None:
    config = EngineConfig()
    driver = load_driver(engine=config)
    assert driver.config is config
    assert make_engine(driver).worker.pool.num_pages == TINY.max_position_embeddings // 16
    assert not recwarn


def test_a_limit_holds_on_every_path() -> None:
    config = EngineConfig(max_model_len=10)
    driver = load_driver(engine=config)
    assert config.pool_pages(TINY) == 1
    unlimited = load_driver().generate([5, 6, 7], 7).token_ids
    assert driver.generate([5, 6, 7], 7).token_ids == unlimited
    runs: list[Any] = [
        lambda: driver.generate([5, 6, 7], 8),
        lambda: driver.complete([5, 6, 7], SamplingParams(max_new_tokens=8)),
        lambda: make_engine(driver).add_request([5, 6, 7], SamplingParams(max_new_tokens=8)),
    ]
    for run in runs:
        with pytest.raises(ValueError, match="need 11 positions, and max_model_len is 10"):
            run()


def test_more_positions_than_the_model_has_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    shutil.copy(TINY_MODEL / "config.json", tmp_path)
    with pytest.raises(ValueError, match="max_model_len is 2049 and the model has 2048 positions"):
        load_driver(tmp_path, EngineConfig(max_model_len=2049))


# ---- loading ----

LOADING = """
import json, sys, time, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM
from mini_engine.attention.dense import DenseAttention, sdpa_attention
from mini_engine.bench.machine import forget_peak, peak_rss, settled_rss
from mini_engine.checkpoint import TINY_MODEL
from mini_engine.config import EngineConfig
from mini_engine.llm import load_model

folder, dtype, system, quantize = sys.argv[1:]
if system == "compiled":  # the compiler and its code are no weights
    load_model(TINY_MODEL, EngineConfig(compute=system, dtype=dtype, quantize=quantize))
before = settled_rss()
forget_peak()
began = time.perf_counter()
with torch.inference_mode():
    if system == "transformers":
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(torch.arange(2)[None])
    else:
        model = load_model(Path(folder), EngineConfig(compute=system, dtype=dtype, quantize=quantize))
        model(torch.arange(2), torch.arange(2), DenseAttention(sdpa_attention))
print(json.dumps([time.perf_counter() - began, peak_rss() - before]))
"""


def write_zeros(folder: Path, config: PretrainedConfig, dtype: str, num_shards: int) -> tuple[int, int]:
    """Write a checkpoint -> the bytes of its weights, and those of its embeddings."""
    config.save_pretrained(folder)
    shapes = load_config(folder).weight_shapes()
    files = {name: f"model-{number % num_shards}.safetensors" for number, name in enumerate(shapes)}
    for file in sorted(set(files.values())):
        own = {name: torch.zeros(shapes[name], dtype=getattr(torch, dtype)) for name in files if files[name] == file}
        save_file(own, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    size = getattr(torch, dtype).itemsize
    return size * sum(map(math.prod, shapes.values())), size * math.prod(shapes[EMBEDDING])


def peak_of_loading(folder: Path, dtype: str, system: str, quantize: str = "off") -> int:
    """Load a checkpoint and compute two tokens in a process of their own -> the bytes of memory that this took."""
    command = [sys.executable, "-c", LOADING, folder, dtype, system, quantize]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-300:]
    seconds, peak = json.loads(done.stdout)
    print(f"\n{system} {quantize}: {seconds:.1f} s, {peak / 1e6:.0f} MB")
    return int(peak)


@pytest.mark.slow
@pytest.mark.skipif(not peak_rss(), reason="this system does not report a process's peak memory")
@pytest.mark.parametrize(
    ("shape", "dtype", "num_shards"), [("0.6b", "float32", 1), ("llama-1b", "bfloat16", 3)], ids=["0.6b", "1b"]
)
def test_a_model_is_never_in_memory_twice(tmp_path: Path, shape: str, dtype: str, num_shards: int) -> None:
    """Pages of files count too, so a file must be let go as well. A tied head is packed, which is a second table."""
    weights, head = write_zeros(tmp_path, RANDOM[shape](), dtype, num_shards)
    for system in ("reference", "packed", "fast", "transformers"):
        peak = peak_of_loading(tmp_path, dtype, system)
        assert system == "transformers" or peak < 1.05 * (weights + head * (system != "reference")), system


@pytest.mark.slow
@pytest.mark.skipif(not peak_rss(), reason="this system does not report a process's peak memory")
def test_of_a_quantized_model_memory_holds_one_unrounded_matrix(tmp_path: Path) -> None:
    """The largest is the table of embeddings. It has 8 bits; of other matrices 32 weights have 4 bytes beside."""
    shape = Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
    )
    weights, table = write_zeros(tmp_path, shape, "bfloat16", 1)
    rounded = table / 2 + (weights - table) * (4 + 4 * 8 / 32) / 16
    for system in ("fast", "compiled"):
        assert peak_of_loading(tmp_path, "bfloat16", system, "int4") < 1.2 * (rounded + table), system
