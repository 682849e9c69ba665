"""The engine against the lonely run: whatever shares its steps, a request gets the tokens, bits and text it gets alone.

The oracle is the driver of L4, which knows no scheduler, with the stop strings looked for in what it generated. The
matrix of random traces runs ``MINI_ENGINE_TRACES`` of them, 10 without that variable; before a release run

    MINI_ENGINE_TRACES=200 pytest tests/equivalence/test_engine.py -k matrix
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from mini_engine import detokenizer, llm
from mini_engine.config import EngineConfig
from mini_engine.engine import Engine
from mini_engine.llm import build_model
from mini_engine.outputs import Delta, StepLog
from mini_engine.sampler.batch import SamplingBatch, SamplingRequest
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.head import LogitsHead
from mini_engine.sampler.params import SamplingParams
from mini_engine.sampler.sampler import Sampler
from mini_engine.scheduler.policy import POLICIES
from mini_engine.scheduler.request import RequestState
from tests.support.engines import (
    BEGINNINGS,
    TOKENIZER,
    TRACES,
    Planned,
    Spoiler,
    Thrower,
    _one_thread,  # noqa: F401
    alone,
    assert_like,
    check_equal,
    encode,
    lonely,
    make_driver,
    make_engine,
    make_model,
    make_state,
    serving,
    small_config,
)


def check_integrity(engine: Engine) -> None:
    scheduler = engine.scheduler
    scheduler.check_pages()
    owned = [page for request in scheduler.running for page in request.pages]
    assert len(owned) + scheduler.allocator.num_free == scheduler.allocator.num_pages


def check_idle(engine: Engine) -> None:
    """Nothing is left behind: no request, no page, no entry."""
    assert not engine.scheduler.has_work
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_pages
    assert engine.entries == {}


# ---- everything off ----


@pytest.mark.parametrize("name", ["embedded", "random"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_everything_off_ids_and_logits_are_those_of_the_greedy_driver(name: str, dtype: str) -> None:
    config = EngineConfig(dtype=dtype)
    prompts = [[7], encode(BEGINNINGS[0])[:20], list(range(10, 75))]
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_sampling_parameters_one_request_is_that_of_the_sampling_driver(dtype: str) -> None:
    config = EngineConfig(dtype=dtype)
    prompt = encode(BEGINNINGS[2])
    for seed in (3, None):
        params = SamplingParams(
            temperature=1.1,
            top_k=30,
            top_p=0.9,
            min_p=0.01,
            repetition_penalty=1.2,
            frequency_penalty=0.3,
            presence_penalty=0.2,
            min_new_tokens=5,
            max_new_tokens=30,
            bad_words=[encode(" the")],
            seed=seed,
            logit_bias={20: 3.0},
            logprobs=2,
            prompt_logprobs=1,
            logprobs_mode="processed",
        )
        engine = make_engine(config=config)
        expected = list(make_driver(config=config).stream(prompt, params))
        ((output,),) = engine.generate([prompt], params)
        assert_like(output, lonely(expected, params))
        got = list(make_engine(config=config).stream(prompt, params))
        assert all(torch.equal(d.logits, s.logits) for d, s in zip(got, expected, strict=True))


def test_the_empty_step_is_empty() -> None:
    output = make_engine().step()
    assert [output.deltas, output.chunks, output.preempted] == [[], [], []]
    assert (output.num_running, output.num_pages_used) == (0, 0)


# ---- the lonely run ----


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
    """One seed: a model, a configuration, requests over time. ``run`` drives the engine and checks every step."""

    def __init__(self, seed: int, **changes: object) -> None:
        dice = random.Random(seed)
        self.name, dtype = [("embedded", "float32"), ("random", "bfloat16")][seed % 2]
        size = make_model(self.name, dtype, True).config.vocab_size
        self.dice, self.shuffled = dice, dice.random() < 0.4
        self.tight = seed % 5 < 3  # short prompts, long answers, small pages, a pool for about one of them
        self.planned = []
        for _ in range(dice.randint(4, 8) if self.tight else dice.randint(2, 8)):
            length = dice.choice([1, 2, dice.randint(3, 8 if self.tight else 40)])
            prompt = [dice.randrange(size) for _ in range(length)]
            if self.name == "embedded" and dice.random() < 0.7:
                prompt = encode(dice.choice(BEGINNINGS))
            arrives, aborted = dice.choice([0, 0, dice.randint(1, 20)]), dice.randint(0, 60)
            params = make_params(dice, size, dice.randint(12, 30) if self.tight else dice.randint(1, 24))
            self.planned.append(Planned(prompt, params, arrives, aborted if dice.random() < 0.15 else None))
        page_size = dice.choice([1, 1, 1, 4] if self.tight else [1, 4, 16])
        most = max(-(-(len(p.prompt) + p.params.max_new_tokens) // page_size) for p in self.planned)
        self.config = serving(
            dtype=dtype,
            page_size=page_size,
            num_pages=most if self.tight else most * 4,
            max_running_requests=8 if self.tight else dice.choice([2, 3, 8]),
            max_tokens_per_step=dice.choice([3, 8, 40, None] if self.tight else [1, 3, 8, 40, None]),
            policy=dice.choice(list(POLICIES)),
            preemption=self.tight or dice.random() < 0.5,
        )
        self.config = replace(self.config, **changes)

    def run(self) -> "Trace":
        self.engine = engine = make_engine(self.name, self.config)
        self.poison_freed_pages()
        self.num_preemptions, names, step = 0, {}, 0
        while engine.scheduler.has_work or len(names) < len(self.planned) or engine.deltas:
            for planned in self.planned:
                if planned.arrives == step:
                    names[engine.add_request(planned.prompt, planned.params)] = planned
            for name, planned in names.items():
                if planned.aborted == step:
                    engine.abort(name)
            if self.tight:
                engine.scheduler.growth.ratio = 0.0  # nobody is expected to grow, so pages run out soon
            if self.shuffled:
                self.dice.shuffle(engine.scheduler.running)  # the order of the rows is nobody's business
            output = engine.step()
            check_integrity(engine)
            self.num_preemptions += len(output.preempted)
            for delta in output.deltas:
                names[delta.request_id].deltas.append(delta)
            step += 1
        for name, planned in names.items():
            planned.output = engine.take_output(name)
        check_idle(engine)
        return self

    def poison_freed_pages(self) -> None:
        """Whoever reads a page after it was given back reads NaN."""
        allocator, pool = self.engine.scheduler.allocator, self.engine.pool
        plain = allocator.free
        pool.poison(list(range(allocator.num_pages)))

        def free(pages: list[int]) -> None:
            plain(pages)
            pool.poison(pages)

        allocator.free = free


def test_matrix_every_request_of_every_trace_is_bitwise_the_lonely_run() -> None:
    preempted, finished = 0, dict.fromkeys(("stop", "length", "abort"), 0)
    for seed in range(TRACES):
        trace = Trace(seed).run()
        preempted += trace.num_preemptions
        for planned in trace.planned:
            check_equal(planned, alone(trace.name, planned.prompt, planned.params, trace.config))
            finished[planned.output.finish_reason] += 1
    assert preempted >= 2 * TRACES, "the traces were meant to run out of pages"
    assert all(finished.values()), finished


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 4, 8])
def test_matrix_at_other_thread_counts(threads: int) -> None:
    """The lonely run has one thread, the batch has several: what a thread computes depends on their number."""
    for seed in (0, 1, 3):
        torch.set_num_threads(threads)
        trace = Trace(seed).run()
        torch.set_num_threads(1)
        for planned in trace.planned:
            check_equal(planned, alone(trace.name, planned.prompt, planned.params, trace.config))


@pytest.mark.parametrize(
    "changes", [{"compute": "packed"}, {"compute": "fast"}, {"compute": "compiled", "dtype": "float32"}], ids=str
)
def test_matrix_with_packed_weights(changes: dict[str, str]) -> None:
    for seed in range(4):
        trace = Trace(seed, **changes).run()
        for planned in trace.planned:
            check_equal(planned, alone(trace.name, planned.prompt, planned.params, trace.config))


def test_without_batch_invariance_the_matrix_fails() -> None:
    """The negative control: tokens may agree, but some bits do not."""
    changed = 0
    for seed in range(4):
        trace = Trace(seed, batch_invariant=False).run()
        for planned in trace.planned:
            expected = alone(trace.name, planned.prompt, planned.params, trace.config)
            got = [delta.logits for delta in planned.deltas if delta.token_id is not None]
            changed += sum(not torch.equal(a, b) for a, b in zip(got, expected.logits, strict=False))
    assert changed > 10


def test_without_batch_invariance_greedy_ids_agree_where_the_two_likeliest_are_apart() -> None:
    """float32, as far as every gap before was above 1e-3: then the texts may part."""
    compared = 0
    for seed in range(0, 12, 2):
        trace = Trace(seed, batch_invariant=False)
        for planned in trace.planned:
            planned.params = SamplingParams(max_new_tokens=planned.params.max_new_tokens)
            planned.aborted = None
        for planned in trace.run().planned:
            expected = alone(trace.name, planned.prompt, planned.params, trace.config)
            for logits, token, got in zip(expected.logits, expected.token_ids, planned.deltas, strict=False):
                first, second = logits.topk(2).values.tolist()
                if first - second <= 1e-3:
                    break
                assert got.token_id == token
                compared += 1
    assert compared > 100


@pytest.mark.parametrize("invariant", [False, True])
def test_every_token_follows_from_its_logits_and_its_own_past(invariant: bool) -> None:
    """Penalties, seeds, bans and counters survive preemption and changing neighbours: a fresh row agrees each time."""
    checked = preempted = 0
    for seed in range(100, 106):
        trace = Trace(seed, batch_invariant=invariant).run()
        preempted += trace.num_preemptions
        vocabulary = trace.engine.driver.vocabulary
        for planned in trace.planned:
            past: list[int] = []
            for delta in planned.deltas:
                if delta.token_id is None:
                    continue
                row = SamplingBatch.from_requests([SamplingRequest(planned.prompt, planned.params, past)], vocabulary)
                chosen = Sampler()(delta.logits[None], row)
                assert chosen.token_ids == [delta.token_id]
                assert chosen.logprobs == [delta.logprobs]
                past.append(delta.token_id)
                checked += 1
    assert checked > 200
    assert preempted >= 10


@pytest.mark.parametrize("chunk", [1, 2, 5, None])
def test_the_log_probabilities_of_a_prompt_do_not_depend_on_its_chunks(chunk: int | None) -> None:
    """A chunk in the middle of a prompt predicts one more token than its own rows hold: it used to raise."""
    prompt, params = encode(BEGINNINGS[0]), SamplingParams(max_new_tokens=3, prompt_logprobs=2)
    engine = make_engine(config=serving(max_tokens_per_step=chunk))
    answers = engine.generate([prompt, prompt[:1], prompt[:2], prompt[:6]], params)
    for (answer,), count in zip(answers, (len(prompt), 1, 2, 6), strict=True):
        assert_like(answer, alone("embedded", prompt[:count], params))
        assert len(answer.prompt_logprobs) == count


def test_the_log_probabilities_of_a_prompt_survive_a_preemption_in_its_middle() -> None:
    """Chunks are cut elsewhere the second time, so one of them begins in what was reported and ends beyond it."""
    prompt, params = encode(BEGINNINGS[0]), SamplingParams(max_new_tokens=3, prompt_logprobs=2)
    engine = make_engine(config=serving(max_tokens_per_step=5))
    other = engine.add_request([5], SamplingParams(ignore_eos=True))
    engine.step()
    name = engine.add_request(prompt, params)
    assert engine.step().chunks[-1] == (name, 0, 4)
    engine.scheduler.preempt(engine.entries[name].request)
    engine.abort(other)
    assert engine.step().chunks == [(name, 0, 5)]
    while engine.scheduler.has_work:
        engine.step()
    assert_like(engine.take_output(name), alone("embedded", prompt, params))


def test_a_stop_token_goes_before_a_stop_string_and_that_before_the_length() -> None:
    """All three fall on the fourth token. A stop token is not shown, so no stop string is looked for in it."""
    prompt = encode(BEGINNINGS[0])
    ids = alone("embedded", prompt, SamplingParams(max_new_tokens=4)).token_ids
    end = TOKENIZER.decode(ids)[-2:]
    both, string, none = (
        SamplingParams(max_new_tokens=4, stop=[end], stop_token_ids=[ids[3]]),
        SamplingParams(max_new_tokens=4, stop=[end]),
        SamplingParams(max_new_tokens=4),
    )
    answers = [answer for (answer,) in make_engine().generate([prompt] * 3, [both, string, none])]
    assert [(a.finish_reason, a.matched) for a in answers] == [("stop", ids[3]), ("stop", end), ("length", None)]
    assert [answer.token_ids for answer in answers] == [ids] * 3
    assert answers[0].text == TOKENIZER.decode(ids[:3])
    assert answers[1].text + end == answers[2].text == TOKENIZER.decode(ids)


def test_what_was_held_back_for_a_stop_string_comes_out_when_a_stop_token_ends_the_answer() -> None:
    prompt = encode(BEGINNINGS[0])
    ids = alone("embedded", prompt, SamplingParams(max_new_tokens=4)).token_ids
    shown = TOKENIZER.decode(ids[:3])
    params = SamplingParams(max_new_tokens=4, stop=[shown[-2:] + "never"], stop_token_ids=[ids[3]])
    *_, last = make_engine().stream(prompt, params)
    assert (last.token_id, last.text, last.finish_reason) == (ids[3], shown[-2:], "stop")


# ---- generate ----


def test_answers_come_in_the_order_of_the_prompts_and_refused_ones_keep_their_place() -> None:
    """Each refusal says why in numbers, and the others are bitwise what they are alone."""
    good = encode(BEGINNINGS[0])
    params = [
        SamplingParams(max_new_tokens=20),
        SamplingParams(max_new_tokens=4),
        SamplingParams(max_new_tokens=4, stop_token_ids=[9999]),
        SamplingParams(max_new_tokens=9, seed=1, temperature=1.0),
        SamplingParams(max_new_tokens=4),
        SamplingParams(max_new_tokens=3000),
        SamplingParams(max_new_tokens=250),
        SamplingParams(max_new_tokens=4, logits_processors={"no_repeat_ngram": {"ngram_size": -1}}),
        SamplingParams(max_new_tokens=1),
    ]
    prompts = [good, [], good, good[:5], [5, 1024], good, good, good, good[:1]]
    engine = make_engine(config=serving(num_pages=10))
    answers = [answer for (answer,) in engine.generate(prompts, params)]
    reasons = {
        1: "0 tokens",
        2: "stop_token_ids names token id 9999",
        4: "token id 1024",
        5: "positions, the model has 2048",
        6: "the pool has 10",
        7: "ngram_size",
    }
    for index, answer in enumerate(answers):
        assert answer.prompt_ids == prompts[index]
        if index in reasons:
            assert answer.finish_reason == "error"
            assert reasons[index] in answer.error
            assert answer.token_ids == []
        else:
            assert_like(answer, alone("embedded", prompts[index], params[index]))
    check_idle(engine)


def test_an_empty_stop_string_is_refused_by_the_parameters() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        SamplingParams(stop=["a", ""])


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        make_engine(text=False).add_request([1], SamplingParams(stop=["a"]))
    ((answer,),) = make_engine(text=False).generate([[1]], SamplingParams(max_new_tokens=2))
    assert (answer.text, len(answer.token_ids)) == ("", 2)


def test_n_answers_have_the_seeds_counted_up_and_best_of_returns_the_likeliest() -> None:
    prompt = encode(BEGINNINGS[0])
    params = SamplingParams(temperature=1.0, seed=11, max_new_tokens=8, n=2, best_of=4)
    engine = make_engine(config=serving())
    greedy = SamplingParams(max_new_tokens=5)
    (first, neighbour) = engine.generate([prompt, prompt], [params, greedy])
    expected = [g.token_ids for g in make_driver().complete(prompt, params)]
    assert [answer.token_ids for answer in first] == expected
    each = [alone("embedded", prompt, replace(params, n=1, best_of=None, seed=11 + i, logprobs=0)) for i in range(4)]
    sums = [sum(entries[0].logprob for entries in one.logprobs) for one in each]
    likeliest = sorted(sorted(range(4), key=lambda i: -sums[i])[:2])
    assert expected == [each[i].token_ids for i in likeliest]
    assert_like(neighbour[0], alone("embedded", prompt, greedy))
    all_three = engine.generate([prompt], replace(params, n=3, best_of=None))[0]
    assert [answer.token_ids for answer in all_three] == [one.token_ids for one in each[:3]]
    check_idle(engine)
    refused = engine.generate([[]], params)[0]
    assert [answer.finish_reason for answer in refused] == ["error"]


@pytest.mark.parametrize("changes", [{}, {"max_tokens_per_step": 3}, {"max_running_requests": 2}, {"num_pages": 6}])
def test_samples_of_one_prompt_share_one_prefill_and_no_bit_changes(changes: dict[str, int]) -> None:
    """The siblings copy keys and values; each computes the prompt's last token itself, to have a row to sample from.

    With room for two at a time a later sample copies from whoever is still there; with six pages some are preempted.
    """
    prompt = encode(BEGINNINGS[0])
    params = SamplingParams(temperature=1.0, seed=11, max_new_tokens=20, n=4, logprobs=1, prompt_logprobs=1)
    engine = make_engine(config=serving(page_size=8, **changes))
    answers = engine.generate([prompt, prompt[:3]], [params, SamplingParams(max_new_tokens=4)])
    for index, answer in enumerate(answers[0]):
        assert_like(answer, alone("embedded", prompt, replace(params, n=1, seed=11 + index)))
    check_idle(engine)
    if "num_pages" not in changes:
        of_prompt = sum(
            min(n, len(prompt) - 1 - first)
            for step in engine.log
            for name, first, n in step.chunks
            if name in "0123" and first < len(prompt) - 1
        )
        assert of_prompt == len(prompt) - 1
        assert sum(sum(step.copied.values()) for step in engine.log) == 3 * (len(prompt) - 1)


def test_all_samples_come_in_the_step_after_their_prompt() -> None:
    """A sample that copied the prompt and computes its last token used to hold up the next one, a step for each."""
    engine = make_engine(config=serving(max_running_requests=8))
    prompt = encode(BEGINNINGS[0])
    engine.generate([prompt], SamplingParams(temperature=1.0, seed=1, max_new_tokens=4, n=6))
    assert [len(step.chunks) for step in engine.log] == [1, 6, 6, 6, 5]


def test_a_sibling_does_not_wait_for_one_that_ended() -> None:
    engine = make_engine(config=serving(max_tokens_per_step=2))
    prompt = encode(BEGINNINGS[0])
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=3, n=2)
    first, second = engine.add_samples(prompt, params)
    engine.step()
    assert engine.entries[second].request.state is RequestState.WAITING  # it could run and would compute all again
    engine.abort(first)
    while engine.scheduler.has_work:
        engine.step()
    assert_like(engine.take_output(second), alone("embedded", prompt, replace(params, n=1, seed=4)))


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
    step, calls = engine.step, iter(range(3))

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
    longest, schedule = 0, engine.scheduler.schedule

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


def test_the_deltas_of_a_stream_join_to_the_answer() -> None:
    prompt = encode(BEGINNINGS[0])
    for params in (SamplingParams(max_new_tokens=30), SamplingParams(max_new_tokens=30, stop=["a b", " lived"])):
        expected = alone("embedded", prompt, params)
        deltas = list(make_engine().stream(prompt, params))
        assert "".join(delta.text for delta in deltas) == expected.text
        assert [delta.token_id for delta in deltas] == expected.token_ids  # one delta a token, the last one too
        assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + [expected.finish_reason]


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


def test_a_stream_beside_a_list_and_an_abort_from_outside() -> None:
    engine = make_engine(config=serving())
    stream = engine.stream(encode(BEGINNINGS[0]), SamplingParams(max_new_tokens=4))
    ((answer,),) = engine.generate([encode(BEGINNINGS[1])], SamplingParams(max_new_tokens=20))
    assert_like(answer, alone("embedded", encode(BEGINNINGS[1]), SamplingParams(max_new_tokens=20)))
    deltas = list(stream)
    assert [d.token_id for d in deltas] == alone(
        "embedded", encode(BEGINNINGS[0]), SamplingParams(max_new_tokens=4)
    ).token_ids
    stream = engine.stream(encode(BEGINNINGS[0]), SamplingParams(ignore_eos=True))
    first = next(stream)
    engine.abort(first.request_id)
    assert [d.finish_reason for d in stream] == ["abort"]
    check_idle(engine)


def test_a_stream_refuses_at_once() -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="0 tokens"):
        engine.stream([], SamplingParams())
    with pytest.raises(ValueError, match="use generate"):
        engine.stream([5], SamplingParams(n=2, temperature=1.0))
    check_idle(engine)


# ---- abort and errors ----


def test_abort_in_every_state() -> None:
    engine = make_engine(config=serving(page_size=1, num_pages=40, max_tokens_per_step=8))
    prompt, params = encode(BEGINNINGS[0])[:10], SamplingParams(max_new_tokens=25, ignore_eos=True)
    names = [engine.add_request(prompt, params) for _ in range(6)]
    seen = set()
    while {RequestState.WAITING, RequestState.RUNNING, RequestState.PREEMPTED} - seen:
        engine.scheduler.growth.ratio = 0.0
        engine.step()
        requests = {name: engine.entries[name].request for name in names}
        for state in set(RequestState) - seen - {RequestState.FINISHED}:
            for name, request in requests.items():
                chunked = 0 < request.num_computed_tokens < request.num_prompt_tokens
                if request.state is state and (state is not RequestState.RUNNING or chunked):
                    seen.add(state)
                    engine.abort(name)
                    engine.abort(name)
                    check_integrity(engine)
                    assert request.finish_reason == "abort"
                    break
    engine.abort("no such request")
    while engine.scheduler.has_work:
        engine.step()
        check_integrity(engine)
    expected = alone("embedded", prompt, params)
    outputs = [engine.take_output(name) for name in names]
    assert sorted(o.finish_reason for o in outputs) == ["abort"] * 3 + ["length"] * 3
    for output in outputs:
        assert output.token_ids == expected.token_ids[: len(output.token_ids)]
    check_idle(engine)


def test_an_aborted_request_gives_out_what_was_held_back() -> None:
    engine = make_engine()
    name = engine.add_request(
        encode(BEGINNINGS[0]), SamplingParams(stop=["tiger named no such thing"], ignore_eos=True)
    )
    engine.step()
    deltas = engine.step().deltas
    engine.abort(name)
    deltas += engine.step().deltas
    output = engine.take_output(name)
    assert output.text == TOKENIZER.decode(output.token_ids)
    assert deltas[-1].finish_reason == "abort"
    assert deltas[-1].token_id is None


def test_a_row_of_nan_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_engine.sampler.processors.registry.REGISTRY", {"spoiler": Spoiler})
    prompts = [encode(text) for text in BEGINNINGS]
    params = [SamplingParams(max_new_tokens=10, ignore_eos=True, frequency_penalty=0.5) for _ in prompts]
    params[1] = replace(params[1], logits_processors={"spoiler": {"after": 3}})
    params[3] = replace(params[3], logits_processors={"spoiler": {"after": 0}})
    engine = make_engine(config=serving())
    answers = [answer for (answer,) in engine.generate(prompts, params)]
    for index, (answer, prompt, own) in enumerate(zip(answers, prompts, params, strict=True)):
        expected = alone("embedded", prompt, own)
        assert_like(answer, expected)
        assert (answer.finish_reason == "error") == (index in (1, 3))
    assert [len(answer.token_ids) for answer in answers] == [10, 3, 10, 0, 10]
    assert "spoiler" in answers[1].error
    assert "NaN" in answers[1].error
    check_idle(engine)
    *_, last = engine.stream(prompts[1], params[1])
    assert (last.token_id, last.finish_reason, last.error) == (None, "error", answers[1].error)


@pytest.mark.parametrize(("place", "tokens"), [("start", 0), ("advance", 1), ("apply", 2)])
def test_a_processor_that_raises_ends_its_own_request_alone(
    place: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step used to raise until the request was aborted, and nobody else came on."""
    monkeypatch.setattr("mini_engine.sampler.processors.registry.REGISTRY", {"thrower": Thrower})
    prompts = [encode(text) for text in BEGINNINGS[:3]]
    params = [
        SamplingParams(max_new_tokens=6, temperature=1.0, seed=i, frequency_penalty=0.5, ignore_eos=True)
        for i in range(3)
    ]
    at = 0 if place == "start" else 2
    params[1] = replace(params[1], logits_processors={"thrower": {"after": at, "place": place}})
    params[2] = replace(params[2], logits_processors={"thrower": {"after": 99, "place": place}})
    engine = make_engine(config=serving())
    answers = [answer for (answer,) in engine.generate(prompts, params)]
    assert [answer.finish_reason for answer in answers] == ["length", "error", "length"]
    assert len(answers[1].token_ids) == tokens
    assert f"in {place}" in answers[1].error
    assert "thrower" in answers[1].error
    for index in (0, 2):
        assert_like(answers[index], alone("embedded", prompts[index], params[index]))
    check_idle(engine)


