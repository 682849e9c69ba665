"""Requests wait for their grammars: nobody else does, one compile serves all who ask, and a failure has one victim.

Compiles are held by gates that the tests open, so that nothing depends on how fast a machine is.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from mini_engine import llm
from mini_engine.async_engine import AsyncEngine
from mini_engine.config import EngineConfig
from mini_engine.engine import Engine
from mini_engine.grammar import store as store_module
from mini_engine.grammar.base import REGISTRY
from mini_engine.grammar.fsm import FsmBackend, FsmGrammar
from mini_engine.grammar.service import GrammarService
from mini_engine.outputs import Delta
from mini_engine.sampler.params import GrammarKey, GrammarKind, SamplingParams
from tests.support.engines import TOKENIZER, assert_like, check_idle
from tests.support.grammars import (
    PROMPTS,
    _one_thread,  # noqa: F401
    _oracle,  # noqa: F401
    alone,
    make_driver,
    make_engine,
    serving,
)

PROMPT = PROMPTS[2]
FREE = SamplingParams(max_new_tokens=6, ignore_eos=True)
BOUND = SamplingParams(max_new_tokens=6, regex="[a-z ]{30}")
SLOW = SamplingParams(max_new_tokens=6, regex="slow[a-z]{30}")
LONG_S = 30.0  # nobody waits so long: a test that would, fails


class GatedBackend(FsmBackend):
    """Compiles what begins with "slow" when its gate is opened; counts; misbehaves as the text says."""

    gates: dict[str, threading.Event]
    compiled: Counter[GrammarKey]

    def build(self, kind: GrammarKind, text: str) -> FsmGrammar:
        self.compiled[kind, text] += 1
        if text.startswith("slow"):
            assert self.gates[text].wait(LONG_S), "a gate that nobody opened"
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
    monkeypatch.setitem(REGISTRY, "gated", GatedBackend)
    yield gates
    gates.open()


def gated(**changes: Any) -> EngineConfig:
    return serving(**{"grammar_backend": "gated", **changes})


def step_until(engine: Engine, is_done: Callable[[], bool]) -> list[Delta]:
    deltas = []
    end = time.monotonic() + LONG_S
    while not is_done():
        assert time.monotonic() < end, "nothing came of it"
        deltas += engine.step().deltas
    return deltas


def test_closing_a_stream_that_waits_for_its_grammar_aborts_it(gates: Gates) -> None:
    engine = make_engine(config=gated())
    stream = engine.stream(PROMPT, SLOW)
    assert engine.constraints.num_waiting
    stream.close()
    check_idle(engine)


def test_what_is_raised_on_the_way_leaves_no_request_behind(gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a notebook while a grammar is compiled."""
    engine = make_engine(config=gated())
    step = engine.step
    calls = iter(range(2))

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


class UnevenBackend(FsmBackend):
    """Each rank is the slow one of another grammar."""

    sleeps: dict[str, float]

    def build(self, kind: GrammarKind, text: str) -> FsmGrammar:
        time.sleep(self.sleeps.get(text[0], 0.0))
        if text.startswith("c") and "b" in self.sleeps:
            raise RuntimeError("only here")
        return super().build(kind, text)


class Rank0(UnevenBackend):
    sleeps = {"a": 0.5}  # noqa: RUF012


class Rank1(UnevenBackend):
    sleeps = {"b": 1.2, "d": 4.0}  # noqa: RUF012


def test_two_ranks_with_different_compile_times_schedule_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready is who is ready on both, failed who failed on one. A rank is a thread here."""
    barrier = threading.Barrier(2, timeout=LONG_S)
    reports = list[Any]([None, None])

    def serve(rank: int) -> list[Any]:
        def gather(report: Any) -> list[Any]:
            reports[rank] = report
            barrier.wait()
            both = list(reports)
            barrier.wait()
            return both

        monkeypatch.setitem(REGISTRY, f"rank{rank}", (Rank0, Rank1)[rank])
        config = serving(grammar_backend=f"rank{rank}", grammar_timeout_s=2.5)
        driver = make_driver("embedded", config)
        service = GrammarService(config, TOKENIZER, driver.vocabulary, gather=gather)
        engine = llm.make_engine(driver, TOKENIZER, constraints=service)
        asked = [SamplingParams(max_new_tokens=4, regex=f"{letter}[a-z]{{20}}") for letter in "abcde"]
        ids = [engine.add_request([5], params) for params in (*asked, replace(FREE, max_new_tokens=40))]
        steps = []
        while engine.has_work:  # every collective operation of a model would be here
            steps.append(engine.step().chunks)
        outputs = [engine.take_output(name) for name in ids]
        return [[step for step in steps if step], [[o.finish_reason, o.error, o.token_ids] for o in outputs]]

    with ThreadPoolExecutor(2) as pool:
        (steps, outputs), other = pool.map(serve, (0, 1))
    assert [steps, outputs] == other
    assert [output[0] for output in outputs] == ["length", "length", "error", "error", "length", "length"]
    assert "only here" in outputs[2][1]
    assert "not compiled within 2.5 s" in outputs[3][1]
    first = {name: next(i for i, step in enumerate(steps) if any(c[0] == name for c in step)) for name in "0145"}
    assert first["5"] == 0
    assert first["4"] < first["0"] < first["1"], "the slow ones came late, and nobody waited for them"
