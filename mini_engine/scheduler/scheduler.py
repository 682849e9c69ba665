"""L5: the scheduler: every step, who runs with how many tokens, and whose pages they lie on.

Its whole state is plain Python, so ten thousand requests can be simulated without a model.

One budget of tokens per step, spent in this order: a token for every running request that has nothing else pending,
then chunks of running prompts, then new requests. A chunk that does not reach the end of what is known samples nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mini_engine.attention.allocator import PageAllocator, pages_needed
from mini_engine.config import EngineConfig
from mini_engine.scheduler.budget import GrowthEstimate
from mini_engine.scheduler.policy import Policy
from mini_engine.scheduler.prefix_cache import NullPrefixCache, PrefixCache, PrefixHit
from mini_engine.scheduler.request import FinishReason, Request, RequestState
from mini_engine.scheduler.sharing import SharingLimits, could_share_soon, match_prefix, share_pages


@dataclass(frozen=True)
class ScheduledChunk:
    """``num_tokens`` tokens of ``request`` from position ``start`` on. ``samples``: they reach its newest token.

    Before the step, keys and values of the ``num_copied`` tokens before ``start`` are copied from ``copied_from``.
    ``draft``: tokens that may come next (``drafts.py``); they are not among ``num_tokens``.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    num_copied: int = 0
    copied_from: Request | None = None
    draft: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScheduledBatch:
    """What one step computes, in packing order, and the requests that it preempted."""

    chunks: list[ScheduledChunk]
    preempted: list[Request]

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def sampling(self) -> list[Request]:
        """The requests that get a token in this step, in packing order."""
        return [chunk.request for chunk in self.chunks if chunk.samples]


class Allocator(Protocol):
    """What hands out the pages: L2's ``PageAllocator``, or one that places them for speed."""

    num_pages: int

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""

    def is_free(self, page: int) -> bool:
        """Whether ``page`` has no owner."""

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take ``count`` pages; ``after`` is the last page that their owner has, if it has any. Mutates."""

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. Mutates."""


@dataclass(frozen=True)
class SchedulerLimits:
    """``max_tokens_per_step``: ``None`` is no limit. ``max_steps_waited``: after so many steps a request goes first."""

    max_running_requests: int = 1
    max_tokens_per_step: int | None = None
    preemption: bool = False
    max_steps_waited: int = 256
    sharing: SharingLimits = field(default_factory=SharingLimits)

    @classmethod
    def from_config(cls, config: EngineConfig) -> "SchedulerLimits":
        """Return the limits that ``config`` sets."""
        sharing = SharingLimits(config.wait_for_prefix, config.wait_below_match)
        return cls(
            config.max_running_requests, config.max_tokens_per_step, config.preemption, config.max_steps_waited, sharing
        )


class WaitingHits(Mapping[str, PrefixHit]):
    """What waiting requests find in the prefix cache, looked up when it is asked for: most policies never ask."""

    def __init__(self, waiting: Sequence[Request], cache: PrefixCache) -> None:
        """Look up requests of ``waiting`` in ``cache``."""
        self.requests = {request.request_id: request for request in waiting}
        self.cache = cache

    def __getitem__(self, request_id: str) -> PrefixHit:
        """Look one request up, each time anew: another one's look may have cut a node on its path."""
        return match_prefix(self.requests[request_id], self.cache)

    def __iter__(self) -> Iterator[str]:
        """Go through the ids of the requests."""
        return iter(self.requests)

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self.requests)


def prefix_to_copy(request: Request) -> tuple[Request | None, int]:
    """Return the sibling that has computed most of the common prompt, and how many tokens beyond the request's own.

    The newest token is never among them: the step needs at least one row to sample from.
    """
    running = [s for s in request.siblings if s is not request and s.state is RequestState.RUNNING]
    source = max(running, key=lambda sibling: sibling.num_computed_tokens, default=None)
    if source is None:
        return None, 0
    shared = min(source.num_computed_tokens, request.num_prompt_tokens, request.num_tokens - 1)
    copied = shared - request.num_computed_tokens
    return (source, copied) if copied > 0 else (None, 0)


