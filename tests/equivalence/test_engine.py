"""The engine against the lonely run: whatever shares its steps, a request gets the tokens, bits and text it gets alone.

The oracle is the driver of L4, which knows no scheduler, with the stop strings looked for in what it generated. The
matrix of random traces runs ``MINI_ENGINE_TRACES`` of them, 6 without that variable; before a release run

    MINI_ENGINE_TRACES=200 pytest tests/equivalence/test_engine.py -k matrix
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from mini_engine import llm
from mini_engine.config import EngineConfig
from mini_engine.invariant.probe import thread_count
from mini_engine.llm import build_model
from mini_engine.outputs import Delta
from mini_engine.radix_cache import EVICTIONS, RadixCache
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.policy import POLICIES
from tests.support.engines import (
    BEGINNINGS,
    TOKENIZER,
    TRACES,
    Planned,
    Thrower,
    _one_thread,  # noqa: F401
    alone,
    assert_like,
    check_equal,
    check_idle,
    encode,
    make_driver,
    make_engine,
    make_model,
    make_state,
    run_trace,
    serving,
    small_config,
)

# ---- everything off ----


@pytest.mark.parametrize("name", ["embedded", "random"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_everything_off_ids_and_logits_are_those_of_the_greedy_driver(name: str, dtype: str) -> None:
    config = EngineConfig(dtype=dtype)
    prompts = [[7], list(range(10, 75))]
    prompts = [[token % 301 for token in prompt] if name == "random" else prompt for prompt in prompts]
    model = make_model(name, dtype, False)
    engine = make_engine(name, config)
    for prompt in prompts:
        expected = list(llm.make_driver(model, config, engine.driver.eos_token_ids).steps(prompt, 24))
        got = list(engine.stream(prompt, SamplingParams(max_new_tokens=24)))
        assert [delta.token_id for delta in got] == [step.token_id for step in expected]
        assert all(torch.equal(d.logits, s.logits) for d, s in zip(got, expected, strict=True))
        assert got[-1].finish_reason == ("stop" if expected[-1].token_id in engine.driver.eos_token_ids else "length")
    check_idle(engine)
    answers = engine.generate(prompts, SamplingParams(max_new_tokens=24))  # queued, one after the other
    for (answer,), prompt in zip(answers, prompts, strict=True):
        driver = llm.make_driver(model, config, engine.driver.eos_token_ids)
        assert answer.token_ids == driver.generate(prompt, 24).token_ids


# ---- the matrix ----


def make_params(dice: random.Random, size: int, most: int) -> SamplingParams:
    def maybe(value: object, off: object, chance: float = 0.35) -> Any:
        return value if dice.random() < chance else off

    return SamplingParams(
        temperature=maybe(dice.choice([0.5, 1.0, 1.5]), 0.0, 0.6),
        top_k=maybe(dice.randint(1, 40), 0),
        top_p=maybe(0.9, 1.0),
        min_p=maybe(0.02, 0.0),
        repetition_penalty=maybe(1.3, 1.0),
        frequency_penalty=maybe(0.7, 0.0),
        presence_penalty=maybe(-0.5, 0.0),
        min_new_tokens=maybe(dice.randint(1, most), 0),
        max_new_tokens=most,
        ignore_eos=dice.random() < 0.3,
        stop=maybe([dice.choice(["e", " a", "th", "ing ", ".", "\ufffd"]), "zebra"], (), 0.3),
        stop_token_ids=maybe([dice.randrange(size)], ()),
        logit_bias=maybe({dice.randrange(size): 5.0}, None),
        bad_words=maybe([[dice.randrange(size)], [dice.randrange(size), dice.randrange(size)]], ()),
        logits_processors=maybe({"no_repeat_ngram": {"ngram_size": 2, "window_size": None}}, None),
        seed=dice.randint(-(2**63), 2**63 - 1),
        logprobs=maybe(dice.choice([0, 2, -1]), None),
        prompt_logprobs=maybe(dice.choice([0, 1]), None),
        logprobs_mode=dice.choice(["raw", "processed"]),
    )


class Trace:
    """One seed: a model, a configuration, requests over time, many of which begin alike."""

    def __init__(self, seed: int, **changes: object) -> None:
        dice = random.Random(seed)
        self.name, dtype = [("embedded", "float32"), ("random", "bfloat16")][seed % 2]
        size = make_model(self.name, dtype, True).config.vocab_size
        self.dice = dice
        self.shuffled = dice.random() < 0.4
        self.tight = seed % 5 < 3  # short prompts, long answers, small pages, a pool for about one of them
        self.planned = []
        stem = [dice.randrange(size) for _ in range(30)]
        for _ in range(dice.randint(4, 8) if self.tight else dice.randint(2, 8)):
            length = dice.choice([1, 2, dice.randint(3, 8 if self.tight else 40)])
            prompt = [dice.randrange(size) for _ in range(length)]
            if self.name == "embedded" and dice.random() < 0.5:
                prompt = encode(dice.choice(BEGINNINGS))
            elif dice.random() < 0.7:
                prompt = stem[: dice.randint(5, 12 if self.tight else 30)] + prompt[:3]
            if self.planned and dice.random() < 0.3:
                prompt = dice.choice(self.planned).prompt
            arrives = dice.choice([0, 0, dice.randint(1, 20)])
            aborted = dice.randint(0, 60)
            params = make_params(dice, size, dice.randint(12, 30) if self.tight else dice.randint(1, 24))
            self.planned.append(Planned(prompt, params, arrives, aborted if dice.random() < 0.15 else None))
        page_size = dice.choice([1, 1, 1, 4] if self.tight else [1, 4, 16])
        longest = max(len(p.prompt) + p.params.max_new_tokens for p in self.planned)
        most = -(-longest // page_size)
        shared: dict[str, Any] = {}
        if seed % 3 != 2:
            shared = {"prefix_cache": "radix", "eviction": dice.choice(list(EVICTIONS))}
            shared |= {"wait_for_prefix": dice.choice([None, 4, 8]), "max_steps_waited": dice.choice([5, 256])}
        self.config = serving(
            dtype=dtype,
            page_size=page_size,
            max_model_len=longest if seed % 2 else None,
            num_pages=most if self.tight else most * 4,
            max_running_requests=8 if self.tight else dice.choice([2, 3, 8]),
            max_tokens_per_step=dice.choice([3, 8, 40, None] if self.tight else [1, 3, 8, 40, None]),
            policy=dice.choice(list(POLICIES)),
            preemption=self.tight or dice.random() < 0.5,
            **shared,
        )
        self.config = replace(self.config, **changes)

    def run(self) -> "Trace":
        self.engine = make_engine(self.name, self.config)
        self.steps = run_trace(self.engine, self.planned, self.tight, self.dice if self.shuffled else None)
        return self

    def check(self) -> None:
        for planned in self.planned:
            check_equal(planned, alone(self.name, planned.prompt, planned.params, self.config))


def test_matrix_every_request_of_every_trace_is_bitwise_the_lonely_run() -> None:
    seen: Counter[str] = Counter()
    for seed in range(TRACES):
        trace = Trace(seed).run()
        trace.check()
        seen["preemptions"] += sum(len(step.preempted) for step in trace.steps)
        seen.update(str(planned.output.finish_reason) for planned in trace.planned)
        if isinstance(trace.engine.scheduler.cache, RadixCache):
            stats = trace.engine.scheduler.cache.stats
            seen.update(hits=stats.num_tokens_hit, evictions=stats.num_pages_evicted)
    assert seen["preemptions"] >= 2 * TRACES, "the traces were meant to run out of pages"
    assert all(seen[kind] for kind in ("stop", "length", "abort", "hits", "evictions")), seen


@pytest.mark.slow
def test_matrix_at_another_thread_count() -> None:
    """The lonely run has one thread, the batch has several: what a thread computes depends on their number."""
    for seed in (0, 1):
        with thread_count(4):
            trace = Trace(seed).run()
        trace.check()


@pytest.mark.parametrize(
    "changes", [{"compute": "packed"}, {"compute": "fast"}, {"compute": "compiled", "dtype": "float32"}], ids=str
)
def test_matrix_with_packed_weights(changes: dict[str, str]) -> None:
    for seed in range(2):
        Trace(seed, **changes).run().check()


def test_without_batch_invariance_the_matrix_fails() -> None:
    """The negative control: tokens may agree, but some bits do not."""
    changed = 0
    for seed in range(2):
        trace = Trace(seed, batch_invariant=False).run()
        for planned in trace.planned:
            expected = alone(trace.name, planned.prompt, planned.params, trace.config)
            got = [delta.logits for delta in planned.deltas if delta.token_id is not None]
            changed += sum(not torch.equal(a, b) for a, b in zip(got, expected.logits, strict=False))
    assert changed > 10


# ---- generate ----


def test_answers_come_in_the_order_of_the_prompts_and_refused_ones_keep_their_place() -> None:
    """Each refusal says why in numbers, and the others are bitwise what they are alone."""
    good = encode(BEGINNINGS[0])
    four = SamplingParams(max_new_tokens=4)
    requests: list[tuple[list[int], SamplingParams, str | None]] = [
        (good, SamplingParams(max_new_tokens=20), None),
        ([], four, "0 tokens"),
        (good, replace(four, stop_token_ids=[9999]), "stop_token_ids names token id 9999"),
        (good[:5], SamplingParams(max_new_tokens=9, seed=1, temperature=1.0), None),
        ([5, 1024], four, "token id 1024"),
        (good, SamplingParams(max_new_tokens=3000), "positions, the model has 2048"),
        (good, SamplingParams(max_new_tokens=250), "the pool has 10"),
    ]
    engine = make_engine(config=serving(num_pages=10))
    answers = engine.generate([prompt for prompt, _, _ in requests], [params for _, params, _ in requests])
    for (answer,), (prompt, params, reason) in zip(answers, requests, strict=True):
        assert answer.prompt_ids == prompt
        if reason is None:
            assert_like(answer, alone("embedded", prompt, params))
        else:
            assert (answer.finish_reason, answer.token_ids) == ("error", [])
            assert reason in str(answer.error)
    check_idle(engine)


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        make_engine(text=False).add_request([1], SamplingParams(stop=["a"]))
    ((answer,),) = make_engine(text=False).generate([[1]], SamplingParams(max_new_tokens=2))
    assert (answer.text, len(answer.token_ids)) == ("", 2)


def test_the_progress_bar_is_shown_when_asked_and_counts_to_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    engine = make_engine(config=serving())
    prompts = [[5], [], [7]]
    engine.generate(prompts, SamplingParams(max_new_tokens=2))
    assert capfd.readouterr().err == ""
    engine.generate(prompts, SamplingParams(max_new_tokens=2), progress=True)
    assert "3/3" in capfd.readouterr().err


def test_generate_leaves_nothing_behind_when_something_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few parameters used to leave the first requests in the queue, for the next caller to pay for."""
    engine = make_engine(config=serving())
    with pytest.raises(ValueError, match="3 prompts and 2 parameters"):
        engine.generate([[5], [6], [7]], [SamplingParams()] * 2)
    check_idle(engine)
    step = engine.step
    calls = iter(range(3))

    def interrupted() -> object:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[5], [6]], SamplingParams(ignore_eos=True))
    check_idle(engine)


