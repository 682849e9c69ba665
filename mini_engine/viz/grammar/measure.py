"""What a mask does to the distributions of a model and to whole texts, and what it costs."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from time import perf_counter
from typing import Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mini_engine.grammar.backends import BUILT_IN, make_backend
from mini_engine.grammar.base import GrammarBackend, GrammarObject, GrammarOptions
from mini_engine.grammar.fsm import CompiledGrammar, FsmBackend
from mini_engine.grammar.jump import JumpForward
from mini_engine.grammar.masks import unpack_allowed
from mini_engine.grammar.service import GrammarService
from mini_engine.grammar.tokens import TokenTable
from mini_engine.llm import make_engine
from mini_engine.outputs import RequestOutput, StepOutput
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.params import GrammarKey, SamplingParams
from mini_engine.viz.sampling.measure import next_logits
from mini_engine.viz.scheduling.measure import with_options

MOST_PREFIXES = 2_000  # forward passes of one exact enumeration


def allowed_tokens(grammar: GrammarObject, vocab_size: int) -> Tensor:
    """Return which tokens are allowed next -> bool [V], for any backend."""
    mask = grammar.allocate_vocab_mask(vocab_size, 1)
    row = torch.zeros(1, vocab_size)
    grammar.fill_vocab_mask(mask, 0)
    grammar.apply_vocab_mask(row, mask)
    return row[0] == 0


def state_masks(compiled: CompiledGrammar) -> Tensor:
    """Return the masks of all states of an automaton -> bool [S, V]."""
    rows = [torch.from_numpy(compiled.mask(state)) for state in range(compiled.dfa.num_states)]
    return unpack_allowed(torch.stack(rows), compiled.table.vocab_size)


# ---------------------------------------------------------------------------------------------- an answer, step by step


@dataclass(frozen=True)
class MaskedStep:
    """One token of an answer: the distribution of the model before it, and which tokens the mask allowed.

    ``logprobs`` [V] float64: of the model alone, natural logarithms. ``allowed`` [V] bool.
    """

    token_id: int
    logprobs: Tensor
    allowed: Tensor

    @cached_property
    def log_kept(self) -> float:
        """Natural logarithm of the mass that is allowed."""
        return min(0.0, float(self.logprobs[self.allowed].logsumexp(0)))  # a rounded sum may be above 1

    @property
    def kept(self) -> float:
        """The mass of what is allowed, Z."""
        return math.exp(self.log_kept)

    @property
    def distance(self) -> float:
        """Total variation distance of the masked distribution from the model's, which is 1 - Z."""
        return 1 - self.kept

    @property
    def divergence_bits(self) -> float:
        """Kullback-Leibler divergence of the masked distribution from that of the model, in bits.

        The mask only scales up what it leaves, so the divergence is -log2 Z.
        """
        return abs(self.log_kept) / math.log(2)

    @property
    def num_allowed(self) -> int:
        """How many tokens are allowed."""
        return int(self.allowed.sum())

    @property
    def preferred(self) -> int:
        """The token that the model alone would take."""
        return int(self.logprobs.argmax())

    @property
    def before(self) -> Tensor:
        """Probabilities without the mask [V]."""
        return self.logprobs.exp()

    @property
    def after(self) -> Tensor:
        """Probabilities after the mask [V]."""
        return (self.logprobs - self.log_kept).exp() * self.allowed


def follow_answer(
    driver: SamplingDriver, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams
) -> list[MaskedStep]:
    """Answer under the grammar of ``params`` -> a step for every token, the end included."""
    bound = with_options(driver, grammar_backend="fsm")
    grammars = GrammarService(bound.config, tokenizer, bound.vocabulary)
    engine = make_engine(bound, tokenizer, constraints=grammars)
    assert params.grammar is not None, "there is nothing to follow"
    grammar = grammars.store.backend.compile(params.grammar)
    steps = []
    for delta in engine.stream(prompt_ids, params):
        if delta.token_id is not None:
            assert delta.logits is not None, "without jumps every token has its logits"
            allowed = allowed_tokens(grammar, len(delta.logits))
            steps.append(MaskedStep(delta.token_id, delta.logits.double().log_softmax(0), allowed))
            grammar.accept_token(delta.token_id)
    return steps


# ---------------------------------------------------------------------------------------------------------------- jumps


@dataclass(frozen=True)
class Jumps:
    """An answer with its log. ``forced``: of each token, whether it was appended without the model."""

    name: str
    output: RequestOutput
    forced: Sequence[bool]
    log: Sequence[StepOutput]

    @property
    def num_passes(self) -> int:
        """Forward passes, the prompt's included."""
        return len(self.log)

    @property
    def lengths(self) -> list[int]:
        """Tokens of the answer after each forward pass."""
        return [
            sum(delta.token_id is not None for step in self.log[: i + 1] for delta in step.deltas)
            for i in range(len(self.log))
        ]

    @property
    def num_rows(self) -> int:
        """Rows that the model computed."""
        return sum(rows for step in self.log for _, _, rows in step.chunks)