class Scheduler:
    """Chooses each step's batch. ``add`` and ``abort`` at any time; ``schedule`` and ``update`` in turn."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        limits: SchedulerLimits,
        policy: Policy,
        cache: PrefixCache | None = None,
        allocator: Allocator | None = None,
    ) -> None:
        """Own ``num_pages`` pages of ``page_size`` tokens, which ``allocator`` hands out."""
        self.allocator: Allocator = allocator or PageAllocator(num_pages)
        self.page_size = page_size
        self.limits = limits
        self.policy = policy
        self.cache = cache or NullPrefixCache()
        self.growth = GrowthEstimate(limits.preemption)
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # in the order of admission; a list, because a set has no order

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def num_available(self) -> int:
        """Pages that are free or could be, by evicting from the prefix cache."""
        return self.allocator.num_free + self.cache.num_evictable

    def add(self, request: Request) -> None:
        """Queue a request. Raises as ``check_fits`` does. Mutates."""
        self.check_fits(request)
        self.waiting.append(request)

    def check_fits(self, request: Request) -> None:
        """Raise ``ValueError`` for a request that could never fit into the pool, with the numbers."""
        most = pages_needed(request.max_computed_tokens, self.page_size)
        if most > self.allocator.num_pages:
            raise ValueError(
                f"request {request.request_id} may need {most} pages ({request.num_prompt_tokens} prompt tokens and "
                f"max_new_tokens={request.params.max_new_tokens}, {self.page_size} tokens a page), the pool has "
                f"{self.allocator.num_pages}; shorten it or give the engine a larger pool"
            )

    def schedule(self) -> ScheduledBatch:
        """Choose the next step. Moves requests between waiting and running and gives out pages. Mutates.

        A step that preempts admits no request. Requests that wait afterwards have waited one step more. The estimate
        decays with every step that computes something and preempts no request.
        """
        preempted = self.make_room()
        budget = self.limits.max_tokens_per_step
        chunks: list[ScheduledChunk] = []
        # Stable: requests that decode first, then those with a prompt left, both in the order of admission.
        for request in sorted(self.running, key=lambda r: r.num_pending_tokens > 1):
            budget = self.schedule_chunk(request, budget, chunks)
        if not preempted:  # a preempted request would be admitted again at once
            self.admit(budget, chunks)
        if chunks and not preempted and self.limits.preemption:
            self.growth.decay()
        for request in self.waiting:
            request.steps_waited += 1
        return ScheduledBatch(chunks, preempted)

    def schedule_chunk(self, request: Request, budget: int | None, chunks: list[ScheduledChunk]) -> int | None:
        """Schedule as many of a running request's tokens as ``budget`` allows; return what is left of it. Mutates.

        done | copied from a sibling | this step, noted in ``num_scheduled_tokens`` | later
        """
        source, copied = prefix_to_copy(request) if request.siblings else (None, 0)
        start = request.num_computed_tokens + copied
        pending = request.num_tokens - start
        count = pending if budget is None else min(pending, budget)
        request.num_scheduled_tokens = count
        if count:
            chunks.append(ScheduledChunk(request, start, count, count == pending, copied, source))
        return None if budget is None else budget - count

    def make_room(self) -> list[Request]:
        """Give every running request the pages of its known tokens; preempt until that is possible. Mutates.

        Returns who was preempted. With preemption off it is always possible: admission reserved for the worst case.
        """
        preempted = []
        while sum(map(self.missing_pages, self.running)) > self.num_available:
            victim = min(self.running, key=lambda r: (r.num_output_tokens, -r.num_prompt_tokens, -r.arrival))
            assert len(self.running) > 1, f"request {victim.request_id} alone does not fit, which add() should refuse"
            self.preempt(victim)
            preempted.append(victim)
        for request in self.running:
            if missing := self.missing_pages(request):
                request.pages += self.allocate(missing, after=request.pages[-1])
        if preempted:
            self.growth.raise_after_preemption(self.running)
        return preempted

    def missing_pages(self, request: Request) -> int:
        """Return how many pages a request lacks for the tokens it has; it may hold more, for tokens to come."""
        return max(pages_needed(request.num_tokens, self.page_size) - len(request.pages), 0)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take pages, evicting from the prefix cache what is not free; behind page ``after`` if possible. Mutates."""
        lacking = count - self.allocator.num_free
        if lacking > 0:
            self.allocator.free(self.cache.evict(lacking))
        return self.allocator.allocate(count, after)

    def preempt(self, request: Request) -> None:
        """Send a running request back to wait. Its output stays, its pages go; all is computed again. Mutates.

        Its ``num_preemptions`` counts how often.
        """
        self.running.remove(request)
        self.release(request)
        request.state = RequestState.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.append(request)

    def release(self, request: Request) -> None:
        """Give back a request's pages. Mutates.

        pages   | of the hit: the cache's | own      |
        done    | unlocked                | freed    |
        """
        self.allocator.free(request.pages[len(request.hit.pages) :])
        self.cache.unlock(request.hit)
        request.pages = []
        request.hit = PrefixHit()
        request.num_scheduled_tokens = 0

    def admit(self, budget: int | None, chunks: list[ScheduledChunk]) -> None:
        """Let waiting requests in, the aged by arrival and then the policy's order, until one does not fit. Mutates.

        Stopping there is the head-of-line rule: what is behind waits too, or a large request could wait for ever. Only
        a request whose tokens a running one is just computing is passed over: it will start from what comes out. The
        policy is asked once, and not while no request can come in: an order may look up all that wait.
        """
        if not self.waiting or len(self.running) >= self.limits.max_running_requests or budget == 0:
            return
        hits = WaitingHits(self.waiting, self.cache)
        ordered = self.policy.order([r for r in self.waiting if not self.has_aged(r)], hits)
        for request in [*sorted(filter(self.has_aged, self.waiting), key=lambda r: r.arrival), *ordered]:
            if len(self.running) >= self.limits.max_running_requests or budget == 0:
                return
            # Matched anew: an admission just before may have evicted what was found for the order.
            hit = match_prefix(request, self.cache)
            if could_share_soon(request, hit, self.running, self.page_size, self.limits.sharing):
                continue
            if not self.try_admit(request, hit):
                return
            budget = self.schedule_chunk(request, budget, chunks)

    def has_aged(self, request: Request) -> bool:
        """Whether a request has waited so long that no policy may hold it back."""
        return request.steps_waited >= self.limits.max_steps_waited

    def try_admit(self, request: Request, hit: PrefixHit) -> bool:
        """Start a waiting request if its expected pages are free after those promised to others. Mutates.

        Locking the hit comes first: pages that were evictable until then cannot be counted twice, as cached and free.
        """
        self.cache.lock(hit)
        promised = self.growth.promised_pages(self.running, self.page_size)
        needed = self.growth.expected_pages(request, self.page_size) - len(hit.pages)
        if needed + promised > self.num_available:
            self.cache.unlock(hit)
            return False
        self.cache.record(hit, request.num_tokens)
        self.waiting.remove(request)
        self.running.append(request)
        request.state = RequestState.RUNNING
        request.hit = hit
        request.pages = [*hit.pages, *self.allocate(pages_needed(request.num_tokens, self.page_size) - len(hit.pages))]
        request.num_computed_tokens = len(hit.pages) * self.page_size
        request.check()
        return True

    def update(self, batch: ScheduledBatch, token_ids: Mapping[str, Sequence[int]]) -> None:
        """Note that a step was computed; ``token_ids`` has the new tokens of each request that sampled. Mutates.

        A request that was ended meanwhile (an error in this step) is passed over. Of the others nothing is scheduled
        any more (``num_scheduled_tokens``). After a piece of its prompt a request ``share``s what is computed.
        """
        for chunk in batch.chunks:
            request = chunk.request
            if request.state is not RequestState.RUNNING:
                continue
            request.num_computed_tokens = chunk.start + chunk.num_tokens
            request.num_scheduled_tokens = 0
            if chunk.start < request.num_prompt_tokens:
                self.share(request)
            request.output_ids += token_ids.get(request.request_id, ())
            request.check()

    def share(self, request: Request) -> None:
        """Let the prefix cache have what is computed, and free what it has already. Mutates."""
        self.allocator.free(share_pages(request, self.cache, self.page_size))

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, wherever it is, and free its pages. Ending it twice changes nothing. Mutates.

        What is computed is ``share``d first. After an error it is not, and what was shared before is dropped.
        """
        if request.state is RequestState.FINISHED:
            return
        (self.running if request.state is RequestState.RUNNING else self.waiting).remove(request)
        if reason != "error":
            self.share(request)
        hit = request.hit
        self.release(request)
        if reason == "error":  # no request may start from what it has left
            self.allocator.free(self.cache.drop(hit))
        request.state = RequestState.FINISHED
        request.finish_reason = reason

    def check_pages(self) -> None:
        """Assert that every page is free, cached or owned by one running request: the sum must come out."""
        owned = [page for request in self.running for page in request.pages[len(request.hit.pages) :]]
        assert len(owned) == len(set(owned)), "a page has two owners"
        assert all(not request.pages for request in self.waiting), "a waiting request holds pages"
        held = self.allocator.num_pages - self.allocator.num_free
        known = len(owned) + self.cache.num_pages
        assert known == held, f"{held} pages are not free, {known} are in use or cached: {held - known} have no owner"
