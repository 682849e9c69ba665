"""What may be read of an engine from outside: how it is set up, who runs and waits, who has which pages.

The server, the metrics, the page and the benchmarks read here, and not in the scheduler. Reading changes nothing. What
is read belongs together only between two steps, on the thread that steps the engine.
"""

from collections.abc import Sequence
from pathlib import Path

from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.engine_core import EngineCore
from mini_engine.outputs import RequestOutput
from mini_engine.radix_cache import RadixCache
from mini_engine.scheduler.request import Request


class EngineView:
    """An engine to look at."""

    def __init__(self, engine: EngineCore) -> None:
        """Look at ``engine``."""
        self._engine = engine

    @property
    def config(self) -> EngineConfig:
        """How the engine runs the model, with the sizes that it chose itself."""
        return self._engine.driver.config

    @property
    def model(self) -> ModelConfig:
        """The shape of the model."""
        return self._engine.driver.model.config

    @property
    def folder(self) -> Path | None:
        """The checkpoint's folder, if the engine knows it."""
        return self._engine.driver.folder

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a sequence of this model."""
        return self._engine.driver.eos_token_ids

    @property
    def max_positions(self) -> int:
        """The most positions of a request: those of the configuration, or as many as the pool holds."""
        return min(self.config.positions(self.model), self.num_pages * self.config.page_size)

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs, but for those whose constraint is not ready."""
        return self._engine.scheduler.has_work

    @property
    def running(self) -> Sequence[Request]:
        """The requests that share the steps, in the order of their admission."""
        return tuple(self._engine.scheduler.running)

    @property
    def waiting(self) -> Sequence[Request]:
        """The requests that wait for room, without those that wait for a grammar."""
        return tuple(self._engine.scheduler.waiting)

    @property
    def num_waiting(self) -> int:
        """How many requests wait, also for a grammar."""
        return len(self._engine.scheduler.waiting) + self._engine.constraints.num_waiting

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._engine.scheduler.allocator.num_pages

    @property
    def pool_bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(tensor.nbytes for tensor in (*self._engine.worker.pool.keys, *self._engine.worker.pool.values))

    @property
    def weight_bytes(self) -> Sequence[int]:
        """Memory of the weights at each of several ranks; empty with one."""
        return self._engine.driver.weight_bytes

    @property
    def num_pages_cached(self) -> int:
        """Pages that the prefix cache has, those that requests use as well."""
        return self._engine.scheduler.cache.num_pages

    @property
    def num_pages_evictable(self) -> int:
        """Pages that only the prefix cache has."""
        return self._engine.scheduler.cache.num_evictable

    @property
    def num_pages_in_use(self) -> int:
        """Pages that requests use. ``StepOutput.num_pages_used`` counts those that only the cache has as well."""
        return self.num_pages - self._engine.scheduler.allocator.num_free - self.num_pages_evictable

    @property
    def tree(self) -> RadixCache | None:
        """The prefix cache with what it has counted; ``None`` if there is none."""
        cache = self._engine.scheduler.cache
        return cache if isinstance(cache, RadixCache) else None

    @property
    def num_steps(self) -> int:
        """The number of the next step."""
        return self._engine.log.num_steps

    def output(self, request_id: str) -> RequestOutput:
        """Return the answer of a request so far. Raises ``KeyError`` for an unknown id."""
        return self._engine.entries[request_id].output