def test_a_processor_that_cannot_start_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_engine.sampler.processors.registry.REGISTRY", {"thrower": Thrower})
    wrong = SamplingParams(max_new_tokens=2, logits_processors={"thrower": {"after": "soon"}})
    answers = make_engine().generate([[5], [6]], [wrong, SamplingParams(max_new_tokens=2)])
    assert [answer.finish_reason for (answer,) in answers] == ["error", "length"]
    assert "thrower" in answers[0][0].error
    assert "TypeError" in answers[0][0].error


def test_a_model_that_gives_nan_ends_the_requests_of_that_step_and_no_other() -> None:
    calls = iter(range(100))

    def fail_once(logits: Tensor) -> Tensor:
        if next(calls) == 2:
            logits[0] = math.inf
        return logits

    engine = make_engine(config=serving(), head=LogitsHead(gather=fail_once))
    prompts = [encode(text) for text in BEGINNINGS[:2]]
    answers = [answer for (answer,) in engine.generate(prompts, SamplingParams(max_new_tokens=6))]
    assert [answer.finish_reason for answer in answers] == ["error", "length"]
    assert "plus infinity" in answers[0].error
    assert_like(answers[1], alone("embedded", prompts[1], SamplingParams(max_new_tokens=6)))
    check_idle(engine)


