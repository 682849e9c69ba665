"""``bench grammar --part step`` and ``--part jump``: what grammars cost a step, and what forced text saves.

Steps use every core, so all of this is wall time: systems run in turn, round after round, ratios are taken within a
round and the median round is reported. The first round is not counted.
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from mini_engine.bench.grammar.loads import JUMP_SCHEMAS, STEP_SCHEMAS, questions
from mini_engine.config import EngineConfig
from mini_engine.grammar.service import GrammarService
from mini_engine.llm import make_driver, make_engine
from mini_engine.model import Qwen3
from mini_engine.outputs import RequestOutput, StepOutput
from mini_engine.sampler.batch import TorchOps
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.request import Request
from mini_engine.tiny.corpus import IM_END

PLAIN = "no grammar"
PARTS = ("poll", "mask", "accept")
PROMPT_TOKENS = 32
JUMP_TOKENS = 160  # at most of an answer


class TimedService(GrammarService):
    """The engine's grammars; ``spent`` takes the seconds of polls, masks and accepted tokens."""

    def __init__(self, *parts: Any) -> None:
        """Serve as ``GrammarService(*parts)`` does."""
        super().__init__(*parts)
        self.spent = dict.fromkeys(PARTS, 0.0)

    def admit(self, wait_s: float) -> tuple[list[str], dict[str, str]]:
        """Poll, timed."""
        began = self.clock()
        answer = super().admit(wait_s)
        self.spent["poll"] += self.clock() - began
        return answer

    def mask(self, requests: Sequence[Request]) -> Callable[[Tensor, TorchOps], None] | None:
        """Return what masks the rows, timed when it does."""
        mask = super().mask(requests)
        if mask is None:
            return None

        def timed(logits: Tensor, ops: TorchOps) -> None:
            began = self.clock()
            mask(logits, ops)
            self.spent["mask"] += self.clock() - began

        return timed

    def accept(self, request: Request, token_id: int) -> bool:
        """Take a token into its grammar, timed. Mutates."""
        began = self.clock()
        is_last = super().accept(request, token_id)
        self.spent["accept"] += self.clock() - began
        return is_last


@dataclass(frozen=True)
class TimedStep:
    """A step: what it did, its seconds, and the seconds of the grammars' parts in it."""

    output: StepOutput
    seconds: float
    parts: dict[str, float]


class TimedEngine:
    """An engine whose steps are timed, with what they spend on grammars."""

    def __init__(self, driver: SamplingDriver, tokenizer: Tokenizer) -> None:
        """Serve as ``make_engine`` does."""
        has_grammars = driver.config.grammar_backend != "none"
        self.grammars = TimedService(driver.config, tokenizer, driver.vocabulary) if has_grammars else None
        self.engine = make_engine(driver, tokenizer, constraints=self.grammars)
        self.timed: list[TimedStep] = []

    def step(self) -> None:
        """Step, timed. Mutates."""
        spent = dict.fromkeys(PARTS, 0.0) if self.grammars is None else self.grammars.spent
        spent.update(dict.fromkeys(PARTS, 0.0))
        began = self.engine.clock()
        output = self.engine.step()
        self.timed.append(TimedStep(output, self.engine.clock() - began, dict(spent)))


