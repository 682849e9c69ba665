"""Drafts change how many tokens a step gives, and no bit of an answer.

Oracles: the driver of L4, which drafts nothing, for whole traces of requests; the engine with drafts off; transformers'
greedy ids; a search through the text for what n-grams propose. Two drafters make both ends certain: ``Prophet`` knows
the answers and now and then spoils its guess, ``Liar`` is never right. Slots behind a request's tokens, where refused
tokens have left keys and values, are NaN after every step.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mini_engine import LLM, llm
from mini_engine.attention.metadata import slots_of
from mini_engine.checkpoint import TINY_MODEL
from mini_engine.config import EngineConfig
from mini_engine.engine import Engine
from mini_engine.outputs import RequestOutput, StepOutput
from mini_engine.radix_cache import RadixCache
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.trace import SamplingTrace
from mini_engine.scheduler.drafts import Guesses, NGramDrafts, NoDrafts
from mini_engine.scheduler.request import Request, RequestOptions
from mini_engine.tiny import corpus
from tests.equivalence.test_engine import Trace
from tests.support import grammars
from tests.support.engines import (
    BEGINNINGS,
    EXAMPLES,
    TOKENIZER,
    TRACES,
    _one_thread,  # noqa: F401
    alone,
    assert_like,
    check_equal,
    check_idle,
    encode,
    make_driver,
    make_engine,
    run_trace,
    serving,
)


@pytest.fixture(autouse=True)
def _keen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests draft however often they were wrong."""
    monkeypatch.setattr(Guesses, "judge", lambda self, _: setattr(self, "length", 7))


class Prophet:
    """Knows whole texts. A guess may be spoilt, cut or too long, or hold an id that no token has."""

    def __init__(self, texts: Sequence[Sequence[int]], dice: random.Random) -> None:
        self.texts = texts
        self.dice = dice

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        known = len(tokens)
        ahead = [list(text[known:]) for text in self.texts if list(text[:known]) == list(tokens)]
        draft = (max(ahead, key=len, default=[]) + [3] * 40)[: most + self.dice.choice([0, 0, 5])]
        if self.dice.random() < 0.4:
            draft[self.dice.randrange(len(draft))] = self.dice.choice([7, 8, -1, 10**6])
        return draft[: self.dice.choice([1, 3, 100, 100])]


