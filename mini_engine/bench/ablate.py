"""``mini-engine bench ablate``: one load with one option off and on, and one sentence about the difference.

Both sides have the same weights and requests, and take turns in every round. Ratios are taken within a round. Other
options are as in ``EngineConfig.serving()`` with greedy sampling, or as ``--base`` says.
"""

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer
from tqdm import tqdm

from mini_engine.bench.grammar.loads import large_tokenizer, tiny_tokenizer
from mini_engine.bench.machine import SHAPES, chosen, machine, make_checkpoint
from mini_engine.bench.serving import EngineSystem, Models, median_figures, run_once
from mini_engine.bench.workload import Figures, Run, describe, figures, make_jobs
from mini_engine.checkpoint import TINY_MODEL, load_config
from mini_engine.config import EngineConfig
from mini_engine.llm import make_driver, make_engine
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.params import SamplingParams
from mini_engine.tiny.corpus import IM_END

ENGINE_OPTIONS = [field.name for field in fields(EngineConfig)]
SAMPLING_OPTIONS = [field.name for field in fields(SamplingParams) if field.name != "max_new_tokens"]  # of the load
SEEDED = {"temperature": 0.8, "seed": 1}  # so that tokens are drawn, and runs can be repeated
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
BOUND = {"grammar_backend": "fsm", "json_schema": PERSON, "ignore_eos": False}  # answers end with the grammar
CACHED = {"prefix_cache": "radix"}  # this load shares no prefixes and shows the cost; ``bench prefix`` shows the gain
# option -> off and on, and the options that both sides need for it to have an effect.
TRIALS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dtype": ("float32", "bfloat16", {}),
    "compute": ("reference", "fast", {}),
    "batch_invariant": (False, True, {}),
    "page_size": (1, 16, {}),
    "max_running_requests": (1, 32, {}),
    "max_tokens_per_step": (None, 512, {}),
    "policy": ("fcfs", "lof", {"max_running_requests": 8}),
    "max_steps_waited": (256, 8, {"policy": "lof", "max_running_requests": 8}),
    "preemption": (False, True, {}),
    "prefix_cache": (None, "radix", {}),
    "eviction": ("lru", "lfu", CACHED),
    "wait_for_prefix": (None, 32, CACHED),
    "wait_below_match": (32, 512, {**CACHED, "wait_for_prefix": 32}),
    "temperature": (0.0, 0.8, {"seed": 1}),
    "top_k": (0, 50, SEEDED),
    "top_p": (1.0, 0.9, SEEDED),
    "min_p": (0.0, 0.05, SEEDED),
    "repetition_penalty": (1.0, 1.1, {}),
    "frequency_penalty": (0.0, 0.2, {}),
    "presence_penalty": (0.0, 0.1, {}),
    "min_new_tokens": (0, 4, {"ignore_eos": False}),
    "ignore_eos": (False, True, {}),
    "n": (1, 2, SEEDED),
    "best_of": (None, 2, SEEDED),
    "logprobs": (None, 5, {}),
    "prompt_logprobs": (None, 0, {}),
    "logprobs_mode": ("raw", "processed", {**SEEDED, "logprobs": 5}),
    "grammar_backend": ("none", "fsm", {}),  # the cost for requests without a grammar
    "json_whitespace": ("spaced", "any", BOUND),
    "jump_forward": (False, True, BOUND),
    "json_schema": (None, {"type": "array", "items": {"type": "string"}, "minItems": 64}, {"grammar_backend": "fsm"}),
    "regex": (None, "[a-z ]*", {"grammar_backend": "fsm"}),
}
CLEAR = 0.03  # a smaller change of throughput is not a finding


@dataclass(frozen=True)
class Side:
    """One value of the option: its figures, medians over the rounds, and the bytes of its model."""

    value: Any
    figures: Figures
    model_bytes: int


@dataclass(frozen=True)
class Ablation:
    """An option off and on. Ratios are on over off within a round; ``throughput_ratios`` has one for every round."""

    option: str
    off: Side
    on: Side
    throughput_ratios: list[float]
    ttft_ratio: float
    tpot_ratio: float
    changed_ids: int
    requests: int

    @property
    def conclusion(self) -> str:
        """One sentence: what changed, by how much, and whether every round agrees."""
        ratios = self.throughput_ratios
        faster = min(ratios) > 1 + CLEAR
        slower = max(ratios) < 1 - CLEAR
        verdict = "pays off" if faster else "costs" if slower else "makes no clear difference to the throughput"
        return (
            f"On this load {self.option}={self.on.value} instead of {self.off.value} {verdict}: output tokens per "
            f"second x{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), TTFT x"
            f"{self.ttft_ratio:.2f}, TPOT x{self.tpot_ratio:.2f}, peak memory {self.memory_change}, and "
            f"{self.changed_ids} of {self.requests} requests got other ids."
        )

    @property
    def memory_change(self) -> str:
        """The change of memory, weights included, with a sign."""
        off, on = self.off.figures.memory_bytes, self.on.figures.memory_bytes
        if off is None or on is None:
            return "unknown"
        return f"{(self.on.model_bytes + on - self.off.model_bytes - off) / 1e6:+.0f} MB"


