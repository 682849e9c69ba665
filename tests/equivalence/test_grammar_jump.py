"""Forced text is appended without a forward pass for each token, and nobody can tell but by the clock.

Oracles: the run without it, the tokenizer on the whole text, the log-probabilities of the whole text as a prompt.
"""

import random
from dataclasses import replace
from typing import Any

import pytest

from mini_engine.config import EngineConfig
from mini_engine.grammar.fsm import FsmBackend
from mini_engine.grammar.jump import JumpForward
from mini_engine.grammar.tokens import TokenTable
from mini_engine.outputs import RequestOutput
from mini_engine.sampler.params import SamplingParams
from mini_engine.tiny import corpus, words
from tests.support.engines import EOS, TOKENIZER, encode
from tests.support.forms import TYPES
from tests.support.grammars import (
    PERSON,
    PROMPTS,
    _one_thread,  # noqa: F401
    _oracle,  # noqa: F401
    answer_of,
    is_valid,
    make_engine,
    question,
    serving,
)

PARAMS = SamplingParams(json_schema=PERSON, max_new_tokens=60)
TABLE = TokenTable.from_tokenizer(TOKENIZER, TOKENIZER.get_vocab_size(), EOS)


def records(count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of the corpus, each with the schema of its answer."""
    rng = random.Random(7)
    cases = []
    for _ in range(count):
        task = corpus.record_task(rng)
        properties = {name: TYPES[name] for name in task.facts}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        cases.append((question(task.prompt), {**schema, "additionalProperties": False}))
    return cases


def is_canonical(output: RequestOutput) -> bool:
    """Whether the tokens are those that the tokenizer takes for the text."""
    return encode(output.text) == [token for token in output.token_ids if token not in EOS]


# ---- spelling ----


@pytest.mark.slow
def test_whatever_word_follows_forced_text_the_tokenizer_would_have_spelled_it_so() -> None:
    """``"resource(s|Names)": 1`` forced ``r|ce``, and the tokenizer writes ``r|c|es``."""
    jumps = JumpForward(TOKENIZER, TABLE)
    backend = FsmBackend(TABLE)
    rng = random.Random(3)
    forced = 0
    nouns = ["resource", *words.NAMES, *words.ANIMALS, *words.ADJECTIVES, *words.OBJECTS]
    for _ in range(100):
        begin = rng.choice(nouns)[: rng.randint(1, 9)]
        ends = rng.sample([*"aeinorst", "s", "es", "ing", "Names", "ce", '"', " the"], 2)
        pattern = f'\\{{"({begin}{ends[0]}|{begin}{ends[1]})": 1\\}}'
        for end in ends:
            ids = encode(f'{{"{begin}{end}": 1}}')
            grammar = backend.compile(("regex", pattern))
            written = list[int]()
            while len(written) < len(ids) and written == ids[: len(written)]:
                jump = jumps.tokens(grammar, written, 1000)
                jump = jumps.settled(grammar, written, jump) if jump else []
                forced += len(jump)
                for token in jump or ids[len(written) :][:1]:
                    grammar.accept_token(token)
                    written.append(token)
            assert written == ids, (pattern, end)
    assert forced > 100


@pytest.mark.slow
def test_of_sixty_records_ninety_nine_in_a_hundred_keep_their_spelling_and_half_the_passes_are_saved() -> None:
    cases = records(60)
    params = [
        SamplingParams(json_schema=schema, temperature=0.7 * (i % 2), seed=i, max_new_tokens=80)
        for i, (_, schema) in enumerate(cases)
    ]
    outputs, passes = {}, {}
    for jump in (False, True):
        config = EngineConfig(compute="fast", max_running_requests=48, grammar_backend="fsm", jump_forward=jump)
        engine = make_engine(config=config)
        outputs[jump] = [answer for (answer,) in engine.generate([prompt for prompt, _ in cases], params)]
        passes[jump] = sum(len(step.chunks) for step in engine.log)
        assert sum(sum(step.forced.values()) for step in engine.log) == sum(
            answer.grammar_stats.num_forced_tokens for answer in outputs[jump] if answer.grammar_stats is not None
        )
    for output, own in zip(outputs[True], params, strict=True):
        assert output.finish_reason == "length" or is_valid(own, output.text)
    plain, jumped = ([is_canonical(output) for output in outputs[jump]] for jump in (False, True))
    kept = [after for before, after in zip(plain, jumped, strict=True) if before]
    assert len(kept) >= 45
    assert sum(kept) >= 0.99 * len(kept)
    assert sum(jumped) >= 0.99 * len(jumped)
    assert passes[True] <= 0.6 * passes[False]


# ---- with and without ----


def both(prompt: list[int], params: SamplingParams, **changes: Any) -> tuple[RequestOutput, RequestOutput]:
    engines = [make_engine(config=serving(jump_forward=jump, **changes)) for jump in (False, True)]
    off, on = (answer_of(engine, prompt, params) for engine in engines)
    assert off.grammar_stats is not None
    assert off.grammar_stats.num_forced_tokens == 0
    return off, on


def num_forced(output: RequestOutput) -> int:
    assert output.grammar_stats is not None
    return output.grammar_stats.num_forced_tokens


def assert_same(off: RequestOutput, on: RequestOutput) -> None:
    assert on.token_ids == off.token_ids
    assert on.text == off.text
    assert (on.finish_reason, on.matched, on.error) == (off.finish_reason, off.matched, off.error)
    assert on.is_grammar_complete == off.is_grammar_complete
    assert on.logprobs == off.logprobs


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsm", "xgrammar", "llguidance"])
def test_greedy_records_are_the_same_with_and_without(backend: str) -> None:
    forced = 0
    for prompt, schema in records(2):
        off, on = both(prompt, SamplingParams(json_schema=schema, max_new_tokens=80), grammar_backend=backend)
        assert_same(off, on)
        forced += num_forced(on)
    assert forced > 10


@pytest.mark.parametrize("chunk", [None, 3])
def test_log_probabilities_of_forced_tokens_are_the_models(chunk: int | None) -> None:
    """All of them, in order, as when the whole text is a prompt; pieces of a long jump come in several steps."""
    params = replace(PARAMS, logprobs=2)
    off, on = both(PROMPTS[0], params, max_tokens_per_step=chunk)
    assert num_forced(on) > 5
    assert_same(off, on)
    whole = SamplingParams(max_new_tokens=1, prompt_logprobs=2)
    oracle = answer_of(make_engine(config=serving(grammar_backend="none")), PROMPTS[0] + on.token_ids, whole)
    assert oracle.prompt_logprobs is not None
    assert len(on.logprobs) == len(on.token_ids)
    for table, expected in zip(on.logprobs, oracle.prompt_logprobs[len(PROMPTS[0]) :], strict=True):
        assert expected is not None
        assert [(entry.token_id, entry.rank) for entry in table] == [(entry.token_id, entry.rank) for entry in expected]
        # A prompt's are computed in float32, an answer's in float64.
        assert [entry.logprob for entry in table] == pytest.approx([entry.logprob for entry in expected], abs=1e-5)
    assert on.cumulative_logprob == pytest.approx(off.cumulative_logprob)


def test_log_probabilities_that_might_never_be_computed_are_refused() -> None:
    """A preempted request may find its own tokens in the prefix cache. It used to jump or not by the configuration."""
    config = serving(jump_forward=True, prefix_cache="radix", page_size=1)
    asked = replace(PARAMS, logprobs=1)
    with pytest.raises(ValueError, match="logprobs is 1, and with jump_forward, preemption and prefix_cache all on"):
        make_engine(config=config).add_request(PROMPTS[0], asked)
    off = answer_of(make_engine(), PROMPTS[0], asked)
    for change in ({"jump_forward": False}, {"preemption": False}, {"prefix_cache": None}):
        assert_same(off, answer_of(make_engine(config=replace(config, **change)), PROMPTS[0], asked))
    processed = replace(asked, logprobs_mode="processed")  # for which nobody jumps
    answer_of(make_engine(config=config), PROMPTS[0], processed)


def test_the_deltas_of_forced_tokens_are_marked_and_have_their_text() -> None:
    engine = make_engine(config=serving(jump_forward=True))
    deltas = list(engine.stream(PROMPTS[0], PARAMS))
    assert "".join(delta.text for delta in deltas) == answer_of(make_engine(), PROMPTS[0], PARAMS).text
    assert sum(delta.logits is None for delta in deltas) == sum(sum(step.forced.values()) for step in engine.log)
    assert len(engine.log) < len(deltas)