class Liar:
    """Says what will not come: the ids that the engine without drafts gave, each plus one."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.prophet = Prophet(texts, random.Random(0))
        self.prophet.dice.random = lambda: 1.0  # type: ignore[method-assign]
        self.prophet.dice.choice = lambda options: options[-1]  # type: ignore[method-assign]

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        return [token - 1 if token else 1 for token in self.prophet.propose(tokens, most)[:most]]


def drafting(name: str, config: EngineConfig, make: Callable[[], Any], text: bool = True) -> Engine:
    config = replace(config, drafts="own")
    return llm.make_engine(make_driver(name, config), TOKENIZER if text else None, drafter=make)


def poison_ahead(engine: Engine) -> None:
    """Fill with NaN, after every step, the slots behind what requests have computed. Mutates."""
    step = engine.step
    size = engine.scheduler.page_size

    def stepped() -> StepOutput:
        output = step()
        for request in engine.scheduler.running:
            end = len(request.pages) * size
            slots = slots_of(request.pages, request.num_computed_tokens, end, size)
            for tensor in (*engine.worker.pool.keys, *engine.worker.pool.values):
                tensor[:, slots] = float("nan")
            assert len(request.pages) <= -(-request.num_tokens // size), "a page is kept that no token needs"
        return output

    engine.step = stepped  # type: ignore[method-assign]


# ---- whole traces ----


def run_drafted(trace: Trace, make: Callable[[], Any], **changes: object) -> Trace:
    trace.config = replace(trace.config, drafts="own", **changes)
    trace.engine = drafting(trace.name, trace.config, make)
    poison_ahead(trace.engine)
    trace.steps = run_trace(trace.engine, trace.planned, trace.tight, trace.dice if trace.shuffled else None)
    return trace


def ends(step: StepOutput) -> list[str]:
    """Why the requests ended whose last token was a drafted one, or came right behind one."""
    accepted = [delta for delta in step.deltas if step.accepted.get(delta.request_id)]
    return [f"{delta.finish_reason} in a draft" for delta in accepted if delta.finish_reason]


@pytest.mark.parametrize("changes", [{}, {"compute": "fast"}, {"compute": "compiled", "dtype": "float32"}], ids=str)
def test_matrix_every_request_of_every_trace_is_bitwise_the_lonely_run(changes: dict[str, str]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(2 * TRACES if not changes else 2):
        trace = Trace(seed, **changes)
        dice = random.Random(seed)
        lonely = [alone(trace.name, one.prompt, one.params, trace.config) for one in trace.planned]
        texts = [[*one.prompt, *own.token_ids] for one, own in zip(trace.planned, lonely, strict=True)]
        run_drafted(trace, lambda texts=texts, dice=dice: Prophet(texts, dice), max_draft_rows=dice.choice([8, 16, 64]))
        for one, own in zip(trace.planned, lonely, strict=True):
            check_equal(one, own)
        for step in trace.steps:
            seen.update(ends(step))
            seen.update(drafted=sum(step.drafted.values()), accepted=sum(step.accepted.values()))
            seen["preempted"] += len(step.preempted)
        seen.update(str(one.output.finish_reason) for one in trace.planned)
        check_tree(trace, texts)
    assert seen["drafted"] > seen["accepted"] > (20 if changes else 20 * TRACES), seen
    if not changes:
        edges = ("stop in a draft", "length in a draft", "abort", "preempted")
        assert all(seen[kind] for kind in edges), seen


def check_tree(trace: Trace, texts: Sequence[list[int]]) -> None:
    """Every path of the prefix cache begins a text that really came."""
    cache = trace.engine.scheduler.cache
    if isinstance(cache, RadixCache):
        for _, node in cache.descend():
            path: list[int] = []
            while node.parent is not None:
                path = [*node.tokens, *path]
                node = node.parent  # noqa: PLW2901
            assert any(text[: len(path)] == path for text in texts)


def test_wrong_drafts_change_no_step() -> None:
    """Who runs with which tokens, who is preempted and who waits, step by step, as with drafts off."""
    num_drafted = 0
    for seed in range(TRACES):
        plain = Trace(seed).run()
        texts = [[*one.prompt, *one.output.token_ids] for one in plain.planned]
        drafted = run_drafted(Trace(seed), lambda texts=texts: Liar(texts), max_draft_rows=64)
        steps = [
            [(s.chunks, s.preempted, s.copied, s.num_running, s.num_waiting, s.num_pages_used) for s in trace.steps]
            for trace in (plain, drafted)
        ]
        assert steps[0] == steps[1]
        assert not any(step.accepted for step in drafted.steps)
        num_drafted += sum(sum(step.drafted.values()) for step in drafted.steps)
        limit = drafted.config.max_tokens_per_step or 64
        for step in drafted.steps:
            rows = sum(size for _, _, size in step.chunks)
            assert rows + sum(step.drafted.values()) <= max(rows, min(limit, 64))
    assert num_drafted > 20 * TRACES


# ---- one by one ----


def both(prompt: list[int], params: SamplingParams, spoilt: bool = False, **changes: Any) -> tuple[Any, Any, Engine]:
    """The answers without drafts and with those of a drafter that knows the first, and the engine of the second."""
    config = serving(**changes)
    ((off,),) = make_engine(config=config).generate([prompt], params)
    text = [*prompt, *off.token_ids]
    dice = random.Random(4)
    if not spoilt:
        dice.random = lambda: 1.0  # type: ignore[method-assign]
        dice.choice = lambda options: options[0] if options[0] == 0 else options[-1]  # type: ignore[method-assign]
    engine = drafting("embedded", config, lambda: Prophet([text], dice))
    poison_ahead(engine)
    ((on,),) = engine.generate([prompt], params)
    check_idle(engine)
    return off, on, engine


def assert_same(off: RequestOutput, on: RequestOutput) -> None:
    for name in ("token_ids", "text", "finish_reason", "matched", "error", "logprobs", "prompt_logprobs"):
        assert getattr(on, name) == getattr(off, name), name
    assert on.is_grammar_complete == off.is_grammar_complete


STORY = encode(BEGINNINGS[0])


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=50),
        SamplingParams(max_new_tokens=40, temperature=1.0, seed=3, repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingParams(max_new_tokens=40, temperature=1.0),  # no seed: the sampler's own generator
        SamplingParams(max_new_tokens=30, logprobs=3, prompt_logprobs=1, temperature=0.7, seed=1),
        SamplingParams(max_new_tokens=30, logprobs=0, logprobs_mode="processed", bad_words=[encode(" a")]),
        SamplingParams(max_new_tokens=60, stop=["the", "zebra"], min_new_tokens=9),
        SamplingParams(
            max_new_tokens=30, logits_processors={"no_repeat_ngram": {"ngram_size": 2, "window_size": None}}
        ),
    ],
    ids=lambda params: str(params.max_new_tokens) + str(params.temperature),
)
def test_an_answer_is_bitwise_that_without_drafts_and_comes_in_fewer_steps(
    params: SamplingParams, spoilt: bool
) -> None:
    off, on, engine = both(STORY, params, spoilt)
    assert_same(off, on)
    count = len(off.token_ids)
    assert on.num_accepted == sum(sum(step.accepted.values()) for step in engine.log)
    assert on.num_drafted == sum(sum(step.drafted.values()) for step in engine.log)
    assert len(engine.log) == count - on.num_accepted
    assert len(engine.log) <= count * (0.8 if spoilt else 0.4) + 3


def test_whatever_the_most_tokens_and_the_pool_drafts_never_go_beyond_them() -> None:
    for most in range(1, 12):
        for pages in (5, 40):
            params = SamplingParams(max_new_tokens=most, ignore_eos=True)
            off, on, _ = both(STORY[:6], params, page_size=4, num_pages=pages, max_model_len=6 + most)
            assert_same(off, on)
            assert on.num_accepted <= max(most - 1, 0)


def test_the_ids_are_those_of_transformers() -> None:
    peer = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    task = corpus.record_task(random.Random(3))
    for prompt in (STORY, grammars.question(task.prompt)):
        ids = torch.tensor([prompt])
        out = peer.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=80)
        engine = make_engine(config=EngineConfig(drafts="ngram"))
        ((answer,),) = engine.generate([prompt], SamplingParams(max_new_tokens=80))
        assert answer.token_ids == out[0, len(prompt) :].tolist()
        assert answer.num_accepted > 0


def test_samples_scores_and_aborts() -> None:
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=5, n=3, ignore_eos=True)
    expected = [alone("embedded", STORY, replace(params, n=1, seed=5 + index)) for index in range(3)]
    texts = [[*STORY, *own.token_ids] for own in expected]
    engine = drafting("embedded", serving(max_tokens_per_step=None), lambda: Prophet(texts, random.Random(1)))
    poison_ahead(engine)
    (answers,) = engine.generate([STORY], params)
    for answer, own in zip(answers, expected, strict=True):
        assert_like(answer, own)
    assert sum(answer.num_accepted for answer in answers) > 5
    scored = SamplingParams(prompt_logprobs=1, max_new_tokens=8)
    name = engine.add_request(STORY, scored, options=RequestOptions(score_only=True))
    output = engine.entries[name].output
    engine.step()
    assert (output.finish_reason, output.token_ids, output.num_drafted) == ("length", [], 0)
    assert output.prompt_logprobs == alone("embedded", STORY, scored).prompt_logprobs
    engine.take_output(name)
    name = engine.add_request(STORY, replace(params, n=1))
    while engine.entries[name].output.num_accepted == 0:
        engine.step()
    engine.abort(name)
    answer = engine.take_output(name)
    assert answer.token_ids == expected[0].token_ids[: len(answer.token_ids)]
    check_idle(engine)


def test_a_step_that_is_interrupted_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the layers, and before or in the middle of its drafted rows."""
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=2, frequency_penalty=1.0, logprobs=1)
    expected = alone("embedded", STORY, params)
    engine = drafting("embedded", serving(), lambda: Prophet([[*STORY, *expected.token_ids]], random.Random(2)))
    calls = iter(range(10_000))

    def interrupt(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            if next(calls) % 5 == 2:
                raise KeyboardInterrupt
            return plain(*arguments)

        monkeypatch.setattr(owner, name, call)

    interrupt(engine.worker, "run")
    interrupt(engine.driver.sampler.ops, "argmax")
    name = engine.add_request(STORY, params)
    interrupted = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupted += 1
    answer = engine.take_output(name)
    assert_like(answer, expected)
    assert interrupted > 3
    assert answer.num_accepted > 5


# ---- grammars ----


@pytest.mark.parametrize("jump", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_with_grammars_are_the_same(jump: bool, temperature: float) -> None:
    dice = random.Random(7)
    accepted = 0
    for index in range(3):
        task = corpus.record_task(dice)
        prompt = grammars.question(task.prompt, think=index == 2)
        params = SamplingParams(
            json_schema=grammars.PERSON,
            max_new_tokens=60,
            temperature=temperature,
            seed=index,
            reasoning=index == 2,
            logprobs=0 if index else None,
        )
        config = grammars.serving(jump_forward=jump, preemption=False)
        answers = []
        for drafts in ("off", "ngram"):
            engine = grammars.make_engine(config=replace(config, drafts=drafts))
            poison_ahead(engine)
            ((answer,),) = engine.generate(
                [
                    prompt,
                ],
                params,
            )
            answers.append(answer)
        assert_same(*answers)
        accepted += answers[1].num_accepted
    assert accepted > 10


# ---- what is proposed, and how much ----


def test_ngrams_propose_what_a_search_through_the_text_finds() -> None:
    dice = random.Random(11)
    for _ in range(EXAMPLES):
        drafts, text = NGramDrafts(), list[int]()
        for _ in range(25):
            text += [dice.randrange(3) for _ in range(dice.randint(1, 4))]
            most = dice.randint(1, 9)
            assert drafts.propose(text, most) == searched(text, most), text


def searched(text: list[int], most: int) -> list[int]:
    for n in (3, 2, 1):
        for start in range(len(text) - n - 1, -1, -1):
            if len(text) > n and text[start : start + n] == text[-n:]:
                copy = list(text)
                for place in range(start + n, start + n + most):
                    copy.append(copy[place])
                return copy[len(text) :]
    return []


class Counted(list):  # type: ignore[type-arg]
    """A text that counts how many of its tokens are read."""

    read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.read += len(found) if isinstance(key, slice) else 1
        return found


def test_a_draft_in_a_long_text_takes_as_many_looks_as_in_a_short_one() -> None:
    for length in (300, 30_000):
        drafts = NGramDrafts()
        text = Counted(random.Random(0).choices(range(50), k=length))
        drafts.propose(text, 8)
        text.read = 0
        for token in range(20):
            text.append(token)
            drafts.propose(text, 8)
        assert 0 < text.read <= 20 * (6 + 6 + 8), "to note n-grams, to look up the end, to copy"


def test_a_request_whose_drafts_are_wrong_stops_and_begins_again_when_they_would_be_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # ``_keen``
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    config = serving(max_running_requests=1, max_tokens_per_step=None)
    ((off,),) = make_engine(config=config).generate([STORY], params)
    text = [*STORY, *off.token_ids]

    class Late(Prophet):
        def propose(self, tokens: Sequence[int], most: int) -> list[int]:
            right = super().propose(tokens, most)
            return right if len(tokens) > 130 else [(token + 1) % 1000 for token in right]

    dice = random.Random(4)
    dice.random = lambda: 1.0  # type: ignore[method-assign]
    dice.choice = lambda options: options[0] if options[0] == 0 else options[-1]  # type: ignore[method-assign]
    engine = drafting("embedded", config, lambda: Late([text], dice))
    ((on,),) = engine.generate([STORY], params)
    assert_same(off, on)
    sizes = [sum(step.drafted.values()) for step in engine.log]
    early = 130 - len(STORY)
    assert sum(sizes[:early]) == 0
    assert sizes[early : early + 7] == [0, 0, 1, 2, 4, 8, 15], "in a step of 16 rows at most"
    assert on.num_accepted == on.num_drafted > 30


# Of each step: how many tokens come as guessed, for how many there is room, and how many are drafted.
STEPS = [(1, 9, 0), (1, 9, 1), (9, 9, 2), (9, 9, 4), (9, 3, 3), (9, 9, 6), (3, 9, 9), (2, 9, 4), (0, 9, 2)]
STEPS += [(0, 9, 1), (0, 9, 0), (9, 9, 0), (9, 1, 1), (0, 9, 2), (0, 9, 1), (0, 9, 0), (0, 9, 0)]


def test_a_draft_is_twice_as_long_as_one_that_came_and_half_as_long_as_one_that_did_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # ``_keen``

    class Counting:
        def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
            return range(len(tokens), len(tokens) + most)

    request = Request("0", [0], SamplingParams())
    guesses = Guesses(Counting())
    for right, room, expected in STEPS:
        known = request.num_tokens
        assert guesses.next(request, room) == list(range(known, known + expected))
        assert len(guesses.next(request, room)) == expected, "a step that is repeated"
        request.output_ids += [known + n if n < right else -1 for n in range(min(right, expected) + 1)]


def test_beyond_the_limit_of_rows_nothing_is_drafted() -> None:
    engine = make_engine(config=serving(drafts="ngram", max_draft_rows=4, max_tokens_per_step=None))
    answers = engine.generate([STORY] * 4, SamplingParams(max_new_tokens=30, ignore_eos=True))
    full = [step for step in engine.log if len(step.chunks) == 4]
    assert len(full) > 20
    assert not any(step.drafted for step in full)
    assert all(
        own.token_ids == alone("embedded", STORY, SamplingParams(max_new_tokens=30, ignore_eos=True)).token_ids
        for (own,) in answers
    )


# ---- options ----


def test_a_drafter_of_ones_own_is_given_to_llm() -> None:
    asked: list[int] = []

    class Noted(NoDrafts):
        def propose(self, tokens: Sequence[int], most: int) -> list[int]:
            asked.append(len(tokens))
            return super().propose(tokens, most)

    with LLM(drafts="own", drafter=Noted, compute="reference") as engine:
        (answer,) = engine.generate(["Once upon a time"], SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert asked == [len(answer.prompt_ids) + count for count in range(4)]
    assert answer.num_drafted == 0


@pytest.mark.parametrize(("drafts", "drafter"), [("own", None), ("ngram", NoDrafts), ("off", NoDrafts)])
def test_a_drafter_and_the_option_come_together(drafts: str, drafter: Any) -> None:
    with pytest.raises(ValueError, match=f"drafts is '{drafts}' and the drafter is .*; give LLM both"):
        llm.make_engine(make_driver(config=EngineConfig(drafts=drafts)), drafter=drafter)


def test_the_limit_of_rows_needs_drafts() -> None:
    with pytest.raises(ValueError, match="max_draft_rows is 8 and does nothing while drafts is 'off'"):
        EngineConfig(max_draft_rows=8)


def test_while_a_trace_shows_the_stages_of_each_token_nothing_is_drafted() -> None:
    engine = make_engine(config=EngineConfig(drafts="ngram"))
    engine.driver.sampler.trace = SamplingTrace()
    ((answer,),) = engine.generate([[7, 8] * 10], SamplingParams(max_new_tokens=20, ignore_eos=True))
    assert answer.num_drafted == 0
    engine.driver.sampler.trace = None
    assert engine.generate([[7, 8] * 10], SamplingParams(max_new_tokens=20, ignore_eos=True))[0][0].num_drafted > 0
