"""L5: one request while the engine has it: what it is, how far it is and how it ended.

    prompt_ids                        output_ids
    |<------- num_prompt_tokens ---->|<- num_output_tokens ->|
    |<- num_computed_tokens ->|<----- num_pending_tokens --->|
                              |<- num_scheduled_tokens ->|     (this step)

There is no "is prefilling": a request with one pending token is what others call decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.prefix_cache import PrefixHit

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestState(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again; keeps its output, lost its pages
    FINISHED = "finished"


@dataclass
class RequestTimes:
    """When things happened, in seconds of one clock; ``None`` until they do. ``tokens``: one time per output token."""

    added: float
    started: float | None = None
    finished: float | None = None
    tokens: list[float] = field(default_factory=list)

    @property
    def queue_s(self) -> float | None:
        """Seconds from its arrival to its first step."""
        return None if self.started is None else self.started - self.added

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.tokens[0] - self.added if self.tokens else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; ``None`` for fewer than two tokens."""
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None


@dataclass(frozen=True)
class RequestOptions:
    """What a caller asks of the engine beside the sampling parameters.

    ``cache_key``: only requests with the same key share pages of the prefix cache. ``cache_priority``: with
    ``eviction="priority"`` pages of a higher priority stay longer. ``prompt_logprobs_start``: the report about the
    prompt begins with this token, and the prefix cache serves what comes before. ``score_only``: end when the prompt is
    computed, without a token.
    """

    cache_key: str | None = None
    cache_priority: int = 0
    prompt_logprobs_start: int = 0
    score_only: bool = False

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a negative number."""
        if self.cache_priority < 0:
            raise ValueError(f"cache_priority is {self.cache_priority}; the least is 0, and higher ones stay longer")
        if self.prompt_logprobs_start < 0:
            raise ValueError(f"prompt_logprobs_start is {self.prompt_logprobs_start}; the prompt's first token is 0")


NO_OPTIONS = RequestOptions()


@dataclass(eq=False)
class Request:
    """A request. ``arrival`` numbers requests in the order in which they came.

    ``pages`` holds keys and values of the first ``num_computed_tokens`` tokens; the first of them are those of ``hit``
    and belong to the prefix cache. ``steps_waited`` counts the steps that passed it over, before and after preemptions.
    ``matched`` is the token id or string that ended it, ``error`` the text of what went wrong. ``siblings`` are the
    samples of one prompt, itself included: they share a list, and the prompt is computed for the first of them.
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    arrival: int = 0
    times: RequestTimes = field(default_factory=lambda: RequestTimes(added=0.0))
    output_ids: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    pages: list[int] = field(default_factory=list)
    hit: PrefixHit = field(default_factory=PrefixHit)
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    steps_waited: int = 0
    finish_reason: FinishReason | None = None
    matched: int | str | None = None
    error: str | None = None
    siblings: Sequence["Request"] = ()
    options: RequestOptions = NO_OPTIONS

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens without keys and values: at least 1, since the newest token never has them."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_computing_prompt(self) -> bool:
        """Whether it runs and part of its prompt has no keys and values yet."""
        return self.state is RequestState.RUNNING and self.num_computed_tokens < self.num_prompt_tokens

    @property
    def max_computed_tokens(self) -> int:
        """The most keys and values it can ever need: the last token is never fed back."""
        return self.num_prompt_tokens + self.params.max_new_tokens - 1

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return tokens ``start`` … ``stop - 1`` of prompt and output, without joining the two."""
        split = self.num_prompt_tokens
        return [*self.prompt_ids[start:stop], *self.output_ids[max(start - split, 0) : max(stop - split, 0)]]

    def check(self) -> None:
        """Assert the invariant that everything else rests on."""
        assert 0 <= self.num_computed_tokens < self.num_tokens, (
            f"request {self.request_id} has {self.num_computed_tokens} computed of {self.num_tokens} tokens"
        )
