"""Grammars in the engine: off is off, neighbours change no bit, and nothing else in a request breaks its text.

The oracle of the matrix is the driver of L4, one request at a time, with the grammar as a logits processor that tries
every token's bytes: it knows no masks, no queue and no scheduler. The matrix runs a third of ``MINI_ENGINE_TRACES``,
and at least 9 of them.
"""

import json
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from tokenizers import Tokenizer, models, pre_tokenizers

from mini_engine import llm
from mini_engine.config import EngineConfig
from mini_engine.engine import Engine
from mini_engine.outputs import Delta, RequestOutput
from mini_engine.sampler.params import SamplingParams
from mini_engine.tiny import corpus
from tests.support.engines import (
    EOS,
    TOKENIZER,
    TRACES,
    Planned,
    _one_thread,  # noqa: F401
    assert_like,
    check_equal,
    check_idle,
    encode,
    run_trace,
)
from tests.support.grammars import (
    ASK,
    PERSON,
    PROMPTS,
    STOP,
    TABLE,
    THINK,
    THINK_END,
    _oracle,  # noqa: F401
    alone,
    answer_of,
    is_valid,
    make_driver,
    make_engine,
    make_model,
    question,
    serving,
)

NUM_TRACES = max(9, -(-TRACES // 3))
NEWLINE = encode("\n")[0]
ANYTHING = r"[\s\S]*"
SCHEMAS = [
    PERSON,
    {"type": "array", "items": {"enum": ["red", "green", 7, None]}, "minItems": 1, "maxItems": 4},
    {"type": "object", "properties": {"ok": {"type": "boolean"}, "é": {"const": [1, {"a": "b"}]}}, "required": ["é"]},
    {"type": "string", "pattern": "^[a-zà-ÿ]{2,5}$"},
]
REGEXES = [r"[a-z ]{3,20}\.", r"(yes|no|maybe), [A-Z][a-z]+", r"(霍格|霍比)[^\n]{2,4}", r"\d{1,3}(\.\d+)?", ANYTHING]


# ---- off ----


@pytest.mark.parametrize(("name", "dtype"), [("embedded", "float32"), ("padded", "bfloat16")])
def test_with_a_backend_and_no_grammar_ids_and_logits_are_those_without(name: str, dtype: str) -> None:
    """The backend does not even come into being."""
    params = SamplingParams(max_new_tokens=12)
    for jump in (False, True):
        on = make_engine(name, EngineConfig(dtype=dtype, grammar_backend="fsm", jump_forward=jump))
        off = make_engine(name, EngineConfig(dtype=dtype))
        for prompt in PROMPTS:
            got, expected = list(on.stream(prompt, params)), list(off.stream(prompt, params))
            assert [d.token_id for d in got] == [d.token_id for d in expected]
            assert all(torch.equal(a.logits, b.logits) for a, b in zip(got, expected, strict=True))
        assert not {"store", "queue", "table"} & set(vars(on.constraints))


def test_a_grammar_that_allows_all_changes_no_bit() -> None:
    r"""``[\s\S]*`` bans special tokens and broken characters; the greedy answers of the embedded model have none."""
    free = SamplingParams(max_new_tokens=20)
    for prompt in PROMPTS:
        expected = list(make_engine(config=EngineConfig()).stream(prompt, free))
        config = EngineConfig(grammar_backend="fsm")
        got = list(make_engine(config=config).stream(prompt, replace(free, regex=ANYTHING)))
        assert all(torch.equal(a.logits, b.logits) for a, b in zip(got, expected, strict=True))
        assert [(d.token_id, d.finish_reason) for d in got] == [(d.token_id, d.finish_reason) for d in expected]


# ---- the matrix ----


def make_params(dice: random.Random, size: int) -> SamplingParams:
    def maybe(value: object, off: object, chance: float = 0.3) -> Any:
        return value if dice.random() < chance else off

    grammar: dict[str, Any] = {}
    if dice.random() < 0.85:
        grammar = dice.choice([{"json_schema": s} for s in SCHEMAS] + [{"regex": r} for r in REGEXES])
        grammar = {**grammar, "reasoning": dice.random() < 0.15}
    most = dice.randint(4, 30)
    ignore_eos = bool(grammar) and not grammar["reasoning"] and dice.random() < 0.3
    return SamplingParams(
        temperature=maybe(dice.choice([0.5, 1.0, 1.5]), 0.0, 0.7),
        top_k=maybe(dice.randint(1, 40), 0),
        top_p=maybe(0.9, 1.0),
        repetition_penalty=maybe(1.3, 1.0),
        frequency_penalty=maybe(0.7, 0.0),
        min_new_tokens=0 if ignore_eos else maybe(dice.randint(1, most), 0),
        max_new_tokens=most,
        ignore_eos=ignore_eos,
        stop=maybe([dice.choice(["e", '": ', "a", ", ", "."])], (), 0.15),
        stop_token_ids=maybe([dice.randrange(size)], ()),
        logit_bias=maybe({dice.randrange(size): 5.0, STOP: dice.choice([-9.0, 9.0])}, None),
        logits_processors=maybe({"no_repeat_ngram": {"ngram_size": 4, "window_size": None}}, None, 0.1),
        seed=dice.randint(-(2**63), 2**63 - 1),
        logprobs=maybe(dice.choice([0, 2]), None),
        prompt_logprobs=maybe(0, None, 0.1),
        logprobs_mode=dice.choice(["raw", "processed"]),
        **grammar,
    )


class Trace:
    """One seed: a model, a configuration, requests over time."""

    def __init__(self, seed: int, **changes: Any) -> None:
        dice = self.dice = random.Random(seed)
        self.name, dtype = [("embedded", "float32"), ("padded", "bfloat16")][seed % 2]
        self.tight = seed % 3 < 2
        self.planned = []
        for _ in range(dice.randint(4, 8)):
            prompt = dice.choice([[dice.randrange(1024) for _ in range(dice.randint(1, 6))], *PROMPTS])
            aborted = dice.randint(0, 30) if dice.random() < 0.15 else None
            params = make_params(dice, 1024)
            self.planned.append(Planned(prompt, params, dice.choice([0, 0, dice.randint(1, 9)]), aborted))
        page_size = dice.choice([1, 4])
        most = max(-(-(len(p.prompt) + p.params.max_new_tokens) // page_size) for p in self.planned)
        self.config = serving(
            dtype=dtype,
            page_size=page_size,
            num_pages=most if self.tight else most * 5,
            max_tokens_per_step=dice.choice([3, 8, 40, None]),
            prefix_cache=dice.choice([None, "radix"]),
        )
        self.config = replace(self.config, **changes)
        if self.config.jump_forward and self.config.prefix_cache:  # refused there: their rows may never be computed
            for planned in self.planned:
                planned.params = replace(planned.params, logprobs=None)

    def run(self) -> "Trace":
        self.engine = make_engine(self.name, self.config)
        self.steps = run_trace(self.engine, self.planned, self.tight)
        return self

    @property
    def num_preemptions(self) -> int:
        return sum(len(step.preempted) for step in self.steps)


def test_matrix_every_request_of_every_trace_is_bitwise_the_lonely_run() -> None:
    """Mixed batches, chunks, forced preemptions, shared prefixes: the grammar's state is where the tokens are."""
    preempted = 0
    hits = 0
    ended = Counter[str | None]()
    for seed in range(NUM_TRACES):
        trace = Trace(seed).run()
        preempted += trace.num_preemptions
        hits += trace.engine.constraints.store.stats.num_hits
        for planned in trace.planned:
            check_equal(planned, alone(trace.name, planned.prompt, planned.params, trace.config))
            output, own = planned.output, planned.params
            assert output is not None
            if own.grammar is not None and output.is_grammar_complete and not own.reasoning:
                assert is_valid(own, output.text) or output.finish_reason == "abort"
            ended[output.finish_reason] += 1
    assert preempted >= NUM_TRACES // 2, (
        "the traces were meant to run out of pages"
    )  # how often depends on the compiles
    assert hits >= NUM_TRACES / 2
    assert min(ended["stop"], ended["length"], ended["abort"]) > 0, ended


@pytest.mark.slow
def test_matrix_with_forced_text_is_bitwise_the_lonely_run_with_forced_text() -> None:
    """The lonely run is an engine of one request that preempts nobody and caches nothing."""
    preempted, forced = 0, 0
    for seed in range(NUM_TRACES):
        trace = Trace(seed, jump_forward=True).run()
        preempted += trace.num_preemptions
        forced += sum(sum(s.forced.values()) for s in trace.steps)
        config = EngineConfig(
            dtype=trace.config.dtype,
            batch_invariant=True,
            grammar_backend="fsm",
            jump_forward=True,
        )
        for planned in trace.planned:
            engine = make_engine(trace.name, config)
            name = engine.add_request(planned.prompt, planned.params)
            deltas: list[Delta] = []
            while engine.has_work:
                deltas += engine.step().deltas
            expected = engine.take_output(name)
            output = planned.output
            assert output is not None
            tokens = [delta for delta in planned.deltas if delta.token_id is not None]
            for got, one in zip(tokens, deltas, strict=False):
                assert got.token_id == one.token_id
                assert (got.logits is None) == (one.logits is None)
                assert got.logits is None or torch.equal(got.logits, one.logits)
            if output.finish_reason != "abort":
                assert_like(output, expected)  # type: ignore[arg-type]
                assert output.is_grammar_complete == expected.is_grammar_complete
                assert len(output.logprobs) in (0, len(output.token_ids))
    assert preempted >= NUM_TRACES // 2
    assert forced >= 2 * NUM_TRACES


# ---- the order of things ----


def ask(params: SamplingParams, prompt: Sequence[int] = PROMPTS[0], **changes: Any) -> RequestOutput:
    return answer_of(make_engine(config=serving(**changes)), prompt, params)


def is_valid_text(text: str) -> bool:
    return is_valid(SamplingParams(json_schema=PERSON), text)


@pytest.mark.parametrize("jump", [False, True])
@pytest.mark.parametrize("stop", [{"stop": ["}"]}, {"stop_token_ids": encode("}")}])
def test_a_text_cut_by_a_stop_is_not_called_complete(stop: dict[str, Any], jump: bool) -> None:
    """The grammar has seen the whole text and is complete; the text that is given out lacks its end."""
    output = ask(SamplingParams(json_schema=PERSON, **stop), jump_forward=jump)
    whole = ask(SamplingParams(json_schema=PERSON))
    assert whole.is_grammar_complete
    assert output.finish_reason == "stop"
    assert whole.text.startswith(output.text)
    assert not is_valid_text(output.text)
    assert output.is_grammar_complete is False
    assert output.matched not in EOS


def test_nothing_that_a_request_asks_for_makes_its_text_invalid() -> None:
    """Biases, lists of allowed ids, bad words and processors are obeyed inside the grammar, or end their row alone."""
    digits = [encode(str(n))[0] for n in range(10)]
    schema = {"json_schema": PERSON, "max_new_tokens": 40}
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"logit_bias": {STOP: 100, encode("{")[0]: -100, encode(" the")[0]: 100}}, None),
        ({"allowed_token_ids": [STOP, *digits]}, "after grammar the row allows no token"),
        ({"bad_words": [[token] for token, text in enumerate(TABLE.token_bytes[:1024]) if b'"' in text]}, "allows no"),
        ({"logits_processors": {"no_repeat_ngram": {"ngram_size": 3, "window_size": None}}}, None),
        ({"logits_processors": {"spoiler": {"after": 2}}}, "holds NaN"),
        ({"logits_processors": {"thrower": {"after": 2, "place": "apply"}}}, "raised RuntimeError"),
        ({"repetition_penalty": 2.0, "frequency_penalty": 2.0, "presence_penalty": 2.0}, None),
        ({"temperature": 2.0, "top_k": 1, "top_p": 0.01, "min_p": 1.0, "seed": 4}, None),
    ]
    params = [SamplingParams(**schema, **changes) for changes, _ in cases]
    for jump in (False, True):
        engine = make_engine(config=serving(jump_forward=jump, max_running_requests=32))
        plain = replace(params[0], logit_bias=None)
        answers = [a for (a,) in engine.generate([PROMPTS[0]] * (len(cases) + 1), [*params, plain])]
        for answer, own, (changes, message) in zip(answers, params, cases, strict=False):
            if message is not None:
                assert answer.finish_reason == "error", changes
                assert message in str(answer.error)
            elif answer.finish_reason == "stop":
                assert is_valid(own, answer.text), changes
            else:
                assert answer.finish_reason == "length", (changes, answer.error)
                assert not answer.is_grammar_complete
            banned = {word[0] for word in own.bad_words if len(word) == 1}
            assert not banned & set(answer.token_ids), changes
            assert own.allowed_token_ids is None or set(answer.token_ids) <= set(own.allowed_token_ids)
        assert answers[-1].token_ids == alone("embedded", PROMPTS[0], plain, serving()).token_ids
        check_idle(engine)