@dataclass(frozen=True)
class Served:
    """A model, its tokenizer and the id that ends its answers: what every system of a benchmark shares."""

    name: str
    model: Qwen3
    tokenizer: Tokenizer
    config: EngineConfig

    def engine(self, **changes: Any) -> TimedEngine:
        """Return an engine with ``changes`` to the configuration."""
        config = replace(self.config, **changes)
        stop = self.tokenizer.token_to_id(IM_END)
        assert stop is not None, "both vocabularies have it"
        return TimedEngine(make_driver(self.model, config, frozenset({stop})), self.tokenizer)

    def generate(
        self, engine: TimedEngine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> tuple[list[RequestOutput], list[TimedStep]]:
        """Serve requests that are there at once, their grammars compiled. Raises ``ValueError`` for one that failed."""
        engine.timed.clear()
        for key in {own.grammar for own in params if own.grammar is not None}:
            assert engine.grammars is not None, "an engine without grammars gets no such request"
            if engine.grammars.store.cached(key) is None:
                engine.grammars.store.compile(key).result()
        names = [engine.engine.add_request(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        while engine.engine.has_work:
            engine.step()
        outputs = [engine.engine.take_output(name) for name in names]
        faults = [output.error for output in outputs if output.error is not None]
        if faults:
            raise ValueError(f"a request of the benchmark failed: {faults[0]}")
        return outputs, list(engine.timed)


@dataclass(frozen=True)
class StepRow:
    """Decode steps of ``rows`` requests, each with a grammar. Milliseconds, medians over the rounds of means of steps.

    ``share``: of the steps' time that grammars take, and ``cold_share`` in the first round, when every state is new.
    ``over_plain``: the step's time over that without grammars in the same round.
    """

    model: str
    rows: int
    backend: str
    steps: int
    step_ms: float
    parts_ms: dict[str, float] = field(default_factory=dict)
    share: float = 0.0
    cold_share: float = 0.0
    over_plain: float = 1.0


def decode_steps(steps: Sequence[TimedStep], rows: int) -> list[TimedStep]:
    """Return the steps in which ``rows`` requests got one token each, and nothing else was computed."""
    return [step for step in steps if [size for _, _, size in step.output.chunks] == [1] * rows]


def share_of(steps: Sequence[TimedStep]) -> float:
    """Return the share of the steps' time that grammars took."""
    return sum(sum(step.parts.values()) for step in steps) / sum(step.seconds for step in steps)


def measure_steps(
    served: Served, rows: int, backends: Sequence[str], rounds: int, new_tokens: int, seed: int
) -> list[StepRow]:
    """Time decode steps of ``rows`` requests with every backend and without grammars, in turn."""
    source = random.Random(seed)
    prompts = [source.choices(range(1000), k=PROMPT_TOKENS) for _ in range(rows)]
    plain = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    bound = [replace(plain, json_schema=STEP_SCHEMAS[row % len(STEP_SCHEMAS)]) for row in range(rows)]
    pages = rows * (-(-(PROMPT_TOKENS + new_tokens) // served.config.page_size) + 1)
    engines = {
        name: served.engine(
            num_pages=pages, max_running_requests=rows, grammar_backend="none" if name == PLAIN else name
        )
        for name in (PLAIN, *backends)
    }
    steps: dict[str, list[list[TimedStep]]] = {name: [] for name in engines}
    for _ in tqdm(range(rounds + 1), desc=f"steps of {served.name}, {rows} rows", unit="round"):
        for name, engine in engines.items():
            params = [plain] * rows if name == PLAIN else bound
            steps[name].append(decode_steps(served.generate(engine, prompts, params)[1], rows))
    for engine in engines.values():
        engine.engine.close()
    return [step_row(served.name, rows, name, steps) for name in engines]


def step_row(model: str, rows: int, name: str, steps: Mapping[str, list[list[TimedStep]]]) -> StepRow:
    """Reduce the rounds of one backend."""
    cold, *warm = steps[name]

    def mean(one: Sequence[TimedStep]) -> float:
        return statistics.mean(step.seconds for step in one)

    parts = {
        part: statistics.median(statistics.mean(step.parts[part] for step in one) for one in warm) * 1e3
        for part in PARTS
    }
    return StepRow(
        model=model,
        rows=rows,
        backend=name,
        steps=len(warm[0]),
        step_ms=statistics.median(mean(one) for one in warm) * 1e3,
        parts_ms=parts,
        share=statistics.median(share_of(one) for one in warm),
        cold_share=share_of(cold),
        over_plain=statistics.median(mean(a) / mean(b) for a, b in zip(warm, steps[PLAIN][1:], strict=True)),
    )


@dataclass(frozen=True)
class JumpRow:
    """One workload without and with jump-forward, one request at a time.

    ``passes``: forward passes without and with. ``speedup``: seconds without over seconds with, median over the rounds.
    ``forced``: share of the tokens that were appended. ``canonical``: share of the answers, without and with, that are
    spelled as the tokenizer spells their text; ``excess``: tokens over those of that spelling. ``same_text``: share of
    the answers whose text is the same.
    """

    model: str
    backend: str
    schema: str
    requests: int
    tokens: tuple[int, int]
    passes: tuple[int, int]
    forced: float
    speedup: float
    canonical: tuple[float, float]
    excess: tuple[float, float]
    same_text: float


@dataclass(frozen=True)
class Answers:
    """One workload served once."""

    seconds: float
    outputs: list[RequestOutput]
    steps: list[TimedStep]

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def num_passes(self) -> int:
        """Steps that computed something."""
        return sum(bool(step.output.chunks) for step in self.steps)

    @property
    def num_forced(self) -> int:
        """Tokens that a grammar appended."""
        return sum(sum(step.output.forced.values()) for step in self.steps)


def spellings(tokenizer: Tokenizer, output: RequestOutput) -> tuple[list[int], list[int]]:
    """Return the tokens of an answer, without the stop token, and those that the tokenizer takes for its text."""
    tokens = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
    return tokens, list(tokenizer.encode(output.text, add_special_tokens=False).ids)


def measure_jumps(
    served: Served, backends: Sequence[str], schemas: Sequence[str], requests: int, rounds: int, seed: int
) -> list[JumpRow]:
    """Answer chat prompts under every schema without and with jump-forward, in turn."""
    tokenizer = served.tokenizer
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in questions(requests, seed)]
    pages = -(-(max(map(len, prompts)) + JUMP_TOKENS) // served.config.page_size) + 1
    rows = []
    for backend in backends:
        engines = [
            served.engine(num_pages=pages, max_running_requests=1, grammar_backend=backend, jump_forward=jump)
            for jump in (False, True)
        ]
        for schema in tqdm(schemas, desc=f"jumps of {served.name}, {backend}", unit="schema"):
            params = SamplingParams(max_new_tokens=JUMP_TOKENS, json_schema=JUMP_SCHEMAS[schema])
            runs: list[list[Answers]] = []
            for _ in range(rounds + 1):
                runs.append([answer_all(served, engine, prompts, params) for engine in engines])
            rows.append(jump_row(served, backend, schema, runs[1:]))
        for engine in engines:
            engine.engine.close()
    return rows


def answer_all(served: Served, engine: TimedEngine, prompts: Sequence[list[int]], params: SamplingParams) -> Answers:
    """Answer the prompts; steps that compute nothing do not count."""
    outputs, steps = served.generate(engine, prompts, [params] * len(prompts))
    computed = [step for step in steps if step.output.chunks]
    return Answers(sum(step.seconds for step in computed), outputs, computed)


def jump_row(served: Served, backend: str, schema: str, rounds: Sequence[Sequence[Answers]]) -> JumpRow:
    """Reduce the rounds of one workload, each without and with."""
    off, on = rounds[-1]
    pairs = [[spellings(served.tokenizer, output) for output in answers.outputs] for answers in (off, on)]
    canonical = [statistics.mean(own == known for own, known in each) for each in pairs]
    excess = [sum(len(own) for own, _ in each) / sum(len(known) for _, known in each) for each in pairs]
    return JumpRow(
        model=served.name,
        backend=backend,
        schema=schema,
        requests=len(on.outputs),
        tokens=(off.num_tokens, on.num_tokens),
        passes=(off.num_passes, on.num_passes),
        forced=on.num_forced / on.num_tokens,
        speedup=statistics.median(a.seconds / b.seconds for a, b in rounds),
        canonical=(canonical[0], canonical[1]),
        excess=(excess[0], excess[1]),
        same_text=statistics.mean(a.text == b.text for a, b in zip(off.outputs, on.outputs, strict=True)),
    )


def step_goals(rows: Sequence[StepRow]) -> list[tuple[str, float, bool]]:
    """Return what was promised of ``fsm`` in the steps of a model of 0.6 B, and whether it was reached."""
    return [
        (f"fsm, share of a step of {row.rows} rows < 0.05", row.share, row.share < 0.05)
        for row in rows
        if (row.model, row.backend) == ("0.6b", "fsm")
    ]
