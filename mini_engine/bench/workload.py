"""Loads for a serving benchmark, and the figures of a finished run."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from mini_engine.outputs import StepOutput
from mini_engine.scheduler.request import RequestTimes

RAGGED_PROMPT, RAGGED_OUTPUT = (16, 512), (8, 256)  # tokens, log-uniform: short ones are common
EQUAL_PROMPT, EQUAL_OUTPUT = 128, 64


@dataclass(frozen=True)
class Job:
    """One request of a load: its prompt, how many tokens it generates, and its arrival in seconds from the start."""

    prompt_ids: list[int]
    new_tokens: int
    arrival_s: float = 0.0


def make_jobs(workload: str, count: int, vocab_size: int, rate: float, seed: int) -> list[Job]:
    """Return ``count`` requests of "ragged" or "equal" lengths, by arrival.

    ``rate``: requests per second of a Poisson process that begins with a request; 0: all requests arrive at once.
    """
    lengths = random.Random(seed)
    times = random.Random(seed + 1)
    arrivals = [0.0, *accumulate(times.expovariate(rate) for _ in range(count - 1))] if rate else [0.0] * count
    jobs = []
    for arrival in arrivals:
        prompt = log_uniform(lengths, RAGGED_PROMPT) if workload == "ragged" else EQUAL_PROMPT
        output = log_uniform(lengths, RAGGED_OUTPUT) if workload == "ragged" else EQUAL_OUTPUT
        jobs.append(Job(lengths.choices(range(vocab_size), k=prompt), output, arrival))
    return jobs


def log_uniform(source: random.Random, limits: tuple[int, int]) -> int:
    """Draw a whole number between the limits, every octave as likely as the next."""
    least, most = limits
    drawn: float = least * (most / least) ** source.random()
    return round(drawn)


def shortened(jobs: Iterable[Job], new_tokens: int) -> list[Job]:
    """Return the requests with at most ``new_tokens`` each, all arriving at once: a load to warm up with."""
    return [replace(job, new_tokens=min(job.new_tokens, new_tokens), arrival_s=0.0) for job in jobs]


@dataclass(frozen=True)
class Answer:
    """The tokens of one request, and its times. All systems use one clock; ``times.added`` is the arrival."""

    token_ids: list[int]
    times: RequestTimes


@dataclass(frozen=True)
class Run:
    """One load served once. ``steps`` is the event log of the engine, empty for a peer.

    ``kv_waste``: the share of used KV memory that is not needed, mean over steps. ``memory_bytes``: the most memory
    beyond that before the run, KV memory included. ``None``: not known.
    """

    began: float
    answers: list[Answer]
    steps: Sequence[StepOutput] = ()
    kv_waste: float | None = None
    pool_bytes: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Figures:
    """A run in numbers. Times in seconds; "schedule" is to choose the batch and to take in its tokens.

    ``schedule_share`` and ``sample_share``: of the seconds of all steps.
    """

    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    queue_p50: float
    queue_p99: float
    kv_waste: float | None
    memory_bytes: int | None
    preemptions: int
    steps: int
    schedule_s: float | None = None
    sample_s: float | None = None
    schedule_share: float | None = None
    sample_share: float | None = None


def figures(run: Run, jobs: Sequence[Job]) -> Figures:
    """Reduce a run of ``jobs`` to its figures."""
    times = [answer.times for answer in run.answers]
    seconds = max(own.tokens[-1] for own in times) - run.began
    output = sum(len(answer.token_ids) for answer in run.answers)
    prompts = sum(len(job.prompt_ids) for job in jobs)
    ttft, tpot, queue = ([getattr(own, f"{name}_s") for own in times] for name in ("ttft", "tpot", "queue"))
    return Figures(
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(output + prompts) / seconds,
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        tpot_p50=percentile(tpot, 50),
        tpot_p99=percentile(tpot, 99),
        queue_p50=percentile(queue, 50),
        queue_p99=percentile(queue, 99),
        kv_waste=run.kv_waste,
        memory_bytes=run.memory_bytes,
        preemptions=sum(len(step.preempted) for step in run.steps),
        steps=len(run.steps),
        **(lap_figures(run.steps) if run.steps else {}),
    )


def percentile(values: Iterable[float | None], percent: float) -> float:
    """Return a percentile of the known values, linearly interpolated; 0.0 if none is known."""
    known = [value for value in values if value is not None]
    return float(np.percentile(known, percent)) if known else 0.0


def lap_figures(steps: Sequence[StepOutput]) -> dict[str, float]:
    """Return the seconds per step of scheduling and of sampling, and their shares of the time of all steps."""
    total = sum(sum(step.seconds.values()) for step in steps)
    schedule = sum(step.seconds.get("schedule", 0.0) + step.seconds.get("update", 0.0) for step in steps)
    sample = sum(step.seconds.get("sample", 0.0) for step in steps)
    return {
        "schedule_s": schedule / len(steps),
        "sample_s": sample / len(steps),
        "schedule_share": schedule / total,
        "sample_share": sample / total,
    }


def paged_waste(steps: Iterable[StepOutput], page_size: int) -> float:
    """Return the share of empty slots in used pages, mean over the steps that end with pages in use."""
    shares = [1 - s.num_tokens_held / (s.num_pages_used * page_size) for s in steps if s.num_pages_used]
    return float(np.mean(shares)) if shares else 0.0


@dataclass
class PaddedWaste:
    """The same share for padded batches that run until their longest answer ends, computed from the lengths.

    At step s the cache holds, for each request, as many tokens as the longest prompt and s more. Only the prompts and
    the s tokens of requests that still generate are needed.
    """

    shares: list[float] = field(default_factory=list)

    def add(self, jobs: Sequence[Job]) -> None:
        """Take in the steps of one batch. Mutates."""
        longest = max(len(job.prompt_ids) for job in jobs)
        for step in range(max(job.new_tokens for job in jobs)):
            needed = sum(len(job.prompt_ids) + step for job in jobs if step < job.new_tokens)
            self.shares.append(1 - needed / (len(jobs) * (longest + step)))

    @property
    def mean(self) -> float:
        """Mean over all steps so far."""
        return float(np.mean(self.shares))


def describe(workload: str, count: int, running: int, rate: float) -> dict[str, Any]:
    """Describe the load for the report."""
    prompt, output = (RAGGED_PROMPT, RAGGED_OUTPUT) if workload == "ragged" else (EQUAL_PROMPT, EQUAL_OUTPUT)
    return {
        "workload": workload,
        "requests": count,
        "running": running,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "arrivals": f"Poisson, {rate:g} per second" if rate else "all at once",
    }