# ---- thoughts ----


@pytest.mark.parametrize("budget", [0, 200])
def test_a_budget_of_thought_is_kept_and_the_answer_is_valid(budget: int) -> None:
    arguments = {"budget": budget, "start": THINK, "end": THINK_END, "newline": NEWLINE}
    params = SamplingParams(
        json_schema=PERSON, reasoning=True, max_new_tokens=150, logits_processors={"thinking_budget": arguments}
    )
    for jump in (False, True):
        output = ask(params, question(ASK, think=True), jump_forward=jump)
        used = output.token_ids.index(THINK_END) - output.token_ids.index(THINK) - 1
        assert used <= budget + 1  # the line break
        assert output.finish_reason == "stop"
        assert is_valid(params, output.text.split(corpus.THINK_END)[1])


# ---- what is accepted ----


class Pet(BaseModel):
    name: str
    age: int


def test_a_schema_may_be_a_mapping_text_or_a_pydantic_model() -> None:
    text = json.dumps(PERSON, ensure_ascii=False)
    for schema in (PERSON, text):
        assert SamplingParams(json_schema=schema).grammar == ("json_schema", text)
    key = SamplingParams(json_schema=Pet).grammar
    assert key is not None
    assert json.loads(key[1]) == Pet.model_json_schema()
    assert SamplingParams(json_schema={"const": "é"}).grammar == ("json_schema", '{"const": "é"}')  # as it is written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "regex and ebnf are given; an answer has one grammar"),
        ({"reasoning": True}, "reasoning is True without a grammar"),
        ({"regex": "a", "reasoning": 1}, "reasoning is 1; it is True or False"),
        ({"json_schema": 3}, "json_schema is 3; it must be a mapping, JSON text or a pydantic model"),
        ({"json_schema": {"const": math.nan}}, "which is not JSON"),
        ({"regex": b"a"}, "regex is b'a'; it must be text"),
    ],
)
def test_parameters_that_make_no_grammar_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grammar_backend": None}, "grammar_backend is None; choose one of none, auto, fsm"),
        ({"json_whitespace": "wide"}, "json_whitespace is 'wide'; choose one of spaced, compact, any"),
        ({"grammar_timeout_s": 0}, "grammar_timeout_s is 0; it must be a finite number above 0 seconds"),
        (
            {"grammar_backend": "none", "jump_forward": True},
            "jump_forward is True and does nothing while grammar_backend is 'none'; set grammar_backend",
        ),
    ],
)
def test_options_of_the_engine_that_mean_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        EngineConfig(**{"grammar_backend": "fsm", **changes})


