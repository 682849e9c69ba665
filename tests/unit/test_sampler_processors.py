"""Logits processors from outside: the registry, their arguments, pickled code, what a driver and its head refuse."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dill
import pytest
import torch
from torch import Tensor

from mini_engine.config import EngineConfig
from mini_engine.llm import load_model
from mini_engine.sampler.batch import BUILT_IN, SamplingBatch, SamplingRequest
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.head import LogitsHead
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.processors.base import History, LogitsProcessor, Vocabulary
from mini_engine.sampler.processors.pickled import from_text, to_text
from mini_engine.sampler.processors.registry import (
    REGISTRY,
    RESERVED,
    check_processors,
    find_processor,
    register_processor,
)

VOCABULARY = Vocabulary(20, frozenset({0}))


@pytest.fixture(autouse=True)
def _restore_registry() -> Iterator[None]:
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


class Favourite(LogitsProcessor[int]):
    """Raises one token by its ``by``; the smallest processor that is not ours."""

    @classmethod
    def start(cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary) -> int | None:
        if not 0 <= arguments["token"] < vocabulary.size:
            raise ValueError(f"token of favourite is {arguments['token']}")
        return arguments["token"]

    def apply(self, logits: Tensor) -> None:
        for row, token in self.states.items():
            logits[row, token] += 50.0


def process(logits: Tensor, *choices: Mapping[str, Any] | None, **more: Any) -> Tensor:
    requests = [SamplingRequest([5], SamplingParams(logits_processors=choice, **more)) for choice in choices]
    return SamplingBatch.from_requests(requests, VOCABULARY).process(logits)


# The registry


def test_names_are_given_once_and_unknown_ones_are_refused() -> None:
    """The same class again is no conflict: a notebook cell runs twice, a module is reloaded."""
    register_processor("favourite")(Favourite)
    register_processor("favourite")(Favourite)
    assert find_processor("favourite") is Favourite
    with pytest.raises(ValueError, match=r"'disallowed_tokens' is already DisallowedTokens"):
        register_processor("disallowed_tokens")(Favourite)
    with pytest.raises(ValueError, match=r"'favourit'.*disallowed_tokens, .*no_repeat_ngram, .*thinking_budget"):
        check_processors({"favourit": {}}, VOCABULARY)


def test_names_of_plain_parameters_are_reserved() -> None:
    assert set(BUILT_IN) < set(RESERVED)
    for name in RESERVED:
        with pytest.raises(ValueError, match=f"'{name}' is a parameter of its own"):
            register_processor(name)(Favourite)


def test_a_processor_that_keeps_the_argmax_is_not_built_for_greedy_rows() -> None:
    class Polite(Favourite):
        is_argmax_invariant = True

    register_processor("polite")(Polite)
    requests = [
        SamplingRequest([5], SamplingParams(temperature=t, logits_processors={"polite": {"token": 7}}))
        for t in (0.0, 1.0)
    ]
    batch = SamplingBatch.from_requests(requests, VOCABULARY)
    assert list(batch.processors["polite"].states) == [1]


# Arguments


@pytest.mark.parametrize(
    ("name", "arguments", "parts"),
    [
        ("disallowed_tokens", {"token_ids": [20]}, ["token_ids", "20", "0 to 19"]),
        ("disallowed_tokens", {"token_ids": 0}, ["token_ids", "0"]),
        ("disallowed_tokens", {"token_ids": ""}, ["token_ids", "''"]),
        ("disallowed_tokens", {"token_ids": [True]}, ["token_ids", "True"]),
        ("disallowed_tokens", {"tokens": [1]}, ["disallowed_tokens", "'tokens'", "token_ids"]),
        ("disallowed_tokens", {1: [1], "a": 2}, ["disallowed_tokens", "1", "token_ids"]),
        ("no_repeat_ngram", {}, ["no_repeat_ngram", "ngram_size"]),
        ("no_repeat_ngram", {"ngram_size": 0}, ["ngram_size", "0"]),
        ("no_repeat_ngram", {"ngram_size": True}, ["ngram_size", "True"]),
        ("no_repeat_ngram", {"ngram_size": 2, "window_size": 0}, ["window_size", "0"]),
        ("no_repeat_ngram", {"ngram_size": 2, "whitelist_token_ids": [99]}, ["whitelist_token_ids", "99"]),
        ("thinking_budget", {"start": 1, "end": 2}, ["thinking_budget", "budget"]),
        ("thinking_budget", {"budget": -1, "start": 1, "end": 2}, ["budget", "-1"]),
        ("thinking_budget", {"budget": 3}, ["thinking_budget", "start"]),
        ("thinking_budget", {"budget": 3, "start": 1, "end": 20}, ["20", "0 to 19"]),
        ("thinking_budget", {"budget": 3, "start": 1, "end": 2, "newline": "\n"}, ["newline", "'\\n'"]),
        ("thinking_budget", {"budget": 3, "model": "qwen3"}, ["151668", "0 to 19"]),
        ("thinking_budget", {"budget": 3, "model": ["qwen3"]}, ["['qwen3']", "qwen3, deepseek-r1"]),
        ("thinking_budget", {"budget": 3, "model": "qwen3", "end": 4}, ["model", "ids"]),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused_by_name(
    name: str, arguments: dict[Any, Any], parts: list[str]
) -> None:
    """``token_ids: 0`` once passed for an empty list, and a list for a model's name was a ``TypeError``."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        check_processors({name: arguments}, VOCABULARY)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.fixture
