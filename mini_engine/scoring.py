"""L5: log-probabilities of tokens that were given and not sampled: the prompt's tokens, and forced ones.

Row i of a chunk predicts the token after it, so the last row predicts the first token of the next chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mini_engine.outputs import RequestOutput
from mini_engine.sampler.logprobs import token_logprobs
from mini_engine.sampler.params import SamplingParams
from mini_engine.scheduler.request import RequestOptions
from mini_engine.scheduler.scheduler import ScheduledChunk


@dataclass(frozen=True)
class GivenTokens:
    """Tokens of a request to report at the end of ``entries``, each with ``wanted`` alternatives.

    ``rows``: the packed rows of the step that predict them.
    """

    entries: list[Any]
    token_ids: list[int]
    rows: range
    wanted: int


def check_scoring(params: SamplingParams, options: RequestOptions) -> None:
    """Raise ``ValueError`` for options that mean nothing beside ``params``."""
    if (start := options.prompt_logprobs_start) and params.prompt_logprobs is None:
        raise ValueError(f"prompt_logprobs_start is {start} without prompt_logprobs; set it too, or leave this out")
    if params.receipt and options.score_only:
        raise ValueError("receipt is True, but a receipt is of an answer's tokens, and a score_only request has none")


def given_tokens(chunk: ScheduledChunk, output: RequestOutput, first_row: int) -> list[GivenTokens]:
    """Return what is to be reported of a chunk, whose rows begin with the packed row ``first_row``. Mutates ``output``.

    A prompt token before ``prompt_logprobs_start`` is reported as ``None``.
    """
    request, params = chunk.request, chunk.request.params
    found: list[tuple[list[Any], range, int]] = []
    if params.prompt_logprobs is not None:
        positions = prompt_to_score(chunk, output)
        assert not positions or positions.start > chunk.start, (
            f"rows that predict tokens from {positions.start} on were never computed"
        )
        if output.prompt_logprobs is None:
            output.prompt_logprobs = [None] * positions.start
        found.append((output.prompt_logprobs, positions, params.prompt_logprobs))
    if params.logprobs is not None:
        found.append((output.logprobs, forced_to_score(chunk, output), params.logprobs))
    shift = first_row - chunk.start - 1  # a token is predicted by the row before it
    return [
        GivenTokens(entries, request.tokens(at.start, at.stop), range(at.start + shift, at.stop + shift), wanted)
        for entries, at, wanted in found
        if at
    ]


def prompt_to_score(chunk: ScheduledChunk, output: RequestOutput) -> range:
    """Return the positions of the prompt tokens that the rows of a chunk predict and ``output`` does not report yet.

    What was reported before a preemption is not repeated. Without a report the range begins at
    ``prompt_logprobs_start``, and never with the first token, which no row predicts.
    """
    request = chunk.request
    if output.prompt_logprobs is None:
        first = min(max(request.options.prompt_logprobs_start, 1), request.num_prompt_tokens)
    else:
        first = len(output.prompt_logprobs)
    return range(first, min(chunk.start + chunk.num_tokens + 1, request.num_prompt_tokens))


def forced_to_score(chunk: ScheduledChunk, output: RequestOutput) -> range:
    """Return the positions of the forced tokens that the rows of a chunk predict and ``output`` does not report yet.

    They were appended to the output before their rows were computed. The last row may predict an unknown token.
    """
    request = chunk.request
    first = request.num_prompt_tokens + len(output.logprobs)
    end = min(chunk.start + chunk.num_tokens + 1, request.num_tokens)
    return range(first, end) if first > chunk.start else range(0)


def report(given: Sequence[GivenTokens], logits: Tensor) -> None:
    """Report ``given`` tokens; ``logits`` [R, V] are those of all their rows. Mutates their ``entries``."""
    for one, own in zip(given, logits.split([len(one.rows) for one in given]), strict=True):
        ids = torch.tensor(one.token_ids, device=own.device)
        one.entries.extend(token_logprobs(own.double().log_softmax(-1), ids, [one.wanted] * len(ids)))
