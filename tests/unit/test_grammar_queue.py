"""Requests wait for their grammars: nobody else does, one compile serves all who ask, and a failure has one victim.

Compiles are held by gates that the tests open, so that nothing depends on how fast a machine is.
"""

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from mini_engine.async_engine import AsyncEngine
from mini_engine.config import EngineConfig
from mini_engine.engine import Engine
from mini_engine.grammar import store as store_module
from mini_engine.grammar.base import REGISTRY
from mini_engine.grammar.fsm import FsmBackend, FsmGrammar
from mini_engine.outputs import Delta
from mini_engine.sampler.params import GrammarKey, GrammarKind, SamplingParams
from tests.support.engines import assert_like, check_idle
from tests.support.grammars import (
    PROMPTS,
    _one_thread,  # noqa: F401
    _oracle,  # noqa: F401
    alone,
    answer_of,
    make_engine,
    serving,
)

PROMPT = PROMPTS[2]
FREE = SamplingParams(max_new_tokens=6, ignore_eos=True)
BOUND = SamplingParams(max_new_tokens=6, regex="[a-z ]{30}")
SLOW = SamplingParams(max_new_tokens=6, regex="slow[a-z]{30}")
LONG_S = 30.0  # nobody waits so long: a test that would, fails


class GatedBackend(FsmBackend):
    """Compiles what begins with "slow" when its gate is opened; counts; fails and misbehaves as the text says."""

    gates: dict[str, threading.Event]
    compiled: Counter[GrammarKey]

    def build(self, kind: GrammarKind, text: str) -> FsmGrammar:
        self.compiled[kind, text] += 1
        if text.startswith("slow"):
            assert self.gates[text].wait(LONG_S), "a gate that nobody opened"
        if "crash" in text:
            raise RuntimeError("the compiler crashed")
        grammar = super().build(kind, text)
        return {"bad_fill": BadFill, "refuses": Refuses, "bad_accept": BadAccept}.get(text, FsmGrammar)(
            grammar.compiled
        )


class BadFill(FsmGrammar):
    def fill_vocab_mask(self, mask: Tensor, row: int) -> None:
        if len(self.states) == 3:
            raise OSError("in fill")
        super().fill_vocab_mask(mask, row)


class Refuses(FsmGrammar):
    """Its mask allows what it does not accept."""

    def fill_vocab_mask(self, mask: Tensor, row: int) -> None:
        if len(self.states) < 3:
            super().fill_vocab_mask(mask, row)


class BadAccept(FsmGrammar):
    def accept_token(self, token_id: int) -> None:
        if len(self.states) == 3:
            raise KeyError("in accept")
        super().accept_token(token_id)


class BadJump(FsmGrammar):
    def try_jump_forward(self) -> bytes:
        raise OSError("in jump")


class Gates:
    """Opens the compiles of one test."""

    def __init__(self) -> None:
        self.events: dict[str, threading.Event] = {}
        self.compiled: Counter[GrammarKey] = Counter()

    def __getitem__(self, text: str) -> threading.Event:
        return self.events.setdefault(text, threading.Event())

    def open(self, *texts: str) -> None:
        for text in texts or list(self.events):
            self[text].set()


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gates]:
    gates = Gates()
    monkeypatch.setattr(GatedBackend, "gates", gates, raising=False)
    monkeypatch.setattr(GatedBackend, "compiled", gates.compiled, raising=False)
    monkeypatch.setitem(REGISTRY.factories, "gated", GatedBackend)
    yield gates
    gates.open()


def gated(**changes: Any) -> EngineConfig:
    return serving(**{"grammar_backend": "gated", **changes})


def step_until(engine: Engine, is_done: Callable[[], bool]) -> list[Delta]:
    deltas, end = [], time.monotonic() + LONG_S
    while not is_done():
        assert time.monotonic() < end, "nothing came of it"
        deltas += engine.step().deltas
    return deltas


# ---- waiting ----


