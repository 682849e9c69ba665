"""L5: log-probabilities of tokens that were given and not sampled: the prompt's tokens, and forced ones.

Row i of a chunk predicts the token after it, so the last row predicts the first token of the next chunk.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mini_engine.outputs import RequestOutput
from mini_engine.sampler.logprobs import TokenLogprob, token_logprobs
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.request import RequestOptions
from mini_engine.scheduler.scheduler import ScheduledChunk

Head = Callable[[Tensor, None], Tensor]  # hidden states [n, H], all rows of them -> logits [n, V]


def check_scoring(params: SamplingParams, options: RequestOptions) -> None:
    """Raise ``ValueError`` for options that mean nothing beside ``params``."""
    if (start := options.prompt_logprobs_start) and params.prompt_logprobs is None:
        raise ValueError(f"prompt_logprobs_start is {start} without prompt_logprobs; set it too, or leave this out")
    if params.receipt and options.score_only:
        raise ValueError("receipt is True, but a receipt is of an answer's tokens, and a score_only request has none")


def score_prompt(chunk: ScheduledChunk, output: RequestOutput, hidden: Tensor, head: Head) -> None:
    """Add the log-probabilities of the prompt tokens that a chunk's rows ``hidden`` [n, H] predict. Mutates ``output``.

    What was reported before a preemption is not repeated. Tokens before ``prompt_logprobs_start`` have ``None``.
    """
    request = chunk.request
    wanted = request.params.prompt_logprobs
    first = chunk.start
    last = min(chunk.start + chunk.num_tokens, request.num_prompt_tokens - 1)
    if wanted is None or len(output.prompt_logprobs or ()) > last:
        return
    unreported = min(max(request.options.prompt_logprobs_start, 1), request.num_prompt_tokens)
    known = [None] * unreported if output.prompt_logprobs is None else output.prompt_logprobs
    skip = len(known) - 1 - first
    tokens = request.tokens(len(known), last + 1)
    assert skip >= 0, f"rows that predict tokens {len(known)} to {first} were never computed"
    output.prompt_logprobs = [*known, *score(hidden[skip:][: len(tokens)], tokens, wanted, head)]


def score_forced(chunk: ScheduledChunk, output: RequestOutput, hidden: Tensor, head: Head) -> None:
    """Add the log-probabilities of tokens that a constraint forced. ``hidden`` [n, H]. Mutates ``output``.

    They were appended to the output before their rows were computed; the chunk has those rows.
    """
    request = chunk.request
    wanted = request.params.logprobs
    first = request.num_prompt_tokens + len(output.logprobs)
    end = chunk.start + chunk.num_tokens
    # The last row predicts a token that is not known yet.
    tokens = [] if wanted is None else request.tokens(first, end + 1)
    if wanted is not None and first > chunk.start:
        output.logprobs += score(hidden[first - 1 - chunk.start :][: len(tokens)], tokens, wanted, head)


def score(hidden: Tensor, tokens: list[int], wanted: int, head: Head) -> list[list[TokenLogprob]]:
    """Return the report about each of ``tokens``, with ``wanted`` alternatives; ``hidden`` [n, H] predicts them."""
    if not tokens:
        return []
    logits = head(hidden, None)
    ids = torch.tensor(tokens, device=logits.device)
    return token_logprobs(logits.double().log_softmax(-1), ids, [wanted] * len(tokens))
