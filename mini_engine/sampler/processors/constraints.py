"""L4: the four constraints a request can set by parameters: least length, bias, allowed ids, bad words.

All four write to a handful of known ids of their own rows, so a step costs as much as the ids they name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mini_engine.sampler.processors.base import History, LogitsProcessor, Vocabulary


@lru_cache(maxsize=1024)  # asked for with every token
def stop_token_ids(own: tuple[int, ...], ignore_eos: bool, vocabulary: Vocabulary) -> frozenset[int]:
    """Return the ids that end a request: its own, and the model's unless they are ignored.

    As in vLLM; in SGLang ``ignore_eos`` switches a request's own stop ids off too.
    """
    return frozenset(own) if ignore_eos else frozenset(own) | vocabulary.eos_token_ids


@dataclass(frozen=True)
class LeastLength:
    """How many tokens must still come before any of ``stop_ids`` may."""

    remaining: int
    stop_ids: list[int]


class MinNewTokens(LogitsProcessor[LeastLength]):
    """Ban every stop token until ``min_new_tokens`` tokens were generated."""

    @classmethod
    def start(cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary) -> LeastLength | None:
        """``arguments``: ``min_new_tokens``, ``stop_token_ids`` and ``ignore_eos``."""
        stop_ids = stop_token_ids(arguments["stop_token_ids"], arguments["ignore_eos"], vocabulary)
        remaining = arguments["min_new_tokens"] - len(history.output_ids)
        return LeastLength(remaining, sorted(stop_ids)) if remaining > 0 and stop_ids else None

    def advance(self, state: LeastLength, token_id: int) -> LeastLength:
        """Count one token."""
        return replace(state, remaining=state.remaining - 1)

    def apply(self, logits: Tensor) -> None:
        """Ban the stop ids of every row that is too short."""
        for row, state in self.states.items():
            if state.remaining > 0:
                logits[row, state.stop_ids] = -torch.inf


@dataclass(frozen=True)
class Bias:
    """Ids and the numbers that are added to their logits."""

    token_ids: Tensor  # [B] int64
    values: Tensor  # [B] float32


class LogitBias(LogitsProcessor[Bias]):
    """Add a constant to the logits of chosen ids."""

    @classmethod
    def start(cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary) -> Bias | None:
        """``arguments``: ``logit_bias``, id -> number."""
        bias = arguments["logit_bias"]
        return Bias(torch.tensor(list(bias)), torch.tensor(list(bias.values()))) if bias else None

    def apply(self, logits: Tensor) -> None:
        """Add the bias; a logit of minus infinity stays what it is."""
        for row, bias in self.states.items():
            logits[row, bias.token_ids.to(logits.device)] += bias.values.to(logits.device)


class AllowedTokens(LogitsProcessor[Tensor]):
    """Ban every id that is not in a list. The state is the list, [A] int64."""

    @classmethod
    def start(cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary) -> Tensor | None:
        """``arguments``: ``allowed_token_ids``."""
        allowed = arguments["allowed_token_ids"]
        return None if allowed is None else torch.tensor(allowed)

    def apply(self, logits: Tensor) -> None:
        """Write minus infinity everywhere and the logits of the allowed ids back."""
        for row, allowed in self.states.items():
            ids = allowed.to(logits.device)
            kept = logits[row, ids]
            logits[row] = -torch.inf
            logits[row, ids] = kept


@dataclass(frozen=True)
class BadWordState:
    """The banned sequences, and the end of the output, as long as the longest of them less one token."""

    words: Sequence[Sequence[int]]
    tail: tuple[int, ...]


class BadWords(LogitsProcessor[BadWordState]):
    """Ban the last token of a bad word where the output already ends in all of its other tokens.

    Only the output counts, as in vLLM (``logits_processor`` of ``bad_words``): a prompt may quote a bad word.
    """

    @classmethod
    def start(cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary) -> BadWordState | None:
        """``arguments``: ``bad_words``, a sequence of id sequences."""
        words = arguments["bad_words"]
        return BadWordState(words, last_tokens(history.output_ids, words)) if words else None

    def advance(self, state: BadWordState, token_id: int) -> BadWordState:
        """Shift the tail by one token."""
        return replace(state, tail=last_tokens((*state.tail, token_id), state.words))

    def apply(self, logits: Tensor) -> None:
        """Ban what would complete a word."""
        for row, state in self.states.items():
            banned = [word[-1] for word in state.words if ends_with(state.tail, word[:-1])]
            logits[row, banned] = -torch.inf


def last_tokens(output_ids: Sequence[int], words: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the end of ``output_ids`` that can matter: one token less than the longest word has."""
    length = max(len(word) for word in words) - 1
    return tuple(output_ids[-length:]) if length else ()


def ends_with(tail: Sequence[int], prefix: Sequence[int]) -> bool:
    """Whether ``tail`` ends in ``prefix``; every tail ends in an empty one, so one-token words are always banned."""
    return not prefix or tuple(tail[-len(prefix) :]) == tuple(prefix)
