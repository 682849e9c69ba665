"""L5: what the engine reports: of a token, of a step, of a whole request.

Owns: the values. Must not know: how they come about.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from torch import Tensor

from mini_engine.grammar.base import GrammarStats
from mini_engine.sampler.logprobs import TokenLogprob
from mini_engine.scheduler.request import FinishReason, RequestTimes


@dataclass(frozen=True, slots=True)  # the log keeps one for every token
class Delta:
    """What one step added to one request: a token, the text that can be shown now, and how it ended if it did.

    ``token_id`` is ``None`` when a request ends without one (an abort, or an error). ``logits`` [V] is the row the
    token came from. ``error`` says why where ``finish_reason`` is "error".
    """

    request_id: str
    token_id: int | None
    text: str
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    logits: Tensor | None = None
    error: str | None = None


@dataclass(frozen=True)
class StepOutput:
    """One step of the engine, as the event log keeps it.

    ``chunks``: request id, first position and number of tokens of every piece that was computed. ``copied``: how many
    tokens' keys and values a request took over from a sibling. ``seconds``: the parts "schedule", "forward", "sample"
    and "update" of a step that began at ``began``. ``num_tokens_held``: tokens that the used pages hold.
    ``num_compiling``: requests that wait for a grammar. ``forced``: how many tokens a request's grammar appended.
    """

    number: int
    began: float
    seconds: dict[str, float]
    deltas: list[Delta]
    chunks: list[tuple[str, int, int]]
    copied: dict[str, int]
    preempted: list[str]
    num_running: int
    num_waiting: int
    num_pages_used: int
    num_tokens_held: int
    num_compiling: int = 0
    forced: dict[str, int] = field(default_factory=dict)


class Laps:
    """A stopwatch: seconds from one mark to the next, by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start now."""
        self.clock, self.began, self.seconds = clock, clock(), dict[str, float]()
        self.last = self.began

    def mark(self, name: str) -> None:
        """End the lap ``name`` here, or one more part of it. Mutates."""
        now = self.clock()
        self.seconds[name], self.last = self.seconds.get(name, 0.0) + now - self.last, now


@dataclass
class RequestOutput:
    """A request's answer so far.

    ``is_grammar_complete``: whether the text is known to be valid as a whole; ``None`` without a grammar. As a rule it
    is not where ``finish_reason`` is "length", and never where a stop string or a token of ``stop_token_ids`` cut it.
    """

    request_id: str
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    matched: int | str | None = None
    error: str | None = None
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    times: RequestTimes | None = None
    num_preemptions: int = 0
    grammar_stats: GrammarStats | None = None
    is_grammar_complete: bool | None = None

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the chosen tokens' log-probabilities, of those that were reported."""
        return sum(entries[0].logprob for entries in self.logprobs)


def without_logits(delta: Delta) -> Delta:
    """Return ``delta`` as the log keeps it; ``replace`` would do the same and take five times as long."""
    return Delta(delta.request_id, delta.token_id, delta.text, delta.logprobs, delta.finish_reason, error=delta.error)


def table_as_json(table: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return a list of log-probabilities for JSON, which has no minus infinity: that of a banned token is null."""
    return [{**asdict(entry), "logprob": entry.logprob if isfinite(entry.logprob) else None} for entry in table]


def best(samples: list[RequestOutput], n: int) -> list[RequestOutput]:
    """Return the ``n`` likeliest of ``samples``, in their order; failed ones come last."""
    likeliest = sorted(samples, key=lambda s: (s.error is not None, -s.cumulative_logprob))[:n]
    return [sample for sample in samples if sample in likeliest]