class NaiveJumps(JumpForward):
    """Wrong on purpose: appends all forced tokens, also a last one that could have been longer."""

    def could_be_longer(self, grammar: GrammarObject, num_bytes: int) -> bool:
        """Return False, which is wrong."""
        return False

    def settled(self, grammar: GrammarObject, output_ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Return all ``tokens``, which is wrong."""
        return list(tokens)


def answer_with_jumps(
    name: str,
    driver: SamplingDriver,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    jump: Literal["off", "on", "naive"],
) -> Jumps:
    """Answer with jump-forward, without it, or with the wrong jumps of ``NaiveJumps``."""
    bound = with_options(driver, grammar_backend="fsm", jump_forward=jump != "off")
    grammars = GrammarService(bound.config, tokenizer, bound.vocabulary)
    if jump == "naive":
        grammars.jumps = NaiveJumps(tokenizer, grammars.table)
    engine = make_engine(bound, tokenizer, constraints=grammars)
    request = engine.add_request(prompt_ids, params)
    output = engine.entries[request].output
    deltas = [delta for delta in engine.deltas_of(request) if delta.token_id is not None]
    return Jumps(name, output, [delta.logits is None for delta in deltas], list(engine.log))


# --------------------------------------------------------------------------------------- the texts of a small language


@dataclass(frozen=True)
class Language:
    """The exact probabilities of the texts of a small language. Those of all spellings of a text are added up.

    ``mass``: how often the model alone gives one of the texts. ``conditioned``: the share of each text among these
    answers. ``masked``: the share of each text when every step is masked. ``greedy``: the text of masked greedy
    decoding. ``num_prefixes``: forward passes that the enumeration took.
    """

    texts: Sequence[str]
    mass: float
    conditioned: Sequence[float]
    masked: Sequence[float]
    greedy: str
    num_prefixes: int

    @property
    def distance(self) -> float:
        """Total variation distance of the two distributions."""
        return sum(abs(one - other) for one, other in zip(self.conditioned, self.masked, strict=True)) / 2


def enumerate_language(
    driver: SamplingDriver, tokenizer: Tokenizer, prompt_ids: Sequence[int], texts: Sequence[str]
) -> Language:
    """Go through every spelling of every text. Raises ``ValueError`` if this takes too many forward passes."""
    vocabulary = driver.vocabulary
    table = TokenTable.from_tokenizer(tokenizer, vocabulary.size, vocabulary.eos_token_ids)
    start = FsmBackend(table).compile(("regex", "|".join(map(re.escape, texts))))
    free, masked = dict.fromkeys(texts, 0.0), dict.fromkeys(texts, 0.0)
    greedy = ""
    num_prefixes = 0
    todo: list[tuple[list[int], GrammarObject, float, float, bool]] = [([], start, 0.0, 0.0, True)]
    while todo:
        ids, grammar, log_free, log_masked, is_greedy = todo.pop()
        num_prefixes += 1
        if num_prefixes > MOST_PREFIXES:
            raise ValueError(f"the texts have more than {MOST_PREFIXES} beginnings; take fewer or shorter texts")
        step = MaskedStep(
            -1,
            next_logits(driver, [*prompt_ids, *ids]).double().log_softmax(0),
            allowed_tokens(grammar, vocabulary.size),
        )
        text = b"".join(table.token_bytes[token] for token in ids).decode() if grammar.is_complete() else ""
        best = int(step.after.argmax())
        for token in step.allowed.nonzero()[:, 0].tolist():
            own_free = log_free + float(step.logprobs[token])
            own_masked = log_masked + float(step.logprobs[token]) - step.log_kept
            if token in table.stop_ids:
                free[text] += math.exp(own_free)
                masked[text] += math.exp(own_masked)
                greedy = text if is_greedy and token == best else greedy
            else:
                after = grammar.copy()
                after.accept_token(token)
                todo.append(([*ids, token], after, own_free, own_masked, is_greedy and token == best))
    mass = sum(free.values())
    return Language(
        texts, mass, [free[text] / mass for text in texts], [masked[text] for text in texts], greedy, num_prefixes
    )


# -------------------------------------------------------------------------------------------------------------- timings


@dataclass(frozen=True)
class Timing:
    """What one grammar cost in one backend, in seconds. ``first`` and ``again``: each mask along one answer."""

    grammar: str
    backend: str
    compile_s: float
    first: Sequence[float]
    again: Sequence[float]


def installed_backends() -> list[str]:
    """Return the built-in backends whose libraries are installed."""
    library = {"outlines": "outlines_core"}
    return [name for name in BUILT_IN if name == "fsm" or find_spec(library.get(name, name)) is not None]


def time_backends(
    names: Sequence[str], table: TokenTable, answers: Mapping[str, tuple[GrammarKey, Sequence[int]]], repeats: int = 3
) -> list[Timing]:
    """Compile every grammar in every backend, and fill the masks along an answer twice; the best of ``repeats``.

    ``answers``: name of a grammar -> the grammar, and the tokens of one of its texts. Each repeat makes a new backend,
    so that nothing is cached.
    """
    timings = []
    for name, (key, tokens) in answers.items():
        for backend in names:
            tries = [time_once(make_backend(backend, table, GrammarOptions()), key, tokens) for _ in range(repeats)]
            compiles, firsts, agains = zip(*tries, strict=True)
            best = [[min(times) for times in zip(*runs, strict=True)] for runs in (firsts, agains)]
            timings.append(Timing(name, backend, min(compiles), *best))
    return timings


def time_once(
    backend: GrammarBackend, key: GrammarKey, tokens: Sequence[int]
) -> tuple[float, list[float], list[float]]:
    """Return the seconds of the compile, of each mask of a first answer, and of each of a second one."""
    began = perf_counter()
    compiled = backend.compile(key)
    compile_s = perf_counter() - began
    fills = []
    for _ in range(2):
        grammar = compiled.copy()
        times = []
        mask = grammar.allocate_vocab_mask(backend.table.vocab_size, 1)
        for token in [*tokens, None]:
            began = perf_counter()
            grammar.fill_vocab_mask(mask, 0)
            times.append(perf_counter() - began)
            if token is not None:
                grammar.accept_token(token)
        fills.append(times)
    return compile_s, fills[0], fills[1]