def refused(engine: Engine, params: SamplingParams) -> str:
    """The error of one request between two that run."""
    free = SamplingParams(max_new_tokens=3)
    first, (answer,), last = engine.generate([PROMPTS[2]] * 3, [free, params, free])
    assert [first[0].finish_reason, answer.finish_reason, last[0].finish_reason] == ["length", "error", "length"]
    assert not engine.has_work
    with pytest.raises(ValueError, match=re.escape(str(answer.error))):
        engine.stream(PROMPTS[2], params)
    return str(answer.error)


def test_a_request_that_this_engine_cannot_serve_is_refused_alone() -> None:
    bound = SamplingParams(regex="a")
    assert "no grammar backend; set grammar_backend='auto'" in refused(
        make_engine(config=serving(grammar_backend="none")), bound
    )
    without = llm.make_engine(make_driver("embedded", serving()), None)
    assert "need a tokenizer and this engine has none" in refused(without, bound)
    driver = llm.make_driver(make_model("embedded", "float32", True), serving(), frozenset())
    assert "this model has none; give it eos_token_ids" in refused(llm.make_engine(driver, TOKENIZER), bound)
    assert "has no ebnf, only json_schema, regex" in refused(make_engine(), SamplingParams(ebnf='root ::= "a"'))
    assert "has no structural_tag" in refused(make_engine(), SamplingParams(structural_tag={}))
    for unread in (
        Tokenizer(models.WordPiece({"[UNK]": 0, "once": 1, "##s": 2}, unk_token="[UNK]")),
        Tokenizer(models.Unigram([("<unk>", 0.0), ("▁once", -1.0)], 0)),
        Tokenizer(models.WordLevel({"once": 0}, unk_token="once")),
    ):
        unread.pre_tokenizer = pre_tokenizers.Whitespace()
        engine = llm.make_engine(make_driver("embedded", serving()), unread)
        assert "grammars need a tokenizer whose texts are those of its tokens in a row" in refused(engine, bound)


@pytest.mark.parametrize("mark", [corpus.THINK, corpus.THINK_END])
def test_where_no_thought_is_known_the_grammar_begins_at_once(mark: str) -> None:
    raw = json.loads(TOKENIZER.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] != mark]
    engine = llm.make_engine(make_driver("embedded", serving()), Tokenizer.from_str(json.dumps(raw)))
    (answers,) = engine.generate([PROMPTS[0]], SamplingParams(regex="a{3}", reasoning=True, max_new_tokens=9))
    assert [answer.text for answer in answers] == ["aaa"]


def test_a_backend_that_nobody_knows_is_refused_when_the_engine_is_made() -> None:
    with pytest.raises(ValueError, match="grammar_backend is 'lark'; choose one of none, auto, fsm, xgrammar"):
        make_engine(config=serving(grammar_backend="lark"))