def test_samples_of_one_request_share_compile_and_prompt(gates: Gates) -> None:
    engine = make_engine(config=gated())
    params = SamplingParams(temperature=1.0, seed=11, n=3, max_new_tokens=5, regex="[a-z ]{40}")
    (answers,) = engine.generate([PROMPT], params)
    for index, answer in enumerate(answers):
        own = SamplingParams(temperature=1.0, seed=11 + index, max_new_tokens=5, regex="[a-z ]{40}")
        assert_like(answer, alone("embedded", PROMPT, own, gated()))
    assert gates.compiled.total() == 1
    assert sum(sum(step.copied.values()) for step in engine.log) == 2 * (len(PROMPT) - 1)
    refused = engine.generate([PROMPT, PROMPT], [SamplingParams(n=2, temperature=1.0, regex="crash"), FREE])
    assert [answer.finish_reason for own in refused for answer in own] == ["error", "error", "length"]
    check_idle(engine)


def test_closing_a_stream_that_waits_for_its_grammar_aborts_it(gates: Gates) -> None:
    engine = make_engine(config=gated())
    stream = engine.stream(PROMPT, SLOW)
    assert engine.constraints.num_waiting
    stream.close()
    check_idle(engine)
    with pytest.raises(ValueError, match="has a regex and this engine has no grammar backend"):
        make_engine(config=serving(grammar_backend="none")).stream(PROMPT, BOUND)


