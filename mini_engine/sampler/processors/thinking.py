"""L4: ``thinking_budget``: a reasoning model may think for so many tokens and is then made to answer.

Owns: that processor and the marker ids of known models. Must not know: other processors, chat templates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mini_engine.sampler.processors.arguments import check_names, count_argument, required_count
from mini_engine.sampler.processors.base import History, LogitsProcessor, Vocabulary
from mini_engine.sampler.processors.registry import register_processor

NAME = "thinking_budget"


@dataclass(frozen=True)
class Markers:
    """The ids that open and close a block of thought, and of the line break that goes before the end (or ``None``)."""

    start: int
    end: int
    newline: int | None = None


MODELS = {"qwen3": Markers(151_667, 151_668, 198), "deepseek-r1": Markers(128_798, 128_799, 201)}


@dataclass(frozen=True)
class ThinkingState:
    """``used``: tokens since the open block began, ``None`` outside of one. ``last``: the newest output token."""

    markers: Markers
    budget: int
    used: int | None = None
    last: int | None = None

    def after(self, token_id: int, generated: bool = True) -> "ThinkingState":
        """Return the state after one more token of the prompt or the output.

        The start marker sets ``used`` to 0. ``generated`` is false for a token of the prompt: it is never ``last``.
        """
        used = self.used
        if token_id == self.markers.start:
            used = 0
        elif token_id == self.markers.end:
            used = None
        elif used is not None:
            used += 1
        return replace(self, used=used, last=token_id if generated else None)


@register_processor(NAME)
class ThinkingBudget(LogitsProcessor[ThinkingState]):
    """Once the open block holds ``budget`` tokens, force a line break and the end marker.

    So a budget of B gives B tokens of thought and then up to two more. A later block gets a fresh budget: what counts
    is the last start marker that no end marker follows, in prompt or output.
    """

    @classmethod
    def start(cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary) -> ThinkingState | None:
        """``arguments``: ``budget``, and ``model`` (a key of ``MODELS``) or the ids ``start``, ``end``, ``newline``."""
        check_names(NAME, arguments, ("budget", "model", "start", "end", "newline"))
        state = ThinkingState(find_markers(arguments, vocabulary), required_count(NAME, arguments, "budget", 0))
        for token in history.prompt_ids:
            state = state.after(token, generated=False)
        for token in history.output_ids:
            state = state.after(token)
        return state

    def advance(self, state: ThinkingState, token_id: int) -> ThinkingState:
        """Follow one output token."""
        return state.after(token_id)

    def apply(self, logits: Tensor) -> None:
        """Leave nothing but the forced token in rows whose budget is spent.

        That is the line break, or the end marker if no line break is known or the output's last token is one.
        """
        for row, state in self.states.items():
            if state.used is not None and state.used >= state.budget:
                broken = state.markers.newline is None or state.last == state.markers.newline
                forced = state.markers.end if broken else state.markers.newline
                logits[row] = -torch.inf
                logits[row, forced] = 0.0  # any finite number: it is the only one


def find_markers(arguments: Mapping[str, Any], vocabulary: Vocabulary) -> Markers:
    """Return the markers that the arguments name. Raises ``ValueError`` if they name none, two, or ids out of range."""
    model = arguments.get("model")
    if model is not None:
        if not isinstance(model, str) or model not in MODELS:
            raise ValueError(f"model of {NAME} is {model!r}; known are {', '.join(MODELS)}; or give start and end")
        if {"start", "end", "newline"} & set(arguments):
            raise ValueError(f"{NAME} was given a model and marker ids; give one or the other")
        markers = MODELS[model]
    else:
        start, end = required_count(NAME, arguments, "start", 0), required_count(NAME, arguments, "end", 0)
        markers = Markers(start, end, count_argument(NAME, arguments, "newline", 0))
    check_range([id_ for id_ in (markers.start, markers.end, markers.newline) if id_ is not None], vocabulary)
    return markers


def check_range(ids: Sequence[int], vocabulary: Vocabulary) -> None:
    """Raise ``ValueError`` for a marker outside the vocabulary."""
    if max(ids) >= vocabulary.size:
        raise ValueError(f"{NAME} names token id {max(ids)}; the vocabulary has the ids 0 to {vocabulary.size - 1}")