def driver(untied: Path) -> SamplingDriver:
    return SamplingDriver(load_model(untied, EngineConfig()), EngineConfig(), frozenset({5}))


def test_the_driver_refuses_a_request_before_it_runs_if_one_of_its_processors_does(driver: SamplingDriver) -> None:
    params = SamplingParams(logits_processors={"disallowed_tokens": {"token_ids": [1]}, "no_repeat_ngram": {}})
    for run in (driver.check_params, driver.stream, driver.complete):
        with pytest.raises(ValueError, match="no_repeat_ngram"):
            run([1, 2, 3], params)


def test_a_resumed_request_reports_the_prompt_alone(driver: SamplingDriver) -> None:
    params = SamplingParams(max_new_tokens=4, prompt_logprobs=1)
    written = [step.token_id for (step,) in driver.run([SamplingRequest([1, 2, 3], params)])]
    reports = []
    for ids in ([], written[:2]):
        ((step,), *_) = driver.run([SamplingRequest([1, 2, 3], params, ids)])
        assert step.prompt_logprobs is not None
        assert step.prompt_logprobs[0] is None
        reports.append([each[0].token_id for each in step.prompt_logprobs if each])
    assert reports[0] == reports[1] == [2, 3]


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_the_head_refuses_factors_that_make_no_logits(value: float) -> None:
    """A soft cap of infinity is not "off": 0 times infinity is NaN."""
    for name in ("scale", "soft_cap"):
        with pytest.raises(ValueError, match=f"{name} is .*finite number above 0"):
            LogitsHead(**{name: value})


# Pickled code


def test_pickled_code_is_refused_without_the_word_of_trust_and_not_even_looked_at() -> None:
    with pytest.raises(ValueError, match=r"CVE-2026-7304.*trust_pickled_code=True"):
        from_text(to_text(Favourite))


def test_a_pickled_processor_works_when_it_is_trusted() -> None:
    """A class without a home in a module: its whole code travels."""

    class Homeless(LogitsProcessor[int]):
        @classmethod
        def start(cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary) -> int | None:
            return int(arguments["token"])

        def apply(self, logits: Tensor) -> None:
            for row, token in self.states.items():
                logits[row, token] += 50.0

    text = to_text(Homeless)
    assert list(json.loads(text)) == ["callable"]
    arrived = from_text(text, trust_pickled_code=True)
    register_processor("arrived")(arrived)
    logits = torch.randn(1, 20)
    assert process(logits, {"arrived": {"token": 4}})[0, 4] == logits[0, 4] + 50.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"callable": 5}',
        '{"callable": "zz"}',
        '{"callable": "00"}',
        json.dumps({"callable": b"cno_such_module\nthing\n.".hex()}),
        json.dumps({"callable": dill.dumps(5).hex()}),
        json.dumps({"callable": dill.dumps(print).hex()}),
    ],
)
def test_trusted_text_that_holds_no_processor_is_a_value_error(text: str) -> None:
    """A damaged pickle fails in its own ways: ``UnpicklingError``, ``EOFError``, ``ModuleNotFoundError``."""
    with pytest.raises(ValueError, match=r"no LogitsProcessor class|not a pickled processor"):
        from_text(text, trust_pickled_code=True)
