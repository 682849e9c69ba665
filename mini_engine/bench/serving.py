"""``mini-engine bench serving``: the engine compared with both ways in which transformers serves many requests.

All systems run in one process with the same weights and requests. They take turns in every round, so that a slow minute
of the machine affects all of them. Ratios are taken within a round, and the median round is reported. No
end-of-sequence id stops a request, so that all systems generate as many tokens. None of them makes text.
"""

import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, cast

import torch
import transformers
import typer
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from mini_engine.bench.machine import (
    SHAPES,
    chosen,
    forget_peak,
    machine,
    make_checkpoint,
    names_in,
    peak_rss,
    settled_rss,
)
from mini_engine.bench.peers import CONTINUOUS, STATIC, ContinuousPeer, StaticPeer, gap_at_difference, sleep_until
from mini_engine.bench.workload import Answer, Figures, Job, Run, describe, figures, make_jobs, paged_waste, shortened
from mini_engine.checkpoint import TINY_MODEL
from mini_engine.config import DEFAULT_POOL_TOKENS, Dtype, EngineConfig
from mini_engine.engine import Engine
from mini_engine.llm import load_model, make_driver, make_engine
from mini_engine.model import Qwen3
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.params import SamplingParams
from mini_engine.view import EngineView

TOKENS_PER_STEP = 512
# Changes to EngineConfig.serving(); None is the engine with every option off.
SYSTEMS: dict[str, dict[str, Any] | None] = {
    "fast": {},
    "packed": {"compute": "packed"},
    "packed+invariant": {"compute": "packed", "batch_invariant": True},
    "compiled": {"compute": "compiled"},
    "compiled+invariant": {"compute": "compiled", "batch_invariant": True},
    "off": None,
}
SERVING = "fast"
WARM_UP_JOBS, WARM_UP_TOKENS = 3, 4
MAX_GAPS = 4  # differing answers whose cause is looked up, per system: each costs the peer a forward pass
# Two tokens this close (in standard deviations of the row's logits) may change places with the order of a sum.
NEAR_TIE = {"float32": 0.01, "bfloat16": 0.15}


class System(Protocol):
    """A system that serves a load. ``open`` takes the memory that ``close`` gives back; neither is timed."""

    def open(self) -> None:
        """Take memory."""

    def serve(self, jobs: Sequence[Job]) -> Run:
        """Serve requests as they arrive."""

    def close(self) -> None:
        """Give back what ``open`` took."""


class EngineSystem:
    """Our engine. A request that arrives during a step is added after it, but its time begins at its arrival."""

    def __init__(self, driver: SamplingDriver, params: SamplingParams | None = None) -> None:
        """Serve with ``driver``. ``params`` apply to every request, except ``max_new_tokens``."""
        self.driver = driver
        self.params = params or SamplingParams(ignore_eos=True)
        self.engine: Engine | None = None

    def open(self) -> None:
        """Make the engine with its KV pool."""
        self.engine = make_engine(self.driver)

    def close(self) -> None:
        """Drop the engine."""
        self.engine = None

    def serve(self, jobs: Sequence[Job]) -> Run:
        """Serve ``jobs``, in the order of arrival. Raises ``ValueError`` for one that cannot be run."""
        assert self.engine is not None, "open it first"
        engine = self.engine
        left = deque(jobs)
        names = list[tuple[str, Job]]()
        began = time.perf_counter()
        while left or engine.has_work:
            while left and began + left[0].arrival_s <= time.perf_counter():
                job = left.popleft()
                params = replace(self.params, max_new_tokens=job.new_tokens)
                names += [(name, job) for name in engine.add_samples(job.prompt_ids, params)]
            if engine.has_work:
                engine.step()
            elif left:
                sleep_until(began + left[0].arrival_s)
        waste = paged_waste(engine.log, engine.driver.config.page_size)
        pool = EngineView(engine).pool_bytes
        return Run(began, [self.answer(name, began, job) for name, job in names], list(engine.log), waste, pool)

    def answer(self, name: str, began: float, job: Job) -> Answer:
        """Take a finished request out of the engine. Raises ``ValueError`` for one that could not be run."""
        assert self.engine is not None, "open it first"
        output = self.engine.take_output(name)
        if output.error is not None or output.times is None:
            raise ValueError(f"request {name} of the load cannot be run: {output.error}")
        return Answer(output.token_ids, replace(output.times, added=began + job.arrival_s))


