"""L4: ``disallowed_tokens``: a list of ids that must not come. The smallest example of a processor."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mini_engine.sampler.processors.arguments import check_names, ids_argument
from mini_engine.sampler.processors.base import History, LogitsProcessor, Vocabulary
from mini_engine.sampler.processors.registry import register_processor


@register_processor("disallowed_tokens")
class DisallowedTokens(LogitsProcessor[list[int]]):
    """Ban ids; the state is the list. Unlike SGLang's of the same name, rows may have different lists."""

    @classmethod
    def start(cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary) -> list[int] | None:
        """``arguments``: ``token_ids``."""
        check_names("disallowed_tokens", arguments, ("token_ids",))
        return ids_argument("disallowed_tokens", arguments, "token_ids", vocabulary.size) or None

    def apply(self, logits: Tensor) -> None:
        """Ban the ids."""
        for row, banned in self.states.items():
            logits[row, banned] = -torch.inf
