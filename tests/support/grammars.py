"""Engines with grammars, prompts that ask for an answer in a form, and whether an answer has it."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from mini_engine import llm
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.engine import Engine
from mini_engine.grammar.automata.automaton import compile_node
from mini_engine.grammar.automata.regex import parse_regex
from mini_engine.grammar.schema.converter import parse_schema, schema_node
from mini_engine.grammar.tokens import TokenTable
from mini_engine.llm import build_model
from mini_engine.model import Qwen3
from mini_engine.outputs import RequestOutput
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.params import GrammarKind, SamplingParams
from mini_engine.sampler.processors.base import History, LogitsProcessor, Vocabulary
from mini_engine.sampler.processors.registry import REGISTRY as PROCESSORS
from mini_engine.sampler.sampler import Sampler
from mini_engine.tiny import corpus
from tests.support.engines import (
    EOS,
    TOKENIZER,
    Spoiler,
    Thrower,
    _one_thread,  # noqa: F401
    encode,
    lonely,
)
from tests.support.engines import make_model as make_small_model

STOP = 1021
THINK, THINK_END = (TOKENIZER.token_to_id(text) for text in (corpus.THINK, corpus.THINK_END))
PADDED = 1056  # columns of a head whose tokenizer has 1,024 ids
TABLE = TokenTable.from_tokenizer(TOKENIZER, PADDED, frozenset({STOP}))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


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
        vocab_size=PADDED,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=24,
        intermediate_size=100,
        initializer_range=0.15,
        tie_word_embeddings=False,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    weights = {k: v.to(getattr(torch, dtype)) for k, v in Qwen3ForCausalLM(config).state_dict().items()}
    return build_model(
        ModelConfig.from_hf(config.to_dict()), weights, EngineConfig(dtype=dtype, batch_invariant=invariant)
    )


def make_driver(name: str, config: EngineConfig, **parts: Any) -> SamplingDriver:
    model = make_model(name, config.dtype, config.batch_invariant)
    parts.setdefault("sampler", Sampler(generator=torch.Generator().manual_seed(5)))
    return llm.make_driver(model, config, EOS if name == "embedded" else frozenset({STOP}), **parts)


def serving(**changes: Any) -> EngineConfig:
    defaults = {"batch_invariant": True, "max_running_requests": 8, "preemption": True, "grammar_backend": "fsm"}
    return EngineConfig(**(defaults | changes))


def make_engine(name: str = "embedded", config: EngineConfig | None = None, **parts: Any) -> Engine:
    return llm.make_engine(make_driver(name, config or serving(), **parts), TOKENIZER)


def answer_of(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    ((output,),) = engine.generate([prompt], params)
    return output


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
    may_begin: bool = False  # whether the next token may begin a thought

    def after(self, token: int) -> "Place":
        if self.thinking or (self.may_begin and token == THINK):
            return replace(self, thinking=token != THINK_END, may_begin=False)
        if self.may_begin:
            return replace(self, may_begin=False).after(token)
        return self if token in self.stops else replace(self, state=walk(self.key, self.state, token))


class TryEveryToken(LogitsProcessor[Place]):
    """Bans the tokens whose bytes lead nowhere."""

    @classmethod
    def start(cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary) -> Place:
        last = next((token for token in reversed(history.prompt_ids) if not TABLE.token_bytes[token].isspace()), None)
        thinks, may_begin = (arguments["reasoning"] and found for found in (last == THINK, last != THINK_END))
        key, stops = (arguments["kind"], arguments["text"]), tuple(vocabulary.eos_token_ids)
        place = Place(key, 0, thinks, stops, may_begin and not thinks)
        for token in history.output_ids:
            place = place.after(token)
        return place

    def advance(self, state: Place, token_id: int) -> Place:
        return state.after(token_id)

    def apply(self, logits: Tensor) -> None:
        for row, place in self.states.items():
            if place.thinking:
                logits[row, list(place.stops)] = -math.inf
                continue
            accepts = automaton(*place.key)[1][place.state]
            allowed = [t for t in range(logits.shape[1]) if walk(place.key, place.state, t) >= 0]
            banned = torch.ones(logits.shape[1], dtype=torch.bool)
            banned[[*allowed, *place.stops * accepts, *[THINK] * place.may_begin]] = False
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
