"""L7: a grammar for a model that may think first: what is not part of the thought keeps to the grammar.

    tokens    <think> | So | Mila | is | 7 | </think> | {" | name | …
    thinking  1         2    3      4    5   6        |
    inside    not shown to the grammar                | 1    2

The first token is the begin marker, or the grammar has begun. A prompt that ends in the begin marker has opened the
thought already. The markers belong to the thought: the grammar never sees them. A later one is an ordinary token to the
grammar, which refuses it. Parallel to SGLang's ``reasoner_grammar_backend.py``, with an exact rollback.
"""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from mini_engine.grammar.base import GrammarObject, TokenRefusedError, check_rollback
from mini_engine.grammar.masks import set_allowed


@dataclass(frozen=True)
class ThoughtIds:
    """The ids of the tokens that begin and end a thought, and of those that end a text."""

    begin: int
    end: int
    stops: frozenset[int] = frozenset()


class ReasonerGrammar(GrammarObject):
    """Wraps ``inner``. ``num_thinking`` tokens were accepted up to the end of the thought, ``num_inside`` after it."""

    def __init__(self, inner: GrammarObject, ids: ThoughtIds, is_opened: bool) -> None:
        """Begin within a thought if the prompt has opened one (``is_opened``), otherwise where one may come."""
        super().__init__()
        self.inner = inner
        self.ids = ids
        self.stats = inner.stats
        self.is_opened = self.is_thinking = is_opened
        self.num_thinking = self.num_inside = 0

    @property
    def may_begin(self) -> bool:
        """Whether the next token may begin a thought."""
        return not self.is_thinking and self.num_thinking == self.num_inside == 0

    def accept_token(self, token_id: int) -> None:
        """Count a token of the thought, or pass it on. Mutates.

        Raises ``TokenRefusedError`` for a token that ends a text within the thought: there is no answer yet.
        """
        if self.is_thinking and token_id in self.ids.stops:
            raise TokenRefusedError(f"token {token_id} ends the text, and the thought has not ended")
        if self.is_thinking or (self.may_begin and token_id == self.ids.begin):
            self.num_thinking += 1
            self.is_thinking = token_id != self.ids.end
        else:
            self.inner.accept_token(token_id)
            self.num_inside += 1

    def rollback(self, count: int) -> None:
        """Undo tokens of the answer, then of the thought, whose last one was the end marker. Mutates."""
        check_rollback(count, self.num_thinking + self.num_inside)
        inside = min(count, self.num_inside)
        self.inner.rollback(inside)
        self.num_inside -= inside
        if count > inside:
            self.num_thinking -= count - inside
            self.is_thinking = self.is_opened or self.num_thinking > 0

    def is_terminated(self) -> bool:
        """Whether the answer has ended; a thought never does."""
        return not self.is_thinking and self.inner.is_terminated()

    def is_complete(self) -> bool:
        """Whether the answer is valid as it stands; a thought is not an answer."""
        return not self.is_thinking and self.inner.is_complete()

    def fill_vocab_mask(self, mask: Tensor, row: int) -> None:
        """Ban the ends of a text during the thought. Before it, allow its beginning beside the answer's. Mutates."""
        if self.is_thinking:
            set_allowed(mask, row, self.ids.stops, False)
            return
        self.inner.fill_vocab_mask(mask, row)
        if self.may_begin:
            set_allowed(mask, row, [self.ids.begin], True)

    def copy(self) -> Self:
        """Return a wrapper of its own, in the same phase, around a copy of the grammar."""
        twin = type(self)(self.inner.copy(), self.ids, self.is_opened)
        twin.is_thinking = self.is_thinking
        twin.num_thinking = self.num_thinking
        twin.num_inside = self.num_inside
        return twin

    def try_jump_forward(self) -> bytes:
        """Return the bytes that must come next; none during the thought, or where one may begin."""
        return b"" if self.is_thinking or self.may_begin else self.inner.try_jump_forward()

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: str = "cpu") -> Tensor:
        """Return a mask of the inner grammar's form."""
        return self.inner.allocate_vocab_mask(vocab_size, batch_size, device)

    def move_vocab_mask(self, mask: Tensor, device: str) -> Tensor:
        """Return the filled mask on ``device``."""
        return self.inner.move_vocab_mask(mask, device)

    def apply_vocab_mask(self, logits: Tensor, mask: Tensor) -> None:
        """Ban in the inner grammar's form. Mutates ``logits``."""
        self.inner.apply_vocab_mask(logits, mask)
