"""L5: keeps the sampler's state from step to step, and isolates requests whose own code raises.

A history is replayed only for a request that is new or comes back after a preemption.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from operator import is_
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from mini_engine.sampler.batch import SampledRequest, SamplingBatch
from mini_engine.sampler.processors.base import Vocabulary
from mini_engine.sampler.sampler import NO_TOKEN, SamplerOutput

Sampled = TypeVar("Sampled", bound=SampledRequest)


class SampledRows(Generic[Sampled]):
    """The rows of ``batch`` and the requests they belong to."""

    def __init__(self, vocabulary: Vocabulary, device: str = "cpu") -> None:
        """Start without rows."""
        self.vocabulary = vocabulary
        self.device = device
        self.requests: list[Sampled] = []
        self.batch = SamplingBatch([], [], {}, device)

    def sync(self, requests: Sequence[Sampled]) -> None:
        """Make the rows those of ``requests``, in their order. Mutates.

        Rows that stay keep their state. A request that was not here last time is built from its history, which gives
        the same state: that is what makes preemption invisible.
        """
        if len(requests) == len(self.requests) and all(map(is_, requests, self.requests)):
            return
        known = {id(request): row for row, request in enumerate(self.requests)}
        self.keep([known[id(request)] for request in requests if id(request) in known])
        new = [request for request in requests if id(request) not in known]
        if new:
            self.batch.merge(SamplingBatch.from_requests(new, self.vocabulary, self.device))
            self.requests += new
            place = {id(request): row for row, request in enumerate(self.requests)}
            self.keep([place[id(request)] for request in requests])

    def keep(self, rows: Sequence[int]) -> None:
        """Keep ``rows``, in that order. Mutates."""
        if list(rows) != list(range(len(self.requests))):
            self.batch.filter(rows)
            self.requests = [self.requests[row] for row in rows]

    def forget(self, request: Sampled) -> None:
        """Drop a row: it has not seen what was appended to its request's output since the last step. Mutates."""
        self.keep([row for row, other in enumerate(self.requests) if other is not request])

    def clear(self) -> None:
        """Forget all rows; those that come back are built from their histories. Mutates."""
        self.requests, self.batch = [], SamplingBatch([], [], {}, self.device)

    def cumulate(self, token_ids: Sequence[int | None]) -> None:
        """Take the newest token of every row into account; a row with ``None`` is dropped. Mutates."""
        if None in token_ids:
            self.keep([row for row, token in enumerate(token_ids) if token is not None])
        self.batch.cumulate([token for token in token_ids if token is not None])


class HasRows(Protocol):
    """An object that samples rows."""

    rows: SampledRows[Any]


S = TypeVar("S", bound=HasRows)
Sample = Callable[[S, Sequence[Any], Tensor], SamplerOutput]


def isolating(sample: Sample[S]) -> Sample[S]:
    """Wrap ``sample(requests, logits [N, V])``: requests whose own code raises fail alone, the others are sampled.

    A request's own code is its logits processors and its grammar; each suspect is sampled alone to find which one
    raises. Everything else, ``KeyboardInterrupt`` for example, is raised again: no row has changed, so the step can be
    repeated.
    """

    @wraps(sample)
    def isolated(self: S, requests: Sequence[Any], logits: Tensor) -> SamplerOutput:
        try:
            return sample(self, requests, logits)
        except BaseException as error:
            self.rows.clear()  # they may have taken in a token that no request has
            faults = find_faults(self, requests, logits) if isinstance(error, Exception) else {}
            if not faults:
                raise
        rest = [row for row in range(len(requests)) if row not in faults]
        return spread(isolated(self, [requests[row] for row in rest], logits[rest]), rest, faults)

    def find_faults(self: S, requests: Sequence[Any], logits: Tensor) -> dict[int, str]:
        faults = {}
        for row, request in enumerate(requests):
            processors = ", ".join(request.params.logits_processors or ())
            if processors or request.params.grammar is not None:
                try:
                    sample(self, [request], logits[row : row + 1])
                except Exception as error:
                    culprit = f"logits processors ({processors})" if processors else "grammar"
                    faults[row] = f"its {culprit} raised {error!r}"
                self.rows.clear()
        return faults

    return isolated


def spread(sampled: SamplerOutput, rows: Sequence[int], faults: dict[int, str]) -> SamplerOutput:
    """Return what was sampled for ``rows`` as the output of all rows, of which the others have ``faults``."""
    order = {row: index for index, row in enumerate(rows)}
    places = [order.get(row) for row in range(len(rows) + len(faults))]
    return SamplerOutput(
        [NO_TOKEN if place is None else sampled.token_ids[place] for place in places],
        [None if place is None else sampled.logprobs[place] for place in places],
        {rows[place]: reason for place, reason in sampled.errors.items()} | faults,
    )