def parse_values(text: str) -> list[Any]:
    """Read values separated by commas: JSON, or otherwise words, where None, True and False are constants."""
    try:
        return list(json.loads(f"[{text}]"))
    except json.JSONDecodeError:
        return [parse_word(word.strip()) for word in text.split(",")]


def parse_word(word: str) -> Any:
    """Read one value: a constant, JSON, or otherwise the word itself."""
    known = {"None": None, "True": True, "False": False}
    if word in known:
        return known[word]
    try:
        return json.loads(word)
    except json.JSONDecodeError:
        return word


def trial(option: str, values: str | None) -> tuple[Any, Any, dict[str, Any]]:
    """Return the two values of an option, and the other options that it needs.

    Raises ``ValueError`` for an unknown option, and for values that are missing or not two.
    """
    if option not in (*ENGINE_OPTIONS, *SAMPLING_OPTIONS):
        raise ValueError(
            f"there is no option {option!r}; of the engine: {', '.join(ENGINE_OPTIONS)}; "
            f"of a request: {', '.join(SAMPLING_OPTIONS)}"
        )
    needs = TRIALS[option][2] if option in TRIALS else {}
    if values is None:
        if option not in TRIALS:
            raise ValueError(f"{option} has no values of its own to try; give two, such as --values 1,2")
        return TRIALS[option]
    pair = parse_values(values)
    if len(pair) != 2:
        raise ValueError(f"--values is {values!r}, which is {len(pair)} values; give two, separated by a comma")
    return pair[0], pair[1], needs


def settings(option: str, value: Any, base: Mapping[str, Any]) -> tuple[EngineConfig, SamplingParams]:
    """Return the configuration of one side. Raises ``ValueError`` for options that cannot be combined."""
    known = {**base, option: value}
    serving = {field.name: getattr(EngineConfig.serving(), field.name) for field in fields(EngineConfig)}
    engine = {name: known[name] for name in known if name in ENGINE_OPTIONS}
    sampling = {name: known[name] for name in known if name not in ENGINE_OPTIONS}
    return EngineConfig(**{**serving, **engine}), SamplingParams(**{"ignore_eos": True, **sampling})


def check_kernels_run(sides: Sequence[EngineConfig]) -> None:
    """Raise ``ValueError`` if a side asks for kernels without a GPU, where their speed cannot be measured."""
    for side in sides:
        if side.compute == "triton" and not (side.device.startswith("cuda") and torch.cuda.is_available()):
            raise ValueError(
                f"compute='triton' on device {side.device!r} without an NVIDIA GPU measures no kernel; ablate it on a "
                "GPU, run `bench kernels` with TRITON_INTERPRET=1 to see that they are right, or ablate those of a CPU "
                "with --values reference,compiled"
            )


def ablate(
    folder: Path, option: str, pair: tuple[Any, Any], base: Mapping[str, Any], load: Mapping[str, Any]
) -> Ablation:
    """Serve one load with both values in turn. ``load``: "requests", "rounds" and "seed"."""
    sides = [settings(option, value, base) for value in pair]
    models = Models(folder)
    systems = [make_system(models, config, params, load["seed"]) for config, params in sides]
    jobs = make_jobs("ragged", load["requests"], load_config(folder).vocab_size, 0.0, load["seed"])
    runs: tuple[list[Run], list[Run]] = ([], [])
    for _ in tqdm(range(load["rounds"]), desc=option, unit="round"):
        for (system, _size), own in zip(systems, runs, strict=True):
            own.append(run_once(system, jobs))
    off, on = ([figures(run, jobs) for run in own] for own in runs)

    def ratios(name: str) -> list[float]:
        return [getattr(b, name) / (getattr(a, name) or 1.0) for a, b in zip(off, on, strict=True)]

    ids = [first_answers([answer.token_ids for answer in own[-1].answers], len(jobs)) for own in runs]
    return Ablation(
        option=option,
        off=Side(pair[0], median_figures(off), systems[0][1]),
        on=Side(pair[1], median_figures(on), systems[1][1]),
        throughput_ratios=ratios("output_tokens_per_s"),
        ttft_ratio=statistics.median(ratios("ttft_p50")),
        tpot_ratio=statistics.median(ratios("tpot_p50")),
        changed_ids=sum(a != b for a, b in zip(*ids, strict=True)),
        requests=len(jobs),
    )


