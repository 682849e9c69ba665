"""L5: a sampling batch that follows the requests from step to step, so that no past is replayed without need.

Owns: which request is which row. Must not know: why a request is in a step or not.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from mini_engine.sampler.batch import SampledRequest, SamplingBatch
from mini_engine.sampler.processors.base import Vocabulary

Sampled = TypeVar("Sampled", bound=SampledRequest)


class SampledRows(Generic[Sampled]):
    """The rows of ``batch`` and the requests they belong to."""

    def __init__(self, vocabulary: Vocabulary, device: str = "cpu") -> None:
        """Start without rows."""
        self.vocabulary, self.device = vocabulary, device
        self.requests: list[Sampled] = []
        self.batch = SamplingBatch([], [], {}, device)

    def follow(self, requests: Sequence[Sampled]) -> list[Sampled]:
        """Make the rows those of ``requests``, and return them in the order of the rows. Mutates.

        Rows that stay keep their order and state; a request that was not here last time is built from its history,
        which is the same state: that is what makes preemption invisible.
        """
        wanted = set(map(id, requests))
        keep = [row for row, request in enumerate(self.requests) if id(request) in wanted]
        if len(keep) < len(self.requests):
            self.batch.filter(keep)
            self.requests = [self.requests[row] for row in keep]
        present = set(map(id, self.requests))
        new = [request for request in requests if id(request) not in present]
        if new:
            self.batch.merge(SamplingBatch.from_requests(new, self.vocabulary, self.device))
            self.requests += new
        return self.requests

    def forget(self, request: Sampled) -> None:
        """Drop a row: what was appended to its request's output since the last step, it has not seen. Mutates."""
        self.follow([other for other in self.requests if other is not request])

    def clear(self) -> None:
        """Forget all rows; those that come back are built from their histories. Mutates."""
        self.requests, self.batch = [], SamplingBatch([], [], {}, self.device)

    def cumulate(self, token_ids: Sequence[int | None]) -> None:
        """Take the newest token of every row into account; a row with ``None`` is dropped. Mutates."""
        keep = [row for row, token in enumerate(token_ids) if token is not None]
        if len(keep) < len(self.requests):
            self.batch.filter(keep)
            self.requests = [self.requests[row] for row in keep]
        self.batch.cumulate([token for token in token_ids if token is not None])
