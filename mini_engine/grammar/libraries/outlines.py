"""L7: the backend ``outlines``: an adapter of outlines-core, by which constrained decoding became known.

The index is eager: a regular expression becomes an automaton, and for each of its states all tokens are walked before
the first mask is asked for. A step then looks up a list. Parallel to SGLang's ``constrained/outlines_backend.py``, with
its boolean masks (True is banned). JSON schemas go through our own ``schema``: the library's converter ignores
bounds, ``uniqueItems``, ``required`` names without a property, and writes keys without their escapes.

In 0.2.14 an accepting state loses every token that leads to a state which does not accept: after ``foo`` of
``foo(bar)?`` only the end is allowed. So no state that is asked for a mask may accept: a sentinel, U+10FFFF, ends the
expression, and the text is complete where the sentinel may come. Nothing else may share its first byte, F4, or the
model could begin to spell it: the code points from U+100000 on, which are for private use, are never generated.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mini_engine.grammar.automata.syntax import (
    LAST_CODE,
    Chars,
    Choice,
    Concat,
    Node,
    Repeat,
    complement,
    intersect,
    literal,
    to_regex,
)
from mini_engine.grammar.base import GrammarBackend, GrammarOptions
from mini_engine.grammar.libraries.library import LibraryGrammar, compile_error, import_library
from mini_engine.grammar.masks import apply_banned
from mini_engine.grammar.schema.converter import grammar_tree
from mini_engine.grammar.tokens import TokenTable
from mini_engine.sampler.params import GrammarKind

SENTINEL = chr(LAST_CODE)
FIRST_BYTE = SENTINEL.encode()[:1]
OTHERS = complement([(0x100000, LAST_CODE)])  # what is spelled without that byte


class OutlinesGrammar(LibraryGrammar):
    """A path through an index: the state after every token of text, the newest last."""

    def __init__(self, index: Any, table: TokenTable) -> None:
        """Begin at the start of ``index``, whose token ``table.vocab_size`` is the sentinel."""
        super().__init__(table)
        self.index = index
        self.states = [index.get_initial_state()]

    def advance(self, token_id: int) -> bool:
        """Go to the state behind the token, if there is one. Mutates."""
        after = self.index.get_next_state(self.states[-1], token_id)
        if after is not None:
            self.states.append(after)
        return after is not None

    def undo(self, count: int) -> None:
        """Forget the last states. Mutates."""
        del self.states[-count:]

    def completes(self) -> bool:
        """Whether the sentinel may come."""
        return self.index.get_next_state(self.states[-1], self.table.vocab_size) is not None

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: str = "cpu") -> Tensor:
        """Return a mask that bans nothing: bool [N, V], True is banned."""
        return torch.zeros(batch_size, vocab_size, dtype=torch.bool, device=device)

    def fill_vocab_mask(self, mask: Tensor, row: int) -> None:
        """Ban all, then take out what is allowed."""
        mask[row] = True
        if not self.ended:
            self.fill_row(mask, row)

    def fill_row(self, mask: Tensor, row: int) -> None:
        """Take what may come next out of bool [V]."""
        tokens = [token for token in self.index.get_allowed_tokens(self.states[-1]) if token < self.table.vocab_size]
        mask[row, tokens + sorted(self.table.stop_ids) * self.completes()] = False

    def apply_vocab_mask(self, logits: Tensor, mask: Tensor) -> None:
        """Write minus infinity where the mask is True. Mutates ``logits``."""
        apply_banned(logits, mask)

    def fork(self) -> None:
        """Go on along a path of its own over the same index. Mutates."""
        self.states = list(self.states)


class OutlinesBackend(GrammarBackend):
    """Regular expressions, and JSON schemas that come out regular."""

    name = "outlines"
    kinds: Sequence[GrammarKind] = ("json_schema", "regex")

    def __init__(self, table: TokenTable, options: GrammarOptions | None = None) -> None:
        """Hand the vocabulary over. Raises ``ValueError`` if the library is missing."""
        super().__init__(table, options)
        library = import_library("outlines_core")
        tokens: dict[bytes, list[int]] = {}
        for token, spelling in enumerate(table.token_bytes):
            if spelling and FIRST_BYTE not in spelling:
                tokens.setdefault(spelling, []).append(token)
        tokens[SENTINEL.encode()] = [table.vocab_size]
        # The library wants one token that ends a text. It gets an id of its own: several stop ids are ours to handle.
        self.index = partial(library.Index, vocabulary=library.Vocabulary(table.vocab_size + 1, tokens))

    def build(self, kind: GrammarKind, text: str) -> OutlinesGrammar:
        """Compile ``text``. Raises ``GrammarError``."""
        tree = grammar_tree(kind, text, self.options.whitespace)
        try:
            index = self.index(to_regex(Concat((without_first_byte(tree.node), literal(SENTINEL)))))
        except (ValueError, TypeError) as error:
            raise compile_error(kind, error) from error
        grammar = OutlinesGrammar(index, self.table).check_start(kind)
        grammar.stats.ignored = tree.ignored
        grammar.stats.narrowed = tree.narrowed
        return grammar


def without_first_byte(node: Node) -> Node:
    """Return the tree whose sets of characters lack those that begin as the sentinel does."""
    match node:
        case Chars(ranges):
            return Chars(intersect(ranges, OTHERS))
        case Concat(parts):
            return Concat(tuple(map(without_first_byte, parts)))
        case Choice(options):
            return Choice(tuple(map(without_first_byte, options)))
        case Repeat(inner, least, most):
            return Repeat(without_first_byte(inner), least, most)
