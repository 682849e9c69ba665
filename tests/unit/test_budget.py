"""How many files and functions of the engine one decode step runs through: what a reader has to follow.

A comprehension is read where it stands, and from Python 3.12 on it is no call. So it does not count.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mini_engine
from mini_engine.config import EngineConfig
from mini_engine.llm import LLM
from mini_engine.sampler.params import SamplingParams

ROOT = str(Path(mini_engine.__file__).parent)
GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)
DRAWN = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=1.0, top_p=0.9, seed=3)
GUIDED = SamplingParams(max_new_tokens=40, regex="[a-z ]{30}")


@pytest.mark.parametrize(
    ("config", "params", "most_files", "most_functions"),
    [
        (EngineConfig(), GREEDY, 16, 75),
        (EngineConfig.serving(prefix_cache="radix"), DRAWN, 22, 105),
        (EngineConfig.serving(prefix_cache="radix", grammar_backend="fsm", jump_forward=True), GUIDED, 28, 130),
    ],
    ids=["off", "radix cache, drawn", "grammar with jumps"],
)
def test_a_decode_step_runs_through_few_files(
    config: EngineConfig, params: SamplingParams, most_files: int, most_functions: int
) -> None:
    engine = LLM(config=config).engine
    output = engine.entries[engine.add_request([5, 6, 7, 8], params)].output
    while len(output.token_ids) < 4:  # a grammar is compiled meanwhile
        engine.step()
    called = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and not code.co_name.endswith("comp>"):
            called.add(code)

    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    files = {str(Path(code.co_filename).relative_to(ROOT)) for code in called}
    assert len(files) <= most_files, sorted(files)
    assert len(called) <= most_functions
