"""Engines over small models, requests drawn for them, and what each of those gets alone."""

import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from mini_engine import llm
from mini_engine.checkpoint import TINY_MODEL, load_eos_ids
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.detokenizer import Detokenizer
from mini_engine.engine import Engine
from mini_engine.llm import build_model, load_model
from mini_engine.model import Qwen3
from mini_engine.outputs import Delta, RequestOutput, StepOutput
from mini_engine.radix_cache import RadixCache
from mini_engine.sampler.driver import SampledStep, SamplingDriver
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.processors.base import History, LogitsProcessor, Vocabulary
from mini_engine.sampler.sampler import Sampler

TRACES = int(os.environ.get("MINI_ENGINE_TRACES", "6"))
EXAMPLES = 10 * TRACES  # of a property, drawn by Hypothesis
TOKENIZER = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
EOS = load_eos_ids(TINY_MODEL)
BEGINNINGS = [
    "Once upon a time there was a little",
    "The",
    "One day, a cat named",
    "Record: name",
    "She had a red ball",
]
INVARIANT = EngineConfig(batch_invariant=True)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_config() -> ModelConfig:
    return ModelConfig.from_hf(SMALL.to_dict())


def make_state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return dict(Qwen3ForCausalLM(SMALL).state_dict())


SMALL = Qwen3Config(
    vocab_size=301,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=5,
    num_key_value_heads=1,
    head_dim=24,
    intermediate_size=100,
    max_position_embeddings=512,
    initializer_range=0.15,
    tie_word_embeddings=False,
)


@cache
def make_model(name: str, dtype: str, invariant: bool, compute: str = "reference") -> Qwen3:
    """The embedded model, or a small random one whose ids are the first of the same tokenizer's."""
    engine = EngineConfig(dtype=dtype, batch_invariant=invariant, compute=compute)
    if name == "embedded":
        return load_model(TINY_MODEL, engine)
    weights = {k: v.to(getattr(torch, dtype)) for k, v in make_state().items()}
    return build_model(small_config(), weights, engine)


def make_driver(name: str = "embedded", config: EngineConfig = INVARIANT, **parts: Any) -> SamplingDriver:
    model = make_model(name, config.dtype, config.batch_invariant, config.compute)
    parts.setdefault("sampler", Sampler(generator=torch.Generator().manual_seed(5)))
    return llm.make_driver(model, config, EOS if name == "embedded" else frozenset({5}), **parts)


def make_engine(name: str = "embedded", config: EngineConfig = INVARIANT, text: bool = True, **parts: Any) -> Engine:
    return llm.make_engine(make_driver(name, config, **parts), TOKENIZER if text else None)


def serving(**changes: object) -> EngineConfig:
    defaults = {"batch_invariant": True, "max_running_requests": 4, "max_tokens_per_step": 16, "preemption": True}
    return EngineConfig(**(defaults | changes))


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@dataclass
class Expected:
    """What a request must give: from the driver's steps, cut at the first stop string."""

    token_ids: list[int]
    logits: list[Tensor]
    logprobs: list[Any]
    prompt_logprobs: Any
    text: str
    finish_reason: str | None
    matched: int | str | None


def lonely(steps: Sequence[SampledStep], params: SamplingParams) -> Expected:
    detokenizer = Detokenizer(TOKENIZER, params.stop, params.min_new_tokens)
    used = []
    for step in steps:
        if step.error is not None:
            break
        used.append(step)
        if step.finish_reason == "stop":
            break  # a stop token has no text
        detokenizer.add(step.token_id)
        if detokenizer.matched is not None:
            break
    token = used[-1].token_id if used and used[-1].finish_reason == "stop" else None
    detokenizer.flush()
    reason = "stop" if detokenizer.matched is not None else steps[-1].finish_reason
    return Expected(
        token_ids=[step.token_id for step in used],
        logits=[step.logits for step in used],
        logprobs=[step.logprobs for step in used if step.logprobs is not None],
        prompt_logprobs=steps[0].prompt_logprobs,
        text=detokenizer.text,
        finish_reason=reason,
        matched=detokenizer.matched if token is None else token,
    )


def assert_like(output: RequestOutput, expected: Expected) -> None:
    """Everything but the logits, exactly: floats are compared as bits, because equal logits give equal ones."""
    assert output.token_ids == expected.token_ids
    assert output.text == expected.text
    assert (output.finish_reason, output.matched) == (expected.finish_reason, expected.matched)
    assert output.logprobs == expected.logprobs
    assert output.prompt_logprobs == expected.prompt_logprobs


def alone(name: str, prompt: Sequence[int], params: SamplingParams, config: EngineConfig = INVARIANT) -> Expected:
    kept = {option: getattr(config, option) for option in ("dtype", "batch_invariant", "compute")}
    config = EngineConfig(**kept)
    return lonely(list(make_driver(name, config).stream(prompt, replace(params, stop=()))), params)


