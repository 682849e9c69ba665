"""Grammars in the engine: off is off, neighbours change no bit, and nothing else in a request breaks its text.

The oracle of the matrix is the driver of L4, one request at a time, with the grammar as a logits processor that tries
every token's bytes: it knows no masks, no queue and no scheduler. The matrix runs a third of ``MINI_ENGINE_TRACES``.
"""

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Self

import jsonschema
import pytest
import torch
from test_engine import (
    EOS,
    TOKENIZER,
    TRACES,
    Spoiler,
    Thrower,
    _one_thread,  # noqa: F401
    assert_like,
    encode,
    lonely,
)
from test_engine import make_model as make_small_model
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.engine import Engine
from mini_engine.grammar.automaton import compile_node
from mini_engine.grammar.base import REGISTRY, GrammarBackend, GrammarObject, check_rollback
from mini_engine.grammar.json_schema import parse_schema, schema_node
from mini_engine.grammar.regex import parse_regex
from mini_engine.grammar.tokens import TokenTable
from mini_engine.model import Qwen3
from mini_engine.outputs import Delta, RequestOutput
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.params import GrammarKind, SamplingParams
from mini_engine.sampler.processors.base import History, LogitsProcessor, Vocabulary
from mini_engine.sampler.processors.registry import REGISTRY as PROCESSORS
from mini_engine.sampler.sampler import Sampler
from mini_engine.startup import build_model
from mini_engine.tiny import corpus

