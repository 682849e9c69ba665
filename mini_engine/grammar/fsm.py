"""L7: the teaching backend ``fsm``: a grammar is a state of a byte automaton.

A mask is a function of the state alone, so it is computed when a state is first visited and kept: the same few dozen
states come again and again. Parallel to SGLang's ``outlines_backend.py`` and ``outlines_jump_forward.py``.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mini_engine.grammar.automata.automaton import DEAD, START, Dfa, compile_node
from mini_engine.grammar.automata.syntax import size_of
from mini_engine.grammar.automata.trie import TokenTrie
from mini_engine.grammar.base import (
    GrammarBackend,
    GrammarError,
    GrammarObject,
    GrammarOptions,
    TokenRefusedError,
    TooManyStatesError,
    check_rollback,
)
from mini_engine.grammar.masks import num_words
from mini_engine.grammar.schema.converter import grammar_tree
from mini_engine.grammar.tokens import TokenTable
from mini_engine.sampler.params import GrammarKind

KEPT_BYTES = 64 << 20  # masks that one grammar keeps
ROUGHLY = 2  # times the limit: a larger tree hardly ever fits, and takes seconds
ENDED = -2  # the state behind a stop token
Words = NDArray[np.int32]


class CompiledGrammar:
    """An automaton with a vocabulary, which all copies of a grammar share. Grows with the states that are visited."""

    def __init__(self, dfa: Dfa, table: TokenTable, trie: TokenTrie) -> None:
        """Hold them, and ``trie`` as this automaton sees it; no mask is computed yet."""
        self.dfa = dfa
        self.table = table
        self.trie = trie.merged(dfa.transitions)
        self.stop_ids = sorted(table.stop_ids)
        self.masks: dict[int, Words] = {}
        self.most_masks = max(1, KEPT_BYTES // (4 * num_words(table.vocab_size)))
        self.jumps: dict[int, bytes] = {}

    def mask(self, state: int) -> Words:
        """Return the packed mask of ``state``, int32 [ceil(V / 32)]; its bits past V are 0.

        At most ``most_masks`` are kept.
        """
        mask = self.masks.get(state)
        if mask is None:
            allowed = self.trie.allowed(self.dfa.transitions, state)
            allowed[self.stop_ids] = self.dfa.accepting[state]
            mask = pack_words(allowed)
            if len(self.masks) >= self.most_masks:
                self.masks.clear()  # rare, and what is needed comes back at once
            self.masks[state] = mask
        return mask

    def jump(self, state: int) -> bytes:
        """Return the bytes that follow from ``state`` on without a choice: the compressed edge that begins there.

        An accepting state has the choice to stop there.
        """
        if state not in self.jumps:
            forced = bytearray()
            after = state
            while not self.dfa.accepting[after]:
                (possible,) = np.nonzero(self.dfa.transitions[after] != DEAD)
                if len(possible) != 1:
                    break
                forced.append(possible[0])
                after = int(self.dfa.transitions[after, possible[0]])
            self.jumps[state] = bytes(forced)
        return self.jumps[state]


def pack_words(allowed: NDArray[np.bool_]) -> Words:
    """Pack booleans, True is allowed, into a bitmask row. [V] -> int32 [ceil(V / 32)]."""
    padded = np.zeros(num_words(len(allowed)) * 32, dtype=np.bool_)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.dtype("<i4")).astype(np.int32)


class FsmGrammar(GrammarObject):
    """A path through an automaton: the state after every accepted token, the newest last."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        """Begin at the start of ``compiled``."""
        super().__init__()
        self.compiled = compiled
        self.states = [START]

    def accept_token(self, token_id: int) -> None:
        """Go along the token's bytes; the state after them is appended, or nothing is changed. Mutates."""
        after = self.state_after(token_id)
        if after == DEAD:
            raise TokenRefusedError(f"the grammar does not allow token {token_id} after {len(self.states) - 1} tokens")
        self.states.append(after)

    def state_after(self, token_id: int) -> int:
        """Return the state behind ``token_id``, ``DEAD`` if it may not come."""
        state = self.states[-1]
        compiled = self.compiled
        if state == ENDED or not 0 <= token_id < compiled.table.vocab_size:
            return DEAD
        if token_id in compiled.table.stop_ids:
            return ENDED if compiled.dfa.accepting[state] else DEAD
        spelling = compiled.table.token_bytes[token_id]
        return compiled.dfa.run(spelling, state) if spelling else DEAD  # no bytes would be allowed everywhere

    def rollback(self, count: int) -> None:
        """Forget the last ``count`` states. Mutates."""
        check_rollback(count, len(self.states) - 1)
        del self.states[len(self.states) - count :]

    def is_terminated(self) -> bool:
        """Whether a stop token was accepted."""
        return self.states[-1] == ENDED

    def is_complete(self) -> bool:
        """Whether the state accepts, or did when a stop token came."""
        return self.is_terminated() or bool(self.compiled.dfa.accepting[self.states[-1]])

    def fill_vocab_mask(self, mask: Tensor, row: int) -> None:
        """Copy the state's mask into the row: ``mask`` int32 [N, ceil(V / 32)] on the CPU. After the end all are 0."""
        mask.numpy()[row] = 0 if self.is_terminated() else self.compiled.mask(self.states[-1])

    def copy(self) -> Self:
        """Return a path of its own over the same automaton."""
        twin = type(self)(self.compiled)
        twin.states = list(self.states)
        return twin

    def try_jump_forward(self) -> bytes:
        """Return the bytes that must come next."""
        return b"" if self.is_terminated() else self.compiled.jump(self.states[-1])


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's search for cycles off inside: it would take a third of the time and find next to nothing.

    The sets and lists of an automaton are many and all in use, so each search goes through all of them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class FsmBackend(GrammarBackend):
    """Regular expressions, and JSON schemas that come out regular. Pure Python and NumPy."""

    name = "fsm"
    kinds: Sequence[GrammarKind] = ("json_schema", "regex")

    def __init__(self, table: TokenTable, options: GrammarOptions | None = None) -> None:
        """Build the trie of the vocabulary, once for all grammars."""
        super().__init__(table, options)
        self.trie = TokenTrie(table.token_bytes)

    def build(self, kind: GrammarKind, text: str) -> FsmGrammar:
        """Compile through tree and automaton. Raises ``GrammarError``; too many states name the part that has most."""
        most = self.options.max_states
        try:
            tree = grammar_tree(kind, text, self.options.whitespace)
            if size_of(tree.node) > ROUGHLY * most:  # said at once, and not after seconds
                raise TooManyStatesError(most, tree.largest())
            with no_collection():
                dfa = compile_node(tree.node, most)
        except RecursionError as error:
            raise GrammarError(f"the {kind} is nested too deeply to be compiled; write it flatter") from error
        except TooManyStatesError as error:
            raise TooManyStatesError(most, tree.largest()) from error
        grammar = FsmGrammar(CompiledGrammar(dfa, self.table, self.trie))
        grammar.stats.ignored = tree.ignored
        grammar.stats.narrowed = tree.narrowed
        return grammar
