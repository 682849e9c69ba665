"""L4: log-probabilities of chosen tokens, their alternatives and their ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_engine.sampler.filters import largest


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its natural log-probability and its place among all tokens: 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int


def token_logprobs(logprobs: Tensor, token_ids: Tensor, counts: Sequence[int]) -> list[list[TokenLogprob]]:
    """Return, for each row, the chosen token first and then the ``counts[i]`` likeliest: 1 + ``counts[i]`` entries.

    If the chosen token is one of the likeliest, it stands in its list twice.
    ``logprobs`` [R, V], ``token_ids`` [R]; a count of -1 asks for the whole vocabulary. The order, and so the rank, is
    that of the filters: larger first, the lowest id among equals. vLLM gives all equals the worst rank of them, so
    there even a greedy token can have rank 2. Rows are float64: rounded to float32, logits that differ in their last
    bit become equals.
    """
    vocab_size = logprobs.shape[1]
    wanted = [vocab_size if count == -1 else min(count, vocab_size) for count in counts]
    ordered = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)  # ``largest`` does not order minus infinities
    ids = largest(ordered, max([*wanted, 1]))[1]
    values = logprobs.gather(-1, ids)
    chosen = logprobs.gather(-1, token_ids[:, None])  # [R, 1]
    ahead = (logprobs > chosen) | (
        (logprobs == chosen) & (torch.arange(vocab_size, device=logprobs.device) < token_ids[:, None])
    )
    ranks = (ahead.sum(-1) + 1).tolist()
    rows = []
    for row, count in enumerate(wanted):
        pairs = zip(ids[row, :count].tolist(), values[row, :count].tolist(), strict=True)
        first = TokenLogprob(int(token_ids[row]), float(chosen[row]), ranks[row])
        rows.append([first, *(TokenLogprob(token, value, i) for i, (token, value) in enumerate(pairs, start=1))])
    return rows


def prompt_logprobs(logits: Tensor, prompt_ids: Sequence[int], count: int) -> list[list[TokenLogprob] | None]:
    """Return the log-probabilities of a prompt: ``None`` for its first token, which nothing predicts, then lists.

    ``logits`` [T, V] of the prompt's T tokens. Row i predicts token i + 1, so the last row is not used here.
    """
    if len(prompt_ids) == 1:
        return [None]
    following = torch.tensor(prompt_ids[1:], device=logits.device)
    table = logits[:-1].double().log_softmax(-1)
    return [None, *token_logprobs(table, following, [count] * len(following))]