@pytest.mark.parametrize("place", ["hidden_states", "logits", "sampler"])
def test_a_step_that_was_interrupted_is_computed_again(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, or a processor that raises: what was not computed is still pending, and nobody loses or gains a token."""
    engine = make_engine(config=serving(max_tokens_per_step=9))
    prompts = [encode(text) for text in BEGINNINGS[:3]]
    params = SamplingParams(max_new_tokens=8, frequency_penalty=0.9, temperature=1.0, seed=3, prompt_logprobs=0)
    names = [engine.add_request(prompt, params) for prompt in prompts]
    plain, calls = getattr(engine.driver, place), iter(range(10_000))

    def interrupted(*arguments: object) -> object:
        if next(calls) % 3 == 1:
            raise KeyboardInterrupt
        return plain(*arguments)

    monkeypatch.setattr(engine.driver, place, interrupted)
    interruptions = 0
    while engine.scheduler.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            interruptions += 1
        check_integrity(engine)
    assert interruptions > 3
    for name, prompt in zip(names, prompts, strict=True):
        assert_like(engine.take_output(name), alone("embedded", prompt, params))


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


def test_an_unknown_policy_is_refused_when_the_engine_is_made() -> None:
    with pytest.raises(ValueError, match="no policy 'fifo'"):
        make_engine(config=serving(policy="fifo"))


def test_the_random_policy_takes_a_seed_and_the_others_refuse_it() -> None:
    orders = set()
    for seed in (1, 1, 2):
        engine = make_engine(config=serving(policy="random", policy_seed=seed, max_running_requests=1))
        engine.generate([[5]] * 6, SamplingParams(max_new_tokens=1))
        orders.add(tuple(name for step in engine.log for name, _, _ in step.chunks))
    assert len(orders) == 2
    with pytest.raises(ValueError, match="policy_seed is 3 and the policy 'fcfs' draws nothing"):
        make_engine(config=serving(policy_seed=3))


def test_a_request_that_waited_too_long_goes_first_whatever_the_policy() -> None:
    for steps, first in ((2, "short"), (256, "short"), (1, "long")):
        engine = make_engine(config=serving(policy="shortest", max_steps_waited=steps, max_running_requests=1))
        engine.add_request([5], SamplingParams(max_new_tokens=2, ignore_eos=True), "running")
        engine.step()
        engine.add_request([6] * 90, SamplingParams(max_new_tokens=1), "long")
        engine.step()
        engine.add_request([7], SamplingParams(max_new_tokens=1), "short")
        assert engine.step().chunks[0][0] == first


@pytest.mark.parametrize("field_name", ["max_running_requests", "max_tokens_per_step", "num_pages", "max_steps_waited"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_counts_of_the_configuration_are_counts(field_name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field_name} is"):
        EngineConfig(**{field_name: value})


def test_serving_turns_on_what_a_server_wants_and_takes_changes() -> None:
    assert EngineConfig.serving() == EngineConfig(
        compute="fast", max_running_requests=32, max_tokens_per_step=512, preemption=True, grammar_backend="auto"
    )
    assert EngineConfig.serving(device="cuda").compute == "reference"
    assert EngineConfig.serving(batch_invariant=True).compute == "fast"
    assert EngineConfig.serving(max_running_requests=2, compute="reference").max_running_requests == 2


def test_the_log_times_the_phases_of_a_step() -> None:
    log = StepLog(iter([10.0, 13.0, 14.0, 20.0]).__next__)
    log.begin()
    log.mark("schedule")
    log.mark("forward")
    log.mark("update")
    assert (log.began, log.seconds) == (10.0, {"schedule": 3.0, "forward": 1.0, "update": 6.0})


def test_a_tokenizer_that_cannot_decode_one_answer_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's decoder raises for some bytes; that request is decoded another way and the others go on."""
    decode = detokenizer.DecodeStream

    class Fails:
        def __init__(self, **options: bool) -> None:
            self.inner, self.count = decode(**options), 0

        def step(self, tokenizer: Tokenizer, token_id: int) -> str | None:
            self.count += 1
            if self.count == 3:
                raise Exception("Invalid prefix encountered")
            return self.inner.step(tokenizer, token_id)

    prompts, params = [[5, 6, 7], [8, 9]], SamplingParams(max_new_tokens=8, ignore_eos=True)
    expected = [answers[0].text for answers in make_engine().generate(prompts, params)]
    monkeypatch.setattr(detokenizer, "DecodeStream", Fails)
    answers = [answers[0] for answers in make_engine().generate(prompts, params)]
    assert [answer.finish_reason for answer in answers] == ["length", "length"]
    assert [answer.text for answer in answers] == expected


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_a_spoilt_row_is_an_error_on_every_path(spoilt: float) -> None:
    """An infinite weight makes every logit NaN; the greedy loop used to print token 0 and end as if all were well."""
    config = EngineConfig()
    weights = dict(make_state())
    weights["model.norm.weight"] = weights["model.norm.weight"].clone()
    weights["model.norm.weight"][3] = spoilt
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
