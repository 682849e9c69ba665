"""How long an operation takes on a GPU: CUDA events, a warm device, inputs that are not in a cache.

A GPU works through a queue. An operation that takes 20 microseconds, and that the host needs 50 to queue, would be
timed as 50. So each call follows a sum over ``HEAD_START_BYTES``, which keeps the device busy while the host queues the
call. The sum also evicts everything else from the L2 cache (50 MB on an H200) and leaves it clean, so that the
operation does not pay for a write-back. If an operation waits for the device itself, the waiting is part of its time.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mini_engine.bench.workload import percentile

WARM_UP = 3  # calls; the first compiles
LEAST_CALLS, MOST_CALLS = 10, 200
QUEUED_CALLS = 16  # before the host waits: a full queue would block it, and count as its own time
HEAD_START_BYTES = 2 << 30  # half a millisecond on an H200
MOST_SETS, CACHE_BYTES = 4, 50_000_000


@dataclass(frozen=True)
class Sample:
    """Seconds of one call on the device: the median, and the 10th and 90th percentile.

    ``host``: median seconds that the host needs to queue the call. If it is more than the device takes and nothing else
    is queued, a step waits for the host.
    """

    median: float
    p10: float
    p90: float
    host: float
    calls: int

    @classmethod
    def of(cls, device: list[float], host: list[float]) -> "Sample":
        """Reduce the seconds of every call."""
        tenths = percentile(device, 10), percentile(device, 90)
        return cls(statistics.median(device), *tenths, statistics.median(host), len(device))


class Timer(Protocol):
    """Times ``call(n)``. n counts the calls, so that each can use another set of inputs."""

    def measure(self, call: Callable[[int], object]) -> Sample:
        """Warm up, call often enough, and return the times."""


class DeviceTimer:
    """Times by CUDA events. ``cuda``: ``torch.cuda``, or an object with its ``Event`` and ``synchronize``."""

    def __init__(
        self,
        cuda: Any,
        head_start: Callable[[], object],
        seconds: float = 0.2,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Spend about ``seconds`` on a measurement; ``head_start`` keeps the device busy for a while."""
        self.cuda = cuda
        self.head_start = head_start
        self.seconds = seconds
        self.clock = clock

    def measure(self, call: Callable[[int], object]) -> Sample:
        """Time single calls, each after a head start."""
        for n in range(WARM_UP):
            call(n)
        calls = min(MOST_CALLS, max(LEAST_CALLS, round(self.seconds / self.seconds_of_one(call))))
        events, host = [], []
        for n in range(calls):
            start, end = self.cuda.Event(enable_timing=True), self.cuda.Event(enable_timing=True)
            self.head_start()
            start.record()
            began = self.clock()
            call(n)
            host.append(self.clock() - began)
            end.record()
            events.append((start, end))
            if n % QUEUED_CALLS == QUEUED_CALLS - 1:
                self.cuda.synchronize()
        self.cuda.synchronize()
        return Sample.of([start.elapsed_time(end) / 1e3 for start, end in events], host)

    def seconds_of_one(self, call: Callable[[int], object]) -> float:
        """Return about how long a call takes, its head start included."""
        self.cuda.synchronize()
        began = self.clock()
        self.head_start()
        call(0)
        self.cuda.synchronize()
        return self.clock() - began


class HostTimer:
    """Times one call by the clock of the host. The result shows nothing about kernels."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Read ``clock``, in seconds."""
        self.clock = clock

    def measure(self, call: Callable[[int], object]) -> Sample:
        """Time one call."""
        began = self.clock()
        call(0)
        spent = [self.clock() - began]
        return Sample.of(spent, spent)


def device_timer(device: torch.device, quick: bool) -> DeviceTimer:
    """Return the timer of an NVIDIA GPU."""
    block = torch.ones(HEAD_START_BYTES // 4, device=device)
    return DeviceTimer(torch.cuda, block.sum, 0.02 if quick else 0.2)


def num_sets(num_bytes: int) -> int:
    """Return how many sets of inputs are taken in turn: enough to be four times the cache together, at most four."""
    return max(1, min(MOST_SETS, -(-4 * CACHE_BYTES // max(1, num_bytes))))
