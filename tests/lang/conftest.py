"""The embedded model, invariant, with a radix cache, and what a program's calls cost there."""

from dataclasses import replace

import pytest
import torch

from mini_engine.config import EngineConfig
from mini_engine.lang import ALWAYS_SHARE
from mini_engine.llm import LLM

CONFIG = EngineConfig(
    batch_invariant=True,
    compute="fast",
    max_running_requests=16,
    max_tokens_per_step=256,
    preemption=True,
    grammar_backend="fsm",
    **ALWAYS_SHARE,
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_llm(**changes):
    return LLM(config=replace(CONFIG, **changes))


@pytest.fixture(scope="session")
def llm():
    return make_llm()