NUM_TRACES = -(-TRACES // 3)
STOP = 1021
NEWLINE = encode("\n")[0]
THINK, THINK_END = (TOKENIZER.token_to_id(text) for text in (corpus.THINK, corpus.THINK_END))
SPECIAL = {TOKENIZER.token_to_id(text) for text in ("<|endoftext|>", "<|im_start|>", corpus.THINK, corpus.THINK_END)}
PADDED = 1056  # columns of a head whose tokenizer has 1,024 ids
TABLE = TokenTable.from_tokenizer(TOKENIZER, PADDED, frozenset({STOP}))
ANYTHING = r"[\s\S]*"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS = [
    PERSON,
    {"type": "array", "items": {"enum": ["red", "green", 7, None]}, "minItems": 1, "maxItems": 4},
    {"type": "object", "properties": {"ok": {"type": "boolean"}, "é": {"const": [1, {"a": "b"}]}}, "required": ["é"]},
    {"type": "string", "pattern": "^[a-zà-ÿ]{2,5}$"},
]
REGEXES = [r"[a-z ]{3,20}\.", r"(yes|no|maybe), [A-Z][a-z]+", r"(霍格|霍比)[^\n]{2,4}", r"\d{1,3}(\.\d+)?", ANYTHING]


def question(text: str, think: bool = False) -> list[int]:
    """A prompt in the form of the chat template; without a thought its block is closed already."""
    block = "" if think else f"{corpus.THINK}\n\n{corpus.THINK_END}\n\n"
    return encode(f"{corpus.IM_START}user\n{text}{corpus.IM_END}\n{corpus.IM_START}assistant\n{block}")


ASK = "Write this as JSON. Mila is 7 years old."
PROMPTS = [question(ASK), question("Tell me a story about a fox named Mila."), encode("Once upon a time"), [5]]


@cache
def make_model(name: str, dtype: str, invariant: bool) -> Qwen3:
    """The embedded model, or a small random one with a padded head."""
    if name == "embedded":
        return make_small_model("embedded", dtype, invariant)
    config = Qwen3Config(
        vocab_size=PADDED, hidden_size=64, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=1,
        head_dim=24, intermediate_size=100, max_position_embeddings=512, initializer_range=0.15, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    weights = {k: v.to(getattr(torch, dtype)) for k, v in Qwen3ForCausalLM(config).state_dict().items()}
    return build_model(
        ModelConfig.from_hf(config.to_dict()), weights, EngineConfig(dtype=dtype, batch_invariant=invariant)
    )


def make_driver(name: str, config: EngineConfig, **parts: Any) -> SamplingDriver:
    model = make_model(name, config.dtype, config.batch_invariant)
    parts.setdefault("sampler", Sampler(generator=torch.Generator().manual_seed(5)))
    return SamplingDriver(model, config, EOS if name == "embedded" else frozenset({STOP}), **parts)


def serving(**changes: Any) -> EngineConfig:
    defaults = {"batch_invariant": True, "max_running_requests": 8, "preemption": True, "grammar_backend": "fsm"}
    return EngineConfig(**(defaults | changes))


def make_engine(name: str = "embedded", config: EngineConfig | None = None, **parts: Any) -> Engine:
    return Engine(make_driver(name, config or serving(), **parts), TOKENIZER)


def answer_of(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    ((output,),) = engine.generate([prompt], params)
    return output


def check_idle(engine: Engine) -> None:
    assert not engine.has_work
    assert engine.entries == {}
    engine.scheduler.check_pages()
    assert (
        engine.scheduler.allocator.num_free + engine.scheduler.cache.num_pages == engine.scheduler.allocator.num_pages
    )


def is_valid(params: SamplingParams, text: str) -> bool:
    """By the hands of others: the validator and the regular expressions of the standard library."""
    if params.regex is not None:
        return re.fullmatch(params.regex, text, re.ASCII) is not None
    assert isinstance(params.json_schema, str)
    try:
        jsonschema.validate(json.loads(text), json.loads(params.json_schema))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


# ---- the oracle: a grammar as a processor that tries every token ----


@cache
def automaton(kind: GrammarKind, text: str) -> tuple[list[list[int]], list[bool]]:
    """Transitions and accepting states, as lists, which are read faster one by one."""
    dfa = compile_node(parse_regex(text) if kind == "regex" else schema_node(parse_schema(text), "spaced"))
    return dfa.transitions.tolist(), dfa.accepting.tolist()


@cache
def walk(key: tuple[GrammarKind, str], state: int, token: int) -> int:
    table = automaton(*key)[0]
    if not TABLE.token_bytes[token]:
        return -1
    for byte in TABLE.token_bytes[token]:
        state = table[state][byte]
        if state < 0:
            return -1
    return state


@dataclass(frozen=True)
class Place:
    key: tuple[GrammarKind, str]
    state: int
    thinking: bool
    stops: tuple[int, ...]

    def after(self, token: int) -> "Place":
        if self.thinking:
            return replace(self, thinking=token != THINK_END)
        return self if token in self.stops else replace(self, state=walk(self.key, self.state, token))


class TryEveryToken(LogitsProcessor[Place]):
    """Bans the tokens whose bytes lead nowhere."""

    @classmethod
    def start(cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary) -> Place:
        place = Place(
            (arguments["kind"], arguments["text"]), 0, arguments["reasoning"], tuple(vocabulary.eos_token_ids)
        )
        for token in history.output_ids:
            place = place.after(token)
        return place

    def advance(self, state: Place, token_id: int) -> Place:
        return state.after(token_id)

    def apply(self, logits: Tensor) -> None:
        for row, place in self.states.items():
            if place.thinking:
                continue
            accepts = automaton(*place.key)[1][place.state]
            allowed = [t for t in range(logits.shape[1]) if walk(place.key, place.state, t) >= 0]
            banned = torch.ones(logits.shape[1], dtype=torch.bool)
            banned[[*allowed, *place.stops * accepts]] = False
            logits[row, banned] = -math.inf
            if accepts and bool((logits[row] == -math.inf).all()):
                logits[row, list(place.stops)] = 0.0  # what else was asked for gives way to the end of the text


@pytest.fixture(autouse=True)
def _oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in (("zz_try_every_token", TryEveryToken), ("spoiler", Spoiler), ("thrower", Thrower)):
        monkeypatch.setitem(PROCESSORS, name, kind)


def alone(name: str, prompt: Sequence[int], params: SamplingParams, config: EngineConfig) -> Any:
    """The lonely run: stop strings are looked for in what the driver generated."""
    config = EngineConfig(dtype=config.dtype, batch_invariant=config.batch_invariant)
    for_driver = params.for_ids
    if params.grammar is not None:
        kind, text = params.grammar
        arguments = {"kind": kind, "text": text, "reasoning": params.reasoning}
        own = {**(params.logits_processors or {}), "zz_try_every_token": arguments}
        for_driver = replace(for_driver, logits_processors=own, ignore_eos=False)
    return lonely(list(make_driver(name, config).stream(prompt, for_driver)), params)


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
        assert not {"store", "queue", "table"} & set(vars(on.grammars))


class AllowAll(GrammarObject):
    """Bans nothing, special tokens included."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []

    def accept_token(self, token_id: int) -> None:
        self.tokens.append(token_id)

    def rollback(self, count: int) -> None:
        check_rollback(count, len(self.tokens))
        del self.tokens[len(self.tokens) - count :]

    def is_terminated(self) -> bool:
        return STOP in self.tokens

    def is_complete(self) -> bool:
        return True

    def fill_vocab_mask(self, mask: Tensor, row: int) -> None:
        assert (mask[row] == -1).all()

    def copy(self) -> Self:
        return type(self)()


class AllowAllBackend(GrammarBackend):
    name = "all"

    def build(self, kind: GrammarKind, text: str) -> GrammarObject:
        return AllowAll()


@pytest.fixture
def _own_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY.factories, "all", AllowAllBackend)


@pytest.mark.usefixtures("_own_backends")
@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [("embedded", "float32", "fsm"), ("embedded", "float32", "all"), ("padded", "bfloat16", "all")],
)
def test_a_grammar_that_allows_all_changes_no_bit(name: str, dtype: str, backend: str) -> None:
    r"""``[\s\S]*`` bans special tokens and broken characters; the embedded model's greedy answers have none.

    The random model's do, so it gets a grammar that bans nothing at all.
    """
    config = EngineConfig(dtype=dtype, grammar_backend=backend)
    free = SamplingParams(max_new_tokens=20)
    for prompt in PROMPTS:
        expected = list(make_engine(name, EngineConfig(dtype=dtype)).stream(prompt, free))
        got = list(make_engine(name, config).stream(prompt, replace(free, regex=ANYTHING)))
        assert [d.token_id for d in got] == [d.token_id for d in expected]
        assert all(torch.equal(a.logits, b.logits) for a, b in zip(got, expected, strict=True))
        assert [d.finish_reason for d in got] == [d.finish_reason for d in expected]


def test_rows_without_a_grammar_beside_rows_with_one_keep_their_bits() -> None:
    """Also the log-probabilities after everything, which show what the mask of a neighbour would have done."""
    for name, dtype in (("embedded", "float32"), ("padded", "bfloat16")):
        config = serving(dtype=dtype)
        free = SamplingParams(temperature=0.8, seed=3, max_new_tokens=10, logprobs=3, logprobs_mode="processed")
        bound = replace(free, regex=r"[a-c]{30}")
        engine = make_engine(name, config)
        answers = engine.generate(PROMPTS * 2, [free, bound] * 4)
        assert max(len(step.chunks) for step in engine.log) == 8
        for index, ((answer,), prompt) in enumerate(zip(answers, PROMPTS * 2, strict=True)):
            assert_like(answer, alone(name, prompt, [free, bound][index % 2], config))


# ---- the matrix ----


@dataclass
class Planned:
    prompt: list[int]
    params: SamplingParams
    arrives: int
    aborted: int | None
    deltas: list[Delta] = field(default_factory=list)
    output: RequestOutput | None = None


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
    """One seed: a model, a configuration, requests over time. ``run`` drives the engine and checks every step."""

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
            dtype=dtype, page_size=page_size, num_pages=most if self.tight else most * 5,
            max_tokens_per_step=dice.choice([3, 8, 40, None]), prefix_cache=dice.choice([None, "radix"]),
        )  # fmt: skip
        self.config = replace(self.config, **changes)

    def run(self) -> "Trace":
        self.engine = engine = make_engine(self.name, self.config)
        allocator, free = engine.scheduler.allocator, engine.scheduler.allocator.free

        def poison(pages: Sequence[int]) -> None:
            free(pages)
            engine.pool.poison(list(pages))  # whoever reads a page after it was given back reads NaN

        engine.pool.poison(list(range(allocator.num_pages)))
        allocator.free = poison  # type: ignore[method-assign]
        self.num_preemptions, self.num_forced, names, step = 0, 0, {}, 0
        while engine.has_work or len(names) < len(self.planned) or engine.deltas:
            for planned in self.planned:
                if planned.arrives == step:
                    names[engine.add_request(planned.prompt, planned.params)] = planned
            for name, planned in names.items():
                if planned.aborted == step:
                    engine.abort(name)
            if self.tight:
                engine.scheduler.growth.ratio = 0.0  # nobody is expected to grow, so pages run out soon
            output = engine.step()
            engine.scheduler.check_pages()
            self.num_preemptions += len(output.preempted)
            self.num_forced += sum(output.forced.values())
            for delta in output.deltas:
                names[delta.request_id].deltas.append(delta)
            step += 1
        for name, planned in names.items():
            planned.output = engine.take_output(name)
        check_idle(engine)
        return self


def check_planned(planned: Planned, expected: Any) -> None:
    """All of it, bit for bit; of an aborted request what it had come to."""
    output, tokens = planned.output, [d for d in planned.deltas if d.token_id is not None]
    assert output is not None
    assert "".join(delta.text for delta in planned.deltas) == output.text
    assert [delta.token_id for delta in tokens] == output.token_ids
    count = len(output.token_ids)
    assert all(torch.equal(d.logits, row) for d, row in zip(tokens, expected.logits[:count], strict=True))
    if output.finish_reason == "abort":
        assert output.token_ids == expected.token_ids[:count]
        assert output.logprobs == expected.logprobs[: len(output.logprobs)]
        return
    assert_like(output, expected)
    if planned.params.grammar is not None and output.is_grammar_complete and not planned.params.reasoning:
        assert is_valid(planned.params, output.text)


def test_matrix_every_request_of_every_trace_is_bitwise_the_lonely_run() -> None:
    """Mixed batches, chunks, forced preemptions, shared prefixes: the grammar's state is where the tokens are."""
    preempted, hits, ended = 0, 0, dict.fromkeys(("stop", "length", "abort", "error"), 0)
    for seed in range(NUM_TRACES):
        trace = Trace(seed).run()
        preempted += trace.num_preemptions
        hits += trace.engine.grammars.store.stats.num_hits
        for planned in trace.planned:
            check_planned(planned, alone(trace.name, planned.prompt, planned.params, trace.config))
            assert planned.output is not None
            ended[str(planned.output.finish_reason)] += 1
    assert preempted >= 2 * NUM_TRACES, "the traces were meant to run out of pages"
    assert hits >= NUM_TRACES / 2
    assert min(ended["stop"], ended["length"], ended["abort"]) > 0, ended


def test_matrix_with_forced_text_is_bitwise_the_lonely_run_with_forced_text() -> None:
    """The lonely run is an engine of one request, without pressure: no preemption parts forced tokens from it."""
    preempted, forced = 0, 0
    for seed in range(NUM_TRACES):
        trace = Trace(seed, jump_forward=True).run()
        preempted, forced = preempted + trace.num_preemptions, forced + trace.num_forced
        config = EngineConfig(
            dtype=trace.config.dtype, batch_invariant=True, grammar_backend="fsm", jump_forward=True,
            preemption=trace.config.preemption, prefix_cache=trace.config.prefix_cache, max_running_requests=1,
        )  # fmt: skip
        for planned in trace.planned:
            engine = make_engine(trace.name, config)
            name = engine.add_request(planned.prompt, planned.params)
            deltas: list[Delta] = []
            while engine.has_work:
                deltas += engine.step().deltas
            expected, output = engine.take_output(name), planned.output
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
    assert preempted >= NUM_TRACES
    assert forced >= 5 * NUM_TRACES