def run_once(system: System, jobs: Sequence[Job]) -> Run:
    """Serve ``jobs`` once, and record the peak memory beyond that before, caches included."""
    before = settled_rss()
    measurable = forget_peak()
    system.open()
    try:
        run = system.serve(jobs)
    finally:
        system.close()
    return replace(run, memory_bytes=peak_rss() - before if measurable else None)


class Models:
    """The models of the engine over one checkpoint. Systems with the same weights share a model."""

    def __init__(self, folder: Path) -> None:
        """Load nothing yet."""
        self.folder = folder
        self.loaded: dict[tuple[Any, ...], tuple[Qwen3, int]] = {}

    def system(self, config: EngineConfig, params: SamplingParams | None = None) -> tuple[EngineSystem, int]:
        """Return a warm system and the bytes that its model took."""
        shared = "packed" if config.compute == "fast" else config.compute  # they differ only in attention
        key = (config.dtype, config.device, shared, config.batch_invariant)
        small = EngineSystem(make_driver(load_model(TINY_MODEL, config), config), params)
        warm_up(small)  # so that the code and kernels of libraries do not count
        before = settled_rss()
        if key not in self.loaded:
            self.loaded[key] = load_model(self.folder, config), 0
        model, size = self.loaded[key]
        system = EngineSystem(make_driver(model, config), params)
        warm_up(system)
        size = size or settled_rss() - before
        self.loaded[key] = model, size
        return system, size


def warm_up(system: System) -> None:
    """Run a small load, so that weights are read and kernels are made. Every model has its token ids."""
    run_once(system, shortened(make_jobs("ragged", WARM_UP_JOBS, 256, rate=0.0, seed=-1), WARM_UP_TOKENS))


def serving_config(name: str, dtype: Dtype, running: int) -> EngineConfig:
    """Return the configuration of one of ``SYSTEMS``."""
    changes = SYSTEMS[name]
    if changes is None:
        return EngineConfig(dtype=dtype)
    return EngineConfig.serving(
        dtype=dtype, max_running_requests=running, max_tokens_per_step=TOKENS_PER_STEP, **changes
    )


@dataclass(frozen=True)
class Row:
    """One system: medians over the rounds, ratios of output tokens per second within a round, and the ids.

    ``model_bytes``: of its weights, packed copies included. ``same_ids``: the share of answers that are equal to those
    of ``transformers.generate``. ``same_or_tied``: these, and those that first differ where two logits nearly tie.
    """

    system: str
    figures: Figures
    over_static: float
    over_continuous: float | None
    same_ids: float
    same_or_tied: float
    largest_gap: float
    model_bytes: int
    pool_bytes: int | None


@dataclass(frozen=True)
class Goal:
    """One promise with its limit, the measured value, and whether the limit is kept."""

    text: str
    value: float
    reached: bool