def test_a_long_list_is_queued_piece_by_piece_and_answered_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """16,000 requests at once made the scheduler look at 8 million of them."""
    monkeypatch.setattr("mini_engine.engine.QUEUED", 5)
    engine = make_engine(config=serving())
    longest = 0
    schedule = engine.scheduler.schedule

    def watched() -> object:
        nonlocal longest
        longest = max(longest, len(engine.scheduler.waiting) + len(engine.scheduler.running))
        return schedule()

    monkeypatch.setattr(engine.scheduler, "schedule", watched)
    prompts: list[list[int]] = [[] if index % 7 == 3 else [5 + index] for index in range(23)]
    params = [
        SamplingParams(max_new_tokens=1 + index % 3, n=1 + index % 2, seed=index, temperature=1.0, ignore_eos=True)
        for index in range(23)
    ]
    answers = engine.generate(prompts, params)
    assert longest in (5, 6), "the fifth may be the first sample of two"
    for prompt, own, answer in zip(prompts, params, answers, strict=True):
        assert [len(each.token_ids) for each in answer] == ([own.max_new_tokens] * own.n if prompt else [0])
    assert answers[2][0].token_ids == engine.generate([prompts[2]], params[2])[0][0].token_ids
    check_idle(engine)


def test_a_pool_that_is_larger_than_the_memory_is_refused_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"a KV pool of 1000000000 pages of \d+ tokens takes .* ask for at most \d+ pages"
    ):
        make_engine(config=serving(num_pages=10**9))