# ---- time-outs and failures ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"regex": "crash"}, "could not be compiled: RuntimeError('the compiler crashed')"),
        ({"regex": "a("}, "missing"),
        ({"regex": "a\0"}, "NUL"),
        ({"json_schema": "{"}, "JSON"),
        ({"json_schema": {"type": "object", "unevaluatedProperties": False}}, "unevaluatedProperties"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(
    gates: Gates, changes: dict[str, Any], message: str
) -> None:
    engine = make_engine(config=gated())
    answers = engine.generate([PROMPT] * 3, [BOUND, SamplingParams(**changes), FREE])
    assert [answer.finish_reason for (answer,) in answers] == ["length", "error", "length"]
    assert message in str(answers[1][0].error)
    for index, params in ((0, BOUND), (2, FREE)):
        assert_like(answers[index][0], alone("embedded", PROMPT, params, gated()))
    count = gates.compiled.total()
    assert answer_of(engine, PROMPT, SamplingParams(**changes)).error == answers[1][0].error
    assert gates.compiled.total() in (count, count + 1)  # tried anew: a failure is not remembered
    assert engine.constraints.store.kept.keys() == {("regex", BOUND.regex)}
    check_idle(engine)


# ---- aborts ----


def test_what_is_raised_on_the_way_leaves_no_request_behind(gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a notebook while a grammar is compiled."""
    engine = make_engine(config=gated())
    step, calls = engine.step, iter(range(2))

    def interrupted() -> object:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT] * 2, [SLOW, FREE])
    check_idle(engine)


def test_an_engine_that_is_dropped_gives_up_what_waits(gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "NUM_THREADS", 1)
    engine = make_engine(config=gated())
    engine.add_request(PROMPT, SLOW)
    engine.add_request(PROMPT, SamplingParams(regex="slow[0-9]{5}"))
    step_until(engine, lambda: gates.compiled.total() == 1)
    threads = list(engine.constraints.store.pool._threads)
    engine.close()
    engine.close()
    assert not engine.has_work
    gates.open()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert gates.compiled.total() == 1


# ---- backends that misbehave ----


@pytest.mark.parametrize(
    ("text", "tokens", "message"),
    [("bad_fill", 2, "in fill"), ("refuses", None, "does not allow token"), ("bad_accept", None, "in accept")],
)
def test_a_backend_that_misbehaves_ends_its_request_alone(
    gates: Gates, text: str, tokens: int | None, message: str
) -> None:
    """An exception in ``accept_token`` used to end the step for all: who came after it in the batch lost a token."""
    engine = make_engine(config=gated())
    params = [BOUND, FREE, SamplingParams(max_new_tokens=9, regex=text), FREE, BOUND]
    answers = [answer for (answer,) in engine.generate([PROMPT] * 5, params)]
    assert [answer.finish_reason for answer in answers] == ["length", "length", "error", "length", "length"]
    assert message in str(answers[2].error)
    assert tokens is None or len(answers[2].token_ids) == tokens
    for index in (0, 1, 3, 4):
        assert_like(answers[index], alone("embedded", PROMPT, params[index], gated()))
    check_idle(engine)


def test_a_jump_that_raises_ends_its_request_alone(gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BadFill, "try_jump_forward", BadJump.try_jump_forward)
    engine = make_engine(config=gated(jump_forward=True))
    answers = engine.generate([PROMPT] * 3, [FREE, SamplingParams(regex="bad_fill"), BOUND])
    assert [answer.finish_reason for (answer,) in answers] == ["length", "error", "length"]
    assert "in jump" in str(answers[1][0].error)
    check_idle(engine)


# ---- the asynchronous engine ----


def test_coroutines_with_and_without_grammars_get_their_own_answers(gates: Gates) -> None:
    params = [SLOW, FREE, BOUND, SLOW]

    async def collect(engine: AsyncEngine, own: SamplingParams) -> str:
        return "".join([delta.text async for delta in engine.stream(PROMPT, own)])

    async def serve() -> list[str]:
        engine = AsyncEngine(make_engine(config=gated()))
        slow = [asyncio.create_task(collect(engine, own)) for own in (params[0], params[3])]
        others = [asyncio.create_task(collect(engine, own)) for own in params[1:3]]
        texts = [await task for task in others]  # while the slow ones compile
        lost = asyncio.create_task(collect(engine, SamplingParams(regex="slow never")))
        await asyncio.sleep(0.05)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        gates.open(SLOW.regex)
        late = [await task for task in slow]
        with pytest.raises(ValueError, match="no ebnf"):
            await collect(engine, SamplingParams(ebnf='root ::= "a"'))
        await engine.close()
        assert not engine.engine.has_work
        return [late[0], *texts, late[1]]

    assert asyncio.run(serve()) == [alone("embedded", PROMPT, own, gated()).text for own in params]


# ---- several ranks ----

RANK = """
    import json, sys, time
    import torch, torch.distributed as dist
    torch.set_num_threads(1)
    from tokenizers import Tokenizer
    from mini_engine.checkpoint import TINY_MODEL
    from mini_engine.config import EngineConfig
    from mini_engine.grammar.base import register_grammar_backend
    from mini_engine.grammar.fsm import FsmBackend
    from mini_engine.grammar.ranks import make_gather
    from mini_engine.sampler.params import SamplingParams
    from mini_engine import llm
    from mini_engine.grammar.service import GrammarService
    from mini_engine.llm import load_driver

    rank, file = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)

    @register_grammar_backend("uneven")
    class Uneven(FsmBackend):
        def build(self, kind, text):
            # Each rank is the slow one of another grammar.
            time.sleep({0: {"a": 0.6}, 1: {"b": 0.9, "d": 30.0}}[rank].get(text[0], 0.0))
            if text.startswith("c") and rank == 1:
                raise RuntimeError("only here")
            return super().build(kind, text)

    config = EngineConfig(max_running_requests=4, grammar_backend="uneven", grammar_timeout_s=4.0)
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    driver = load_driver(None, config)
    grammars = GrammarService(config, tokenizer, driver.vocabulary, gather=make_gather())
    engine = llm.make_engine(driver, tokenizer, constraints=grammars)
    asked = [SamplingParams(max_new_tokens=4, regex=f"{letter}[a-z]{{20}}") for letter in "abcde"]
    names = [engine.add_request([5], params) for params in asked]
    names += [engine.add_request([5], SamplingParams(max_new_tokens=40, ignore_eos=True))]
    steps = []
    while engine.has_work:
        # Every collective operation of a model would be here: ranks that differ would wait for ever.
        steps.append([chunk for chunk in engine.step().chunks])
    outputs = [engine.take_output(name) for name in names]
    steps = [step for step in steps if step]
    print(json.dumps([steps, [[o.finish_reason, o.error, o.token_ids] for o in outputs]]), flush=True)
    import os; os._exit(0)  # a compile of half a minute is not waited for
"""


@pytest.mark.slow
def test_two_ranks_with_different_compile_times_schedule_the_same_steps(tmp_path: Path) -> None:
    """Ready is who is ready on both, failed who failed on one."""
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    runs = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "meeting")], stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    try:
        texts = [run.communicate(timeout=120)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    import json

    (steps, outputs), other = (json.loads(text.splitlines()[-1]) for text in texts)
    assert [steps, outputs] == other
    assert [output[0] for output in outputs] == ["length", "length", "error", "error", "length", "length"]
    assert "only here" in outputs[2][1]
    assert "not compiled within 4 s" in outputs[3][1]
    first = {name: next(i for i, step in enumerate(steps) if any(c[0] == name for c in step)) for name in "0145"}
    assert first["5"] == 0
    assert first["4"] < first["0"] < first["1"], "the slow ones came late, and nobody waited for them"
