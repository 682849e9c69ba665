"""What a state has so far: token ids, text, variables, and the calls that are under way.

The prompt of every call is exactly what the calls and constants before it have left, id for id, so the prefix cache has
all of it but what is new. Ids are not spelled anew when text is added, unless the run asks for ``canonical``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mini_engine.lang.backends import Call
from mini_engine.lang.hub import Hub, Work
from mini_engine.outputs import RequestOutput
from mini_engine.prompts import encode_text
from mini_engine.sampler.params import SamplingParams


@dataclass(frozen=True)
class Settings:
    """What holds for a whole run. ``defaults``: sampling parameters of gens that do not say otherwise."""

    defaults: dict[str, Any] = field(default_factory=dict)
    canonical: bool = False
    think: bool = True
    num_api_spec_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check the settings. Raises ``ValueError``."""
        SamplingParams(**self.defaults)
        if self.num_api_spec_tokens is not None and (self.canonical or self.num_api_spec_tokens < 1):
            raise ValueError(
                f"num_api_spec_tokens is {self.num_api_spec_tokens}; it must be at least 1, and without canonical, "
                "which spells anew what was written ahead"
            )


@dataclass(frozen=True)
class Answer:
    """A variable: what was written or chosen, and how.

    ``value`` is the text, or what ``type`` made of it, or the list that a join gathered. ``scores``: a method -> a
    score for each choice. ``logprobs``: the log-probabilities of each choice's tokens.
    """

    value: Any
    output: RequestOutput | None = None
    scores: dict[str, list[float]] = field(default_factory=dict)
    logprobs: list[list[float]] = field(default_factory=list)
    is_joined: bool = False


@dataclass(frozen=True)
class Ahead:
    """Ids that a call wrote beyond what was asked for. ``is_end``: the model ended the text after them."""

    ids: list[int]
    sampling: SamplingParams
    is_end: bool

    @property
    def is_repeatable(self) -> bool:
        """Whether every call of its own would write the same: nothing is drawn, or it is drawn with a seed."""
        return self.sampling.is_greedy or self.sampling.seed is not None

    def after(self, ids: Sequence[int]) -> "Ahead | None":
        """Return what is left after a constant, ``None`` if the model wrote something else."""
        same = len(ids) < len(self.ids) and self.ids[: len(ids)] == list(ids)
        return replace(self, ids=self.ids[len(ids) :]) if same else None


class Context:
    """What is known. Forks copy it, which costs a list of ids."""

    def __init__(self, hub: Hub, settings: Settings) -> None:
        """Begin empty."""
        self.hub = hub
        self.settings = settings
        self.tokenizer = hub.backend.tokenizer
        self.known_ids: list[int] = []
        self.known_text = ""
        self.variables: dict[str, Answer] = {}
        self.own: dict[str, None] = {}  # names that were set here, in order
        self.ahead: Ahead | None = None
        self.calls: list[Call] = []  # of the operation that is carried out

    def prompt(self) -> list[int]:
        """Return a new list of the ids so far."""
        return self.encoded_anew() if self.settings.canonical else list(self.known_ids)

    def encoded_anew(self) -> list[int]:
        """Return the ids of the whole text, with the special tokens before it that are there now."""
        ids = encode_text(self.tokenizer, self.known_text)
        opening = self.hub.opening
        was, has = (own[: len(opening)] == opening for own in (self.known_ids, ids))
        return [*opening, *ids] if was and not has else ids

    def extend(self, text: str, ids: list[int]) -> None:
        """Append text that is known, and its ids. Mutates."""
        self.known_text += text
        self.known_ids += ids
        self.ahead = self.ahead and self.ahead.after(ids)

    def ask(self, *calls: Call) -> Work:
        """Submit calls and wait for all of them. Mutates."""
        self.calls = list(calls)
        for call in calls:
            self.hub.backend.submit(call)
        yield lambda: all(call.is_done for call in calls)

    def set(self, name: str | None, answer: Answer) -> None:
        """Set a variable. Mutates."""
        if name is not None:
            self.variables[name] = answer
            self.own[name] = None