def test_an_id_that_a_caller_chose_is_not_given_out_again() -> None:
    """The engine numbers requests; a caller's "1" used to make the engine refuse its own second request."""
    engine = make_engine(config=serving())
    engine.add_request([5], SamplingParams(max_new_tokens=1), request_id="1")
    names = [engine.add_request([5], SamplingParams(max_new_tokens=1)) for _ in range(3)]
    assert len({*names, "1"}) == 4
    with pytest.raises(ValueError, match="there is a request '1' already"):
        engine.add_request([5], SamplingParams(), request_id="1")


def test_an_answer_cannot_be_taken_before_it_is_there() -> None:
    """It used to be forgotten by the engine and kept by the scheduler, and the next step of all requests raised."""
    engine = make_engine()
    name = engine.add_request([5], SamplingParams(max_new_tokens=2))
    engine.step()
    with pytest.raises(ValueError, match="has not ended"):
        engine.take_output(name)
    engine.step()
    assert len(engine.take_output(name).token_ids) == 2
    with pytest.raises(KeyError):
        engine.take_output(name)


# ---- stream ----


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_a_stream_aborts_its_request_and_frees_its_pages(taken: int) -> None:
    """Also one that nobody read from: a generator that never began has no ``finally``, and so it used to run on."""
    for close in (True, False):
        engine = make_engine(config=serving())
        stream = engine.stream(encode(BEGINNINGS[0]), SamplingParams(ignore_eos=True))
        for _ in range(taken):
            next(stream)
        if close:
            stream.close()
        del stream
        check_idle(engine)


