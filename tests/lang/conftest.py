"""The embedded model, invariant, with a radix cache, and what a program's calls cost there."""

from dataclasses import replace

import pytest

from mini_engine.config import EngineConfig
from mini_engine.lang import ALWAYS_SHARE
from mini_engine.llm import LLM
from tests.support.engines import _one_thread  # noqa: F401  a fixture

CONFIG = EngineConfig(
    batch_invariant=True,
    compute="fast",
    max_running_requests=16,
    max_tokens_per_step=256,
    preemption=True,
    grammar_backend="fsm",
    **ALWAYS_SHARE,
)


def make_llm(**changes):
    return LLM(config=replace(CONFIG, **changes))


@pytest.fixture(scope="session")
def llm():
    return make_llm()
