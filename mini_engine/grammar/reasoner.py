"""L7: a grammar for a model that thinks first: nothing is constrained until the thought ends.

Owns: the two phases around a grammar. Must not know: what the grammar is, chat templates.

    tokens    So | Mila | is | 7 | </think> | {" | name | …
    thinking  1    2      3    4   5        |
    inside    not shown to the grammar      | 1    2

The end marker belongs to the thought: the grammar never sees it. One that comes later is an ordinary token to the
grammar, which refuses it. Parallel to SGLang's ``reasoner_grammar_backend.py``, with an exact rollback.
"""

from typing import Self

from torch import Tensor

from mini_engine.grammar.base import GrammarObject, check_rollback


class ReasonerGrammar(GrammarObject):
    """Wraps ``inner``. ``num_thinking`` tokens were accepted up to the end of the thought, ``num_inside`` after it."""

    def __init__(self, inner: GrammarObject, think_end: int) -> None:
        """Begin in the answer; ``maybe_init_reasoning`` moves the beginning into a thought."""
        super().__init__()
        self.inner = inner
        self.think_end = think_end
        self.stats = inner.stats
        self.is_thinking = False
        self.num_thinking = self.num_inside = 0

    def maybe_init_reasoning(self, reasoning: bool) -> None:
        """Begin before the end of a thought, or, if not ``reasoning``, after it. Mutates."""
        assert self.num_thinking == self.num_inside == 0, "tokens were accepted already"
        self.is_thinking = reasoning

    def accept_token(self, token_id: int) -> None:
        """Count a token of the thought, or pass it on. Mutates."""
        if self.is_thinking:
            self.num_thinking += 1
            self.is_thinking = token_id != self.think_end
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
            self.is_thinking = True

    def is_terminated(self) -> bool:
        """Whether the answer has ended; a thought never does."""
        return not self.is_thinking and self.inner.is_terminated()

    def is_complete(self) -> bool:
        """Whether the answer is valid as it stands; a thought is not an answer."""
        return not self.is_thinking and self.inner.is_complete()

    def fill_vocab_mask(self, mask: Tensor, row: int) -> None:
        """Leave the row as it was allocated, banning nothing, during the thought. Mutates the mask."""
        if not self.is_thinking:
            self.inner.fill_vocab_mask(mask, row)

    def copy(self) -> Self:
        """Return a wrapper of its own, in the same phase, around a copy of the grammar."""
        twin = type(self)(self.inner.copy(), self.think_end)
        twin.is_thinking = self.is_thinking
        twin.num_thinking = self.num_thinking
        twin.num_inside = self.num_inside
        return twin

    def try_jump_forward(self) -> bytes:
        """Return the bytes that must come next; none during the thought."""
        return b"" if self.is_thinking else self.inner.try_jump_forward()

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: str = "cpu") -> Tensor:
        """Return a mask of the inner grammar's form."""
        return self.inner.allocate_vocab_mask(vocab_size, batch_size, device)

    def move_vocab_mask(self, mask: Tensor, device: str) -> Tensor:
        """Return the filled mask on ``device``."""
        return self.inner.move_vocab_mask(mask, device)

    def apply_vocab_mask(self, logits: Tensor, mask: Tensor) -> None:
        """Ban in the inner grammar's form. Mutates ``logits``."""
        self.inner.apply_vocab_mask(logits, mask)
