"""Simulated runs: the real scheduler, with a formula for the time of a step in place of the model.

Only here do times have seconds.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression

import numpy as np

from mini_engine.attention.allocator import pages_needed
from mini_engine.config import EngineConfig
from mini_engine.llm import make_engine
from mini_engine.sampler.driver import SamplingDriver
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.policy import make_policy
from mini_engine.scheduler.request import Request, RequestTimes
from mini_engine.scheduler.scheduler import Scheduler, SchedulerLimits
from mini_engine.viz.scheduling.measure import with_options


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: ``fixed`` however small it is, and ``per_row`` for every row."""

    fixed: float
    per_row: float

    def __call__(self, rows: int) -> float:
        """Return the seconds of a step of so many rows."""
        return self.fixed + self.per_row * rows


def measure_cost(driver: SamplingDriver, widths: Sequence[int], repeats: int = 3) -> StepCost:
    """Fit a line through the times of steps with prompts of these lengths. Each time is the best of some runs."""
    engine = make_engine(with_options(driver, max_tokens_per_step=None))
    best = []
    for width in widths:
        for _ in range(repeats + 1):  # the first run warms up
            engine.generate([[1] * width], SamplingParams(max_new_tokens=1))
        times = [sum(step.seconds.values()) for step in list(engine.log)[-repeats:]]
        best.append(min(times))
    line = linear_regression(widths, best)
    return StepCost(max(line.intercept, 0.0), max(line.slope, 0.0))  # a noisy machine may measure a falling line


@dataclass(frozen=True)
class Job:
    """A request of which only the lengths matter. ``arrival_s``: its arrival in seconds."""

    arrival_s: float
    num_prompt: int
    num_output: int


def poisson_jobs(rate: float, count: int, prompt: tuple[int, int], output: tuple[int, int], seed: int = 0) -> list[Job]:
    """Draw ``count`` jobs that arrive at random, ``rate`` a second. Their lengths are log-uniform between two limits.

    At another rate the same seed gives the same jobs, closer together or further apart.
    """
    source = random.Random(seed)
    now = 0.0
    jobs = []
    for _ in range(count):
        now += source.expovariate(1.0)
        lengths = [round(low * (high / low) ** source.random()) for low, high in (prompt, output)]
        jobs.append(Job(now / rate, *lengths))
    return jobs


def simulate(jobs: Sequence[Job], cost: StepCost, config: EngineConfig) -> list[RequestTimes]:
    """Let the scheduler run ``jobs`` with ``cost`` in place of the model -> the times of each job, in their order."""
    policy = make_policy(config.policy, config.policy_seed)
    longest = max(job.num_prompt + job.num_output for job in jobs)
    limits = SchedulerLimits(
        max_running_requests=config.max_running_requests,
        max_tokens_per_step=config.max_tokens_per_step,
        preemption=config.preemption,
        max_steps_waited=config.max_steps_waited,
    )
    num_pages = config.num_pages or config.max_running_requests * pages_needed(longest, config.page_size)
    scheduler = Scheduler(num_pages, config.page_size, limits, policy)
    requests = [
        Request(
            str(i), [0] * job.num_prompt, SamplingParams(max_new_tokens=job.num_output), i, RequestTimes(job.arrival_s)
        )
        for i, job in enumerate(jobs)
    ]
    pending = deque(requests)
    now = 0.0
    while pending or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, pending[0].times.added)
        while pending and pending[0].times.added <= now:
            scheduler.add(pending.popleft())
        now = simulate_step(scheduler, cost, now)
    return [request.times for request in requests]


def simulate_step(scheduler: Scheduler, cost: StepCost, now: float) -> float:
    """Schedule a step that begins at ``now``, note the times in its requests, and return when it ends. Mutates."""
    batch = scheduler.schedule()
    for chunk in batch.chunks:
        chunk.request.times.started = now if chunk.request.times.started is None else chunk.request.times.started
    end = now + cost(batch.num_tokens)
    sampled = [chunk.request for chunk in batch.chunks if chunk.samples]
    scheduler.update(batch, {request.request_id: [0] for request in sampled})
    for request in sampled:
        request.times.tokens.append(end)
        if request.num_output_tokens == request.params.max_new_tokens:
            request.times.finished = end
            scheduler.finish(request, "length")
    return end


@dataclass(frozen=True)
class LoadPoint:
    """Seconds at one rate: to the first token (mean, 99th percentile), and between the other tokens (mean)."""

    rate: float
    ttft_mean: float
    ttft_p99: float
    tpot_mean: float


def load_point(rate: float, times: Sequence[RequestTimes]) -> LoadPoint:
    """Reduce the times of all requests to the numbers of one point."""
    first = [t.ttft_s for t in times if t.ttft_s is not None]
    between = [t.tpot_s for t in times if t.tpot_s is not None]
    return LoadPoint(rate, float(np.mean(first)), float(np.percentile(first, 99)), float(np.mean(between)))


def capacity(jobs: Sequence[Job], cost: StepCost, config: EngineConfig) -> float:
    """Return how many of these jobs a second the engine finishes when it is never idle."""
    at_once = [replace(job, arrival_s=0.0) for job in jobs]
    return len(jobs) / max(times.finished or 0.0 for times in simulate(at_once, cost, config))
