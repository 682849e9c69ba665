"""Many generations through the engine, far from what the model would say: each that ends is what its grammar asked for.

``MINI_ENGINE_GENERATIONS`` of them, 800 without that variable. The oracles are ``jsonschema`` and ``re``.
"""

import json
import os
import random
import re
from collections import Counter
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from mini_engine.config import EngineConfig
from mini_engine.sampler.params import SamplingParams
from mini_engine.tiny import corpus
from tests.support.forms import GRAMMARS, SCHEMAS
from tests.support.grammars import (
    PROMPTS,
    _one_thread,  # noqa: F401
    make_engine,
    question,
)

GENERATIONS = int(os.environ.get("MINI_ENGINE_GENERATIONS", "800"))


def is_valid(grammar: dict[str, Any], text: str) -> bool:
    if "regex" in grammar:
        return re.fullmatch(grammar["regex"], text, re.ASCII) is not None
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return Draft202012Validator(grammar["json_schema"], format_checker=Draft202012Validator.FORMAT_CHECKER).is_valid(
        value
    )


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(1)
    return [question(corpus.record_task(rng).prompt) if i % 4 else PROMPTS[i // 4 % 4] for i in range(count)]


def test_the_schemas_are_schemas() -> None:
    for schema in SCHEMAS:
        Draft202012Validator.check_schema(schema)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "share", "jump"),
    [
        ("fsm", 0.6, False),
        ("fsm", 0.2, True),
        ("xgrammar", 0.1, False),
        ("llguidance", 0.1, False),
    ],
)
def test_every_generation_that_ends_is_valid(backend: str, share: float, jump: bool) -> None:
    """At temperature 1.5, where the model alone hardly writes a valid line: the control below."""
    count = round(GENERATIONS * share)
    if backend != "fsm":
        pytest.importorskip(backend)
    config = EngineConfig(
        compute="fast",
        max_running_requests=48,
        max_tokens_per_step=1024,
        preemption=True,
        grammar_backend=backend,
        jump_forward=jump,
    )
    chosen = [GRAMMARS[index % len(GRAMMARS)] for index in range(count)]
    params = [SamplingParams(temperature=1.5, seed=i, max_new_tokens=40, **own) for i, own in enumerate(chosen)]
    ended: Counter[str | None] = Counter()
    for (output,), grammar in zip(make_engine(config=config).generate(prompts(count), params), chosen, strict=True):
        ended[output.finish_reason] += 1
        if output.finish_reason == "error":
            refused = "oneOf" in grammar.get("json_schema", {}) or "which xgrammar reads as more" in output.error
            assert refused, output.error
            assert backend != "fsm"  # the libraries' adapters refuse what the library means less by
            continue
        whole = is_valid(grammar, output.text)
        if output.finish_reason == "stop":
            assert whole, (grammar, output.text)
            assert output.is_grammar_complete
        else:
            assert output.finish_reason == "length"
            assert whole or not output.is_grammar_complete, (grammar, output.text)
    assert ended["stop"] >= 0.6 * count, ended


def test_without_grammars_hardly_any_is_valid() -> None:
    engine = make_engine(config=EngineConfig(compute="fast", max_running_requests=48))
    params = [SamplingParams(temperature=1.5, seed=i, max_new_tokens=40) for i in range(48)]
    answers = engine.generate(prompts(48), params)
    valid = [is_valid(GRAMMARS[i % len(GRAMMARS)], answer.text) for i, (answer,) in enumerate(answers)]
    assert sum(valid) <= 4
