"""L5: what the engine reports of a token, of a step and of a whole request, and the log of the newest steps."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import Any

from torch import Tensor

from mini_engine.constraints import GrammarStats
from mini_engine.sampler.logprobs import TokenLogprob
from mini_engine.scheduler.request import FinishReason, RequestTimes
from mini_engine.scheduler.scheduler import ScheduledBatch, Scheduler

LOGGED_STEPS = 65_536  # the log forgets older ones


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
    ``drafts`` and ``accepted``: the ids that were guessed for a request and computed, and how many of them came.
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
    drafts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)

    @property
    def drafted(self) -> dict[str, int]:
        """How many ids were guessed for each request."""
        return {name: len(draft) for name, draft in self.drafts.items()}

    @property
    def refused(self) -> dict[str, tuple[int, ...]]:
        """The ids that did not come, for each request that has some."""
        rest = {name: draft[self.accepted.get(name, 0) :] for name, draft in self.drafts.items()}
        return {name: ids for name, ids in rest.items() if ids}


class StepLog(deque[StepOutput]):
    """The newest steps that computed something, without logits, which would keep memory alive. Times the step.

    ``listeners``: called with every step that did something, at its end.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin empty; ``clock`` returns seconds."""
        super().__init__(maxlen=LOGGED_STEPS)
        self.clock = clock
        self.num_steps = 0
        self.listeners: list[Callable[[StepOutput], None]] = []

    def begin(self) -> None:
        """Begin a step. Mutates."""
        self.began = self.last = self.clock()
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """Note under ``phase`` the seconds since the last mark. Mutates."""
        now = self.clock()
        self.seconds[phase] = now - self.last
        self.last = now

    def end(
        self,
        batch: ScheduledBatch,
        scheduler: Scheduler,
        deltas: list[Delta],
        forced: dict[str, int],
        compiling: int,
        accepted: dict[str, int],
    ) -> StepOutput:
        """Return what the step did, and keep it if it computed something. Mutates."""
        output = StepOutput(
            number=self.num_steps,
            began=self.began,
            seconds=self.seconds,
            deltas=deltas,
            chunks=[(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in batch.chunks],
            copied={chunk.request.request_id: chunk.num_copied for chunk in batch.chunks if chunk.num_copied},
            preempted=[request.request_id for request in batch.preempted],
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_pages_used=scheduler.allocator.num_pages - scheduler.allocator.num_free,
            num_tokens_held=sum(request.num_computed_tokens for request in scheduler.running),
            num_compiling=compiling,
            forced=forced,
            drafts={chunk.request.request_id: chunk.draft for chunk in batch.chunks if chunk.draft},
            accepted=accepted,
        )
        self.num_steps += 1
        if batch.chunks:
            self.append(replace(output, deltas=[without_logits(delta) for delta in deltas]))
        for listen in self.listeners if batch.chunks or deltas else ():
            listen(output)
        return output


@dataclass
class RequestOutput:
    """A request's answer so far.

    ``is_grammar_complete``: whether the text is known to be valid as a whole; ``None`` without a grammar. As a rule it
    is not where ``finish_reason`` is "length", and never where a stop string or a token of ``stop_token_ids`` cut it.
    ``num_cached_tokens``: tokens of the prompt that the prefix cache or a sibling had when the request began.
    ``num_drafted`` and ``num_accepted``: tokens that were guessed and computed, and how many of them came.
    ``receipt``: what the answer depended on (``receipt.py``); ``None`` where none was asked for.
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
    num_cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    receipt: dict[str, Any] | None = None

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the chosen tokens' log-probabilities, of those that were reported."""
        return sum(entries[0].logprob for entries in self.logprobs)

    def grammar_as_json(self) -> dict[str, Any]:
        """Return what became of the answer's grammar, for JSON; nothing without one.

        ``narrowed`` and ``ignored``: as in ``GrammarStats``, with places of a schema.
        """
        stats = self.grammar_stats
        if stats is None:
            return {}
        lists = {"narrowed": list(stats.narrowed), "ignored": list(stats.ignored)}
        return {"is_grammar_complete": self.is_grammar_complete, "grammar_backend": stats.backend, **lists}


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