@dataclass
class Planned:
    """A request of a trace: when it comes, when it is aborted if it is, and what came out."""

    prompt: list[int]
    params: SamplingParams
    arrives: int
    aborted: int | None
    deltas: list[Delta] = field(default_factory=list)
    output: RequestOutput | None = None


def check_equal(planned: Planned, expected: Expected) -> None:
    """All of it, bit for bit; of an aborted request what it had come to."""
    output = planned.output
    tokens = [d for d in planned.deltas if d.token_id is not None]
    assert output is not None
    assert "".join(delta.text for delta in planned.deltas) == output.text
    assert [delta.token_id for delta in tokens] == output.token_ids
    assert [d.finish_reason for d in planned.deltas if d.finish_reason] == [output.finish_reason]
    count = len(output.token_ids)
    assert all(torch.equal(d.logits, logits) for d, logits in zip(tokens, expected.logits[:count], strict=True))
    if output.finish_reason != "abort":
        assert_like(output, expected)
        return
    assert planned.aborted is not None
    assert output.token_ids == expected.token_ids[:count]
    assert output.logprobs == expected.logprobs[:count]
    assert output.prompt_logprobs == (expected.prompt_logprobs or [])[: len(output.prompt_logprobs or ())] or (
        output.prompt_logprobs is None
    )
    text = Detokenizer(TOKENIZER, planned.params.stop, planned.params.min_new_tokens)
    assert output.text == "".join(map(text.add, output.token_ids)) + text.flush()


def poison_freed_pages(engine: Engine) -> None:
    """Fill pages with NaN when they are freed, and all of them now: an answer that reads one shows it. Mutates."""
    allocator = engine.scheduler.allocator
    free = allocator.free

    def poison(pages: Sequence[int]) -> None:
        free(pages)
        engine.worker.pool.poison(list(pages))

    engine.worker.pool.poison(list(range(allocator.num_pages)))
    allocator.free = poison  # type: ignore[method-assign]


def check_pages(engine: Engine) -> None:
    """Every page is free, cached or owned by one request, and a cache counts right."""
    engine.scheduler.check_pages()
    if isinstance(engine.scheduler.cache, RadixCache):
        engine.scheduler.cache.check()


def check_idle(engine: Engine) -> None:
    """Nothing is left behind: no request, no entry, no page but cached ones that could be given up."""
    scheduler = engine.scheduler
    cache = scheduler.cache
    assert not engine.has_work
    assert engine.entries == {}
    assert scheduler.allocator.num_free + cache.num_pages == scheduler.allocator.num_pages
    assert cache.num_evictable == cache.num_pages
    check_pages(engine)


def run_trace(
    engine: Engine, planned: Sequence[Planned], tight: bool, shuffle: random.Random | None = None
) -> list[StepOutput]:
    """Drive requests to their ends, checking every step -> the steps. Sets the deltas and outputs of ``planned``.

    ``tight``: no request is expected to grow, so pages run out soon. ``shuffle`` draws the order of the rows, on which
    no answer may depend.
    """
    poison_freed_pages(engine)
    names: dict[str, Planned] = {}
    steps: list[StepOutput] = []
    while engine.has_work or len(names) < len(planned) or engine.deltas:
        for one in planned:
            if one.arrives == len(steps):
                names[engine.add_request(one.prompt, one.params)] = one
        for name, one in names.items():
            if one.aborted == len(steps):
                engine.abort(name)
        if tight:
            engine.scheduler.growth.ratio = 0.0
        if shuffle is not None:
            shuffle.shuffle(engine.scheduler.running)
        steps.append(engine.step())
        check_pages(engine)
        for delta in steps[-1].deltas:
            names[delta.request_id].deltas.append(delta)
    for name, one in names.items():
        one.output = engine.take_output(name)
    check_idle(engine)
    return steps


class Spoiler(LogitsProcessor[int]):
    """Writes NaN into its row when ``after`` tokens were generated."""

    @classmethod
    def start(cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary) -> int:
        return arguments["after"] - len(history.output_ids)

    def advance(self, state: int, token_id: int) -> int:
        return state - 1

    def apply(self, logits: Tensor) -> None:
        for row, left in self.states.items():
            if left <= 0:
                logits[row, 3] = math.nan


class Thrower(LogitsProcessor[int]):
    """Raises in one of its methods when ``after`` tokens were generated."""

    @classmethod
    def start(cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary) -> int:
        left = arguments["after"] - len(history.output_ids)
        if history.prompt_ids and left <= 0 and arguments["place"] == "start":
            raise RuntimeError("in start")
        return left * 2 + (arguments["place"] == "advance")

    def advance(self, state: int, token_id: int) -> int:
        if state == 3:
            raise RuntimeError("in advance")
        return state - 2

    def apply(self, logits: Tensor) -> None:
        if any(state == 0 for state in self.states.values()):
            raise RuntimeError("in apply")