class Bench:
    """The systems of one benchmark over one checkpoint, and what they measured."""

    def __init__(self, folder: Path, dtype: Dtype, running: int, names: Sequence[str]) -> None:
        """Load the peer and the systems ``names``, and warm all of them up."""
        self.dtype = dtype
        warm_up(StaticPeer(AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=getattr(torch, dtype)), running))
        before = settled_rss()
        self.peer = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.vocab_size: int = self.peer.config.vocab_size
        self.systems: dict[str, System] = {STATIC: StaticPeer(self.peer, running)}
        warm_up(self.systems[STATIC])
        self.model_bytes = {STATIC: settled_rss() - before}
        self.unavailable: dict[str, str] = {}
        if CONTINUOUS in names:
            self.add_continuous(running)
        models = Models(folder)
        for name in (name for name in SYSTEMS if name in names):
            self.systems[name], self.model_bytes[name] = models.system(serving_config(name, dtype, running))

    def add_continuous(self, running: int) -> None:
        """Add the continuous batching of transformers, or record why it cannot run here."""
        try:
            system = ContinuousPeer(self.peer, running, TOKENS_PER_STEP, DEFAULT_POOL_TOKENS)
            warm_up(system)
        except Exception as error:  # whatever another library raises
            self.unavailable[CONTINUOUS] = f"{type(error).__name__}: {error}"
            return
        self.systems[CONTINUOUS] = system
        self.model_bytes[CONTINUOUS] = self.model_bytes[STATIC]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the checkpoint's weights in this dtype, each once."""
        return sum(int(parameter.nbytes) for parameter in self.peer.parameters())

    def measure(self, jobs: Sequence[Job], rounds: int, title: str) -> list[Row]:
        """Run all systems in turn, ``rounds`` times, and return a row each."""
        runs: dict[str, list[Run]] = {name: [] for name in self.systems}
        with tqdm(total=rounds * len(runs), desc=title, unit="run") as bar:
            for _ in range(rounds):
                for name, system in self.systems.items():
                    bar.set_postfix_str(name)
                    runs[name].append(run_once(system, jobs))
                    bar.update()
        return [self.row(name, runs, jobs) for name in runs]

    def row(self, name: str, runs: Mapping[str, list[Run]], jobs: Sequence[Job]) -> Row:
        """Reduce the rounds of one system."""
        each = {peer: [figures(run, jobs) for run in runs[peer]] for peer in runs}
        answers, theirs = ([answer.token_ids for answer in runs[n][-1].answers] for n in (name, STATIC))
        differing = [n for n, (a, b) in enumerate(zip(answers, theirs, strict=True)) if a != b]
        gaps = [gap_at_difference(self.peer, jobs[n].prompt_ids, answers[n], theirs[n]) for n in differing[:MAX_GAPS]]
        tied = sum(gap <= NEAR_TIE[self.dtype] for gap in gaps) / len(gaps) if gaps else 1.0
        share = len(differing) / len(jobs)
        return Row(
            system=name,
            figures=median_figures(each[name]),
            over_static=ratio(each[name], each[STATIC]),
            over_continuous=ratio(each[name], each[CONTINUOUS]) if CONTINUOUS in each else None,
            same_ids=1 - share,
            same_or_tied=1 - share + share * tied,
            largest_gap=max(gaps, default=0.0),
            model_bytes=self.model_bytes[name],
            pool_bytes=runs[name][-1].pool_bytes,
        )


def ratio(ours: Iterable[Figures], theirs: Iterable[Figures]) -> float:
    """Return the median over the rounds of output tokens per second over the peer's in the same round."""
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(own.output_tokens_per_s / other.output_tokens_per_s for own, other in pairs)


def median_figures(rounds: Sequence[Figures]) -> Figures:
    """Return the median of every figure; ``None`` if a round does not know it."""
    middle: dict[str, Any] = {}
    for name in (field.name for field in fields(Figures)):
        values = [getattr(one, name) for one in rounds]
        middle[name] = None if None in values else statistics.median(values)
    return Figures(**middle)