class GrammarSystem(EngineSystem):
    """An engine whose answers have a grammar. It needs a tokenizer and an id that ends an answer."""

    def __init__(self, driver: SamplingDriver, params: SamplingParams, tokenizer: Tokenizer) -> None:
        """Serve with the model of ``driver``. Answers end with the end token of the chat format."""
        stop = tokenizer.token_to_id(IM_END)
        assert stop is not None, "the embedded model's tokenizer and the large one have it"
        super().__init__(make_driver(driver.model, driver.config, frozenset({stop})), params)
        self.tokenizer = tokenizer

    def open(self) -> None:
        """Make the engine. It compiles the grammar again, as for the first request of a server."""
        self.engine = make_engine(self.driver, self.tokenizer)


def make_system(models: Models, config: EngineConfig, params: SamplingParams, seed: int) -> tuple[EngineSystem, int]:
    """Return a warm system and the bytes of its model. The warm-up uses no grammar."""
    if params.grammar is None:
        return models.system(config, params)
    system, size = models.system(config)
    tokenizer = tiny_tokenizer() if models.folder == TINY_MODEL else large_tokenizer(seed)
    return GrammarSystem(system.driver, params, tokenizer), size


def first_answers(answers: Sequence[list[int]], requests: int) -> Sequence[list[int]]:
    """Return the first answer of every request; with ``n`` a request has several, one after the other."""
    return answers[:: len(answers) // requests]


def print_sides(ablation: Ablation) -> None:
    """Print the table of both sides."""
    typer.echo(
        f"\n{ablation.option:24}{'out tok/s':>10}{'TTFT p50':>10}{'p99 s':>8}{'TPOT p50':>10}{'p99 ms':>8}"
        f"{'model MB':>10}{'+ peak MB':>10}{'KV waste':>10}{'preempted':>11}"
    )
    for side in (ablation.off, ablation.on):
        own = side.figures
        peak = "-" if own.memory_bytes is None else f"{own.memory_bytes / 1e6:.0f}"
        typer.echo(
            f"{side.value!s:24}{own.output_tokens_per_s:10.1f}{own.ttft_p50:10.3f}{own.ttft_p99:8.3f}"
            f"{own.tpot_p50 * 1e3:10.2f}{own.tpot_p99 * 1e3:8.2f}{side.model_bytes / 1e6:10.0f}{peak:>10}"
            f"{own.kv_waste or 0.0:10.0%}{own.preemptions:11}"
        )


def parse_base(given: Sequence[str]) -> dict[str, Any]:
    """Read ``NAME=VALUE`` pairs. Raises ``ValueError`` for an unknown name or no value."""
    base = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in (*ENGINE_OPTIONS, *SAMPLING_OPTIONS):
            raise ValueError(f"--base is {text!r}; write NAME=VALUE with an option of the engine or of a request")
        base[name] = parse_word(value)
    return base


def bench_ablate(
    option: Annotated[str, typer.Option(help="A field of EngineConfig or SamplingParams.")],
    values: Annotated[str | None, typer.Option(help="Off and on, such as 1,32 or packed,fast.")] = None,
    base: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for both sides, any number of times.")] = None,
    model: Annotated[str, typer.Option(help="tiny: the embedded model. 0.6b: random weights.")] = "tiny",
    requests: Annotated[int, typer.Option(help="Requests of the ragged load; 0: 32, at 0.6b 8.", min=0)] = 0,
    rounds: Annotated[int, typer.Option(help="Counted rounds.", min=1)] = 3,
    threads: Annotated[int, typer.Option(help="Torch threads; 0 leaves torch's choice.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of weights and lengths.")] = 0,
) -> None:
    """Serve one load with an option off and on, and say what it did; the last line is JSON."""
    chosen([model], SHAPES, "model")
    if threads:
        torch.set_num_threads(threads)
    requests = requests or (8 if model == "0.6b" else 32)
    try:
        off, on, needs = trial(option, values)
        both = {**needs, **parse_base(base or ())}
        sides = [settings(option, value, both)[0] for value in (off, on)]
        check_kernels_run(sides)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    command = (
        f"mini-engine bench ablate --option {option} --values {json.dumps([off, on])[1:-1]!r} --model {model} "
        f"--requests {requests} --rounds {rounds} --seed {seed}" + "".join(f" --base '{text}'" for text in base or ())
    )
    where = machine(torch.get_num_threads())
    load = describe("ragged", requests, max(side.max_running_requests for side in sides), 0.0)
    typer.echo(f"{command}\n{json.dumps(where)}\n{json.dumps(load)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_checkpoint(model, Path(scratch) / model, seed)
        sizes = {"requests": requests, "rounds": rounds, "seed": seed}
        ablation = ablate(folder, option, (off, on), both, sizes)
    print_sides(ablation)
    typer.echo(ablation.conclusion)
    report = {"command": command, "machine": where, "load": load, "base": both, **asdict(ablation)}
    typer.echo(json.dumps({**report, "conclusion": ablation.conclusion}))