def test_streams_side_by_side_lose_nothing() -> None:
    """A step that one stream asked for brings the other's tokens too: they used to be lost, and then it hung."""
    prompts = [encode(text) for text in BEGINNINGS[:3]]
    params = [SamplingParams(max_new_tokens=count, seed=count, temperature=1.0) for count in (12, 3, 7)]
    engine = make_engine(config=serving())
    streams = [engine.stream(p, own) for p, own in zip(prompts, params, strict=True)]
    got: list[list[Delta]] = [[], [], []]
    dice = random.Random(1)
    open_streams = [0, 1, 2]
    while open_streams:
        index = dice.choice(open_streams)
        delta = next(streams[index], None)
        if delta is None:
            open_streams.remove(index)
        else:
            got[index].append(delta)
    for deltas, prompt, own in zip(got, prompts, params, strict=True):
        expected = alone("embedded", prompt, own)
        assert [d.token_id for d in deltas] == expected.token_ids
        assert "".join(d.text for d in deltas) == expected.text
    check_idle(engine)


def test_a_stream_refuses_at_once() -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="0 tokens"):
        engine.stream([], SamplingParams())
    with pytest.raises(ValueError, match="use generate"):
        engine.stream([5], SamplingParams(n=2, temperature=1.0))
    check_idle(engine)


# ---- abort and errors ----


def test_a_processor_that_cannot_start_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_engine.sampler.processors.registry.REGISTRY", {"thrower": Thrower})
    wrong = SamplingParams(max_new_tokens=2, logits_processors={"thrower": {"after": "soon"}})
    answers = make_engine().generate([[5], [6]], [wrong, SamplingParams(max_new_tokens=2)])
    assert [answer.finish_reason for (answer,) in answers] == ["error", "length"]
    assert "thrower" in answers[0][0].error
    assert "TypeError" in answers[0][0].error


# ---- numbers ----