def goals(shape: str, dtype: str, load: Mapping[str, Any], rows: Sequence[Row], weight_bytes: int) -> list[Goal]:
    """Return the promises for this model and load on two CPU cores, and whether they are kept."""
    found = {row.system: row for row in rows}
    promised: list[Goal] = []
    ours = found.get(SERVING)
    at_once = load["arrivals"] == "all at once"

    def at_least(text: str, value: float | None, least: float) -> None:
        if value is not None:
            promised.append(Goal(f"{text} >= {least:g}", value, value >= least))

    def at_most(text: str, value: float | None, most: float) -> None:
        if value is not None:
            promised.append(Goal(f"{text} <= {most:g}", value, value <= most))

    if ours is not None and at_once and load["workload"] == "ragged":
        at_least(f"{SERVING} / {STATIC}", ours.over_static, 2.5)
        at_least(f"{SERVING} / {CONTINUOUS}", ours.over_continuous, 1.0)
    for row in rows if at_once and load["workload"] == "equal" and load["running"] == 16 else ():
        least = {("tiny", "float32"): 1.5, ("tiny", "bfloat16"): 1.5, ("0.6b", "bfloat16"): 2.0}.get((shape, dtype))
        if least and row.system in (SERVING, "compiled"):
            at_least(f"{row.system} / {STATIC}", row.over_static, least)
    for row in rows if at_once else ():
        if row.system.endswith("invariant"):
            at_least(f"{row.system} / {STATIC}", row.over_static, 1.0)
    if ours is not None and shape == "0.6b":
        at_most(f"scheduling + sampling of a step of {SERVING}", overhead(ours.figures), 0.10)
    if ours is not None and ours.figures.memory_bytes is not None and ours.pool_bytes is not None:
        held = ours.model_bytes + ours.figures.memory_bytes
        at_most(f"memory of {SERVING} / (weights + KV pool)", held / (weight_bytes + ours.pool_bytes), 1.15)
    return promised


def overhead(own: Figures) -> float:
    """Return the share of the time of all steps that scheduling and sampling take."""
    return (own.schedule_share or 0.0) + (own.sample_share or 0.0)


def print_rows(rows: Sequence[Row]) -> None:
    """Print the two tables: what a user sees, and what it costs."""
    typer.echo(
        f"\n{'system':24}{'out tok/s':>10}{'/ static':>9}{'/ contin.':>10}{'all tok/s':>10}"
        f"{'TTFT p50':>10}{'p99 s':>8}{'TPOT p50':>10}{'p99 ms':>8}{'queue p50':>11}{'p99 s':>8}"
    )
    for row in rows:
        own = row.figures
        other = "-" if row.over_continuous is None else f"{row.over_continuous:.2f}"
        typer.echo(
            f"{row.system:24}{own.output_tokens_per_s:10.1f}{row.over_static:9.2f}{other:>10}"
            f"{own.total_tokens_per_s:10.1f}{own.ttft_p50:10.3f}{own.ttft_p99:8.3f}"
            f"{own.tpot_p50 * 1e3:10.2f}{own.tpot_p99 * 1e3:8.2f}{own.queue_p50:11.3f}{own.queue_p99:8.3f}"
        )
    typer.echo(
        f"\n{'system':24}{'model MB':>10}{'+ peak MB':>10}{'KV waste':>10}{'steps':>7}{'preempted':>11}"
        f"{'schedule ms':>13}{'sample ms':>16}{'same ids':>10}{'or tied':>9}"
    )
    for row in rows:
        own = row.figures
        peak = "-" if own.memory_bytes is None else f"{own.memory_bytes / 1e6:.0f}"
        waste = "-" if own.kv_waste is None else f"{own.kv_waste:.0%}"
        typer.echo(
            f"{row.system:24}{row.model_bytes / 1e6:10.0f}{peak:>10}{waste:>10}{own.steps or '-':>7}"
            f"{own.preemptions:11}{lap(own.schedule_s, own.schedule_share):>13}"
            f"{lap(own.sample_s, own.sample_share):>16}{row.same_ids:10.0%}{row.same_or_tied:9.0%}"
        )


