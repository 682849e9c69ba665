"""L4: the one interface of everything that alters logits before the choice: penalties, bans, biases, custom rules.

SGLang's ``BatchedPenalizerOrchestrator`` and vLLM's ``LogitsProcessor`` (``v1/sample/logits_processor``) solve the
same problem: a batch changes while every row carries a past. The verbs are four: ``apply`` to the logits, ``cumulate``
the new tokens, ``filter`` to the rows that stay, ``merge`` with the rows of another batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

from torch import Tensor

State = TypeVar("State")


@dataclass(frozen=True)
class Vocabulary:
    """What a processor may know about the model: the number of ids and which of them end a sequence."""

    size: int
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for an end-of-sequence id that is not in the vocabulary."""
        wrong = sorted(token for token in self.eos_token_ids if not 0 <= token < self.size)
        if wrong:
            raise ValueError(f"end-of-sequence id {wrong[0]} lies outside the vocabulary, ids 0 to {self.size - 1}")


@dataclass(frozen=True)
class History:
    """The past of one request: what was given and what was generated. A processor's state is a function of it."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


class LogitsProcessor(ABC, Generic[State]):
    """Alters the logits of some rows. ``states`` holds one state per row it acts on; other rows are never touched.

    A subclass says how a state starts (``start``, from a whole history: a request that was preempted comes back with
    its past), how it advances by one token and what it does to the logits.
    """

    is_argmax_invariant: ClassVar[bool] = False  # True: it never changes which logit is largest; greedy rows skip it

    def __init__(self, states: dict[int, State]) -> None:
        """Act on the rows of ``states``."""
        self.states = states

    @classmethod
    @abstractmethod
    def start(cls, history: History, arguments: Mapping[str, Any], vocabulary: Vocabulary) -> State | None:
        """Return the state after ``history``, ``None`` if there is nothing to do for this request.

        Raises ``ValueError``, naming the argument, the limit and the remedy, for arguments that make no sense.
        """

    @abstractmethod
    def apply(self, logits: Tensor) -> None:
        """Alter the rows of ``states`` in ``logits`` [N, V] float32. Mutates ``logits`` and nothing else."""

    @classmethod
    def build(cls, states: dict[int, State], histories: Sequence[History]) -> Self:
        """Make the processor for the rows of ``states``, whose pasts are ``histories``, in the same order."""
        return cls(states)

    def advance(self, state: State, token_id: int) -> State:
        """Return the state after one more output token. The default is for processors without a past."""
        return state

    def cumulate(self, token_ids: Sequence[int]) -> None:
        """Take the newest token of every row of the batch [N] into account. Mutates ``states``."""
        for row, state in self.states.items():
            self.states[row] = self.advance(state, token_ids[row])

    def filter(self, keep: Sequence[int]) -> None:
        """Keep the rows ``keep`` of the batch, in that order: row ``keep[i]`` becomes row i. Mutates ``states``."""
        self.states = {new: self.states[old] for new, old in enumerate(keep) if old in self.states}

    def shift(self, offset: int) -> None:
        """Renumber: row 0 becomes row ``offset``. Mutates ``states``."""
        self.states = {offset + row: state for row, state in self.states.items()}

    def merge(self, other: Self) -> None:
        """Take over the rows of ``other``, renumbered before. Mutates; ``other`` must not be used again."""
        self.states |= other.states
