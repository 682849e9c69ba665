"""L5: in which order waiting requests are considered.

A policy only orders; it never drops. The scheduler admits from the front and stops at the first request that does not
fit, so that small requests cannot overtake a large one for ever.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from mini_engine.checks import names_from
from mini_engine.scheduler.prefix_cache import PrefixHit
from mini_engine.scheduler.request import Request

Hits = Mapping[str, PrefixHit]  # by request id
LPM_QUEUE_LIMIT = 128  # beyond it, sorting by match costs more than it saves (SGLang's limit)
AGING_TOKENS_PER_STEP = 16  # shortest-first: waiting one step weighs as much as being 16 tokens shorter


class Policy(Protocol):
    """Orders the waiting requests."""

    def order(self, waiting: Sequence[Request], hits: Hits) -> list[Request]:
        """Return all of ``waiting``, first to be admitted first; ``hits`` is what each finds in the prefix cache."""


class FirstComeFirstServed:
    """By arrival. A preempted request keeps its arrival, so it comes back before later ones."""

    def order(self, waiting: Sequence[Request], hits: Hits) -> list[Request]:
        """Sort by arrival."""
        return sorted(waiting, key=lambda request: request.arrival)


class LongestPrefixMatch:
    """The most cached tokens first, then by arrival; by arrival alone in a long queue."""

    def order(self, waiting: Sequence[Request], hits: Hits) -> list[Request]:
        """Sort by matched pages, then by arrival."""
        if len(waiting) > LPM_QUEUE_LIMIT:
            return FirstComeFirstServed().order(waiting, hits)
        return sorted(waiting, key=lambda request: (-len(hits[request.request_id].pages), request.arrival))


class DepthFirstWeight:
    """Walk the prefix tree depth first, heaviest subtree first, so that a branch is finished while it is cached.

    The weight of a node is the number of waiting requests that have it on their path. Source: SGLang's ``dfs-weight``.
    """

    def order(self, waiting: Sequence[Request], hits: Hits) -> list[Request]:
        """Sort heavier branches first, each to its end, also equal ones; deeper before shallower; then by arrival."""
        for request in waiting:
            hits[request.request_id]  # a look may cut a node in two on another one's path: all of that comes first
        paths = {request.request_id: hits[request.request_id].path for request in waiting}
        weights = Counter(node for path in paths.values() for node in path)

        def rank(request: Request) -> tuple[tuple[int, int], ...]:
            path = paths[request.request_id]
            # One entry per node: heavier first, then older. The end sorts last: below a node before the node itself.
            return (*((-weights[node], node) for node in path), (1, request.arrival))

        return sorted(waiting, key=rank)


class LongestOutputFirst:
    """The largest ``max_new_tokens`` first: long requests start early, so that none runs alone at the end."""

    def order(self, waiting: Sequence[Request], hits: Hits) -> list[Request]:
        """Sort by ``max_new_tokens``, then by arrival."""
        return sorted(waiting, key=lambda request: (-request.params.max_new_tokens, request.arrival))


class Shuffled:
    """In a random order, drawn anew in every step from one seed."""

    def __init__(self, seed: int = 0) -> None:
        """Seed the generator."""
        self.generator = random.Random(seed)

    def order(self, waiting: Sequence[Request], hits: Hits) -> list[Request]:
        """Shuffle."""
        return self.generator.sample(list(waiting), len(waiting))


class ShortestFirst:
    """The fewest pending tokens first, less what it has waited: the best mean wait, and no request waits for ever."""

    def order(self, waiting: Sequence[Request], hits: Hits) -> list[Request]:
        """Sort by pending tokens, aged, then by arrival."""
        return sorted(
            waiting,
            key=lambda r: (r.num_pending_tokens - AGING_TOKENS_PER_STEP * r.steps_waited, r.arrival),
        )


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": FirstComeFirstServed,
    "lpm": LongestPrefixMatch,
    "dfs-weight": DepthFirstWeight,
    "lof": LongestOutputFirst,
    "random": Shuffled,
    "shortest": ShortestFirst,
}
names_from("policy", POLICIES)


def register_policy(name: str, make: Callable[[], Policy]) -> None:
    """Add a policy. Raises ``ValueError`` if the name is taken."""
    if name in POLICIES:
        raise ValueError(f"the policy {name!r} exists already; choose another name")
    POLICIES[name] = make


def make_policy(name: str, seed: int | None = None) -> Policy:
    """Return the policy ``name``; a ``seed`` is for "random".

    Raises ``ValueError`` listing the names that exist, and for a seed that nothing would use.
    """
    if name not in POLICIES:
        raise ValueError(f"there is no policy {name!r}; choose one of {', '.join(POLICIES)}")
    if seed is None:
        return POLICIES[name]()
    if POLICIES[name] is not Shuffled:
        raise ValueError(f"policy_seed is {seed} and the policy {name!r} draws nothing; leave it out")
    return Shuffled(seed)
