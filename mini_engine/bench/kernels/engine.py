"""The engine part of ``bench kernels``: whole models with and without kernels, compared with transformers.

All systems have the same random weights. All requests arrive at once and are equally long, so that transformers needs
no padding. No end-of-sequence id stops a request, so that all systems generate as many tokens.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mini_engine.attention.allocator import pages_needed
from mini_engine.bench.kernels.cases import Setting, Shape
from mini_engine.bench.peers import TokenClock, generate_greedily
from mini_engine.bench.serving import EngineSystem
from mini_engine.bench.workload import Job
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.llm import build_model, make_driver

PEER = "transformers"
SYSTEMS = ("reference", "triton")  # values of EngineConfig.compute
OVER_PEER = 2.0  # promised of "triton": tokens per second of decoding over those of transformers


@dataclass(frozen=True)
class Generated:
    """One load served once: its start, the times and ids of the tokens of each answer, and the peak memory."""

    began: float
    times: list[list[float]]
    token_ids: list[list[int]]
    peak_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over all of the time, that of the prompts included."""
        return sum(map(len, self.times)) / (max(own[-1] for own in self.times) - self.began)

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second from the moment when every answer has a first token."""
        start = max(own[0] for own in self.times)
        late = sum(moment > start for own in self.times for moment in own)
        return late / (max(own[-1] for own in self.times) - start)


@dataclass(frozen=True)
class EngineRow:
    """One system at one batch. ``decode_ratio``: its tokens per second of decoding over those of transformers.

    ``peak_bytes``: the most memory beyond the weights, caches included. ``same_ids``: the share of tokens before an
    answer first differs from that of transformers. Logits of random weights are so close that rounding decides.
    """

    shape: str
    system: str
    batch: int
    tokens_per_s: float
    decode_tokens_per_s: float
    decode_ratio: float
    peak_bytes: int
    same_ids: float


def make_peer(shape: Shape, setting: Setting, positions: int, seed: int) -> Qwen3ForCausalLM:
    """Make a model with random weights on the device."""
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        head_dim=shape.head_dim,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.inner,
        tie_word_embeddings=True,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    torch.manual_seed(seed)
    with setting.device:
        model: Qwen3ForCausalLM = AutoModelForCausalLM.from_config(config, dtype=setting.dtype)
    return model.eval()


def make_system(peer: Qwen3ForCausalLM, compute: str, setting: Setting, batch: int, tokens: int) -> EngineSystem:
    """Return the engine over the peer's weights, with room for ``batch`` requests of ``tokens`` tokens."""
    weights = {name: tensor.detach() for name, tensor in peer.state_dict().items() if name != "lm_head.weight"}
    config = EngineConfig.serving(
        compute=compute,
        device=str(setting.device),
        dtype=str(setting.dtype).removeprefix("torch."),
        page_size=setting.page_size,
        max_running_requests=batch,
        max_tokens_per_step=None,
        preemption=False,
        num_pages=batch * pages_needed(tokens, setting.page_size),
    )
    model = build_model(ModelConfig.from_hf(peer.config.to_dict()), weights, config)
    return EngineSystem(make_driver(model, config))


def with_engine(system: EngineSystem, jobs: list[Job], peak: Callable[[], int]) -> Generated:
    """Serve ``jobs`` once."""
    system.open()
    try:
        run = system.serve(jobs)
        most = peak()
    finally:
        system.close()
    return Generated(
        run.began, [answer.times.tokens for answer in run.answers], [answer.token_ids for answer in run.answers], most
    )


def with_peer(peer: Qwen3ForCausalLM, jobs: list[Job], peak: Callable[[], int]) -> Generated:
    """Serve ``jobs``, all of one length, in one call of ``generate``."""
    ids = torch.tensor([job.prompt_ids for job in jobs], device=peer.device)
    clock = TokenClock()
    began = time.perf_counter()
    out = generate_greedily(peer, ids, jobs[0].new_tokens, clock)
    answers = out[:, ids.shape[1] :].tolist()
    return Generated(began, [clock.times[1:] for _ in jobs], answers, peak())


class PeakMemory:
    """Measures the peak memory of a device beyond that at the start; 0 without a GPU."""

    def __init__(self, device: torch.device) -> None:
        """Reset the peak."""
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)

    def __call__(self) -> int:
        """Return the bytes."""
        return torch.cuda.max_memory_allocated(self.device) - self.before if self.device.type == "cuda" else 0


def common_share(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Return the share of tokens before the first difference of each pair of answers."""
    same = 0
    for a, b in zip(ours, theirs, strict=True):
        same += next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
    return same / sum(map(len, ours))


def measure_engine(name: str, setting: Setting, seed: int) -> Iterator[EngineRow]:
    """Run one model at every batch size. Each system runs twice, because the first run compiles kernels."""
    tokens, vocab = setting.sizes.engine_tokens, setting.shape.vocab
    peer = make_peer(setting.shape, setting, 4096, seed)
    source = random.Random(seed)
    for batch in setting.sizes.engine_batches:
        jobs = [Job(source.choices(range(vocab), k=tokens), tokens) for _ in range(batch)]
        served = {PEER: serve_twice(lambda peak, jobs=jobs: with_peer(peer, jobs, peak), setting)}  # type: ignore[misc]
        for compute in SYSTEMS:
            system = make_system(peer, compute, setting, batch, 2 * tokens)
            served[compute] = serve_twice(
                lambda peak, system=system, jobs=jobs: with_engine(system, jobs, peak),  # type: ignore[misc]
                setting,
            )
        yield from engine_rows(name, batch, served)


def serve_twice(serve: Callable[[Callable[[], int]], Generated], setting: Setting) -> Generated:
    """Serve a load twice and return the second time."""
    serve(lambda: 0)
    return serve(PeakMemory(setting.device))


def engine_rows(name: str, batch: int, served: dict[str, Generated]) -> list[EngineRow]:
    """Reduce one batch to a row for every system."""
    peer = served[PEER]
    return [
        EngineRow(
            shape=name,
            system=system,
            batch=batch,
            tokens_per_s=run.tokens_per_s,
            decode_tokens_per_s=run.decode_tokens_per_s,
            decode_ratio=run.decode_tokens_per_s / peer.decode_tokens_per_s,
            peak_bytes=run.peak_bytes,
            same_ids=common_share(run.token_ids, peer.token_ids),
        )
        for system, run in served.items()
    ]


def engine_goals(rows: list[EngineRow]) -> list[tuple[str, float, bool]]:
    """Return the promises for the engine with kernels, the measured values, and whether they are kept."""
    promised = []
    for row in rows:
        if row.system == "triton":
            text = f"engine {row.shape}, batch {row.batch}: decoding over transformers >= {OVER_PEER:g}"
            promised.append((text, row.decode_ratio, row.decode_ratio >= OVER_PEER))
    return promised
