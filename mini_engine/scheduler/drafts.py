"""L10: drafts: tokens that may come next, computed together with the newest one, so that a step can give several.

    known tokens      | draft, guessed from them     |
    … the red         | ball and  the  blue          |   one forward pass computes all of these rows
      sampled:   ball   and  the  big                    3 tokens were right: 4 tokens in this step

A drafted token is a row of the step like that of any request that decodes. Its row is sampled only if the token before
it is the one that was drafted, by the same sampler with the same state. So no answer changes. What was guessed wrong
leaves keys and values behind the request's tokens; the tokens that come instead overwrite them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol
from weakref import WeakKeyDictionary

from mini_engine.attention.allocator import pages_needed
from mini_engine.config import EngineConfig
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.request import Request, RequestState
from mini_engine.scheduler.scheduler import ScheduledBatch, ScheduledChunk, Scheduler

LENGTHS = (3, 2, 1)  # of the ends of a text that are looked up
PLAIN = SamplingParams()


class Drafter(Protocol):
    """Guesses how one request goes on. Whatever it says, no answer changes: a wrong guess costs time alone."""

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return up to ``most`` ids that may follow ``tokens``: prompt and output, longer with every call."""


class NoDrafts:
    """Guesses nothing."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return no ids."""
        return []


class NGramDrafts:
    """Goes on as the text did the last time that it had its newest 3, 2 or 1 tokens.

    What followed an n-gram is kept in a dictionary that grows with the text, so a guess takes as long in a long text as
    in a short one.
    """

    def __init__(self) -> None:
        """Know no text."""
        self.follows: dict[tuple[int, ...], int] = {}  # n-gram -> the place behind its last occurrence
        self.num_known = 1  # places below this are in ``follows``; no n-gram ends before place 1

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Copy from the last place that was like this one; where the copy reaches its own beginning, it repeats."""
        for place in range(self.num_known, len(tokens)):
            self.follows |= {tuple(tokens[place - n : place]): place for n in LENGTHS if n <= place}
        self.num_known = max(self.num_known, len(tokens))
        ends = (tuple(tokens[-n:]) for n in LENGTHS)
        start = next((self.follows[end] for end in ends if end in self.follows), None)
        draft: list[int] = []
        for place in range(start, start + most) if start is not None else ():
            draft.append(tokens[place] if place < len(tokens) else draft[place - len(tokens)])
        return draft


DRAFTERS: dict[str, Callable[[], Drafter]] = {"ngram": NGramDrafts}


class Guesses:
    """The drafter of one request, and how long its next draft may be.

    A guess of which all came makes the next draft twice as long, another one half as long. At length 0 one token is
    guessed all the same and not computed, which costs next to nothing. If it comes, the next draft has one token.
    """

    def __init__(self, drafter: Drafter) -> None:
        """Have guessed nothing yet."""
        self.drafter = drafter
        self.tokens: list[int] = []
        self.guess: list[int] = []
        self.length = 0

    def judge(self, came: Sequence[int]) -> None:
        """Set the length of the next draft by the tokens that ``came`` after the last guess. Mutates."""
        if self.guess and came:
            is_right = self.guess[: len(came)] == came[: len(self.guess)]
            self.length = max(1, 2 * self.length) if is_right else self.length // 2

    def next(self, request: Request, most: int) -> list[int]:
        """Return a draft of at most ``most`` ids for ``request``; ``most`` is at least 1. Mutates."""
        came = request.tokens(len(self.tokens), request.num_tokens)
        self.judge(came)
        self.tokens += came
        self.length = min(self.length, most)
        self.guess = list(self.drafter.propose(self.tokens, max(self.length, 1)))
        return self.guess[: self.length]


class Drafting:
    """Fills the steps of a scheduler with drafts: with rows and pages that nobody else needs in this step."""

    def __init__(self, scheduler: Scheduler, make: Callable[[], Drafter], max_rows: int, vocab_size: int) -> None:
        """Draft for the requests of ``scheduler``, each with a drafter that ``make`` returns.

        ``max_rows``: up to so many rows a step is filled. Ids must be below ``vocab_size``.
        """
        self.scheduler = scheduler
        self.make = make
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.guesses: WeakKeyDictionary[Request, Guesses] = WeakKeyDictionary()

    def extend(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Return the step with a draft for each chunk that samples, as far as rows and free pages go. Mutates.

        A request that asks for scores alone has none, but counts. Each in turn may have its share of the rows that are
        left: their number by that of the requests to come, itself included, rounded up.
        """
        limits = (self.max_rows, self.scheduler.limits.max_tokens_per_step or self.max_rows)
        left = min(limits) - batch.num_tokens
        num_left = len(batch.sampling)
        chunks = []
        for chunk in batch.chunks:
            if chunk.samples and not chunk.request.options.score_only:
                chunk = replace(chunk, draft=self.draft(chunk.request, -(-left // num_left)))  # noqa: PLW2901
                left -= len(chunk.draft)
            num_left -= chunk.samples
            chunks.append(chunk)
        return replace(batch, chunks=chunks)

    def draft(self, request: Request, most: int) -> tuple[int, ...]:
        """Return a draft of at most ``most`` tokens, and take pages for it if they are free. Mutates.

        With the token that is sampled anyway, it may reach the last token that the request may have. It ends before an
        id that no token has.
        """
        most = min(most, request.params.max_new_tokens - request.num_output_tokens - 1)
        if most < 1:
            return ()
        guesses = self.guesses.get(request) or self.guesses.setdefault(request, Guesses(self.make()))
        draft = guesses.next(request, most)
        draft = draft[: next((i for i, token in enumerate(draft) if not 0 <= token < self.vocab_size), len(draft))]
        allocator, page_size = self.scheduler.allocator, self.scheduler.page_size
        missing = pages_needed(request.num_tokens + len(draft), page_size) - len(request.pages)
        if (taken := min(missing, allocator.num_free)) > 0:
            request.pages += allocator.allocate(taken, request.pages[-1])
        return tuple(draft[: len(request.pages) * page_size - request.num_tokens])

    def give_back(self, batch: ScheduledBatch) -> None:
        """Free the pages that the drafts of ``batch`` took for tokens that did not come, so that nobody waits for them.

        A request that goes on keeps the pages of what is computed. One that ended has no pages any more. Mutates.
        """
        for request in [chunk.request for chunk in batch.chunks if chunk.draft]:
            kept = pages_needed(request.num_computed_tokens, self.scheduler.page_size)
            self.scheduler.allocator.free(request.pages[kept:])
            del request.pages[kept:]


def make_drafting(
    config: EngineConfig, scheduler: Scheduler, vocab_size: int, own: Callable[[], Drafter] | None = None
) -> Drafting | None:
    """Return what drafts for ``scheduler`` as ``config.drafts`` says, with ``own`` drafters if it is "own".

    Raises ``ValueError`` for "own" without them, and for them without "own".
    """
    if (own is not None) != (config.drafts == "own"):
        raise ValueError(
            f"drafts is {config.drafts!r} and the drafter is {own}; give LLM both drafts='own' and a drafter, or "
            "neither"
        )
    make = own or DRAFTERS.get(config.drafts)
    return None if make is None else Drafting(scheduler, make, config.max_draft_rows, vocab_size)


def with_drafts(batch: ScheduledBatch) -> ScheduledBatch:
    """Return the step with a chunk of one row for each drafted token behind its own chunks, in their order.

    Those of a draft have a new request, whose output goes on with the draft, on the same pages. A step writes all its
    keys and values before it reads any, so the row of a drafted token finds those of the tokens before it.
    """
    rows = []
    for chunk in batch.chunks:
        if chunk.draft:
            own = chunk.request
            output_ids = [*own.output_ids, *chunk.draft]
            ahead = Request(own.request_id, own.prompt_ids, PLAIN, output_ids=output_ids, pages=own.pages)
            rows += [ScheduledChunk(ahead, place, 1, True) for place in range(own.num_tokens, ahead.num_tokens)]
    return replace(batch, chunks=[*batch.chunks, *rows])


def is_confirmed(chunk: ScheduledChunk, place: int) -> bool:
    """Whether the newest token of a chunk's request is the token ``place`` of its draft, and the request goes on."""
    request = chunk.request
    return (
        place < len(chunk.draft)
        and request.state is RequestState.RUNNING
        and request.num_tokens == chunk.start + chunk.num_tokens + place + 1
        and request.output_ids[-1] == chunk.draft[place]
    )


def steps_ahead(batch: ScheduledBatch) -> Iterator[tuple[ScheduledBatch, list[int]]]:
    """Yield the steps that the drafts of ``batch`` save, and which of the drafted rows (``with_drafts``) each needs.

    The first has the requests whose draft's token 0 has come, the second those whose token 1 has come too, and so on.
    The caller samples and updates a step before it asks for the next one. Whatever else comes ends a draft.
    """
    rows = accumulate((len(chunk.draft) for chunk in batch.chunks), initial=0)
    going = list(zip(batch.chunks, rows, strict=False))  # with the row of the draft's next token
    place = 0
    while going := [(chunk, row) for chunk, row in going if is_confirmed(chunk, place)]:
        requests = [chunk.request for chunk, _ in going]
        chunks = [ScheduledChunk(request, request.num_computed_tokens, 1, True) for request in requests]
        yield ScheduledBatch(chunks, []), [row for _, row in going]
        going = [(chunk, row + 1) for chunk, row in going]
        place += 1
