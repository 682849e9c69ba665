"""L5: how many pages a request will need: an estimate of its length, and the pages promised to running requests."""

import math
from collections.abc import Iterable

from mini_engine.attention.allocator import pages_needed
from mini_engine.scheduler.request import Request

FIRST_RATIO, LEAST_RATIO = 0.7, 0.098  # SGLang: 0.7, and 14 % of it
DECAY_STEPS = 600
CLIP_NEW_TOKENS = 4096  # an estimate never expects more than that, whatever max_new_tokens says
SLACK_TOKENS = 20  # after a preemption, expect that many tokens more than each request has now


class GrowthEstimate:
    """The share of ``max_new_tokens`` that requests are expected to use: falls while all goes well, jumps when not.

    Without preemption nothing may run out, so the share is 1 and stays there.
    """

    def __init__(self, preemption: bool) -> None:
        """Start at ``FIRST_RATIO``, or at 1 for good."""
        self.preemption = preemption
        self.ratio = FIRST_RATIO if preemption else 1.0

    def decay(self) -> None:
        """Expect a little less, after a step without a preemption. Mutates."""
        if self.preemption:
            self.ratio = max(self.ratio - (FIRST_RATIO - LEAST_RATIO) / DECAY_STEPS, LEAST_RATIO)

    def raise_after_preemption(self, running: Iterable[Request]) -> None:
        """Set the ratio by how far the requests that are left have come. Mutates."""
        requests = list(running)
        used = sum(r.num_output_tokens for r in requests) + SLACK_TOKENS * len(requests)
        self.ratio = min(1.0, used / (sum(r.params.max_new_tokens for r in requests) + 1))

    def expected_pages(self, request: Request, page_size: int) -> int:
        """Return the pages that ``request`` is expected to hold at its end; at least those of its tokens now."""
        remaining = request.max_computed_tokens - request.num_tokens
        if self.preemption:
            remaining = math.ceil(min(remaining, CLIP_NEW_TOKENS) * self.ratio)
        return pages_needed(request.num_tokens + max(remaining, 0), page_size)

    def promised_pages(self, running: Iterable[Request], page_size: int) -> int:
        """Return the pages that running requests are expected to take beyond those they hold."""
        return sum(max(self.expected_pages(r, page_size) - len(r.pages), 0) for r in running)
