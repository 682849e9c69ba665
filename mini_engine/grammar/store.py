"""L7: grammars that are compiled once and handed out as often as they are asked for.

Owns: the cache of compiled grammars, and compiling in threads. Must not know: requests and what waits for them.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock

from mini_engine.grammar.base import GrammarBackend, GrammarObject
from mini_engine.sampler.params import GrammarKey

KEPT_GRAMMARS = 256
NUM_THREADS = 4


@dataclass
class StoreStats:
    """What was asked of a store. ``num_shared``: requests that joined a compile that was under way.

    ``compile_s`` is summed over ``num_compiled`` compiles, in seconds of the threads.
    """

    num_compiled: int = 0
    num_failed: int = 0
    num_hits: int = 0
    num_shared: int = 0
    compile_s: float = 0.0


class GrammarStore:
    """Compiles with one backend. What it keeps is never handed out: everybody gets a copy, at the beginning."""

    def __init__(self, backend: GrammarBackend, clock: Callable[[], float] = time.perf_counter) -> None:
        """Compile in ``NUM_THREADS`` threads, which start when they are needed."""
        self.backend = backend
        self.clock = clock
        self.pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self.kept: OrderedDict[GrammarKey, GrammarObject] = OrderedDict()  # the least recently used first
        self.pending: dict[GrammarKey, Future[GrammarObject]] = {}
        self.lock = Lock()
        self.stats = StoreStats()

    def cached(self, key: GrammarKey) -> GrammarObject | None:
        """Return a fresh copy of what was compiled before, ``None`` if it was not. Mutates the order of use.

        A copy is a hit in ``stats`` and is marked as one in its own (``is_cache_hit``).
        """
        with self.lock:
            grammar = self.kept.get(key)
            if grammar is None:
                return None
            self.kept.move_to_end(key)
            self.stats.num_hits += 1
        copied = self.copy_of(grammar)
        copied.stats.is_cache_hit = True
        return copied

    def compile(self, key: GrammarKey) -> Future[GrammarObject]:
        """Begin to compile, or join a compile of the same grammar; copy the future's result before use. Mutates.

        A compile that fails is forgotten: the next request tries anew, and no request is given the failure of another.
        A request that joins is counted in ``stats`` (``num_shared``).
        """
        with self.lock:
            future = self.pending.get(key)
            if future is not None:
                self.stats.num_shared += 1
                return future
            future = self.pending[key] = self.pool.submit(self.run, key)
        future.add_done_callback(lambda done: self.settle(key, done))
        return future

    def run(self, key: GrammarKey) -> GrammarObject:
        """Compile, in a thread of the pool. Raises what the backend raises."""
        began = self.clock()
        grammar = self.backend.compile(key)
        grammar.stats.compile_s = self.clock() - began
        return grammar

    def settle(self, key: GrammarKey, done: Future[GrammarObject]) -> None:
        """Keep what was compiled, also if no request waits for it any more. Count it, or its failure. Mutates."""
        with self.lock:
            self.pending.pop(key, None)
            if done.cancelled():
                return
            if done.exception() is not None:
                self.stats.num_failed += 1
                return
            grammar = done.result()
            self.stats.num_compiled += 1
            self.stats.compile_s += grammar.stats.compile_s
            self.kept[key] = grammar
            if len(self.kept) > KEPT_GRAMMARS:
                self.kept.popitem(last=False)

    def copy_of(self, grammar: GrammarObject) -> GrammarObject:
        """Return a copy for a request, with statistics of its own."""
        copied = grammar.copy()
        copied.stats = replace(grammar.stats)
        return copied

    def close(self) -> None:
        """Give up what has not begun and let the threads end; one that is compiling cannot be stopped."""
        self.pool.shutdown(wait=False, cancel_futures=True)