def test_the_event_log_says_what_was_done_and_when() -> None:
    """A clock that ticks once a look: all times are whole numbers that can be checked by hand."""
    ticks = iter(range(10_000))
    driver = make_driver(config=serving(max_tokens_per_step=5, max_running_requests=2))
    engine = llm.make_engine(driver, TOKENIZER, clock=lambda: float(next(ticks)))
    names = [engine.add_request(prompt, SamplingParams(max_new_tokens=3)) for prompt in ([5] * 4, [6] * 3, [7])]
    steps = []
    while engine.scheduler.has_work:
        steps.append(engine.step())
    assert [step.number for step in steps] == list(range(len(steps)))
    assert steps[0].chunks == [("0", 0, 4), ("1", 0, 1)]
    assert steps[1].chunks == [("0", 4, 1), ("1", 1, 2)]
    assert (steps[0].num_running, steps[0].num_waiting, steps[0].num_pages_used) == (2, 1, 2)
    assert [step.num_tokens_held for step in steps[:2]] == [5, 8]
    assert list(engine.log) == [replace(s, deltas=[replace(d, logits=None) for d in s.deltas]) for s in steps]
    assert [set(step.seconds) for step in steps] == [{"schedule", "forward", "sample", "update"}] * len(steps)
    assert all(a.began < b.began for a, b in pairwise(steps))
    computed = [chunk[2] for step in steps for chunk in step.chunks]
    assert sum(computed) == 4 + 3 + 1 + 3 * 2  # every token but the last of each request
    for name in names:
        times = engine.take_output(name).times
        assert times.added < times.started < times.tokens[0] < times.tokens[1] < times.tokens[2] <= times.finished
        assert times.queue_s < times.ttft_s
        assert times.tpot_s == (times.tokens[2] - times.tokens[0]) / 2
    check_idle(engine)


def test_a_pool_is_large_enough_for_one_longest_request_by_itself() -> None:
    engine = make_engine()
    assert engine.scheduler.allocator.num_pages * engine.scheduler.page_size >= 2048
    many = make_engine(config=serving(max_running_requests=64))
    assert many.scheduler.allocator.num_pages * many.scheduler.page_size == 16_384


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_running_requests", 0), ("max_tokens_per_step", -1), ("num_pages", 1.5), ("max_steps_waited", True)],
)
def test_counts_of_the_configuration_are_counts(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} is"):
        EngineConfig(**{name: value})


def test_serving_turns_on_what_a_server_wants_and_takes_changes() -> None:
    assert EngineConfig.serving() == EngineConfig(
        compute="fast", max_running_requests=32, max_tokens_per_step=512, preemption=True, grammar_backend="auto"
    )
    assert EngineConfig.serving(device="cuda").compute == "reference"
    assert EngineConfig.serving(batch_invariant=True).compute == "fast"
    assert EngineConfig.serving(max_running_requests=2, compute="reference").max_running_requests == 2


def test_a_spoilt_row_is_an_error_on_every_path() -> None:
    """An infinite weight makes every logit NaN; the greedy loop used to print token 0 and end as if all were well."""
    config = EngineConfig()
    weights = dict(make_state())
    weights["model.norm.weight"] = weights["model.norm.weight"].clone()
    weights["model.norm.weight"][3] = math.inf
    driver = SamplingDriver(build_model(small_config(), weights, config), config)
    with pytest.raises(ValueError, match=r"token 3 cannot be chosen.*maximum"):
        list(driver.steps([1, 2, 3], 4))
    assert driver.complete([1, 2, 3], SamplingParams(max_new_tokens=4))[0].finish_reason == "error"
    (answer,) = llm.make_engine(driver).generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))[0]
    assert (answer.finish_reason, answer.token_ids) == ("error", [])


@pytest.mark.parametrize("prompt", ["abc", [None], [1.5], [1, "2"]])
def test_a_prompt_that_holds_no_token_ids_is_refused(prompt: Sequence[Any]) -> None:
    with pytest.raises(ValueError, match="is not a token id"):
        make_driver().check_request(prompt, 4)
    (answer,) = make_engine().generate([prompt], SamplingParams(max_new_tokens=2))[0]
    assert (answer.finish_reason, answer.token_ids) == ("error", [])
