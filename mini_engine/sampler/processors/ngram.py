"""L4: ``no_repeat_ngram``: no sequence of n tokens may come a second time.

SGLang's class for this is ``DeepseekOCRNoRepeatNGramLogitProcessor``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mini_engine.sampler.processors.arguments import check_names, count_argument, ids_argument, required_count
from mini_engine.sampler.processors.base import History, LogitsProcessor, Vocabulary
from mini_engine.sampler.processors.registry import register_processor

NAME = "no_repeat_ngram"


@dataclass(frozen=True)
class NGramState:
    """The newest tokens of prompt and output, as many as the window holds (all, without one), and the rule."""

    tokens: tuple[int, ...]
    size: int
    window: int | None
    whitelist: frozenset[int]


@register_processor(NAME)
class NoRepeatNGram(LogitsProcessor[NGramState]):
    """Ban every token that would complete a sequence of ``ngram_size`` tokens that stands in the window already."""

    @classmethod
    def start(cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary) -> NGramState | None:
        """``arguments``: ``ngram_size``; ``window_size`` (tokens searched, default all); ``whitelist_token_ids``.

        With a size of 1 no token of the window may come again.
        """
        check_names(NAME, arguments, ("ngram_size", "window_size", "whitelist_token_ids"))
        size = required_count(NAME, arguments, "ngram_size", 1)
        window = count_argument(NAME, arguments, "window_size", 1)
        whitelist = ids_argument(NAME, arguments, "whitelist_token_ids", vocabulary.size)
        tokens = (*history.prompt_ids, *history.output_ids)
        return NGramState(newest(tokens, window), size, window, frozenset(whitelist))

    def advance(self, state: NGramState, token_id: int) -> NGramState:
        """Move the window by one token."""
        return replace(state, tokens=newest((*state.tokens, token_id), state.window))

    def apply(self, logits: Tensor) -> None:
        """Ban what would repeat, unless it is whitelisted."""
        for row, state in self.states.items():
            banned = repeats(state.tokens, state.size) - state.whitelist
            logits[row, sorted(banned)] = -torch.inf


def newest(tokens: tuple[int, ...], window: int | None) -> tuple[int, ...]:
    """Return the last ``window`` tokens, all of them without a window."""
    return tokens if window is None else tokens[-window:]


def repeats(tokens: Sequence[int], size: int) -> set[int]:
    """Return the tokens that, appended to ``tokens``, would repeat a sequence of ``size`` tokens found in them.

    With tokens 1 2 3 1 2 and size 3 the open sequence is 1 2, it was followed by 3 before, so 3 is returned.
    """
    open_sequence = tuple(tokens[len(tokens) - size + 1 :]) if size > 1 else ()
    last_start = len(tokens) - size
    return {tokens[i + size - 1] for i in range(last_start + 1) if tuple(tokens[i : i + size - 1]) == open_sequence}