def lap(seconds: float | None, share: float | None) -> str:
    """Return milliseconds per step and their share, or a dash for a peer that does not report them."""
    return "-" if seconds is None or share is None else f"{seconds * 1e3:.2f} ({share:.1%})"


def chosen_systems(given: Sequence[str] | None, shape: str, dtype: str) -> list[str]:
    """Return the systems to run. One request at a time takes minutes at 0.6B, so there it runs only if asked for."""
    if given:
        return chosen(given, [STATIC, CONTINUOUS, *SYSTEMS], "system")
    return [STATIC, CONTINUOUS, *(name for name in names_in(dtype, SYSTEMS) if shape == "tiny" or name != "off")]


def bench_serving(
    model: Annotated[str, typer.Option(help="tiny: the embedded model. 0.6b: random weights.")] = "tiny",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    workload: Annotated[
        str, typer.Option(help="ragged: prompts of 16-512, answers of 8-256 tokens. equal: 128 and 64.")
    ] = "ragged",
    rate: Annotated[float, typer.Option(help="Poisson arrivals per second; 0: all at once.", min=0.0)] = 0.0,
    requests: Annotated[int, typer.Option(help="Requests; 0: 128, at 0.6b 32, of equal length 16.", min=0)] = 0,
    running: Annotated[
        int, typer.Option(help="Most requests in a batch; 0: 32, at 0.6b and of equal length 16.", min=0)
    ] = 0,
    rounds: Annotated[int, typer.Option(help="Counted rounds; 0: 3, at 0.6b 1.", min=0)] = 0,
    system: Annotated[list[str] | None, typer.Option(help=f"{CONTINUOUS}, {', '.join(SYSTEMS)}")] = None,
    threads: Annotated[int, typer.Option(help="Torch threads; 0 leaves torch's choice.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of weights, lengths and arrivals.")] = 0,
) -> None:
    """Serve one load with the engine and with transformers, in turn; the last line is JSON.

    On two cores a round of the ragged load takes seconds on the embedded model. At 0.6b it takes some minutes, which is
    why there are fewer requests there and only one round.
    """
    chosen([model], SHAPES, "model")
    chosen([dtype], NEAR_TIE, "dtype")
    chosen([workload], ("ragged", "equal"), "workload")
    names = chosen_systems(system, model, dtype)
    if threads:
        torch.set_num_threads(threads)
    requests = requests or (16 if workload == "equal" else 32 if model == "0.6b" else 128)
    running = running or (32 if (model, workload) == ("tiny", "ragged") else 16)
    rounds = rounds or (1 if model == "0.6b" else 3)
    command = (
        f"mini-engine bench serving --model {model} --dtype {dtype} --workload {workload} --rate {rate:g} "
        f"--requests {requests} --running {running} --rounds {rounds} --seed {seed}"
        + "".join(f" --system '{name}'" for name in system or ())
    )
    load = describe(workload, requests, running, rate)
    where = machine(torch.get_num_threads())
    typer.echo(f"{command}\n{json.dumps(where)}\n{json.dumps(load)}")
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(make_checkpoint(model, Path(scratch) / model, seed), cast(Dtype, dtype), running, names)
        jobs = make_jobs(workload, requests, bench.vocab_size, rate, seed)
        rows = bench.measure(jobs, rounds, f"{model} {dtype} {workload}")
    promised = goals(model, dtype, load, rows, bench.weight_bytes)
    print_rows(rows)
    for name, reason in bench.unavailable.items():
        typer.echo(f"{name}: not runnable here: {reason}")
    for goal in promised:
        typer.echo(f"{goal.text}: {goal.value:.2f}, {'reached' if goal.reached else 'MISSED'}")
    report = {"command": command, "machine": where, "load": load, "weight_bytes": bench.weight_bytes}
    lists = {"rows": [asdict(row) for row in rows], "goals": [asdict(goal) for goal in promised]}
    typer.echo(json.dumps({**report, **lists, "unavailable": bench.unavailable}))
